"""The inputs of one optimizer step of a group's rows, on every device.

Legend: S slots, D dim, P numbers from one row to the next, E entries, N samples, F features, T width of the gradient's
rows. Arrays are on the device of the rows; `cols` are NumPy arrays.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tiercache.kernels.arrays import F4, I8, NONE_F4, NONE_I4, NONE_I8, NONE_U8
from tiercache.kernels.cpu.hashing import mix


class Vectors(NamedTuple):
    """The vectors of a group's rows, one in each slot."""

    values: Any
    """(S, P): float32, or the bits of 16-bit numbers as uint16. P is D, or for 16 bits D rounded up to whole words."""
    dim: int
    """D."""
    is_half: int = 0
    """1 for float16, 0 for bfloat16; unused for float32."""

    @classmethod
    def of(cls, words: F4, dim: int, dtype: str) -> "Vectors":
        """View words of 4 bytes (S, words) as vectors of "float32", "bfloat16" or "float16", without a copy."""
        return cls(words if dtype == "float32" else words.view(np.uint16), dim, int(dtype == "float16"))

    def check(self) -> None:
        """Raise ValueError if the stride of rows does not fit their dim."""
        stride = self.dim + self.dim % 2 if self.is_narrow else self.dim
        if self.values.shape[1] != stride:
            raise ValueError(f"vectors of dim {self.dim} are {self.values.shape[1]} numbers apart, expected {stride}.")

    @property
    def is_narrow(self) -> bool:
        """True for 16-bit numbers."""
        return bool(self.values.itemsize == 2)


class Gradients(NamedTuple):
    """The location of each entry's gradient."""

    flat: Any
    """The gradient of the pooled output, (N, T), with one axis or more. On a GPU its samples may be apart, as those of
    a slice of columns, unless something is max-pooled."""
    num_samples: int
    width: int
    """T."""
    cols: I8 = NONE_I8
    """(F,): the first column of each feature. Without `offsets`, every sample has one id of each: entries are
    feature-major."""
    offsets: Any = NONE_I8
    """Else (E,): the offset of each entry's first element, in a column of `cols` if given; its complement for max
    pooling."""
    scales: Any = NONE_F4
    """(E,): the factor of each entry's gradient (weight, 1 / ids of a mean); empty: 1."""
    argmax: Any = NONE_I4
    """Like `flat`: the largest entry; empty if nothing is max-pooled."""


class Rule(NamedTuple):
    """An optimizer's numbers in one step, as kernels take them in float32."""

    kind: str
    """The optimizer, as in `cpu.rules.KINDS`; "sum", on the CPU: the row becomes rate times the gradient."""
    rate: float
    eps: float = 0.0
    decay: float = 0.0
    """The fraction of the row that is added to its gradient."""
    keep: float = 1.0
    """The fraction of the row that the step starts from."""
    a: float = 0.0
    """For momentum: the fraction of the buffer that is kept. Else: the weight of the new value in the first average."""
    b: float = 0.0
    """For momentum: the fraction of the buffer added to the gradient, 0 without Nesterov. Else: the weight of the new
    value in the average of squares."""
    widths: Sequence[int] = ()
    """Numbers of each state in a row."""


class Rounding(NamedTuple):
    """The source of random bits of a step: rows of 16-bit dtypes are rounded stochastically."""

    streams: Any
    """(S,) uint64: the stream of the row in each slot."""
    key: int
    """The generator's key: `mix(step)`."""


NO_ROUNDING = Rounding(NONE_U8, 0)


def make_rounding(streams: Any, step: int) -> Rounding:
    """Return the rounding of rows with `streams` (S,) in a step, which is counted over the whole training."""
    return Rounding(streams, mix(step))


class Step(NamedTuple):
    """One step of the rows of a group, by an optimizer of `store.optimizer`."""

    vectors: Vectors
    states: Sequence[Any]
    """float32, (S, width) each."""
    pairs: Any
    """(E,) uint64: sorted slots, in batch order within a slot; on a GPU `Runs`. A row that no entry names stays."""
    gradients: Gradients | Sequence[Gradients]
    """On a GPU, gradients of several lookups may follow one another."""
    rule: Rule
    rounding: Rounding = NO_ROUNDING
    means: Any = NONE_F4
    """(E,), for a row-wise rule whose rows have one entry each: the mean of squares of the whole row's gradient, if
    these vectors are a slice of it; empty: of this gradient."""

    @property
    def lookups(self) -> Sequence[Gradients]:
        """Return the gradients of each lookup."""
        return (self.gradients,) if isinstance(self.gradients, Gradients) else self.gradients


def check_rows(step: Step) -> None:
    """Raise ValueError if the rows of a step, their states and their random streams do not fit together."""
    vectors = step.vectors
    num_slots, dim = vectors.values.shape[0], vectors.dim
    vectors.check()
    if vectors.is_narrow and step.rounding.streams.shape[0] != num_slots:
        raise ValueError(
            f"{num_slots} rows of a 16-bit dtype have {step.rounding.streams.shape[0]} streams: pass one each."
        )
    widths = step.rule.widths
    for name, state, width in zip(("first", "second"), step.states, widths, strict=False):
        if tuple(state.shape) != (num_slots, width):
            raise ValueError(
                f"the {name} state has shape {tuple(state.shape)}: {num_slots} vectors of dim {dim} need "
                f"{(num_slots, width)}."
            )
    if len(step.states) != len(widths):
        raise ValueError(f"the rule needs {len(widths)} states, but {len(step.states)} were given.")


def check_entries(step: Step, lookups: Sequence[Gradients]) -> None:
    """Raise ValueError if the gradients of a step do not fit its rows, or its entries."""
    dim, pairs, described = step.vectors.dim, step.pairs, 0
    size = pairs.shape[0] if hasattr(pairs, "shape") else pairs.size
    if step.means.shape[0] not in {0, size}:
        raise ValueError(f"means has {step.means.shape[0]} elements for {size} entries: pass one each, or none.")
    for source in lookups:
        described += _check_gradients(source, dim)
    if described != size:
        raise ValueError(f"gradients describe {described} entries, but {size} entries were sorted.")


def _check_gradients(source: Gradients, dim: int) -> int:
    """Return the number of entries."""
    samples, at, size = source.num_samples, source.cols.tolist(), math.prod(source.flat.shape)
    if size != samples * source.width:
        raise ValueError(f"{size} elements are not a gradient of {samples} samples of {source.width}.")
    if at and not 0 <= min(at) <= max(at) <= source.width - dim:
        raise ValueError(f"cols must be in [0, {source.width - dim}] for rows of {dim} in width {source.width}.")
    num_offsets, num_scales, num_maxima = source.offsets.shape[0], source.scales.shape[0], source.argmax.shape[0]
    if num_scales and num_scales != num_offsets:
        raise ValueError(f"entry_scale has {num_scales} elements for {num_offsets} entries: pass one each, or none.")
    if num_maxima and num_maxima != size:
        raise ValueError(f"argmax has shape {tuple(source.argmax.shape)}, expected {tuple(source.flat.shape)}.")
    return int(num_offsets) or samples * len(at)
