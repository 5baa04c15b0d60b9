"""Common parts of benchmarks: options, machine and versions, goals, tables and output."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime as dt
import functools
import gc
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.table import Table

from tiercache.sizes import format_bytes

Size = TypeVar("Size")


console = Console(highlight=False)
PACKAGES = (
    "torch", "numpy", "numba", "lmdb", "zarr", "pyarrow", "google-crc32c", "rocksdict", "duckdb", "polars",
    "fbgemm-gpu-cpu", "fbgemm-gpu", "cupy-cuda12x", "cupy-cuda13x", "tiercache",
)  # fmt: skip
"""Packages whose versions are recorded, if installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """A figure with a goal."""

    key: str
    goal: float
    least: float | None = None
    """The least acceptable value; None: the goal itself."""
    below: bool = False
    """True if smaller is better."""

    def verdict(self, value: float | None) -> str:
        """Return "goal", "least" or "missed"; "not measured" without a value."""
        if value is None:
            return "not measured"
        sign = -1 if self.below else 1
        if sign * value >= sign * self.goal:
            return "goal"
        return "least" if self.least is not None and sign * value >= sign * self.least else "missed"


ON_DEVICE: dict[str, dict[str, Any]] = {
    "device": {"choices": ("cpu", "cuda"), "help": "default: cuda if there is a GPU"},
    "dry": {"action": "store_true", "help": "no GPU: run the CUDA sources on the CPU, at the smallest size"},
}
"""Options of benchmarks that run on a GPU too."""


class Run:
    """A run of a benchmark: its options, a folder on the measured disk, and its figures so far."""

    def __init__(self, name: str, options: argparse.Namespace, goals: Sequence[Goal]) -> None:
        self.name, self.options, self.goals = name, options, goals
        self.record = environment(f"benchmarks.{name}", sys.argv[1:])
        self.record["size"] = next((form for form in ("dry", "tiny", "quick") if getattr(options, form, False)), "full")
        self.is_judged = True
        """False: goals are of another machine, or of a larger batch, and have no verdict."""
        self._facts = len(self.record)

    def size(self, full: Size, quick: Size, tiny: Size) -> Size:
        """Return the requested size."""
        return {"full": full, "quick": quick}.get(self.record["size"], tiny)

    @functools.cached_property
    def folder(self) -> Path:
        """A folder that is deleted at the end."""
        parent: Path = self.options.folder or Path.cwd()
        parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=parent))
        self.record["file_system"] = file_system(made)
        return made.resolve()

    def show(self) -> None:
        """Print the figures, and those with a goal with their verdicts."""
        record = self.record
        show_figures(f"{self.name}, size {record['size']}", dict(list(record.items())[self._facts :]))
        table = table_of("what was promised", "figure", "reached", "goal", "at least", "verdict")
        for goal in self.goals:
            value, sign = record.get(goal.key), "<= " if goal.below else ""
            verdict = goal.verdict(value) if self.is_judged or value is None else "no verdict"
            record[f"{goal.key}_verdict"] = verdict
            least = "" if goal.least is None else f"{sign}{goal.least:g}"
            table.add_row(goal.key, "-" if value is None else f"{value:.3f}", f"{sign}{goal.goal:g}", least, verdict)
        console.print(table)
        names = ("cpu", "cores", "kernel", "huge_pages", "python", *(k for k in record if k.startswith("version_")))
        console.print(", ".join(f"{name.removeprefix('version_')} {record[name]}" for name in names if name in record))
        console.print(f"{record['command']}  ({record['date']}, load before {record['load_before']})")

    def write(self) -> None:
        """Write the figures so far as one flat object, if requested."""
        if self.options.json is not None:
            flat = {key: value for key, value in self.record.items() if not isinstance(value, dict | list | tuple)}
            self.options.json.write_text(json.dumps(flat, indent=1) + "\n")
            console.print(f"figures written to {self.options.json}")


@contextlib.contextmanager
def benchmark(
    name: str, description: str | None, quick: str, goals: Sequence[Goal], **more: dict[str, Any]
) -> Iterator[Run]:
    """Read the command line; at the end delete the folder, and print and write the figures.

    quick: what --quick leaves out. more: other options, by name, as arguments of ``add_argument``.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help=f"{quick}, under 45 seconds")
    parser.add_argument("--tiny", action="store_true", help="so small that times mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--folder", type=Path, help="on the disk to measure, for data that are deleted at the end")
    for option, how in more.items():
        parser.add_argument(f"--{option}", **how)
    run = Run(name, parser.parse_args(), goals)
    begun = time.perf_counter()
    try:
        yield run
    finally:
        if "folder" in vars(run):
            shutil.rmtree(run.folder, ignore_errors=True)
    run.record["benchmark_seconds"] = time.perf_counter() - begun
    run.show()
    run.write()


def _without_places(arguments: Sequence[str]) -> Iterator[str]:
    """Remove paths of results and data, which differ on every machine."""
    left = iter(arguments)
    for argument in left:
        if argument in ("--json", "--folder"):
            next(left, None)
        elif not argument.startswith(("--json=", "--folder=")):
            yield argument


def environment(module: str, arguments: Sequence[str], packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """Return command, date, hardware and versions as flat JSON values; the command without paths."""
    record: dict[str, Any] = {
        "command": " ".join(["python -m", module, *_without_places(arguments)]),
        "date": dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "huge_pages": _huge_pages(),
        "python": platform.python_version(),
    }
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            record[f"version_{name.replace('-', '_')}"] = importlib.metadata.version(name)
    return record


def table_of(title: str, *columns: str) -> Table:
    """Return a table whose first column holds words and the others numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def show_figures(title: str, figures: Mapping[str, Any]) -> None:
    """Print figures as a table."""
    table = table_of(title, "", "")
    for key, value in figures.items():
        table.add_row(key, shown(key, value))
    console.print(table, markup=False)


def shown(key: str, value: Any) -> str:
    """Return a figure for people."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if key.endswith("_bytes") and value >= 1024:
        return format_bytes(value)
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"


def say(what: str) -> None:
    """Print a line of progress."""
    console.print(f"{time.strftime('%H:%M:%S')} {what}", style="dim", markup=False)


def middle(values: Iterable[float]) -> float:
    """Return the median."""
    return float(median(values))


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, while others may be deleting some."""
    for here, _, names in os.walk(folder):
        for name in names:
            yield Path(here, name)


def seconds_of(
    call: Callable[[int], object], times: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the seconds of some calls, each of which gets its number."""
    taken = []
    for number in range(times):
        begun = clock()
        call(number)
        taken.append(clock() - begun)
    return taken


def digest(arrays: Iterable[Any]) -> str:
    """Return a digest of the bits of all arrays."""
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(array.tobytes())
    return whole.hexdigest()


def drop_cache(path: Path) -> None:
    """Drop the clean, unmapped pages of a file, or of all files of a folder, from the page cache.

    Others may be deleting files.
    """
    for file in files_below(path) if path.is_dir() else (path,):
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def of_process(file: str, process: int | str = "self") -> dict[str, int]:
    """Return the bytes that /proc counts for a process in its `io` or `status`; nothing if it has ended."""
    try:
        lines = Path(f"/proc/{process}/{file}").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    counted = (line.split() for line in lines if file == "io" or line.endswith(" kB"))
    return {name.removesuffix(":"): int(number) * (1024 if unit else 1) for name, number, *unit in counted}


def process_bytes_read() -> int:
    """Return the bytes that this process has read from block devices."""
    return of_process("io")["read_bytes"]


def keep_freed_memory() -> None:
    """Let malloc reuse large blocks instead of returning them to the system, as the allocators of trainings do.

    Otherwise page faults take much of a step whose tensors are large.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)  # M_MMAP_MAX: no maps
    libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


@contextlib.contextmanager
def peak_memory(*, anonymous: bool = False) -> Iterator[Any]:
    """Yield an object that gets the peak growth of this process's resident memory, ``growth_bytes``.

    anonymous: True to leave out mapped files; a thread then looks every few milliseconds.
    """
    peak, done = SimpleNamespace(growth_bytes=0), threading.Event()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory freed by earlier work must not hide new allocations
    Path("/proc/self/clear_refs").write_text("5")
    before = of_process("status")["RssAnon" if anonymous else "VmRSS"]

    def watch() -> None:
        while not done.wait(0.005):
            peak.growth_bytes = max(peak.growth_bytes, of_process("status")["RssAnon"] - before)

    watcher = threading.Thread(target=watch, daemon=True)
    if anonymous:
        watcher.start()
    try:
        yield peak
    finally:
        done.set()
    if anonymous:
        watcher.join()
    else:
        peak.growth_bytes = max(0, of_process("status")["VmHWM"] - before)


def in_child(
    target: Callable[..., Any], *arguments: Any, ended: int = 0, watch: Callable[[int], object] = lambda _: None
) -> Any:
    """Run a function in a new process and return its result; None if the process is killed.

    ended: the expected exit status. watch: called with the process id every 20 ms. Raises RuntimeError if the process
    does not end as expected.
    """
    context = multiprocessing.get_context("spawn")
    results, result = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(result, target, *arguments))
    process.start()
    result.close()
    while not results.poll(0.02):
        watch(process.pid or 0)
    with results, contextlib.suppress(EOFError):
        found = results.recv()
    process.join()
    if process.exitcode != ended:
        raise RuntimeError(f"a child ended with {process.exitcode}, not {ended}")
    return found if ended == 0 else None


def _send(result: Connection, target: Callable[..., Any], *arguments: Any) -> None:
    result.send(target(*arguments))


def python(module: str, *arguments: object) -> list[str]:
    """Return the command that runs a module in a child process."""
    return [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)]


def file_system(path: Path) -> str:
    """Return the type and the device of the file system that holds ``path``."""
    best = max(
        (p for p in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(p.mountpoint)),
        key=lambda p: len(p.mountpoint),
    )
    return f"{best.fstype} on {best.device}"


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or sys.platform


def _huge_pages() -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text().partition("[")[2].partition("]")[0] if path.exists() else "unknown"
