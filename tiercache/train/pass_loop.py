"""PassLoop: which pass is trained, and where one ends.

Rows move at the switch from one pass to the next. That is when the loop asks for the next one and all batches that it
took of the last were trained; where it fetches ahead of its training they were not, and the switch waits for the first
lookup that trains a batch of the next pass.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from tiercache.errors import StateError, StoreError
from tiercache.reporting.progress import TrainingProgress
from tiercache.rows.threads import share_threads
from tiercache.train.commit_state import FiniteCheck
from tiercache.train.joint_optimizer import RateWatch
from tiercache.train.passes import Pass, check_epochs
from tiercache.train.row_view import RowView

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiercache.dist.training_store import TrainingStore
    from tiercache.planning.pass_plan import PassPlan
    from tiercache.planning.plan_file import Rates
    from tiercache.reporting.report import PassReport
    from tiercache.train.batches import BatchPipeline
    from tiercache.train.dense_state import RandomStates
    from tiercache.train.local_exchange import Exchange
    from tiercache.train.rank_rows import RankRows
    from tiercache.train.raw_keys import RawKeys
    from tiercache.train.resident_rows import ResidentRows

_SWITCHING = "changing the rows of the pass"


class PassLoop:
    """The loop over the passes of one cache. On the training thread."""

    def __init__(
        self,
        opened: TrainingStore,
        rows: RankRows | ResidentRows,
        exchange: Exchange,
        raw: RawKeys,
        pipeline: BatchPipeline,
        *,
        seed: int,
        shown: bool,
        on_nonfinite: str,
        rates: Rates | None = None,
    ) -> None:
        self._opened, self._rows, self._exchange, self._ranks = opened, rows, exchange, exchange.ranks
        self._raw, self._pipeline, self._seed, self._shown = raw, pipeline, seed, shown
        self.current: Pass | None = None
        """The one whose rows are on the device."""
        self._ahead: Pass | None = None
        """The next one, where the loop asked for it before that was trained to its end."""
        self._is_over = False
        """Whether the loop has ended before the last one was trained to its end."""
        self._random: RandomStates | None = None
        """Of the end of the pass, where the loop has gone on before."""
        self._sample = -1
        """Where the last commit inside the current pass stands."""
        self._run: object = None
        self._closed = False
        self._progress = TrainingProgress(0, shown=False)
        self._rate_watch = RateWatch(rows.state.joint)
        self._finite = FiniteCheck(on_nonfinite, rows.backend, rows.state.dense)
        self.reports: list[PassReport] = []
        self._rates = rates
        self._plans: tuple[PassPlan | None, PassPlan | None] = None, None
        """Of the pass before and of the current one."""

    def passes(self, epochs: int) -> Iterator[Pass]:
        """Yield the passes up to the end of epoch ``epochs``: ``TierCache.passes`` promises it."""
        ranks, rows = self._ranks, self._rows
        with ranks.raise_on_all("looking at what was registered"):
            check_epochs(epochs)
            rows.check_parameters()
            rows.state.check_optimizers()
        first, first_sample = self.restore()
        run = self._run = object()
        end = epochs * rows.schedule.num_passes
        if first >= end:
            return
        self._plans = None, None
        self._rate_watch.begin()
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
                if self._ahead is current:  # no batch of it was looked up
                    self._bring()
                is_last = index + 1 == end
                if ranks.all_reduce_min([current.is_trained])[0]:
                    self._leave(last=is_last)
                    if not is_last:
                        with ranks.raise_on_all(_SWITCHING):
                            current = self._enter(self._make(index + 1))
                else:
                    current.rows.leave()
                    self._is_over = is_last
                    if not is_last:
                        current = self._ahead = self._make(index + 1)
        finally:
            progress.stop()
            # A dropped loop may be collected on the reader, which must not wait for itself: what comes next ends it.
            if self._run is run and not self._is_over and threading.get_ident() == thread:
                self._end_pass(is_dropped=True)
                with suppress(StoreError):  # nobody hears an iterator that is dropped: the next call says it again
                    rows.stop()

    def restore(self) -> tuple[int, int]:
        """End a loop and go back to the last commit; returns the pass and the sample where it stands."""
        self.finish()
        self.end()
        self._rows.stop()
        share_threads()
        self._opened.meet()
        first, first_sample = self._rows.restore(self._ranks)
        self._opened.publish()
        self._rows.state.warn_of_schedulers()
        return first, first_sample

    def commit(self) -> None:
        """Commit inside the pass, or the pass itself where the loop has ended: ``TierCache.commit`` promises it."""
        current = self.current
        if current is None:
            raise StateError("commit() was called outside a pass: each pass commits by itself when it ends")
        if self._is_over and current.is_trained:
            self.finish()
            return
        self._settle(
            "commit() was called between backward and step: step the optimizer first, or drop the gradients with "
            "zero_grad()",
            left=f"pass {current.index} before its commit",
        )
        self._sample = current.samples_trained
        with self._ranks.raise_on_all("committing inside a pass"):
            if not (sample := current.samples_trained):
                raise StateError("nothing to commit: no batch of this pass has been trained")
            self._rows.commit_within(sample, current.order, self._random)
        self._opened.publish()

    def finish(self) -> None:
        """Commit the last pass of a loop that has ended before it was trained to its end; else do nothing.

        Where it was not, commits inside it behind the batches that were trained, and raises StateError if the loop did
        not do so itself. A batch that was yielded and not trained is not counted.
        """
        current = self.current
        if not self._is_over or current is None:
            return
        try:
            if current.is_trained:
                self._leave(last=True)
            elif current.samples_trained != self._sample and not current.ledger.is_stopped:
                if current.samples_trained > current.start_sample:
                    self.commit()
                with self._ranks.raise_on_all(_SWITCHING):
                    current.ledger.check_trained()
        finally:
            self.end()
            self._rows.stop()

    def end(self) -> None:
        """End it, wherever it is; nothing is committed."""
        self._run = None  # an iterator that was left open finds nothing to end when it is collected
        self._end_pass()

    def close(self) -> None:
        """End it for good."""
        self._closed = True
        self.end()

    @property
    def newest(self) -> Pass | None:
        """The pass that the loop was given last, while it runs."""
        return self._ahead or self.current

    def note_step(self) -> None:
        """Take note of the generators where the step was the last one of the pass, and the loop is further.

        Raises StateError if rows are not finite any more; of several ranks, all raise it at the next batch.
        """
        current = self.current
        assert current is not None
        self._finite.step(current.rows.groups, current.ledger)
        if self._ranks.size == 1:
            self._finite.raise_found()
        late = self._ahead is not None or self._is_over
        if late and self._random is None and current.is_trained:
            self._random = self._rows.state.dense.random_states()

    # -- inside -------------------------------------------------------------------------------------------

    def _make(self, index: int, first_sample: int = 0) -> Pass:
        """Return a pass whose rows are not on the device yet."""
        rows, schedule = self._rows, self._rows.schedule
        gradients = rows.state.optimizer.gradients
        sub_dataset = schedule.sub_dataset_of(index)
        view = RowView((), gradients, f"pass {index}", rows.backend, self._bring)
        self._exchange.prepare(sub_dataset, view)
        return Pass(
            index=index, epoch=schedule.epoch_of(index), source=rows.source.passes[sub_dataset],
            rows=view, seed=self._seed, raw=self._raw,
            exchange=self._exchange, pipeline=self._pipeline, first_sample=first_sample,
            order=rows.batch_order if first_sample else None,
            before_batch=self._before_batch,
        )  # fmt: skip

    def _enter(self, current: Pass) -> Pass:
        """Begin a pass whose rows were brought to the device, and return it."""
        report, groups = self._rows.brought(current.index)
        current.rows.show(groups)
        self._exchange.open(current.rows)
        self.current, report.losses = current, current.losses
        self._rows.state.optimizer.anchors.ledger, self._sample = current.ledger, -1
        self._predict(self._rows.plan)
        self.reports.append(report)
        report.begin_training()
        return current

    def _predict(self, upcoming: PassPlan | None) -> None:
        """Complete the report of the pass that ends, as the one behind it is known: None where training ends."""
        before, plan = self._plans
        if self._rates is not None and plan is not None:
            samples = self._rows.source.passes[plan.sub_dataset].samples
            seconds, report = self._rates.seconds(samples, plan, before, upcoming), self.reports[-1]
            report.seconds_predicted, report.bound_predicted = seconds.total, seconds.bound
        self._plans = plan, upcoming

    def _bring(self) -> None:
        """End the pass that was trained, and begin the one that the loop has fetched ahead of it."""
        ahead = self._ahead
        assert ahead is not None, "rows were asked for of no pass that was fetched ahead"
        before = self.current
        if before is not None:
            with self._ranks.raise_on_all(_SWITCHING):
                before.check_ends(ahead)
        self._leave(last=False)
        self._ahead = None
        self._enter(ahead)

    def _leave(self, *, last: bool) -> None:
        """End the pass that was trained and bring the rows of the next one, or write those of the last."""
        current = self.current
        assert current is not None
        self._settle(
            f"pass {current.index} {self._exchange.ended_unstepped}",
            left=f"pass {current.index}",
        )
        with self._ranks.raise_on_all(_SWITCHING):
            current.ledger.check_trained()
            self._rate_watch.check()
            report = self.reports[-1]
            with report.timing("commit"):
                state = self._rows.capture(self._random)
            self._end_trained()
            self._progress.pass_done(current.num_samples, report)
            if last:
                self._predict(None)
            self._rows.leave(state, last=last)
        if last:
            self._opened.publish()

    def _settle(self, unstepped: str, *, left: str) -> None:
        """Come to where a commit may be captured: of a sharded store the commit before is published first.

        Raises StateError, ``unstepped``, between a backward and its step.
        """
        self._exchange.rest()
        with self._ranks.raise_on_all("writing the rows of the pass before"):
            if self._exchange.pending:
                raise StateError(unstepped)
            if self.current is not None:
                self._finite.check(self.current.rows.groups, self.current.ledger)
            self._exchange.expire(left)
            self._rows.check()
            if self._opened.is_sharded:
                self._rows.drain()
        self._opened.publish()

    def _check_made(self, current: Pass) -> None:
        """Raise StateError if the loop did not take all batches of a pass."""
        try:
            current.ledger.check_made(current.samples_done)
        except StateError:
            if self._exchange.pending:
                raise StateError(f"pass {current.index} {self._exchange.ended_unstepped}") from None
            raise

    def _is_stopped(self, current: Pass) -> bool:
        """Whether the loop said so, of the pass or of the one before; the one before is committed if it is trained."""
        mine = current.ledger.is_stopped or (self.current is not None and self.current.ledger.is_stopped)
        on_none, on_all = self._ranks.all_reduce_min([not mine, mine])
        if not on_none and not on_all:
            raise StateError(
                f"p.stop() was called on some ranks and not on others in pass {current.index}: call it on all ranks, "
                "after the same batch"
            )
        if on_none:
            return False
        before = self.current
        is_behind = self._ahead is current and before is not None and not before.ledger.is_stopped
        if is_behind and self._ranks.all_reduce_min([before is not None and before.is_trained])[0]:
            self._leave(last=True)
        with self._ranks.raise_on_all(_SWITCHING):
            if self._opened.is_sharded:  # the commit of the pass before waits for all ranks
                self._rows.drain()
        self._opened.publish()
        return True

    def _before_batch(self, current: Pass) -> None:
        """Raise what went wrong on a thread, and show how far the pass is."""
        self._rows.check()
        self._finite.raise_found()
        if current is self.current:
            self._progress.batch(current.index, current.samples_done)

    def _end_trained(self, *, is_dropped: bool = False) -> None:
        if self.current is not None:
            self.current.end(is_dropped=is_dropped)
            self.current = self._random = None
            self.reports[-1].end_training()
        self._exchange.discard()

    def _end_pass(self, *, is_dropped: bool = False) -> None:
        self._end_trained(is_dropped=is_dropped)
        if self._ahead is not None:
            self._ahead.end(is_dropped=is_dropped)
            self._ahead = None
        self._is_over = False
