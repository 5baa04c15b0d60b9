"""TierCache: trains the passes of a pass set over the tiers, and commits."""

from __future__ import annotations

import sys
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tiercache.backends.opening import open_backend
from tiercache.errors import StateError
from tiercache.planning.budget import HostBudget
from tiercache.planning.positions import Positions
from tiercache.planning.schedule import Schedule
from tiercache.sizes import parse_bytes
from tiercache.tiers.device_tier import DeviceTier
from tiercache.tiers.pass_switcher import PassSwitcher
from tiercache.tiers.pinned_arena import PinnedArena
from tiercache.tiers.rows import RowView
from tiercache.tiers.segments import waiting_streams
from tiercache.tiers.use_files import UseFiles
from tiercache.training.ahead import Ahead
from tiercache.training.commit_state import CommitState
from tiercache.training.evaluation import Evaluation, RowsNow
from tiercache.training.matching import check_commit_every, check_features, check_schedule, check_tables
from tiercache.training.plans import Plans
from tiercache.training.progress import TrainingProgress, prepare_kernels
from tiercache.training.raw_batch import RawKeys
from tiercache.training.step_hooks import StepHooks, named_objects
from tiercache.training.threads import share_threads
from tiercache.training.visit import Visit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import nn

    from tiercache.backends.base import Backend
    from tiercache.passes.passset import PassSet
    from tiercache.planning.store_plan import StorePlan
    from tiercache.planning.visit_plan import VisitPlan
    from tiercache.store import Store
    from tiercache.tiers.report import VisitReport
    from tiercache.training.batch import Batch

_TRAINED_BY: weakref.WeakKeyDictionary[Store, weakref.ref[TierCache]] = weakref.WeakKeyDictionary()
"""The cache that is in a loop over its passes, by the store that it commits to."""


class TierCache:
    """Device tier and host tier over a store, for the passes of one pass set.

    Rows are trained on the device; at each switch of passes they move as planned. Host and device bytes are
    planned before the first batch and held. Use it from one thread; it owns a reader and a writer thread until
    ``close``. Not for tables that fit: ``ResidentCache`` trains those without a store.
    """

    def __init__(
        self,
        store: Store,
        passes: PassSet,
        *,
        model: nn.Module | Sequence[nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        device: str | Backend = "cpu",
        device_budget: int | str,
        host_budget: int | str,
        eval_budget: int | str | None = None,
        store_budget: int | str | None = None,
        commit_every: int = 1,
        seed: int = 0,
        order_seed: int | None = None,
        progress: bool | None = None,
    ) -> None:
        """Plan the budgets.

        model, optimizer: one or several, registered as "model" and "optimizer", or "model0", "model1" and so on; see
        ``register``. device: where rows are trained: "cpu", "cuda" or "cuda:1"; the model goes there too.
        device_budget: bytes ("64MiB") there for rows and slot maps, and for an index of raw keys where they leave room.
        host_budget: bytes of anonymous memory for dump, staging, cached rows, one write transaction and evaluation.
        eval_budget: bytes of it reserved for rows of evaluation passes; a sixteenth where not given. store_budget:
        bytes that the store may come to take, checked here and, with the dense state, before training; it stops no
        write, as Store.open's max_bytes does.
        commit_every: visits between commits. seed: of the shuffling of batches. order_seed: None trains the passes of
        every epoch in their order, a number in a seeded one. progress: whether a bar shows; None: on a terminal.

        Raises BudgetError where the plan exceeds a budget or the device, PassSetError where passes and store do not
        belong together, CudaError where the GPU cannot be used, ValueError for a commit_every below 1.
        """
        check_commit_every(commit_every)
        self._backend = backend = open_backend(device, store.tables)
        prepare_kernels(store.tables)
        share_threads()
        self.store, self.pass_set = store, passes
        self._check_alone()
        check_tables(store, passes)
        self._schedule = Schedule(num_passes=len(passes.passes), pass_set_digest=passes.digest, order_seed=order_seed)
        check_schedule(store, passes, self._schedule)
        self._seed = seed
        self._shown = sys.stderr.isatty() if progress is None else progress
        self._progress: TrainingProgress | None = None
        self._positions = Positions.of(passes, store.groups)
        self._device = DeviceTier(self._positions, parse_bytes(device_budget), backend)
        evaluation = None if eval_budget is None else parse_bytes(eval_budget)
        self._budget = HostBudget.of(self._positions, parse_bytes(host_budget), evaluation, waiting_streams(store))
        self._keys_of = self._positions.keys_of(passes)  # nothing that the cache has refers to it: it goes when dropped
        self._uses = UseFiles(self._schedule, self._positions, self._keys_of, store.path if store.mode == "a" else None)
        self._plans = Plans(
            store, self._schedule, self._positions, self._uses.of, self._budget, commit_every=commit_every,
            store_budget=None if store_budget is None else parse_bytes(store_budget),
        )  # fmt: skip
        self._memory = PinnedArena(self._budget.rows, self._budget.region, backend)
        self._state = CommitState(store.groups, backend)
        self.dense, self.optimizer = self._state.dense, self._state.optimizer
        self._transfer = PassSwitcher(
            store, self._device, backend, self._memory, self._budget, self._positions, self._keys_of,
            self._uses.of, schedule_digest=self._schedule.digest, environment=self._state.environment,
        )  # fmt: skip
        room = parse_bytes(device_budget) - self._device.num_bytes
        self._raw = RawKeys(passes.schema, store.groups, self.rows_now, self.optimizer, backend, room)
        self._ahead, self._hooks = Ahead(backend), StepHooks(self.step)
        self._visit: Visit | None = None
        self._run: object = None
        self._closed = False
        self.reports: list[VisitReport] = []
        """One report for each visit trained by this object, the last one unfinished while it runs."""
        self.plan()  # a budget that cannot hold says so here, not in the middle of a run
        self._plans.check_store(lambda: 0 if store.commit is None else store.commit.state_bytes)
        self.register(**named_objects(model=model, optimizer=optimizer))

    # -- before training ----------------------------------------------------------------------------------

    def register(self, **objects: Any) -> None:
        """Commit the state of these objects with the rows, and step rows when an optimizer among them steps.

        Objects have ``state_dict`` and ``load_state_dict``: modules, optimizers, schedulers. A registered torch
        optimizer's ``step()`` applies the pending row gradients after its own work; without one call ``step``
        yourself. Random generators of torch, numpy and random are part of every commit. Raises StateError for
        state that cannot be stored.
        """
        self._check_open()
        self._hooks.check(objects)
        self.dense.register(objects)
        self.optimizer.gradients.is_stepped |= self._hooks.follow(objects)

    def plan(self, *, visits: int | None = None) -> list[VisitPlan]:
        """Plan the next visits (one epoch and one visit more where not said) without training them."""
        return self._plans.visits(visits)

    # -- training -----------------------------------------------------------------------------------------

    def passes(self, epochs: int) -> Iterator[Visit]:
        """Yield the visits up to the end of epoch ``epochs``, from the last commit on.

        First restores rows and tracked state from the last commit; a store without one gets a commit of the
        state as it is now. A visit ends, and every ``commit_every``-th and the last commits, when the next one is
        asked for, so what the loop's body does after its batches belongs to it. The commit of visit t is durable by
        the end of visit t + 1; exhausting the iterator waits for the last. Leaving the loop early commits nothing.
        """
        self._check_open()
        self._check_alone()
        run = self._run = object()
        self._end_visit()
        self._transfer.stop()
        share_threads()
        self._restore()
        self._plans.check_store(self.dense.most_bytes)
        cursor, end = self._plans.cursor, epochs * self._schedule.num_passes
        if cursor[0] >= end:
            return
        if self.store.mode != "a":
            raise StateError(f"{self.store.label} is open for reading: open it with mode='a' to train")
        self._transfer.begin(self._plans.planner(end), end=end)
        first_sample = cursor[1]
        visits = range(cursor[0], end)
        total = self._schedule.samples_left(cursor[0], epochs, [one.samples for one in self.pass_set.passes])
        progress = self._progress = TrainingProgress(total, shown=self._shown)
        _TRAINED_BY[self.store] = weakref.ref(self)
        try:
            for index in visits:
                visit = self._begin_visit(index, first_sample)
                yield visit
                if self._run is not run:
                    self._check_open()
                    raise StateError("this loop over passes() was replaced by a newer one: use one loop at a time")
                self.optimizer.check_stepped(f"visit {index}")
                first_sample = 0
                self._transfer.check()
                report = self._transfer.report
                assert report is not None
                with report.timing("commit"):
                    state = self._state.capture()
                self._end_visit()
                progress.visit_done(visit.num_samples, report)
                if index + 1 < end:
                    self._transfer.switch(state)
                else:
                    self._transfer.finish(state)
        finally:
            progress.stop()
            if self._run is run:
                self._end_visit()
                self._transfer.stop()
                _TRAINED_BY.pop(self.store, None)

    def step(self) -> None:
        """Apply the pending row gradients: each row of the batches since the last step is updated once.

        Called by a tracked optimizer's ``step()``; call it yourself only where there is none.
        """
        if self._visit is None:
            raise StateError("step() was called outside a visit: step inside the loop over passes()")
        self.optimizer.step(self._visit.rows.groups)

    def discard(self) -> None:
        """Drop the pending row gradients: for a skipped step, as ``zero_grad()`` does for dense ones."""
        self.optimizer.discard()

    def set_learning_rate(self, learning_rate: float, *, tables: Sequence[str] | None = None) -> None:
        """Change the row optimizers' learning rate from the next step on; part of the next commit.

        tables: names, all tables where not given. Tables of one group share a rate: raises ValueError where
        only a part of a group is named.
        """
        self.optimizer.set_learning_rate(learning_rate, tables)

    def commit(self) -> None:
        """Commit now, inside the visit, after the batches yielded so far; returns when it is durable.

        Raises StateError between a backward and its step, and outside a visit.
        """
        if self._visit is None:
            raise StateError("commit() was called outside a visit: a visit commits by itself when it ends")
        if self.optimizer.pending:
            raise StateError("commit() was called between backward and step: call step() or discard() first")
        self._transfer.check()
        if self._visit.samples_done == 0:
            raise StateError("commit() was called before the first batch of a visit: the last commit stands there")
        state, settings = self._state.capture()
        self._transfer.commit_within(self._visit.samples_done, (state, settings | {"order": self._visit.order}))

    def drain(self, *, staged: bool = True) -> None:
        """Wait until every dump is durable and, with ``staged``, the next visit's rows are staged.

        Training needs no such wait; measurements do. Raises what went wrong on either thread.
        """
        self._transfer.drain()
        if staged:
            self._transfer.await_staging()

    # -- evaluation ---------------------------------------------------------------------------------------

    def evaluation(self, passes: PassSet) -> Iterator[Evaluation]:
        """Yield read-only slices of another pass set, at any moment between batches.

        Rows are as of now: from the device, the host or the store; keys never trained have the out-of-vocabulary
        row where their table was trained with one, else their initial row. Nothing is written. A slice is as
        many samples as ``eval_budget`` holds rows for; lookups in it leave no gradients.
        """
        self._check_open()
        check_tables(self.store, passes)
        check_features(self.pass_set, passes)
        yield from Evaluation.slices(passes, self.rows_now(), self.eval_bytes, self._ahead)

    def evaluation_batch(self, keys: Mapping[str, Any], **others: Any) -> Batch:
        """Return a read-only batch of raw keys, as ``Visit.batch`` takes them, at any moment between batches.

        Rows are as of now, as in ``evaluation``, read for this batch alone. Raises BudgetError where its unique keys
        have more rows than ``eval_budget`` holds.
        """
        self._check_open()
        return self._raw.evaluate(keys, self.eval_bytes, **others)

    def rows_now(self, unknown: Mapping[str, Sequence[NDArray[np.float32]]] | None = None) -> RowsNow:
        """Return a reader of any rows as of now; used between batches, before the next one is trained.

        Waits until every dump is durable: a row that is on its way to the store is nowhere else. ``unknown``: fields
        of out-of-vocabulary rows that stand elsewhere.
        """
        self._check_open()
        self._transfer.drain()
        visit = self._visit
        return RowsNow(
            store=self.store, device=self._device if visit else None, placements=self._transfer.placements,
            pass_now=visit.pass_index if visit else None, positions=self._positions, keys_of=self._keys_of,
            after=visit.index if visit else self._plans.cursor[0] - 1, cached=self._transfer.cached_piece,
            trained=self.pass_set, unknown=unknown,
        )  # fmt: skip

    def close(self) -> None:
        """End both threads and let go of all memory. What is not committed is not kept; the store stays open.

        Whatever asks the cache for rows from then on raises StateError; reports can be read.
        """
        self._run, self._closed = None, True  # a loop that was left open finds nothing to end when it is collected
        if self._trained_by() is self:
            del _TRAINED_BY[self.store]
        with ExitStack() as last:
            for close in (self._backend.drop_scratch, self._raw.close, self._transfer.close, self._hooks.remove):
                last.callback(close)  # the last one first
            self._end_visit()

    def __enter__(self) -> TierCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- parts --------------------------------------------------------------------------------------------

    @property
    def tables(self) -> tuple[Any, ...]:
        """The tables trained, in the store's order."""
        return self._positions.tables

    @property
    def groups(self) -> tuple[Any, ...]:
        """The groups of tables with the same row layout."""
        return self._positions.groups

    @property
    def schema(self) -> Any:
        """The schema of the pass set."""
        return self.pass_set.schema

    @property
    def device(self) -> torch.device:
        """Where rows are trained."""
        return self._backend.device

    @property
    def device_bytes(self) -> int:
        """Bytes of rows, slot maps and, once raw keys were looked up, of the index of keys on the device."""
        return self._device.num_bytes + self._raw.index_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes kept on the device from batch to batch, beside ``device_bytes``: batches made ahead included."""
        return self._backend.scratch_bytes + self._ahead.device_bytes

    @property
    def pinned_batch_bytes(self) -> int:
        """Bytes of pinned memory that batches made ahead take now, beside ``host_budget``; 0 on a CPU."""
        return self._ahead.host_bytes

    @property
    def eval_bytes(self) -> int:
        """Bytes of host memory for the rows of an evaluation."""
        return self._budget.evaluation

    @property
    def host_bytes_peak(self) -> int:
        """The most bytes of rows the host held so far."""
        return self._memory.peak_bytes

    def _trained_by(self) -> TierCache | None:
        return _TRAINED_BY.get(self.store, lambda: None)()

    def _check_alone(self) -> None:
        """Raise StateError where another cache is in a loop over its passes of the same store."""
        if self._trained_by() not in {None, self}:
            raise StateError(
                f"{self.store.label} is being trained by another TierCache: end its loop over passes(), or close it, "
                "before another one trains"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this cache is closed: open another one on its store to go on")

    def store_plan(self, state_bytes: int = 0) -> StorePlan:
        """Return what the store takes at its fullest, with so many bytes of dense state in a commit."""
        return self._plans.store_plan(state_bytes)

    def _restore(self) -> None:
        if self.store.commit is None:
            self._transfer.publish_first(self._state.capture())
            return
        check_schedule(self.store, self.pass_set, self._schedule)
        self._state.restore(self.store)

    def _begin_visit(self, index: int, first_sample: int) -> Visit:
        plan, report = self._transfer.plan, self._transfer.report
        assert plan is not None
        assert report is not None
        assert plan.visit == index
        self.optimizer.discard()
        groups = self._device.rows_of(plan.pass_index)
        rows = RowView(groups, self.optimizer.gradients, f"visit {index}", self._backend)
        self._visit = Visit(
            index=index, epoch=plan.epoch, source=self.pass_set.passes[plan.pass_index], rows=rows,
            seed=self._seed, raw=self._raw, ahead=self._ahead, first_sample=first_sample,
            order=self.store.commit.settings.get("order") if first_sample and self.store.commit else None,
            before_batch=self._before_batch, note_loss=report.losses.append,
        )  # fmt: skip
        self.reports.append(report)
        report.begin_training()
        return self._visit

    def _before_batch(self, done: int) -> None:
        """Raise what went wrong on a thread, and show how far the visit is."""
        self._transfer.check()
        assert self._visit is not None
        assert self._progress is not None
        self._progress.batch(self._visit.index, done)

    def _end_visit(self) -> None:
        if self._visit is not None:
            self._visit.end()
            self._visit = None
            self.reports[-1].end_training()
        self.optimizer.discard()
