"""The schedule: which sub-dataset is trained at which pass, forever."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.hashing import mix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

OrderRule = int | tuple[int, ...] | None
"""None: every epoch goes through the sub-datasets in their own order. A number: each epoch has an order of its own,
from this seed. A tuple: the order of every epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The endless cycle of passes over the sub-datasets of one dataset.

    Pass ``e * num_passes + i`` trains the sub-dataset at place ``i`` of epoch ``e``'s order. How many epochs are
    trained is no part of it: training further finds its segments in the right order.
    """

    num_passes: int
    """Sub-datasets of the dataset, and so passes of an epoch; at least 1."""
    dataset_digest: str
    """What the sub-datasets hold (``PassDataset.digest``)."""
    order: OrderRule = None
    """The order of epochs; a tuple has each sub-dataset once."""

    def __post_init__(self) -> None:
        if self.num_passes < 1:
            raise ValueError(f"a schedule needs at least 1 sub-dataset, not {self.num_passes}: extract some data first")
        if isinstance(self.order, tuple):
            if sorted(self.order) != list(range(self.num_passes)):
                raise ValueError(
                    f"the order {self.order} does not have each of the {self.num_passes} sub-datasets once: give a "
                    f"permutation of 0 to {self.num_passes - 1}"
                )
            if self.order == tuple(range(self.num_passes)):
                object.__setattr__(self, "order", None)  # one order has one digest

    @property
    def digest(self) -> str:
        """Hexadecimal digest of dataset and order; neither epochs nor budgets change it."""
        fixed = isinstance(self.order, tuple)
        record = {"dataset": self.dataset_digest, "order_seed": None if fixed else self.order, "version": 1}
        record |= {"order": self.order} if fixed else {}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    @property
    def repeats(self) -> bool:
        """Whether every epoch has the same order, so that uses found for one hold for all."""
        return not isinstance(self.order, int)

    @property
    def longest_gap(self) -> int:
        """The most passes from one use of a key to the next: each epoch trains each sub-dataset once."""
        return self.num_passes if self.repeats else max(1, 2 * self.num_passes - 1)

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
        """Return the samples from the beginning of ``pass_index`` to the end of epoch ``epochs``; (P,) are those of the
        sub-datasets.

        Looks at one epoch's order, however many there are.
        """
        epoch = self.epoch_of(pass_index)
        trained: list[int] = self.order_of(epoch)[: pass_index - epoch * self.num_passes].tolist()
        return (epochs - epoch) * sum(samples_P) - sum(samples_P[i] for i in trained)


@lru_cache(maxsize=8)
def _order(num_passes: int, rule: OrderRule, epoch: int) -> NDArray[np.int64]:
    order = np.arange(num_passes, dtype=np.int64)
    if isinstance(rule, tuple):
        return np.array(rule, dtype=np.int64)
    if rule is not None:
        salt = mix(np.array([rule & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64)) ^ np.uint64(epoch & 0xFFFF_FFFF_FFFF_FFFF)
        order = np.argsort(mix(mix(order.astype(np.uint64)) ^ mix(salt)), kind="stable").astype(np.int64)
    return order
