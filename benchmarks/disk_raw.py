"""The bare disk: the reads and writes of one epoch replayed with plain pread and pwrite.

One reader and one writer, as in training, each as fast as it can and neither waiting for the other. The bytes and
ranges of every read, the blocks of every write and the transactions are the plan's. A transaction ends with what
LMDB ends one with: fdatasync, then one page to a handle that writes through. What the store adds - checksums,
copies, trees, freeing - is left out.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.machine import drop_cache

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

    from tiercache.planning.visit_plan import VisitPlan
    from tiercache.store.stream import Stream

PAGE_BYTES = 4096
KEY_BYTES = 8


class Span(NamedTuple):
    """Bytes of a file."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Replay:
    """What an epoch does to the disk."""

    reads: list[Span]
    transactions: list[list[Span]]
    """Written blocks, by transaction."""
    file_bytes: int

    @property
    def bytes_read(self) -> int:
        """Bytes of all reads."""
        return sum(span.size for span in self.reads)

    @property
    def bytes_written(self) -> int:
        """Bytes of all blocks: rows, keys and dense state."""
        return sum(span.size for spans in self.transactions for span in spans)

    @classmethod
    def of(cls, plans: Sequence[VisitPlan], *, num_passes: int, transaction_bytes: int, state_bytes: int) -> Replay:
        """Lay the dumps of an epoch out in one file, a slot for each pass; ``plans`` are those of one epoch."""
        slot = max(_slot_bytes(plan.dumps) for plan in plans) + state_bytes + 2 * PAGE_BYTES
        reads, transactions = [], []
        for plan in plans:
            for load in plan.loads:
                stream = plans[load.visit % num_passes].dumps[load.group]
                base = load.visit % num_passes * slot + _group_offset(plans[load.visit % num_passes].dumps, load.group)
                reads += [
                    Span(base + offset, size) for offset, size in _reads(stream, load.store.first, load.store.last)
                ]
            at = plan.visit % num_passes * slot
            transactions += _dump(plan.dumps, at, transaction_bytes)
            at += _slot_bytes(plan.dumps)
            if state_bytes:
                transactions.append([Span(at, state_bytes)])
            transactions.append([Span(at + state_bytes, PAGE_BYTES)])  # the manifest
        return cls(reads, transactions, slot * num_passes)


def _slot_bytes(streams: Sequence[Stream]) -> int:
    return sum(stream.rows * (stream.row_bytes + KEY_BYTES) for stream in streams)


def _group_offset(streams: Sequence[Stream], group: int) -> int:
    return _slot_bytes(streams[:group])


def _reads(stream: Stream, low: int, high: int) -> list[Span]:
    """Cut pieces [low, high) where blocks end."""
    spans = []
    while low < high:
        last = min(high, int(stream.block_piece_B[stream.piece_block_P[low] + 1]))
        first = int(stream.piece_offset_P[low])
        spans.append(Span(first, int(stream.piece_offset_P[last]) - first))
        low = last
    return spans


def _dump(streams: Sequence[Stream], at: int, limit: int) -> list[list[Span]]:
    """Cut the blocks of a dump, each followed by its keys, into transactions of at most ``limit`` bytes."""
    transactions: list[list[Span]] = []
    held = limit + 1
    for stream in streams:
        for rows in np.diff(stream.block_first_row_B).tolist():
            size = rows * (stream.row_bytes + KEY_BYTES)
            if held + size > limit:
                transactions.append([])
                held = 0
            keys_at = at + rows * stream.row_bytes
            transactions[-1] += [Span(at, rows * stream.row_bytes), Span(keys_at, rows * KEY_BYTES)]
            held += size
            at += size
    return transactions


class BareDisk:
    """Two files on the store's file system, one to read and one to write."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._paths = folder / "raw.read", folder / "raw.write"
        self._data = np.random.default_rng(1).bytes(8 << 20)
        for path in self._paths:
            with path.open("wb", buffering=0) as file:
                for offset in range(0, num_bytes, len(self._data)):
                    file.write(self._data[: min(len(self._data), num_bytes - offset)])
                os.fsync(file.fileno())

    def __enter__(self) -> BareDisk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path in self._paths:
            path.unlink()

    def seconds(self, replay: Replay) -> float:
        """Return how long the epoch takes, the page cache empty at its begin."""
        for path in self._paths:
            drop_cache(path)
        start = threading.Barrier(3)
        workers = [
            threading.Thread(target=self._read, args=(replay.reads, start)),
            threading.Thread(target=self._write, args=(replay.transactions, start)),
        ]
        for worker in workers:
            worker.start()
        start.wait()
        begun = time.perf_counter()
        for worker in workers:
            worker.join()
        return time.perf_counter() - begun

    def _read(self, spans: list[Span], start: threading.Barrier) -> None:
        room = memoryview(bytearray(max((span.size for span in spans), default=1)))
        handle = os.open(self._paths[0], os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        start.wait()
        for span in spans:
            done = 0
            while done < span.size:
                done += os.preadv(handle, [room[done : span.size]], span.offset + done)
        os.close(handle)

    def _write(self, transactions: list[list[Span]], start: threading.Barrier) -> None:
        data = memoryview(self._data)
        handle = os.open(self._paths[1], os.O_WRONLY)
        through = os.open(self._paths[1], os.O_WRONLY | os.O_DSYNC)
        start.wait()
        for spans in transactions:
            for span in spans:
                done = 0
                while done < span.size:
                    done += os.pwrite(handle, data[: min(span.size - done, len(data))], span.offset + done)
            os.fdatasync(handle)
            os.pwrite(through, data[:PAGE_BYTES], 0)
        os.close(handle)
        os.close(through)
