"""Launches and host microseconds of a step of 26 tables in five groups, where no GPU does any work.

`CudaBackend` looks up and steps rows as it does on a GPU. CuPy, the driver and torch's CUDA calls are stood in for by
calls that do nothing, so that the time is what Python takes to prepare and make the launches. Arrays are tiny: torch's
own calls, which are real and run on the CPU, then take about what they take to launch a kernel. Times are those of the
thread on its core, so that others on the machine do not count.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiercache.backends.cuda import CudaBackend
from tiercache.backends.cuda_runtime import TORCH_DTYPES
from tiercache.backends.jagged import LookupIds, OptimizerStep, SavedGradient
from tiercache.kernels.cuda.device import CudaDevice
from tiercache.kernels.cuda.launch import describe
from tiercache.store.table import Adagrad, Table, Uniform, group_tables
from tiercache.tiers.rows import GroupRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import DTypeLike, NDArray

    from tiercache.kernels.arrays import View

__all__ = ["launches"]

DIMS = (8, 16, 32, 64, 128)
NUM_TABLES = 26
ROWS = 100_000
NUM_SAMPLES = 4
_WARM, _TIMED = 50, 400


class Allocator:
    """Gives each step the memory of the step before, as torch's caching allocator does; in host memory."""

    def __init__(self) -> None:
        self._held: defaultdict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
        self._given: Counter[tuple[Any, ...]] = Counter()

    def begin_step(self) -> None:
        """Take all back."""
        self._given.clear()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of undefined content."""
        key = shape, dtype
        held, at = self._held[key], self._given[key]
        self._given[key] += 1
        if at == len(held):
            held.append(torch.empty(shape, dtype=dtype))
        return held[at]


class IdleHost:
    """Torch's part of an idle GPU."""

    def __init__(self, memory: Allocator) -> None:
        self._memory = memory

    def stream(self) -> int:
        """Return the address of a stream."""
        return 7

    def within(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def empty(self, size: int, dtype: DTypeLike) -> torch.Tensor:
        """Return a tensor of undefined content."""
        return self._memory.take((size,), TORCH_DTYPES[np.dtype(dtype)])

    def put(self, table: NDArray[Any]) -> torch.Tensor:
        """Return a copy."""
        return torch.from_numpy(table.reshape(-1).view(np.uint8)).clone()

    def read(self, array: torch.Tensor) -> NDArray[Any]:
        """Return a copy."""
        copied: NDArray[Any] = array.numpy().copy()
        return copied


class IdleDevice(CudaDevice):
    """A GPU whose driver does nothing; launches, and sorts of torch, are counted."""

    def __init__(self, memory: Allocator) -> None:
        self.counts: Counter[str] = Counter()
        self.num_sms, self._memory = 132, memory
        self._host: Any = IdleHost(memory)
        host = self._host
        self.empty, self.put, self.read, self.stream = host.empty, host.put, host.read, host.stream
        stream = SimpleNamespace(from_external=lambda pointer: pointer)
        self._cupy: Any = SimpleNamespace(cuda=SimpleNamespace(Stream=stream))
        self._tables, self._tables_lock = OrderedDict(), threading.Lock()
        self._streams: dict[int, Any] = {}

    def sort(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort, and count it."""
        self.counts["torch.sort"] += 1
        shape = tuple(keys.shape)
        ordered, order = self._memory.take(shape, torch.int32), self._memory.take(shape, torch.int64)
        torch.sort(keys, stable=True, out=(ordered, order))
        return ordered, order

    def describe(self, array: Any) -> View | None:
        """Return where a tensor lies."""
        return describe(array, "__array_interface__")

    def _function(self, kernel: str) -> Callable[..., None]:
        return lambda *_, **__: self.counts.update((kernel,))


class IdleRuntime:
    """The runtime of an idle GPU: tensors lie in host memory."""

    name, device = "idle GPU", torch.device("cpu")

    def __init__(self) -> None:
        self.memory = Allocator()
        self.kernels = IdleDevice(self.memory)
        self.prepare = self.pin = self.unpin = self.random_state = self.set_random_state = nullcontext
        self.stream = self.kernels.stream

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of undefined content."""
        return self.memory.take(tuple(shape), dtype)


def launches(*, bags: bool) -> tuple[dict[str, int], dict[str, float]]:
    """Return the launches of a step by kernel, and the median host microseconds of its lookup and its update.

    bags: features have two ids a sample, summed; else one id.
    """
    runtime: Any = IdleRuntime()
    backend = CudaBackend(runtime)
    tables = [
        Table(
            name=f"t{i}",
            dim=DIMS[i % len(DIMS)],
            optimizer=Adagrad(learning_rate=0.1),
            initializer=Uniform(low=-0.1, high=0.1),
        )
        for i in range(NUM_TABLES)
    ]
    groups = group_tables(tables)
    rows = [_rows_of(group) for group in groups]
    cols = np.concatenate([[0], np.cumsum([group.dim * len(group.tables) for group in groups])])
    firsts = [first + np.arange(len(group.tables)) * group.dim for first, group in zip(cols, groups, strict=False)]
    out = torch.zeros(NUM_SAMPLES, int(cols[-1]))
    gradient = torch.zeros(out.numel())
    ids = [_ids(mine, group, first, bags=bags) for mine, group, first in zip(rows, groups, firsts, strict=True)]

    def look_up() -> list[LookupIds]:
        found = [make() for make in ids]
        backend.pool(list(zip(rows, found, strict=True)), out)
        return found

    def step(found: list[LookupIds], number: int) -> None:
        due = [
            OptimizerStep(
                group, mine,
                [SavedGradient(
                    slots=e.slots, gradient=gradient, width=out.shape[1], cols=e.cols, places=e.places,
                    scales=e.scales, argmax=e.argmax.reshape(-1),
                )],
                0.01,
            )
            for group, mine, e in zip(groups, rows, found, strict=True)
        ]  # fmt: skip
        backend.step(due, number)

    spent: dict[str, list[float]] = {"lookup": [], "update": []}
    for number in range(1, _WARM + _TIMED + 1):
        runtime.kernels.counts.clear()
        runtime.memory.begin_step()
        begun = time.thread_time()
        found = look_up()
        between = time.thread_time()
        step(found, number)
        ended = time.thread_time()
        spent["lookup"].append(1e6 * (between - begun))
        spent["update"].append(1e6 * (ended - between))
    return dict(runtime.kernels.counts), {name: statistics.median(all_[_WARM:]) for name, all_ in spent.items()}


def _rows_of(group: Any) -> GroupRows:
    num_rows = ROWS * len(group.tables)
    fields = tuple(torch.empty((num_rows, f.words)) for f in group.fields)
    starts = np.arange(len(group.tables) + 1, dtype=np.int64) * ROWS
    return GroupRows.of(group, fields, torch.zeros(num_rows, dtype=torch.int32), starts)


def _ids(rows: GroupRows, group: Any, cols: NDArray[np.int64], *, bags: bool) -> Callable[[], LookupIds]:
    num_features, per_sample = len(group.tables), 2 if bags else 1
    count = num_features * NUM_SAMPLES * per_sample
    ids = torch.zeros(count, dtype=torch.int32)
    starts = np.arange(num_features + 1, dtype=np.int64) * (count // num_features)
    offsets = torch.arange(0, count + 1, 2) if bags else None
    modes, bases = np.zeros(num_features, np.int8), np.array(list(rows.first.values()), dtype=np.int64)
    return lambda: LookupIds(ids=ids, starts=starts, bases=bases, modes=modes, cols=cols, offsets=offsets)
