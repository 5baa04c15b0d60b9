"""Measure everything on a GPU with one command: python -m benchmarks.gpu OUT [PART ...] [--dry].

The command takes at most nine minutes. Parts run in order of worth, each in its own process with its own time limit,
and each writes OUT/PART.json as it goes: a part that is cut or fails keeps what it measured. --dry runs a small form of
every part on a machine without a GPU. It launches no kernels, and its times mean nothing.

`env`: versions, copy rate. `link`: copies over the link. `step`: the resident step, both modules, four optimizers, by
kernel. `stream`: DynamicEmb's protocol, and fresh ids. `peers`: torch and FBGEMM on the same step. `register`: pinning
pages. `switch`: rows over the link. `fresh`: batches made by threads against kept ones. `host`: a profile of the
training thread. `tests`: the tests that need a GPU. `merlin`: the tiny and small models. `out_of_core`: a table on
disk. `ngram`: a table of n-grams on disk. `ncu`: bytes and occupancy of kernels. `racecheck`. `gpu_step`, `gpu_parts`
and `ngram` describe the figures.
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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import gpu_parts as parts
from benchmarks import gpu_step as resident
from benchmarks.device import TrainingDevice, open_device
from benchmarks.gpu_step import Keep
from benchmarks.idle_gpu import idle_backend
from benchmarks.machine import say, show_figures

MOST_SECONDS = 540


class Part(NamedTuple):
    """A part of the benchmark and its time limit."""

    measure: Callable[[TrainingDevice, Keep], None]
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
    "ngram": Part(parts.ngram, 90),
    "ncu": Part(parts.ncu, 60),
    "racecheck": Part(parts.racecheck, 150),
}


def run_part(name: str, path: Path, *, dry: bool) -> None:
    """Run a part in this process, as a new process group, and write its figures as they come."""
    os.setsid()
    found: dict[str, Any] = {}

    def keep(figures: dict[str, Any]) -> None:
        found.update(figures)
        write(path, found)

    if dry:
        torch.set_num_threads(1)
    try:
        PARTS[name].measure(device_of(dry=dry), keep)
    except BaseException as error:
        keep({"error": f"{type(error).__name__}: {error}"})
        traceback.print_exc()
        sys.exit(1)


def device_of(*, dry: bool) -> TrainingDevice:
    """Return the GPU, or a stand-in for a dry run."""
    if dry:
        return TrainingDevice("idle", lambda: idle_backend(ahead=2)[0])
    return open_device("cuda")


def write(path: Path, found: dict[str, Any]) -> None:
    """Write figures as one flat JSON object, atomically."""
    partial_file = path.with_suffix(".part")
    partial_file.write_text(json.dumps(found, indent=1, default=str) + "\n")
    partial_file.replace(path)


def limited(target: Callable[[], None], seconds: float) -> str:
    """Run a function in a child process and return how it ended: "done", "failed" or "cut".

    A child that is cut is killed, along with every process that it started.
    """
    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        return "cut"
    return "failed" if process.exitcode else "done"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; the exit status is 1 if one of them failed or was cut."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the figures; created if it is missing")
    parser.add_argument("parts", nargs="*", metavar="part", help="default: all, in order of worth")
    parser.add_argument("--dry", action="store_true", help="run a small form of every part without a GPU")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}: expected one of {', '.join(PARTS)}")
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
        show_figures(name, found)
    bad = {name: how for name, how in ended.items() if how != "done"}
    took = time.monotonic() - begun
    say(f"{len(ended) - len(bad)} parts of {len(ended)} done in {took:.0f} s; not done: {bad or 'none'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
