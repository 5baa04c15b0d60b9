"""Evaluation: read-only passes over any keys, with their current rows. With several ranks each gets a part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.dist.consistency import check_same
from tiercache.errors import BudgetError
from tiercache.planning.row_offsets import RowOffsets
from tiercache.rows.device import group_rows
from tiercache.sizes import distinct_sizes, format_bytes
from tiercache.train.batches import SCHEDULES, check_size, check_word, cut_batches, in_order, num_batches
from tiercache.train.row_view import RowView
from tiercache.values.batch import BatchRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from tiercache.data.dataset import DatasetView, PassDataset, SubDatasetView
    from tiercache.dist.row_loader import LocalRows
    from tiercache.rows.backends.base import Backend
    from tiercache.schema import Feature
    from tiercache.train.batches import BatchPipeline
    from tiercache.train.cache import TierCache
    from tiercache.train.local_exchange import Exchange
    from tiercache.train.row_optimizer import RowOptimizer
    from tiercache.values.batch import Batch
    from tiercache.values.lookups import GroupRows


_MARK_SAMPLES = 65_536  # samples whose ids are read together when a slice is cut
_SCRATCH_BYTES = 40  # for each row: its key, device position, segment, row and slot


class Evaluation:
    """A slice of a dataset under evaluation, whose rows fit the evaluation budget of every rank."""

    def __init__(
        self, source: SubDatasetView, first: int, last: int, rows: RowView, exchange: Exchange, pipeline: BatchPipeline
    ) -> None:
        self.sub_dataset = source.index
        """The pass of the evaluation set."""
        self.num_samples = last - first
        """Samples of the slice, over all ranks."""
        self._source, self._first, self._last, self._rows = source, first, last, rows
        self._exchange, self._pipeline = exchange, pipeline

    def batches(self, size: int, *, prefetch: int | None = None, schedule: str = "interleaved") -> Iterator[Batch]:
        """Yield batches of ``size`` samples in the order of the data; ``prefetch`` as in `Pass.batches`. Collective.

        Rank r of W has samples [r * n // W, (r + 1) * n // W) of a batch of n. A rank without samples gets the first
        sample with weight 0: leave such a batch out. "interleaved": rows of the next batch are exchanged while this one
        is used; "simple": rows are exchanged between batches.
        """
        check_word("schedule", schedule, SCHEDULES)
        cuts = cut_batches(in_order, size, first=self._first, last=self._last)
        requests = (BatchRequest(self._source, places, places.size, done) for done, places in cuts)
        overlap = schedule == "interleaved"
        queue = self._pipeline.queue(self._exchange, requests, self._rows, prefetch=prefetch, overlap=overlap)
        yield from queue.batches(overlap=overlap)

    @staticmethod
    def slices(
        passes: DatasetView,
        live_rows: Callable[[], LocalRows],
        optimizer: RowOptimizer,
        budget: int,
        exchange: Exchange,
        pipeline: BatchPipeline,
        backend: Backend,
        multiple: int = 1,
    ) -> Iterator[Evaluation]:
        """Cut every pass into slices and read their rows, one slice at a time. Collective.

        multiple: slices have a multiple of this number of samples, except at the end of a pass. Raises BudgetError if
        the rows of ``multiple`` samples exceed ``budget`` bytes on some rank, RankError if ranks differ in arguments.
        """
        check_size(multiple)
        positions, ranks = RowOffsets.of(passes, live_rows().groups), exchange.ranks
        if ranks.size > 1:  # rows are asked for by their positions in the key sets
            check_same(ranks, {"the evaluated dataset": passes.digest, "batch_size": multiple})
        for source in passes.passes:
            with ranks.raise_on_all("beginning a pass of an evaluation"):
                source.check_samples()
                cutter = _SliceCutter(source, positions, passes.schema.features)
            first = 0
            while first < source.samples:
                with ranks.raise_on_all("cutting a slice of an evaluation"):
                    own_last = cutter.cut(first, budget)
                last = ranks.all_reduce_min([own_last])[0]
                if last < source.samples:
                    last -= (last - first) % multiple
                if last == first:
                    raise BudgetError(
                        f"the rows of a batch of {multiple:,} samples from sample {first:,} of evaluation sub-dataset "
                        f"{source.index} exceed eval_budget, {format_bytes(budget)}: raise eval_budget (and "
                        "host_budget, which contains it), or evaluate smaller batches"
                    )
                reader = live_rows()
                with ranks.raise_on_all("reading the rows of an evaluation"):
                    if last < own_last:
                        cutter.end_at(first, last)
                    view = RowView(
                        _read_rows(reader, source, positions, cutter.used, backend),
                        None,
                        f"samples {first:,} to {last:,} of evaluation sub-dataset {source.index}",
                        backend,
                    )
                view.schema, view.keys_of = source.whole.schema, source.whole.keys
                view.expire_with(optimizer)
                exchange.prepare(source.index, view)
                exchange.open(view)
                yield Evaluation(source, first, last, view, exchange, pipeline)
                exchange.rest()  # first: it waits for pending reads of samples
                view.end()
                first = last


class EvaluationBatches:
    """The batches of a dataset under evaluation; see ``TierCache.evaluation_batches``."""

    def __init__(self, cache: TierCache, passes: PassDataset, size: int, **options: Any) -> None:
        """options: the arguments of ``Evaluation.batches``."""
        size = check_size(size)
        self._cache, self._passes, self._size, self._options = cache, passes, size, options

    def __len__(self) -> int:
        return sum(num_batches(one.samples, self._size) for one in self._passes.passes)

    def __iter__(self) -> Iterator[Batch]:
        if not self._cache.is_restored:
            self._cache.restore()
        for part in self._cache.evaluate(self._passes, batch_size=self._size):
            yield from part.batches(self._size, **self._options)


class _SliceCutter:
    """Cuts slices of a pass, and marks the local ids that their samples use."""

    def __init__(self, source: SubDatasetView, positions: RowOffsets, features: tuple[Feature, ...]) -> None:
        self._source, self._tables = source, {feature.name: feature.table for feature in features}
        self._width = {table.name: 4 * table.dim + _SCRATCH_BYTES for table in positions.tables}
        self._spans = {table.name: source.span(table.name) for table in positions.tables}
        self._all = all(span == slice(0, source.whole.rows(name)) for name, span in self._spans.items())
        self.used: dict[str, NDArray[np.bool_]] = {}
        """By table, a mask of this rank's keys that the newest slice uses."""

    def cut(self, first: int, budget: int) -> int:
        """Return the end of the slice from ``first``: as many samples as have at most ``budget`` bytes of rows."""
        used, source = self._no_marks(), self._source
        last, step, num_bytes = first, _MARK_SAMPLES, 0
        while last < source.samples:
            upto = min(last + step, source.samples)
            trial = {name: marks.copy() for name, marks in used.items()}
            self._mark(trial, last, upto)
            rows_bytes = sum(int(np.count_nonzero(marks)) * self._width[name] for name, marks in trial.items())
            if rows_bytes <= budget:
                used, last, num_bytes = trial, upto, rows_bytes
            elif step > 1:
                step = max(1, step // 4)
            elif last > first:
                break
            else:
                need, allowed = distinct_sizes(rows_bytes, budget)
                raise BudgetError(
                    f"the rows of sample {last:,} of evaluation sub-dataset {source.index} take {need}, but "
                    f"eval_budget is {allowed}: raise eval_budget to {rows_bytes} bytes (and host_budget, which "
                    "contains it)"
                )
            if num_bytes > 0 and step < _MARK_SAMPLES and last - first >= 64 * step:
                break  # nearly full: single samples that still fit are not worth their reads
        self.used = used
        return last

    def end_at(self, first: int, last: int) -> None:
        """Shorten the slice from ``first`` to end at ``last``."""
        self.used = self._no_marks()
        for begin in range(first, last, _MARK_SAMPLES):
            self._mark(self.used, begin, min(begin + _MARK_SAMPLES, last))

    def _no_marks(self) -> dict[str, NDArray[np.bool_]]:
        return {name: np.zeros(span.stop - span.start, dtype=bool) for name, span in self._spans.items()}

    def _mark(self, used: dict[str, NDArray[np.bool_]], first: int, last: int) -> None:
        samples = self._source.read(np.arange(first, last, dtype=np.int64))
        for feature, ids in samples.ids.items():
            table = self._tables[feature]
            low, high = self._spans[table].start, self._spans[table].stop
            own = ids.ids if self._all else ids.ids[(ids.ids >= low) & (ids.ids < high)] - np.int32(low)
            used[table][own] = True


def _read_rows(
    live_rows: LocalRows, source: SubDatasetView, positions: RowOffsets,
    used: dict[str, NDArray[np.bool_]], backend: Backend,
) -> list[GroupRows]:  # fmt: skip
    """Return the vectors of all used ids, in float32 whatever their dtype."""
    groups = []
    for spec in positions.groups:
        starts = positions.table_starts(source.index, spec.index)
        slots = np.full(int(starts[-1]), -1, dtype=np.int32)
        counts = [int(np.count_nonzero(used[table.name])) for table in spec.tables]
        vectors = np.empty((sum(counts), spec.fields[0].width), dtype=np.float32)
        at = 0
        for i, table in enumerate(spec.tables):
            local = np.nonzero(used[table.name])[0]
            if local.size:
                keys = np.ascontiguousarray(source.keys(table.name)[local])
                live_rows.fill(table.name, keys, (vectors[at : at + local.size],))
                slots[starts[i] + local] = np.arange(at, at + local.size, dtype=np.int32)
                at += local.size
        fields = (backend.to_device(vectors),)
        groups.append(group_rows(spec, fields, backend.to_device(slots), starts, dtype="float32"))
    return groups
