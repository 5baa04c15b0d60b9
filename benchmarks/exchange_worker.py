"""One rank of the exchange benchmark: python -m benchmarks.exchange_worker SHAPE TURNS WARM_UP.

The environment is torchrun's. Rank 0 writes what all ranks measured as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

import tiercache as tc
from benchmarks.zipf import Zipf
from tiercache.backends.jagged import OptimizerStep
from tiercache.backends.opening import open_backend
from tiercache.data.encoded_batch import FeatureIds
from tiercache.dist.communicator import communicator_of
from tiercache.ranks.asking import Asking, Wanted
from tiercache.ranks.exchange import RowExchange
from tiercache.ranks.owners import Owners, find_owners
from tiercache.store.hashing import mix
from tiercache.store.shards.sharding import ShardingPlan, TableSharding
from tiercache.store.table import group_tables
from tiercache.tiers.rows import GroupRows, RowView
from tiercache.training.batch import Batch
from tiercache.training.joining import FeaturePart
from tiercache.training.lookup import PooledLookup
from tiercache.training.row_gradients import RowGradients
from tiercache.training.row_optimizer import RowOptimizer
from tiercache.training.threads import share_threads

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.ranks.asking import Asked
    from tiercache.training.tracers import Mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Tables, each looked up by a feature with one id a sample, and a global batch."""

    name: str
    num_tables: int
    rows: int
    """Of each table in the pass."""
    num_samples: int
    """Of all ranks."""
    dim: int


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="26x100k", num_tables=26, rows=100_000, num_samples=16384, dim=64),
        Shape(name="26x20k", num_tables=26, rows=20_000, num_samples=16384, dim=64),
        Shape(name="4xtiny", num_tables=4, rows=2_000, num_samples=1024, dim=16),
    )
}
NUM_BATCHES = 4


class Rank:
    """One rank's rows and batches."""

    def __init__(self, ranks: AnyCommunicator, shape: Shape) -> None:
        self.ranks, self.shape = ranks, shape
        rate = tc.optim.SGD(learning_rate=0.01)
        self.tables = tuple(
            sorted(
                (
                    tc.Table(name=f"t{i}", dim=shape.dim, optimizer=rate, initializer=tc.init.Zeros())
                    for i in range(shape.num_tables)
                ),
                key=lambda table: table.table_id,
            )
        )
        self.groups = group_tables(self.tables)
        self.sharding = ShardingPlan(ranks.size, {table.name: TableSharding("row") for table in self.tables})
        keys = {table.name: _keys(table, shape.rows) for table in self.tables}
        self.owners: Owners = find_owners(self.sharding, 0, self.tables, [self.groups] * ranks.size, keys.__getitem__)
        owned = (self.owners.high_TW - self.owners.low_TW)[:, ranks.rank]
        order = [self.owners.index(table.name) for table in self.groups[0].tables]
        starts = np.concatenate([[0], np.cumsum(owned[order])]).astype(np.int64)
        vectors = np.random.default_rng(ranks.rank).random((int(starts[-1]), shape.dim), dtype=np.float32)
        slots = np.random.default_rng(1).permutation(int(starts[-1])).astype(np.int32)
        self.rows = [GroupRows.of(self.groups[0], (vectors,), slots, starts)]
        starts = np.arange(shape.num_tables + 1, dtype=np.int64) * shape.rows
        vectors = np.random.default_rng(ranks.rank).random((int(starts[-1]), shape.dim), dtype=np.float32)
        slots = np.random.default_rng(1).permutation(int(starts[-1])).astype(np.int32)
        self.all_rows = [GroupRows.of(self.groups[0], (vectors,), slots, starts)]
        self.backend = open_backend("cpu", self.tables)
        self.thread = ThreadPoolExecutor(1, initializer=share_threads)
        self.optimizer, self.handle = RowOptimizer(self.groups, self.backend), torch.nn.Parameter(torch.zeros(()))
        features = [tc.Feature(name=table.name, table=table.name) for table in self.tables]
        self.asking = Asking(ranks.clone(), self.groups, features, torch.float32)
        self.exchange = RowExchange(ranks, self.backend, self.groups, self.groups)
        self.layout = self.asking.lay_out(self.owners)
        self.exchange.open_pass(self.layout.stretches, self.rows)
        names = tuple(table.name for table in self.tables)
        zeros = np.zeros(len(names), dtype=np.int8)
        cols = np.arange(len(names), dtype=np.int64) * shape.dim
        self.part = FeaturePart(0, names, names, zeros, cols, bags=False)
        zipf = Zipf(shape.rows, seed=7)
        orders = {name: zipf.permutation().astype(np.int32) for name in names}
        mine = shape.num_samples // ranks.size
        for _ in range(ranks.rank):  # ranks draw from one stream, each its own part of it
            zipf.ranks(mine * len(names) * NUM_BATCHES)
        self.batches = [
            {name: FeatureIds(orders[name][zipf.ranks(mine)], None, None) for name in names} for _ in range(NUM_BATCHES)
        ]
        self.gradient = np.random.default_rng(2).random((mine, len(names) * shape.dim), dtype=np.float32)

    def least_bytes(self, batch: int) -> dict[str, int]:
        """Return the bytes that must leave all ranks for a batch, and without unique rows, counted from its ids."""
        once = each = 0
        for t, table in enumerate(self.tables):
            low, high = self.owners.low_TW[t, self.ranks.rank], self.owners.high_TW[t, self.ranks.rank]
            ids = self.batches[batch][table.name].ids
            remote = ids[(ids < low) | (ids >= high)]
            once, each = once + np.unique(remote).size, each + remote.size
        row_bytes = 4 + 2 * 4 * self.shape.dim  # an address there, a row back, a gradient there
        return {"once": once * row_bytes, "each": each * row_bytes}

    def ask(self, batch: int) -> Asked:
        """Ask the owners for the rows of a batch."""
        ids = self.batches[batch]
        return self.asking.ask(self.layout, Wanted(ids=ids, modes=dict.fromkeys(ids)), "a batch")

    @property
    def bytes_sent(self) -> int:
        """Bytes that left this rank."""
        return self.exchange.wire.bytes_sent + self.asking.wire.bytes_sent

    def train(self, asked: Asked, following: int) -> tuple[dict[str, float], Asked]:
        """Train a batch while the following one is asked for, as a training does.

        Returns the seconds of its exchange there, back, and of both together, and the following one.
        """
        seconds, gradients = {}, RowGradients(1)
        self.ranks.barrier()
        begun, busy = time.perf_counter(), time.process_time()
        asking = self.thread.submit(self.ask, following)
        rows, slots = self.exchange.answer(asked)
        seconds["there"] = time.perf_counter() - begun
        self._look_up(RowView(rows, gradients, "a pass", self.backend), asked.ids)
        pooled = time.perf_counter()
        gradients.settle(dict.fromkeys((mark.tracer for mark in gradients.marks), 1.0))
        self.exchange.gradients_of(asked, slots, gradients, self.optimizer.gradients)
        seconds["back"] = time.perf_counter() - pooled
        self.exchange.step(self.optimizer, self.rows)
        next_asked = asking.result()
        seconds["step"], seconds["step_cpu"] = time.perf_counter() - begun, time.process_time() - busy
        return seconds, next_asked

    def train_alone(self, batch: int) -> tuple[float, float]:
        """Train this rank's samples of a batch with the rows of all ranks here; return seconds, and those of CPU."""
        gradients = RowGradients(1)
        self.ranks.barrier()
        begun, busy = time.perf_counter(), time.process_time()
        self._look_up(RowView(self.all_rows, gradients, "a pass", self.backend), self.batches[batch])
        gradients.settle(dict.fromkeys((mark.tracer for mark in gradients.marks), 1.0))
        self.backend.step([OptimizerStep(self.groups[0], self.all_rows[0], gradients.pending[0], 0.01)], 1)
        return time.perf_counter() - begun, time.process_time() - busy

    def _look_up(self, rows: RowView, ids: dict[str, FeatureIds]) -> None:
        """Pool a batch, and leave the gradient of the output."""
        none = torch.empty(0)
        lookup = PooledLookup(self.part, Batch(none, none, ids, rows, self.gradient.shape[0]), {})
        self.backend.pool([(lookup.rows, lookup.entries)], self.backend.empty(self.gradient.shape, np.float32))
        lookup.backward(self.gradient, self._mark())

    def _mark(self) -> Mark:
        """Return what a backward leaves beside the gradient."""
        tracer = self.optimizer.tracers.of(self.handle, self.part.tables)
        assert tracer is not None
        return tracer.mark()

    def bare(self, asked: Asked, *, times: float = 1.0) -> tuple[float, float]:
        """Return seconds, and those of CPU, of three bare all-to-all of the same bytes, or ``times`` as many."""
        me, size = self.ranks.rank, self.ranks.size
        send = [0 if r == me else int(times * asked.request.counts_WS[r].sum()) for r in range(size)]
        receive = [int(n) for n in self.ranks.exchange_splits(np.array(send, dtype=np.int64)[:, None])[:, 0]]
        dim = self.shape.dim
        kinds = (
            (1, torch.int32, send, receive),
            (dim, torch.float32, receive, send),
            (dim, torch.float32, send, receive),
        )
        calls = []
        for width, dtype, there, back in kinds:
            sizes, sizes_back = [n * width for n in there], [n * width for n in back]
            full, into = torch.ones(sum(sizes), dtype=dtype), torch.ones(sum(sizes_back), dtype=dtype)
            calls.append((full, sizes, sizes_back, into))

        def run() -> None:
            for call in calls:
                self.ranks.all_to_all(*call)

        run()
        self.ranks.barrier()
        begun, busy = time.perf_counter(), time.process_time()
        run()
        return time.perf_counter() - begun, time.process_time() - busy


def _keys(table: tc.Table, count: int) -> NDArray[np.int64]:
    keys = np.arange(count, dtype=np.int64)
    hashes = mix(keys.view(np.uint64) ^ np.uint64(table.table_id))
    return np.ascontiguousarray(keys[np.argsort(hashes)])


def main() -> None:
    """Be one rank."""
    shape, turns, warm_up = SHAPES[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.distributed.init_process_group("gloo")
    ranks = communicator_of()
    rank = Rank(ranks, shape)
    times: dict[str, list[float]] = {}
    sent, least = 0, {"once": 0, "each": 0}
    following = rank.ask(0)
    for turn in range(warm_up + turns):
        batch, before, asked = turn % NUM_BATCHES, rank.bytes_sent, following
        seconds, following = rank.train(asked, (turn + 1) % NUM_BATCHES)
        counted = rank.least_bytes(batch)
        seconds["alone"], seconds["alone_cpu"] = rank.train_alone(batch)
        seconds["bare"], seconds["bare_cpu"] = rank.bare(asked)
        seconds["bare_each"], seconds["bare_each_cpu"] = rank.bare(
            asked, times=counted["each"] / max(1, counted["once"])
        )
        if turn >= warm_up:
            sent += rank.bytes_sent - before
            least = {name: least[name] + counted[name] for name in least}
            for name, value in seconds.items():
                times.setdefault(name, []).append(value)
    told = ranks.all_gather_object({"seconds": times, "sent": sent, **least})
    if ranks.rank == 0:
        print(json.dumps(told), flush=True)
    ranks.close()


if __name__ == "__main__":
    main()
