"""Training over the tiers against training in memory: python -m benchmarks.out_of_core [--quick] [--json FILE].

--device cuda [--dry] is another form, for a table of 40 GB: `out_of_core_gpu` says how it is run. Here is the CPU's.

The same model is trained on the same batches twice: with every row in memory, and with rows on the device, in host
memory and in a store on disk that is at least 10 times the device budget and 3 times the host budget. Compute has
one thread in both. The first epoch only fills the store, without the dense part; the epochs after it are measured, in
turns: some passes in memory, the same over the tiers (in every other turn first), and behind some turns the bare
disk. Both trainings go on where they were and rest in between, so a slow second of the machine meets both. Times of
some turns together are a repeat, and medians over repeats are reported; --quick has one. The store's pages are dropped
from the page cache after every pass.

demand = seconds that the bare disk takes for an epoch's reads and writes / seconds of the epoch in memory
throughput_ratio = tiered samples/s / in-memory samples/s
bound_ratio = max(in-memory seconds, bare disk's seconds) / tiered wall seconds
wait_fraction = (waits, those at the ends of turns too, + pack + unpack + commit) of the training thread / tiered
wall seconds
rest_fraction = what turns take at their ends, until nothing goes on beside the training / tiered wall seconds
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.machine import Elsewhere, Goal, console, environment, file_system, middle, report

if TYPE_CHECKING:
    from collections.abc import Sequence

    import tiercache as tc
    from benchmarks.disk_case import Size
    from benchmarks.disk_raw import Replay
    from benchmarks.window import Budgets, MemoryRun, TieredRun
    from tiercache.planning.pass_plan import PassPlan
    from tiercache.tiers.report import PassReport

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
    """Of its keys."""
    target: float | None
    """The demand that the dense part's width is chosen for; None: no dense part."""
    optimizer: str
    longer_turns: int = 1
    """Where passes are short turns have more of them, and more is measured."""


DEMANDS = (
    Demand(suffix="", target=0.05, optimizer="adagrad"),
    Demand(suffix="_mid", target=0.5, optimizer="adam", longer_turns=3),
    Demand(suffix="_high", target=None, optimizer="adam", longer_turns=3),
)


BARE_EPOCHS = 4
"""Measured on the bare disk: one behind each turn, or one behind each so many where there are more turns."""

KINDS = {"wait_": ("store", "durable", "room"), "": ("pack", "unpack", "commit")}
"""What keeps the training thread at a switch, by the prefix of its keys."""

NAMES = dict(zip(("low", "mid", "high"), DEMANDS, strict=True))


def measure(demand: Demand, size: Size, folder: Path) -> dict[str, Any]:
    """Run one demand and return its figures, without suffix."""
    from benchmarks.disk_case import Step, dataset
    from benchmarks.disk_raw import BareDisk, Replay
    from benchmarks.training_machines import CpuTraining
    from benchmarks.window import MemoryRun, TieredRun, open_store, plans_of
    from tiercache import InMemoryCache

    _say(f"{size.name}{demand.suffix}: data")
    size = replace(size, turn_passes=size.turn_passes * demand.longer_turns)
    passes = dataset(folder, size, demand.optimizer)
    budgets, keys = _budgets(passes)
    plans = plans_of(passes, folder, budgets, size.passes * size.epochs)
    warm = [plan for plan in plans if plan.epoch == 1]

    def replay(state_bytes: int) -> Replay:
        return Replay.of(warm, num_passes=size.passes, state_bytes=state_bytes)

    with (
        BareDisk(folder, replay(8 << 20).file_bytes) as disk,
        open_store(passes, folder / "store.tc") as store,
    ):
        width = 0
        if demand.target is not None:
            width = _width(passes, size, disk.seconds(replay(0)), demand.target)
        _say(f"dense width {width}: first epochs")
        machine, turns = CpuTraining(), dict[str, Any](epochs=size.epochs + 1, shuffle=True)
        cache = InMemoryCache(passes)
        memory = MemoryRun(cache, Step(cache, width, light=True, track=True), size.batch, machine, **turns)
        tiered = TieredRun(passes, store, budgets, partial(Step, width=width, light=True, track=True), size.batch,
                           machine, **turns)  # fmt: skip
        times = Times()
        try:
            for run in (memory, tiered):
                run.turn(size.passes)
                run.train.light = False  # type: ignore[attr-defined] # a Step
            work = replay(tiered.state_bytes)
            for turn in range(size.turns):
                _say(f"turn {turn + 1} of {size.turns}")
                both: list[tuple[list[float], MemoryRun | TieredRun]] = [(times.memory, memory), (times.tiered, tiered)]
                for seconds, training in both if turn % 2 == 0 else reversed(both):
                    seconds.append(training.turn(size.turn_passes) * size.passes / size.turn_passes)
                times.rests.append(tiered.rest_seconds)
                if turn * BARE_EPOCHS % size.turns < BARE_EPOCHS:
                    times.bare.append(disk.seconds(work))
            tiered.finish()
            figures = _figures(size, tiered, times, work) | _facts(passes, plans, memory, tiered, size)
        finally:
            memory.close()
            tiered.close()
    began = time.thread_time()
    passes.verify()
    figures |= {
        # an upper bound: training uses more processor time than one thread has, and reads less of the files
        "check_fraction": (time.thread_time() - began) / figures["tiered_seconds"],
        "dense_width": width,
        "device_budget_bytes": budgets.device,
        "host_budget_bytes": budgets.host,
        "table_bytes": keys * figures["row_bytes"],
        "table_rows": keys,
    }
    return figures


@dataclass(slots=True)
class Times:
    """Seconds of an epoch: in memory and over the tiers one for each turn."""

    memory: list[float] = field(default_factory=list)
    tiered: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    rests: list[float] = field(default_factory=list)
    """At the ends of turns over the tiers, until nothing goes on beside the training any more."""


def _trained(tiered: TieredRun, size: Size) -> list[PassReport]:
    """Return the reports of all passes that were trained."""
    return [r for r in tiered.cache.reports if r.epoch < size.epochs]


def _budgets(passes: tc.PassDataset) -> tuple[Budgets, int]:
    """Return a tenth of the table for the device and a third for the host, and the rows of the table."""
    import numpy as np

    from benchmarks.disk_case import TABLE
    from benchmarks.window import Budgets
    from tiercache.store.table import group_tables

    rows = np.unique(np.concatenate([p.keys(TABLE) for p in passes.passes])).size
    table_bytes = rows * group_tables(passes.tables)[0].row_bytes
    return Budgets(device=table_bytes // 10, host=table_bytes // 3), rows


def _width(passes: tc.PassDataset, size: Size, raw_seconds: float, target: float) -> int:
    """Return the width of the dense part with which an epoch in memory takes ``raw_seconds / target``."""
    from benchmarks.disk_case import DenseTimer, seconds_without_dense

    wanted = min(raw_seconds / target, size.epoch_seconds) / size.epoch_samples
    return DenseTimer(size).width(wanted - seconds_without_dense(passes, size))


def _figures(size: Size, tiered: TieredRun, times: Times, work: Replay) -> dict[str, Any]:
    """Return times and what follows from them."""
    from benchmarks.window import switch_seconds

    bare = middle(times.bare)
    pairs = list(zip(means(times.memory, size.repeats), means(times.tiered, size.repeats), strict=True))
    memory, wall = (middle(seconds) for seconds in zip(*pairs, strict=True))
    turns = [m / t for m, t in zip(times.memory, times.tiered, strict=True)]
    trained = _trained(tiered, size)
    reports, whole = [r for r in trained if r.epoch >= 1], sum(times.tiered) * size.turn_passes / size.passes
    first = len(trained) - len(reports)
    ending = trained[first - 1 : -1]  # a turn begins with the end of the pass before its first
    switches = switch_seconds(ending, reports)
    return {
        "throughput_ratio": middle(m / t for m, t in pairs),
        "throughput_ratio_least_turn": min(turns),
        "throughput_ratio_most_turn": max(turns),
        "in_memory_turns": " ".join(f"{seconds:.3f}" for seconds in times.memory),
        "tiered_turns": " ".join(f"{seconds:.3f}" for seconds in times.tiered),
        "bound_ratio": middle(max(m, bare) / t for m, t in pairs),
        "rest_fraction": sum(times.rests) / whole,
        "wait_fraction": (sum(times.rests) + sum(switches.values())) / whole,
        **{f"{prefix}{name}_fraction": switches[name] / whole for prefix, names in KINDS.items() for name in names},
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
        "bytes_read_per_useful_byte_device": tiered.bytes_read_by_device / max(1, tiered.bytes_useful),
        "store_file_bytes": tiered.file_bytes,
        "host_bytes_peak": tiered.cache.host_bytes_peak,
        "device_bytes": tiered.cache.device_bytes,
        "state_bytes": tiered.state_bytes,
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
    passes: tc.PassDataset, plans: Sequence[PassPlan], memory: MemoryRun, tiered: TieredRun, size: Size
) -> dict[str, Any]:
    """Return what does not depend on time: rows read, the fewest possible, the plan, the bits."""
    from benchmarks.disk_case import TABLE
    from benchmarks.disk_optimal import fewest_rows_read
    from benchmarks.window import same_rows

    row_bytes = plans[0].row_bytes_G[0]
    fewest = fewest_rows_read([p.keys(TABLE) for p in passes.passes], [plan.capacity for plan in plans], row_bytes)
    trained = _trained(tiered, size)
    reports = [r for r in trained if r.epoch >= 1]
    state, other = (run.train.net.state_dict() for run in (memory, tiered))  # type: ignore[attr-defined] # Steps
    read, optimal = sum(r.rows_read for r in reports), sum(fewest[len(plans) - len(reports) :])
    return {
        "row_bytes": row_bytes,
        "rows_read": read,
        "rows_read_optimal": optimal,
        "rows_read_over_optimal": read / optimal if optimal else 1.0 + read,
        "rows_needed": sum(r.rows for r in reports),
        "rows_kept": sum(r.rows_kept for r in reports),
        "rows_from_host": sum(r.rows_from_host for r in reports),
        "rows_written": sum(r.rows_written for r in reports),
        "planned_equals_measured": all(r.planned_equals_measured for r in trained),
        "bits_equal": same_rows(memory.cache, tiered.cache) and all(state[name].equal(other[name]) for name in other),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it from the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.out_of_core", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first demand on a small table, under 45 seconds")
    parser.add_argument("--tiny", action="store_true", help="as --quick, and so small that times mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; its datasets are used again")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: see benchmarks.out_of_core_gpu")
    parser.add_argument("--dry", action="store_true", help="cuda without a GPU: all of it, at the smallest size")
    parser.add_argument("--prepare", action="store_true", help="cuda: write data and store, and end")
    parser.add_argument("--demand", choices=tuple(NAMES), help="measure one; all where not given")
    options = parser.parse_args(given)
    if options.device == "cuda" and not options.dry and (options.quick or options.tiny):
        parser.error(
            "--quick and --tiny are of the CPU's form, and --device cuda has a table of 40 GB: try it with --dry, or "
            "write its data with --prepare and measure one --demand a call"
        )
    if options.device == "cuda" or options.dry:
        on_a_gpu(options, given)
        return

    if options.demand not in (None, "low") and (options.quick or options.tiny):
        parser.error(
            f"--demand {options.demand} is for the full size: --quick and --tiny measure the lowest demand only"
        )

    import torch

    from benchmarks.disk_case import FULL, QUICK, TINY

    torch.set_num_threads(1)
    size = TINY if options.tiny else QUICK if options.quick else FULL
    record = environment("benchmarks.out_of_core", given, ("torch", "numpy", "numba", "lmdb", "tiercache"))
    folder = Path(options.folder or tempfile.mkdtemp(prefix="out_of_core-", dir=Path.cwd()))
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    try:
        record |= {"size": size.name, "file_system": file_system(folder), "threads": torch.get_num_threads()}
        demands = (
            [DEMANDS[0]] if size is not FULL else [d for name, d in NAMES.items() if options.demand in (None, name)]
        )
        for demand in demands:
            figures = measure(demand, size, folder)
            record |= {f"{key}{demand.suffix}": value for key, value in figures.items()}
    finally:
        shutil.rmtree(folder if options.folder is None else folder / "store.tc", ignore_errors=True)
    record["benchmark_seconds"] = time.perf_counter() - begun
    console.print(_table(record, demands))
    report(record, [g for g in GOALS if g.key in record], title="what was promised", path=options.json)


def on_a_gpu(options: argparse.Namespace, given: Sequence[str]) -> None:
    """Run the form for a GPU, or its dry form."""
    from benchmarks.disk_case import GPU_DRY, GPU_FULL
    from benchmarks.out_of_core_gpu import DiskBenchmark
    from benchmarks.training_machines import open_training

    machine = open_training("cuda", dry=options.dry)
    packages = ("torch", "numpy", "numba", "tiercache", "cupy-cuda12x", "cupy-cuda13x")
    record = environment("benchmarks.out_of_core", given, packages)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="out_of_core-", dir=Path.cwd()))
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    try:
        benchmark = DiskBenchmark(GPU_DRY if options.dry else GPU_FULL, folder, machine)
        if options.dry:
            benchmark.dry(DEMANDS)
            console.print("The CUDA sources ran on the CPU, and no time means anything.")
        else:
            if options.prepare or (options.demand is None and not benchmark.found):
                benchmark.prepare()
            for name, demand in NAMES.items():
                if options.demand == name or (options.demand is None and not options.prepare):
                    benchmark.measure(demand)
        record |= {"size": benchmark.size.name, "file_system": file_system(folder)} | benchmark.found
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    record["benchmark_seconds"] = time.perf_counter() - begun
    keys = (
        "throughput_ratio",
        *(f"bound_ratio{d.suffix}" for d in DEMANDS),
        "wait_fraction",
        "planned_equals_measured",
    )
    goals = [goal for goal in GOALS if goal.key in keys]
    if "H200" not in machine.name:
        goals = [Elsewhere(key=goal.key, goal=goal.goal, least=goal.least, below=goal.below) for goal in goals]
    report(record, goals, title="what was promised, on one H200", path=options.json)


def _table(record: dict[str, Any], demands: Sequence[Demand]) -> Table:
    from tiercache.sizes import format_bytes

    table = Table(title=f"out of core, size {record['size']}, {record['file_system']}", title_justify="left")
    table.add_column("")
    for demand in demands:
        table.add_column(f"demand {record['demand' + demand.suffix]:.3f}", justify="right")
    for name in (
        "dense_width", "table_bytes", "device_budget_bytes", "host_budget_bytes", "in_memory_seconds", "tiered_seconds",
        "raw_seconds", "raw_bytes_per_second", "store_bytes_read", "store_bytes_written", "throughput_ratio",
        "bound_ratio", "rest_fraction", "wait_fraction", "wait_store_fraction", "wait_durable_fraction",
        "wait_room_fraction", "pack_fraction", "unpack_fraction", "commit_fraction", "rows_needed", "rows_kept",
        "rows_from_host", "rows_read", "rows_read_optimal", "bytes_read_per_useful_byte",
        "bytes_read_per_useful_byte_device", "planned_equals_measured", "bits_equal", "check_fraction",
    ):  # fmt: skip
        values = [record[name + demand.suffix] for demand in demands]
        if "bytes" in name and "per_useful" not in name:
            shown = [format_bytes(int(value)) for value in values]
        else:
            shown = [f"{v:,}" if isinstance(v, int) else "-" if v is None else f"{v:.4f}" for v in values]
        table.add_row(name, *shown)
    return table


def _say(what: str) -> None:
    console.print(f"[dim]{time.strftime('%H:%M:%S')} {what}[/dim]")


if __name__ == "__main__":
    main()
