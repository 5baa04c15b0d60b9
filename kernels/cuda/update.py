"""One optimizer step of the rows of a batch on a CUDA device: as `kernels.cpu.update`.

Legend: S slots, E entries, D dim, N samples, F features, T width of the gradient's rows.

Each row's gradients are summed in batch order; above 256 entries the sum is that of the sums of stretches of 256, in
order, so that many blocks share a hot row. The bits depend on the batch alone, and up to 256 entries a row they are
those of the CPU's kernels.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercache.kernels.arrays import expect
from tiercache.kernels.cpu.optimizers import ADAGRAD, ADAM, ROWWISE, SGD, Rule
from tiercache.kernels.cuda.launch import Device, Part, View, access, given, launch_parts, struct, view
from tiercache.kernels.cuda.rounding import NO_ROUNDING, Rounding
from tiercache.kernels.cuda.vectors import RowsAt, by_width, rows_at

__all__ = ["STRETCH", "Gradients", "Step", "bag_gradients", "one_id_gradients", "update_many"]

STRETCH = 256  # part of the definition of the bits

_PART = struct("UpdatePart", "update")
_SIZE, _TEAM = ((_PART.names or ()).index(name) - 1 for name in ("size", "team"))  # the first task is filled in later
_PAIRS_OF_TASK = 32
_KERNELS = {
    SGD: "update_sgd", ADAGRAD: "update_adagrad", ROWWISE: "update_rowwise_adagrad", ADAM: "update_adam",
}  # fmt: skip


class Gradients(NamedTuple):
    """Where each entry's gradient lies. Make one with `one_id_gradients` or `bag_gradients`."""

    flat: View
    """The gradient of the pooled output, (N, T)."""
    offsets: View
    """Per entry, the place of its first element (the complement for max pooling); empty for one id per sample."""
    scales: View
    """Per entry, the factor of its gradient; empty: 1."""
    argmax: View
    """Per element of the output, the entry that was largest; empty where nothing is max-pooled."""
    cols: NDArray[np.int64]
    """Where there are no offsets: the first column of each feature."""
    cols_there: Any
    """The same on the device."""


_NONE = View(0, (0,), np.dtype(np.int64))
_NO_COLS = np.empty(0, np.int64)


def one_id_gradients(device: Device, gradient: Any, cols: NDArray[np.int64], cols_there: Any = None) -> Gradients:
    """Describe the gradient (N, T) of a lookup of one id a sample, or with N = E and cols = [0] that of `gather`'s.

    cols_there: `cols` on the device; None: they are copied.
    """
    flat, cols = view(device, "gradient", gradient, np.float32, ndim=2), expect("cols", cols, np.int64)
    return Gradients(flat, _NONE, _NONE, _NONE, cols, device.put(cols) if cols_there is None else cols_there)


def bag_gradients(
    device: Device, gradient: Any, entry_offset: Any, entry_scale: Any = None, argmax: Any = None
) -> Gradients:
    """Describe the gradient (N, T) of `pool_bags`' output by what that call wrote."""
    flat = view(device, "gradient", gradient, np.float32, ndim=2)
    offsets = view(device, "entry_offset", entry_offset, np.int64)
    scales = view(device, "entry_scale", entry_scale, np.float32) if given(entry_scale) else _NONE
    if scales.size not in {0, offsets.size}:
        raise ValueError(f"entry_scale has {scales.size} elements for {offsets.size} entries: give one each, or none.")
    largest = view(device, "argmax", argmax, np.int32, ndim=2) if given(argmax) else _NONE
    if largest.size and largest.shape != flat.shape:
        raise ValueError(f"argmax has shape {largest.shape}, the gradient {flat.shape}: they must be equal.")
    return Gradients(flat, offsets, scales, largest, _NO_COLS, None)


class Step(NamedTuple):
    """One group's part of `update_many`. `first` and `second` are the states, None where the rule has none.

    vectors: an array (S, D) of float32, or Vectors; those of 16-bit dtypes are rounded by `rounding`.
    """

    vectors: Any
    first: Any
    second: Any
    pairs: Any
    gradients: Gradients
    rule: Rule
    rounding: Rounding = NO_ROUNDING


class _Rows(NamedTuple):
    """One group's rows and entries."""

    vectors: RowsAt
    states: list[View]
    pairs: View
    padded: int
    """Elements of a row of sums."""

    @property
    def num_sums(self) -> int:
        """Floats of the sums of stretches."""
        return 2 * -(-self.pairs.size // STRETCH) * self.padded


def _rows(device: Device, step: Step) -> _Rows:
    """Return where a group's rows lie. Raises ValueError where something does not fit."""
    vectors = rows_at(device, step.vectors, written=True)
    num_slots, dim = vectors.num_slots, vectors.dim
    if vectors.suffix and step.rounding.streams.size != num_slots:
        raise ValueError(
            f"{num_slots} rows of a 16-bit dtype are rounded by {step.rounding.streams.size} streams: give each."
        )
    widths = {SGD: (0, 0), ADAGRAD: (dim, 0), ROWWISE: (1, 0), ADAM: (dim, dim)}[step.rule.kind]
    states = []
    for name, state, width in zip(
        ("the first state", "the second state"), (step.first, step.second), widths, strict=True
    ):
        seen = view(device, name, state, np.float32, ndim=2, written=True) if width else _NONE
        if width and seen.shape != (num_slots, width):
            raise ValueError(
                f"{name} has shape {seen.shape}: {num_slots} vectors of dim {dim} need {(num_slots, width)}."
            )
        states.append(seen)
    pairs, source = view(device, "pairs", step.pairs, np.uint64), step.gradients
    num_samples, width = source.flat.shape
    if source.offsets.size:
        if source.offsets.size != pairs.size:
            raise ValueError(f"gradients describe {source.offsets.size} entries, but {pairs.size} were sorted.")
    elif num_samples * source.cols.size != pairs.size:
        raise ValueError(
            f"{pairs.size} entries were sorted, but the gradient has {num_samples} samples of {source.cols.size} "
            "features: every sample has one id per feature here."
        )
    elif source.cols.size and not 0 <= source.cols.min() <= source.cols.max() <= width - dim:
        raise ValueError(f"cols must lie in [0, {width - dim}] for rows of {dim} in width {width}.")
    return _Rows(vectors, states, pairs, (dim + 3) // 4 * 4)


def _part(device: Device, step: Step, rows: _Rows, sums: int) -> Part:
    """Return a group's part of a launch; sums: the address of its sums of stretches."""
    vectors, (first, second), source, rule = rows.vectors, rows.states, step.gradients, step.rule
    dim, (num_samples, width) = vectors.dim, source.flat.shape
    fields = [*vectors.wide, *(state.address for state in rows.states if state.size and state.shape[1] == dim)]
    vec, team = access(dim, *fields, sums, narrow=vectors.narrow)
    cols = 0 if source.cols_there is None else view(device, "cols", source.cols_there, np.int64, np.uint8).address
    return (
        vectors.address, first.address, second.address, rows.pairs.address, sums, source.flat.address,
        source.offsets.address, source.scales.address, source.argmax.address, cols, num_samples, width,
        step.rounding.streams.address, step.rounding.key, rows.pairs.size, vectors.num_slots, rows.padded, dim, vec,
        team, vectors.is_half, rule.rate, rule.eps, rule.decay, rule.new1, rule.new2,
    )  # fmt: skip


def update_many(device: Device, steps: Sequence[Step]) -> None:
    """Step the rows of several groups, which may have different dims.

    One launch for each optimizer, two where some of its vectors have 16 bits, and one more.
    """
    found = [(step, _rows(device, step)) for step in steps]
    found = [(step, rows) for step, rows in found if rows.pairs.size]
    *firsts, num_sums = accumulate((rows.num_sums for _, rows in found), initial=0)
    sums = device.empty(num_sums, np.float32)
    begin = view(device, "sums", sums, np.float32, written=True).address
    parts = [_part(device, *one, begin + 4 * first) for one, first in zip(found, firsts, strict=True)]
    tasks = [-(-(2 * -(-part[_SIZE] // STRETCH)) * part[_TEAM] // 32) for part in parts]
    launch_parts(device, "update.sum_stretches", _PART, parts, tasks)
    for kind, kernel in _KERNELS.items():
        mine = [
            (rows.vectors, part, -(-rows.pairs.size // _PAIRS_OF_TASK))
            for (step, rows), part in zip(found, parts, strict=True)
            if step.rule.kind == kind
        ]
        for suffix, some, of_parts in by_width(mine):
            launch_parts(device, f"update.{kernel}{suffix}", _PART, some, of_parts)
