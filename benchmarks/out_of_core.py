"""Training over the tiers compared with training in memory: python -m benchmarks.out_of_core [--quick] [--json FILE].

The same model is trained on the same batches twice: with every row in memory, and with rows on the device, in host
memory and in a store on disk that is at least 10 times the device budget and 3 times the host budget. Compute has
one thread in both. The first epoch only fills the store, without the dense part. Later epochs are measured in
turns: some passes in memory, the same over the tiers (in every other turn first), and after some turns the bare
disk. Both trainings resume where they stopped and pause in between, so a slow second of the machine affects both. Times
of some turns together are a repeat, and medians over repeats are reported; --quick has one. The store's pages are
dropped from the page cache after every pass.

demand = seconds that the bare disk takes for an epoch's reads and writes / seconds of the epoch in memory
throughput_ratio = tiered samples/s / in-memory samples/s
bound_ratio = max(in-memory seconds, bare disk's seconds) / tiered wall seconds
wait_fraction = (waits, including those at the ends of turns, + pack + unpack + commit) of the training thread / tiered
wall seconds
rest_fraction = time at the ends of turns until all background work is done / tiered wall seconds
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import tiercache as tc
from benchmarks import disk_case
from benchmarks import window as windows
from benchmarks.budgets import Budgets, rows_held
from benchmarks.device import CPU
from benchmarks.disk_raw import BareDisk, Replay
from benchmarks.machine import Goal, benchmark, middle, say
from benchmarks.training import CacheRun, TieredRun, in_turns
from tiercache import InMemoryCache
from tiercache.planning.pass_plan import PassPlan

NEVER = np.iinfo(np.int64).max


def fewest_rows_read(keys_P: Sequence[NDArray[np.int64]], capacity_V: Sequence[int], row_bytes: int) -> list[int]:
    """Return the minimum of rows read at each pass, starting at pass 0 with empty memory.

    Computed row by row, evicting the farthest next use first. It uses nothing from the planner except the bytes of
    cached rows that each pass grants, and the rules of the tiers: rows that two consecutive passes need stay on the
    device, a dump stays in memory until the load of the pass after next is done, and rows thinned out at pass v serve
    the loads of v + 1 and later.

    keys_P: the keys of each sub-dataset, any order; sub-datasets repeat in their order. capacity_V: bytes granted at
    each pass.
    """
    keys, numbers = np.unique(np.concatenate(keys_P), return_inverse=True)
    rows_P = np.split(numbers, np.cumsum([k.size for k in keys_P])[:-1])
    gaps_P = _next_gaps(rows_P, keys.size)
    last_use = np.full(keys.size, -NEVER, dtype=np.int64)
    next_use = np.full(keys.size, NEVER, dtype=np.int64)
    held = np.zeros(keys.size, dtype=bool)
    read = []
    for pass_index, capacity in enumerate(capacity_V):
        rows = rows_P[pass_index % len(rows_P)]
        before = last_use[rows]
        read.append(int(np.count_nonzero((before >= 0) & (before < pass_index - 2) & ~held[rows])))
        held[rows] = False
        last_use[rows], next_use[rows] = pass_index, pass_index + gaps_P[pass_index % len(rows_P)]
        held[last_use == pass_index - 2] = True
        rows, most = np.nonzero(held)[0], capacity // row_bytes
        if rows.size > most:  # keep those that are needed soonest
            held[rows[np.argsort(next_use[rows], kind="stable")[most:]]] = False
    return read


def _next_gaps(rows_P: Sequence[NDArray[np.int64]], num_rows: int) -> list[NDArray[np.int64]]:
    """Return, for each row of each sub-dataset, the number of passes until it is needed again."""
    coming = np.full(num_rows, NEVER, dtype=np.int64)
    distances: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(rows_P)
    for pass_index in reversed(range(2 * len(rows_P))):
        rows = rows_P[pass_index % len(rows_P)]
        if pass_index < len(rows_P):
            distances[pass_index] = coming[rows] - pass_index
        coming[rows] = pass_index
    return distances


GOALS = (
    Goal(key="throughput_ratio", goal=0.97, least=0.93),
    Goal(key="bound_ratio", goal=0.95, least=0.9),
    Goal(key="bound_ratio_mid", goal=0.95, least=0.75),
    Goal(key="bound_ratio_high", goal=0.95, least=0.75),
    Goal(key="wait_fraction", goal=0.03, below=True),
    Goal(key="rows_read_over_optimal", goal=1.01, below=True),
    Goal(key="bytes_read_per_useful_byte", goal=1.05, below=True),
    Goal(key="check_fraction", goal=0.01, below=True),
    Goal(key="planned_equals_measured", goal=1),
    Goal(key="bits_equal", goal=1),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """One load on the disk."""

    suffix: str
    """Suffix of its keys."""
    target: float | None
    """The demand that determines the dense part's width; None: no dense part."""
    optimizer: str
    longer_turns: int = 1
    """Factor of the number of turns if passes are short, to measure longer."""


DEMANDS = {
    "low": Demand(suffix="", target=0.05, optimizer="adagrad"),
    "mid": Demand(suffix="_mid", target=0.5, optimizer="adam", longer_turns=3),
    "high": Demand(suffix="_high", target=None, optimizer="adam", longer_turns=3),
}

BARE_EPOCHS = 4
"""Epochs measured on the bare disk: one after each turn, or after every few turns if there are more."""


def measure(demand: Demand, size: disk_case.Size, folder: Path) -> dict[str, Any]:
    """Measure one demand and return its figures, without suffix."""
    say(f"{size.name}{demand.suffix}: data")
    size = replace(size, turn_passes=size.turn_passes * demand.longer_turns)
    passes = disk_case.dataset(folder, size, demand.optimizer)
    rows, num_bytes = rows_held(passes)
    budgets = Budgets(device=num_bytes // 10, host=num_bytes // 3)
    path = folder / "store.tc"
    with tc.TierCache(path, passes, device_budget=budgets.device, host_budget=budgets.host) as unused:
        plans = unused.plan(passes=size.passes * size.epochs)
    replay = partial(Replay.of, [plan for plan in plans if plan.epoch == 1], num_passes=size.passes)
    with BareDisk(folder, replay(state_bytes=8 << 20).file_bytes) as disk, windows.open_store(passes, path) as store:
        width, work = 0, replay(state_bytes=0)
        if demand.target is not None:
            # choose the width so that an epoch in memory takes the disk's seconds over the demand
            wanted = min(disk.seconds(work.reads, work.commits) / demand.target, size.epoch_seconds)
            sample_seconds = wanted / size.epoch_samples - _seconds_without_dense(passes, size)
            width = disk_case.dense_width(size, sample_seconds)
        say(f"dense width {width}: first epochs")
        device, step_of = CPU, partial(disk_case.trainer_of, width=width, light=True)
        cache = InMemoryCache(passes)
        memory = CacheRun(cache, step_of(cache), size.batch, device, shuffle=True)
        tiered = TieredRun(passes, store, budgets, step_of, size.batch, device, shuffle=True)
        seconds: dict[str, list[float]] = {"bare": [], "rests": []}
        try:
            for run in (memory, tiered):
                run.turn(size.passes)
                run.train.net.light = False  # type: ignore[attr-defined] # a Trainer
            state_bytes = store.commit.state_bytes if store.commit else 0
            work = replay(state_bytes=state_bytes)

            def after(turn: int) -> None:
                say(f"turn {turn + 1} of {size.turns}")
                seconds["rests"].append(tiered.rest_seconds)
                if turn * BARE_EPOCHS % size.turns < BARE_EPOCHS:
                    seconds["bare"].append(disk.seconds(work.reads, work.commits))

            turns = in_turns(size.turns, size.turn_passes, memory, tiered, after)
            seconds |= {name: [s * size.passes / size.turn_passes for s in taken] for name, taken in turns.items()}
            tiered.current  # noqa: B018 - the switch after the last turn
            tiered.rest()
            files = {"store_file_bytes": (path / "blocks.bin").stat().st_size, "state_bytes": state_bytes}
            figures = _figures(size, tiered, seconds, work) | files | _facts(passes, plans, memory, tiered, size)
        finally:
            memory.close()
            tiered.close()
    shutil.rmtree(path)
    began = time.thread_time()
    passes.verify()
    return figures | {
        # an upper bound: training uses more processor time than one thread has, and reads less of the files
        "check_fraction": (time.thread_time() - began) / figures["tiered_seconds"],
        "dense_width": width,
        "device_budget_bytes": budgets.device,
        "host_budget_bytes": budgets.host,
        "table_bytes": num_bytes,
        "table_rows": rows,
    }


def _seconds_without_dense(passes: tc.PassDataset, size: disk_case.Size) -> float:
    """Return the seconds of one sample in memory without a dense part."""
    cache = InMemoryCache(passes)
    run = CacheRun(cache, disk_case.trainer_of(cache, 0), size.batch, CPU, shuffle=True)
    run.turn(1)
    seconds = run.turn(3) / (3 * size.samples)
    run.close()
    return seconds


def _figures(size: disk_case.Size, tiered: TieredRun, seconds: dict[str, list[float]], work: Replay) -> dict[str, Any]:
    """Return times and derived figures; seconds are per epoch, of rests per turn end."""
    bare, rests = middle(seconds["bare"]), sum(seconds["rests"])
    pairs = list(zip(means(seconds["memory"], size.repeats), means(seconds["tiered"], size.repeats), strict=True))
    memory, wall = (middle(values) for values in zip(*pairs, strict=True))
    trained = [r for r in tiered.cache.reports if r.epoch < size.epochs]
    reports, whole = [r for r in trained if r.epoch >= 1], sum(seconds["tiered"]) * size.turn_passes / size.passes
    first = len(trained) - len(reports)
    switches = windows.switch_seconds(
        trained[first - 1 : -1], reports
    )  # a turn begins with the end of the previous pass
    return {
        "throughput_ratio": middle(m / t for m, t in pairs),
        "in_memory_turns": " ".join(f"{value:.3f}" for value in seconds["memory"]),
        "tiered_turns": " ".join(f"{value:.3f}" for value in seconds["tiered"]),
        "bound_ratio": middle(max(m, bare) / t for m, t in pairs),
        "rest_fraction": rests / whole,
        "wait_fraction": (rests + sum(switches.values())) / whole,
        **{f"wait_{name}_fraction": switches[name] / whole for name in ("store", "durable", "room")},
        **{f"{name}_fraction": switches[name] / whole for name in ("pack", "unpack", "commit")},
        "demand": bare / memory,
        "in_memory_seconds": memory,
        "tiered_seconds": wall,
        "in_memory_samples_per_second": size.epoch_samples / memory,
        "tiered_samples_per_second": size.epoch_samples / wall,
        "raw_seconds": bare,
        "raw_bytes_per_second": (work.bytes_read + work.bytes_written) / bare,
        "store_bytes": work.bytes_read + work.bytes_written,
        "store_bytes_read": work.bytes_read,
        "store_bytes_written": work.bytes_written,
        "store_commits": len(work.commits),
        "bytes_read_per_useful_byte": tiered.bytes_read / max(1, tiered.bytes_useful),
        "host_bytes_peak": tiered.cache.host_bytes_peak,
        "device_bytes": tiered.cache.device_bytes,
        "samples_per_epoch": size.epoch_samples,
        "passes_per_epoch": size.passes,
        "turns": size.turns,
        "repeats": size.repeats,
        "epochs_measured": size.epochs - 1,
    }


def means(seconds: Sequence[float], repeats: int) -> list[float]:
    """Return the mean over the turns of each repeat."""
    size = len(seconds) // repeats
    return [sum(seconds[i : i + size]) / size for i in range(0, size * repeats, size)]


def _facts(
    passes: tc.PassDataset,
    plans: Sequence[PassPlan],
    memory: CacheRun,
    tiered: TieredRun,
    size: disk_case.Size,
) -> dict[str, Any]:
    """Return the facts that do not depend on time: rows read, the minimum, the plan, the bits."""
    row_bytes = plans[0].row_bytes_G[0]
    fewest = fewest_rows_read(
        [p.keys(disk_case.TABLE) for p in passes.passes], [plan.capacity for plan in plans], row_bytes
    )
    trained = [r for r in tiered.cache.reports if r.epoch < size.epochs]
    reports = [r for r in trained if r.epoch >= 1]
    state, other = (run.train.net.state_dict() for run in (memory, tiered))  # type: ignore[attr-defined] # Trainers
    counts, optimal = windows.row_counts(reports), sum(fewest[len(plans) - len(reports) :])
    read = counts["rows_read"]
    return {
        "row_bytes": row_bytes,
        **counts,
        "rows_read_optimal": optimal,
        "rows_read_over_optimal": read / optimal if optimal else 1.0 + read,
        "rows_written": sum(r.rows_written for r in reports),
        "planned_equals_measured": all(r.planned_equals_measured for r in trained),
        "bits_equal": windows.same_rows(memory.cache, tiered.cache)
        and all(state[name].equal(other[name]) for name in other),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    only: dict[str, Any] = {"choices": tuple(DEMANDS), "help": "measure one; default: all, or the first of few"}
    with benchmark("out_of_core", __doc__, "the first demand on a small table", (), demand=only) as run:
        amount = run.size(disk_case.FULL, disk_case.QUICK, disk_case.TINY)
        demands = [demand for name, demand in DEMANDS.items() if run.options.demand in (None, name)]
        for demand in demands if amount is disk_case.FULL else demands[:1]:
            figures = measure(demand, amount, run.folder)
            run.record |= {f"{key}{demand.suffix}": value for key, value in figures.items()}
        run.record["threads"] = torch.get_num_threads()
        run.goals = [goal for goal in GOALS if goal.key in run.record]
