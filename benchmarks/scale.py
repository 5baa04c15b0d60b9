"""A store of ten times a memory limit, trained under it, killed and resumed: python -m benchmarks.scale [--quick].

A dataset is planned by `tiercache plan` with budgets below the limit. A child process trains it over the tiers, for two
epochs, under the limit. A second one does the same on another store and is killed by SIGKILL in the middle of a pass of
the second epoch. A third one resumes that store, under the same limit. Then both stores are compared,
every row bit by bit, and digests compare the dense parts. A smaller model of the same shape is trained in memory,
before and, in the full size, after. It needs somewhat more than twice the bytes of the rows on disk, all deleted.

The limit is RLIMIT_DATA: the kernel refuses a child all private memory beyond it, used or not. File pages do not count,
so the child drops the pages of the store and of the dataset from the page cache after each pass.

limit_bytes = the limit; rows, row_bytes, table_bytes = of the store; table_over_limit = table_bytes / limit_bytes
constant_bytes = memory under the limit in a child that trains a few rows, minus these: Python, torch, kernels
budgets_bytes = device_budget_bytes + host_budget_bytes of the plan
data_bytes = the peak memory under the limit in a child of the store; data_over_limit = it / limit_bytes
peak_bytes = the peak resident memory of these children without file pages; peak_over_limit = it / limit_bytes
peak_file_bytes = the peak of their mapped file pages
beyond_bytes = data_bytes - constant_bytes - budgets_bytes: above 0 if something grows outside the budgets
planned_equals_measured = rows and bytes of each pass of the first training, read and written, equal its plan
and the file that `tiercache plan` wrote
predicted_seconds, measured_seconds = of the second epoch's passes, by the plan and by the reports, and predicted_passes
and measured_passes of each one; `tiercache plan` measures the disk, and gets the samples/s of the training in memory
lookup_cost = the slowdown of the training by a process that opens the store and looks up 100 keys once a second: in
every other turn of 9 passes of the resumed training, seconds are compared; lookups, lookup_seconds = number, median
samples_per_s = of the second epoch over the tiers; throughput_ratio = it / in_memory_samples_per_s
rows_different = rows that are not the same bit by bit in both stores; bits_equal = none, and the dense parts are equal
"""

from __future__ import annotations

import math
import shutil
import signal
import statistics
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tiercache as tc
from benchmarks.budgets import device_need
from benchmarks.drawn_passes import permuted_power_law, schema_of, write_drawn
from benchmarks.machine import Goal, benchmark, files_below, in_child, of_process, python, say
from benchmarks.scale_worker import TURN, train
from tests.datasets import raw_batch
from tiercache.data.dataset import PassDataset
from tiercache.data.raw_batch import RawBatch
from tiercache.planning.plan_file import TrainingPlan
from tiercache.store.segment import Segment

TABLE, DIM = "items", 128
WATCHED = ("Resident", "RssFile", "VmData")


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The amount of training."""

    passes: int
    samples: int
    """Samples of each pass; each has one row that no other sample has, and one random row."""
    limit_bytes: int | None
    """Limit of the training process; None: its memory without rows plus a tenth of the rows."""
    memory_passes: int
    """Passes of the model that fits in memory."""
    batch: int = 4096
    width: int = 64
    """Width of the dense part."""
    epochs: int = 2

    @property
    def rows(self) -> int:
        return self.passes * self.samples


FULL = Size(passes=324, samples=65_000, limit_bytes=2 << 30, memory_passes=16)
QUICK = Size(passes=40, samples=2000, limit_bytes=None, memory_passes=4, batch=500)
TINY = replace(QUICK, passes=12, samples=500, batch=250)


SCHEMA = schema_of({TABLE: DIM}, tc.optim.Adagrad(learning_rate=0.05), {"walked": TABLE, "drawn": TABLE})


def walk(rows: int, samples: int, index: int) -> RawBatch:
    """Draw a pass. All passes visit all rows once by one feature, and draw as many by a power law for the other."""
    rng = np.random.default_rng((7, index))
    factor = int(0.382 * rows)
    while math.gcd(factor, rows) > 1:
        factor += 1
    walked = (np.arange(index * samples, (index + 1) * samples, dtype=np.int64) * factor) % rows
    keys = {"walked": walked, "drawn": permuted_power_law(rng, rows, samples)}
    return raw_batch(SCHEMA, keys, label=rng.integers(0, 2, samples))


def write_walk(folder: Path, size: Size) -> PassDataset:
    """Write the dataset of a size."""
    return write_drawn(folder, SCHEMA, size.passes, partial(walk, size.rows, size.samples))


class Child(NamedTuple):
    """The result of a child process."""

    found: dict[str, Any]
    """Its measurements; none if it was killed."""
    peaks: Mapping[str, int]
    """The peak of each kind of memory, in bytes; Resident: without file pages."""


def watched(work: Mapping[str, Any], ended: int = 0) -> Child:
    """Train in a child process and watch its memory. Raises RuntimeError if it does not end as expected."""
    peaks = dict.fromkeys(WATCHED, 0)

    def watch(process: int) -> None:
        seen = of_process("status", process)
        seen["Resident"] = seen.get("RssAnon", 0) + seen.get("RssShmem", 0)
        for name in peaks:
            peaks[name] = max(peaks[name], seen.get(name, 0))

    found = in_child(train, work, ended=ended, watch=watch)
    return Child(found or {}, peaks)


def compared(first: Path, second: Path) -> tuple[int, int]:
    """Return the rows of a store, and how many are in pages that differ in another store of the same training.

    Compared segment by segment, as passes wrote them, without sorting: the disk has no room for a copy of the rows.
    Raises RuntimeError for stores that do not have the same segments.
    """
    with tc.Store.open(first, mode="r") as one, tc.Store.open(second, mode="r") as other:
        mine, theirs = one.snapshot, other.snapshot
        pairs = list(zip(_by_pass(mine.segments), _by_pass(theirs.segments), strict=False))
        if len(mine.segments) != len(theirs.segments) or any(a.layouts != b.layouts for a, b in pairs):
            raise RuntimeError(f"{one.label} and {other.label} have not the same segments")
        different = 0
        for a, b in pairs:
            for group, layout in enumerate(a.layouts):
                rooms = np.zeros((2, layout.bytes_of_block(0)), np.uint8)
                for block in range(mine.first_block(a, group), layout.num_blocks):
                    low, high = layout.pages_of_block(block)
                    for store, segment, room in ((one, a, rooms[0]), (other, b, rooms[1])):
                        store.read(segment, group, low, high, room[: layout.bytes_of_block(block)])
                    keys = np.array_equal(one.reader.keys(a, group, block), other.reader.keys(b, group, block))
                    if not keys or not np.array_equal(rooms[0], rooms[1]):
                        different += layout.row_of_page(high) - layout.row_of_page(low)
        return one.live_rows(TABLE), different


def _by_pass(segments: Iterable[Segment]) -> list[Segment]:
    return sorted(segments, key=lambda segment: segment.pass_index)


GOALS = (
    Goal(key="table_over_limit", goal=10),
    Goal(key="data_over_limit", goal=1, below=True),
    Goal(key="peak_over_limit", goal=1, below=True),
    Goal(key="beyond_bytes", goal=0, below=True),
    Goal(key="planned_equals_measured", goal=1),
    Goal(key="bits_equal", goal=1),
    Goal(key="throughput_ratio", goal=0.95, least=0.8),
    Goal(key="lookup_cost", goal=0.03, below=True),
)
SMALL_GOALS = GOALS[1:3] + GOALS[4:-2]
"""The goals that few rows next to a large constant can show."""
MARGIN = 0.125
"""Share of the limit minus the constant that no budget gets: overhead of the allocator."""
LEAST = 24 << 20
"""Minimum of bytes that a limit of small sizes leaves after the constant, even if a tenth of their rows is less."""
EXACT = ("rows_read", "bytes_read", "rows_written", "bytes_written")


class Benchmark:
    """One size in a folder."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size, self.folder = size, folder
        self.limit = size.limit_bytes or 0
        self.plan = folder / "plan.toml"

    def run(self) -> dict[str, Any]:
        """Run all parts and return the figures."""
        _command("warmup")
        constant = self.constant()
        in_memory = [self.in_memory()]
        say(f"dataset of {self.size.rows:,} rows")
        dataset = write_walk(self.folder / "dataset", self.size)
        row_bytes = 8 * DIM
        self.limit = self.limit or constant + max(self.size.rows * row_bytes // 10, LEAST)
        device, host = self.make_plan(constant, in_memory[0])
        whole = self.train("whole.tc")
        store_bytes = sum(path.stat().st_blocks * 512 for path in files_below(self.folder / "whole.tc"))
        killed_in = self.size.passes + self.size.passes // 2
        killed = self.train("killed.tc", die_in_pass=killed_in)
        resumed = self.train("killed.tc", lookups=self.size.rows)
        different = self.different_rows()
        if self.size.limit_bytes:  # at small sizes it would take longer than the training
            in_memory.append(self.in_memory())
        dense_equal = whole.found["dense_digest"] == resumed.found["dense_digest"]
        peaks = [child.peaks for child in (whole, killed, resumed)]
        data, peak, of_files = (max(seen[name] for seen in peaks) for name in ("VmData", "Resident", "RssFile"))
        return {
            "rows": self.size.rows, "row_bytes": row_bytes, "table_bytes": self.size.rows * row_bytes,
            "passes": len(dataset), "epochs": self.size.epochs, "killed_in_pass": killed_in, "store_bytes": store_bytes,
            "limit_bytes": self.limit, "limit_by": "RLIMIT_DATA", "constant_bytes": constant,
            "device_budget_bytes": device, "host_budget_bytes": host, "budgets_bytes": device + host,
            "device_bytes": whole.found["device_bytes"], "host_bytes_peak": whole.found["host_bytes_peak"],
            "data_bytes": data, "peak_bytes": peak, "peak_file_bytes": of_files,
            "beyond_bytes": data - constant - device - host,
            "table_over_limit": self.size.rows * row_bytes / self.limit,
            "data_over_limit": data / self.limit, "peak_over_limit": peak / self.limit,
            **self.predicted(whole),
            "samples_per_s": whole.found["samples_per_second"],
            "in_memory_samples_per_s": sum(in_memory) / len(in_memory),
            "in_memory_samples_per_s_before": in_memory[0], "in_memory_samples_per_s_after": in_memory[-1],
            "throughput_ratio": len(in_memory) * whole.found["samples_per_second"] / sum(in_memory),
            **self.lookups(resumed),
            "rows_different": different,
            "dense_equal": dense_equal, "bits_equal": different == 0 and dense_equal,
        }  # fmt: skip

    def constant(self) -> int:
        """Train a few rows and return the private memory of the child, minus its budgets."""
        say("what a process takes without rows")
        few = Benchmark(replace(self.size, passes=4, samples=self.size.batch), self.folder / "few")
        write_walk(few.folder / "dataset", few.size)
        _command("plan", few.folder / "dataset", "-o", few.plan, "--optimize", "memory", "--quiet")
        child = watched(few.work("few.tc"))
        shutil.rmtree(few.folder)
        return child.peaks["VmData"] - int(child.found["device_bytes"] + child.found["host_bytes_peak"])

    def in_memory(self) -> float:
        """Train a few passes in memory and return samples per second of the second epoch."""
        say("a smaller model in memory")
        folder, size = self.folder / "small", replace(self.size, passes=self.size.memory_passes)
        write_walk(folder, size)
        child = watched({"dataset": str(folder), "batch": size.batch, "width": size.width, "epochs": size.epochs})
        shutil.rmtree(folder)
        return float(child.found["samples_per_second"])

    def make_plan(self, constant: int, samples_per_second: float) -> tuple[int, int]:
        """Plan with the rest of the limit, and return device and host budget."""
        device = device_need(PassDataset.open(self.folder / "dataset"))
        host = int((1 - MARGIN) * (self.limit - constant)) - device
        say(f"plan: device {device:,}, host at most {host:,} of {self.limit:,} bytes, of which {constant:,} are taken")
        _command(
            "plan", self.folder / "dataset", "--store", self.folder / "whole.tc", "-o", self.plan,
            "--measure", "--quiet", "--device-budget", device, "--host-budget", host,
            "--samples-per-second", f"{samples_per_second:.0f}",
        )  # fmt: skip
        budgets = TrainingPlan.from_toml(self.plan.read_text(), self.plan.name).budgets
        return budgets.device, budgets.host

    def work(self, store: str, **more: Any) -> dict[str, Any]:
        """Return the job of a child of a store."""
        return {
            "dataset": str(self.folder / "dataset"), "store": str(self.folder / store), "plan": str(self.plan),
            "batch": self.size.batch, "width": self.size.width, "epochs": self.size.epochs, **more,
        }  # fmt: skip

    def train(self, store: str, **more: Any) -> Child:
        """Train a store in a child under the limit, to its end or until it is killed."""
        is_killed = "die_in_pass" in more
        say(f"training of {store}" + (", to be killed" if is_killed else ""))
        return watched(self.work(store, limit=self.limit, **more), -signal.SIGKILL if is_killed else 0)

    def different_rows(self) -> int:
        """Return the number of different rows in both stores."""
        say("comparison of both stores")
        held, different = compared(self.folder / "whole.tc", self.folder / "killed.tc")
        if held != self.size.rows:
            raise RuntimeError(f"the store has {held:,} rows, not {self.size.rows:,}")
        return different

    @staticmethod
    def lookups(resumed: Child) -> dict[str, Any]:
        """Return the cost of another process's lookups: seconds of passes with lookups over passes without.

        None if the resumed training was too short to have both.
        """
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for one in resumed.found["reports"]:
            seconds[one["pass_index"] // TURN % 2 == 1].append(one["seconds"])
        both = all(seconds.values())
        cost = statistics.mean(seconds[True]) / statistics.mean(seconds[False]) - 1 if both else None
        return {"lookup_cost": cost} | {name: resumed.found[name] for name in ("lookups", "lookup_seconds")}

    def predicted(self, whole: Child) -> dict[str, Any]:
        """Return predicted and measured seconds of the second epoch, and True if rows and bytes are as planned."""
        reports = whole.found["reports"]
        planned = {one["index"]: one for one in tomllib.loads(self.plan.read_text())["passes"]}
        later = [r for r in reports if r["epoch"] == 1 and r["pass_index"] in planned]
        exact = all(
            r["planned_equals_measured"]
            and all(r[key] == planned[r["pass_index"]][key] for key in EXACT if r["pass_index"] in planned)
            for r in reports
        )
        seconds = [planned[r["pass_index"]]["seconds"] for r in later], [r["seconds"] for r in later]
        return {
            "planned_equals_measured": exact and len(planned) == len(reports),
            **{key: sum(r[key] for r in reports) for key in EXACT},
            **{f"{key}_predicted": sum(one[key] for one in planned.values()) for key in EXACT},
            "predicted_seconds": sum(seconds[0]),
            "measured_seconds": sum(seconds[1]),
            "seconds_over_predicted": sum(seconds[1]) / sum(seconds[0]),
            "predicted_passes": " ".join(f"{s:.3f}" for s in seconds[0]),
            "measured_passes": " ".join(f"{s:.3f}" for s in seconds[1]),
            "waited_seconds": sum(sum(r["wait_seconds"].values()) for r in later),
            "switched_seconds": sum(sum(r["work_seconds"].values()) for r in later),
        }


def _command(*words: object) -> None:
    done = subprocess.run(python("tiercache.cli", *words), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"tiercache {words[0]} ended with {done.returncode}: {done.stderr}{done.stdout}")


if __name__ == "__main__":
    with benchmark("scale", __doc__, "80 MB of rows", GOALS) as run:
        run.goals = run.size(GOALS, SMALL_GOALS, SMALL_GOALS)
        run.record |= Benchmark(run.size(FULL, QUICK, TINY), run.folder).run()
