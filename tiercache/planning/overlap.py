"""The order of sub-datasets in which neighbors share the most bytes of rows, which then stay on the device."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from tiercache.planning.next_use import key_ranges
from tiercache.planning.positions import Positions
from tiercache.planning.schedule import Schedule
from tiercache.store.table import group_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tiercache.data.view import DatasetView
    from tiercache.planning.schedule import OrderRule

SAMPLED_KEYS = 4 << 20
"""Keys of all sub-datasets whose overlaps are counted; of more keys, those in the lowest hashes stand for all."""
_KEYS_PER_RANGE = 1 << 18
_MATRIX_BYTES = 64 << 20


def order_rule(data: DatasetView, order: Sequence[int] | str | int | None, order_seed: int | None = None) -> OrderRule:
    """Return the order rule that ``order`` and ``order_seed`` ask for.

    order: a permutation of the sub-datasets, "overlap", or None for their own order. order_seed: the seed of an order
    for each epoch. Raises ValueError where both are given, and for anything else.
    """
    if order is not None and order_seed is not None:
        raise ValueError("order and order_seed were both given: an order is fixed, or seeded for each epoch")
    if order is None or isinstance(order, int):
        return order_seed if order is None else order
    if order == "overlap":
        return overlap_order(Positions.of(data, group_tables(data.tables)), data)
    if isinstance(order, str):
        raise ValueError(f"order {order!r} is unknown: it must be 'overlap' or a permutation")  # noqa: TRY004
    return Schedule(num_passes=len(data.passes), dataset_digest="", order=tuple(int(p) for p in order)).order


def overlap_order(positions: Positions, data: DatasetView) -> tuple[int, ...]:
    """Return a cyclic order, from sub-dataset 0 on, whose neighbors share many bytes of rows. Deterministic.

    From each sub-dataset in turn it goes to the one left that shares the most with the last; the best of these rounds
    is taken, and the sub-datasets' own order where no round is better.
    """
    shared_PP = shared_bytes(positions, positions.keys_of(data))
    own = tuple(range(positions.num_passes))

    def bytes_kept(order: tuple[int, ...]) -> float:
        return float(shared_PP[list(order), [*order[1:], order[0]]].sum())

    return max([own, *(_from(first, shared_PP) for first in own)], key=bytes_kept)


def shared_bytes(
    positions: Positions, keys_of: Callable[[int, int], NDArray[np.int64]], *, sampled_keys: int = SAMPLED_KEYS
) -> NDArray[np.float64]:
    """Return (P, P) the bytes of rows that each two sub-datasets share; where keys are sampled, of the sample."""
    num_passes = positions.num_passes
    total = sum(positions.num_rows(p) for p in range(num_passes))
    below = min(1 << 64, (sampled_keys << 64) // max(1, total))
    shared_PP = np.zeros((num_passes, num_passes))
    for some in key_ranges(positions, keys_of, keys_per_range=_KEYS_PER_RANGE, below=below):
        step = max(1, _MATRIX_BYTES // (4 * num_passes))
        for low in range(0, some.keys.size, step):
            has_PK = np.zeros((num_passes, min(step, some.keys.size - low)), dtype=np.float32)
            for p, (begin, end) in enumerate(itertools.pairwise(some.starts.tolist())):
                here = some.numbers[begin:end].astype(np.int64) - low
                has_PK[p, here[(here >= 0) & (here < has_PK.shape[1])]] = 1
            shared_PP += (has_PK @ has_PK.T) * positions.tables[some.table].row_bytes
    return shared_PP


def _from(first: int, shared_PP: NDArray[np.float64]) -> tuple[int, ...]:
    """Return the round that begins at ``first`` and goes to the most shared each time, turned to begin at 0."""
    left = np.ones(len(shared_PP), dtype=bool)
    order = [first]
    left[first] = False
    while left.any():
        order.append(int(np.where(left, shared_PP[order[-1]], -1.0).argmax()))
        left[order[-1]] = False
    zero = order.index(0)
    return tuple(order[zero:] + order[:zero])
