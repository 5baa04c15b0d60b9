"""InMemoryCache: the same training with every row in memory; the baseline, and the oracle of the tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiercache.train.cache import TierCache

if TYPE_CHECKING:
    import os

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.data.dataset import PassDataset
    from tiercache.train.resident_rows import ResidentRows


class InMemoryCache(TierCache):
    """A `TierCache` without a store: all rows stay in arrays on the device, and nothing is committed.

    With the same seeds it trains the same batches as a cache with a store, with bit-identical results. Use it if your
    tables fit, or to measure what the tiers cost. It takes the arguments of ``TierCache(None, data, ...)``.
    """

    _rows: ResidentRows

    def __init__(self, data: PassDataset | str | os.PathLike[str], **arguments: Any) -> None:
        super().__init__(None, data, **arguments)

    def keys(self, table_name: str) -> NDArray[np.int64]:
        """Return all keys of a table, in the order of ``fields``."""
        return self._rows.keys[table_name]

    def fields(self, table_name: str) -> tuple[NDArray[np.float32], ...]:
        """Return the vectors and each optimizer state of a table, float32 (rows, width).

        They are views on a CPU, except for 16-bit vectors, and copies from a GPU.
        """
        return self._rows.read(table_name)
