"""The two runs of the out-of-core benchmark: the same batches, in memory and over the tiers."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import tiercache as tc
from benchmarks.disk_case import DENSE_RATE, TABLE, Net, Size, dense_part
from benchmarks.machine import device_bytes_read, drop_cache, middle, process_bytes_read
from tiercache.budget import HostBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tiercache.report import VisitReport
    from tiercache.visit_plan import VisitPlan

DATA = "data.mdb"


@dataclass(slots=True)
class Run:
    """One training: how long each warm epoch took, and what it ended with."""

    epoch_seconds: list[float]
    model: Net
    rows: tuple[Any, ...] = ()
    """Vectors and state of every key asked for."""


@dataclass(slots=True)
class TieredRun(Run):
    """The same over the tiers."""

    reports: list[VisitReport] = field(default_factory=list)
    """Of the warm visits."""
    all_exact: bool = False
    """Whether the plan held in every visit, the first epoch's too."""
    bytes_read_by_process: int = 0
    bytes_read_by_device: int | None = None
    bytes_useful: int = 0
    host_bytes_peak: int = 0
    device_bytes: int = 0
    file_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """What the tiers may hold."""

    device: int
    host: int


def train(
    cache: tc.TierCache | tc.ResidentCache,
    size: Size,
    width: int,
    *,
    epochs: int,
    at_epoch: Callable[[int], None] = lambda _: None,
    at_visit: Callable[[], None] = lambda: None,
) -> tuple[Net, list[float]]:
    """Train and return the model and the seconds of each epoch, the first of which leaves the dense part out."""
    torch.manual_seed(1)
    model, loss_of = Net(cache, width), nn.BCEWithLogitsLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=DENSE_RATE)
    cache.track(model=model, optimizer=optimizer)
    marks = []
    for visit in cache.passes(epochs=epochs):
        if visit.index % size.passes == 0:
            at_epoch(visit.epoch)
            marks.append(time.perf_counter())
        at_visit()
        for batch in visit.batches(size.batch, shuffle=True):
            loss_of(model(batch, light=visit.epoch == 0), batch.label).backward()
            optimizer.step()
            optimizer.zero_grad()
    marks.append(time.perf_counter())
    at_epoch(epochs)
    return model, [b - a for a, b in pairwise(marks)]


def run_resident(passes: tc.PassSet, size: Size, width: int, *, keep_rows: bool) -> Run:
    """Train in memory."""
    cache = tc.ResidentCache(passes)
    model, seconds = train(cache, size, width, epochs=1 + size.warm_epochs)
    return Run(seconds[1:], model, (cache.keys(TABLE), *cache.fields(TABLE)) if keep_rows else ())


def run_tiered(
    passes: tc.PassSet, size: Size, width: int, folder: Path, budgets: Budgets, *, keys: Any = None
) -> TieredRun:
    """Train over the tiers, on a fresh store whose pages leave the page cache as soon as a dump is durable.

    Reads are then cold: a load of visit t comes from dumps that were durable before t - 1 began. A thread drops the
    pages, so that it takes its time from reader and writer.
    """
    path = folder / "store.tc"
    shutil.rmtree(path, ignore_errors=True)
    with (
        tc.Store.open(path, tables=passes.tables) as store,
        _cache(store, passes, budgets) as cache,
        ThreadPoolExecutor(1) as dropper,
    ):
        counters = dict[int, tuple[int, int | None, int]]()

        def drop_after(report: VisitReport) -> None:
            if report.durable.wait(timeout=60):
                drop_cache(path / DATA)

        def at_visit() -> None:
            if len(cache.reports) > 1:
                dropper.submit(drop_after, cache.reports[-2])

        def note(epoch: int) -> None:
            counters[epoch] = process_bytes_read(), device_bytes_read(path), store.counters.row_bytes_read

        last = 1 + size.warm_epochs
        model, seconds = train(cache, size, width, epochs=last, at_epoch=note, at_visit=at_visit)
        rows = () if keys is None else (keys, *cache.rows_now().fields(TABLE, np.asarray(keys)))
        before, after = counters[1], counters[last]
        device = None if before[1] is None or after[1] is None else after[1] - before[1]
        assert store.commit is not None
        return TieredRun(
            epoch_seconds=seconds[1:], model=model, rows=rows,
            reports=[r for r in cache.reports if r.epoch >= 1],
            all_exact=all(r.planned_equals_measured for r in cache.reports),
            bytes_read_by_process=after[0] - before[0], bytes_read_by_device=device,
            bytes_useful=after[2] - before[2], host_bytes_peak=cache.host_bytes_peak, device_bytes=cache.device_bytes,
            file_bytes=(path / DATA).stat().st_size, state_bytes=store.commit.state_bytes,
        )  # fmt: skip


def plans_of(passes: tc.PassSet, size: Size, folder: Path, budgets: Budgets) -> tuple[list[VisitPlan], int]:
    """Plan all visits that will be measured, and those before; return them and the bytes of a write transaction."""
    path = folder / "plan.tc"
    shutil.rmtree(path, ignore_errors=True)
    with tc.Store.open(path, tables=passes.tables) as store, _cache(store, passes, budgets) as cache:
        plans = cache.plan(visits=size.passes * (1 + size.warm_epochs))
        row_bytes = store.groups[0].row_bytes
    shutil.rmtree(path)
    largest = max(sum(plan.rows_G) for plan in plans) * row_bytes
    shares = HostBudget.plan(budgets.host, evaluation=None, largest_row=row_bytes, largest_pass=largest)
    return plans, shares.transaction


def _cache(store: tc.Store, passes: tc.PassSet, budgets: Budgets) -> tc.TierCache:
    return tc.TierCache(store, passes, device_budget=budgets.device, host_budget=budgets.host)


def same_bits(ours: Run, theirs: Run) -> bool:
    """Whether two runs ended with the same rows, optimizer state and dense weights."""
    state, other = ours.model.state_dict(), theirs.model.state_dict()
    return all(
        np.array_equal(mine.view(np.uint8), yours.view(np.uint8))
        for mine, yours in zip(ours.rows, theirs.rows, strict=True)
    ) and all(torch.equal(state[name], other[name]) for name in other)


class DenseTimer:
    """Finds the width of the dense part that takes a given time."""

    def __init__(self, size: Size) -> None:
        self._batch, self._inputs = size.batch, size.features * size.dim
        self._known: dict[int, float] = {}

    def seconds(self, width: int) -> float:
        """Return the seconds that one sample takes in the dense part: forward, backward and step."""
        if width not in self._known:
            part, loss_of = dense_part(self._inputs, width), nn.BCEWithLogitsLoss()
            optimizer = torch.optim.SGD(part.parameters(), lr=DENSE_RATE)
            inputs = torch.rand(self._batch, self._inputs, requires_grad=True)
            labels, taken = torch.zeros(self._batch), []
            for _ in range(4):
                begun = time.perf_counter()
                loss_of(part(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                taken.append(time.perf_counter() - begun)
            self._known[width] = middle(taken[1:]) / self._batch
        return self._known[width]

    def width(self, sample_seconds: float) -> int:
        """Return the width, a multiple of 16, that takes about ``sample_seconds``; 16 where all take longer."""
        low, high = 16, 32
        while self.seconds(high) < sample_seconds and high < 1 << 14:
            low, high = high, 2 * high
        return next((w for w in _between(low, high) if self.seconds(w) >= sample_seconds), high)


def _between(low: int, high: int) -> Iterator[int]:
    step = max(16, (high - low) // 8)
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
