"""Lookup without arithmetic on a CUDA device: `kernels.cpu.gathering`, with the same meaning of every argument.

Large arrays are on the device; those of a feature each (bases, limits, entry_starts) are NumPy arrays. Ids are int32 or
int64. Slot -1 means no row and reads as zeros: an id that is not in its table gets it, so that no lookup reads
foreign memory.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tiercache.kernels.arrays import I8
from tiercache.kernels.cuda.launch import Device, launch_parts, struct, view
from tiercache.kernels.cuda.vectors import by_width, rows_at
from tiercache.kernels.step import Vectors

_GATHER_PART, _MAP_PART = struct("GatherPart", "gathering"), struct("MapPart", "gathering")
_GATHER_TASK, _MAP_TASK = 32, 256  # entries


class Gathered(NamedTuple):
    """One table's part of `gather`: the row in each slot (E,) is written to `out` (E, D)."""

    vectors: Vectors
    slots: Any
    out: Any


class Mapped(NamedTuple):
    """One group's part of `map_slots`: slots (E,) are written; bases and entry_starts are NumPy arrays."""

    ids: Any
    bases: I8
    entry_starts: I8
    slot_of_local: Any
    slots: Any


def check_bases(bases: Sequence[int], num_local: int) -> None:
    """Raise ValueError if a feature's table begins outside the local positions."""
    if bases and not 0 <= min(bases) <= max(bases) <= num_local:
        raise ValueError(f"a feature's table begins outside the {num_local} local positions.")


def gather(device: Device, tables: Sequence[Gathered]) -> None:
    """Copy the rows of several tables, which may have different dims, in one launch, or one for each width."""
    parts = []
    for table in tables:
        vectors = rows_at(device, table.vectors)
        slots = view(device, "slots", table.slots, np.int32)
        out = view(device, "out", table.out, np.float32, ndim=2, written=True)
        dim = vectors.dim
        if out.shape != (slots.size, dim):
            raise ValueError(f"out has shape {out.shape}: {slots.size} rows of {dim} elements were asked for.")
        vec, team = vectors.access(out.address)
        part = vectors.address, slots.address, out.address, slots.size, dim, vec, team, vectors.is_half
        parts.append((vectors, part, -(-slots.size // _GATHER_TASK)))
    for suffix, some, tasks in by_width(parts):
        launch_parts(device, f"gathering.gather{suffix}", _GATHER_PART, some, tasks)


def map_slots(device: Device, groups: Sequence[Mapped]) -> None:
    """Write each entry's slot: that of local position `bases[f]` + id, -1 where the id is bad. One launch for all."""
    parts, tasks = [], []
    for group in groups:
        local = view(device, "slot_of_local", group.slot_of_local, np.int32)
        to = view(device, "slots", group.slots, np.int32, written=True)
        bases, starts, num_local = group.bases.tolist(), group.entry_starts.tolist(), local.size
        check_bases(bases, num_local)
        seen = view(device, "ids", group.ids, np.int32, np.int64)
        if to.size != seen.size:
            raise ValueError(f"{to.size} slots cannot hold those of {seen.size} ids.")
        if len(starts) != len(bases) + 1 or starts != sorted(starts) or starts[0] < 0 or starts[-1] > seen.size:
            raise ValueError(f"{len(bases)} features and {seen.size} ids do not fit entry starts {starts}.")
        at, wide = (seen.address, local.address, to.address), int(seen.dtype == np.int64)
        for base, first, last in zip(bases, starts, starts[1:], strict=False):
            parts.append((*at, base, num_local - base, wide, first, last))
            tasks.append(-(-(last - first) // _MAP_TASK))
    launch_parts(device, "gathering.map_slots", _MAP_PART, parts, tasks)
