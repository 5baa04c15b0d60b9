"""The engine that is a dict: the executable definition of the others, and what tests run on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.engines.engine import WRITE_BYTES
from tiercache.store.records import digest, update
from tiercache.store.store_errors import BlockReadError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.engines.engine import Block, Data, ReadRequest

    Name = tuple[bytes, int, int, int]


class MemoryEngine:
    """Blocks and records in memory. The same instance opened again is the same store: closing loses nothing.

    Do not use it for rows that must outlive the process.
    """

    lease_folder: Path | None = None
    memory_bytes = WRITE_BYTES

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        """``capacity_bytes`` bounds the blocks, as a disk would; None bounds nothing."""
        self.label = "the store in memory"
        self.blocks: dict[Name, NDArray[np.uint8]] = {}
        """By kind, owner, group and index."""
        self.capacity_bytes = capacity_bytes
        self.by_name: dict[str, bytes] = {}
        """The records."""
        self._lock = threading.Lock()

    def records(self) -> Mapping[str, bytes]:
        """Return a copy."""
        with self._lock:
            return dict(self.by_name)

    def digests(self) -> Mapping[str, str]:
        """Compute them."""
        return {name: digest(data) for name, data in self.records().items()}

    def drop_records(self) -> None:
        """Nothing: they are the store."""

    def commit(self, records: Mapping[str, bytes | None]) -> None:
        """Set and remove under one lock."""
        with self._lock:
            update(self.by_name, records)

    def write(self, blocks: Iterable[Data], *, stable: bool = False) -> list[int]:
        """Keep copies of all blocks, or of none."""
        copies = {block[:4]: np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8) for block, data in blocks}
        with self._lock:
            held = sum(block.size for block in self.blocks.values())
            added = sum(block.size for block in copies.values())
            if self.capacity_bytes is not None and held + added > self.capacity_bytes:
                raise StoreFullError(
                    needed_bytes=added,
                    limit=f"the memory engine may hold {self.capacity_bytes:,} and holds {held:,}",
                    advice="raise capacity_bytes",
                )
            self.blocks.update(copies)
        return [0] * len(copies)

    def read(self, request: ReadRequest) -> None:
        """Copy bytes of a block."""
        block, offset, out = request
        if problem := self.problem(block):
            raise BlockReadError(problem)
        if offset + out.size > block.size:
            raise BlockReadError(f"ends at byte {block.size:,} of {offset + out.size:,}")
        out[:] = self.blocks[block[:4]][offset : offset + out.size]

    def problem(self, block: Block) -> str:
        """Compare with what is there."""
        data = self.blocks.get(block[:4])
        if data is None:
            return "is missing"
        return "" if data.size == block.size else f"has {data.size:,} bytes of {block.size:,}"

    def retain(self, blocks: Iterable[Block]) -> None:
        """Drop all others."""
        names = {block[:4] for block in blocks}
        with self._lock:
            self.blocks = {name: data for name, data in self.blocks.items() if name in names}

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop them."""
        with self._lock:
            for block in blocks:
                self.blocks.pop(block[:4], None)

    def shrink(self) -> None:
        """Do nothing: nothing free is held."""

    def close(self) -> None:
        """Keep everything, for the next opening."""
