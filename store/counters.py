"""What a store has read and written since it was opened."""

from __future__ import annotations

import threading


class Counters:
    """Plain numbers, each only ever growing; all bytes are of blocks, without what an engine adds."""

    def __init__(self) -> None:
        self.row_bytes_written = 0
        self.key_bytes_written = 0
        self.changed_bytes_written = 0
        """Last changes of rows that were moved."""
        self.state_bytes_written = 0
        self.rows_written = 0
        self.row_bytes_read = 0
        """By ``read`` and ``read_rows``, whole pages."""
        self.key_bytes_read = 0
        self.changed_bytes_read = 0
        self.state_bytes_read = 0
        self.rows_read = 0
        """By ``read``: rows of the pages; by ``read_rows``: rows returned."""
        self.reads = 0
        """Calls of the engine."""
        self.transactions = 0
        self.commits = 0
        self.blocks_freed = 0
        self.spill_bytes_written = 0
        """To temporary files, by scans and fills that exceed their memory."""
        self.spill_bytes_read = 0
        self._lock = threading.Lock()

    @property
    def bytes_written(self) -> int:
        """Rows, keys, last changes and state."""
        return self.row_bytes_written + self.key_bytes_written + self.changed_bytes_written + self.state_bytes_written

    @property
    def bytes_read(self) -> int:
        """Rows, keys, last changes and state."""
        return self.row_bytes_read + self.key_bytes_read + self.changed_bytes_read + self.state_bytes_read

    def add(self, **amounts: int) -> None:
        """Add to counters by name; from any thread."""
        with self._lock:
            mine = self.__dict__
            for name, amount in amounts.items():
                mine[name] += amount
