"""Flat tensors that travel between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def check_size(flat: Tensor, size: int) -> None:
    """Raise ValueError where a tensor is not flat, or not of so many elements."""
    if flat.dim() != 1 or len(flat) != size:
        raise ValueError(
            f"a tensor of shape {tuple(flat.shape)} with sizes for {size} elements: give a flat one of as many"
        )


def bytes_of(flat: Tensor) -> Tensor:
    """Return its memory. An empty tensor, as of an empty NumPy array, may have strides that no view takes."""
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=flat.device)


def target(into: Tensor | None, send: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return ``into`` where it takes elements as ``send`` has, as many as ``sizes`` say; else a new tensor."""
    count = sum(sizes)
    if into is None:
        return torch.empty(count, dtype=send.dtype, device=send.device)
    if into.dim() != 1 or len(into) != count or into.dtype != send.dtype or not into.is_contiguous():
        raise ValueError(
            f"{count} elements of {send.dtype} cannot be received in a tensor of {into.dtype} and shape "
            f"{tuple(into.shape)}: give a flat, contiguous one of the same size and dtype"
        )
    return into
