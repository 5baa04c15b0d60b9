"""Keys that come in hash order, taken up to a bound: what two sorted sources are merged with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.hashing import hash_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from tiercache.store.table import Table

    Int64s = NDArray[np.int64]


class Sweep:
    """Keys in hash order with something for each, of which a part is in memory."""

    def __init__(self, table: Table, parts: Iterable[tuple[Int64s, NDArray[Any]]]) -> None:
        self._table, self._parts = table, iter(parts)
        self.hashes: NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._keys: Int64s = np.empty(0, dtype=np.int64)
        self._values: NDArray[Any] = np.empty(0, dtype=np.float32)

    def fill(self) -> bool:
        """Have the next part where nothing is left of the one before; returns whether there is anything."""
        while not self.hashes.size:
            part = next(self._parts, None)
            if part is None:
                return False
            self._keys, self._values = part
            self.hashes = hash_keys(self._keys, self._table.table_id)
        return True

    def take(self, bound: int) -> tuple[NDArray[np.uint64], Int64s, NDArray[Any]]:
        """Return hashes, keys and values up to ``bound``."""
        at = int(np.searchsorted(self.hashes, np.uint64(bound), side="right"))
        taken = self.hashes[:at], self._keys[:at], self._values[:at]
        self.hashes, self._keys, self._values = self.hashes[at:], self._keys[at:], self._values[at:]
        return taken


def whole_keys(parts: Iterable[tuple[Int64s, NDArray[Any]]]) -> Iterator[tuple[Int64s, NDArray[Any]]]:
    """Yield the same keys and values, cut so that equal keys, which stand side by side, come together."""
    held: tuple[Int64s, NDArray[Any]] | None = None
    for keys, values in parts:
        if held is not None:
            keys, values = np.concatenate([held[0], keys]), np.concatenate([held[1], values])  # noqa: PLW2901
        last = keys.size - int(np.argmax(keys[::-1] != keys[-1])) if np.any(keys != keys[-1]) else 0
        held = keys[last:].copy(), values[last:].copy()
        if last:
            yield keys[:last], values[:last]
    if held is not None:
        yield held
