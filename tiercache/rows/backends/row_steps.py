"""Runs: arrays of ids that lie one behind the other already, so that they are joined without a copy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

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
from tiercache.values.lookups import SavedGradient

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from tiercache.rows.backends.base import Backend
    from tiercache.store.table import Group
    from tiercache.values.ids import Array
    from tiercache.values.lookups import GroupRows


class Run(NamedTuple):
    """Arrays [first, last) of a sequence as one."""

    first: int
    last: int
    values: NDArray[Any]


def runs_of(arrays: Sequence[NDArray[Any]]) -> list[Run]:
    """Return arrays (n,) of one dtype as the fewest views: neighbors in memory, parts of one flat array, are one."""
    ends: list[int] = []
    at = -1
    for i, array in enumerate(arrays):
        address = array.ctypes.data
        if i and not (address == at and array.size and _same_flat(array, arrays[i - 1])):
            ends.append(i)
        at = address + array.nbytes
    return [
        Run(first, last, arrays[first] if last == first + 1 else _view(arrays[first], arrays[last - 1]))
        for first, last in zip([0, *ends], [*ends, len(arrays)], strict=True)
        if first < last
    ]


def _same_flat(one: NDArray[Any], other: NDArray[Any]) -> bool:
    base = one.base
    contiguous = one.flags.c_contiguous and other.flags.c_contiguous
    return contiguous and isinstance(base, np.ndarray) and base.flags.c_contiguous and base is other.base


def _view(first: NDArray[Any], last: NDArray[Any]) -> NDArray[Any]:
    base = first.base
    assert isinstance(base, np.ndarray)
    begin = (first.ctypes.data - base.ctypes.data) // first.itemsize
    size = (last.ctypes.data + last.nbytes - first.ctypes.data) // first.itemsize
    return base.reshape(-1).view(first.dtype)[begin : begin + size]


def kernel_gradients(saved: SavedGradient) -> Gradients:
    """Return a gradient as kernels take it."""
    if saved.places is None:
        return Gradients(saved.gradient, saved.num_samples, saved.width, saved.cols)
    return Gradients(
        saved.gradient, saved.num_samples, saved.width, saved.cols, saved.places, saved.scales,
        saved.argmax.reshape(-1),
    )  # fmt: skip


def of_tables(backend: Backend, saved: SavedGradient, names: Collection[str]) -> list[SavedGradient]:
    """Return the gradients of some tables of the group: of each stretch of entries of theirs, in order."""
    assert saved.spans is not None, "the gradient of a group of several tables does not say of which it is"
    stretches: list[list[int]] = []
    for table, first, last in saved.spans():
        if table not in names or first == last:
            continue
        if stretches and stretches[-1][1] == first:
            stretches[-1][1] = last
        else:
            stretches.append([first, last])
    return [_part(backend, saved, first, last) for first, last in stretches]


def _part(backend: Backend, saved: SavedGradient, first: int, last: int) -> SavedGradient:
    """Return the gradient of the entries from ``first`` up to ``last``: of whole features without ``places``."""
    if (first, last) == (0, saved.slots.shape[0]):
        return saved
    argmax = saved.argmax
    if argmax.shape[0]:  # it names entries by their numbers
        argmax = backend.array(backend.tensor(argmax) - first)
    cols = saved.cols
    if saved.places is None:
        cols = cols[first // saved.num_samples : last // saved.num_samples]
    return replace(
        saved, slots=saved.slots[first:last], cols=cols,
        places=None if saved.places is None else saved.places[first:last], scales=saved.scales[first:last],
        argmax=argmax, sorted=None, looked_up=None, spans=None,
    )  # fmt: skip


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
