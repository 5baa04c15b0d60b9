"""Plans: what a training will move and store, from where its store stands; nothing is moved here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiercache.planning.pass_plan import PassPlan, Planner
from tiercache.planning.reuse_counts import ReuseCounts
from tiercache.tiers.segments import segments_by_pass

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiercache.planning.budget import HostBudget
    from tiercache.planning.next_use import Uses
    from tiercache.planning.positions import Positions
    from tiercache.planning.schedule import Schedule
    from tiercache.planning.store_plan import StorePlan
    from tiercache.store import Store


class Plans:
    """Makes the planners of one cache."""

    def __init__(
        self,
        store: Store,
        schedule: Schedule,
        positions: Positions,
        uses_of: Callable[[int], Uses],
        budget: HostBudget,
        *,
        commit_every: int,
        store_budget: int | None,
    ) -> None:
        self._store, self._schedule, self._positions = store, schedule, positions
        self._budget, self._commit_every, self._store_budget = budget, commit_every, store_budget
        self._counts = ReuseCounts(schedule, positions, uses_of)

    @property
    def cursor(self) -> tuple[int, int]:
        """The pass and the sample at which the store stands."""
        commit = self._store.commit
        return (0, 0) if commit is None else (commit.cursor.pass_index, commit.cursor.sample)

    def planner(self, end: int | None = None) -> Planner:
        """Return the planner of a training up to pass ``end``."""
        return self._planner(end)

    def passes(self, count: int | None) -> list[PassPlan]:
        """Plan the next passes, one epoch and one pass more where not said; beside a training too."""
        planner = self._planner(None)
        return [planner.plan_next() for _ in range(self._schedule.num_passes + 1 if count is None else count)]

    def store_plan(self, state_bytes: int) -> StorePlan:
        """Return what the store takes at its fullest, with so many bytes of dense state in a commit."""
        planner, stored = self._planner(None), self._store.history
        return planner.store_plan(stored, commits=self._store.retention, state_bytes=state_bytes)

    def check_store(self, state_bytes: Callable[[], int]) -> None:
        """Raise BudgetError where the store may come to take more than its budget, if it has one."""
        if self._store_budget is not None:
            self.store_plan(state_bytes()).check(self._store_budget)

    def _planner(self, end: int | None) -> Planner:
        pass_index, sample = self.cursor
        stored = {v: segment.layouts for v, segment in segments_by_pass(self._store).items()}
        return Planner(
            self._schedule, self._positions, self._counts, self._budget, start=pass_index, within=sample > 0,
            commit_every=self._commit_every, end=end, stored=stored,
        )  # fmt: skip
