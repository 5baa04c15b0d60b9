"""Common parts of the harness's commands: options and output."""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import console, environment
from tests.crash.outcome import Outcome


def add_options(parser: argparse.ArgumentParser, quick: str) -> None:
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one flat JSON object")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (0)")
    parser.add_argument("--folder", type=Path, help="where to work (TMPDIR); kept where something went wrong")


def working_folder(options: argparse.Namespace, name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"tiercache-{name}-", dir=options.folder))


def progress(every: int = 500) -> Callable[[int], None]:
    """Return a function that is told of examined folders, and prints their number now and then: a run takes long."""
    examined = 0

    def notify(more: int) -> None:
        nonlocal examined
        if (examined + more) // every > examined // every:
            console.print(f"{examined + more:,} stores examined")
        examined += more

    return notify


def report(
    name: str,
    options: argparse.Namespace,
    arguments: Sequence[str] | None,
    figures: dict[str, Any],
    outcome: Outcome,
    folder: Path,
    packages: Sequence[str],
) -> int:
    """Print and write the figures; return the exit status, after deleting the folder if all is right."""
    figures = {**figures, "seed": options.seed, **environment("tests.crash", [name, *(arguments or ())], packages)}
    console.print(f"{name}: kills and what they left")
    for key, value in figures.items():
        console.print(f"{key.replace('_', ' '):28} {value}", markup=False)
    for problem in outcome.problems:
        console.print(problem, markup=False, style="red")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
        console.print(f"figures in {options.json}")
    if outcome.problems:
        console.print(f"the remains are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0
