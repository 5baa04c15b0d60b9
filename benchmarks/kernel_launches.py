"""Launches and host microseconds of a step of 26 tables in five groups, without GPU work.

`CudaBackend` looks up and steps rows as on a GPU, over an `IdleGpu`. Arrays are tiny: torch's own calls, which
are real and run on the CPU, then take about as long as a kernel launch. Times are CPU times of the thread, so other
processes do not count.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.idle_gpu import idle_backend
from benchmarks.machine import middle
from tiercache.kernels.arrays import NONE_F4
from tiercache.rows.backends.optimizer_step import OptimizerStep
from tiercache.rows.device import group_rows
from tiercache.store.table import Adagrad, Table, Uniform, group_tables
from tiercache.values.lookups import LookedUp, LookupIds, SavedGradient

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tiercache.values.lookups import GroupRows

DIMS = (8, 16, 32, 64, 128)
NUM_TABLES = 26
ROWS = 100_000
NUM_SAMPLES = 4
_WARM, _TIMED = 50, 400


def launches(*, bags: bool) -> tuple[int, float]:
    """Return the launches of a step, and the median host microseconds of its lookup and its update.

    bags: features have two summed ids per sample; otherwise one id.
    """
    backend, gpu = idle_backend()
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

    def saved(e: LookupIds, one: LookedUp) -> SavedGradient:
        return SavedGradient(
            slots=one.slots, gradient=gradient, width=out.shape[1], cols=e.cols, places=one.places,
            scales=one.scales, argmax=one.argmax.reshape(-1),
        )  # fmt: skip

    spent = []
    for number in range(1, _WARM + _TIMED + 1):
        gpu.counts.clear()
        begun = time.thread_time()
        asked = [make() for make in ids]
        found = backend.pool(list(zip(rows, asked, strict=True)), out)
        parts = zip(groups, rows, asked, found, strict=True)
        backend.step([
            OptimizerStep(group, group.optimizer, mine, [saved(e, one)], 0.01, number) for group, mine, e, one in parts
        ])  # fmt: skip
        spent.append(1e6 * (time.thread_time() - begun))
    return sum(n for kind, n in gpu.counts.items() if kind.startswith(("launch", "sort"))), middle(spent[_WARM:])


def _rows_of(group: Any) -> GroupRows:
    num_rows = ROWS * len(group.tables)
    fields = tuple(torch.empty((num_rows, f.words)) for f in group.fields)
    starts = np.arange(len(group.tables) + 1, dtype=np.int64) * ROWS
    return group_rows(group, fields, torch.zeros(num_rows, dtype=torch.int32), starts)


def _ids(rows: GroupRows, group: Any, cols: NDArray[np.int64], *, bags: bool) -> Callable[[], LookupIds]:
    num_features, per_sample = len(group.tables), 2 if bags else 1
    count = num_features * NUM_SAMPLES * per_sample
    ids = torch.zeros(count, dtype=torch.int32)
    starts = np.arange(num_features + 1, dtype=np.int64) * (count // num_features)
    offsets = torch.arange(0, count + 1, 2) if bags else None
    modes, bases = np.zeros(num_features, np.int8), np.array(list(rows.first.values()), dtype=np.int64)
    return lambda: LookupIds(
        ids=ids, starts=starts, bases=bases, modes=modes, cols=cols, offsets=offsets, weights=NONE_F4
    )
