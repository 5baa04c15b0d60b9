"""An engine that is slow, for tests of whatever depends on timing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store.engine import Block, Contents, Engine, Form


class SlowEngine:
    """Passes calls to ``engine`` after a delay, so that what depends on timing shows."""

    def __init__(
        self, engine: Engine, *, read_seconds: float = 0.0, write_seconds: float = 0.0, commit_seconds: float = 0.0
    ) -> None:
        self.engine = engine
        self.read_seconds, self.write_seconds, self.commit_seconds = read_seconds, write_seconds, commit_seconds

    def write(self, blocks: Iterable[Block], *, stable: bool = False) -> None:
        """Wait, then write."""
        time.sleep(self.write_seconds)
        self.engine.write(blocks, stable=stable)

    def read(self, name: bytes, offset: int, out: NDArray[np.uint8], form: Form | None = None) -> None:
        """Wait, then read."""
        time.sleep(self.read_seconds)
        self.engine.read(name, offset, out, form)

    def commit(self, records: Mapping[str, bytes | None], dead: Iterable[bytes], *, shrink: bool = False) -> None:
        """Wait, then commit."""
        time.sleep(self.commit_seconds)
        self.engine.commit(records, dead, shrink=shrink)

    def contents(self) -> Contents:
        """Pass on."""
        return self.engine.contents()

    def close(self) -> None:
        """Pass on."""
        self.engine.close()
