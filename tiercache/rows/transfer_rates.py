"""Transfer rates of disk, host memory and the link to the device, measured once per machine and cached in a file."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import platform
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from pydantic import TypeAdapter, ValidationError

from tiercache.planning.plan_file import Rates
from tiercache.store.files import huge_pages, read_whole, replace_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_FILE_BYTES = 128 << 20
_REQUEST_BYTES = 4 << 20
_COPY_BYTES = 64 << 20
_REPEATS = 5
_LEAST_SECONDS = 1e-6


def measured_rates(path: Path, *, device: str = "cpu", again: bool = False) -> Rates:
    """Return the rates of this machine, of the disk of ``path`` and of a device.

    The first call measures for a second or two, with a temporary file of 128 MiB next to ``path``; ``again`` repeats
    it. Raises OSError if the disk cannot be written to.
    """
    file, folder = cache_file(), existing_folder(path)
    key = f"{platform.node()} {os.cpu_count()} {folder.stat().st_dev} {device}"
    cached = _read(file)
    if again or key not in cached:
        cached[key] = measure(folder, device)
        file.parent.mkdir(parents=True, exist_ok=True)
        record = {name: rates.model_dump(by_alias=True) for name, rates in cached.items()}
        replace_file(file, json.dumps(record, indent=1).encode())
    return cached[key]


def _read(file: Path) -> dict[str, Rates]:
    """Return the cached rates; none if the file is missing or damaged."""
    try:
        return TypeAdapter(dict[str, Rates]).validate_json(read_whole(str(file)))
    except (OSError, ValidationError):
        return {}


def cache_file() -> Path:
    """Return the file that caches rates by machine, disk and device."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiercache" / "rates.json"


def existing_folder(path: Path) -> Path:
    """Return the nearest folder above ``path`` that exists: a new store will be on its disk."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def measure(folder: Path, device: str) -> Rates:
    """Measure with a temporary file in ``folder``: sequential reads and writes past the page cache, as in a store."""
    data = huge_pages(_REQUEST_BYTES)
    data[:] = np.random.default_rng(0).integers(0, 256, data.size, dtype=np.uint8)
    handle, name = tempfile.mkstemp(dir=folder, prefix=".probe-")
    try:
        _bypass_cache(handle)
        write, read = _disk(handle, data)
        commit = _commit_seconds(folder)
    finally:
        os.close(handle)
        Path(name).unlink()
    copy = copy_rate()
    link = copy if device == "cpu" else _link_rate(device)
    return Rates(device=device, read=read, write=write, copy=copy, link=link, commit_seconds=commit)


def copy_rate() -> float:
    """Return bytes per second from host memory to host memory."""
    source, to = np.ones(_COPY_BYTES, np.uint8), np.ones(_COPY_BYTES, np.uint8)
    return _COPY_BYTES / _seconds(lambda: np.copyto(to, source), _REPEATS)


def _bypass_cache(handle: int) -> None:
    """Bypass the page cache if the file system can."""
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, getattr(os, "O_DIRECT", 0))
        os.pwrite(handle, mmap.mmap(-1, mmap.PAGESIZE), 0)
    except OSError:
        fcntl.fcntl(handle, fcntl.F_SETFL, 0)


def _disk(handle: int, data: NDArray[np.uint8]) -> tuple[float, float]:
    """Return bytes per second written and synced, and read."""
    os.posix_fallocate(handle, 0, _FILE_BYTES)
    offsets = range(0, _FILE_BYTES, data.size)

    def write() -> None:
        for offset in offsets:
            os.pwrite(handle, data.data, offset)
        os.fdatasync(handle)

    def read() -> None:
        for offset in offsets:
            os.preadv(handle, [data.data], offset)

    written = _FILE_BYTES / _seconds(write, 2)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    return written, _FILE_BYTES / _seconds(read, 2)


def _commit_seconds(folder: Path) -> float:
    """Return the seconds until a commit is durable: the blocks, then the records, then the head."""

    def commit() -> None:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            for _ in range(3):
                file.write(bytes(mmap.PAGESIZE))
                os.fdatasync(file.fileno())

    return _seconds(commit, _REPEATS)


def _link_rate(name: str) -> float:
    """Return bytes per second from pinned memory to a GPU."""
    import torch

    device = torch.device(name)
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cpu").pin_memory()
    to = torch.empty_like(source, device=device)

    def copy() -> None:
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    copy()
    return _COPY_BYTES / _seconds(copy, _REPEATS)


def _seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median of some runs."""
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return max(_LEAST_SECONDS, median(seconds))
