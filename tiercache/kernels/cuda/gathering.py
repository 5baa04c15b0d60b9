"""Lookup without arithmetic on a CUDA device: `kernels.cpu.gathering`, with the same meaning of every argument.

Large arrays are on the device; arrays with one element per feature (bases, limits, entry_starts) are NumPy arrays. Ids
are int32 or int64. Slot -1 means no row and reads as zeros: an id that is not in its table gets it, so that no lookup
reads foreign memory.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tiercache.kernels.arrays import I8
from tiercache.kernels.cuda.launch import Device, Part, launch_parts, struct, view
from tiercache.kernels.cuda.vectors import rows_at
from tiercache.kernels.step import Vectors

_PART = struct("GatherPart", "gathering")
_TASK = 32  # entries


class Mapped(NamedTuple):
    """Ids (E,) of some features, those of feature f from `entry_starts[f]` on, and the slots of their tables.

    Id i of feature f has the slot of local position `bases[f]` + i; one that is bad has -1.
    """

    ids: Any
    bases: I8
    entry_starts: I8
    slot_of_local: Any


class Gathered(NamedTuple):
    """One group's part of `gather`: the row in each slot (E,) is written to `out` (E, D), unless that is None.

    Slots are written first if they come from `mapped`.
    """

    vectors: Vectors
    slots: Any
    out: Any
    mapped: Mapped | None = None


def check_bases(bases: Sequence[int], num_local: int) -> None:
    """Raise ValueError if a feature's table begins outside the local positions."""
    if bases and not 0 <= min(bases) <= max(bases) <= num_local:
        raise ValueError(f"a feature's table begins outside the {num_local} local positions.")


def gather(device: Device, groups: Sequence[Gathered]) -> None:
    """Copy the rows of several groups, which may have different dims, in one launch, or one for each width."""
    launches: dict[str, tuple[list[Part], list[int]]] = {"": ([], []), "_narrow": ([], [])}
    for group in groups:
        vectors, mapped, to, vec, team = rows_at(device, group.vectors), group.mapped, 0, 1, 1
        slots, dim = view(device, "slots", group.slots, np.int32, written=mapped is not None), vectors.dim
        if group.out is not None:
            out = view(device, "out", group.out, np.float32, ndim=2, written=True)
            if out.shape != (slots.size, dim):
                raise ValueError(f"out has shape {out.shape}: expected {slots.size} rows of {dim} elements.")
            to, (vec, team) = out.address, vectors.access(out.address)
        row, (parts, tasks) = (dim, vec, team, vectors.is_half), launches[vectors.suffix]
        features = [(0, 0, 0, 0, 0, slots.size)] if mapped is None else _features(device, mapped, slots.size)
        for ids, local, limit, wide, first, last in features:
            at = slots.address + 4 * first, to and to + 4 * dim * first
            parts.append((vectors.address, ids, local, *at, limit, last - first, wide, *row))
            tasks.append(-(-(last - first) // _TASK))
    for suffix, (parts, tasks) in launches.items():
        launch_parts(device, f"gathering.gather{suffix}", _PART, parts, tasks)


def _features(device: Device, mapped: Mapped, size: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yield for each feature the addresses of its ids and its table's slots, its limit, and its entries."""
    local = view(device, "slot_of_local", mapped.slot_of_local, np.int32)
    seen = view(device, "ids", mapped.ids, np.int32, np.int64)
    bases, starts = mapped.bases.tolist(), mapped.entry_starts.tolist()
    check_bases(bases, local.size)
    if seen.size != size:
        raise ValueError(f"{size} slots cannot hold those of {seen.size} ids.")
    if len(starts) != len(bases) + 1 or starts != sorted(starts) or starts[0] < 0 or starts[-1] > size:
        raise ValueError(f"{len(bases)} features and {size} ids do not fit entry starts {starts}.")
    step = seen.dtype.itemsize
    for base, first, last in zip(bases, starts, starts[1:], strict=False):
        yield seen.address + step * first, local.address + 4 * base, local.size - base, step == 8, first, last
