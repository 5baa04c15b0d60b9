"""Steps of models, and trainings that advance pass by pass: in windows of warm passes, or in turns.

A window begins when its first pass is ready and ends when the pass after it is: as many switches as passes. At its
begin the dump of the previous pass is still in flight, at its end the dump of its last pass. Earlier passes, two of
them warm, bring the tiers to that state.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice, pairwise
from typing import Any, cast

import torch
from torch import nn

import tiercache as tc
from benchmarks.budgets import Budgets
from benchmarks.device import TrainingDevice
from benchmarks.machine import drop_cache, middle, process_bytes_read
from tiercache.reporting.report import PassReport
from tiercache.train.passes import Pass


def mlp(*widths: int) -> nn.Sequential:
    """Return hidden layers between these widths, and a last one with one output per sample."""
    hidden = [part for inputs, outputs in pairwise(widths) for part in (nn.Linear(inputs, outputs), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], 1), nn.Flatten(0))


class _Layers(torch.autograd.Function):
    """Layers behind lookups: a number, with a gradient for each of them."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, *outs: torch.Tensor) -> torch.Tensor:
        ctx.gradient, ctx.sizes = gradient, [len(one) for one in outs]
        return outs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.gradient.split(ctx.sizes)


def run_backward(outs: Sequence[torch.Tensor], gradient: torch.Tensor) -> None:
    """Run backward with the gradients of the outputs, one below the other, as layers pass them on: as views.

    A cache copies a gradient that the caller of ``out.backward(gradient)`` has.
    """
    _Layers.apply(gradient, *outs).backward()  # type: ignore[no-untyped-call]


class Trainer:
    """A step of a model that predicts a label: forward, backward, and the optimizers of dense weights and of rows."""

    def __init__(self, cache: Any, net: nn.Module, optimizer_of: Callable[[Any], torch.optim.Optimizer]) -> None:
        self._cache, self.net, self._loss_of = cache, net.to(cache.device), nn.BCEWithLogitsLoss()
        cache.register(model=self.net, optimizer=optimizer_of(self.net.parameters()))

    def __call__(self, batch: Any) -> None:
        self._loss_of(self.net(batch), batch.label).backward()
        self._cache.optimizer.step()
        self._cache.optimizer.zero_grad()


class EmbeddingStep:
    """A step of one module without a dense part: forward, backward with a constant gradient, optimizer step."""

    def __init__(self, cache: Any, kind: type[nn.Module] = tc.EmbeddingBagCollection) -> None:
        self._cache, self._module = cache, kind(cache.schema)
        cache.register(**{kind.__name__: self._module})
        self._gradient = torch.empty(0, 0)

    def __call__(self, batch: Any) -> None:
        out = self._module(batch)
        outs = [out] if isinstance(out, torch.Tensor) else list(out.values())
        if len(self._gradient) != sum(map(len, outs)):
            self._gradient = torch.cat([torch.full_like(one.detach(), 1e-3) for one in outs])
        run_backward(outs, self._gradient)
        self._cache.optimizer.step()


class CacheRun:
    """A training that advances from pass to pass of a cache."""

    def __init__(
        self, cache: Any, train: Callable[[Any], None], batch: int, device: TrainingDevice, *, shuffle: bool = False
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

    def batches(self, **how: Any) -> Iterable[Any]:
        """Return the batches of the current pass."""
        return self.current.batches(self._batch, shuffle=self._shuffle, **how)

    def train_pass(self, **how: Any) -> int:
        """Train the current pass and return the number of steps."""
        steps = 0
        for batch in self.batches(**how):
            self.train(batch)
            steps += 1
        self._pass = None
        return steps

    def skip(self) -> None:
        """Leave the current pass as it is, if one has begun."""
        if self._pass is not None:
            self._pass.skip()
            self._pass = None

    def upto(self, first: int, *, train: bool = True) -> None:
        """Advance until pass ``first`` is current; earlier passes are left untrained if only time is measured."""
        while self.current.index < first:
            if train:
                self.train_pass()
            else:
                self.skip()

    def seconds(self, window: range) -> tuple[float, int]:
        """Train a window and return its seconds and steps."""
        self.upto(window.start)
        self._device.rest()
        begun, steps = time.perf_counter(), 0
        for _ in window:
            steps += self.train_pass()
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
            self.train_pass()
        trained = time.perf_counter()
        self.rest()
        self.rest_seconds = time.perf_counter() - trained
        return time.perf_counter() - begun

    def rest(self) -> None:
        """Wait until all work of a turn is done."""
        self._device.rest()

    def close(self) -> None:
        self._passes.close()
        self.cache.close()

    def batch_seconds(self, window: range) -> float:
        """Return the seconds to make a batch without prefetch and lookups; call it after ``seconds``."""
        taken = []
        for _ in window:
            begun, made = time.perf_counter(), 0
            for _batch in self.batches(prefetch=0):
                made += 1
            self._device.rest()
            taken.append((time.perf_counter() - begun) / made)
            self.skip()
            self.current  # noqa: B018 - the switch is not the next one's
        return middle(taken)

    def kept(self, most: int | None = 2) -> Callable[[], None]:
        """Return a function that trains batches made in advance in turn, repeatedly, like published measurements.

        most: the number of batches; None: those of the whole pass. The pass stays open.
        """
        batches = cycle(list(islice(self.batches(), most)))
        return lambda: self.train(next(batches))

    def kept_batch_seconds(self, repeats: int) -> float:
        """Return the seconds of a step on two kept batches."""
        step = self.kept()
        for _ in range(2):
            step()
        self._device.rest()
        begun = time.perf_counter()
        for _ in range(repeats):
            step()
        self._device.rest()
        return (time.perf_counter() - begun) / repeats


class TieredRun(CacheRun):
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
        train_of: Callable[[Any], Callable[[Any], None]],
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

    def train_pass(self, **how: Any) -> int:
        """Drop durable pages from the page cache, and train the current pass."""
        self.current  # noqa: B018 - the switch adds the previous pass's report
        if self.file is not None and len(self.cache.reports) > 1:
            self._dropper.submit(self._drop_after, self.cache.reports[-2])
        return super().train_pass(**how)

    def _drop_after(self, report: PassReport) -> None:
        if report.durable.wait(timeout=60) and self.file is not None:
            drop_cache(self.file)

    def seconds(self, window: range) -> tuple[float, int]:
        """Measure, and count the bytes read from disks."""
        self.upto(window.start)
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
        self._dropper.shutdown()


def in_turns(
    turns: int, passes: int, memory: CacheRun, tiered: CacheRun, after: Callable[[int], object] = lambda _: None
) -> dict[str, list[float]]:
    """Train some passes in memory and over the tiers in turns, in every other turn first over the tiers.

    after: called with the number of each turn. Returns the seconds of each turn, of "memory" and of "tiered".
    """
    seconds: dict[str, list[float]] = {"memory": [], "tiered": []}
    for turn in range(turns):
        both = [("memory", memory), ("tiered", tiered)]
        for name, run in both if turn % 2 == 0 else both[::-1]:
            seconds[name].append(run.turn(passes))
        after(turn)
    return seconds


def _step_back() -> None:
    """Drop pages only on idle cores."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
