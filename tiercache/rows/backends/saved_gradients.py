"""Saved gradients, cut by table and merged."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tiercache.kernels.arrays import NONE_F4, NONE_I4, NONE_I8
from tiercache.values.lookups import SavedGradient

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tiercache.rows.backends.base import Backend
    from tiercache.values.ids import Array


def of_tables(backend: Backend, saved: SavedGradient, names: Collection[str]) -> list[SavedGradient]:
    """Return the gradients of some tables of the group, one for each range of adjacent entries, in order."""
    assert saved.spans is not None, "the gradient of a group of several tables has no spans"
    if saved.starts is not None:
        return [part for one in saved.by_feature() for part in of_tables(backend, one, names)]
    ranges: list[list[int]] = []
    for table, first, last in saved.spans():
        if table not in names or first == last:
            continue
        if ranges and ranges[-1][1] == first:
            ranges[-1][1] = last
        else:
            ranges.append([first, last])
    return [_part(backend, saved, first, last) for first, last in ranges]


def _part(backend: Backend, saved: SavedGradient, first: int, last: int) -> SavedGradient:
    """Return the gradient of entries [first, last), which are whole features without ``places``."""
    if (first, last) == (0, saved.slots.shape[0]):
        return saved
    argmax = saved.argmax
    if argmax.shape[0]:  # it refers to entries by their numbers
        argmax = backend.array(backend.tensor(argmax) - first)
    cols = saved.cols
    if saved.places is None:
        cols = cols[first // saved.num_samples : last // saved.num_samples]
    return replace(
        saved, slots=saved.slots[first:last], cols=cols,
        places=None if saved.places is None else saved.places[first:last], scales=saved.scales[first:last],
        argmax=argmax, sorted=None, looked_up=None, spans=None,
    )  # fmt: skip


def places_of(backend: Backend, saved: SavedGradient) -> Array:
    """Return the start of each entry's gradient, (E,) int64, computed if ``saved`` has only columns."""
    if saved.places is not None:
        return saved.places
    samples = torch.arange(saved.num_samples, device=backend.device) * saved.width
    cols = backend.tensor(backend.to_device(saved.cols))
    return backend.array((cols[:, None] + samples[None, :]).reshape(-1))


def merged(backend: Backend, saved: Sequence[SavedGradient]) -> SavedGradient:
    """Merge the gradients of several lookups of one group into one; a single one is returned as it is."""
    saved = [part for one in saved for part in one.by_feature()]
    if len(saved) == 1:
        return saved[0]
    tensor, array, device = backend.tensor, backend.array, backend.device
    has_scales, has_argmax = any(one.scales.shape[0] for one in saved), any(one.argmax.shape[0] for one in saved)
    starts: dict[tuple[int, int], int] = {}  # lookups of one module share their gradient
    flats, places, scales, argmaxes, size, first = [], [], [], [], 0, 0
    for one in saved:
        gradient, count, is_max = tensor(one.gradient), one.slots.shape[0], bool(one.argmax.shape[0])
        key = gradient.data_ptr(), gradient.numel()
        start = starts.get(key)
        if start is None or is_max:  # an element of a gradient has one maximum
            start = size
            starts.setdefault(key, start)
            size += gradient.numel()
            flats.append(one.gradient.reshape(-1))
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
