"""The device memory of a training: one tensor, cut into the arrays of all groups."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from tiercache.backends.base import RowArrays
from tiercache.errors import BudgetError
from tiercache.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercache.backends.base import Layout
    from tiercache.backends.cuda_runtime import CudaRuntime

_ALIGNED_BYTES = 128  # a cache line


def bytes_of(layouts: Sequence[Layout]) -> int:
    """Count fields, two arrays of slots, one of keys and the streams, each aligned to a cache line."""
    return sum(
        sum(_aligned(4 * n.rows * width) for width in n.widths)
        + 2 * _aligned(4 * n.positions) + _aligned(8 * n.positions) + _aligned(8 * n.rows * n.rounded)
        for n in layouts
    )  # fmt: skip


def reserve(runtime: CudaRuntime, layouts: Sequence[Layout], what: str) -> list[RowArrays]:
    """Allocate the arrays of all groups. Raises BudgetError, naming ``what`` needs them, where they do not fit."""
    total, at = bytes_of(layouts), 0
    memory = _allocate(runtime, total)
    if memory is None:
        gc.collect()  # objects that nobody uses any more may hold memory until their cycles are found
        memory = _allocate(runtime, total)
    if memory is None:
        free, whole = runtime.room()
        raise BudgetError(
            f"{what} need {format_bytes(total)} on the {runtime.name}, which has {format_bytes(free)} of "
            f"{format_bytes(whole)} free: cut passes again with a device budget of at most {free} bytes, less what "
            "the dense model and its batches need"
        )

    def cut(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal at
        num_bytes = rows * width * dtype.itemsize
        mine = memory[at : at + num_bytes].view(dtype)
        at += _aligned(num_bytes)
        return mine

    def cut_all(n: Layout) -> RowArrays:
        fields = tuple(cut(n.rows, width, torch.float32).view(n.rows, width) for width in n.widths)
        slots, load_slots = (cut(n.positions, 1, torch.int32) for _ in range(2))
        keys = cut(n.positions, 1, torch.int64)  # of new rows, which are made when all others have departed
        streams = cut(n.rows if n.rounded else 0, 1, torch.uint64)
        return RowArrays(fields, slots, load_slots, keys, keys.view(torch.int32), streams)

    return [cut_all(n) for n in layouts]


def _allocate(runtime: CudaRuntime, num_bytes: int) -> torch.Tensor | None:
    """Return so many bytes, None where the device does not have them."""
    if num_bytes > runtime.room()[0]:
        return None
    try:
        return runtime.tensor((max(num_bytes, 1),), torch.uint8)  # a rank may own no row at all
    except torch.OutOfMemoryError:
        return None


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
