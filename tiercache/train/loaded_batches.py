"""LoadedBatches: the batches of a pass that its loader has handed out, assigned to lookups."""

from __future__ import annotations

import weakref
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from tiercache.data.sub_dataset import lookup_digest
from tiercache.errors import DatasetError, StateError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tiercache.data.sub_dataset import RecordedBatches
    from tiercache.store.table import Table
    from tiercache.train.passes import Pass

_MOST_TAKEN = 2
"""The number of batches that a loop may take before it trains the first."""


class LoadedBatch(NamedTuple):
    """A batch of a pass."""

    first: int
    """Samples of the pass before it."""
    last: int
    """End of the batch, in samples of the pass."""
    places: NDArray[np.int64] | None
    """Its samples, as indices in the sub-dataset; None: the sub-dataset has batches of an iterable."""
    block: int | None
    """Its number among the recorded batches, if it is one."""


class LoadedBatches:
    """Assigns lookups of plain keys to batches, which are trained in the order in which they are taken.

    A loop may take one batch ahead of its training. It does so from the first batch on, or never. Or it takes all
    batches of a step at once, of which it accumulates gradients: their lookups count for all of them.
    """

    def __init__(self, owner: Pass, recorded: RecordedBatches, previous: LoadedBatches | None) -> None:
        """previous: the batches of the previous pass, if some are not trained yet."""
        self._owner, self._recorded, self._previous = weakref.ref(owner), recorded, previous
        self.per_step = 1
        """Batches of a step."""
        self.checked = True
        """True if recorded batches have to make their recorded lookups."""
        self._taken: deque[LoadedBatch] = deque()
        """Untrained batches; the first one is the batch of the last lookup."""
        self._due = 0
        """Batches taken, or the loader's end, since the last lookup."""
        self._has_begun = self._is_over = False
        self._seen: set[int] = set()
        """Digests of the lookups of the first batch."""

    @property
    def _pass(self) -> Pass:
        found = self._owner()
        assert found is not None, "the batches of a pass that is gone"
        return found

    def take(self, batch: LoadedBatch) -> None:
        """Count a batch that is handed out."""
        self._pass.rows.check_open()
        self._pass.before_batch()
        if 1 < self.per_step == len(self._taken):
            self.check()
            self._taken.clear()
            self._seen.clear()
        if self._previous is not None and self._taken:  # before the first one, the end of the other loader counted
            self._previous._due += 1
        self._taken.append(batch)
        self._due += 1
        self._pass.samples_done = batch.last
        self._pass.ledger.make(batch.last)

    def exhaust(self) -> None:
        """Record the end of the loader."""
        self._due += 1
        self._is_over = True
        self._pass.ledger.exhaust()

    @property
    def has_more(self) -> bool:
        """True if a lookup made now belongs to one of these batches, and not to the next pass."""
        if self.per_step > 1:
            return not self._is_over and bool(self._taken)
        return self._due < len(self._taken) if self._has_begun else bool(self._taken)

    @property
    def current(self) -> LoadedBatch | None:
        """The batch that a lookup made now belongs to, the last one of a step; None before the first batch."""
        if not self._taken:
            return None
        if self.per_step > 1:
            return self._taken[-1]
        return self._taken[min(self._due if self._has_begun else 0, len(self._taken) - 1)]

    def look_up(self, table: Table, keys: NDArray[np.int64], *, trains: bool) -> None:
        """Record a lookup with gradients enabled, before it is made. trains: False for a frozen module.

        Raises DatasetError if the previous batch lacked recorded lookups, StateError if too many batches were taken.
        """
        if self.per_step == 1:
            self._move_on()
        if self._is_checked:
            self._seen.add(lookup_digest(keys, table.table_id))
        if not trains or self.per_step > 1:
            for batch in self._looked_up:
                self._pass.ledger.look_up(batch.last, gradients=True, trains=trains)

    def _move_on(self) -> None:
        """Drop the batches that were trained before the one of this lookup."""
        if not self._has_begun and self._due > _MOST_TAKEN:
            raise StateError(
                f"{self._due:,} batches of pass {self._pass.index} were taken before one was trained: take at most one "
                "batch ahead, so that lookups are counted for the right batch, or pass cache.batches(batches_per_step="
                f"{self._due}) if your loop takes the batches of a step at once"
            )
        due, self._due = self._due if self._has_begun else 0, 0
        self._has_begun = True
        for _ in range(min(due, len(self._taken) - 1)):
            self.check()
            self._taken.popleft()
            self._seen.clear()

    @property
    def _looked_up(self) -> list[LoadedBatch]:
        """The batches of a lookup that is made now."""
        return [*self._taken] if self.per_step > 1 else [*islice(self._taken, 1)]

    def check(self) -> None:
        """Raise DatasetError if the last batch that was looked up lacked any of its recorded lookups."""
        if not self._is_checked or not self._seen:
            return
        blocks = [one.block for one in self._looked_up if one.block is not None]
        recorded = {digest for block in blocks for digest in self._recorded.digests(block).tolist()}
        if missing := len(recorded - self._seen):
            raise DatasetError(
                f"{self.name_of(self._taken[0])} did not make {missing} of its {len(recorded)} recorded lookups: "
                "the data, the model's forward or their random numbers differ from the "
                "recording. Record key sets again, with same_draws=True if the dataset draws random numbers, or use "
                "p.loader(..., check_keys=False), which only checks that each key is in the pass"
            )

    def name_of(self, batch: LoadedBatch) -> str:
        """Return the name of a batch for errors."""
        number = "a batch" if batch.block is None else f"recorded batch {batch.block}"
        return f"{number} of pass {self._pass.index} (its samples {batch.first:,} to {batch.last - 1:,})"

    @property
    def _is_checked(self) -> bool:
        found = self._looked_up
        return self.checked and bool(found) and all(one.block is not None for one in found)
