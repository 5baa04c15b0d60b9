"""Lookup without arithmetic on a CUDA device: `kernels.cpu.gathering`, with the same meaning of every argument.

Large arrays lie on the device; those of a feature each (bases, limits, entry_starts) are NumPy arrays. Ids are int32 or
int64. Slot -1 stands for no row and reads as zeros: an id that is not in its table gets it, so that no lookup reads
memory of someone else.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercache.kernels.arrays import expect
from tiercache.kernels.cuda.launch import Device, access, launch_parts, struct, view
from tiercache.kernels.cuda.vectors import by_width, rows_at

__all__ = ["Gathered", "Mapped", "gather", "gather_many", "limits_of", "map_slots"]

_GATHER_PART, _MAP_PART = struct("GatherPart", "gathering"), struct("MapPart", "gathering")
_GATHER_TASK, _MAP_TASK = 32, 256  # entries


class Gathered(NamedTuple):
    """One table's part of `gather_many`: as `gather`'s arguments."""

    vectors: Any
    slots: Any
    out: Any


class Mapped(NamedTuple):
    """One group's part of `map_slots`: slots (E,) are written; bases, entry_starts and limits are NumPy arrays."""

    ids: Any
    bases: NDArray[np.int64]
    entry_starts: NDArray[np.int64]
    slot_of_local: Any
    slots: Any
    limits: NDArray[np.int64] | None = None


def limits_of(
    bases: NDArray[np.int64], limits: NDArray[np.int64] | None, num_local: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return bases and limits as they must be; without limits an id may reach to the last local position.

    Raises ValueError where a table would end behind it.
    """
    bases = expect("bases", bases, np.int64)
    limits = num_local - bases if limits is None else expect("limits", limits, np.int64)
    if limits.shape != bases.shape:
        raise ValueError(f"{limits.size} limits do not fit {bases.size} bases: each feature has one of both.")
    if bases.size and (int(bases.min()) < 0 or int(limits.min()) < 0 or int((bases + limits).max()) > num_local):
        raise ValueError(f"a feature's table ends behind the {num_local} local positions.")
    return bases, limits


def gather(device: Device, vectors: Any, slots: Any, out: Any) -> None:
    """Write the row in each slot (E,) of `vectors`, an array (S, D) of float32 or Vectors, to `out` (E, D)."""
    gather_many(device, [Gathered(vectors, slots, out)])


def gather_many(device: Device, tables: Sequence[Gathered]) -> None:
    """Do `gather` for several tables, which may have different dims, in one launch, or one for each width."""
    parts = []
    for table in tables:
        vectors = rows_at(device, table.vectors)
        slots = view(device, "slots", table.slots, np.int32)
        out = view(device, "out", table.out, np.float32, ndim=2, written=True)
        dim = vectors.dim
        if out.shape != (slots.size, dim):
            raise ValueError(f"out has shape {out.shape}: {slots.size} rows of {dim} elements were asked for.")
        vec, team = access(dim, *vectors.wide, out.address, narrow=vectors.narrow)
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
        bases, limits = limits_of(group.bases, group.limits, local.size)
        seen = view(device, "ids", group.ids, np.int32, np.int64)
        if to.size != seen.size:
            raise ValueError(f"{to.size} slots cannot hold those of {seen.size} ids.")
        starts = expect("entry_starts", group.entry_starts, np.int64)
        if starts.size != bases.size + 1 or (np.diff(starts) < 0).any() or starts[0] < 0 or starts[-1] > seen.size:
            raise ValueError(f"{bases.size} features and {seen.size} ids do not fit entry starts {starts.tolist()}.")
        columns = (array.tolist() for array in (bases, limits, starts[:-1], starts[1:]))
        wide = int(seen.dtype == np.int64)
        for base, limit, first, last in zip(*columns, strict=True):
            parts.append((seen.address, local.address, to.address, base, limit, wide, first, last))
            tasks.append(-(-(last - first) // _MAP_TASK))
    launch_parts(device, "gathering.map_slots", _MAP_PART, parts, tasks)
