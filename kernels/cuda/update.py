"""One optimizer step of the rows of a batch on a CUDA device: as `kernels.cpu.update`.

Legend: S slots, E entries, D dim, N samples, F features, T width of the gradient's rows.

Each row's gradients are summed in batch order; above 256 entries the sum is that of the sums of stretches of 256, in
order, so that many blocks share a hot row. The bits depend on the batch alone, and up to 256 entries a row they are
those of the CPU's kernels.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercache.kernels.arrays import expect
from tiercache.kernels.cpu.optimizers import ADAGRAD, ADAM, ROWWISE, SGD, Rule
from tiercache.kernels.cuda.launch import Device, View, access, given, launch_parts, part_struct, view
from tiercache.kernels.cuda.rounding import NO_ROUNDING, Rounding
from tiercache.kernels.cuda.vectors import RowsAt, by_width, rows_at

__all__ = [
    "STRETCH",
    "Gradients",
    "Step",
    "UpdateBuffers",
    "bag_gradients",
    "one_id_gradients",
    "update_many",
]

STRETCH = 256  # part of the definition of the bits

UPDATE_PART = part_struct(
    ("vectors", "p"), ("first", "p"), ("second", "p"), ("pairs", "p"), ("sums", "p"), ("flat", "p"), ("offsets", "p"),
    ("scales", "p"), ("argmax", "p"), ("cols", "p"), ("num_samples", "l"), ("width", "l"), ("streams", "p"),
    ("step", "p"), ("size", "l"), ("num_slots", "l"), ("padded", "l"), ("dim", "i"), ("vec", "i"), ("team", "i"),
    ("is_half", "i"), ("rate", "f"), ("eps", "f"), ("decay", "f"), ("new1", "f"), ("new2", "f"), ("unused", "i"),
)  # fmt: skip
_TEAM = UPDATE_PART.names.index("team") - 1 if UPDATE_PART.names else 0  # the first task is filled in later
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


_NONE = View(0, (0,), None)
_NO_COLS = np.empty(0, np.int64)


def one_id_gradients(device: Device, gradient: Any, cols: NDArray[np.int64]) -> Gradients:
    """Describe the gradient (N, T) of `pool_one`'s output, or with N = E and cols = [0] that of `gather`'s."""
    flat = view(device, "gradient", gradient, np.float32, 2)
    return Gradients(flat, _NONE, _NONE, _NONE, expect("cols", cols, np.int64))


def bag_gradients(
    device: Device, gradient: Any, entry_offset: Any, entry_scale: Any = None, argmax: Any = None
) -> Gradients:
    """Describe the gradient (N, T) of `pool_bags`' output by what that call wrote."""
    flat = view(device, "gradient", gradient, np.float32, 2)
    offsets = view(device, "entry_offset", entry_offset, np.int64)
    scales = view(device, "entry_scale", entry_scale, np.float32) if given(entry_scale) else _NONE
    if scales.size not in {0, offsets.size}:
        raise ValueError(f"entry_scale has {scales.size} elements for {offsets.size} entries: give one each, or none.")
    largest = view(device, "argmax", argmax, np.int32, 2) if given(argmax) else _NONE
    if largest.size and largest.shape != flat.shape:
        raise ValueError(f"argmax has shape {largest.shape}, the gradient {flat.shape}: they must be equal.")
    return Gradients(flat, offsets, scales, largest, _NO_COLS)


class UpdateBuffers:
    """Scratch of the updates of one group, kept between steps and grown when a step is larger than all before."""

    def __init__(self, device: Device) -> None:
        self._device, self._size = device, -1
        self.sums: Any = None

    def reserve(self, num_entries: int, dim: int) -> int:
        """Make room for a step of `num_entries` entries; returns the elements of a row of sums."""
        padded = (dim + 3) // 4 * 4
        size = 2 * -(-num_entries // STRETCH) * padded
        if self._size < size:
            self.sums, self._size = self._device.empty(size, np.float32), size
        return padded

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return max(0, 4 * self._size)


class Step(NamedTuple):
    """One group's part of `update_many`. `first` and `second` are the states, None where the rule has none.

    vectors: an array (S, D) of float32, or Vectors; those of 16-bit dtypes are rounded by `rounding`.
    """

    vectors: Any
    first: Any
    second: Any
    pairs: Any
    gradients: Gradients
    buffers: UpdateBuffers
    rule: Rule
    rounding: Rounding = NO_ROUNDING


def _part(device: Device, step: Step) -> tuple[Any, RowsAt, tuple[Any, ...], int]:
    """Return what must live until the launch, a group's vectors, its part and how many entries it has."""
    vectors = rows_at(device, step.vectors, written=True)
    num_slots, dim, streams = vectors.num_slots, vectors.dim, 0
    if vectors.suffix:
        if step.rounding.streams.size != num_slots:
            raise ValueError(
                f"{num_slots} rows of a 16-bit dtype are rounded by {step.rounding.streams.size} streams: give each."
            )
        streams = step.rounding.streams.address
    widths = {SGD: (0, 0), ADAGRAD: (dim, 0), ROWWISE: (1, 0), ADAM: (dim, dim)}[step.rule.kind]
    states = []
    for name, state, width in zip(
        ("the first state", "the second state"), (step.first, step.second), widths, strict=True
    ):
        seen = view(device, name, state, np.float32, 2, written=True) if width else _NONE
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
    if pairs.size == 0:
        return None, vectors, (), 0
    padded = step.buffers.reserve(pairs.size, dim)
    sums = view(device, "sums", step.buffers.sums, np.float32, written=True)
    fields = [*vectors.wide, *(state.address for state in states if state.size and state.shape[1] == dim)]
    vec, team = access(dim, *fields, sums.address, narrow=vectors.narrow)
    cols = view(device, "cols", device.put(source.cols.view(np.uint8)), np.uint8) if source.cols.size else _NONE
    rule = step.rule
    part = (
        vectors.address, states[0].address, states[1].address, pairs.address, sums.address, source.flat.address,
        source.offsets.address, source.scales.address, source.argmax.address, cols.address, num_samples, width, streams,
        step.rounding.key, pairs.size, num_slots, padded, dim, vec, team, vectors.is_half, rule.rate, rule.eps,
        rule.decay, rule.new1, rule.new2, 0,
    )  # fmt: skip
    return cols, vectors, part, pairs.size


def update_many(device: Device, steps: Sequence[Step]) -> None:
    """Step the rows of several groups, which may have different dims.

    One launch for each optimizer, two where some of its vectors have 16 bits, and one more.
    """
    found = [(step.rule.kind, *_part(device, step)) for step in steps]
    found = [one for one in found if one[-1]]
    tasks = [-(-(2 * -(-size // STRETCH)) * int(part[_TEAM]) // 32) for *_, part, size in found]
    launch_parts(device, "update.sum_stretches", UPDATE_PART, [part for *_, part, _ in found], tasks)
    for kind, kernel in _KERNELS.items():
        parts = [(vectors, part, -(-size // _PAIRS_OF_TASK)) for of, _, vectors, part, size in found if of == kind]
        for suffix, some, tasks in by_width(parts):
            launch_parts(device, f"update.{kernel}{suffix}", UPDATE_PART, some, tasks)
