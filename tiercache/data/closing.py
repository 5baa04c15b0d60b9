"""Closing a pass: numbers become positions in hash order, and its file gets its final name."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tiercache.data.array_file import ArrayFileWriter
from tiercache.data.manifest import SubDatasetRecord, file_name
from tiercache.kernels.cpu.samples import permute, permute_columns
from tiercache.store.atomic_file import sync

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.data.open_pass import OpenPass, Stretch
    from tiercache.data.resume import ExtractionState, WorkFolder
    from tiercache.data.workers import Workers

_SYNC_SECONDS = 1.0


def close_pass(open_pass: OpenPass, path: Path, workers: Workers) -> SubDatasetRecord:
    """Write a sub-dataset; its file is complete, but not on disk yet.

    Memory: positions of all keys, the keys of one table for each worker, and some samples for each.
    """
    layout, values = open_pass.layout, open_pass.values
    rows = {name: unique.count for name, unique in open_pass.unique.items()}
    samples = 0 if values is None else open_pass.samples
    writer = ArrayFileWriter(path, layout.file(samples, rows, values))
    positions: dict[str, NDArray[np.int32]] = {}

    def sort(name: str) -> None:
        keys, counts, positions[name] = open_pass.unique[name].sorted(with_positions=values is not None)
        writer.write(f"keys.{name}", 0, keys)
        writer.write(f"counts.{name}", 0, counts)

    workers.run(partial(sort, name) for name in rows)
    singles = layout.schema.singles
    names = list(dict.fromkeys(f.table for f in singles))  # their positions one behind another: one kernel has them all
    firsts = dict(zip(names, np.cumsum([0, *(positions[name].size for name in names)]).tolist(), strict=False))
    joined = np.concatenate([*(positions[name] for name in names), np.empty(0, np.int32)])
    bases = np.array([firsts[f.table] for f in singles], np.int64)

    def rewrite(stretch: Stretch) -> None:
        for piece in stretch.pieces:
            values = open_pass.read(piece)
            kind, _, feature = piece.name.partition(".")
            if piece.name == "ids":
                ids = np.empty((stretch.samples, bases.size), np.int32)
                permute_columns(values, joined, bases, ids)
                values = ids
            elif kind == "ids":
                permute(values, positions[layout.schema.feature(feature).table])
            writer.write(piece.name, piece.row, values)

    workers.run(partial(rewrite, stretch) for stretch in open_pass.stretches)
    for name in values or ():
        writer.write(f"offsets.{name}", 0, np.zeros(1, np.int64))
    open_pass.discard()
    return SubDatasetRecord(samples=samples, rows=rows, values=values, digest=writer.finish())


class PassCloser:
    """Closes passes on a thread of its own, one after the other, and keeps the state on disk behind them.

    What is closed is synced to the disk together with what was closed in the second before it: a sync for each of many
    small passes would take longer than the passes. Errors come with the next call.
    """

    def __init__(self, work: WorkFolder, state: ExtractionState, workers: Workers) -> None:
        self.state = state
        """With every pass that is closed; on disk it may be a second older."""
        self._work, self._workers = work, workers
        self._thread = ThreadPoolExecutor(1, "closing")
        self._running: Future[None] | None = None
        self._held_bytes = 0
        self._unsynced: list[Path] = []
        self._synced_at = time.monotonic()

    @property
    def held_bytes(self) -> int:
        """The most host bytes that a pass takes which is being closed; 0 where none is."""
        return 0 if self._running is None or self._running.done() else self._held_bytes

    def close(self, open_pass: OpenPass, file_index: int, row: int) -> None:
        """Close a pass, behind which the cursor is; returns before it is closed, but not before the last one is."""
        self.wait()
        self._held_bytes = open_pass.closing_bytes()
        self._running = self._thread.submit(partial(self._close, open_pass, file_index, row))

    def wait(self) -> None:
        """Return when no pass is being closed."""
        if self._running is not None:
            self._running.result()
            self._running = None

    def finish(self) -> None:
        """Return when every pass is closed and on disk."""
        self.wait()
        self._sync()
        self._thread.shutdown()

    def abandon(self) -> None:
        """End the thread where something else failed: what is closed stays, if it can be synced."""
        with contextlib.suppress(Exception):
            self.finish()
        self._thread.shutdown()

    def _close(self, open_pass: OpenPass, file_index: int, row: int) -> None:
        path = self._work.out / file_name(len(self.state.passes))
        record = close_pass(open_pass, path, self._workers)
        self._unsynced.append(path)
        self.state = self.state.closed(record, file_index, row)
        if time.monotonic() - self._synced_at >= _SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        if self._unsynced:
            self._workers.run(partial(sync, path) for path in self._unsynced)
            sync(self._work.out)
            self.state.write(self._work.path)
        self._unsynced, self._synced_at = [], time.monotonic()
