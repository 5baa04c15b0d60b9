"""Lookup without arithmetic on a CUDA device: `gathering` with the same meaning of every argument.

Slot -1 stands for no row: it reads as zeros.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tiercache.kernels.launch import Device, access, launch_parts, part_struct, view

__all__ = ["Gathered", "gather", "gather_many"]

GATHER_PART = part_struct(
    ("vectors", "p"), ("slots", "p"), ("out", "p"), ("entries", "l"),
    ("dim", "i"), ("vec", "i"), ("team", "i"), ("unused", "i"),
)  # fmt: skip
_ENTRIES_OF_TASK = 32


class Gathered(NamedTuple):
    """One table's part of `gather_many`: as `gather`'s arguments."""

    vectors: Any
    slots: Any
    out: Any


def gather(device: Device, vectors: Any, slots: Any, out: Any) -> None:
    """Write the row in each slot (E,) of `vectors` (S, D) to `out` (E, D)."""
    gather_many(device, [Gathered(vectors, slots, out)])


def gather_many(device: Device, tables: Sequence[Gathered]) -> None:
    """Do `gather` for several tables, which may have different dims, in one launch."""
    parts, tasks = [], []
    for table in tables:
        vectors = view(device, "vectors", table.vectors, np.float32, 2)
        slots = view(device, "slots", table.slots, np.int32)
        out = view(device, "out", table.out, np.float32, 2, written=True)
        dim = vectors.shape[1]
        if out.shape != (slots.size, dim):
            raise ValueError(f"out has shape {out.shape}: {slots.size} rows of {dim} elements were asked for.")
        vec, team = access(dim, vectors.address, out.address)
        parts.append((vectors.address, slots.address, out.address, slots.size, dim, vec, team, 0))
        tasks.append(-(-slots.size // _ENTRIES_OF_TASK))
    launch_parts(device, "gathering.gather", GATHER_PART, parts, tasks)
