"""Plans of passes: the rows and bytes that every switch loads, keeps and dumps, before anything moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiercache.errors import BudgetError, DatasetError
from tiercache.planning.budgets import ALIGNED_BYTES, PAGE_BYTES, Budgets, HostBudget, paged
from tiercache.planning.host_plan import HostCache, PageRange
from tiercache.planning.store_plan import StorePlan
from tiercache.sizes import format_bytes
from tiercache.store.layout import SegmentLayout
from tiercache.store.segment import base_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.planning.reuse import ReuseCounts
    from tiercache.store import Segment, Store
    from tiercache.store.snapshot import History


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Rows from one earlier layout: first those in host memory, then those in the store."""

    pass_index: int
    """The pass that dumped the segment; below 0: the base that the schedule began with."""
    group: int
    rows: int
    host: PageRange
    """Pages in host memory, before those in the store."""
    store: PageRange
    store_rows: int
    store_bytes: int
    part: int = 0
    """The index of the base segment with the rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassPlan:
    """One pass: the rows that it trains, their sources, and the dump at its end."""

    pass_index: int
    epoch: int
    sub_dataset: int
    first: bool
    """True for the first pass of the plan: device and host are empty."""
    within: bool
    """True if the rows come from a commit inside this pass."""
    max_distance: int
    """Maximum passes between a dump and its load: rows with a longer distance were not used since the schedule was
    entered."""
    commits: bool
    """True if the pass ends with a commit, which also writes kept rows."""
    rows_G: tuple[int, ...]
    kept_G: tuple[int, ...]
    generated_G: tuple[int, ...]
    loads: tuple[Load, ...]
    """By group, then by previous distance, rows of first uses last: the order of ``stable_order_by_distance``."""
    dumps: tuple[SegmentLayout, ...]
    """By group: the segment that is written when the pass ends."""
    retained: Mapping[tuple[int, int], PageRange]
    """Pages of earlier dumps that the host caches from the load of this pass on."""
    host_bytes: int
    """Maximum bytes of dump, staging and cached rows during the pass."""
    capacity: int
    """Maximum bytes of cached rows."""
    row_bytes_G: tuple[int, ...]

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
        """Rows loaded from host memory."""
        return sum(load.rows - load.store_rows for load in self.loads)

    @property
    def rows_written(self) -> int:
        """Rows written to the store when the pass ends."""
        return sum(layout.rows for layout in self.dumps)

    @property
    def bytes_written(self) -> int:
        """Bytes of rows written when the pass ends; their keys add 8 bytes per row."""
        return sum(layout.rows * layout.row_bytes for layout in self.dumps)

    @property
    def bytes_loaded(self) -> int:
        """Bytes of rows that are loaded to the device, from host and store."""
        return sum(
            (rows - kept) * width for rows, kept, width in zip(self.rows_G, self.kept_G, self.row_bytes_G, strict=True)
        )


class Planner:
    """Plans pass after pass, from sizes alone."""

    def __init__(
        self,
        counts: ReuseCounts,
        budget: HostBudget,
        *,
        start: int,
        within: bool,
        commit_every: int,
        end: int | None = None,
        stored: Mapping[int, Sequence[tuple[SegmentLayout, ...]]],
    ) -> None:
        """Begin at pass ``start``; ``stored`` has the layouts of the segments from ``segments_by_pass``.

        Every ``commit_every``-th pass ends with a commit, and so does the one before ``end``. Planners can share
        ``counts``. Raises BudgetError if the reserve of a pass exceeds the host budget.
        """
        self._end = end
        self._counts, self._schedule, self._positions, self._budget = counts, counts.schedule, counts.positions, budget
        self._start, self._within, self._commit_every = start, within, commit_every
        self._layouts = {pass_index: tuple(parts) for pass_index, parts in stored.items()}
        self._base = min([0, *self._layouts])  # below 0: the pass of the rows that the schedule was entered with
        self._more_parts = max(0, len(self._layouts.get(self._base, ())) - 1)  # segments of the base, but the first
        self._cache = HostCache(budget.grain)
        self.next_pass = start
        """The pass that `plan_next` plans."""
        self._last_capacity = budget.rows
        self._check_budget()

    def _dumps(self, pass_index: int, *, with_kept: bool) -> tuple[SegmentLayout, ...]:
        """Lay out the dump of ``pass_index``: ranges by next use, kept rows first if they are written too."""
        dumps = []
        counts_G = self._counts.of(pass_index).next_G
        for group, (distance_N, rows_NT) in zip(self._positions.groups, counts_G, strict=True):
            first = 0 if with_kept else int(distance_N.searchsorted(2))
            page_rows, block_bytes = self._budget.cut(group)
            dumps.append(
                SegmentLayout(
                    next_use_R=distance_N[first:].astype(np.int64) + pass_index, table_rows_RT=rows_NT[first:],
                    row_bytes=group.row_bytes, page_rows=page_rows, block_bytes=block_bytes,
                )
            )  # fmt: skip
        return tuple(dumps)

    def store_plan(self, stored: History, *, commits: int, state_bytes: int) -> StorePlan:
        """Return the maximum bytes of a store with this history that keeps ``commits`` of such a state."""
        first = self._schedule.epoch_of(self._start) * self._schedule.num_passes
        passes = range(first, first + self._schedule.num_passes)
        return StorePlan.of(
            self._positions.groups,
            {pass_index: self._dumps(pass_index, with_kept=True) for pass_index in passes},
            stored,
            commits=commits,
            commit_every=self._commit_every,
            state_bytes=state_bytes,
            use_files=1 if self._schedule.repeats else 3,
        )

    def plan_next(self) -> PassPlan:
        """Plan the next pass."""
        pass_index, self.next_pass = self.next_pass, self.next_pass + 1
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
                    source = pass_index if pass_index in self._layouts else self._base
                    loads += self._loads(source, g, pass_index, rows_G[g])
                continue
            for distance, rows in distances:
                if distance <= oldest and (first or distance > 1):
                    loads += self._loads(pass_index - distance, g, pass_index, rows)
            fresh = sum(rows for distance, rows in distances if distance > oldest)
            if fresh and self._base < 0:  # the store was put in order with the rows of all first uses
                loads += self._loads(self._base, g, pass_index, fresh)
                fresh = 0
            generated_G.append(fresh)
        commits = (pass_index + 1) % self._commit_every == 0 or pass_index + 1 == self._end
        dumps = self._dumps(pass_index, with_kept=commits)
        retained, cached_bytes, capacity = self._advance_host(pass_index)
        plan = PassPlan(
            pass_index=pass_index, epoch=self._schedule.epoch_of(pass_index), sub_dataset=sub_dataset,
            first=first, within=first and self._within, max_distance=oldest, commits=commits,
            rows_G=rows_G, kept_G=tuple(kept_G), generated_G=tuple(generated_G), loads=tuple(loads),
            dumps=dumps, retained=retained, host_bytes=cached_bytes + self._reserve(pass_index), capacity=capacity,
            row_bytes_G=tuple(group.row_bytes for group in groups),
        )  # fmt: skip
        self._layouts[pass_index] = (dumps,)
        for old in [v for v in self._layouts if 0 <= v < pass_index - self._schedule.longest_distance]:
            del self._layouts[old]
        return plan

    def _loads(self, source: int, group: int, pass_index: int, rows: int) -> list[Load]:
        """Plan the load of all rows that wait for a pass in the segments of an earlier one, or of the base."""
        found: list[tuple[int, int, int]] = []
        for part, layouts in enumerate(self._layouts.get(source, ())):
            if (index := layouts[group].range_of_use(pass_index)) is not None:
                low, high = layouts[group].rows_of_range(index)
                found.append((part, index, high - low))
        if sum(count for *_, count in found) != rows:
            raise DatasetError(
                f"pass {pass_index} needs {rows:,} rows that pass {source} should have dumped for it, but the store "
                "has no such range: the dataset or its order is not the one the store was trained with"
            )
        return [self._load(source, part, group, pass_index, index, count) for part, index, count in found if count]

    def _load(self, source: int, part: int, group: int, pass_index: int, index: int, rows: int) -> Load:
        layout = self._layouts[source][part][group]
        low, high = layout.pages_of_range(index)
        cached = self._cache.find(source, group)
        if source == pass_index - 2 and source >= self._start:
            cached = PageRange(0, layout.num_pages)  # the dump itself, before any page of it is dropped
        middle = min(max(cached.last, low), high) if cached.first <= low < cached.last else low
        store_rows = rows if middle == low else layout.row_of_page(high) - layout.row_of_page(middle)
        return Load(
            pass_index=source, group=group, rows=rows, host=PageRange(low, middle), store=PageRange(middle, high),
            store_rows=store_rows, store_bytes=store_rows * layout.row_bytes, part=part,
        )  # fmt: skip

    def _advance_host(self, pass_index: int) -> tuple[dict[tuple[int, int], PageRange], int, int]:
        """Cache the dump of the pass before last, and evict. Return the pages cached, their bytes and capacity."""
        old = pass_index - 2
        if old >= self._start:
            for g, layout in enumerate(self._layouts[old][0]):
                self._cache.enter(old, g, layout)
        capacity = self._budget.rows - self._reserve(pass_index)
        assert capacity >= 0, f"pass {pass_index} needs {-capacity} bytes more than was checked"
        capacity, self._last_capacity = min(capacity, self._last_capacity), capacity
        num_bytes = self._cache.keep(after=pass_index, capacity=capacity)
        return dict(self._cache.pages), num_bytes, capacity

    def _reserve(self, pass_index: int) -> int:
        """Return the maximum bytes of dump and staging while ``pass_index`` is trained (design, section 4)."""
        dumps = [
            self._dump_bytes(self._schedule.sub_dataset_of(v)) for v in (pass_index - 1, pass_index) if v >= self._start
        ]
        return max(dumps) + self._staging_bytes(pass_index + 1, first=False)

    def _dump_bytes(self, sub_dataset: int) -> int:
        """Return the bytes of all rows of a pass in whole blocks, which do not depend on the ranges."""
        total, grain = 0, self._budget.grain
        for g, group in enumerate(self._positions.groups):
            block_rows = self._budget.cut(group)[1] // group.row_bytes
            full, rest = divmod(self._positions.num_rows(sub_dataset, g), block_rows)
            total += full * paged(block_rows * group.row_bytes, grain) + paged(rest * group.row_bytes, grain)
        return total

    def _staging_bytes(self, pass_index: int, *, first: bool) -> int:
        """Return the bytes of staging all rows of the pass, without kept ones unless it is ``first``."""
        prev_G = self._counts.of(pass_index).prev_G
        runs_G = [rows_N1[0 if first else int(distance_N.searchsorted(2)) :, 0] for distance_N, rows_N1 in prev_G]
        return self._loaded_bytes(runs_G, [runs.size + self._more_parts for runs in runs_G])

    def _most_staging_bytes(self, sub_dataset: int) -> int:
        """Return the maximum bytes of staging in any order: no row kept, last uses in every pass, or never."""
        rows_G = [self._positions.num_rows(sub_dataset, g) for g in range(len(self._positions.groups))]
        return self._loaded_bytes(
            [np.array([n]) for n in rows_G],
            [min(n, self._schedule.num_passes + 1 + self._more_parts) for n in rows_G],
        )

    def _loaded_bytes(self, runs_G: Sequence[NDArray[np.integer]], num_runs_G: Sequence[int]) -> int:
        """Return the bytes of memory for runs of rows of one distance each, from the store or from an earlier dump."""
        total = blocks = 0
        for runs, group in zip(runs_G, self._positions.groups, strict=True):
            sizes = runs.astype(np.int64) * group.row_bytes
            total, blocks = total + int(sizes.sum()), blocks + int((sizes // self._budget.block).sum())
        # a read from a block has the same offset in its memory page as in the file's: one more page for each
        shifts = 0
        if max(self._budget.block, self._budget.staged_page) >= ALIGNED_BYTES:
            shifts = min(2 * sum(num_runs_G) + blocks, total // ALIGNED_BYTES)
        total, shift = total + shifts * PAGE_BYTES, PAGE_BYTES if shifts else 0
        # staging is filled region by region; a region ends before the page that does not fit, the last may be empty
        filled = max(1, self._budget.region - self._budget.staged_page - shift)
        if self._budget.grain > PAGE_BYTES:  # rows waiting in an earlier dump take whole blocks, two more a run
            cuts = [(self._budget.cut(group)[1], group.row_bytes) for group in self._positions.groups]
            filled = min(filled, *(block - block % row for block, row in cuts))
            return (-(-total // filled) + 1 + 2 * sum(num_runs_G)) * self._budget.region
        regions = -(-total // filled)
        # rows that wait in an earlier dump take whole pages: more at both ends of each run and at the end of a block
        ends = 3 * sum(num_runs_G) + blocks
        return (
            total + regions * (self._budget.staged_page + PAGE_BYTES + shift) + self._budget.region + ends * PAGE_BYTES
        )

    def _check_budget(self) -> None:
        """Raise BudgetError if the reserve of a pass exceeds the host budget.

        The check does not depend on where the run begins, so a run that begins can also resume. In a seeded order any
        two sub-datasets may follow each other, so it counts the largest dump and the largest load.
        """
        if self._schedule.repeats:
            upcoming = range(self._start, self._start + self._schedule.num_passes + 1)
            # a run may begin with any of them
            rows = max(max(self._reserve(v), self._staging_bytes(v, first=True)) for v in upcoming)
        else:
            passes = range(self._schedule.num_passes)
            rows = max(map(self._dump_bytes, passes)) + max(map(self._most_staging_bytes, passes))
        if rows > self._budget.rows:
            budget, smallest = self._budget, self._budget.smallest(rows)
            fixed, planning = budget.total - budget.rows - budget.planning, budget.planning
            raise BudgetError(
                f"host_budget is {format_bytes(budget.total)}, but the dump of one pass and the rows of the next need "
                f"{format_bytes(rows)} besides {format_bytes(planning)} for planning and {format_bytes(fixed)} for a "
                f"write transaction, batches and evaluation: raise host_budget to {smallest} bytes "
                f"({format_bytes(smallest)}) or extract smaller passes",
                least=smallest,
            )


def least_host_budget(planner_of: Callable[[int], Planner]) -> int:
    """Return the smallest host budget for which ``planner_of(host_budget)`` raises no BudgetError."""
    try:
        planner_of(1)
    except BudgetError as error:
        return error.least or 1
    return 1


class Plans:
    """Makes planners that start at the newest commit of a store."""

    def __init__(self, store: Store, counts: ReuseCounts, host: HostBudget, budgets: Budgets) -> None:
        self._store, self._counts, self.host, self._budgets = store, counts, host, budgets
        self.schedule, self.positions = counts.schedule, counts.positions

    @property
    def cursor(self) -> tuple[int, int]:
        """The pass and the sample of the newest commit."""
        commit = self._store.commit
        return (0, 0) if commit is None else (commit.cursor.pass_index, commit.cursor.sample)

    def passes(self, count: int | None) -> list[PassPlan]:
        """Plan the next passes; default: one epoch and one pass. Safe during training."""
        planner = self.planner()
        return [planner.plan_next() for _ in range(self.schedule.num_passes + 1 if count is None else count)]

    def store_plan(self, state_bytes: int) -> StorePlan:
        """Return the plan of the store, with ``state_bytes`` of dense state in each commit."""
        return self.planner().store_plan(self._store.history, commits=self._store.retention, state_bytes=state_bytes)

    def check_store(self, state_bytes: Callable[[], int]) -> None:
        """Raise BudgetError if the store may outgrow its budget."""
        if self._budgets.store_budget is not None:
            self.store_plan(state_bytes()).check(self._budgets.store_budget)

    def planner(self, end: int | None = None) -> Planner:
        """Return the planner of training up to pass ``end``."""
        pass_index, sample = self.cursor
        stored = {v: [one.layouts for one in found] for v, found in segments_by_pass(self._store).items()}
        return Planner(
            self._counts, self.host, start=pass_index, within=sample > 0, commit_every=self._budgets.commit_every,
            end=end, stored=stored,
        )  # fmt: skip


def segments_by_pass(store: Store) -> dict[int, tuple[Segment, ...]]:
    """Return the newest segment of each pass: for a pass cut by a commit, the one the commit wrote.

    Of the base, with which the schedule began, all segments: together they are in the order (table, hash).
    Retained segments belong to passes of other schedules, and are left out.
    """
    found: dict[int, tuple[Segment, ...]] = {}
    retained = frozenset[int]() if store.commit is None else store.commit.retained_ids
    for segment in store.segments:
        if segment.id not in retained:
            before = found.get(segment.pass_index, ()) if segment.pass_index < 0 else ()
            found[segment.pass_index] = (*before, segment)
    return found


def live_layouts(store: Store) -> list[SegmentLayout]:
    """Return the layouts of the segments that passes will load."""
    return [layout for found in segments_by_pass(store).values() for segment in found for layout in segment.layouts]
