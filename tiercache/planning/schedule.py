"""The schedule: which pass is trained at which visit, forever."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The endless cycle of visits over the passes of one pass set.

    Visit ``e * num_passes + i`` trains the pass at place ``i`` of epoch ``e``'s order. How many epochs are
    trained is no part of it: training further finds its segments in the right order.
    """

    num_passes: int
    """Passes in the pass set; at least 1."""
    pass_set_digest: str
    """What the passes hold (``PassSet.digest``)."""
    order_seed: int | None = None
    """None: every epoch goes through the passes in their own order. A number: each epoch has a seeded order."""

    def __post_init__(self) -> None:
        if self.num_passes < 1:
            raise ValueError(f"a schedule needs at least 1 pass, not {self.num_passes}: extract some data first")

    @property
    def digest(self) -> str:
        """Hexadecimal digest of pass set and order; neither epochs nor budgets change it."""
        record = {"pass_set": self.pass_set_digest, "order_seed": self.order_seed, "version": 1}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    @property
    def repeats(self) -> bool:
        """Whether every epoch has the same order, so that uses found for one hold for all."""
        return self.order_seed is None

    @property
    def longest_gap(self) -> int:
        """The most visits from one use of a key to the next: each epoch has each pass once."""
        return self.num_passes if self.repeats else max(1, 2 * self.num_passes - 1)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the pass index at each place of ``epoch`` (negative epochs too: the past that never was)."""
        return _order(self.num_passes, self.order_seed, epoch).copy()

    def epoch_of(self, visit: int) -> int:
        """Return the epoch that ``visit`` belongs to."""
        return visit // self.num_passes

    def pass_of(self, visit: int) -> int:
        """Return the index of the pass that ``visit`` trains."""
        place = visit % self.num_passes
        return place if self.repeats else int(_order(self.num_passes, self.order_seed, self.epoch_of(visit))[place])

    def samples_left(self, visit: int, epochs: int, samples_P: Sequence[int]) -> int:
        """Return the samples from the beginning of ``visit`` to the end of epoch ``epochs``; (P,) is those of passes.

        Looks at one epoch's order, however many there are.
        """
        epoch = self.epoch_of(visit)
        trained: list[int] = self.order(epoch)[: visit - epoch * self.num_passes].tolist()
        return (epochs - epoch) * sum(samples_P) - sum(samples_P[i] for i in trained)


@lru_cache(maxsize=8)
def _order(num_passes: int, seed: int | None, epoch: int) -> NDArray[np.int64]:
    order = np.arange(num_passes, dtype=np.int64)
    if seed is not None:
        salt = mix(np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64)) ^ np.uint64(epoch & 0xFFFF_FFFF_FFFF_FFFF)
        order = np.argsort(mix(mix(order.astype(np.uint64)) ^ mix(salt)), kind="stable").astype(np.int64)
    return order
