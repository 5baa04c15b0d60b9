"""Launches and host microseconds of a step of 26 tables in five groups, where no GPU does any work.

`CudaBackend` looks up and steps rows as it does on a GPU. CuPy, the driver and torch's CUDA calls are stood in for by
calls that do nothing, so that the time is what Python takes to prepare and make the launches. Arrays are tiny: torch's
own calls, which are real and run on the CPU, then take about what they take to launch a kernel. Times are those of the
thread on its core, so that others on the machine do not count.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from benchmarks.machine import middle
from tiercache.backends.cuda import CudaBackend
from tiercache.backends.cuda_runtime import TORCH_DTYPES
from tiercache.backends.jagged import LookupIds, OptimizerStep, SavedGradient
from tiercache.kernels.cuda.device import CudaDevice
from tiercache.kernels.cuda.launch import describe
from tiercache.store.table import Adagrad, Table, Uniform, group_tables
from tiercache.tiers.rows import GroupRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import DTypeLike, NDArray

    from tiercache.kernels.arrays import View

DIMS = (8, 16, 32, 64, 128)
NUM_TABLES = 26
ROWS = 100_000
NUM_SAMPLES = 4
_WARM, _TIMED = 50, 400


class IdleGpu(CudaDevice):
    """A GPU whose driver does nothing, with torch's part of it and its runtime; launches and torch's sorts are counted.

    Its memory is the host's. Each step is given that of the step before, as torch's caching allocator does.
    """

    name, device, num_sms = "idle GPU", torch.device("cpu"), 132

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._given: Counter[tuple[Any, ...]] = Counter()
        self._arrays: defaultdict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
        self.kernels: Any = self
        self._host: Any = self
        self.within: Any = nullcontext
        self.prepare = self.pin = self.unpin = self.random_state = self.set_random_state = nullcontext  # type: ignore[assignment, method-assign]
        stream = SimpleNamespace(from_external=lambda pointer: pointer)
        self._cupy: Any = SimpleNamespace(cuda=SimpleNamespace(Stream=stream))
        self._tables, self._tables_lock = OrderedDict(), threading.Lock()
        self._streams: dict[int, Any] = {}

    def begin_step(self) -> None:
        """Take all memory back."""
        self.counts.clear()
        self._given.clear()

    def stream(self) -> int:
        """Return the address of a stream."""
        return 7

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of undefined content."""
        key = tuple(shape), dtype
        held, at = self._arrays[key], self._given[key]
        self._given[key] += 1
        if at == len(held):
            held.append(torch.empty(key[0], dtype=dtype))
        return held[at]

    def empty(self, size: int, dtype: DTypeLike) -> torch.Tensor:
        """Return a tensor of undefined content."""
        return self.tensor((size,), TORCH_DTYPES[np.dtype(dtype)])

    def put(self, table: NDArray[Any]) -> torch.Tensor:
        """Return a copy."""
        return torch.from_numpy(table.reshape(-1).view(np.uint8)).clone()

    def read(self, array: torch.Tensor) -> NDArray[Any]:
        """Return a copy."""
        copied: NDArray[Any] = array.numpy().copy()
        return copied

    def sort(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort, and count it."""
        self.counts["torch.sort"] += 1
        ordered, order = self.tensor(keys.shape, torch.int32), self.tensor(keys.shape, torch.int64)
        torch.sort(keys, stable=True, out=(ordered, order))
        return ordered, order

    def describe(self, array: Any) -> View | None:
        """Return where a tensor lies."""
        return describe(array, "__array_interface__")

    def _function(self, kernel: str) -> Callable[..., None]:
        return lambda *_, **__: self.counts.update((kernel,))


def launches(*, bags: bool) -> tuple[int, float]:
    """Return the launches of a step, and the median host microseconds of its lookup and its update.

    bags: features have two ids a sample, summed; else one id.
    """
    gpu = IdleGpu()
    backend = CudaBackend(cast("Any", gpu))
    adagrad, uniform = Adagrad(learning_rate=0.1), Uniform(low=-0.1, high=0.1)
    tables = [
        Table(name=f"t{i}", dim=DIMS[i % len(DIMS)], optimizer=adagrad, initializer=uniform) for i in range(NUM_TABLES)
    ]
    groups = group_tables(tables)
    rows = [_rows_of(group) for group in groups]
    cols = np.concatenate([[0], np.cumsum([group.dim * len(group.tables) for group in groups])])
    firsts = [first + np.arange(len(group.tables)) * group.dim for first, group in zip(cols, groups, strict=False)]
    out = torch.zeros(NUM_SAMPLES, int(cols[-1]))
    gradient = torch.zeros(out.numel())
    ids = [_ids(mine, group, first, bags=bags) for mine, group, first in zip(rows, groups, firsts, strict=True)]

    def saved(e: LookupIds) -> SavedGradient:
        return SavedGradient(
            slots=e.slots, gradient=gradient, width=out.shape[1], cols=e.cols, places=e.places, scales=e.scales,
            argmax=e.argmax.reshape(-1),
        )  # fmt: skip

    spent = []
    for number in range(1, _WARM + _TIMED + 1):
        gpu.begin_step()
        begun = time.thread_time()
        found = [make() for make in ids]
        backend.pool(list(zip(rows, found, strict=True)), out)
        parts = zip(groups, rows, found, strict=True)
        backend.step([OptimizerStep(group, mine, [saved(e)], 0.01, number) for group, mine, e in parts])
        spent.append(1e6 * (time.thread_time() - begun))
    return gpu.counts.total(), middle(spent[_WARM:])


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
