"""The exchange of rows between ranks: python -m benchmarks.exchange [--quick] [--json FILE].

Two ranks on this machine, one thread each, over Gloo. Each has half of every table's rows, by their hashes, and half of
a batch's samples; ids follow a power law of 1.05. A turn is a step with exchanged rows, then, for comparison, a step of
the same samples with all rows on the rank, and a bare all-to-all of the bytes that the exchange moved, in the same
three calls (addresses, rows, gradients). Times are from the slower rank, and the median of all turns.

Keys, for each SHAPE, and without suffix for the least favorable one: wire_ratio_SHAPE is the bytes that left the ranks
over the minimum: for each unique row of another rank in a rank's batch, its address, the row and its gradient, counted
from the ids. time_ratio_SHAPE is the time that the exchange adds to a step (the exchanged step minus the one with all
rows on the rank: both gather rows and sum up gradients) over the bare all-to-all; cpu_ratio_SHAPE is the same in CPU
seconds of all threads of both ranks, which is reliable if other processes need the cores too.
time_ratio_of_calls_SHAPE is the total time of the two calls that exchange rows and gradients over the bare all-to-all:
it includes the summing of gradients, which the step on one rank also has. bytes_saved_by_unique_ids_SHAPE is the factor
by which the bytes would grow if every lookup traveled; time_saved_by_unique_ids_SHAPE is the time of a bare all-to-all
of those bytes over the time of the exchange's calls.

Each rank is a process of this module, called with --rank SHAPE TURNS WARM_UP by torchrun; rank 0 writes the
measurements of all ranks as one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

import tiercache as tc
from benchmarks.drawn_passes import hash_ordered, permuted_power_law
from benchmarks.embedding_contenders import Shape
from benchmarks.machine import Goal, Run, benchmark, middle, python
from tiercache.dist.communicator import AnyCommunicator, communicator_of
from tiercache.dist.exchange import RowExchange
from tiercache.dist.requests import ExchangedInput, InputDist, LocalInput
from tiercache.dist.shard_layout import Owners, find_owners
from tiercache.rows.backends.open_backend import open_backend
from tiercache.rows.backends.optimizer_step import OptimizerStep
from tiercache.rows.device import group_rows
from tiercache.rows.threads import share_threads
from tiercache.store.sharding import ShardingPlan, TableSharding
from tiercache.store.table import group_tables
from tiercache.train.arrivals import Arrival, State
from tiercache.train.row_gradients import RowGradients
from tiercache.train.row_optimizer import RowOptimizer
from tiercache.train.row_view import RowView
from tiercache.train.table_lookup import FeaturePart, TableLookup
from tiercache.values.batch import Batch
from tiercache.values.ids import FeatureIds
from tiercache.values.lookups import GroupRows

NUM_RANKS = 2
LIMIT_SECONDS = 300.0
GOALS = (
    Goal(key="wire_ratio", goal=1.05, below=True),
    Goal(key="time_ratio", goal=1.3, below=True),
)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="26x100k", num_tables=26, rows=100_000, num_samples=16384),
        Shape(name="26x20k", num_tables=26, rows=20_000, num_samples=16384),
        Shape(name="4xtiny", num_tables=4, num_features=4, rows=2_000, num_samples=1024, dim=16),
    )
}
"""Tables of a pass, and the samples of all ranks."""
NUM_BATCHES = 4


class Rank:
    """One rank's rows and batches."""

    def __init__(self, ranks: AnyCommunicator, shape: Shape) -> None:
        self.ranks, self.shape = ranks, shape
        rate = tc.optim.SGD(learning_rate=0.01)
        tables = [
            tc.Table(name=f"t{i}", dim=shape.dim, optimizer=rate, initializer=tc.init.Zeros())
            for i in range(shape.num_tables)
        ]
        self.tables = tuple(sorted(tables, key=lambda table: table.table_id))
        self.groups = group_tables(self.tables)
        self.sharding = ShardingPlan(ranks.size, {table.name: TableSharding("row_wise") for table in self.tables})
        keys = {table.name: hash_ordered(shape.rows, table.table_id) for table in self.tables}
        self.owners: Owners = find_owners(self.sharding, 0, self.tables, [self.groups] * ranks.size, keys.__getitem__)
        owned = (self.owners.high_TW - self.owners.low_TW)[:, ranks.rank]
        order = [self.owners.index(table.name) for table in self.groups[0].tables]
        starts = np.concatenate([[0], np.cumsum(owned[order])]).astype(np.int64)
        self.rows = self._rows(starts)
        self.all_rows = self._rows(np.arange(shape.num_tables + 1, dtype=np.int64) * shape.rows)
        self.backend = open_backend("cpu", self.tables)
        self.thread = ThreadPoolExecutor(1, initializer=share_threads)
        self.optimizer = RowOptimizer(self.groups, self.backend)
        features = [tc.Feature(name=table.name, table=table.name) for table in self.tables]
        self.input_dist = InputDist(ranks.clone(), self.groups, features, torch.float32)
        self.exchange = RowExchange(ranks, self.backend, self.groups, self.groups)
        self.layout = self.input_dist.lay_out(self.owners)
        self.exchange.open_pass(self.layout.shards, self.rows)
        names = tuple(table.name for table in self.tables)
        zeros = np.zeros(len(names), dtype=np.int8)
        cols = np.arange(len(names), dtype=np.int64) * shape.dim
        self.part = FeaturePart(0, names, names, zeros, cols, bags=False)
        rng, mine = np.random.default_rng((7, ranks.rank)), shape.num_samples // ranks.size
        self.batches = [
            {name: FeatureIds(permuted_power_law(rng, shape.rows, mine).astype(np.int32), None, None) for name in names}
            for _ in range(NUM_BATCHES)
        ]
        self.gradient = np.random.default_rng(2).random((mine, len(names) * shape.dim), dtype=np.float32)

    def _rows(self, starts: NDArray[np.int64]) -> list[GroupRows]:
        count = int(starts[-1])
        vectors = np.random.default_rng(self.ranks.rank).random((count, self.shape.dim), dtype=np.float32)
        slots = np.random.default_rng(1).permutation(count).astype(np.int32)
        return [group_rows(self.groups[0], (vectors,), slots, starts)]

    def least_bytes(self, batch: int) -> dict[str, int]:
        """Return the minimum of bytes that leave all ranks for a batch, with and without unique rows, counted from its
        ids.
        """
        once = each = 0
        for t, table in enumerate(self.tables):
            low, high = self.owners.low_TW[t, self.ranks.rank], self.owners.high_TW[t, self.ranks.rank]
            ids = self.batches[batch][table.name].ids
            remote = ids[(ids < low) | (ids >= high)]
            once, each = once + np.unique(remote).size, each + remote.size
        row_bytes = 4 + 2 * 4 * self.shape.dim  # an address sent, a row returned, a gradient sent
        return {"once": once * row_bytes, "each": each * row_bytes}

    def ask(self, batch: int) -> ExchangedInput:
        """Request the rows of a batch from their owners."""
        ids = self.batches[batch]
        return self.input_dist.exchange(self.layout, LocalInput(ids=ids, modes=dict.fromkeys(ids)), "a batch")

    @property
    def bytes_sent(self) -> int:
        return self.exchange.wire.bytes_sent + self.input_dist.wire.bytes_sent

    def train(self, exchanged: ExchangedInput, following: int) -> tuple[dict[str, float], ExchangedInput]:
        """Train a batch while the next one is requested, as in a training.

        Returns the seconds of the exchange of rows, of gradients, and of both together, and the next batch.
        """
        seconds, gradients = {}, RowGradients(1)
        self.ranks.barrier()
        begun, busy = time.perf_counter(), time.process_time()
        pending = self.thread.submit(self.ask, following)
        rows, slots = self.exchange.serve(exchanged)
        seconds["there"] = time.perf_counter() - begun
        self._look_up(RowView(rows, gradients, "a pass", self.backend), exchanged.ids)
        pooled = time.perf_counter()
        gradients.collect(self.backend.array)
        self.exchange.send_gradients(exchanged, slots, gradients.collected, self.optimizer.gradients.collected)
        seconds["back"] = time.perf_counter() - pooled
        self.exchange.step(self.optimizer.steps_of(self.rows), self.rows)
        self.optimizer.end_step()
        next_asked = pending.result()
        seconds["step"], seconds["step_cpu"] = time.perf_counter() - begun, time.process_time() - busy
        return seconds, next_asked

    def train_alone(self, batch: int) -> tuple[float, float]:
        """Train this rank's samples of a batch with local rows of all ranks; return seconds and CPU seconds."""
        gradients = RowGradients(1)
        self.ranks.barrier()
        begun, busy = time.perf_counter(), time.process_time()
        self._look_up(RowView(self.all_rows, gradients, "a pass", self.backend), self.batches[batch])
        gradients.collect(self.backend.array)
        group, collected = self.groups[0], gradients.collected[0]
        self.backend.step([OptimizerStep(group, group.optimizer, self.all_rows[0], collected, 0.01, 1)])
        return time.perf_counter() - begun, time.process_time() - busy

    def _look_up(self, rows: RowView, ids: dict[str, FeatureIds]) -> None:
        """Pool a batch, and set the gradient of the output."""
        none = torch.empty(0)
        lookup = TableLookup(self.part, Batch(none, none, ids, rows, self.gradient.shape[0]))
        out = self.backend.empty(self.gradient.shape, np.float32)
        (lookup.found,) = self.backend.pool([(lookup.rows, lookup.entries)], out)
        arrival = Arrival(cast("Any", None), [torch.from_numpy(self.gradient)], [()], 0)  # without a module
        lookup.defer(self.gradient.shape[1], arrival)
        arrival.state = State.STEPPING

    def bare(self, exchanged: ExchangedInput, *, times: float = 1.0) -> tuple[float, float]:
        """Return seconds and CPU seconds of three bare all-to-all of the same bytes, or ``times`` as many."""
        me, size = self.ranks.rank, self.ranks.size
        send = [0 if r == me else int(times * exchanged.request.counts_WS[r].sum()) for r in range(size)]
        receive = [int(n) for n in self.ranks.exchange_splits(np.array(send, dtype=np.int64)[:, None])[:, 0]]
        calls = []
        for width, dtype, there, back in (
            (1, torch.int32, send, receive),
            (self.shape.dim, torch.float32, receive, send),
            (self.shape.dim, torch.float32, send, receive),
        ):
            sizes, sizes_back = [n * width for n in there], [n * width for n in back]
            calls.append(
                (torch.ones(sum(sizes), dtype=dtype), sizes, sizes_back, torch.ones(sum(sizes_back), dtype=dtype))
            )

        def run() -> None:
            for call in calls:
                self.ranks.all_to_all(*call)

        run()
        self.ranks.barrier()
        begun, busy = time.perf_counter(), time.process_time()
        run()
        return time.perf_counter() - begun, time.process_time() - busy


def be_a_rank(shape: Shape, turns: int, warm_up: int) -> None:
    """Measure, and let rank 0 print the results of all ranks."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.distributed.init_process_group("gloo")
    ranks = communicator_of()
    rank = Rank(ranks, shape)
    times: dict[str, list[float]] = {}
    sent, least = 0, {"once": 0, "each": 0}
    following = rank.ask(0)
    for turn in range(warm_up + turns):
        batch, before, exchanged = turn % NUM_BATCHES, rank.bytes_sent, following
        seconds, following = rank.train(exchanged, (turn + 1) % NUM_BATCHES)
        counted = rank.least_bytes(batch)
        seconds["alone"], seconds["alone_cpu"] = rank.train_alone(batch)
        seconds["bare"], seconds["bare_cpu"] = rank.bare(exchanged)
        seconds["bare_each"], seconds["bare_each_cpu"] = rank.bare(
            exchanged, times=counted["each"] / max(1, counted["once"])
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


def measure(shape: str, turns: int, warm_up: int) -> list[dict[str, Any]]:
    """Run the ranks; return the results of each. Raises CalledProcessError if one of them failed."""
    ranks = ["--standalone", "--nproc-per-node", NUM_RANKS, "-m", "benchmarks.exchange", "--rank", shape]
    done = subprocess.run(
        python("torch.distributed.run", *ranks, turns, warm_up),
        stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[1], timeout=LIMIT_SECONDS, check=True,
    )  # fmt: skip
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def figures_of(shape: str, told: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the keys of one shape."""
    sent, once, each = (sum(one[name] for one in told) for name in ("sent", "once", "each"))
    seconds = [one["seconds"] for one in told]
    turns = {name: [max(pair) for pair in zip(*(one[name] for one in seconds), strict=True)] for name in seconds[0]}
    calls = [there + back for there, back in zip(turns["there"], turns["back"], strict=True)]
    added = [step - alone for step, alone in zip(turns["step"], turns["alone"], strict=True)]
    record = {f"ms_{name}_{shape}": middle(values) * 1e3 for name, values in turns.items()}
    bare = middle(turns["bare"])
    busy = {name: sum(middle(one[f"{name}_cpu"]) for one in seconds) for name in ("step", "alone", "bare")}
    return record | {
        f"wire_ratio_{shape}": sent / once,
        f"time_ratio_{shape}": middle(added) / bare,
        f"time_ratio_of_calls_{shape}": middle(calls) / bare,
        f"cpu_ratio_{shape}": (busy["step"] - busy["alone"]) / busy["bare"],
        f"bytes_sent_{shape}": sent / len(calls),
        f"bytes_saved_by_unique_ids_{shape}": each / sent,
        f"time_saved_by_unique_ids_{shape}": middle(turns["bare_each"]) / middle(calls),
    }


def measure_all(run: Run) -> None:
    """Add the figures of each shape, and of the least favorable one."""
    shapes = run.size(("26x100k", "26x20k"), ("26x20k",), ("4xtiny",))
    turns, warm_up = run.size((30, 5), (10, 3), (3, 1))
    for shape in shapes:
        run.record |= figures_of(shape, measure(shape, turns, warm_up))
    for worst, names in {
        max: ("wire_ratio", "time_ratio", "time_ratio_of_calls", "cpu_ratio"),
        min: ("bytes_saved_by_unique_ids", "time_saved_by_unique_ids"),
    }.items():
        run.record |= {name: worst(run.record[f"{name}_{shape}"] for shape in shapes) for name in names}
    run.record |= {"num_ranks": NUM_RANKS, "turns": turns}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_a_rank(SHAPES[sys.argv[2]], int(sys.argv[3]), int(sys.argv[4]))
    else:
        with benchmark("exchange", __doc__, "26 tables of 20k rows only", GOALS) as run:
            measure_all(run)
