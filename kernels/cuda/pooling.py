"""Lookup with pooling on a CUDA device: `kernels.cpu.pooling`, with the same meaning of every argument.

Legend and promises as in `cuda_gathering`. Bits are those of the CPU's kernels: sums go over the entries in order.
`pool_many` pools all groups of a lookup at once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercache.kernels.arrays import expect, same_length
from tiercache.kernels.cuda.gathering import (
    IDS,
    gather,
    gather_many,
    limits_of,
    map_slots,
    view_ids,
)
from tiercache.kernels.cuda.launch import Device, View, access, given, launch_parts, part_struct, view
from tiercache.kernels.cuda.vectors import RowsAt, by_width, rows_at

__all__ = [
    "MAX",
    "MEAN",
    "SUM",
    "Bags",
    "gather",
    "gather_many",
    "map_slots",
    "pool_many",
    "weight_gradient",
]

SUM, MEAN, MAX = range(3)

POOL_PART = part_struct(
    ("vectors", "p"), *IDS, ("offsets", "p"), ("weights", "p"), ("out", "p"), ("argmax", "p"), ("entry_offset", "p"),
    ("entry_scale", "p"), ("first_entry", "l"), ("num_samples", "l"), ("width", "l"), ("col", "l"),
    ("dim", "i"), ("vec", "i"), ("team", "i"), ("mode", "i"), ("is_half", "i"), ("unused", "i"),
)  # fmt: skip
_SAMPLES_OF_TASK = 32


class Bags(NamedTuple):
    """One group's part of `pool_many`: as the arguments of `pool_bags`, or of `pool_one` where `offsets` is None.

    `bases`, `modes`, `cols` and `limits` are NumPy arrays of an element a feature; the others lie on the device.
    """

    vectors: Any
    slot_of_local: Any
    ids: Any
    bases: NDArray[np.int64]
    cols: NDArray[np.int64]
    slots: Any
    offsets: Any = None
    weights: Any = None
    modes: NDArray[np.int8] | None = None
    argmax: Any = None
    entry_offset: Any = None
    entry_scale: Any = None
    limits: NDArray[np.int64] | None = None


def _columns(cols: NDArray[np.int64], dim: int, width: int) -> NDArray[np.int64]:
    cols = expect("cols", cols, np.int64)
    if cols.size and not 0 <= cols.min() <= cols.max() <= width - dim:
        raise ValueError(
            f"cols must lie in [0, {width - dim}]: rows have {dim} elements and the output {width} columns."
        )
    return cols


def _optional(
    device: Device, name: str, array: Any, dtype: Any, shape: tuple[int, ...], *, written: bool = False
) -> int:
    """Return the address of an array that may be missing: 0 then."""
    if not given(array):
        return 0
    seen = view(device, name, array, dtype, len(shape), written=written)
    if seen.shape != shape:
        raise ValueError(f"{name} has shape {seen.shape}, and {shape} is needed.")
    return seen.address


def _group_parts(device: Device, group: Bags, vectors: RowsAt, out: View) -> list[tuple[Any, ...]]:
    local = view(device, "slot_of_local", group.slot_of_local, np.int32)
    ids, wide = view_ids(device, group.ids)
    slots = view(device, "slots", group.slots, np.int32, written=True)
    (num_samples, width), dim = out.shape, vectors.dim
    cols = _columns(group.cols, dim, width)
    bases, limits = limits_of(group.bases, group.limits, local.size)
    num_features = same_length(bases=bases, cols=cols)
    modes = np.zeros(num_features, np.int8) if group.modes is None else expect("modes", group.modes, np.int8)
    same_length(bases=bases, modes=modes)
    if slots.size != ids.size:
        raise ValueError(f"slots has {slots.size} elements for {ids.size} ids.")
    weights = argmax = entry_offset = entry_scale = offsets = 0
    if group.offsets is None:
        if ids.size != num_features * num_samples:
            raise ValueError(
                f"{ids.size} ids do not make one id for each of {num_samples} samples and {num_features} features."
            )
    else:
        offsets = _optional(device, "offsets", group.offsets, np.int64, (num_features * num_samples + 1,))
        weights = _optional(device, "weights", group.weights, np.float32, (ids.size,))
        argmax = _optional(device, "argmax", group.argmax, np.int32, out.shape, written=True)
        entry_offset = _optional(device, "entry_offset", group.entry_offset, np.int64, (ids.size,), written=True)
        entry_scale = _optional(device, "entry_scale", group.entry_scale, np.float32, (ids.size,), written=True)
        needs_scale = bool(ids.size) and (weights != 0 or bool(np.any(modes == MEAN)))
        if (np.any(modes == MAX) and not argmax and num_samples) or (needs_scale and not entry_scale):
            raise ValueError("max pooling needs argmax like out; weights and means need an entry_scale for each id.")
        if ids.size and not entry_offset:
            raise ValueError(f"entry_offset has 0 elements for {ids.size} ids.")
    parts = []
    for f in range(num_features):
        first = out.address + 4 * int(cols[f])
        vec, team = access(dim, *vectors.wide, first, columns=width, narrow=vectors.narrow)
        bags = offsets + 8 * f * num_samples if offsets else 0
        parts.append(
            (vectors.address, ids.address, local.address, slots.address, bases[f], limits[f], int(wide), bags,
             weights, out.address, argmax if modes[f] == MAX else 0, entry_offset, entry_scale, f * num_samples,
             num_samples, width, cols[f], dim, vec, team, modes[f], vectors.is_half, 0)
        )  # fmt: skip
    return parts


def pool_many(device: Device, groups: Sequence[Bags], out: Any) -> None:
    """Pool several groups, which may have different dims, into their columns of `out` (N, T), in one launch.

    One for each width of vectors. Offsets are not checked: they must rise from 0 to the number of ids.
    """
    to = view(device, "out", out, np.float32, 2, written=True)
    tasks, parts = -(-to.shape[0] // _SAMPLES_OF_TASK), []
    for group in groups:
        vectors = rows_at(device, group.vectors)
        parts += [(vectors, part, tasks) for part in _group_parts(device, group, vectors, to)]
    for suffix, some, counts in by_width(parts):
        launch_parts(device, f"pooling.pool{suffix}", POOL_PART, some, counts)


def weight_gradient(
    device: Device,
    vectors: Any,
    slots: Any,
    offsets: Any,
    modes: NDArray[np.int8],
    cols: NDArray[np.int64],
    gradient: Any,
    out: Any,
) -> None:
    """Write the gradient of each entry's weight to `out` (E,): row times gradient, over the ids of the bag for MEAN.

    Call it before the step. Not for MAX features: what is written for them means nothing.
    """
    rows, taken = rows_at(device, vectors), view(device, "slots", slots, np.int32)
    grad, to = view(device, "gradient", gradient, np.float32, 2), view(device, "out", out, np.float32, written=True)
    (num_samples, width), dim = grad.shape, rows.dim
    cols, modes = _columns(cols, dim, width), expect("modes", modes, np.int8)
    num_features = same_length(modes=modes, cols=cols)
    if taken.size != to.size:
        raise ValueError(f"{taken.size} slots and {to.size} gradients of weights: give one each.")
    bags = _optional(device, "offsets", offsets, np.int64, (num_features * num_samples + 1,))
    parts = []
    for f in range(num_features):
        vec, team = access(dim, *rows.wide, grad.address + 4 * int(cols[f]), columns=width, narrow=rows.narrow)
        parts.append(
            (rows.address, 0, 0, taken.address, 0, 0, 0, bags + 8 * f * num_samples, 0, grad.address, 0, 0,
             to.address, 0, num_samples, width, cols[f], dim, vec, team, modes[f], rows.is_half, 0)
        )  # fmt: skip
    tasks = [-(-num_samples // _SAMPLES_OF_TASK)] * num_features
    launch_parts(device, f"pooling.weight_gradient{rows.suffix}", POOL_PART, parts, tasks)
