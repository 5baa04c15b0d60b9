"""The out-of-core benchmark on a GPU: windows of warm passes of a table of 40 GB, on a machine that is available per
call.

One table of dim 128 with Adagrad (1,024 bytes a row), 8 features of one id, ids drawn from 400 million by a power law
of 1.05: 41 million rows in 20 sub-datasets of 1.9 million samples. The device holds 4 GB, the host 8 GB, the disk the
rest.

--prepare writes the data and trains the first epoch, without the dense part: minutes. Then --demand low, mid and high
each measure a window of 3 warm passes, in memory (all rows fit on the GPU) and over the tiers, in separate calls:
the store stays in --folder and resumes from its last commit; results also stay there. The dense part of low and
mid is as wide as makes the disk's demand 0.05 and 0.5, but training in memory takes at most 120 s; high has none. Dense
weights are not tracked, because they differ between demands. rows_read_over_optimal is computed in the CPU form. Bits
are compared in the dry form, which runs everything at once with the tests' shim. `window` describes the figures.
"""

from __future__ import annotations

import gc
import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import tiercache as tc
from benchmarks import window as windows
from benchmarks.disk_case import DenseTimer, Size, Step, dataset
from benchmarks.machine import console, say

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.out_of_core import Demand
    from benchmarks.window import TrainingMachine


class DiskBenchmark:
    """The three demands on one store."""

    def __init__(self, size: Size, folder: Path, machine: TrainingMachine) -> None:
        self.size, self.folder, self.machine = size, folder, machine
        say(f"{size.name}: data")
        self.passes = dataset(folder, size, "adagrad")
        host = size.host_bytes or windows.Budgets.least(self.passes).host
        self.budgets = windows.Budgets(device=size.device_bytes or windows.device_need(self.passes), host=host)
        self._kept = folder / f"figures-{size.name}-{machine.name}.json"

    @property
    def found(self) -> dict[str, Any]:
        """The results of earlier calls in this folder."""
        return json.loads(self._kept.read_text()) if self._kept.exists() else {}

    def prepare(self) -> None:
        """Train the first epoch without the dense part, on a fresh store."""
        rows, num_bytes = windows.rows_held(self.passes)
        with windows.open_store(self.passes, self.folder / "store.tc") as store:
            run = self._tiers(store, 0, light=True)
            say(f"{rows:,} rows of {num_bytes:,} bytes in all: the first epoch")
            begun = time.perf_counter()
            run.upto(self.size.passes)
            run.close()
        self._keep({
            "device": self.machine.name, "table_rows": rows, "table_bytes": num_bytes, "row_bytes": num_bytes // rows,
            "device_budget_bytes": self.budgets.device, "host_budget_bytes": self.budgets.host,
            "fill_seconds": time.perf_counter() - begun, "samples_per_visit": self.size.samples,
            "passes_per_epoch": self.size.passes,
        })  # fmt: skip

    def measure(self, demand: Demand, *, memory: windows.MemoryRun | None = None) -> dict[str, Any]:
        """Measure one demand from the store's last commit; ``memory`` trained all passes and is compared at the end.

        Raises SystemExit if no store was prepared.
        """
        path = self.folder / "store.tc"
        if not path.exists():
            raise SystemExit(f"{path} does not exist: run --prepare with the same --folder first.")
        with windows.open_store(self.passes, path, fresh=False) as store:
            assert store.commit is not None
            window = windows.Window(
                first=store.commit.cursor.pass_index + windows.WARM_UP, passes=self.size.window_passes
            )
            width = self._width(store, demand, window)
            say(f"passes {window.first} to {window.first + window.passes - 1}, dense width {width}: in memory")
            in_memory = self._in_memory(width, demand, window, memory)
            say("over the tiers")
            run = self._tiers(store, width, light=True)
            try:
                run.upto(window.first)
                run.train = Step(run.cache, width, light=demand.target is None)
                tiered, _ = run.seconds(window)
                found = windows.figures_of(
                    self.machine, run, window, memory=in_memory, tiered=tiered, folder=self.folder
                )
                if memory is not None:
                    found["bits_equal"] = windows.same_rows(memory.cache, run.cache)
            finally:
                run.close()
        samples = self.size.samples * window.passes
        found |= {
            "dense_width": width, "store_file_bytes": sum(f.stat().st_size for f in path.iterdir() if f.is_file()),
            "in_memory_samples_per_second": samples / in_memory, "tiered_samples_per_second": samples / tiered,
        }  # fmt: skip
        return self._keep({f"{key}{demand.suffix}": value for key, value in found.items()})

    def run(self, demands: Sequence[Demand], *, prepare: bool) -> dict[str, Any]:
        """Run the requested parts, and return the results of all calls in this folder.

        Without a GPU one training in memory runs along all demands and is compared.
        """
        memory = None
        if self.machine.name == "shim":
            self.prepare()
            cache = tc.InMemoryCache(self.passes, device=self.machine.device())
            memory = windows.MemoryRun(cache, Step(cache, 0, light=True), self.size.batch, self.machine)
            memory.upto(self.size.passes)
        elif prepare and not (demands and self.found):
            self.prepare()
        for demand in demands:
            self.measure(demand, memory=memory)
        if memory is not None:
            memory.close()
            console.print("The CUDA sources ran on the CPU, and no time means anything.")
        return self.found

    def _in_memory(self, width: int, demand: Demand, window: windows.Window, memory: windows.MemoryRun | None) -> float:
        """Return the seconds of a window after an uncounted pass, or of a continuing training."""
        if memory is not None:
            memory.train = Step(memory.cache, width, light=True)
            memory.upto(window.first)
            memory.train = Step(memory.cache, width, light=demand.target is None)
            return memory.seconds(window)[0]
        cache = tc.InMemoryCache(self.passes, device=self.machine.device())
        run = windows.MemoryRun(cache, Step(cache, width, light=demand.target is None), self.size.batch, self.machine)
        run.upto(window.first - 1, train=False)
        seconds, _ = run.seconds(window)
        run.close()
        del run, cache
        gc.collect()
        torch.cuda.empty_cache()
        return seconds

    def _tiers(self, store: tc.Store, width: int, *, light: bool) -> windows.TieredRun:
        step_of = partial(Step, width=width, light=light)
        return windows.TieredRun(self.passes, store, self.budgets, step_of, self.size.batch, self.machine)

    def _width(self, store: tc.Store, demand: Demand, window: windows.Window) -> int:
        """Return the width of the dense part with which a window in memory takes the disk's seconds / the demand."""
        if demand.target is None or not self.machine.is_gpu:
            return 0 if demand.target is None else 4
        with tc.TierCache(
            store, self.passes, device="cuda", device_budget=self.budgets.device, host_budget=self.budgets.host,
            progress=False,
        ) as cache:  # fmt: skip
            plans = cache.plan(passes=windows.WARM_UP + window.passes + 1)
        read = sum(p.bytes_read for p in plans[-window.passes :])
        written = sum(p.bytes_written for p in plans[windows.WARM_UP : windows.WARM_UP + window.passes])
        disk = windows.bare_disk_seconds(self.folder, read, written, window.passes)
        wanted = min(disk / demand.target, self.size.epoch_seconds) / (self.size.samples * window.passes)
        torch.cuda.empty_cache()
        return DenseTimer(self.size, "cuda", self.machine.rest).width(wanted)

    def _keep(self, found: dict[str, Any]) -> dict[str, Any]:
        all_found = self.found | found
        self._kept.write_text(json.dumps(all_found, indent=1))
        return all_found
