"""The figures of a window of warm passes (see `training`).

bound_ratio = max(in-memory seconds, store bytes / bare disk's bandwidth, link bytes / link's) / tiered wall seconds;
the disk's bandwidth is measured at the window's mix of reads and writes, by large requests past the page cache;
of the two directions of the link the slower one counts. wait_fraction as in `out_of_core`, excluding seconds in which
the training thread waits for queued GPU steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tiercache as tc
from benchmarks.device import TrainingDevice
from benchmarks.disk_raw import BareDisk, Span
from benchmarks.training import TieredRun
from tiercache.planning.budgets import paged
from tiercache.reporting.report import PassReport
from tiercache.store import MemoryEngine

WARM_UP = 2  # warm passes before the window: by then dumps, loads and cached rows are steady
_READ_BYTES, _FILE_BYTES = 4 << 20, 1 << 30
_AT_RATE = {"pack": 0, "commit": 0, "durable": 0, "room": 0, "unpack": 1, "store": 1}
"""The pass whose report has each kind of seconds of a switch: the pass that ends (0), or the one that begins."""


def warm_window(passes: tc.PassDataset, num_passes: int) -> range:
    """Return the first passes of the second epoch, after the warm-up passes."""
    first = len(passes) + WARM_UP
    return range(first, first + num_passes)


def open_store(passes: tc.PassDataset, path: Path | None) -> tc.Store:
    """Open a store in a folder, or a new one in memory."""
    return tc.Store.open(path, tables=passes.tables, engine=MemoryEngine() if path is None else None)


def bare_disk_seconds(folder: Path, bytes_read: int, bytes_written: int, commits: int) -> float:
    """Return the bare disk's seconds to read and write these bytes at the same time.

    Cyclically in two files of at most 1 GiB, past the page cache; larger amounts are committed in pieces.
    """
    pieces = commits * -(-max(1, bytes_written) // (commits * _FILE_BYTES))
    each = paged(-(-max(1, bytes_written) // pieces))
    file_bytes = -(-max(each, 2 * _READ_BYTES) // _READ_BYTES) * _READ_BYTES
    reads = [Span(at % file_bytes, min(_READ_BYTES, bytes_read - at)) for at in range(0, bytes_read, _READ_BYTES)]
    with BareDisk(folder, file_bytes) as disk:
        return min(disk.seconds(reads, [[Span(0, each)]] * pieces) for _ in range(2))


def figures_of(
    device: TrainingDevice, run: TieredRun, window: range, *, memory: float, tiered: float, folder: Path | None
) -> dict[str, Any]:
    """Return the figures of a window's seconds; ``folder``: on the store's disk, None for a store in memory."""
    reports = [r for r in run.cache.reports if window.start <= r.pass_index <= window.stop]
    ending, beginning = reports[:-1], reports[1:]
    seconds = switch_seconds(ending, beginning)
    loaded, written = sum(r.bytes_loaded for r in beginning), sum(r.bytes_written_planned for r in ending)
    read = sum(r.bytes_read for r in beginning)
    disk = 0.0 if folder is None else bare_disk_seconds(folder, read, written, len(window))
    rates = device.link_bytes_per_second() if device.is_gpu else None
    link = 0.0 if rates is None else max(written / rates[0], loaded / rates[1])
    return {
        "bound_ratio": max(memory, disk, link) / tiered,
        "bound": max((memory, "memory"), (disk, "disk"), (link, "link"))[1],
        "throughput_ratio": memory / tiered,
        "wait_fraction": sum(seconds.values()) / tiered,
        **{f"{name}_fraction": taken / tiered for name, taken in seconds.items()},
        "demand": disk / memory,
        "in_memory_seconds": memory,
        "tiered_seconds": tiered,
        "raw_seconds": disk,
        "link_seconds": link,
        "link_bytes_to_host": written,
        "link_bytes_from_host": loaded,
        "link_bytes_per_second_to_host": None if rates is None else rates[0],
        "link_bytes_per_second_from_host": None if rates is None else rates[1],
        "store_bytes_read": 0 if folder is None else read,
        "store_bytes_written": 0 if folder is None else written,
        "bytes_read_per_useful_byte": run.bytes_read / read if folder is not None and read else None,
        **row_counts(beginning),
        "planned_equals_measured": all(r.planned_equals_measured for r in run.cache.reports if r.bytes_written >= 0),
        "device_bytes": run.cache.device_bytes,
        "host_bytes_peak": run.cache.host_bytes_peak,
        "window_visits": len(window),
    }


def row_counts(reports: Sequence[PassReport]) -> dict[str, int]:
    """Return the rows that passes need, and where they come from."""
    return {
        "rows_needed": sum(r.rows for r in reports),
        "rows_kept": sum(r.rows_kept for r in reports),
        "rows_from_host": sum(r.rows_from_host for r in reports),
        "rows_read": sum(r.rows_read for r in reports),
    }


def switch_seconds(ending: Sequence[PassReport], beginning: Sequence[PassReport]) -> dict[str, float]:
    """Return the training thread's seconds in some switches, by cause: of the passes that end and the passes that
    begin.
    """
    return {
        name: sum((r.wait_seconds | r.work_seconds).get(name, 0.0) for r in (ending, beginning)[which])
        for name, which in _AT_RATE.items()
    }


def same_rows(memory: tc.InMemoryCache, tiered: tc.TierCache) -> bool:
    """Return True if rows and optimizer state have the same bits, for two passes of the same index."""
    now = tiered.live_rows()
    return all(
        np.array_equal(mine.view(np.uint8), yours.view(np.uint8))
        for table in memory.tables
        for mine, yours in zip(
            memory.fields(table.name), now.fields(table.name, np.asarray(memory.keys(table.name))), strict=True
        )
    )
