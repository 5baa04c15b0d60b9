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
import gc
import pstats
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

import tiercache as tc
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
from benchmarks.machine import middle

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from benchmarks.window import TrainingMachine

    Keep = Callable[[dict[str, Any]], None]

FULL = Shape(name="step", num_tables=10, rows=1_677_721, num_features=10, num_samples=104_857, dim=128)
DRY = Shape(name="step", num_tables=10, rows=300, num_features=10, num_samples=64, dim=128)
MODULES = {"bags": tc.EmbeddingBagCollection, "rows": tc.EmbeddingCollection}
_WAIT_CYCLES = 16_000_000  # 8 ms, enough for the host to queue a whole step
_KERNELS = 14


def copy_bytes_per_second(machine: TrainingMachine) -> float:
    """Return the bytes per second that a copy on the device reads and writes."""
    size = 2 << 30 if machine.is_gpu else 1 << 20
    source = torch.zeros(size, dtype=torch.uint8, device=torch_device(machine))
    target = torch.empty_like(source)
    return 2e3 * size / gpu_ms(machine, lambda: target.copy_(source))


def torch_device(machine: TrainingMachine) -> str:
    """Return the device of torch's own tensors."""
    return "cuda" if machine.is_gpu else "cpu"


def gpu_ms(machine: TrainingMachine, call: Callable[[], Any], repeats: int = 20, warm: int = 3) -> float:
    """Return the median GPU milliseconds of a call; without a GPU, its wall milliseconds."""
    taken = []
    for number in range(warm + repeats if machine.is_gpu else 2):
        if machine.is_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(_WAIT_CYCLES)  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            end.synchronize()
            took = begin.elapsed_time(end)
        else:
            begun = time.perf_counter()
            call()
            took = 1e3 * (time.perf_counter() - begun)
        if number >= warm or not machine.is_gpu:
            taken.append(took)
    return middle(taken)


def loop_ms(machine: TrainingMachine, call: Callable[[], Any], repeats: int = 50) -> dict[str, float]:
    """Return wall and thread milliseconds per call of a loop that waits once, at its end."""
    repeats = repeats if machine.is_gpu else 2
    for _ in range(min(5, repeats)):
        call()
    machine.rest()
    begun, thread = time.perf_counter(), time.thread_time()
    for _ in range(repeats):
        call()
    thread = time.thread_time() - thread
    machine.rest()
    return {"wall_ms": 1e3 * (time.perf_counter() - begun) / repeats, "host_ms": 1e3 * thread / repeats}


def synced_ms(machine: TrainingMachine, call: Callable[[], Any], repeats: int = 40) -> float:
    """Return the mean milliseconds between events around a call; the host waits after each call."""
    if not machine.is_gpu:
        return gpu_ms(machine, call)
    taken = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end))
    return float(np.mean(taken[5:]))


def kernels_us(machine: TrainingMachine, call: Callable[[], Any], repeats: int = 20) -> dict[str, float]:
    """Return the microseconds per call of each kernel, largest first; nothing without a GPU."""
    if not machine.is_gpu:
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    ordered = sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)[:_KERNELS]
    return {
        f"us_{event.key[:70]} x{event.count / repeats:g}": event.self_device_time_total / repeats for event in ordered
    }


class Resident:
    """Both modules over whole tables in memory, with kept batches."""

    def __init__(self, machine: TrainingMachine, optimizer: str) -> None:
        self.machine, self.shape = machine, FULL if machine.is_gpu else DRY
        whole = WholeTables(self.shape, optimizer, batches_of(self.shape))
        self._cache = tc.InMemoryCache(cast("tc.PassDataset", whole), device=machine.device())
        self._modules = {name: kind(self._cache.schema) for name, kind in MODULES.items()}
        self._cache.register(model=torch.nn.ModuleList(self._modules.values()))
        flat = torch.from_numpy(gradients_of(self.shape)[0]).to(torch_device(machine))
        self._gradients = {
            "bags": [flat],
            "rows": [part.contiguous() for part in torch.split(flat, self.shape.dim, dim=1)],
        }
        self._passes = cast("Generator[Any, None, None]", self._cache.passes(epochs=1 << 20))
        for batch in next(self._passes).batches(self.shape.num_samples):
            for name in MODULES:
                self.train(name, batch)
        self._batches = list(next(self._passes).batches(self.shape.num_samples))
        self._number = 0

    def train(self, name: str, batch: Any) -> None:
        """Run forward, backward and the optimizer step of one module."""
        out = self._modules[name](batch)
        torch.autograd.backward([out] if name == "bags" else list(out.values()), self._gradients[name])
        self._cache.optimizer.step()

    def step(self, name: str) -> None:
        """Train the next of the kept batches."""
        self.train(name, self._batches[self._number % len(self._batches)])
        self._number += 1

    def close(self) -> None:
        """Free the memory."""
        self._passes.close()
        self._batches.clear()
        self._cache.close()
        del self._cache, self._passes, self._modules, self._gradients
        forget(self.machine)


def forget(machine: TrainingMachine) -> None:
    """Free the GPU memory that no tensor uses."""
    gc.collect()
    if machine.is_gpu:
        torch.cuda.empty_cache()


def roof_bytes(shape: Shape, optimizer: str) -> float:
    """Return the bytes that a step on an average batch must move."""
    distinct, entries = float(np.mean([distinct_rows(shape, ids) for ids in batches_of(shape)[:2]])), shape.num_entries
    state = state_floats(optimizer, shape.dim)
    return 4 * entries + 4 * shape.dim * (distinct + 2 * entries) + 8 * distinct * (shape.dim + state)


def step(machine: TrainingMachine, keep: Keep) -> None:
    """Measure both modules with four optimizers."""
    copied = copy_bytes_per_second(machine)
    keep({"copy_TB_per_second": copied / 1e12})
    for optimizer in ("sgd", "adam", "adagrad", "rowwise"):
        resident = Resident(machine, optimizer)
        moved = roof_bytes(resident.shape, optimizer)
        keep({f"{optimizer}_roof_MB": moved / 1e6, f"{optimizer}_roof_ms": 1e3 * moved / copied})
        for name in MODULES:

            def call(name: str = name, resident: Resident = resident) -> None:
                resident.step(name)

            tail = f"{optimizer}_{name}_"
            took = gpu_ms(machine, call)
            keep({f"{tail}gpu_ms": took, f"{tail}roof_fraction": 1e3 * moved / copied / took})
            keep({f"{tail}{key}": value for key, value in loop_ms(machine, call).items()})
            keep({f"{tail}synced_ms": synced_ms(machine, call)})
            if optimizer in ("sgd", "adam"):
                keep({f"{tail}{key}": value for key, value in kernels_us(machine, call).items()})
        resident.close()


def peers(machine: TrainingMachine, keep: Keep) -> None:
    """Measure `nn.EmbeddingBag(sparse=True)` with torch's optimizers, and FBGEMM if it is installed."""
    shape = FULL if machine.is_gpu else DRY
    contenders: list[tuple[str, Any, str]] = [("torch", TorchBags, "adagrad"), ("torch", TorchBags, "adam")]
    contenders += [("fbgemm", Fbgemm, optimizer) for optimizer in ("sgd", "adam", "adagrad", "rowwise")]
    for name, kind, optimizer in contenders:
        if name == "fbgemm" and not machine.is_gpu:
            continue
        try:
            peer = kind(shape, optimizer, batches_of(shape), gradients_of(shape), torch_device(machine))
        except ImportError as error:
            keep({name: f"not installed: {error}"})
            break
        numbers = iter(range(1 << 30))

        def call(peer: Any = peer, numbers: Any = numbers) -> None:
            peer.step(next(numbers))

        keep({f"{name}_{optimizer}_gpu_ms": gpu_ms(machine, call)})
        keep({f"{name}_{optimizer}_{key}": value for key, value in loop_ms(machine, call, 20).items()})
        keep({f"{name}_{optimizer}_synced_ms": synced_ms(machine, call, 20)})
        del peer, call
        forget(machine)


def host(machine: TrainingMachine, keep: Keep) -> None:
    """Profile the training thread by its CPU clock: microseconds per step of each function, own and cumulative."""
    resident, steps = Resident(machine, "adam"), 100 if machine.is_gpu else 2
    for name in MODULES:
        for _ in range(10 if machine.is_gpu else 1):
            resident.step(name)
        machine.rest()
        profiler = cProfile.Profile(time.thread_time)
        profiler.enable()
        for _ in range(steps):
            resident.step(name)
        profiler.disable()
        machine.rest()
        found: Any = pstats.Stats(profiler).stats  # type: ignore[attr-defined] # typeshed leaves it out
        keep({f"{name}_calls": sum(calls for calls, *_ in found.values()) / steps})
        for (file, line, function), (_, calls, own, total, _) in sorted(found.items(), key=lambda it: -it[1][2])[:25]:
            where = f"{name} {Path(file).name}:{line} {function}"
            keep({f"{where} x{calls / steps:g}": f"{1e6 * own / steps:.1f} us, {1e6 * total / steps:.1f} with calls"})
    resident.close()


def few_steps(machine: TrainingMachine, optimizer: str) -> None:
    """Run a few steps under an external profiler."""
    resident = Resident(machine, optimizer)
    for _ in range(3):
        resident.step("bags")
    machine.rest()
