"""Packing straight into pinned host memory and unpacking from it, against the link's own copies. GPU only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.kernel_cases import PIECE_BYTES

if TYPE_CHECKING:
    from benchmarks.kernel_batch import Batch
    from benchmarks.kernel_machines import CudaMachine

__all__ = ["over_link"]


def over_link(machine: CudaMachine, batch: Batch, dim: int) -> dict[str, Any]:
    """Return times of both ways, and their shares of a copy of as many bytes the same way."""
    from tiercache.kernels.cuda_rows import Memory

    samples, moved = batch.size.samples, batch.moved
    vectors = machine.place(np.full((batch.size.num_slots, dim), 0.01, np.float32))
    num_floats = moved * dim
    pinned, staging = machine.pinned(4 * num_floats), machine.empty((num_floats,), np.float32)
    rows = PIECE_BYTES // (4 * dim)
    first_row = np.append(np.arange(0, moved, rows), moved)
    pieces = machine.call("rows", "Pieces", dim)
    pieces.add(0, np.diff(first_row), first_row[:-1] * dim, Memory(pinned.ptr, num_floats, pinned))
    calls = {
        "to_host": lambda: machine.call("rows", "pack", (vectors,), batch.slot_of_local, batch.order, pieces),
        "from_host": lambda: machine.call("rows", "unpack", (vectors,), batch.order, pieces),
    }
    record: dict[str, Any] = {}
    for way, call in calls.items():
        copied = machine.times(lambda way=way: machine.copy_over_link(pinned, staging, way), samples).seconds  # type: ignore[misc]
        seconds = machine.times(call, samples).seconds
        record |= {
            f"ms_rows_{way}_{dim}": seconds * 1e3,
            f"link_bytes_per_second_{way}_{dim}": 4 * num_floats / copied,
            f"link_share_rows_{way}_{dim}": copied / seconds,
        }
    return record
