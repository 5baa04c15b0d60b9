"""Kills real trainings with SIGKILL at random moments and compares their end with that of trainings never killed.

    python -m benchmarks.crash [--kills 200] [--quick] [--json FILE] [--seed N] [--folder DIR]

After each kill the store is opened for reading and verified, must stand at a commit no older than the last durable
one, and the next process goes on. Ends with status 1 where anything was lost or differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import Progress
from rich.table import Table

from benchmarks.killed_training import TRAININGS
from benchmarks.killer import Killer, Outcome
from benchmarks.machine import console, environment

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGES = ("tiercache", "torch", "numpy", "numba", "lmdb", "pyarrow")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crash", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="processes to kill (200)")
    parser.add_argument("--quick", action="store_true", help="20 kills, and trainings of 2 epochs instead of 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one flat JSON object")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument("--folder", type=Path, help="where to work (TMPDIR); kept where something went wrong")
    options = parser.parse_args(arguments)
    kills = 20 if options.quick else options.kills
    trainings = tuple(replace(t, epochs=2) for t in TRAININGS) if options.quick else TRAININGS
    folder = Path(tempfile.mkdtemp(prefix="tiercache-crash-", dir=options.folder))
    with Progress(console=console) as progress:
        bar = progress.add_task("killing", total=kills)
        killer = Killer(
            folder,
            seed=options.seed,
            trainings=trainings,
            notify=lambda outcome: progress.update(bar, completed=outcome.kills),
        )
        outcome = killer.run(kills)
    figures = {
        **outcome.figures(),
        "seed": options.seed,
        **environment("benchmarks.crash", arguments or sys.argv[1:], PACKAGES),
    }
    console.print(_table(outcome, figures))
    for problem in outcome.problems:
        console.print(problem, markup=False, style="red")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
        console.print(f"figures in {options.json}")
    if outcome.problems:
        console.print(f"what is left stands in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def _table(outcome: Outcome, figures: dict[str, object]) -> Table:
    table = Table(title="kill -9 at random moments", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        if isinstance(value, int) and name.startswith("kills_in_"):
            share = f"{value} ({value / max(1, outcome.kills):.0%})"
            table.add_row(f"  in {name.removeprefix('kills_in_').replace('_', ' ')}", share)
        else:
            table.add_row(name.replace("_", " "), str(value))
    return table


if __name__ == "__main__":
    sys.exit(main())
