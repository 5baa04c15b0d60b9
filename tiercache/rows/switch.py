"""Consecutive passes: planned and staged by a reader thread, written and committed by a writer thread."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tiercache.errors import StateError
from tiercache.planning.budgets import paged
from tiercache.planning.next_use import longest_distance
from tiercache.planning.pass_plan import segments_by_pass
from tiercache.reporting.report import PassReport
from tiercache.rows.host import HostTier
from tiercache.rows.packing import Packer, PassLoad, PreparedPass, SwitchBuffers
from tiercache.rows.prefetch import RowPrefetcher, Staged
from tiercache.rows.store_kernels import COMPUTE
from tiercache.rows.threads import nicer_thread, seconds_of_waiting, wait_for
from tiercache.store import Cursor
from tiercache.store.layout import Range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from tiercache.planning.budgets import HostBudget
    from tiercache.planning.next_use import NextUses
    from tiercache.planning.pass_plan import PassPlan, Planner
    from tiercache.planning.row_offsets import KeysOf, RowOffsets
    from tiercache.rows.backends.base import Backend, Event
    from tiercache.rows.device import DeviceTier, SlotAssignment
    from tiercache.rows.packing import DumpedRows, GroupDump, StagedLayout, Transfer
    from tiercache.rows.pinned import PinnedArena
    from tiercache.store import Segment, Store


class PassPlanner:
    """Prepares the passes of one run, one after the other; called on the reader thread."""

    def __init__(self, planner: Planner, device: DeviceTier, next_uses_of: Callable[[int], NextUses]) -> None:
        self._planner, self._device, self._uses_of = planner, device, next_uses_of
        self._previous: PreparedPass | None = None
        self._failed = False

    def next(self) -> PreparedPass:
        """Plan the next pass and assign slots to its rows.

        Raises StateError after a failure, which may have assigned only some slots.
        """
        if self._failed:
            raise StateError("the previous pass could not be prepared, so this one is not: restart the run of passes")
        self._failed = True
        plan = self._planner.plan_next()
        previous = None
        if self._previous is not None:
            before, assignments = self._previous
            previous = before.sub_dataset, assignments, self._uses_of(before.epoch)
        assignments = self._device.place(plan, self._uses_of(plan.epoch), previous)
        self._previous, self._failed = PreparedPass(plan, assignments), False
        return self._previous


StateBytes = tuple["Callable[[], bytes]", dict[str, object]]
"""The part of a commit besides rows: the dense state, serialized when called, and plain settings."""


class PassSwitcher:
    """Moves rows between the tiers as planned. Public methods are called on the training thread.

    One reader thread frees host memory after a load, stages passes and prepares those after them. One writer thread
    appends segments, publishes commits and allocates the next dump. Each works in order. An error of either is raised
    by the next ``check``; an error of preparing, when the pass is to be staged. No later pass is published after an
    error. With a GPU, a third thread pins host memory before the others need it: if it fails, they retry and raise.
    """

    def __init__(
        self,
        store: Store,
        device: DeviceTier,
        backend: Backend,
        memory: PinnedArena,
        budget: HostBudget,
        positions: RowOffsets,
        keys_of: KeysOf,
        next_uses_of: Callable[[int], NextUses],
        *,
        schedule_digest: str,
        environment: dict[str, object],
    ) -> None:
        self.device, self.host, self.memory = device, HostTier(memory), memory
        self._store, self._backend, self._budget, self._positions = store, backend, budget, positions
        self._uses_of = next_uses_of
        self._digest, self.environment = schedule_digest, environment
        self._packer = Packer(device, backend, self.host, positions, keys_of)
        store.reader.compute = COMPUTE
        store.write_within(budget.transaction)
        self._pid = os.getpid()
        self._reader, self._writer = nicer_thread("reader", backend), nicer_thread("writer", backend)
        self._pinner = nicer_thread("pinner", backend)
        self._segments: dict[int, tuple[Segment, ...]] = {}
        self._prefetcher = RowPrefetcher(store, backend, memory, positions, keys_of, self._segments)
        self._pass_planner: PassPlanner | None = None
        self._to_prepare = 0
        self._next: Future[PreparedPass] | None = None
        """The pass that will be staged next."""
        self._prepared: Future[PreparedPass] | None = None
        """The staged pass, until it is loaded."""
        self._staging: Future[StagedLayout] | None = None
        self._writing: Future[None] | None = None
        self._buffers: Future[SwitchBuffers] | None = None
        self._loading: PassLoad | None = None
        """The load of the staged pass, once a part of it may be moved ahead."""
        self._freed: Future[None] | None = None
        """Frees the host memory of loaded rows; the reader does it before it stages anything."""
        self._cached_G: list[list[Transfer]] = []
        """Rows that the next load takes from host blocks."""
        self._dumped_G: list[list[DumpedRows]] = []
        """The dump of the previous pass."""
        self._failure: BaseException | None = None
        self.plan: PassPlan | None = None
        self.assignments: list[SlotAssignment] = []
        self.report: PassReport | None = None

    # -- a run of passes ---------------------------------------------------------------------------------

    def check_process(self) -> None:
        """Raise StateError in a fork of the process, which has no threads and would wait for them forever."""
        if os.getpid() != self._pid:
            raise StateError(
                f"this cache was opened by process {self._pid} but is used in its fork {os.getpid()}: train, commit "
                "and close it in the process that opened it"
            )

    def begin(self, planner: Planner, *, end: int) -> None:
        """Start with empty device and host: load the planner's first pass, stage the second and prepare the third.

        Passes from ``end`` on are neither planned nor staged.
        """
        self.check_process()
        self.stop()
        self._end = end
        self._segments.clear()
        self._segments.update(segments_by_pass(self._store))
        self._pass_planner, self._to_prepare = PassPlanner(planner, self.device, self._uses_of), planner.next_pass
        self._prepare_next()
        self._stage_next()
        self._cached_G, self._dumped_G = [[] for _ in self._positions.groups], [[] for _ in self._positions.groups]
        self._load(self._backend.streams.trained())
        self._stage_next()
        self._allocate_dump()

    def switch(self, state: StateBytes) -> None:
        """End the pass on the device and load the next one."""
        self.check_process()
        trained = self._backend.streams.trained()
        write, staging = self._dump(state, trained), self._staging
        assert staging is not None, "a pass must be staged"
        if not staging.done():  # the training waits for the disk, which gets all its work now
            self._writing = self._writer.submit(write)
            self._load(trained)
        else:  # both need memory bandwidth, and the training waits for the rows
            try:
                self._load(trained)
            finally:
                self._writing = self._writer.submit(write)
        self._stage_next()
        self._allocate_dump()

    def finish(self, state: StateBytes) -> None:
        """End the last pass and wait until it is durable."""
        self.check_process()
        (_, report), trained = self._current(), self._backend.streams.trained()
        self._writing = self._writer.submit(self._dump(state, trained))
        report.add_wait("durable", seconds_of_waiting(self._writing, trained))
        self._await_writer()
        self.stop()

    def stop(self) -> None:
        """Wait for both threads and drop all rows; uncommitted ones are lost.

        Does nothing in a fork of the process, which has no threads and must not write.
        """
        if os.getpid() != self._pid:
            return
        for thread in (self._reader, self._writer):  # the writer waits for the reader, never the reverse
            wait_for(thread)
        self.memory.wanted_bytes = 0
        wait_for(self._pinner)
        self._backend.streams.synchronize()
        if self._staging is not None and self._staging.exception() is None:
            self._release(self._staging.result().staged)
        self._next = self._prepared = self._staging = self._writing = self._freed = self._buffers = self._loading = None
        self._cached_G, self._dumped_G, self._pass_planner, self._failure = [], [], None, None
        self.plan, self.report, self.assignments = None, None, []
        self.host.clear()
        self.device.clear()
        if self._store.mode == "a" and not self._store.closed:
            self._store.discard_uncommitted()

    def close(self) -> None:
        """Stop the threads and free all memory of rows, as far as a failed device allows; in a fork see ``stop``."""
        if os.getpid() != self._pid:
            return
        with ExitStack() as last:
            threads = (self._writer, self._reader, self._pinner)
            for close in (self.device.close, self.memory.close, *(thread.shutdown for thread in threads)):
                last.callback(close)  # the last one first
            self.stop()

    def check(self) -> None:
        """Raise the error of the reader or the writer, if any."""
        for future in (self._freed, self._prepared, self._staging, self._writing, self._buffers):
            if future is not None and future.done() and future.exception() is not None:
                self._failure = self._failure or future.exception()
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Wait until every dump is durable; the host tier then does not change until the switch."""
        self.check_process()
        self._await_writer()
        if self._buffers is not None:
            self._buffers.exception()
            self.check()

    def await_staging(self) -> None:
        """Wait until the rows of the next pass are staged."""
        self.check_process()
        if self._staging is not None:
            self._staging.exception()
        self.check()

    # -- commit inside a pass ----------------------------------------------------------------------------

    def commit_within(self, sample: int, state: StateBytes) -> None:
        """Write all rows of the pass as one range and publish a commit at ``sample``; returns when it is durable.

        Blocks are written one by one through the same memory, so this needs only the memory of a transaction.
        """
        self.check_process()
        plan, _ = self._current()
        self._await_writer()
        layouts = []
        for g, group in enumerate(self._positions.groups):
            table_rows = np.diff(self._positions.table_starts(plan.sub_dataset, g)).tolist()
            ranges = [Range(next_use=plan.pass_index, table_rows=tuple(table_rows))] if plan.rows_G[g] else []
            layouts.append(self._budget.layout(group, ranges))

        def blocks() -> Iterator[tuple[int, int, NDArray[np.uint8], NDArray[np.int64]]]:
            scratch = self._backend.scratch(paged(self._budget.block))
            for g, layout in enumerate(layouts):
                for b, keys in enumerate(self._packer.keys(plan.sub_dataset, g, None, layout)):
                    data = scratch[: layout.bytes_of_block(b)]
                    self._packer.pack(g, None, self._packer.lay_out(layout, b, [data]))
                    self._backend.streams.dumped().wait()
                    yield g, b, data, keys

        try:  # on this thread, because packing is for the training thread
            self._store.append(plan.pass_index, tuple(layouts), blocks(), within=True)
            self._publish(Cursor(pass_index=plan.pass_index, sample=sample), state)
        except BaseException as error:
            self._failure = error  # its frames keep the scratch, which the device may still write to, until we stop
            raise

    # -- dump ---------------------------------------------------------------------------------------------

    def _allocate_dump(self) -> None:
        """Let the writer allocate the dump of the pass after the previous dump is durable."""
        current, written, prepared = PreparedPass(self._current()[0], self.assignments), self._writing, self._prepared
        freed = self._freed
        assert freed is not None, "no pass was loaded"

        def allocate() -> SwitchBuffers:
            freed.result()
            if written is not None and written.exception() is not None:
                return SwitchBuffers([], [])  # nothing more is dumped or loaded
            upcoming = None if prepared is None or prepared.exception() is not None else prepared.result()
            return self._packer.allocate(current, upcoming)

        self._buffers = self._writer.submit(allocate)

    def _dump(self, state: StateBytes, trained: Event) -> Callable[[], None]:
        """Pack the rows of the pass into host blocks after ``trained``; return the call that writes them."""
        (plan, report), buffers = self._current(), self._buffers
        assert buffers is not None
        report.add_wait("durable", seconds_of_waiting(self._writing, trained))
        self._await_writer()
        report.add_wait("room", seconds_of_waiting(buffers, trained))
        self.check()
        with report.timing("pack"):
            dumps, self._cached_G = buffers.result()
            self._dumped_G = [self._packer.pack(g, dump.order, dump.transfers) for g, dump in enumerate(dumps)]
        self._buffers = None
        return partial(self._write, plan, dumps, self._backend.streams.dumped(), state, report)

    def _write(
        self, plan: PassPlan, dumps: list[GroupDump], packed: Event, state: StateBytes, report: PassReport
    ) -> None:
        """Runs on the writer thread."""
        packed.wait()
        begun = time.perf_counter()
        counters = self._store.counters
        rows, num_bytes = counters.rows_written, counters.row_bytes_written
        segment = self._store.append(
            plan.pass_index,
            plan.dumps,
            (
                (g, b, region.data, keys)
                for g, (layout, order, regions, _) in enumerate(dumps)
                for b, (region, keys) in enumerate(
                    zip(regions, self._packer.keys(plan.sub_dataset, g, order, layout), strict=True)
                )
            ),
            stable=True,
        )
        self._segments[plan.pass_index] = (segment,)
        if plan.commits:
            self._publish(Cursor(pass_index=plan.pass_index + 1, sample=0), state)
        oldest = plan.pass_index - longest_distance(self._positions.num_passes)
        for pass_index in [v for v in self._segments if 0 <= v < oldest]:
            del self._segments[pass_index]
        rows, num_bytes = counters.rows_written - rows, counters.row_bytes_written - num_bytes
        report.wrote(begun, time.perf_counter(), rows=rows, num_bytes=num_bytes)

    def publish_first(self, state: StateBytes) -> None:
        """Publish the first commit, before training."""
        self._publish(Cursor(pass_index=0, sample=0), state)

    def _publish(self, cursor: Cursor, state: StateBytes) -> None:
        serialize, settings = state
        self._store.publish(
            cursor, state=serialize(), schedule_digest=self._digest, settings=settings, environment=self.environment
        )

    # -- load ---------------------------------------------------------------------------------------------

    def _prepare_next(self) -> None:
        """Let the reader prepare the next pass, if it will be trained."""
        assert self._pass_planner is not None, "no run of passes was begun"
        self._next = self._reader.submit(self._prepare, self._pass_planner) if self._to_prepare < self._end else None
        self._to_prepare += 1

    def _prepare(self, planner: PassPlanner) -> PreparedPass:
        """Runs on the reader thread. Memory that the pass will need is pinned while others train."""
        prepared = planner.next()
        if self._budget.pinned:
            self.memory.wanted_bytes = prepared.plan.host_bytes
            self._pinner.submit(self.memory.pin_ahead)
        return prepared

    def _stage_next(self) -> None:
        """Let the reader stage the prepared pass, then prepare the one after it."""
        self._prepared = prepared = self._next
        self._staging = None
        if prepared is not None:
            self._staging = self._reader.submit(lambda: self._stage(*prepared.result()))
            self._prepare_next()

    def _stage(self, plan: PassPlan, assignments: list[SlotAssignment]) -> StagedLayout:
        staged = self._prefetcher.stage(plan, assignments)
        try:
            return self._packer.lay_out_staged(staged)
        except BaseException:
            self._release(staged)
            raise

    def _load(self, trained: Event) -> None:
        """Load the staged pass after the steps of the previous one."""
        assert self._staging is not None
        waited = seconds_of_waiting(self._staging, trained)
        self.check()
        layout = self._staging.result()
        staged, plan = layout.staged, layout.staged.plan
        self.report = report = PassReport.of(
            plan, rows_read=staged.rows_read, bytes_read=staged.bytes_read, read=staged.read_span
        )
        report.checkpoint_rows, report.checkpoint_bytes = staged.checkpoint_rows, staged.checkpoint_bytes
        report.add_wait("store", waited)
        with report.timing("unpack"):
            load = self._loading or PassLoad(layout, self._cached_G)
            self._packer.unpack(load, self._dumped_G)
            self._packer.activate(load)
        report.rows_ahead, loaded = load.rows_ahead, self._backend.streams.loaded()
        self._prepared = self._staging = self._loading = None
        self._cached_G, self._dumped_G = [], []
        self._freed = self._reader.submit(self._free_loaded, staged, report, trained, loaded)
        self.plan, self.assignments = plan, staged.assignments

    def _free_loaded(self, staged: Staged, report: PassReport, trained: Event, loaded: Event) -> None:
        """Free the host memory of rows that are on the device. Runs on the reader thread."""
        trained.wait()
        begun, plan = time.perf_counter(), staged.plan
        loaded.wait()
        report.load_seconds = report.work_seconds["unpack"] + time.perf_counter() - begun
        self._release(staged)
        for assignment in staged.assignments:
            assignment.load_K = assignment.load_K[:0].copy()
        self.host.keep(plan.retained, not_before=plan.pass_index - 1)

    def load_ahead(self) -> None:
        """Start moving the next rows of the coming pass to unused slots, if they are in host memory.

        A GPU does it while it trains. The last rows in these slots are durable: the next dump has memory only then.
        """
        staging, buffers = self._staging, self._buffers
        if self._backend.queues and staging and buffers and staging.done() and buffers.done():
            if self._loading is None:
                self.check()
                self._loading = PassLoad(staging.result(), buffers.result().cached_G)
            self._packer.load_ahead(self._loading)

    def cached_page(self, segment_id: int, group: int, page: int) -> NDArray[np.uint8] | None:
        """Return the bytes of a page in host memory, None if it is not there."""
        for pass_index, segments in self._segments.items():
            if any(segment.id == segment_id and not segment.within for segment in segments):
                return self.host.page(pass_index, group, page)
        return None

    def _release(self, staged: Staged) -> None:
        for region in staged.regions:
            self.memory.give_back(region)

    def _await_writer(self) -> None:
        if self._writing is not None:
            self._writing.exception()
            self.check()
            self._writing = None

    def _current(self) -> tuple[PassPlan, PassReport]:
        assert self.plan is not None, "no pass is being trained"
        assert self.report is not None
        return self.plan, self.report
