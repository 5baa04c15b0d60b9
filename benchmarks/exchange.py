"""The exchange of rows between ranks: python -m benchmarks.exchange [--quick] [--json FILE].

Two ranks on this machine, one thread each, over Gloo. Each has half of every table's rows, by their hashes, and half of
a batch's samples; ids are Zipf's (1.05). A turn is a step with exchanged rows, then, for comparison, a step of the same
samples with all rows on the rank, and a bare all-to-all of the bytes that the exchange moved, in the same three calls
(addresses, rows, gradients). Times are those of the slower rank, and the median of all turns.

Keys, for each SHAPE and plain for the least favorable one: wire_ratio_SHAPE is the bytes that left the ranks over the
fewest that must: for each unique row of another rank in a rank's batch, its address, the row and its gradient, counted
from the ids. time_ratio_SHAPE is what the exchange adds to a step (the exchanged step less the one with all rows on the
rank: both gather rows and sum up gradients) over the bare all-to-all; cpu_ratio_SHAPE the same of the seconds of CPU
that all threads of both ranks took, which stands where other processes want the cores too. time_ratio_of_calls_SHAPE is
the whole time within the two calls that exchange rows and gradients over the bare all-to-all: it counts the summing of
gradients, which the step on one rank has too, as the exchange's. bytes_saved_by_unique_ids_SHAPE is how many times the
bytes would be without, where every lookup traveled; time_saved_by_unique_ids_SHAPE the time of a bare all-to-all of
those, over that of the exchange's calls.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.exchange_worker import SHAPES
from benchmarks.machine import Goal, console, environment, middle, report

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_RANKS = 2
LIMIT_SECONDS = 300.0
GOALS = (
    Goal(key="wire_ratio", goal=1.05, below=True),
    Goal(key="time_ratio", goal=1.3, below=True),
)
FULL, QUICK, TINY = ("26x100k", "26x20k"), ("26x20k",), ("4xtiny",)


def measure(shape: str, turns: int, warm_up: int) -> list[dict[str, Any]]:
    """Run the ranks; return what each measured. Raises RuntimeError where one of them failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.exchange_worker", shape, str(turns), str(warm_up)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | shared | threads | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=Path(__file__).parents[1],
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        said = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError("a rank of the benchmark failed: see above")
    found: list[dict[str, Any]] = json.loads(said[0])
    return found


def figures_of(shape: str, told: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the keys of one shape."""
    sent, once, each = (sum(one[name] for one in told) for name in ("sent", "once", "each"))
    seconds = [one["seconds"] for one in told]
    turns = {name: [max(pair) for pair in zip(*(one[name] for one in seconds), strict=True)] for name in seconds[0]}
    calls = [there + back for there, back in zip(turns["there"], turns["back"], strict=True)]
    added = [step - alone for step, alone in zip(turns["step"], turns["alone"], strict=True)]
    record = {f"ms_{name}_{shape}": middle(values) * 1e3 for name, values in turns.items()}
    bare = middle(turns["bare"])
    busy = {name: sum(middle(one[f"{name}_cpu"]) for one in seconds) for name in ("step", "alone", "bare")}
    return record | {
        f"wire_ratio_{shape}": sent / once,
        f"time_ratio_{shape}": middle(added) / bare,
        f"time_ratio_of_calls_{shape}": middle(calls) / bare,
        f"cpu_ratio_{shape}": (busy["step"] - busy["alone"]) / busy["bare"],
        f"bytes_sent_{shape}": sent / len(calls),
        f"bytes_saved_by_unique_ids_{shape}": each / sent,
        f"time_saved_by_unique_ids_{shape}": middle(turns["bare_each"]) / middle(calls),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it from the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="26 tables of 20k rows only, under 30 seconds")
    parser.add_argument("--tiny", action="store_true", help="as --quick, and so small that times mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args(given)

    record = environment("benchmarks.exchange", given, ("torch", "numpy", "numba", "tiercache"))
    begun = time.perf_counter()
    shapes = TINY if options.tiny else QUICK if options.quick else FULL
    turns, warm_up = (3, 1) if options.tiny else (10, 3) if options.quick else (30, 5)
    for shape in shapes:
        record |= figures_of(shape, measure(shape, turns, warm_up))
    for name in ("wire_ratio", "time_ratio", "time_ratio_of_calls", "cpu_ratio"):
        record[name] = max(record[f"{name}_{shape}"] for shape in shapes)
    for name in ("bytes_saved_by_unique_ids", "time_saved_by_unique_ids"):
        record[name] = min(record[f"{name}_{shape}"] for shape in shapes)
    record |= {"num_ranks": NUM_RANKS, "turns": turns, "benchmark_seconds": time.perf_counter() - begun}
    console.print(_table(record, shapes))
    report(record, GOALS, title="what was promised", path=options.json)


def _table(record: dict[str, Any], shapes: Sequence[str]) -> Table:
    table = Table(title="milliseconds of the slower rank", title_justify="left")
    names = {
        "step": "a step",
        "alone": "all rows here",
        "there": "rows",
        "back": "gradients",
        "bare": "bare all-to-all",
    }
    for column in ("shape", *names.values(), "MB sent", "without unique ids"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    for shape in shapes:
        megabytes = record[f"bytes_sent_{shape}"] / 1e6
        without = f"{record[f'bytes_saved_by_unique_ids_{shape}'] * megabytes:.1f} MB"
        cells = [f"{record[f'ms_{name}_{shape}']:.1f}" for name in names]
        table.add_row(SHAPES[shape].name, *cells, f"{megabytes:.1f}", without)
    return table


if __name__ == "__main__":
    main()
