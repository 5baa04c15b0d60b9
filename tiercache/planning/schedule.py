"""The schedule: the sub-dataset of every pass."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from tiercache.planning.next_use import longest_distance
from tiercache.planning.row_offsets import RowOffsets, key_ranges
from tiercache.store.bits import mix
from tiercache.store.records import integer
from tiercache.store.table import group_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tiercache.data.dataset import DatasetView


OrderRule = int | tuple[int, ...] | None
"""None: every epoch goes through the sub-datasets in order. A number: each epoch has a random order from this seed. A
tuple: the order of every epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The endless cycle of passes over the sub-datasets of one dataset.

    Pass ``e * num_passes + i`` trains the sub-dataset at place ``i`` of epoch ``e``'s order. The number of epochs is
    not part of it, so a later run with more epochs finds its segments in the right order.
    """

    num_passes: int
    """Sub-datasets of the dataset, and so passes of an epoch; at least 1."""
    dataset_digest: str
    """The digest of the sub-datasets (``PassDataset.digest``)."""
    order: OrderRule = None
    """The order of epochs; a tuple has each sub-dataset once."""

    def __post_init__(self) -> None:
        if self.num_passes < 1:
            raise ValueError(f"a schedule needs at least 1 sub-dataset, not {self.num_passes}: extract some data first")
        if isinstance(self.order, tuple):
            if sorted(self.order) != list(range(self.num_passes)):
                raise ValueError(
                    f"the order {self.order} does not have each of the {self.num_passes} sub-datasets once: pass a "
                    f"permutation of 0 to {self.num_passes - 1}"
                )
            if self.order == tuple(range(self.num_passes)):
                object.__setattr__(self, "order", None)  # one order has one digest

    @classmethod
    def of(cls, dataset: DatasetView, order: OrderRule) -> Schedule:
        """Return the schedule of a dataset."""
        return cls(num_passes=len(dataset.passes), dataset_digest=dataset.digest, order=order)

    @property
    def digest(self) -> str:
        """Hexadecimal digest of dataset and order; neither epochs nor budgets change it."""
        fixed = isinstance(self.order, tuple)
        record = {"dataset": self.dataset_digest, "order_seed": None if fixed else self.order, "version": 1}
        record |= {"order": self.order} if fixed else {}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    @property
    def repeats(self) -> bool:
        """True if every epoch has the same order, so that the uses of one epoch hold for all."""
        return not isinstance(self.order, int)

    @property
    def longest_distance(self) -> int:
        """Maximum passes from one use of a key to the next: each epoch trains each sub-dataset once."""
        return self.num_passes if self.repeats else longest_distance(self.num_passes)

    def order_of(self, epoch: int) -> NDArray[np.int64]:
        """Return the sub-dataset at each place of ``epoch`` (negative epochs too: the past that never was)."""
        return _order(self.num_passes, self.order, epoch).copy()

    def epoch_of(self, pass_index: int) -> int:
        """Return the epoch that ``pass_index`` belongs to."""
        return pass_index // self.num_passes

    def sub_dataset_of(self, pass_index: int) -> int:
        """Return the sub-dataset that ``pass_index`` trains."""
        epoch = 0 if self.repeats else self.epoch_of(pass_index)
        return int(_order(self.num_passes, self.order, epoch)[pass_index % self.num_passes])

    def samples_left(self, pass_index: int, epochs: int, samples_P: Sequence[int]) -> int:
        """Return the samples from the beginning of ``pass_index`` to the end of epoch ``epochs``.

        (P,): the samples of each sub-dataset. Looks at one epoch's order, however many there are.
        """
        epoch, place = divmod(pass_index, self.num_passes)
        trained: list[int] = self.order_of(epoch)[:place].tolist()
        return (epochs - epoch) * sum(samples_P) - sum(samples_P[i] for i in trained)


@lru_cache(maxsize=8)
def _order(num_passes: int, rule: OrderRule, epoch: int) -> NDArray[np.int64]:
    if not isinstance(rule, int):
        return np.arange(num_passes, dtype=np.int64) if rule is None else np.array(rule, dtype=np.int64)
    salt = mix(np.array([rule & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64)) ^ np.uint64(epoch & 0xFFFF_FFFF_FFFF_FFFF)
    return np.argsort(mix(mix(np.arange(num_passes, dtype=np.uint64)) ^ mix(salt)), kind="stable").astype(np.int64)


SAMPLED_KEYS = 4 << 20
"""Maximum keys of all sub-datasets whose overlaps are counted; if there are more, those with the lowest hashes are a
sample."""
_KEYS_PER_RANGE = 1 << 18
_MATRIX_BYTES = 64 << 20


def order_rule(data: DatasetView, order: Sequence[int] | str | int | None, order_seed: int | None = None) -> OrderRule:
    """Return the order rule for the arguments ``order`` and ``order_seed``.

    order: a permutation of the sub-datasets, "overlap", or None for their own order. order_seed: the seed of an order
    for each epoch. Raises ValueError if both are given, and for anything else.
    """
    if order is not None and order_seed is not None:
        raise ValueError("order and order_seed were both given: an order is fixed, or seeded for each epoch")
    if order is None:
        return None if order_seed is None else integer(order_seed, "order_seed")
    if isinstance(order, int | np.integer):
        return integer(order, "order")
    if isinstance(order, str):
        if order == "overlap":
            return overlap_order(RowOffsets.of(data, group_tables(data.tables)), data)
        raise ValueError(f"order {order!r} is unknown: expected 'overlap' or a permutation")
    places = tuple(integer(p, "a number of order") for p in order)
    return Schedule(num_passes=len(data.passes), dataset_digest="", order=places).order


def overlap_order(positions: RowOffsets, data: DatasetView) -> tuple[int, ...]:
    """Return a cyclic order, from sub-dataset 0 on, whose neighbors share many bytes of rows. Deterministic.

    A cycle from each sub-dataset goes to the remaining one that shares the most with the last. Returns the best cycle,
    or the sub-datasets' own order if none is better.
    """
    shared_PP = shared_bytes(positions, positions.keys_of(data))
    own = tuple(range(positions.num_passes))

    def bytes_kept(order: tuple[int, ...]) -> float:
        return float(shared_PP[list(order), [*order[1:], order[0]]].sum())

    return max([own, *(_greedy_order(first, shared_PP) for first in own)], key=bytes_kept)


def shared_bytes(
    positions: RowOffsets, keys_of: Callable[[int, int], NDArray[np.int64]], *, sampled_keys: int = SAMPLED_KEYS
) -> NDArray[np.float64]:
    """Return (P, P) the bytes of rows that each two sub-datasets share, of the sample if keys are sampled."""
    num_passes = positions.num_passes
    below = min(1 << 64, (sampled_keys << 64) // max(1, positions.total_rows))
    shared_PP = np.zeros((num_passes, num_passes))
    for found in key_ranges(positions, keys_of, keys_per_range=_KEYS_PER_RANGE, below=below):
        step = max(1, _MATRIX_BYTES // (4 * num_passes))
        for low in range(0, found.keys.size, step):
            has_PK = np.zeros((num_passes, min(step, found.keys.size - low)), dtype=np.float32)
            for p, (begin, end) in enumerate(itertools.pairwise(found.starts.tolist())):
                keys = found.numbers[begin:end].astype(np.int64) - low
                has_PK[p, keys[(keys >= 0) & (keys < has_PK.shape[1])]] = 1
            shared_PP += (has_PK @ has_PK.T) * positions.tables[found.table].row_bytes
    return shared_PP


def _greedy_order(first: int, shared_PP: NDArray[np.float64]) -> tuple[int, ...]:
    """Return the cycle that goes from ``first`` to the sub-dataset that shares the most each time, rotated to 0."""
    remaining = np.ones(len(shared_PP), dtype=bool)
    order = [first]
    remaining[first] = False
    while remaining.any():
        order.append(int(np.where(remaining, shared_PP[order[-1]], -1.0).argmax()))
        remaining[order[-1]] = False
    zero = order.index(0)
    return tuple(order[zero:] + order[:zero])
