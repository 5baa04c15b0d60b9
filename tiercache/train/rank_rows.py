"""RankRows: the rows that one rank trains, on the device, on the host and in its store, within its budgets."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from tiercache.dist.budget_checks import plans_of
from tiercache.errors import BudgetError, StateError
from tiercache.planning.matching import check_schedule, check_tables
from tiercache.planning.row_offsets import RowOffsets
from tiercache.planning.schedule import Schedule
from tiercache.rows.device import DeviceTier
from tiercache.rows.pinned import PinnedArena
from tiercache.rows.switch import PassSwitcher
from tiercache.train.commit_state import CommitState
from tiercache.train.evaluation import CurrentRows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.data.dataset import DatasetView
    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.planning.budgets import Budgets
    from tiercache.planning.pass_plan import PassPlan
    from tiercache.planning.schedule import OrderRule
    from tiercache.reporting.report import PassReport
    from tiercache.rows.backends.base import Backend
    from tiercache.rows.switch import StateBytes
    from tiercache.store import Store
    from tiercache.train.dense_state import RandomStates
    from tiercache.values.lookups import GroupRows

_TRAINED_BY: weakref.WeakKeyDictionary[Store, weakref.ref[RankRows]] = weakref.WeakKeyDictionary()
"""What is in a loop over its passes, by the store that it commits to."""


class RankRows:
    """Plans and moves the rows of one rank; it owns a reader and a writer thread until ``close``."""

    closed = "this cache is closed: open another one on its store to continue"
    """The error message for calls after ``close``."""

    def __init__(
        self, store: Store, source: DatasetView, backend: Backend, budgets: Budgets, *, order: OrderRule
    ) -> None:
        """Plan, and allocate the memory.

        Raises BudgetError if the plan exceeds a budget or the device, DatasetError if passes and store do not match,
        StateError if the store is being trained.
        """
        self.store, self.source, self.backend = store, source, backend
        self.check_alone()
        check_tables(store, source)
        self.schedule = Schedule.of(source, order)
        check_schedule(store, source, self.schedule)
        self.positions = positions = RowOffsets.of(source, store.groups)
        self.device = DeviceTier(positions, budgets.device_budget, backend)
        self.plans, self._uses = plans_of(budgets, source, store, order=order)
        self.budget = self.plans.host
        self._keys_of = positions.keys_of(source)  # nothing that the cache has refers to it: it goes when dropped
        self._check_plans()  # a budget that cannot hold says so here, not in the middle of a run
        self.memory = PinnedArena(self.budget.rows, self.budget.region, backend)
        self.state = CommitState(store.groups, backend)
        self.transfer = PassSwitcher(
            store, self.device, backend, self.memory, self.budget, positions, self._keys_of, self._uses.of,
            schedule_digest=self.schedule.digest, environment=self.state.environment,
        )  # fmt: skip

    def _check_plans(self) -> None:
        """Plan an epoch. Raises BudgetError where a budget does not hold it, and leaves no file of it then."""
        commit = self.store.commit
        try:
            self.plans.passes(None)
            self.plans.check_store(lambda: 0 if commit is None else commit.state_bytes)
        except BudgetError:
            self._uses.discard()
            raise

    def restore(self, ranks: AnyCommunicator) -> tuple[int, int]:
        """Go back to the last commit, with tracked state, and return where it stands; without one, make one.

        Collective.
        """
        is_fresh = self.store.commit is None
        with ranks.raise_on_all("looking at the last commit"):
            self.check_alone()
            if not is_fresh:
                check_schedule(self.store, self.source, self.schedule)
        if not is_fresh:
            self.state.restore(self.store, ranks)
        self.state.dense.keep_once(ranks)
        with ranks.raise_on_all("making the first commit" if is_fresh else "planning the store"):
            if is_fresh:
                self.transfer.publish_first(self.state.capture())
            self.plans.check_store(self.state.dense.most_bytes)
        self.state.dense.note_restored()
        return self.plans.cursor

    def begin(self, end: int) -> None:
        """Begin with the next pass, on to ``end``; nobody else trains the store until ``stop``."""
        if self.store.mode != "a":
            raise StateError(
                f"{self.store.label} is open for reading: to train, give a path, or a Store opened with mode='a'"
            )
        _TRAINED_BY[self.store] = weakref.ref(self)
        self.transfer.begin(self.plans.planner(end), end=end)

    def brought(self, index: int) -> tuple[PassReport, Sequence[GroupRows]]:
        """Return the report and the rows of the pass that was brought."""
        plan, report = self.transfer.plan, self.transfer.report
        assert plan is not None
        assert report is not None
        assert plan.pass_index == index
        return report, self.device.rows_of(plan.sub_dataset)

    def capture(self, random: RandomStates | None = None) -> StateBytes | None:
        """Return a copy of the dense state that a commit stores."""
        return self.state.capture(random)

    def leave(self, state: StateBytes | None, *, last: bool) -> None:
        """End the trained pass: load the rows of the next one, or write the rows of the last."""
        assert state is not None
        (self.transfer.finish if last else self.transfer.switch)(state)

    def commit_within(self, sample: int, order: Mapping[str, object] | None, random: RandomStates | None) -> None:
        """Commit inside the pass, after ``sample`` samples in the given order. Returns when it is durable."""
        state, settings = self.state.capture(random)
        self.transfer.commit_within(sample, (state, settings | {"order": order}))

    @property
    def batch_order(self) -> Any:
        """The order of batches that the last commit inside a pass was made in."""
        return None if self.store.commit is None else self.store.commit.settings.get("order")

    @property
    def plan(self) -> PassPlan | None:
        """The plan of the pass whose rows were brought."""
        return self.transfer.plan

    def check_parameters(self) -> None:
        """Raise StateError if an optimizer steps parameters that no commit would keep."""
        self.state.check_parameters()

    def check_restored(self) -> None:
        """Raise StateError if a model is not the one that the last commit trained with its rows."""
        self.state.check_restored(self.store)

    def check_evaluated(self, passes: DatasetView) -> None:
        """Raise DatasetError for a dataset of other tables."""
        check_tables(self.store, passes)

    def check(self) -> None:
        """Raise what went wrong on a thread."""
        self.transfer.check()

    def check_process(self) -> None:
        """Raise StateError in a fork of the process that has the threads."""
        self.transfer.check_process()

    def drain(self, *, staged: bool = False) -> None:
        """Wait until every dump is durable and, with ``staged``, the rows of the next pass are prefetched."""
        self.transfer.drain()
        if staged:
            self.transfer.await_staging()

    def stop(self) -> None:
        """End a loop over the passes, wherever it is."""
        self.transfer.stop()
        if self._trained_by() is self:
            del _TRAINED_BY[self.store]

    @property
    def device_bytes(self) -> int:
        """Bytes of rows and slot maps."""
        return self.device.num_bytes

    @property
    def eval_bytes(self) -> int:
        """Bytes of host memory that are reserved for the rows of an evaluation."""
        return self.budget.evaluation

    @property
    def host_bytes_peak(self) -> int:
        """The most bytes of rows that the host has held so far."""
        return self.memory.peak_bytes

    def now(self, index: int | None, unknown: Mapping[str, Sequence[NDArray[np.float32]]] | None) -> CurrentRows:
        """Return a reader of any rows as of now, inside pass ``index`` or outside; waits until every dump is durable.

        ``unknown``: fields of out-of-vocabulary rows that stand elsewhere.
        """
        self.transfer.drain()
        return CurrentRows(
            store=self.store, device=self.device, assignments=self.transfer.assignments,
            sub_dataset=None if index is None else self.schedule.sub_dataset_of(index), positions=self.positions,
            keys_of=self._keys_of, after=self.plans.cursor[0] - 1 if index is None else index,
            cached=self.transfer.cached_page, trained=self.source, unknown=unknown,
        )  # fmt: skip

    def close(self) -> None:
        """End both threads and let go of all memory; the store stays open."""
        if self._trained_by() is self:
            del _TRAINED_BY[self.store]
        self.transfer.close()

    def _trained_by(self) -> RankRows | None:
        return _TRAINED_BY.get(self.store, lambda: None)()

    def check_alone(self) -> None:
        """Raise StateError where another cache is in a loop over its passes of the same store."""
        if self._trained_by() not in {None, self}:
            raise StateError(
                f"{self.store.label} is being trained by another TierCache: end its loop over passes(), or close it, "
                "before another one trains"
            )
