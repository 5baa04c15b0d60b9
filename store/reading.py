"""Reading blocks, every byte checked against what was written."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.store.blocks import KEYS, ROWS, block_name, checksum, corrupt_block, piece_checksums
from tiercache.store.engine import Form
from tiercache.store.errors import BlockReadError, CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.store.blocks import Checksums
    from tiercache.store.commit import Commit
    from tiercache.store.counters import Counters
    from tiercache.store.engine import Engine
    from tiercache.store.segment import Segment
    from tiercache.store.table import Group


_SHORT_READS, _LONG_READS = 4, 2
"""How many are made at once: short ones keep a disk busy only together; of long ones one is read, one checked."""
_LONG_BYTES = 512 << 10
_CHECK_BYTES = 4 << 20
"""Bytes that are checked by one computation, while others are read."""


class Pieces(NamedTuple):
    """Pieces [low, high) of a segment stream, and the bytes that they are to fill."""

    segment: Segment
    group: int
    low: int
    high: int
    out: NDArray[np.uint8]


class BlockReader:
    """Reads pieces, keys and dense state from an engine; from any thread."""

    def __init__(self, engine: Engine, groups: Sequence[Group], label: str, counters: Counters) -> None:
        self._engine, self._groups, self._label, self._counters = engine, groups, label, counters
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self.checksums: Checksums = piece_checksums

    def close(self) -> None:
        """End the threads; what they read is read to its end."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()

    def load(self, wanted: Sequence[Pieces], at_once: int | None) -> None:
        """Read and check all of ``wanted``: see ``Store.load``."""
        for pieces in wanted:
            self._expect(pieces)
        if at_once is None:
            num_bytes = sum(pieces.out.size for pieces in wanted)
            at_once = _LONG_READS if num_bytes >= _LONG_BYTES * len(wanted) else _SHORT_READS
        if min(at_once, len(wanted)) < 2:
            self._work(iter(wanted))
            return
        left = _Shared(wanted)
        try:
            with self._lock:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(_SHORT_READS, thread_name_prefix="tiercache-reads")
                jobs = [self._threads.submit(self._share, left) for _ in range(min(at_once, len(wanted)))]
            wait(jobs)
        finally:
            left.stop()  # whoever gave the memory may give it to others when this raises, interrupted or not
        for job in jobs:
            job.result()

    def _share(self, left: _Shared) -> None:
        with left:
            self._work(left)

    def _work(self, wanted: Iterator[Pieces]) -> None:
        """Read what comes next until nothing does, and check it."""
        read, size = list[Pieces](), 0
        try:
            for pieces in wanted:
                self._read(pieces)
                read.append(pieces)
                size += pieces.out.size
                if size >= _CHECK_BYTES:
                    self._check(read)
                    read, size = [], 0
            self._check(read)
        except BaseException:
            for _ in wanted:
                pass  # the others need not read what is of no use now
            raise

    def _expect(self, pieces: Pieces) -> None:
        segment, group, low, high, out = pieces
        stream = segment.streams[group]
        if not 0 <= low <= high <= stream.num_pieces:
            raise ValueError(
                f"pieces {low} to {high} of segment {segment.id} are not there: it has {stream.num_pieces}"
            )
        size = int(stream.piece_offset_P[high] - stream.piece_offset_P[low])
        if out.dtype != np.uint8 or out.size != size or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.size:,} of {out.dtype}: it must be {size:,} contiguous bytes")

    def _read(self, pieces: Pieces) -> None:
        """Fill ``out``, by one read of the engine for each block."""
        segment, group, low, high, out = pieces
        if low == high:
            return
        stream = segment.streams[group]
        offset = stream.piece_offset_P
        first, last = int(stream.piece_block_P[low]), int(stream.piece_block_P[high - 1])
        start, begin = int(offset[low] - offset[stream.block_piece_B[first]]), 0
        for block in range(first, last + 1):
            end = min(out.size, int(offset[stream.block_piece_B[block + 1]] - offset[low]))
            self._block(block_name(ROWS, segment.id, group, block), start, out[begin:end], segment, group, block)
            begin, start = end, 0
        self._counters.add(row_bytes_read=out.size, rows_read=out.size // stream.row_bytes, reads=last + 1 - first)

    def _check(self, read: Sequence[Pieces]) -> None:
        """Check pieces that were read, all by one computation. Raises CorruptBlockError."""
        parts = []
        for segment, group, low, high, out in read:
            offset = segment.streams[group].piece_offset_P
            parts.append((out, offset[low : high + 1] - offset[low]))
        seen, begin = self.checksums(parts), 0
        for segment, group, low, high, _ in read:
            mine, expected = seen[begin : begin + high - low], segment.checksums[group][low:high]
            if not np.array_equal(mine, expected):
                i = int(np.argmax(mine != expected))
                block = int(segment.streams[group].piece_block_P[low + i])
                words = f"has checksum {mine[i]:08x} in piece {low + i}"
                raise corrupt_block(self._label, segment, self._groups[group], block, words, int(expected[i]))
            begin += high - low

    def keys(self, segment: Segment, group: int, block: int) -> NDArray[np.int64]:
        """Return the keys of the rows of one block. Raises CorruptBlockError."""
        stream = segment.streams[group]
        keys = np.empty(int(stream.block_bytes_B[block]) // stream.row_bytes, dtype=np.int64)
        data = keys.view(np.uint8)
        self._block(block_name(KEYS, segment.id, group, block), 0, data, segment, group, block)
        seen, expected = checksum(data), int(segment.key_checksums[group][block])
        if seen != expected:
            words = f"has checksum {seen:08x} over its keys"
            raise corrupt_block(self._label, segment, self._groups[group], block, words, expected)
        self._counters.add(key_bytes_read=data.size, reads=1)
        return keys

    def state(self, commit: Commit) -> NDArray[np.uint8]:
        """Return the dense state of ``commit``. Raises CorruptStoreError."""
        state = np.empty(commit.state_bytes, dtype=np.uint8)
        for i, (name, size) in enumerate(commit.state_blocks().items()):
            part = state[i * commit.state_chunk_bytes :][:size]
            try:
                self._engine.read(name, 0, part)
                seen, expected = checksum(part), int(commit.state_checksums[i])
                if seen != expected:
                    raise BlockReadError(f"has checksum {seen:08x} where {expected:08x} was written")
            except BlockReadError as error:
                raise CorruptStoreError(
                    f"block {i} of the dense state of commit {commit.id} of {self._label} {error.seen}: "
                    "restore the store from a copy, or train again from the start"
                ) from error
        self._counters.add(state_bytes_read=state.size, reads=commit.state_checksums.size)
        return state

    def _block(self, name: bytes, start: int, out: NDArray[np.uint8], segment: Segment, group: int, block: int) -> None:
        try:
            self._engine.read(name, start, out, Form(self._groups[group], segment.streams[group]))
        except BlockReadError as error:
            raise corrupt_block(self._label, segment, self._groups[group], block, error.seen) from error


class _Shared:
    """What several threads take from, one after another; each is at work within it."""

    def __init__(self, wanted: Sequence[Pieces]) -> None:
        self._left = iter(wanted)
        self._at_work = 0
        self._changed = threading.Condition()

    def __iter__(self) -> _Shared:
        return self

    def __next__(self) -> Pieces:
        with self._changed:
            return next(self._left)

    def __enter__(self) -> None:
        with self._changed:
            self._at_work += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._at_work -= 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Give nothing more, and end when no thread is at work: an interruption is raised only then."""
        interruption: KeyboardInterrupt | None = None
        while True:
            try:
                with self._changed:
                    self._left = iter(())
                    self._changed.wait_for(lambda: not self._at_work)
                break
            except KeyboardInterrupt as error:
                interruption = error
        if interruption is not None:
            raise interruption
