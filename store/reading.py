"""Reading blocks, every byte checked against what was written."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.store.blocks import KEYS, ROWS, block_name, checksum, corrupt_block, piece_checksums
from tiercache.store.engine import Form
from tiercache.store.errors import BlockReadError, CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiercache.store.blocks import Checksums
    from tiercache.store.commit import Commit
    from tiercache.store.counters import Counters
    from tiercache.store.engine import Engine
    from tiercache.store.segment import Segment
    from tiercache.store.table import Group


class Check(NamedTuple):
    """Pieces [low, high) of a segment stream as they were read, not checked yet."""

    segment: Segment
    group: int
    low: int
    high: int
    data: NDArray[np.uint8]


class BlockReader:
    """Reads pieces, keys and dense state from an engine; from any thread."""

    def __init__(self, engine: Engine, groups: Sequence[Group], label: str, counters: Counters) -> None:
        self._engine, self._groups, self._label, self._counters = engine, groups, label, counters
        self.checksums: Checksums = piece_checksums

    def pieces(
        self,
        segment: Segment,
        group: int,
        low: int,
        high: int,
        out: NDArray[np.uint8],
        checks: list[Check] | None = None,
    ) -> None:
        """Fill ``out`` with pieces [low, high): see ``Store.read``."""
        stream = segment.streams[group]
        if not 0 <= low <= high <= stream.num_pieces:
            raise ValueError(
                f"pieces {low} to {high} of segment {segment.id} are not there: it has {stream.num_pieces}"
            )
        offset = stream.piece_offset_P
        size = int(offset[high] - offset[low])
        if out.dtype != np.uint8 or out.size != size or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.size:,} of {out.dtype}: it must be {size:,} contiguous bytes")
        if low == high:
            return
        first, last = int(stream.piece_block_P[low]), int(stream.piece_block_P[high - 1])
        start, begin = int(offset[low] - offset[stream.block_piece_B[first]]), 0
        for block in range(first, last + 1):
            end = min(size, int(offset[stream.block_piece_B[block + 1]] - offset[low]))
            self._block(block_name(ROWS, segment.id, group, block), start, out[begin:end], segment, group, block)
            begin, start = end, 0
        if checks is None:
            self.check([Check(segment, group, low, high, out)])
        else:
            checks.append(Check(segment, group, low, high, out))
        self._counters.add(row_bytes_read=size, rows_read=size // stream.row_bytes, reads=last + 1 - first)

    def check(self, checks: Sequence[Check]) -> None:
        """Check pieces that were read, all by one computation. Raises CorruptBlockError."""
        parts = []
        for segment, group, low, high, out in checks:
            offset = segment.streams[group].piece_offset_P
            parts.append((out, offset[low : high + 1] - offset[low]))
        seen, begin = self.checksums(parts), 0
        for segment, group, low, high, _ in checks:
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
