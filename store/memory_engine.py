"""The engine that is a dict: the executable definition of the others, and what tests run on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.engine import Contents
from tiercache.store.errors import BlockReadError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from tiercache.store.engine import Block, Form


class MemoryEngine:
    """Blocks and records in memory. The same instance opened again is the same store: closing loses nothing.

    Do not use it for rows that must outlive the process.
    """

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        """``capacity_bytes`` bounds the blocks, as a disk would; None bounds nothing."""
        self.records: dict[str, bytes] = {}
        self.blocks: dict[bytes, NDArray[np.uint8]] = {}
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()

    def write(self, blocks: Iterable[Block], *, stable: bool = False) -> None:
        """Keep copies of all blocks, or of none."""
        copies = {name: np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8) for name, data, _ in blocks}
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

    def read(self, name: bytes, offset: int, out: NDArray[np.uint8], form: Form | None = None) -> None:
        """Copy bytes of a block."""
        block = self.blocks.get(name)
        if block is None:
            raise BlockReadError("is missing")
        if offset + out.size > block.size:
            raise BlockReadError(f"ends at byte {block.size:,} of {offset + out.size:,}")
        out[:] = block[offset : offset + out.size]

    def commit(self, records: Mapping[str, bytes | None], dead: Iterable[bytes], *, shrink: bool = False) -> None:
        """Set and remove under one lock."""
        with self._lock:
            for name, data in records.items():
                if data is None:
                    self.records.pop(name, None)
                else:
                    self.records[name] = bytes(data)
            for block in dead:
                self.blocks.pop(block, None)

    def contents(self) -> Contents:
        """Return names and sizes."""
        with self._lock:
            return Contents(dict(self.records), {name: block.size for name, block in self.blocks.items()})

    def close(self) -> None:
        """Keep everything, for the next opening."""
