"""The vectors of rows that are used for the first time, as rows are kept: in words of 4 bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.kernels.initial import initial_rows
from tiercache.store.table import initializer_code
from tiercache.store.vectors import to_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tiercache.store.table import Table

_BATCH_NUMBERS = 1 << 16


def first_vectors(table: Table, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    """Write the initial vector of each key (n,) to its words (n, words), rounded to the nearest of the table's dtype.

    For 16-bit dtypes takes about 16 bytes a number beside them, for 65,536 numbers or a row at a time: a MiB.
    """
    how = table.table_id, table.seed, *initializer_code(table.initializer)
    if table.dtype == "float32":
        initial_rows(keys, *how, out)
        return
    step = max(1, _BATCH_NUMBERS // table.dim)
    vectors = np.empty((min(step, keys.size), table.dim), dtype=np.float32)
    for first in range(0, keys.size, step):
        some = np.ascontiguousarray(keys[first : first + step])
        initial_rows(some, *how, vectors[: some.size])
        to_words(table.fields[0], vectors[: some.size], out[first : first + step])
