"""Clipping by the norm of all gradients: those of rows and those of dense parameters, as of one model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tiercache.backends.base import Backend
    from tiercache.store.table import Group
    from tiercache.training.arrival import Arrival
    from tiercache.values.lookups import SavedGradient

_EPS = 1e-6
"""As torch.nn.utils.clip_grad_norm_ adds to the norm."""


def squared_norm(
    groups: Sequence[Group], pending_G: Sequence[Sequence[SavedGradient]], backend: Backend
) -> torch.Tensor:
    """Return the sum of squares of row gradients, float64 0-dim: duplicates of a row are added before."""
    total = torch.zeros((), dtype=torch.float64, device=backend.device)
    for group, pending in zip(groups, pending_G, strict=True):
        if not pending:
            continue
        slots = [backend.tensor(one.slots) for one in pending]
        rows, number = torch.unique(torch.cat(slots), return_inverse=True)
        numbers = torch.split(number.to(torch.int32), [one.numel() for one in slots])
        named = [
            replace(one, slots=backend.array(mine), sorted=None) for one, mine in zip(pending, numbers, strict=True)
        ]
        sums = backend.empty((rows.numel(), group.dim), np.float32)
        backend.sum(named, 1.0, sums)
        total += backend.tensor(sums).double().square().sum()
    return total


def clip(
    parameters: Iterable[torch.Tensor], row_squares: torch.Tensor, arrivals: Sequence[Arrival], max_norm: float,
    *, error_if_nonfinite: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Multiply the gradients of ``parameters``, and those of outputs in ``arrivals``, so that their norm is one given.

    parameters: without anchors. row_squares: of the rows that the gradients of ``arrivals`` are of. Returns the norm
    before, float32 0-dim; gradients of a smaller norm stay as they are. As `torch.nn.utils.clip_grad_norm_` with the
    2-norm. Raises RuntimeError for a norm that is not finite where that is asked for.
    """
    grads = [one.grad.detach() for one in parameters if one.grad is not None]
    squares = [_squares(grad).to(row_squares.device) for grad in grads]
    norm = torch.stack([row_squares, *squares]).sum().sqrt().float()
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of gradients is {float(norm)}, and cannot be clipped: skip this step, or give "
            "error_if_nonfinite=False"
        )
    factor = (max_norm / (norm + _EPS)).clamp(max=1.0)
    grads += [one.gradient for one in arrivals if one.gradient is not None]
    for grad in grads:
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        local.mul_(factor.to(local.device))
    return norm


def _squares(grad: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a gradient, of a DTensor that of all its parts."""
    found = torch.linalg.vector_norm(grad, dtype=torch.float64)
    whole: torch.Tensor = found.full_tensor() if hasattr(found, "full_tensor") else found
    return whole.square()
