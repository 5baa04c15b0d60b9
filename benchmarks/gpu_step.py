"""The resident step of `benchmarks.gpu`: 10 tables of 1.68 million rows of dim 128, 1,048,570 ids, both modules.

All rows are on the GPU (InMemoryCache). Ids follow a power law of 1.05 and are permuted. Batches are kept, with their
ids on the GPU: the protocol of the figures that FBGEMM and DynamicEmb publish. A step is forward, backward with a
constant gradient, and `cache.optimizer.step()`.

gpu_ms: GPU time of a step, measured by events after a sleep that hides the host. wall_ms: wall time per step of a loop
that never waits; host_ms: its CPU time on the training thread. synced_ms: as published, events around each step and a
wait after it. roof_ms: the bytes that must move, at the rate of a copy (4 E of ids; U rows read and E written by the
forward; E gradients; rows and states of U read and written). roof_fraction: roof_ms / gpu_ms. us_KERNEL: microseconds
per step in each kernel, from torch's profiler.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any, cast

import numpy as np

import tiercache as tc
from benchmarks.device import TrainingDevice
from benchmarks.embedding_contenders import (
    Fbgemm,
    Shape,
    TorchBags,
    WholeTables,
    batches_of,
    distinct_rows,
    gradients_of,
    state_floats,
)
from benchmarks.training import EmbeddingStep

Keep = Callable[[dict[str, Any]], None]


FULL = Shape(name="step", num_tables=10, rows=1_677_721, num_features=10, num_samples=104_857, dim=128)
DRY = Shape(name="step", num_tables=10, rows=300, num_features=10, num_samples=64, dim=128)
MODULES = {"bags": tc.EmbeddingBagCollection, "rows": tc.EmbeddingCollection}


class Resident:
    """Both modules over whole tables in memory, with kept batches."""

    def __init__(self, device: TrainingDevice, optimizer: str) -> None:
        self.device, self.shape = device, FULL if device.is_gpu else DRY
        whole = WholeTables(self.shape, optimizer, batches_of(self.shape))
        self._cache = tc.InMemoryCache(cast("tc.PassDataset", whole), device=device.open())
        self._steps = {name: EmbeddingStep(self._cache, kind) for name, kind in MODULES.items()}
        self._passes = cast("Generator[Any, None, None]", self._cache.passes(epochs=1 << 20))
        for batch in next(self._passes).batches(self.shape.num_samples):
            for train in self._steps.values():
                train(batch)
        self._next = cycle(list(next(self._passes).batches(self.shape.num_samples)))

    def step(self, name: str) -> None:
        """Train the next of the kept batches."""
        self._steps[name](next(self._next))

    def close(self) -> None:
        self._passes.close()
        self._cache.close()
        del self._cache, self._passes, self._steps, self._next
        self.device.free_unused()


def roof_bytes(shape: Shape, optimizer: str) -> float:
    """Return the bytes that a step on an average batch must move."""
    distinct, entries = float(np.mean([distinct_rows(shape, ids) for ids in batches_of(shape)[:2]])), shape.num_entries
    state = state_floats(optimizer, shape.dim)
    return 4 * entries + 4 * shape.dim * (distinct + 2 * entries) + 8 * distinct * (shape.dim + state)


def step(device: TrainingDevice, keep: Keep) -> None:
    """Measure both modules with four optimizers."""
    copied = device.copy_bytes_per_second()
    keep({"copy_TB_per_second": copied / 1e12})
    for optimizer in ("sgd", "adam", "adagrad", "rowwise"):
        resident = Resident(device, optimizer)
        moved = roof_bytes(resident.shape, optimizer)
        keep({f"{optimizer}_roof_MB": moved / 1e6, f"{optimizer}_roof_ms": 1e3 * moved / copied})
        for name in MODULES:
            call, tail = partial(resident.step, name), f"{optimizer}_{name}_"
            took = device.gpu_ms(call)
            keep({f"{tail}gpu_ms": took, f"{tail}roof_fraction": 1e3 * moved / copied / took})
            keep({f"{tail}{key}": value for key, value in device.loop_ms(call).items()})
            keep({f"{tail}synced_ms": device.gpu_ms(call, 35, 5, alone=False)})
            if optimizer in ("sgd", "adam"):
                keep({f"{tail}{key}": value for key, value in device.kernels_us(call).items()})
        del call
        resident.close()


def peers(device: TrainingDevice, keep: Keep) -> None:
    """Measure `nn.EmbeddingBag(sparse=True)` with torch's optimizers, and FBGEMM if it is installed."""
    shape = FULL if device.is_gpu else DRY
    contenders: list[tuple[str, Any, str]] = [("torch", TorchBags, "adagrad"), ("torch", TorchBags, "adam")]
    contenders += [("fbgemm", Fbgemm, optimizer) for optimizer in ("sgd", "adam", "adagrad", "rowwise")]
    for name, kind, optimizer in contenders:
        if name == "fbgemm" and not device.is_gpu:
            continue
        try:
            peer = kind(shape, optimizer, batches_of(shape), gradients_of(shape), device.torch_name)
        except ImportError as error:
            keep({name: f"not installed: {error}"})
            break
        call = partial(_next_step, peer, count())
        keep({f"{name}_{optimizer}_gpu_ms": device.gpu_ms(call)})
        keep({f"{name}_{optimizer}_{key}": value for key, value in device.loop_ms(call, 20).items()})
        keep({f"{name}_{optimizer}_synced_ms": device.gpu_ms(call, 15, 5, alone=False)})
        del peer, call
        device.free_unused()


def _next_step(peer: Any, numbers: Iterator[int]) -> None:
    peer.step(next(numbers))


def host(device: TrainingDevice, keep: Keep) -> None:
    """Profile the training thread by its CPU clock: microseconds per step of each function, own and cumulative."""
    resident, steps = Resident(device, "adam"), 100 if device.is_gpu else 2
    for name in MODULES:
        for _ in range(10 if device.is_gpu else 1):
            resident.step(name)
        device.rest()
        profiler = cProfile.Profile(time.thread_time)
        profiler.enable()
        for _ in range(steps):
            resident.step(name)
        profiler.disable()
        device.rest()
        found: Any = pstats.Stats(profiler).stats  # type: ignore[attr-defined] # typeshed leaves it out
        keep({f"{name}_calls": sum(calls for calls, *_ in found.values()) / steps})
        for (file, line, function), (_, calls, own, total, _) in sorted(found.items(), key=lambda it: -it[1][2])[:25]:
            where = f"{name} {Path(file).name}:{line} {function}"
            keep({f"{where} x{calls / steps:g}": f"{1e6 * own / steps:.1f} us, {1e6 * total / steps:.1f} with calls"})
    resident.close()


def few_steps(device: TrainingDevice, optimizer: str) -> None:
    """Run a few steps under an external profiler."""
    resident = Resident(device, optimizer)
    for _ in range(3):
        resident.step("bags")
    device.rest()
