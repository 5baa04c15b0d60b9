"""Packing straight into pinned host memory and unpacking from it, against the link's own copies. GPU only.

Both as a switch does them: with few blocks, and one beside the other.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.kernel_cases import PIECE_BYTES

if TYPE_CHECKING:
    from benchmarks.kernel_batch import Batch
    from benchmarks.kernel_machines import CudaMachine

__all__ = ["over_link"]


def over_link(machine: CudaMachine, batch: Batch, dim: int) -> dict[str, Any]:
    """Return times of each way and of both at once, and their shares of copies of as many bytes, one at a time."""
    from tiercache.kernels.pieces import Memory

    samples, moved = batch.size.samples, batch.moved
    vectors = machine.place(np.full((batch.size.num_slots, dim), 0.01, np.float32))
    num_floats = moved * dim
    staging = machine.empty((num_floats,), np.float32)
    rows = PIECE_BYTES // (4 * dim)
    first_row = np.append(np.arange(0, moved, rows), moved)
    memory, pieces = {}, {}
    for way in ("to_host", "from_host"):
        memory[way], pieces[way] = machine.pinned(4 * num_floats), machine.kernels.pieces(dim)
        there = Memory(memory[way].ptr, num_floats, memory[way])
        pieces[way].add(0, np.diff(first_row), first_row[:-1] * dim, there)

    def pack() -> None:
        machine.kernels.pack((vectors,), batch.slot_of_local, batch.order, pieces["to_host"], over_link=True)

    def unpack() -> None:
        machine.kernels.unpack((vectors,), batch.order, pieces["from_host"], over_link=True)

    record: dict[str, Any] = {}
    copies = 0.0
    for way, call in (("to_host", pack), ("from_host", unpack)):
        copied = machine.times(partial(machine.copy_over_link, memory[way], staging, way), samples).seconds
        seconds = machine.times(call, samples).seconds
        copies += copied
        record |= {
            f"ms_rows_{way}_{dim}": seconds * 1e3,
            f"link_bytes_per_second_{way}_{dim}": 4 * num_floats / copied,
            f"link_share_rows_{way}_{dim}": copied / seconds,
        }
    seconds = machine.times(partial(machine.beside, pack, unpack), samples).seconds
    return record | {
        f"ms_rows_both_ways_{dim}": seconds * 1e3,
        f"link_share_rows_both_ways_{dim}": copies / seconds,
    }
