"""The array functions of a store, from libraries; training replaces them by kernels that return the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tiercache.store.bits import hash_runs
from tiercache.store.key_map import map_entries
from tiercache.store.layout import page_checksums

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store.key_map import Entries
    from tiercache.store.layout import Part


class Compute(NamedTuple):
    """Functions over arrays; each may be called by any thread."""

    checksums: Callable[[Sequence[Part]], NDArray[np.uint32]] = page_checksums
    hashes: Callable[[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64]], NDArray[np.uint64]] = hash_runs
    map_entries: Entries = map_entries
