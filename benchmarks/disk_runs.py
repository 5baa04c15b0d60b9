"""The two runs of the out-of-core benchmark: the same batches, in memory and over the tiers."""

from __future__ import annotations

import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import nn

import tiercache as tc
from benchmarks.disk_case import DENSE_RATE, TABLE, Net, Size, dense_part
from benchmarks.machine import device_bytes_read, drop_cache, middle, process_bytes_read

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    from tiercache.planning.visit_plan import VisitPlan
    from tiercache.tiers.report import VisitReport
    from tiercache.training.visit import Visit

DATA = "blocks.bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """What the tiers may hold."""

    device: int
    host: int


class Training:
    """A training in memory that is advanced a turn at a time; what is between two turns has no part in its seconds."""

    def __init__(self, cache: tc.TierCache | tc.ResidentCache, size: Size, width: int) -> None:
        self.cache, self.size = cache, size
        torch.manual_seed(1)
        self.model, self._loss_of = Net(cache, width), nn.BCEWithLogitsLoss()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=DENSE_RATE)
        cache.register(model=self.model, optimizer=self._optimizer)
        self._visits = cast("Generator[Visit, None, None]", cache.passes(epochs=size.epochs + 1))
        self.rest_seconds = 0.0

    def advance(self, visits: int) -> float:
        """Train some visits and return their seconds; the first epoch of all leaves the dense part out.

        From the switch to the first of them until the last batch of the last is trained and nothing goes on beside it
        any more: the dump of the visit before, and the load of the one after, have a whole visit for it.
        """
        begun = time.perf_counter()
        for _ in range(visits):
            visit = next(self._visits)
            self.at_visit()
            for batch in visit.batches(self.size.batch, shuffle=True):
                self._loss_of(self.model(batch, light=visit.epoch == 0), batch.label).backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
        trained = time.perf_counter()
        self.rest()
        self.rest_seconds = time.perf_counter() - trained
        return time.perf_counter() - begun

    def finish(self) -> None:
        """Have the last visit written too."""
        next(self._visits)
        self.rest()

    def at_visit(self) -> None:
        """Do what is due before a visit's first batch."""

    def rest(self) -> None:
        """Wait until nothing goes on beside the training thread."""

    def close(self) -> None:
        """Let go of everything."""
        self._visits.close()


class TieredTraining(Training):
    """The same over the tiers, on a fresh store whose pages leave the page cache as soon as a dump is durable.

    Reads are then cold: a load of visit t comes from dumps that were durable before t - 1 began. A thread drops the
    pages, so that it takes its time from reader and writer. A turn ends when its last dump is durable and the visit
    after it is staged, so as many dumps and loads as it has visits are made in its seconds, from begin to end.
    """

    cache: tc.TierCache

    def __init__(self, passes: tc.PassSet, size: Size, width: int, folder: Path, budgets: Budgets) -> None:
        self._path = folder / "store.tc"
        shutil.rmtree(self._path, ignore_errors=True)
        self._store = tc.Store.open(self._path, tables=passes.tables)
        self._dropper = ThreadPoolExecutor(1, initializer=_step_back)
        self.bytes_read_by_process = self.bytes_read_by_device = self.bytes_useful = 0
        super().__init__(_cache(self._store, passes, budgets), size, width)

    def advance(self, visits: int) -> float:
        """Do so, and count the bytes read."""
        by_process, by_device = process_bytes_read(), device_bytes_read(self._path)
        useful = self._store.counters.row_bytes_read
        seconds = super().advance(visits)
        self.bytes_read_by_process += process_bytes_read() - by_process
        self.bytes_read_by_device += device_bytes_read(self._path) - by_device
        self.bytes_useful += self._store.counters.row_bytes_read - useful
        return seconds

    def at_visit(self) -> None:
        """Drop what is durable from the page cache."""
        reports = self.cache.reports
        if len(reports) > 1:
            self._dropper.submit(self._drop_after, reports[-2])

    def _drop_after(self, report: VisitReport) -> None:
        if report.durable.wait(timeout=60):
            drop_cache(self._path / DATA)

    def rest(self) -> None:
        """Wait for reader and writer."""
        self.cache.drain()

    @property
    def warm_reports(self) -> list[VisitReport]:
        """Of the visits of all epochs but the first."""
        return [r for r in self.trained_reports if r.epoch >= 1]

    @property
    def trained_reports(self) -> list[VisitReport]:
        """Of all visits that were trained."""
        return [r for r in self.cache.reports if r.epoch < self.size.epochs]

    @property
    def file_bytes(self) -> int:
        """The size of the store's file."""
        return (self._path / DATA).stat().st_size

    @property
    def state_bytes(self) -> int:
        """Bytes of dense state in the last commit."""
        assert self._store.commit is not None
        return self._store.commit.state_bytes

    def close(self) -> None:
        """End the threads and close the store."""
        super().close()
        self.cache.close()
        self._dropper.shutdown()
        self._store.close()


def _step_back() -> None:
    """Drop pages only where a core has nothing else to do."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def plans_of(passes: tc.PassSet, size: Size, folder: Path, budgets: Budgets) -> list[VisitPlan]:
    """Plan all visits that will be measured, and those before."""
    path = folder / "plan.tc"
    shutil.rmtree(path, ignore_errors=True)
    with tc.Store.open(path, tables=passes.tables) as store, _cache(store, passes, budgets) as cache:
        plans = cache.plan(visits=size.passes * size.epochs)
    shutil.rmtree(path)
    return plans


def _cache(store: tc.Store, passes: tc.PassSet, budgets: Budgets) -> tc.TierCache:
    return tc.TierCache(store, passes, device_budget=budgets.device, host_budget=budgets.host)


def same_bits(memory: Training, tiered: TieredTraining) -> bool:
    """Whether two trainings ended with the same rows, optimizer state and dense weights."""
    assert isinstance(memory.cache, tc.ResidentCache)
    keys = np.asarray(memory.cache.keys(TABLE))
    state, other = memory.model.state_dict(), tiered.model.state_dict()
    return all(
        np.array_equal(mine.view(np.uint8), yours.view(np.uint8))
        for mine, yours in zip(memory.cache.fields(TABLE), tiered.cache.rows_now().fields(TABLE, keys), strict=True)
    ) and all(torch.equal(state[name], other[name]) for name in other)


class DenseTimer:
    """Finds the width of the dense part that takes a given time."""

    def __init__(self, size: Size, device: str = "cpu", rest: Callable[[], None] = lambda: None) -> None:
        """rest: waits until the device has done what it was given."""
        self._batch, self._inputs = size.batch, size.features * size.dim
        self._device, self._rest = device, rest
        self._known: dict[int, float] = {}

    def seconds(self, width: int) -> float:
        """Return the seconds that one sample takes in the dense part: forward, backward and step."""
        if width not in self._known:
            part, loss_of = dense_part(self._inputs, width).to(self._device), nn.BCEWithLogitsLoss()
            optimizer = torch.optim.SGD(part.parameters(), lr=DENSE_RATE)
            inputs = torch.rand(self._batch, self._inputs, requires_grad=True, device=self._device)
            labels = torch.zeros(self._batch, device=self._device)
            taken: list[float] = []
            until = time.perf_counter() + 0.12
            while len(taken) < 4 or time.perf_counter() < until:
                begun = time.perf_counter()
                loss_of(part(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                self._rest()
                taken.append(time.perf_counter() - begun)
            self._known[width] = middle(taken[1:]) / self._batch
        return self._known[width]

    def width(self, sample_seconds: float) -> int:
        """Return the width, a multiple of 4, that takes about ``sample_seconds``; 4 where all take longer."""
        low, high = 4, 32
        while self.seconds(high) < sample_seconds and high < 1 << 14:
            low, high = high, 2 * high
        return next((w for w in _between(low, high) if self.seconds(w) >= sample_seconds), high)


def _between(low: int, high: int) -> Iterator[int]:
    step = max(4, (high - low) // 8)
    yield from range(low, high, step)


def seconds_without_dense(passes: tc.PassSet, size: Size) -> float:
    """Return the seconds of one sample in memory where there is no dense part."""
    cache = tc.ResidentCache(passes)
    model, loss_of = Net(cache, 0), nn.BCEWithLogitsLoss()
    taken = []
    for visit in cache.passes(epochs=1):
        for batch in visit.batches(size.batch, shuffle=True):
            begun = time.perf_counter()
            loss_of(model(batch, light=True), batch.label).backward()
            cache.step()
            taken.append(time.perf_counter() - begun)
        if visit.index == min(3, size.passes - 1):
            break
    return middle(taken) / size.batch
