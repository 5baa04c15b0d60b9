"""Evaluation: read-only passes over any keys, with rows as of now."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from tiercache.errors import BudgetError
from tiercache.kernels.cpu.next_use import search_keys
from tiercache.passes.keybatch import OOV_KEY
from tiercache.planning.positions import Positions
from tiercache.sizes import format_bytes
from tiercache.store.vectors import from_words
from tiercache.tiers.first_vectors import initial_vectors
from tiercache.tiers.rows import GroupRows, RowView
from tiercache.training.batch import cut_batches, in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.backends.base import Backend
    from tiercache.passes.passset import Pass, PassSet
    from tiercache.schema import Feature
    from tiercache.store import Store
    from tiercache.tiers.device_tier import DeviceTier, Placement
    from tiercache.training.ahead import Ahead
    from tiercache.training.batch import Batch

MARK_SAMPLES = 65_536  # samples whose ids are looked at together when a slice is cut
_CHUNK_BYTES = 1 << 20  # rows on their way, with all their fields
_SCRATCH_BYTES = 40  # for each row that is brought: its key, its place on the device, segment, row and slot


class RowsNow:
    """Reads rows as of now: device, then host, then store, then the initial row. Writes nothing."""

    def __init__(
        self,
        *,
        store: Store,
        positions: Positions,
        device: DeviceTier | None = None,
        placements: list[Placement] | None = None,
        pass_now: int | None = None,
        keys_of: Callable[[int, int], NDArray[np.int64]],
        after: int,
        cached: Callable[[int, int, int], NDArray[np.uint8] | None] | None = None,
        trained: PassSet | None = None,
        unknown: Mapping[str, Sequence[NDArray[np.float32]]] | None = None,
    ) -> None:
        """``unknown``: by table the fields, (1, width) each, of an out-of-vocabulary row that stands elsewhere."""
        self._store, self._positions, self._device = store, positions, device
        self._placements, self._pass_now = placements or [], pass_now
        self._keys_of, self._after, self._cached, self._trained = keys_of, after, cached, trained
        self._shared: dict[str, bool] = {}
        self._unknown = unknown or {}
        self._place = {
            table.name: (g, positions.first_table(g) + i, i)
            for g, group in enumerate(positions.groups)
            for i, table in enumerate(group.tables)
        }

    @property
    def groups(self) -> tuple[object, ...]:
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
        if self._device is not None and self._pass_now is not None:
            places = np.empty(keys.size, dtype=np.int64)
            mine = self._keys_of(self._pass_now, table)
            search_keys(np.asarray(mine), spec.table_id, keys, places)
            found = np.nonzero(places >= 0)[0]
            first = int(self._positions.table_starts(self._pass_now, g)[i])
            slots = self._placements[g].slots_K[places[found] + first]
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
            mine = mine[np.argsort(rows[mine])]  # so that a piece is read once
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
        stand_in = keys[rest]
        if name in self._unknown:
            for to, have in zip(out, self._unknown[name], strict=False):
                to[rest] = have
            return
        if self._shares_unknown(name):
            if OOV_KEY not in stand_in:
                shared = self.fields(name, np.array([OOV_KEY], dtype=np.int64))
                for to, have in zip(out, shared, strict=False):
                    to[rest] = have
                return
            stand_in = np.full(rest.size, OOV_KEY, dtype=np.int64)
        table_spec = self._positions.tables[table]
        for part in _chunks(rest.size, 4 * table_spec.dim):
            out[0][rest[part]] = initial_vectors(table_spec, stand_in[part])
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


class Evaluation:
    """A slice of an evaluation pass whose rows fit the evaluation budget."""

    def __init__(self, source: Pass, first: int, last: int, rows: RowView, ahead: Ahead) -> None:
        self.pass_index = source.index
        """The pass of the evaluation set."""
        self.num_samples = last - first
        """Samples of the slice."""
        self._source, self._first, self._last, self._rows, self._ahead = source, first, last, rows, ahead

    def batches(self, size: int, *, ahead: int | None = None) -> Iterator[Batch]:
        """Yield batches of ``size`` samples in the order of the data; ``ahead`` as of `Visit.batches`."""
        cuts = cut_batches(in_order, size, first=self._first, last=self._last)
        made = self._ahead.batches(self._source, self._rows, cuts, most=ahead, before=self._rows.check)
        yield from map(itemgetter(1), made)  # no name here is a batch's, as in a visit

    @staticmethod
    def slices(passes: PassSet, rows_now: RowsNow, budget: int, ahead: Ahead) -> Iterator[Evaluation]:
        """Cut every pass into slices and bring in their rows, one slice at a time.

        Raises BudgetError where the rows of a handful of samples exceed ``budget`` bytes.
        """
        positions = Positions.of(passes, rows_now.groups)  # type: ignore[arg-type]
        for source in passes.passes:
            source.check_samples()
            wanted = Wanted(source, positions, passes.schema.features)
            first = 0
            while first < source.samples:
                last = wanted.cut(first, budget)
                view = RowView(
                    bring_rows(rows_now, source, positions, wanted.used, ahead.backend),
                    None,
                    f"samples {first:,} to {last:,} of evaluation pass {source.index}",
                    ahead.backend,
                )
                yield Evaluation(source, first, last, view, ahead)
                view.end()
                first = last


class Wanted:
    """Which local ids the samples of a slice use."""

    def __init__(
        self,
        source: Pass,
        positions: Positions,
        features: tuple[Feature, ...],
        spans: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """``spans``: by table, the first local id that counts and the one behind the last; all where not given."""
        self._source, self._tables = source, {feature.name: feature.table for feature in features}
        self._width = {table.name: 4 * table.dim + _SCRATCH_BYTES for table in positions.tables}
        self._all = spans is None
        self._spans = spans or {table.name: (0, source.rows(table.name)) for table in positions.tables}
        self.used: dict[str, NDArray[np.bool_]] = {}
        """By table: of each local id that counts whether the slice that was cut last uses it."""

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
                    f"the rows of sample {last:,} of evaluation pass {source.index} take {format_bytes(wanted)}, but "
                    f"eval_budget is {format_bytes(budget)}: raise eval_budget (and host_budget, which holds it)"
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
        return {name: np.zeros(high - low, dtype=bool) for name, (low, high) in self._spans.items()}

    def _mark(self, used: dict[str, NDArray[np.bool_]], first: int, last: int) -> None:
        samples = self._source.read(np.arange(first, last, dtype=np.int64))
        for feature, ids in samples.ids.items():
            table = self._tables[feature]
            low, high = self._spans[table]
            mine = ids.ids if self._all else ids.ids[(ids.ids >= low) & (ids.ids < high)] - np.int32(low)
            used[table][mine] = True


def bring_rows(
    rows_now: RowsNow, source: Pass, positions: Positions, used: dict[str, NDArray[np.bool_]], backend: Backend
) -> list[GroupRows]:
    """Fetch the vectors of all used ids, in float32 whatever their dtype."""
    return [_bring(rows_now, source, positions, g, used, backend) for g in range(len(positions.groups))]


def _bring(
    rows_now: RowsNow, source: Pass, positions: Positions, group: int, used: dict[str, NDArray[np.bool_]],
    backend: Backend,
) -> GroupRows:  # fmt: skip
    """Fetch the vectors of one group's used ids, in float32 whatever their dtype."""
    spec = positions.groups[group]
    starts = positions.table_starts(source.index, group)
    slots = np.full(int(starts[-1]), -1, dtype=np.int32)
    counts = [int(np.count_nonzero(used[table.name])) for table in spec.tables]
    vectors = np.empty((sum(counts), spec.fields[0].width), dtype=np.float32)
    at = 0
    for i, table in enumerate(spec.tables):
        local = np.nonzero(used[table.name])[0]
        if local.size:
            keys = np.ascontiguousarray(source.keys(table.name)[local])
            rows_now.fill(table.name, keys, (vectors[at : at + local.size],))
            slots[starts[i] + local] = np.arange(at, at + local.size, dtype=np.int32)
            at += local.size
    return GroupRows.of(spec, (backend.to_device(vectors),), backend.to_device(slots), starts, dtype="float32")
