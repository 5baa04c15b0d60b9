"""What every benchmark says beside its figures: the machine, the versions, the command; and how it says it."""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import gc
import importlib.metadata
import json
import os
import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Self

import psutil
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

__all__ = [
    "Elsewhere",
    "Goal",
    "PeakMemory",
    "console",
    "device_bytes_read",
    "drop_cache",
    "environment",
    "files_below",
    "process_bytes_read",
    "report",
]

console = Console(highlight=False)
SECTOR_BYTES = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """A figure that was promised."""

    key: str
    goal: float
    least: float | None = None
    """What must be reached at least; None: the goal itself."""
    below: bool = False
    """Whether small is good."""

    def verdict(self, value: float | None) -> str:
        """Return "goal", "least" or "missed"; "not measured" without a value."""
        if value is None:
            return "not measured"
        sign = -1 if self.below else 1
        if sign * value >= sign * self.goal:
            return "goal"
        return "least" if self.least is not None and sign * value >= sign * self.least else "missed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere(Goal):
    """A goal of another machine than this one, or of a larger batch."""

    def verdict(self, value: float | None) -> str:
        """Return that there is none."""
        return "not measured" if value is None else "no verdict"


def _without_places(arguments: Sequence[str]) -> Iterator[str]:
    """Leave out where figures go and where data lies, which is different on every machine."""
    left = iter(arguments)
    for argument in left:
        if argument in ("--json", "--folder"):
            next(left, None)
        elif not argument.startswith(("--json=", "--folder=")):
            yield argument


def environment(module: str, arguments: Sequence[str], packages: Iterable[str]) -> dict[str, Any]:
    """Return command, date, hardware and versions as flat JSON values; of the command no places of files."""
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


def report(record: dict[str, Any], goals: Sequence[Goal], *, title: str, path: Path | None) -> None:
    """Print the goals with what was reached, and write ``record``, completed by verdicts, to ``path``."""
    table = Table(title=title, title_justify="left")
    for name in ("figure", "reached", "goal", "at least", "verdict"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for goal in goals:
        value = record.get(goal.key)
        verdict = goal.verdict(value)
        record[f"{goal.key}_verdict"] = verdict
        sign = "<= " if goal.below else ""
        least = "" if goal.least is None else f"{sign}{goal.least:g}"
        reached = "-" if value is None else f"{value:.3f}"
        table.add_row(goal.key, reached, f"{sign}{goal.goal:g}", least, verdict)
    console.print(table)
    names = ("cpu", "cores", "kernel", "huge_pages", "python", *(k for k in record if k.startswith("version_")))
    console.print(", ".join(f"{name.removeprefix('version_')} {record[name]}" for name in names if name in record))
    console.print(f"{record['command']}  ({record['date']}, load before {record['load_before']})")
    write_figures(record, path)
    if path is not None:
        console.print(f"figures written to {path}")


def write_figures(record: dict[str, Any], path: Path | None) -> None:
    """Write the figures of a record, so far or all of them, as one flat object."""
    if path is not None:
        flat = {key: value for key, value in record.items() if not isinstance(value, dict | list | tuple)}
        path.write_text(json.dumps(flat, indent=1) + "\n")


def middle(values: Iterable[float]) -> float:
    """Return the median."""
    return float(median(values))


def faults() -> int:
    """Return the minor page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, while others may be deleting some."""
    for here, _, names in os.walk(folder):
        for name in names:
            yield Path(here, name)


def drop_cache(path: Path) -> None:
    """Let go of the clean, unmapped pages that the page cache holds of a file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def process_bytes_read() -> int:
    """Return the bytes that this process made block devices read so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


class PeakMemory:
    """Between enter and exit, how far the resident memory of this process rises at most; mapped files count."""

    def __init__(self) -> None:
        self.growth_bytes = 0

    def __enter__(self) -> Self:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what earlier work freed must not hide what this takes
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status_bytes("VmRSS")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.growth_bytes = max(0, _status_bytes("VmHWM") - self._before)


def anonymous_bytes() -> int:
    """Return the memory of this process that is not backed by files."""
    return _status_bytes("RssAnon")


def device_bytes_read(path: Path) -> int:
    """Return the bytes that the block device under ``path`` has read for anyone so far; 0 where nothing counts."""
    number = path.stat().st_dev
    wanted = [str(os.major(number)), str(os.minor(number))]
    for line in Path("/proc/diskstats").read_text().splitlines():
        words = line.split()
        if words[:2] == wanted:
            return int(words[5]) * SECTOR_BYTES
    return 0


def file_system(path: Path) -> str:
    """Return the type and the device of the file system that holds ``path``."""
    best = max(
        (p for p in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(p.mountpoint)),
        key=lambda p: len(p.mountpoint),
    )
    return f"{best.fstype} on {best.device}"


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or sys.platform


def _huge_pages() -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text().partition("[")[2].partition("]")[0] if path.exists() else "unknown"
