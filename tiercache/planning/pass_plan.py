"""The plan of passes: what every switch loads, keeps and dumps, in rows and bytes, before anything moves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tiercache.errors import BudgetError, DatasetError
from tiercache.planning.budgets import ALIGNED_BYTES, PAGE_BYTES, HostBudget, paged
from tiercache.planning.host_plan import CachedRows, HostContent
from tiercache.planning.reuse import ReuseCounts
from tiercache.planning.store_plan import StorePlan
from tiercache.sizes import format_bytes
from tiercache.store.layout import Range, SegmentLayout, compressed_rows
from tiercache.store.segment import base_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.planning.budgets import Budgets
    from tiercache.planning.next_use import NextUses
    from tiercache.planning.row_offsets import RowOffsets
    from tiercache.planning.schedule import Schedule
    from tiercache.store import Segment, Store
    from tiercache.store.commit import History
    from tiercache.store.table import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Rows that come from one earlier layout: first those in host memory, the rest from the store."""

    pass_index: int
    """The pass that dumped the segment; below 0: the base with which the schedule was entered."""
    group: int
    rows: int
    host: CachedRows
    """Pages in host memory; they end where those of the store begin."""
    store: CachedRows
    store_rows: int
    store_bytes: int


@dataclass(frozen=True, kw_only=True)
class PassPlan:
    """One pass: the rows it trains, where they come from, and what leaves when it ends."""

    pass_index: int
    epoch: int
    sub_dataset: int
    first: bool
    """Whether the plan begins here, with empty device and host."""
    within: bool
    """Whether the rows come from a commit inside this pass."""
    longest_wait: int
    """Passes since the first whose dump a load may come from: rows with a longer distance were not used since the
    schedule was entered."""
    commits: bool
    """Whether the pass ends with a commit: then kept rows are written too."""
    rows_G: tuple[int, ...]
    kept_G: tuple[int, ...]
    generated_G: tuple[int, ...]
    loads: tuple[Load, ...]
    """By group, then by previous distance, rows of first uses last: the order of ``stable_order_by_distance``."""
    dump_ranges: tuple[SegmentLayout, ...]
    """By group: what is packed and written when the pass ends."""
    retained: Mapping[tuple[int, int], CachedRows]
    """What the host holds of earlier dumps from the moment this pass's rows are wanted."""
    host_bytes: int
    """Bytes of dump, staging and cached rows at the fullest moment of the pass."""
    capacity: int
    """Bytes that cached rows may take: what decided ``retained``."""
    row_bytes_G: tuple[int, ...]

    @cached_property
    def dumps(self) -> tuple[SegmentLayout, ...]:
        """The layouts of ``dump_ranges``: made when they are first asked for."""
        return self.dump_ranges

    @property
    def rows_read(self) -> int:
        """Rows read from the store."""
        return sum(load.store_rows for load in self.loads)

    @property
    def bytes_read(self) -> int:
        """Bytes of rows read from the store."""
        return sum(load.store_bytes for load in self.loads)

    @property
    def rows_from_host(self) -> int:
        """Rows that come out of host memory."""
        return sum(load.rows - load.store_rows for load in self.loads)

    @property
    def rows_written(self) -> int:
        """Rows written to the store when the pass ends."""
        return sum(ranges.rows for ranges in self.dump_ranges)

    @property
    def bytes_written(self) -> int:
        """Bytes of rows written when the pass ends; their keys add 8 bytes a row."""
        return sum(ranges.rows * ranges.row_bytes for ranges in self.dump_ranges)

    @property
    def bytes_loaded(self) -> int:
        """Bytes of rows that come to the device, from wherever."""
        return sum(
            (rows - kept) * width for rows, kept, width in zip(self.rows_G, self.kept_G, self.row_bytes_G, strict=True)
        )


class Planner:
    """Plans pass after pass from ``start``; deciding only, from sizes."""

    def __init__(
        self,
        schedule: Schedule,
        positions: RowOffsets,
        counts: ReuseCounts,
        budget: HostBudget,
        *,
        start: int,
        within: bool,
        commit_every: int,
        end: int | None = None,
        stored: Mapping[int, tuple[SegmentLayout, ...]],
    ) -> None:
        """Begin at pass ``start``; ``stored`` holds the layouts of the store's segments by pass.

        Every ``commit_every``-th pass ends with a commit, and so does the one before ``end``. Planners can share
        ``counts``. Raises BudgetError where a pass's reserve exceeds the host budget.
        """
        self._end = end
        self._schedule, self._positions, self._budget = schedule, positions, budget
        self._start, self._within, self._commit_every = start, within, commit_every
        self._ranges = dict(stored)
        self._base = min([0, *self._ranges])  # below 0: the pass of the rows that the schedule was entered with
        self._content = HostContent()
        self._counts = counts
        self._next = start
        self._last_capacity: int | None = None
        self._check_budget()

    @property
    def next_pass(self) -> int:
        """The pass that `plan_next` plans."""
        return self._next

    def dump_ranges(self, pass_index: int, *, with_kept: bool) -> tuple[SegmentLayout, ...]:
        """Lay out the dump of ``pass_index``: ranges by next use, kept rows first where they are written too."""
        dumps = []
        for group, (distance_N, rows_NT) in zip(
            self._positions.groups, self._counts.of(pass_index).next_G, strict=True
        ):
            first = 0 if with_kept else int(distance_N.searchsorted(2))
            page_rows, block_bytes = self._cut(group, self._budget)
            dumps.append(
                SegmentLayout(
                    next_use_R=distance_N[first:].astype(np.int64) + pass_index, table_rows_RT=rows_NT[first:],
                    row_bytes=group.row_bytes, page_rows=page_rows, block_bytes=block_bytes,
                )
            )  # fmt: skip
        return tuple(dumps)

    def store_plan(self, stored: History, *, commits: int, state_bytes: int) -> StorePlan:
        """Say what a store that has this takes at its fullest, where it keeps so many commits of such a state."""
        first = self._schedule.epoch_of(self._start) * self._schedule.num_passes
        passes = range(first, first + self._schedule.num_passes)
        return StorePlan.of(
            self._positions.groups,
            {pass_index: self.dump_ranges(pass_index, with_kept=True) for pass_index in passes},
            stored,
            commits=commits,
            commit_every=self._commit_every,
            state_bytes=state_bytes,
            use_files=1 if self._schedule.repeats else 3,
        )

    @staticmethod
    def layout(group: Group, ranges: Iterable[Range], budget: HostBudget) -> SegmentLayout:
        """Cut ranges into pages and blocks as the budget says; blocks have whole parts where these are compressed."""
        page_rows, block_bytes = Planner._cut(group, budget)
        return SegmentLayout.of(
            row_bytes=group.row_bytes, page_rows=page_rows, block_bytes=block_bytes, ranges=tuple(ranges)
        )

    @staticmethod
    def _cut(group: Group, budget: HostBudget) -> tuple[int, int]:
        """Return the rows of a page and the bytes of a block."""
        row_bytes = group.row_bytes
        page_rows = max(1, budget.page // row_bytes)
        block_bytes = max(budget.block, page_rows * row_bytes)
        if group.compression is not None:
            block_bytes -= block_bytes % (row_bytes * compressed_rows(row_bytes, page_rows))
        return page_rows, block_bytes

    def plan_next(self) -> PassPlan:
        """Plan the next pass."""
        pass_index, self._next = self._next, self._next + 1
        first = pass_index == self._start
        sub_dataset = self._schedule.sub_dataset_of(pass_index)
        groups = self._positions.groups
        rows_G = tuple(self._positions.num_rows(sub_dataset, g) for g in range(len(groups)))
        kept_G, generated_G, loads = [], [], []
        oldest = pass_index - base_pass(self._base) if self._base < 0 else pass_index
        for g, (distance_N, rows_N1) in enumerate(self._counts.of(pass_index).prev_G):
            distances = list(zip(distance_N.tolist(), rows_N1[:, 0].tolist(), strict=True))
            kept_G.append(distances[0][1] if distances and distances[0][0] == 1 and not first else 0)
            if first and self._within:
                generated_G.append(0)
                if rows_G[g]:
                    source = pass_index if pass_index in self._ranges else self._base
                    loads.append(self._load(source, g, pass_index, rows_G[g]))
                continue
            loads += [
                self._load(pass_index - distance, g, pass_index, rows)
                for distance, rows in distances
                if distance <= oldest and (first or distance > 1)
            ]
            fresh = sum(rows for distance, rows in distances if distance > oldest)
            if fresh and self._base < 0:  # the store was put in order with the rows of all first uses
                loads.append(self._load(self._base, g, pass_index, fresh))
                fresh = 0
            generated_G.append(fresh)
        commits = (pass_index + 1) % self._commit_every == 0 or pass_index + 1 == self._end
        dumps = self.dump_ranges(pass_index, with_kept=commits)
        retained, cached, capacity = self._advance_host(pass_index)
        reserve = self._reserve(pass_index)
        plan = PassPlan(
            pass_index=pass_index, epoch=self._schedule.epoch_of(pass_index), sub_dataset=sub_dataset,
            first=first, within=first and self._within, longest_wait=oldest, commits=commits,
            rows_G=rows_G, kept_G=tuple(kept_G), generated_G=tuple(generated_G), loads=tuple(loads),
            dump_ranges=dumps, retained=retained, host_bytes=cached + reserve, capacity=capacity,
            row_bytes_G=tuple(group.row_bytes for group in groups),
        )  # fmt: skip
        self._ranges[pass_index] = dumps
        for old in [v for v in self._ranges if 0 <= v < pass_index - self._schedule.longest_distance]:
            del self._ranges[old]
        return plan

    def _load(self, source: int, group: int, pass_index: int, rows: int) -> Load:
        ranges = self._ranges[source][group] if source in self._ranges else None
        index = ranges.range_of_use(pass_index) if ranges else None
        if (
            ranges is None
            or index is None
            or ranges.first_row_R.item(index + 1) - ranges.first_row_R.item(index) != rows
        ):
            raise DatasetError(
                f"pass {pass_index} needs {rows:,} rows that pass {source} should have dumped for it, and the store "
                "has no such range: the dataset or its order is not the one the store was trained with"
            )
        low, high = ranges.pages_of_range(index)
        held = self._content.find(source, group)
        if source == pass_index - 2 and source >= self._start:
            held = CachedRows(0, ranges.num_pages)  # the dump itself, not yet thinned out
        middle = min(max(held.last, low), high) if held.first <= low < held.last else low
        store_rows = rows if middle == low else ranges.row_of_page(high) - ranges.row_of_page(middle)
        return Load(
            pass_index=source, group=group, rows=rows, host=CachedRows(low, middle), store=CachedRows(middle, high),
            store_rows=store_rows, store_bytes=store_rows * ranges.row_bytes,
        )  # fmt: skip

    def _advance_host(self, pass_index: int) -> tuple[dict[tuple[int, int], CachedRows], int, int]:
        """Let the dump of the pass before last join what is cached, and thin that out for ``pass_index``."""
        old = pass_index - 2
        if old >= self._start:
            for g, ranges in enumerate(self._ranges[old]):
                self._content.enter(old, g, ranges)
        capacity = self._budget.rows - self._reserve(pass_index)
        assert capacity >= 0, f"pass {pass_index} needs {-capacity} bytes more than was checked"
        if self._last_capacity is not None:
            capacity, self._last_capacity = min(capacity, self._last_capacity), capacity
        else:
            self._last_capacity = capacity
        cached = self._content.keep(after=pass_index, capacity=capacity)
        return dict(self._content.held), cached, capacity

    def _reserve(self, pass_index: int) -> int:
        """Bytes that dump and staging may take while ``pass_index`` is trained (design, section 4)."""
        dumps = [
            self._dump_bytes(self._schedule.sub_dataset_of(v)) for v in (pass_index - 1, pass_index) if v >= self._start
        ]
        return max(dumps) + self._staging_bytes(pass_index + 1, first=False)

    def _dump_bytes(self, sub_dataset: int) -> int:
        """All rows of a pass, in the pages of its blocks, which do not depend on the ranges."""
        total = 0
        for g, group in enumerate(self._positions.groups):
            rows, block_rows = (
                self._positions.num_rows(sub_dataset, g),
                self._cut(group, self._budget)[1] // group.row_bytes,
            )
            full, rest = divmod(rows, block_rows)
            total += full * paged(block_rows * group.row_bytes) + paged(rest * group.row_bytes)
        return total

    def _staging_bytes(self, pass_index: int, *, first: bool) -> int:
        """All rows of the pass that are not kept; with ``first`` those too."""
        prev_G = self._counts.of(pass_index).prev_G
        runs_G = [rows_N1[0 if first else int(distance_N.searchsorted(2)) :, 0] for distance_N, rows_N1 in prev_G]
        return self._loaded_bytes(runs_G, [runs.size for runs in runs_G])

    def _most_staging_bytes(self, sub_dataset: int) -> int:
        """The most bytes that staging a sub-dataset takes in any order: no row kept, as many distances as possible.

        A row was used last in the newest pass of some sub-dataset, or never: one distance for each, and one more.
        """
        rows_G = [self._positions.num_rows(sub_dataset, g) for g in range(len(self._positions.groups))]
        return self._loaded_bytes(
            [np.array([n]) for n in rows_G], [min(n, self._schedule.num_passes + 1) for n in rows_G]
        )

    def _loaded_bytes(self, runs_G: Sequence[NDArray[np.integer]], num_runs_G: Sequence[int]) -> int:
        """Bytes of memory for runs of rows, each of one distance, that come from the store or from an earlier dump."""
        total = blocks = 0
        for runs, group in zip(runs_G, self._positions.groups, strict=True):
            sizes = runs.astype(np.int64) * group.row_bytes
            total, blocks = total + int(sizes.sum()), blocks + int((sizes // self._budget.block).sum())
        # what is read at once from a block begins in its page where it does in the file: a page more for each
        shifts = 0
        if max(self._budget.block, self._budget.staged_page) >= ALIGNED_BYTES:
            shifts = min(2 * sum(num_runs_G) + blocks, total // ALIGNED_BYTES)
        total, shift = total + shifts * PAGE_BYTES, PAGE_BYTES if shifts else 0
        # staging is filled region by region; a region ends before the page that does not fit, the last may be empty
        regions = -(-total // max(1, self._budget.region - self._budget.staged_page - shift))
        # what waits in an earlier dump instead takes whole pages: more at both ends of each run and where a block ends
        ends = 3 * sum(num_runs_G) + blocks
        return (
            total + regions * (self._budget.staged_page + PAGE_BYTES + shift) + self._budget.region + ends * PAGE_BYTES
        )

    def _check_budget(self) -> None:
        """Raise BudgetError where the reserve of some pass exceeds the host budget.

        What is checked does not depend on where the run begins: a run that may begin may also go on. In a seeded
        order any two sub-datasets may follow each other: then the largest dump and the largest load count.
        """
        if self._schedule.repeats:
            upcoming = range(self._start, self._start + self._schedule.num_passes + 1)
            rows = max(self._reserve(v) for v in upcoming)
            rows = max(
                rows, *(self._staging_bytes(v, first=True) for v in upcoming)
            )  # a run may begin with any of them
        else:
            passes = range(self._schedule.num_passes)
            rows = max(map(self._dump_bytes, passes)) + max(map(self._most_staging_bytes, passes))
        if rows > self._budget.rows:
            budget, smallest = self._budget, self._budget.smallest(rows)
            fixed, planning = budget.total - budget.rows - budget.planning, budget.planning
            raise BudgetError(
                f"host_budget is {format_bytes(budget.total)}, but the dump of one pass and the rows of the next need "
                f"{format_bytes(rows)} beside {format_bytes(planning)} for planning and {format_bytes(fixed)} for a "
                f"write transaction, batches and evaluation: raise host_budget to {smallest} bytes "
                f"({format_bytes(smallest)}) or extract smaller passes",
                least=smallest,
            )


class Plans:
    """Makes the planners of one cache."""

    def __init__(
        self,
        store: Store,
        schedule: Schedule,
        positions: RowOffsets,
        next_uses_of: Callable[[int], NextUses],
        host: HostBudget,
        budgets: Budgets,
    ) -> None:
        self._store, self.schedule, self.positions, self.host, self._budgets = store, schedule, positions, host, budgets
        self._counts = ReuseCounts(schedule, positions, next_uses_of)

    @property
    def cursor(self) -> tuple[int, int]:
        """The pass and the sample at which the store stands."""
        commit = self._store.commit
        return (0, 0) if commit is None else (commit.cursor.pass_index, commit.cursor.sample)

    def passes(self, count: int | None) -> list[PassPlan]:
        """Plan the next passes, one epoch and one pass more where not said; beside a training too."""
        planner = self.planner()
        return [planner.plan_next() for _ in range(self.schedule.num_passes + 1 if count is None else count)]

    def store_plan(self, state_bytes: int) -> StorePlan:
        """Return what the store takes at its fullest, with so many bytes of dense state in a commit."""
        return self.planner().store_plan(self._store.history, commits=self._store.retention, state_bytes=state_bytes)

    def check_store(self, state_bytes: Callable[[], int]) -> None:
        """Raise BudgetError where the store may come to take more than its budget, if it has one."""
        if self._budgets.store_budget is not None:
            self.store_plan(state_bytes()).check(self._budgets.store_budget)

    def planner(self, end: int | None = None) -> Planner:
        """Return the planner of a training up to pass ``end``."""
        pass_index, sample = self.cursor
        stored = {v: segment.layouts for v, segment in segments_by_pass(self._store).items()}
        return Planner(
            self.schedule, self.positions, self._counts, self.host, start=pass_index, within=sample > 0,
            commit_every=self._budgets.commit_every, end=end, stored=stored,
        )  # fmt: skip


def segments_by_pass(store: Store) -> dict[int, Segment]:
    """Return the newest segment of each pass: for a pass cut by a commit, the one the commit wrote.

    RetainedSegment segments are of passes of other schedules.
    """
    found: dict[int, Segment] = {}
    retained = frozenset[int]() if store.commit is None else store.commit.retained_ids
    for segment in store.segments:
        if segment.id in retained:
            continue
        if segment.pass_index not in found or segment.id > found[segment.pass_index].id:
            found[segment.pass_index] = segment
    return found


def waiting_streams(store: Store) -> list[SegmentLayout]:
    """Return the layouts of these segments."""
    return [layout for segment in segments_by_pass(store).values() for layout in segment.layouts]
