"""Everything worth measuring on a GPU, by one command: python -m benchmarks.gpu OUT [PART ...] [--dry].

At most nine minutes in all. Parts run in the order of their worth, each in a process of its own with a limit of its
own, and write OUT/PART.json when they end; a part that is cut has what it found until then, and one that fails its
error. --dry runs every part, small, on a machine without a GPU: kernels are not launched, and no time means anything.

Parts: env, versions and a copy; link, copies over the link; step, the resident step by both modules and four
optimizers, whole and kernel by kernel; stream, DynamicEmb's protocol and a stream of fresh ids; peers, torch and FBGEMM
on the same step; register, pinning pages; switch, rows over the link; fresh, batches made ahead against kept ones;
host, a profile of the training thread; tests, those that need a GPU; merlin, its tiny and small models; out_of_core,
from the disk; ncu, bytes and occupancy; racecheck. What their figures are: `gpu_step` and `gpu_parts`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks import gpu_parts as parts
from benchmarks import gpu_step as resident
from benchmarks.idle_gpu import idle_backend
from benchmarks.machine import console, say, table_of
from benchmarks.window import TrainingMachine, open_training

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.gpu_step import Keep

MOST_SECONDS = 540


class Part(NamedTuple):
    """What runs, and how long it may."""

    measure: Callable[[TrainingMachine, Keep], None]
    seconds: int


PARTS = {
    "env": Part(parts.env, 30),
    "link": Part(parts.link, 20),
    "step": Part(resident.step, 120),
    "stream": Part(parts.stream, 90),
    "peers": Part(resident.peers, 45),
    "register": Part(parts.register, 30),
    "switch": Part(parts.switch, 40),
    "fresh": Part(parts.fresh, 60),
    "host": Part(resident.host, 30),
    "tests": Part(parts.tests, 60),
    "merlin": Part(parts.merlin, 90),
    "out_of_core": Part(parts.out_of_core, 90),
    "ncu": Part(parts.ncu, 60),
    "racecheck": Part(parts.racecheck, 150),
}


def run_part(name: str, path: Path, *, dry: bool) -> None:
    """Run a part in this process, a group of its own, and write what it finds as it finds it."""
    os.setsid()
    found: dict[str, Any] = {}

    def keep(figures: dict[str, Any]) -> None:
        found.update(figures)
        write(path, found)

    if dry:
        torch.set_num_threads(1)
    try:
        PARTS[name].measure(machine_of(dry=dry), keep)
    except BaseException as error:
        keep({"error": f"{type(error).__name__}: {error}"})
        traceback.print_exc()
        sys.exit(1)


def machine_of(*, dry: bool) -> TrainingMachine:
    """Return the GPU; dry: one that does nothing."""
    if dry:
        return TrainingMachine("idle", lambda: idle_backend(ahead=2)[0])
    return open_training("cuda", dry=False)


def write(path: Path, found: dict[str, Any]) -> None:
    """Write figures as one flat JSON object, whole or not at all."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(found, indent=1, default=str) + "\n")
    beside.replace(path)


def limited(target: Callable[[], None], seconds: float) -> str:
    """Run a function in a process of its own; returns how it ended: "done", "failed", or "cut" with all it started."""
    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        return "cut"
    return "failed" if process.exitcode else "done"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; returns whether one failed or was cut."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("out", type=Path, help="the folder for the parts' figures; it is made")
    parser.add_argument("parts", nargs="*", metavar="part", help="default: all, in the order of their worth")
    parser.add_argument("--dry", action="store_true", help="no GPU: every part, small, over a GPU that does nothing")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]}: give some of {', '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    begun, ended = time.monotonic(), dict[str, str]()
    for name in options.parts or PARTS:
        left, path = MOST_SECONDS - (time.monotonic() - begun), options.out / f"{name}.json"
        if left < 1:
            ended[name] = "no time left"
            continue
        say(name)
        since = time.monotonic()
        ended[name] = limited(partial(run_part, name, path, dry=options.dry), min(left, PARTS[name].seconds))
        found = json.loads(path.read_text()) if path.exists() else {}
        found = {"ended": ended[name], "seconds": round(time.monotonic() - since, 1), **found}
        write(path, found)
        show(name, found)
    bad = {name: how for name, how in ended.items() if how != "done"}
    took = time.monotonic() - begun
    say(f"{len(ended) - len(bad)} parts of {len(ended)} done in {took:.0f} s; not done: {bad or 'none'}")
    return int(bool(bad))


def show(name: str, found: dict[str, Any]) -> None:
    """Print the figures of a part."""
    table = table_of(name, "", "")
    for key, value in found.items():
        table.add_row(key, f"{value:,.4g}" if isinstance(value, float) else str(value))
    console.print(table, markup=False)


if __name__ == "__main__":
    sys.exit(main())
