"""Evaluation: read-only passes over any keys, with rows as of now; several ranks get their part of each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.data.raw_batch import OOV_KEY
from tiercache.errors import BudgetError
from tiercache.kernels.cpu.key_sweeps import search_keys
from tiercache.planning.row_offsets import RowOffsets
from tiercache.rows.device import group_rows
from tiercache.sizes import format_bytes
from tiercache.store.row_codec import from_words
from tiercache.train.batches import check_exchange_schedule, cut_batches, in_order
from tiercache.train.missing_rows import unseen_vectors
from tiercache.train.row_view import RowView
from tiercache.values.batch import BatchRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.data.dataset import DatasetView, SubDatasetView
    from tiercache.dist.row_loader import LocalRows
    from tiercache.rows.backends.base import Backend
    from tiercache.rows.device import DeviceTier, SlotAssignment
    from tiercache.schema import Feature
    from tiercache.store import Store
    from tiercache.store.table import Group
    from tiercache.train.batches import BatchPipeline
    from tiercache.train.local_exchange import Exchange
    from tiercache.values.batch import Batch
    from tiercache.values.lookups import GroupRows, Unseen


_CHUNK_BYTES = 1 << 20  # rows on their way, with all their fields


class CurrentRows:
    """Reads rows as of now: device, then host, then store, then the initial row. Writes nothing."""

    def __init__(
        self,
        *,
        store: Store,
        positions: RowOffsets,
        device: DeviceTier | None = None,
        assignments: list[SlotAssignment] | None = None,
        sub_dataset: int | None = None,
        keys_of: Callable[[int, int], NDArray[np.int64]],
        after: int,
        cached: Callable[[int, int, int], NDArray[np.uint8] | None] | None = None,
        trained: DatasetView | None = None,
        unknown: Mapping[str, Sequence[NDArray[np.float32]]] | None = None,
    ) -> None:
        """``unknown``: by table the fields, (1, width) each, of an out-of-vocabulary row that stands elsewhere."""
        self._store, self._positions, self._device = store, positions, device
        self._assignments, self._sub_dataset = assignments or [], sub_dataset
        self._keys_of, self._after, self._cached, self._trained = keys_of, after, cached, trained
        self._shared: dict[str, bool] = {}
        self._unknown = unknown or {}
        self.unseen: Unseen = "initial"
        """What keys are read as that were never trained."""
        self._place = {
            table.name: (g, positions.first_table(g) + i, i)
            for g, group in enumerate(positions.groups)
            for i, table in enumerate(group.tables)
        }

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of the store."""
        return self._positions.groups

    def fields(self, table_name: str, keys: NDArray[np.int64]) -> tuple[NDArray[np.float32], ...]:
        """Return the vector and every optimizer state of ``keys``: arrays (n, width), in the order asked for.

        Keys may be any int64, trained or not, each once.
        """
        group = self._positions.groups[self._place[table_name][0]]
        out = tuple(np.empty((keys.size, field.width), dtype=np.float32) for field in group.fields)
        self.fill(table_name, keys, out)
        return out

    def fill(self, table_name: str, keys: NDArray[np.int64], out: tuple[NDArray[np.float32], ...]) -> None:
        """Do what ``fields`` does into the first ``len(out)`` fields, with little memory beside them."""
        g, table, i = self._place[table_name]
        spec = self._positions.tables[table]
        missing = np.ones(keys.size, dtype=bool)
        if self._device is not None and self._sub_dataset is not None:
            places = np.empty(keys.size, dtype=np.int64)
            mine = self._keys_of(self._sub_dataset, table)
            search_keys(np.asarray(mine), spec.table_id, keys, places)
            found = np.nonzero(places >= 0)[0]
            first = int(self._positions.table_starts(self._sub_dataset, g)[i])
            slots = self._assignments[g].slots_K[places[found] + first]
            for f, (field, to) in enumerate(zip(spec.fields, out, strict=False)):
                for part in _chunks(found.size, 4 * field.width):
                    (to[found[part]],) = from_words((field,), (self._device.read(g, f, slots[part]),))
            missing[found] = False
        self._from_store(table_name, g, keys, out, missing)
        rest = np.nonzero(missing)[0]
        if rest.size:
            self._untrained(table_name, keys, rest, out)

    def _from_store(
        self,
        name: str,
        group: int,
        keys: NDArray[np.int64],
        out: tuple[NDArray[np.float32], ...],
        missing: NDArray[np.bool_],
    ) -> None:
        ask = np.nonzero(missing)[0]
        if ask.size == 0:
            return
        segment_ids, rows = self._store.locate(name, keys[ask], after=self._after)
        by_id = {segment.id: segment for segment in self._store.segments}
        for segment_id in np.unique(segment_ids[segment_ids >= 0]):
            mine = np.nonzero(segment_ids == segment_id)[0]
            mine = mine[np.argsort(rows[mine])]  # so that a page is read once
            for chunk in _chunks(mine.size, self._positions.groups[group].row_bytes):
                part = mine[chunk]
                fields = self._store.read_rows(by_id[int(segment_id)], group, rows[part], cached=self._cached)
                for to, have in zip(out, fields, strict=False):
                    to[ask[part]] = have
            missing[ask[mine]] = False

    def _untrained(
        self,
        name: str,
        keys: NDArray[np.int64],
        rest: NDArray[np.int64],
        out: tuple[NDArray[np.float32], ...],
    ) -> None:
        g, table, _ = self._place[name]
        stand_in, is_alone = keys[rest], not self._shares_unknown(name)
        if name in self._unknown:
            for to, have in zip(out, self._unknown[name], strict=False):
                to[rest] = have
            return
        if not is_alone:
            if OOV_KEY not in stand_in:
                shared = self.fields(name, np.array([OOV_KEY], dtype=np.int64))
                for to, have in zip(out, shared, strict=False):
                    to[rest] = have
                return
            stand_in = np.full(rest.size, OOV_KEY, dtype=np.int64)
        table_spec = self._positions.tables[table]
        for part in _chunks(rest.size, 4 * table_spec.dim):
            out[0][rest[part]] = unseen_vectors(table_spec, stand_in[part], self.unseen if is_alone else "initial")
        for to, field in zip(out[1:], self._positions.groups[g].fields[1:], strict=False):
            to[rest] = field.initial

    def _shares_unknown(self, name: str) -> bool:
        """Whether the table was trained with an out-of-vocabulary row."""
        if name not in self._shared:
            table = self._place[name][1]
            place = np.empty(1, dtype=np.int64)
            unknown = np.array([OOV_KEY], dtype=np.int64)
            found = False
            for p in range(len(self._trained.passes) if self._trained is not None else 0):
                search_keys(np.asarray(self._keys_of(p, table)), self._positions.tables[table].table_id, unknown, place)
                found = found or place[0] >= 0
            self._shared[name] = found
        return self._shared[name]


def _chunks(count: int, item_bytes: int) -> Iterator[slice]:
    """Cut ``count`` items into stretches of at most ``_CHUNK_BYTES``."""
    step = max(1, _CHUNK_BYTES // max(1, item_bytes))
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


MARK_SAMPLES = 65_536  # samples whose ids are looked at together when a slice is cut
_SCRATCH_BYTES = 40  # for each row that is brought: its key, its place on the device, segment, row and slot


class Evaluation:
    """A slice of a dataset under evaluation, whose rows fit the evaluation budget of every rank."""

    def __init__(
        self, source: SubDatasetView, first: int, last: int, rows: RowView, exchange: Exchange, pipeline: BatchPipeline
    ) -> None:
        self.sub_dataset = source.index
        """The pass of the evaluation set."""
        self.num_samples = last - first
        """Samples of the slice, those of all ranks."""
        self._source, self._first, self._last, self._rows = source, first, last, rows
        self._exchange, self._pipeline = exchange, pipeline

    def batches(self, size: int, *, prefetch: int | None = None, schedule: str = "interleaved") -> Iterator[Batch]:
        """Yield batches of ``size`` samples in the order of the data; ``prefetch`` as of `Pass.batches`. Collective.

        Rank r of W has samples [r * n // W, (r + 1) * n // W) of a batch of n; one without any gets the first of them
        with weight 0: leave such a batch out. "interleaved": rows of the next batch are exchanged while this one is
        used; "simple": one thing after the other.
        """
        check_exchange_schedule(schedule)
        cuts = cut_batches(in_order, size, first=self._first, last=self._last)
        requests = (BatchRequest(self._source, places, places.size, done) for done, places in cuts)
        yield from self._pipeline.batches(
            self._exchange, requests, self._rows, prefetch=prefetch, overlap=schedule == "interleaved"
        )

    @staticmethod
    def slices(
        passes: DatasetView,
        live_rows: LocalRows,
        budget: int,
        exchange: Exchange,
        pipeline: BatchPipeline,
        backend: Backend,
    ) -> Iterator[Evaluation]:
        """Cut every pass into slices and bring in their rows, one slice at a time. Collective.

        Raises BudgetError where the rows of a handful of samples exceed ``budget`` bytes on some rank.
        """
        positions, ranks = RowOffsets.of(passes, live_rows.groups), exchange.ranks
        for source in passes.passes:
            with ranks.raise_on_all("beginning a pass of an evaluation"):
                source.check_samples()
                wanted = LocalInput(source, positions, passes.schema.features)
            first = 0
            while first < source.samples:
                with ranks.raise_on_all("cutting a slice of an evaluation"):
                    mine = wanted.cut(first, budget)
                last = ranks.all_reduce_min([mine])[0]
                with ranks.raise_on_all("reading the rows of an evaluation"):
                    if last < mine:
                        wanted.end_at(first, last)
                    view = RowView(
                        bring_rows(live_rows, source, positions, wanted.used, backend),
                        None,
                        f"samples {first:,} to {last:,} of evaluation sub-dataset {source.index}",
                        backend,
                    )
                view.schema, view.keys_of = source.whole.schema, source.whole.keys
                exchange.prepare(source.index, view)
                exchange.open(view)
                yield Evaluation(source, first, last, view, exchange, pipeline)
                exchange.rest()  # first: it waits for what reads samples for it
                view.end()
                first = last


class LocalInput:
    """Which local ids the samples of a slice use."""

    def __init__(self, source: SubDatasetView, positions: RowOffsets, features: tuple[Feature, ...]) -> None:
        self._source, self._tables = source, {feature.name: feature.table for feature in features}
        self._width = {table.name: 4 * table.dim + _SCRATCH_BYTES for table in positions.tables}
        self._spans = {table.name: source.span(table.name) for table in positions.tables}
        self._all = all(span == slice(0, source.whole.rows(name)) for name, span in self._spans.items())
        self.used: dict[str, NDArray[np.bool_]] = {}
        """By table: of each key that is trained here whether the slice that was cut last uses it."""

    def cut(self, first: int, budget: int) -> int:
        """Return where the slice from ``first`` ends: as many samples as have rows of ``budget`` bytes in all."""
        used, source = self._none(), self._source
        last, step, num_bytes = first, MARK_SAMPLES, 0
        while last < source.samples:
            upto = min(last + step, source.samples)
            trial = {name: marks.copy() for name, marks in used.items()}
            self._mark(trial, last, upto)
            wanted = sum(int(np.count_nonzero(marks)) * self._width[name] for name, marks in trial.items())
            if wanted <= budget:
                used, last, num_bytes = trial, upto, wanted
            elif step > 1:
                step = max(1, step // 4)
            elif last > first:
                break
            else:
                raise BudgetError(
                    f"the rows of sample {last:,} of evaluation sub-dataset {source.index} take "
                    f"{format_bytes(wanted)}, but eval_budget is {format_bytes(budget)}: raise eval_budget (and "
                    "host_budget, which holds it)"
                )
            if num_bytes > 0 and step < MARK_SAMPLES and last - first >= 64 * step:
                break  # nearly full: what single samples could still add is not worth their reads
        self.used = used
        return last

    def end_at(self, first: int, last: int) -> None:
        """Make the slice from ``first`` end at ``last``, before where ``cut`` ended it."""
        self.used = self._none()
        for begin in range(first, last, MARK_SAMPLES):
            self._mark(self.used, begin, min(begin + MARK_SAMPLES, last))

    def _none(self) -> dict[str, NDArray[np.bool_]]:
        return {name: np.zeros(span.stop - span.start, dtype=bool) for name, span in self._spans.items()}

    def _mark(self, used: dict[str, NDArray[np.bool_]], first: int, last: int) -> None:
        samples = self._source.read(np.arange(first, last, dtype=np.int64))
        for feature, ids in samples.ids.items():
            table = self._tables[feature]
            low, high = self._spans[table].start, self._spans[table].stop
            mine = ids.ids if self._all else ids.ids[(ids.ids >= low) & (ids.ids < high)] - np.int32(low)
            used[table][mine] = True


def bring_rows(
    live_rows: LocalRows, source: SubDatasetView, positions: RowOffsets,
    used: dict[str, NDArray[np.bool_]], backend: Backend,
) -> list[GroupRows]:  # fmt: skip
    """Fetch the vectors of all used ids, in float32 whatever their dtype."""
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
