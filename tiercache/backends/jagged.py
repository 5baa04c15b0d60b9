"""The jagged ids of one lookup, and the gradient that its backward saves for the step.

Legend: E entries (ids), F features, N samples, T columns of the output. Arrays on the device are NumPy arrays on a CPU
and torch tensors on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from tiercache.data.encoded_batch import NoTensor
from tiercache.kernels.arrays import NONE_F4, NONE_I4, NONE_I8
from tiercache.kernels.step import (
    ADAGRAD,
    NO_ROUNDING,
    ROWWISE,
    SGD,
    Gradients,
    Rule,
    Step,
    Vectors,
    adam_rule,
    make_rounding,
)
from tiercache.store.table import Adagrad, Adam, RowWiseAdagrad

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.backends.base import Backend
    from tiercache.data.encoded_batch import FeatureIds
    from tiercache.kernels.cpu.key_index import Missing
    from tiercache.store.table import Group
    from tiercache.tiers.rows import GroupRows

Array = Any
"""An array on the device."""


class Found(Protocol):
    """The local ids of a batch's raw keys, feature after feature; -1 for a key that is not in the pass."""

    @property
    def there(self) -> Array:
        """(E,) int32, on the device."""
        ...

    def missing(self) -> Missing:
        """Return how many keys are not in the pass, and the first of them; waits for the search."""
        ...

    def host(self) -> NDArray[np.int32]:
        """Return the ids (E,) in host memory, read-only; waits for the search."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FoundIds(NoTensor):
    """The local ids of one feature, like `FeatureIds`, found on the device: each one is a row, or -1."""

    found: Found
    first: int
    """Of its entries among those of all features."""
    last: int
    offsets: NDArray[np.int64] | None
    """(n + 1,) where each sample's ids begin; None: one id per sample."""
    weights: NDArray[np.float32] | None
    """(E,) one per id; None: all 1."""

    @property
    def ids(self) -> NDArray[np.int32]:
        """(E,) in host memory, read-only; the first read of a batch's ids waits for a GPU."""
        return self.found.host()[self.first : self.last]

    @property
    def there(self) -> Array:
        """(E,) on the device."""
        return self.found.there[self.first : self.last]

    @property
    def num_ids(self) -> int:
        """E."""
        return self.last - self.first


class Span(NamedTuple):
    """Neighboring entries of one table."""

    table: str
    first: int
    last: int
    """The entry after the last one."""


def feature_spans(tables: Sequence[str], starts: NDArray[np.int64]) -> list[Span]:
    """Return those of features that lie one after the other: ``tables`` (F,) and ``starts`` (F + 1,)."""
    return list(map(Span, tables, starts[:-1].tolist(), starts[1:].tolist()))


def position_spans(first: Mapping[str, int], positions: NDArray[np.int32]) -> list[Span]:
    """Return those of rows by position (E,); ``first``: of each table the position of its first row."""
    tables = sorted(first, key=lambda table: first[table])
    number = np.searchsorted([first[table] for table in tables], positions, side="right") - 1
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    return feature_spans([tables[n] for n in number[starts].tolist()], np.append(starts, positions.size))


class FeatureRuns(NamedTuple):
    """The order of the ids of a lookup, of which some gradient is a part."""

    runs: Any
    number: int
    """Of the part."""
    num_parts: int


class SortedSlots(NamedTuple):
    """Slots of entries, and what `sort_slots` returns for them; on a GPU their `FeatureRuns`."""

    slots: Array
    """(E,)"""
    pairs: Array
    """(E,)"""


@dataclass(slots=True, kw_only=True)
class LookupIds:
    """The ids of a batch's features of one group, feature-major; the lookup adds what the backward needs."""

    ids: Array
    """(E,) int32, on the device; each is in its feature's table."""
    starts: NDArray[np.int64]
    """(F + 1,) where each feature's entries begin."""
    bases: NDArray[np.int64]
    """(F,) the position of local id 0 of each feature's table."""
    modes: NDArray[np.int8]
    """(F,)"""
    cols: NDArray[np.int64]
    """(F,) the first output column of each feature."""
    offsets: Array | None = None
    """(F * N + 1,) where each bag begins, on the device; None: one id for each feature and sample."""
    weights: Array = field(default_factory=lambda: NONE_F4)
    """(E,) on the device; empty: all 1."""
    trained: bool = False
    """Whether a step is expected to follow: the lookup may then prepare it."""
    slots: Array = field(default_factory=lambda: NONE_I4)
    """(E,) the slot of each entry."""
    runs: Any = None
    """The order of the ids by position, if they came with it."""
    sorted: SortedSlots | None = None
    """``slots``, if the lookup sorted them."""
    argmax: Array = field(default_factory=lambda: NONE_I4)
    """(N, T) the entry that gave each maximum; empty where nothing is pooled by max."""
    places: Array | None = None
    """(E,) where each entry's gradient begins; its complement where ``argmax`` decides element by element."""
    scales: Array = field(default_factory=lambda: NONE_F4)
    """(E,) what each entry's gradient is multiplied by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGradient:
    """The gradient of one lookup: entries in batch order, each with its slot and its place in ``gradient``."""

    slots: Array
    """(E,)"""
    gradient: Array
    """Flat; of (N, ``width``)."""
    width: int
    cols: NDArray[np.int64]
    """The first column of each feature; where ``places`` is None, every feature has one entry a sample."""
    places: Array | None
    """(E,) as of `LookupIds`."""
    scales: Array
    """(E,) as of `LookupIds`; empty: 1."""
    argmax: Array
    """Flat like ``gradient``, as of `LookupIds`."""
    sorted: SortedSlots | None = None
    """As of `LookupIds`."""
    looked_up: Sequence[FeatureIds | FoundIds] | None = None
    """The ids that were looked up, of which these are the rows; None where nobody says."""
    spans: Callable[[], list[Span]] | None = None
    """Returns which entries are of which table, all of them in order; None: the group has one table."""

    @property
    def num_samples(self) -> int:
        """Rows of the gradient."""
        return int(self.gradient.shape[0]) // self.width

    @property
    def gradients(self) -> Gradients:
        """The same as kernels take it."""
        if self.places is None:
            return Gradients(self.gradient, self.num_samples, self.width, self.cols)
        return Gradients(
            self.gradient, self.num_samples, self.width, self.cols, self.places, self.scales, self.argmax.reshape(-1)
        )

    def of_tables(self, backend: Backend, names: Collection[str]) -> list[SavedGradient]:
        """Return the gradients of some tables of the group: of each stretch of entries of theirs, in order."""
        assert self.spans is not None, "the gradient of a group of several tables does not say of which it is"
        stretches: list[list[int]] = []
        for table, first, last in self.spans():
            if table not in names or first == last:
                continue
            if stretches and stretches[-1][1] == first:
                stretches[-1][1] = last
            else:
                stretches.append([first, last])
        return [self._part(backend, first, last) for first, last in stretches]

    def _part(self, backend: Backend, first: int, last: int) -> SavedGradient:
        """Return the gradient of the entries from ``first`` up to ``last``: of whole features without ``places``."""
        if (first, last) == (0, self.slots.shape[0]):
            return self
        argmax = self.argmax
        if argmax.shape[0]:  # it names entries by their numbers
            argmax = backend.array(backend.tensor(argmax) - first)
        cols = self.cols
        if self.places is None:
            cols = cols[first // self.num_samples : last // self.num_samples]
        return replace(
            self, slots=self.slots[first:last], cols=cols, places=None if self.places is None else
            self.places[first:last], scales=self.scales[first:last], argmax=argmax, sorted=None, looked_up=None,
            spans=None,
        )  # fmt: skip

    @property
    def pairs(self) -> Array | None:
        """(E,) ``slots`` sorted; None where these slots were not: the gradient may have come to other rows since."""
        return self.sorted.pairs if self.sorted is not None and self.sorted.slots is self.slots else None


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One step of the rows of a group."""

    group: Group
    rows: GroupRows
    saved: Sequence[SavedGradient]
    """At least one, in the order of the backward calls."""
    learning_rate: float
    number: int
    """How many steps the tables of ``saved`` have taken, this one included: Adam's rule and rounding go by it."""

    def kernel_step(self, gradients: Gradients | Sequence[Gradients], pairs: Array) -> Step:
        """Return the step as kernels take it: with the gradients of ``saved`` and their sorted slots."""
        rows, rule, rounding = self.rows, self._rule(), NO_ROUNDING
        if rows.streams.shape[0]:
            rounding = make_rounding(rows.streams, self.number)
        states = () if rule.kind == SGD else rows.states  # others may have stepped by them already
        return Step(rows.vectors, states, pairs, gradients, rule, rounding)

    def _rule(self) -> Rule:
        optimizer, rate = self.group.optimizer, self.learning_rate
        match optimizer:
            case Adagrad(eps=eps):
                return Rule(ADAGRAD, rate, eps, optimizer.decay)
            case RowWiseAdagrad(eps=eps):
                return Rule(ROWWISE, rate, eps, optimizer.decay)
            case Adam(beta1=beta1, beta2=beta2, eps=eps):
                return adam_rule(self.number, rate, beta1, beta2, eps, optimizer.decay)
            case _:
                return Rule(SGD, rate, decay=optimizer.decay)


class RowRequest(NamedTuple):
    """A request for rows of a group by their positions."""

    rows: GroupRows
    positions: Array
    """(n,) int32, each below the number of positions of ``rows``."""
    slots: Array
    """(n,) int32; written."""
    out: Array | None
    """(n, dim) float32 for the vectors; None: only slots are needed."""


def vectors_of(words: Array, dim: int, dtype: str) -> Vectors:
    """See words of 4 bytes (slots, words), on whatever device, as vectors."""
    if isinstance(words, torch.Tensor) and dtype != "float32":
        return Vectors(words.view(torch.uint16), dim, int(dtype == "float16"))
    return Vectors.of(words, dim, dtype)


def places_of(backend: Backend, saved: SavedGradient) -> Array:
    """Return where each entry's gradient begins, (E,) int64, written out where ``saved`` has columns only."""
    if saved.places is not None:
        return saved.places
    samples = torch.arange(saved.num_samples, device=backend.device) * saved.width
    cols = backend.tensor(backend.to_device(saved.cols))
    return backend.array((cols[:, None] + samples[None, :]).reshape(-1))


def merged(backend: Backend, saved: Sequence[SavedGradient]) -> SavedGradient:
    """Return the gradients of several lookups of one group as those of one; the only one is returned as it is."""
    if len(saved) == 1:
        return saved[0]
    tensor, array, device = backend.tensor, backend.array, backend.device
    has_scales, has_argmax = any(one.scales.shape[0] for one in saved), any(one.argmax.shape[0] for one in saved)
    known: dict[tuple[int, int], int] = {}  # lookups of one module share their gradient
    flats, places, scales, argmaxes, size, first = [], [], [], [], 0, 0
    for one in saved:
        gradient, count, is_max = tensor(one.gradient), one.slots.shape[0], bool(one.argmax.shape[0])
        key = gradient.data_ptr(), gradient.numel()
        start = known.get(key)
        if start is None or is_max:  # an element of a gradient has one maximum
            start = size
            known.setdefault(key, start)
            size += gradient.numel()
            flats.append(one.gradient)
            if is_max:
                argmaxes.append(array(tensor(one.argmax) + first))
            elif has_argmax:
                argmaxes.append(array(torch.full((gradient.numel(),), -1, dtype=torch.int32, device=device)))
        where = tensor(places_of(backend, one))
        places.append(array(torch.where(where >= 0, where + start, where - start)))  # ~(x + start) == ~x - start
        if has_scales:
            scales.append(
                one.scales if one.scales.shape[0] else array(torch.ones(count, dtype=torch.float32, device=device))
            )
        first += count
    return SavedGradient(
        slots=backend.concat([one.slots for one in saved]), gradient=backend.concat(flats), width=max(size, 1),
        cols=NONE_I8, places=backend.concat(places), scales=backend.concat(scales) if has_scales else NONE_F4,
        argmax=backend.concat(argmaxes) if has_argmax else NONE_I4,
    )  # fmt: skip
