"""The Merlin synthetic models: python -m benchmarks.synthetic_models --model tiny|small [--quick] [--json FILE].

Adagrad, batches of 65,536 samples, ids of a power law of 1.05. Every batch is drawn separately and ids are permuted, so
rows that are looked up together are scattered (published figures of these models cycle through 1 to 10 batches made in
advance, with ids sorted by their frequency). 12 sub-datasets of 8 batches. The tables are the model's; rows
exist only for keys in the data (`rows_held`).

Three runs of the same batches, in windows of 3 warm passes (see `window`):

* memory: every row on the device. ms_per_step, of fresh batches, everything included: ids checked and uploaded, lookup,
dense part, steps; on a GPU threads make the next two batches meanwhile. ms_batch is the time to make a batch
without prefetch, without its lookups; ms_per_step_kept is a step on two batches made in advance, repeatedly,
like published measurements.
* host: a device budget of one sub-dataset, all rows in host memory, a store in memory. throughput_ratio_host is
in-memory over tiered seconds.
* disk: the same device budget, a host budget of barely more than two sub-datasets, a store on disk. ms_per_step_disk,
wait_fraction_disk, bound_ratio_disk; bound_disk names the bound.

bound_ratio is the smaller of bound_ratio_host and bound_ratio_disk.

device_share: the device budget over the rows of all keys in the data, with their optimizer state; 0.21 for both
models. device_share_of_model: the same budget over all rows of the tables, including keys that do not occur.

--dry runs everything with the tests' shim, without a GPU; there and with --tiny rows and optimizer state of memory and
tiers are compared (bits_equal).
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import tiercache as tc
from benchmarks.budgets import Budgets, rows_held
from benchmarks.device import TrainingDevice, open_device
from benchmarks.machine import ON_DEVICE, Goal, benchmark, say
from benchmarks.synthetic_case import DRY, FULL, MODELS, QUICK, TINY, Data, Size, dataset, trainer_of
from benchmarks.training import CacheRun, TieredRun
from benchmarks.window import figures_of, open_store, same_rows, warm_window


class Benchmark:
    """One model at one size on one device."""

    def __init__(self, model: str, size: Size, folder: Path, device: TrainingDevice) -> None:
        self.model, self.size, self.folder, self.device = model, size, folder, device
        say(f"{model}, {size.name}: data")
        self.passes = dataset(folder, Data(model, size))
        self.window = warm_window(self.passes, size.window_passes)

    def _in_memory(self) -> CacheRun:
        cache = tc.InMemoryCache(self.passes, device=self.device.open())
        return CacheRun(cache, trainer_of(cache, self.model), self.size.batch, self.device)

    def facts(self) -> dict[str, Any]:
        """Return the facts that are known before the runs."""
        model, (rows, num_bytes) = MODELS[self.model], rows_held(self.passes)
        of_tables = sum(8 * table_rows * kind.width for _, kind, table_rows in Data(self.model, self.size).kinds())
        return {
            "num_tables": model.num_tables, "num_inputs": model.num_inputs, "lookups_per_sample": model.lookups,
            "model_bytes": 2 * model.weight_bytes, "rows_held": rows, "bytes_held": num_bytes,
            "device_budget_bytes": (budgets := Budgets.least(self.passes)).device,
            "device_share": budgets.device / num_bytes,
            "device_share_of_model": budgets.device / of_tables,
            "host_budget_bytes_disk": budgets.host,
            "batch": self.size.batch, "batches_per_pass": self.size.batches, "num_passes": self.size.passes,
        }  # fmt: skip

    def memory(self) -> dict[str, Any]:
        """Train with every row on the device."""
        run = self._in_memory()
        run.upto(self.window.start - 1, train=False)
        seconds, steps = run.seconds(self.window)
        made = run.batch_seconds(self.window)
        kept = run.kept_batch_seconds(steps)
        run.close()
        return {
            "ms_per_step": seconds / steps * 1e3,
            "ms_batch": made * 1e3,
            "ms_per_step_kept": kept * 1e3,
            "samples_per_second": steps * self.size.batch / seconds,
            "in_memory_seconds": seconds,
        }

    def tiered(self, part: str, memory_seconds: float) -> dict[str, Any]:
        """Train over the tiers, with the rows in host memory or on disk."""
        path = self.folder / "store.tc" if part == "disk" else None
        budgets = Budgets.least(self.passes) if part == "disk" else Budgets.in_host(self.passes)
        with open_store(self.passes, path) as store:
            train_of = partial(trainer_of, model=self.model)
            run = TieredRun(self.passes, store, budgets, train_of, self.size.batch, self.device)
            try:
                say(f"{part}: the first epoch, then {len(self.window)} warm passes")
                seconds, steps = run.seconds(self.window)
                found = figures_of(
                    self.device, run, self.window, memory=memory_seconds, tiered=seconds,
                    folder=self.folder if path else None,
                )  # fmt: skip
                if part == "disk" and self.size.name in ("tiny", "dry"):
                    found["bits_equal"] = self._same_bits(run.cache)
            finally:
                run.close()
        if path is not None:
            shutil.rmtree(path)
        found["ms_per_step"] = seconds / steps * 1e3
        return {f"{key}_{part}": value for key, value in found.items()}

    def _same_bits(self, tiers: tc.TierCache) -> bool:
        """Train all passes again in memory and compare."""
        run = self._in_memory()
        run.upto(self.window.stop)
        same = same_rows(run.cache, tiers)
        run.close()
        return same

    def run(self) -> dict[str, Any]:
        """Run all parts."""
        found = {"device": self.device.name} | self.facts() | self.memory()
        for part in ("host", "disk"):
            found |= self.tiered(part, found["in_memory_seconds"])
        return found | {"bound_ratio": min(found["bound_ratio_host"], found["bound_ratio_disk"])}


if __name__ == "__main__":
    quick = f"batches of {QUICK.batch:,} and one row in {QUICK.divisor} of each table"
    models: dict[str, Any] = {"choices": tuple(MODELS), "required": True}
    with benchmark("synthetic_models", __doc__, quick, (), model=models, **ON_DEVICE) as run:
        name, amount = run.options.model, DRY if run.options.dry else run.size(FULL, QUICK, TINY)
        used = open_device(run.options.device, dry=run.options.dry)
        run.is_judged = amount is FULL and "H200" in used.name
        run.goals = (
            Goal(key="ms_per_step", goal=MODELS[name].goal_ms, below=True),
            Goal(key="throughput_ratio_host", goal=0.97),
            Goal(key="bound_ratio_disk", goal=0.95),
        )
        run.record |= {"model": name} | Benchmark(name, amount, run.folder, used).run()
