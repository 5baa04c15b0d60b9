"""The same batches with every row on the device and over the tiers: turns of passes, and a window of warm passes.

The window begins when its first pass is ready and ends when the pass after it is: as many switches as passes. At its
begin the dump of the previous pass is still in flight, at its end the dump of its last pass. Earlier passes, two of
them warm, bring the tiers to that state.

bound_ratio = max(in-memory seconds, store bytes / bare disk's bandwidth, link bytes / link's) / tiered wall seconds;
the disk's bandwidth is measured at the window's mix of reads and writes, by large requests past the page cache;
of the two directions of the link the slower one counts. wait_fraction as in `out_of_core`, excluding seconds in which
the training thread waits for queued GPU steps.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

import tiercache as tc
from benchmarks.device import TrainingDevice
from benchmarks.disk_raw import BareDisk, Replay, Span
from benchmarks.machine import drop_cache, middle, process_bytes_read
from tiercache.data.pass_builder import RowBudget
from tiercache.planning.budgets import HostBudget, paged
from tiercache.planning.pass_plan import PassPlan
from tiercache.planning.row_offsets import RowOffsets
from tiercache.reporting.report import PassReport
from tiercache.store import MemoryEngine
from tiercache.store.table import group_tables
from tiercache.train.passes import Pass
from tiercache.values.batch import Batch

WARM_UP = 2  # warm passes before the window: by then dumps, loads and cached rows are steady
_READ_BYTES, _FILE_BYTES = 4 << 20, 1 << 30
_AT_RATE = {"pack": 0, "commit": 0, "durable": 0, "room": 0, "unpack": 1, "store": 1}
"""The pass whose report has each kind of seconds of a switch: the pass that ends (0), or the one that begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The measured passes."""

    first: int
    passes: int

    @classmethod
    def warm(cls, passes: tc.PassDataset, num_passes: int) -> Window:
        """Return the first window of the second epoch, after the warm-up passes."""
        return cls(first=len(passes.passes) + WARM_UP, passes=num_passes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """The budgets of the tiers."""

    device: int
    host: int

    @classmethod
    def least(cls, passes: tc.PassDataset, *, evaluation: int | None = None) -> Budgets:
        """Return the device budget of the extraction, and a host budget for barely more than two passes.

        evaluation: the part of the host budget for evaluation, as in `TierCache`.
        """
        groups = group_tables(passes.tables)
        positions = RowOffsets.of(passes, groups)
        largest = max(positions.row_bytes(p) for p in range(positions.num_passes))
        host = HostBudget.of(positions, 1 << 30, evaluation).smallest(int(2.25 * largest) + (4 << 20))
        return cls(device=device_need(passes), host=host)

    @classmethod
    def in_host(cls, passes: tc.PassDataset) -> Budgets:
        """Return the same device budget, and a host budget for all rows."""
        return cls(device=device_need(passes), host=int(1.25 * rows_held(passes)[1]) + 2 * cls.least(passes).host)


def device_need(passes: tc.PassDataset) -> int:
    """Return the device bytes of each group's largest pass, with each array aligned to a cache line."""
    budget = RowBudget(passes.tables, 0)
    ordered = passes.schema.ordered_tables
    for one in passes.passes:
        budget.close([one.rows(table.name) for table in ordered])
    return budget.needed([0] * len(ordered)) + 4096 * len(ordered)


def rows_held(passes: tc.PassDataset) -> tuple[int, int]:
    """Return the number of rows in all passes, and their bytes with optimizer state."""
    rows = num_bytes = 0
    for group in group_tables(passes.tables):
        for table in group.tables:
            keys = np.unique(np.concatenate([one.keys(table.name) for one in passes.passes])).size
            rows, num_bytes = rows + keys, num_bytes + keys * group.row_bytes
    return rows, num_bytes


class MemoryRun:
    """A training that advances from pass to pass, with every row on the device."""

    def __init__(
        self, cache: Any, train: Callable[[Batch], None], batch: int, device: TrainingDevice, *, shuffle: bool = False
    ) -> None:
        self.cache, self.train, self._batch, self._device, self._shuffle = cache, train, batch, device, shuffle
        self._passes = cast("Generator[Pass, None, None]", cache.passes(epochs=1 << 20))
        self._pass: Pass | None = None
        self.rest_seconds = 0.0
        """The time at the end of the last turn until all background work was done."""

    @property
    def current(self) -> Pass:
        """The current pass."""
        if self._pass is None:
            self._pass = next(self._passes)
        return self._pass

    def upto(self, first: int, *, train: bool = True) -> None:
        """Advance until pass ``first`` is current; earlier passes are left untrained if only time is measured."""
        while self.current.index < first:
            self._train(train=train)

    def seconds(self, window: Window) -> tuple[float, int]:
        """Train a window and return its seconds and steps."""
        self.upto(window.first)
        self._device.rest()
        begun, steps = time.perf_counter(), 0
        for _ in range(window.passes):
            steps += self._train()
            self.current  # noqa: B018 - the window includes the switch to the next pass
        self._device.rest()
        return time.perf_counter() - begun, steps

    def turn(self, passes: int) -> float:
        """Train some passes and return their seconds; time between two turns is excluded.

        From the switch to the first of them until the last batch of the last is trained and all background work is
        done: the dump of the previous pass, and the load of the next one, have a whole pass of time.
        """
        begun = time.perf_counter()
        for _ in range(passes):
            self._train()
        trained = time.perf_counter()
        self.rest()
        self.rest_seconds = time.perf_counter() - trained
        return time.perf_counter() - begun

    def _train(self, *, train: bool = True) -> int:
        steps, p = 0, self.current
        self.at_pass()
        for batch in p.batches(self._batch, shuffle=self._shuffle) if train else ():
            self.train(batch)
            steps += 1
        if not train:
            p.skip()
        self._pass = None
        return steps

    def at_pass(self) -> None:
        """Prepare a pass before its first batch."""

    def rest(self) -> None:
        """Wait until all background work is done."""

    def close(self) -> None:
        self._passes.close()

    def batch_seconds(self, window: Window) -> float:
        """Return the seconds to make a batch without prefetch and lookups; call it after ``seconds``."""
        taken = []
        for _ in range(window.passes):
            begun, made = time.perf_counter(), 0
            for _batch in self.current.batches(self._batch, prefetch=0):
                made += 1
            self._device.rest()
            taken.append((time.perf_counter() - begun) / made)
            self.current.skip()
            self._pass = None
            self.current  # noqa: B018 - the switch is not the next one's
        return middle(taken)

    def kept_batch_seconds(self, repeats: int) -> float:
        """Return the seconds of a step on two batches made in advance, repeatedly, like published measurements."""
        kept = [batch for batch, _ in zip(self.current.batches(self._batch), range(2), strict=False)]
        for batch in kept:
            self.train(batch)
        self._device.rest()
        begun = time.perf_counter()
        for number in range(repeats):
            self.train(kept[number % len(kept)])
        self._device.rest()
        return (time.perf_counter() - begun) / repeats


class TieredRun(MemoryRun):
    """Over the tiers, on a store in a file whose pages leave the page cache once they are durable.

    Reads are then cold: a load of pass t comes from dumps that were durable before t - 1 began. A thread drops the
    pages, which competes with the reader and the writer. A turn ends when its last dump is durable and the next pass
    is staged, so its seconds include as many dumps and loads as passes.
    """

    def __init__(
        self,
        passes: tc.PassDataset,
        store: tc.Store,
        budgets: Budgets,
        train_of: Callable[[Any], Callable[[Batch], None]],
        batch: int,
        device: TrainingDevice,
        *,
        shuffle: bool = False,
    ) -> None:
        self.store = store
        self.file = None if store.path is None else store.path / "blocks.bin"
        self._dropper = ThreadPoolExecutor(1, initializer=_step_back)
        cache = tc.TierCache(
            store, passes, device=device.open(), device_budget=budgets.device, host_budget=budgets.host,
            progress=False,
        )  # fmt: skip
        self.bytes_read = self.bytes_useful = 0
        super().__init__(cache, train_of(cache), batch, device, shuffle=shuffle)

    def at_pass(self) -> None:
        """Drop durable pages from the page cache."""
        if self.file is not None and len(self.cache.reports) > 1:
            self._dropper.submit(self._drop_after, self.cache.reports[-2])

    def _drop_after(self, report: PassReport) -> None:
        if report.durable.wait(timeout=60) and self.file is not None and self.file.exists():
            drop_cache(self.file)

    def seconds(self, window: Window) -> tuple[float, int]:
        """Measure, and count the bytes read from disks."""
        self.upto(window.first)
        before = process_bytes_read()
        taken = super().seconds(window)
        self.bytes_read = process_bytes_read() - before
        return taken

    def turn(self, passes: int) -> float:
        """Train a turn, and count the bytes read."""
        read, useful = process_bytes_read(), self.store.counters.row_bytes_read
        seconds = super().turn(passes)
        self.bytes_read += process_bytes_read() - read
        self.bytes_useful += self.store.counters.row_bytes_read - useful
        return seconds

    def rest(self) -> None:
        self.cache.drain()

    def close(self) -> None:
        super().close()
        self.cache.close()
        self._dropper.shutdown()


def _step_back() -> None:
    """Drop pages only on idle cores."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def open_store(passes: tc.PassDataset, path: Path | None, *, fresh: bool = True) -> tc.Store:
    """Open a store in a folder, or in memory."""
    if path is None:
        return tc.Store.open(None, tables=passes.tables, engine=MemoryEngine())
    if fresh:
        shutil.rmtree(path, ignore_errors=True)
    return tc.Store.open(path, tables=passes.tables)


def plans_of(passes: tc.PassDataset, folder: Path, budgets: Budgets, num_passes: int) -> list[PassPlan]:
    """Plan passes from the first one, in an unused store."""
    path = folder / "plan.tc"
    with (
        open_store(passes, path) as store,
        tc.TierCache(store, passes, device_budget=budgets.device, host_budget=budgets.host) as cache,
    ):
        plans = cache.plan(passes=num_passes)
    shutil.rmtree(path)
    return plans


def bare_disk_seconds(folder: Path, bytes_read: int, bytes_written: int, commits: int) -> float:
    """Return the bare disk's seconds to read and write these bytes at the same time.

    Cyclically in two files of at most 1 GiB, past the page cache; larger amounts are committed in pieces.
    """
    pieces = commits * -(-max(1, bytes_written) // (commits * _FILE_BYTES))
    each = paged(-(-max(1, bytes_written) // pieces))
    file_bytes = -(-max(each, 2 * _READ_BYTES) // _READ_BYTES) * _READ_BYTES
    reads = [Span(at % file_bytes, min(_READ_BYTES, bytes_read - at)) for at in range(0, bytes_read, _READ_BYTES)]
    work = Replay(reads, [[Span(0, each)]] * pieces, file_bytes)
    with BareDisk(folder, work.file_bytes) as disk:
        return min(disk.seconds(work) for _ in range(2))


def figures_of(
    device: TrainingDevice, run: TieredRun, window: Window, *, memory: float, tiered: float, folder: Path | None
) -> dict[str, Any]:
    """Return the figures of a window's seconds; ``folder``: on the store's disk, None for a store in memory."""
    reports = [r for r in run.cache.reports if window.first <= r.pass_index <= window.first + window.passes]
    ending, beginning = reports[:-1], reports[1:]
    seconds = switch_seconds(ending, beginning)
    loaded, written = sum(r.bytes_loaded for r in beginning), sum(r.bytes_written_planned for r in ending)
    read = sum(r.bytes_read for r in beginning)
    disk = 0.0 if folder is None else bare_disk_seconds(folder, read, written, window.passes)
    rates = device.link_bytes_per_second() if device.is_gpu else None
    link = 0.0 if rates is None else max(written / rates[0], loaded / rates[1])
    return {
        "bound_ratio": max(memory, disk, link) / tiered,
        "bound": max((memory, "memory"), (disk, "disk"), (link, "link"))[1],
        "throughput_ratio": memory / tiered,
        "wait_fraction": sum(seconds.values()) / tiered,
        **{f"{name}_fraction": taken / tiered for name, taken in seconds.items()},
        "demand": disk / memory,
        "in_memory_seconds": memory,
        "tiered_seconds": tiered,
        "raw_seconds": disk,
        "link_seconds": link,
        "link_bytes_to_host": written,
        "link_bytes_from_host": loaded,
        "link_bytes_per_second_to_host": None if rates is None else rates[0],
        "link_bytes_per_second_from_host": None if rates is None else rates[1],
        "store_bytes_read": 0 if folder is None else read,
        "store_bytes_written": 0 if folder is None else written,
        "bytes_read_per_useful_byte": run.bytes_read / read if folder is not None and read else None,
        "rows_needed": sum(r.rows for r in beginning),
        "rows_kept": sum(r.rows_kept for r in beginning),
        "rows_from_host": sum(r.rows_from_host for r in beginning),
        "rows_read": sum(r.rows_read for r in beginning),
        "planned_equals_measured": all(r.planned_equals_measured for r in run.cache.reports if r.bytes_written >= 0),
        "device_bytes": run.cache.device_bytes,
        "host_bytes_peak": run.cache.host_bytes_peak,
        "window_visits": window.passes,
    }


def switch_seconds(ending: Sequence[PassReport], beginning: Sequence[PassReport]) -> dict[str, float]:
    """Return the training thread's seconds in some switches, by cause: of the passes that end and the passes that
    begin.
    """
    return {
        name: sum((r.wait_seconds | r.work_seconds).get(name, 0.0) for r in (ending, beginning)[which])
        for name, which in _AT_RATE.items()
    }


def same_rows(memory: tc.InMemoryCache, tiered: tc.TierCache) -> bool:
    """Return True if rows and optimizer state have the same bits, for two passes of the same index."""
    now = tiered.live_rows()
    return all(
        np.array_equal(mine.view(np.uint8), yours.view(np.uint8))
        for table in memory.tables
        for mine, yours in zip(
            memory.fields(table.name), now.fields(table.name, np.asarray(memory.keys(table.name))), strict=True
        )
    )
