"""PassLoop: trains one pass after the other, and ends each.

Rows move at the switch: when the loop requests the next pass, if all batches taken of the current one were trained;
else at the first lookup that trains a batch of the next pass.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from tiercache.dist.consistency import check_same
from tiercache.errors import StateError, StoreError
from tiercache.reporting.progress import TrainingProgress
from tiercache.rows.threads import share_threads
from tiercache.store.opening import check_pin
from tiercache.train.batches import check_epochs, num_batches
from tiercache.train.commit_state import FiniteCheck, check_clipping
from tiercache.train.joint_optimizer import ScheduleCheck
from tiercache.train.passes import Pass
from tiercache.train.row_view import RowView
from tiercache.train.settings_check import check_same_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiercache.dist.training_store import TrainingStore
    from tiercache.planning.pass_plan import PassPlan
    from tiercache.planning.plan_file import Rates
    from tiercache.reporting.report import PassReport
    from tiercache.train.batches import BatchPipeline
    from tiercache.train.dense_state import RandomStates
    from tiercache.train.rank_rows import RankRows
    from tiercache.train.raw_keys import RawKeys
    from tiercache.train.resident_rows import ResidentRows

_SWITCHING = "changing the rows of the pass"


class PassLoop:
    """The loop over the passes of one cache. On the training thread."""

    def __init__(
        self,
        training_store: TrainingStore,
        rows: RankRows | ResidentRows,
        raw: RawKeys,
        pipeline: BatchPipeline,
        *,
        seed: int,
        shown: bool,
        on_nonfinite: str,
        rates: Rates | None = None,
    ) -> None:
        self._training_store, self._rows, self._raw = training_store, rows, raw
        self._exchange, self._ranks = raw.exchange, raw.exchange.ranks
        self._pipeline, self._seed, self._shown = pipeline, seed, shown
        self.current: Pass | None = None  # the pass whose rows are on the device
        self._next: Pass | None = None  # the next pass, if requested before the current one was trained to its end
        self._begun: Pass | None = None  # the pass after the newest, if its first batches are already made
        self._end = 0  # the pass at which the loop ends
        self._is_over = False  # True if the loop has ended before the last pass was trained to its end
        self._random: RandomStates | None = None  # at the end of the pass, if the next was requested before
        self._committed_sample = -1  # the sample of the last commit inside the current pass
        self._at: tuple[int, int] | None = None  # trained last when no loop runs, whatever changed since
        self._run: object = None
        self._closed = False
        self._progress = TrainingProgress(0, shown=False)
        self._schedule_check = ScheduleCheck(rows.state.joint)
        self._finite = FiniteCheck(on_nonfinite, rows.backend, rows.state.dense)
        self.reports: list[PassReport] = []
        self._rates = rates
        self._plans: tuple[PassPlan | None, PassPlan | None] = None, None  # of the previous pass, the current one

    def passes(self, epochs: int) -> Iterator[Pass]:
        """Yield the passes up to the end of epoch ``epochs``; see ``TierCache.passes``."""
        ranks, rows = self._ranks, self._rows
        with ranks.raise_on_all("checking registered objects"):
            check_epochs(epochs)
            rows.check_parameters()
            rows.state.check_optimizers()
            check_clipping(rows.state.dense.objects.values())
        if ranks.size > 1:
            check_same(ranks, {"epochs": epochs})
        first, first_sample = self.restore(epochs)
        check_same_settings(rows.state.optimizer, rows.state.dense, ranks)
        run = self._run = object()
        end = self._end = epochs * rows.schedule.num_passes
        if first >= end:
            if first_sample or first % rows.schedule.num_passes:  # a script that skips epochs repeats what it has
                self._at = None
            self._warn_of_end(first, epochs)
            return
        self._plans = None, None
        self._schedule_check.begin()
        self._finite.begin()
        with ranks.raise_on_all(_SWITCHING):
            rows.begin(end)
        total = rows.schedule.samples_left(first, epochs, [one.samples for one in rows.source.passes])
        progress = self._progress = TrainingProgress(total, shown=self._shown)
        thread = threading.get_ident()
        try:
            with ranks.raise_on_all(_SWITCHING):
                current = self._enter(self._make(first, first_sample))
            for index in range(first, end):
                yield current
                if self._closed:
                    raise StateError(rows.closed)
                rows.check_process()
                if self._run is not run:
                    raise StateError(
                        "this loop over passes() was replaced by a newer one, or by restore(): use one loop at a time"
                    )
                if self._is_stopped(current):
                    return
                with ranks.raise_on_all(f"ending pass {index}"):
                    self._check_made(current)
                if self._next is current:  # no batch of it was looked up
                    self._switch()
                is_last = index + 1 == end
                if ranks.all_reduce_min([current.is_trained])[0]:
                    self._end_pass(last=is_last)
                    if not is_last:
                        with ranks.raise_on_all(_SWITCHING):
                            current = self._enter(self._make(index + 1))
                else:
                    current.rows.close()
                    self._is_over = is_last
                    if not is_last:
                        current = self._next = self._make(index + 1)
                        current.loaded_before = None if self.current is None else self.current.loaded
        finally:
            progress.stop()
            # A dropped loop may be collected on the reader, which must not wait for itself: the next call ends it.
            if self._run is run and not self._is_over and threading.get_ident() == thread:
                self._drop_passes(is_dropped=True)
                with suppress(StoreError):  # errors of a dropped iterator are lost: the next call raises again
                    rows.stop()

    @property
    def position(self) -> tuple[int, int]:
        """The pass and the sample at which a new loop would begin."""
        if self._is_over and self.current is not None and self.current.is_trained:
            return self.current.index + 1, 0
        return self._rows.cursor

    def passes_left(self, epochs: int) -> int:
        """Return the number of passes that a new loop would yield."""
        check_epochs(epochs)
        return max(0, epochs * self._rows.schedule.num_passes - self.position[0])

    def batches_left(self, epochs: int, size: int, position: tuple[int, int] | None = None) -> int:
        """Return the number of batches of ``size`` samples that a new loop would yield, or a loop from ``position``."""
        first, sample = self.position if position is None else position
        if first >= epochs * self._rows.schedule.num_passes:
            return 0
        schedule, counts = self._rows.schedule, [one.samples for one in self._rows.source.passes]
        before = schedule.epoch_of(first) * schedule.num_passes
        done = [schedule.sub_dataset_of(index) for index in range(before, first)]
        batches = [num_batches(count, size) for count in counts]
        left = (epochs - schedule.epoch_of(first)) * sum(batches) - sum(batches[one] for one in done)
        current = schedule.sub_dataset_of(first)
        return left - batches[current] + num_batches(counts[current] - sample, size)

    def last_sub_dataset(self, epochs: int) -> int:
        """Return the sub-dataset of the last pass of a loop."""
        schedule = self._rows.schedule
        return schedule.sub_dataset_of(epochs * schedule.num_passes - 1)

    def is_last(self, current: Pass, epochs: int) -> bool:
        """Return True for the last pass of a loop."""
        return current.index + 1 == epochs * self._rows.schedule.num_passes

    def restore(self, epochs: int = 0) -> tuple[int, int]:
        """End a loop; restore the last commit unless it is loaded and ``epochs`` have more passes; return its place."""
        self.finish()
        self.end()
        self._rows.stop()
        share_threads()
        self._training_store.meet()
        is_loaded = (at := self._rows.cursor) == self._at and at[0] < epochs * self._rows.schedule.num_passes
        self._at = self._rows.restore(self._ranks, is_loaded=is_loaded)
        self._training_store.publish()
        self._rows.state.warn_of_schedulers()
        return self._at

    def commit(self) -> None:
        """Commit inside the pass, or the whole pass if the loop has ended; see ``TierCache.commit``."""
        current = self.current
        if current is None:
            raise StateError("commit() was called outside a pass: each pass commits automatically when it ends")
        if self._is_over and current.is_trained and not current.ledger.is_stopped:
            self.finish()
            return
        if current.is_sampled:
            raise StateError(
                f"commit() was called in pass {current.index}, whose samples come from p.sampler(), which does not "
                "count trained samples: take batches from p.loader(dataset), or commit when the pass ends"
            )
        self._prepare_commit(
            "commit() was called between backward and step: step the optimizer first, or drop the gradients with "
            "zero_grad()",
            scope=f"pass {current.index} before its commit",
        )
        self._committed_sample = current.samples_trained
        with self._ranks.raise_on_all("committing inside a pass"):
            if not (sample := current.samples_trained):
                raise StateError("nothing to commit: no batch of this pass has been trained")
            self._rows.commit_within(sample, current.order, self._random)
        self._training_store.publish()

    def keep(self, name: str, rows: RankRows) -> int:
        """Pin the current state, after committing it if needed; see ``TierCache.keep``."""
        check_pin(name)
        current = self.current
        if current is None:
            rows.check_restored()
        elif current.samples_trained not in {current.start_sample, self._committed_sample}:
            self.commit()
        else:
            self._prepare_commit(
                "keep() was called between backward and step: step first", scope=f"pass {current.index} before keep()"
            )
        with self._ranks.raise_on_all(f"keeping a commit as {name!r}"):
            rows.drain()
            current = self.current
            here = self._at if current is None else (current.index, current.samples_trained)
            if here is not None and rows.plans.cursor != here:
                at = rows.plans.cursor
                raise StateError(
                    f"keep() was called at pass {here[0]}, sample {here[1]}, but the newest commit is at pass {at[0]}, "
                    f"sample {at[1]}: call keep() inside the loop after a batch, or restore() first to keep that commit"
                )
            kept = rows.pin(name)
        self._training_store.publish()
        return kept

    def finish(self, last: Pass | None = None) -> None:
        """Commit the last pass if the loop ended before that pass was trained to its end; else do nothing.

        last: also do nothing if it is not the current pass. If the pass still is not trained to its end, commit inside
        it, and raise StateError if the loop did not do so itself. A stopped pass is not committed.
        """
        current = self.current
        if not self._is_over or current is None or last not in {None, current}:
            return
        try:
            if self._is_stopped(current):
                pass
            elif current.is_trained:
                self._end_pass(last=True)
            elif current.samples_trained != self._committed_sample:
                if current.samples_trained > current.start_sample:
                    self.commit()
                with self._ranks.raise_on_all(_SWITCHING):
                    current.ledger.check_trained()
        finally:
            self.end()
            self._rows.stop()

    def leave(self, last: Pass) -> None:
        """Drop the last pass if its last batch was not trained when the loop was left: nothing more is committed."""
        if self._is_over and self.current is last and not last.is_trained:
            self._drop_passes(is_dropped=True)
            with suppress(StoreError):  # as in `passes`
                self._rows.stop()

    def end(self) -> None:
        """End the loop at any point, without a commit."""
        self._run = None  # so that an open iterator ends nothing when it is collected
        self._drop_passes()

    def close(self) -> None:
        """End the loop for good."""
        self._closed = True
        self.end()

    @property
    def newest(self) -> Pass | None:
        """The pass that was yielded last, while the loop runs; or the previous one, if its loader's batches are due."""
        if self.current is not None and self.current.loaded is not None and self.current.loaded.has_more:
            return self.current
        return self._next or self.current

    def step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Apply the pending gradients of the tables that step with ``optimizer``; outside a pass do nothing.

        Saves the random states if this was the last step of a pass, and the loop has already requested the next one.
        Raises StateError if rows are not finite; with several ranks, all raise it at the next batch.
        """
        current = self.current
        if current is None:
            if self._exchange.pending:
                raise StateError("rows were stepped outside a pass: step inside the loop over passes()")
            if self._closed:
                raise StateError(self._rows.closed)
            self._rows.check_process()
            return
        self._exchange.step(current.rows.groups, optimizer)
        current.note_step()
        self._finite.step(current.rows.groups, current.ledger)
        if self._ranks.size == 1:
            self._finite.raise_found()
        is_late = self._next is not None or self._is_over
        if is_late and self._random is None and current.is_trained:
            self._random = self._rows.state.dense.random_states()

    def _warn_of_end(self, first: int, epochs: int) -> None:
        """Warn if a loop has nothing to train: a finished script would otherwise end silently."""
        if epochs and self._ranks.rank == 0:
            warnings.warn(
                f"nothing is left to train: {first:,} passes are trained, {first // self._rows.schedule.num_passes:,} "
                f"epochs, and epochs={epochs} includes earlier runs: request more epochs, or pass the path of a "
                "new store",
                stacklevel=4,
            )

    def _make(self, index: int, first_sample: int = 0) -> Pass:
        begun, self._begun = self._begun, None
        if begun is not None:
            return begun
        rows, schedule = self._rows, self._rows.schedule
        sub_dataset = schedule.sub_dataset_of(index)
        view = RowView((), rows.state.optimizer.gradients, f"pass {index}", rows.backend, self._switch)
        view.spans = rows.positions.table_spans(sub_dataset)
        self._exchange.prepare(sub_dataset, view)
        return Pass(
            index=index, epoch=schedule.epoch_of(index), source=rows.source.passes[sub_dataset], rows=view,
            seed=self._seed, raw=self._raw, pipeline=self._pipeline, first_sample=first_sample,
            order=rows.batch_order if first_sample else None, before_batch=self._before_batch,
            next_pass=self._begin_next if self._ranks.size == 1 else None,
        )  # fmt: skip

    def _begin_next(self, current: Pass) -> Pass | None:
        """Return the pass after the newest one, if ``current`` is the newest, before the loop requests it."""
        if current is not (self._next or self.current) or current.index + 1 >= self._end:
            return None
        self._begun = self._begun or self._make(current.index + 1)
        return self._begun

    def _enter(self, current: Pass) -> Pass:
        report, groups = self._rows.rows_of_pass(current.index)
        current.rows.set_groups(groups)
        self._exchange.open(current.rows)
        self.current, report.losses = current, current.losses
        self._rows.state.optimizer.anchors.ledger, self._committed_sample = current.ledger, -1
        self._predict(self._rows.plan)
        self.reports.append(report)
        report.begin_training()
        return current

    def _predict(self, upcoming: PassPlan | None) -> None:
        """Predict the seconds of the pass that ends, for its report. upcoming: the next plan; None at the last pass."""
        previous, plan = self._plans
        if self._rates is not None and plan is not None:
            samples = self._rows.source.passes[plan.sub_dataset].samples
            seconds, report = self._rates.seconds(samples, plan, previous, upcoming), self.reports[-1]
            report.seconds_predicted, report.bound_predicted = seconds.total, seconds.bound
        self._plans = plan, upcoming

    def _switch(self) -> None:
        current, following = self.current, self._next
        assert following is not None, "the next pass must be fetched ahead"
        if current is not None:
            with self._ranks.raise_on_all(_SWITCHING):
                self._check_evaluated(current, following)
        self._end_pass(last=False)
        self._next = None
        self._enter(following)

    @staticmethod
    def _check_evaluated(current: Pass, following: Pass) -> None:
        """Raise StateError if a lookup without gradients would end the pass before it is trained."""
        has_begun = current.samples_trained > current.start_sample
        if has_begun and not torch.is_grad_enabled() and not current.is_trained:
            raise StateError(
                f"a batch of pass {following.index} was looked up without gradients before any of it was trained, but "
                f"pass {current.index} is not trained to its end: rows of the next pass are loaded with its first "
                "trained batch, so evaluate batches after it, or use cache.evaluate()"
            )

    def _end_pass(self, *, last: bool) -> None:
        """End the current, trained pass, and load the rows of the next one, or write the rows of the last."""
        current = self.current
        assert current is not None
        name = f"pass {current.index}"
        self._prepare_commit(f"{name} {self._exchange.ended_unstepped}", scope=name)
        with self._ranks.raise_on_all(_SWITCHING):
            current.ledger.check_trained()
            if current.loaded is not None:
                current.loaded.check()
            self._schedule_check.check()
            report = self.reports[-1]
            with report.timing("commit"):
                state = self._rows.capture(self._random)
            self._drop_current()
            self._at = current.index + 1, 0  # whether or not the commit succeeds
            self._progress.pass_done(current.num_samples, report)
            if last:
                self._predict(None)
            self._rows.end_pass(state, last=last)
        if last:
            self._training_store.publish()

    def _prepare_commit(self, unstepped: str, *, scope: str) -> None:
        """Check that a commit may be captured; publish the previous commit of a sharded store first.

        Gradients left by another optimizer's step expire with ``scope``. Raises StateError, ``unstepped``, between a
        backward and its step, and RankError if rows step by other settings on other ranks.
        """
        self._exchange.rest()
        self._check_stepped()
        with self._ranks.raise_on_all("writing the rows of the previous pass"):
            if self._exchange.pending:
                raise StateError(unstepped)
            if self.current is not None:
                self._finite.check(self.current.rows.groups, self.current.ledger)
            self._exchange.expire(scope)
            self._rows.check()
            if self._training_store.is_sharded:
                self._rows.drain()
        self._training_store.publish()
        check_same_settings(self._rows.state.optimizer, self._rows.state.dense, self._ranks)
        self._rows.state.dense.keep_apart(self._ranks)

    def _check_stepped(self) -> None:
        """Raise RankError if other ranks wait in a step that this one left out, as a GradScaler of one rank does."""
        if self._next is None and self.current is not None and self.current.ledger.is_step_due:
            self._exchange.tell([], "leaving out a step", None)

    def _check_made(self, current: Pass) -> None:
        try:
            current.ledger.check_made(current.samples_done)
        except StateError:
            if self._exchange.pending:
                raise StateError(f"pass {current.index} {self._exchange.ended_unstepped}") from None
            raise

    def _is_stopped(self, current: Pass) -> bool:
        """Return True if ``current`` or the previous pass was stopped; that is committed if it is trained."""
        self._check_stepped()
        previous = self.current
        is_stopped = current.ledger.is_stopped or (previous is not None and previous.ledger.is_stopped)
        on_none, on_all = self._ranks.all_reduce_min([not is_stopped, is_stopped])
        if not on_none and not on_all:
            raise StateError(
                f"p.stop() was called on some ranks but not on others in pass {current.index}: call it on all ranks, "
                "after the same batch"
            )
        if on_none:
            return False
        has_previous = self._next is current and previous is not None and not previous.ledger.is_stopped
        if has_previous and self._ranks.all_reduce_min([previous is not None and previous.is_trained])[0]:
            self._end_pass(last=True)
        with self._ranks.raise_on_all(_SWITCHING):
            if self._training_store.is_sharded:  # the previous pass's commit waits for all ranks
                self._rows.drain()
        self._training_store.publish()
        return True

    def _before_batch(self, current: Pass) -> None:
        self._rows.check()
        self._rows.load_ahead()
        self._finite.raise_found()
        if current is self.current:
            self._progress.batch(current.index, current.samples_done)

    def _drop_current(self, *, is_dropped: bool = False) -> None:
        if self.current is not None:
            self.current.end(is_dropped=is_dropped)
            self.current = self._random = None
            self.reports[-1].end_training()
        self._exchange.discard()

    def _drop_passes(self, *, is_dropped: bool = False) -> None:
        if self.current is not None:
            self._at = self.current.index, max(self.current.samples_trained, self.current.ledger.samples_trained)
        self._drop_current(is_dropped=is_dropped)
        if self._next is not None:
            self._next.end(is_dropped=is_dropped)
            self._next = None
        if self._begun is not None:
            self._begun.end(is_dropped=is_dropped)
            self._begun = None
        self._is_over = False
