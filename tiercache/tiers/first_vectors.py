"""The vectors of rows that are used for the first time: the one place where a training makes them on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.kernels.cpu.initial import initial_rows
from tiercache.store.table import initializer_code
from tiercache.store.vectors import nearest, to_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tiercache.store.table import Table

_BATCH_NUMBERS = 1 << 16


def first_vectors(table: Table, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    """Write the initial vector of each key (n,) to its words (n, words), rounded to the nearest of the table's dtype.

    For 16-bit dtypes and for column slices takes about 16 bytes a number beside them, for 65,536 numbers or a row at a
    time: a MiB.
    """
    if table.dtype == "float32":
        _write(table, keys, out)
        return
    step = max(1, _BATCH_NUMBERS // table.dim)
    vectors = np.empty((min(step, keys.size), table.dim), dtype=np.float32)
    for first in range(0, keys.size, step):
        some = keys[first : first + step]
        _write(table, some, vectors[: some.size])
        to_words(table.fields[0], vectors[: some.size], out[first : first + step])


def initial_vectors(table: Table, keys: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the initial vectors of keys (n,), rounded to the nearest of the table's dtype: float32 (n, dim)."""
    vectors = np.empty((keys.size, table.dim), dtype=np.float32)
    _write(table, keys, vectors)
    return nearest(vectors, table.dtype)


def _write(table: Table, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    """Write vectors (n, dim) that are not rounded; those of a column slice are cut out of the whole ones."""
    how = table.table_id, table.seed, *initializer_code(table.initializer)
    if table.whole_dim is None:
        initial_rows(np.ascontiguousarray(keys), *how, out)
        return
    width = table.first_column + table.dim  # a vector begins with the numbers of a narrower one
    step = max(1, _BATCH_NUMBERS // width)
    whole = np.empty((min(step, keys.size), width), dtype=np.float32)
    for first in range(0, keys.size, step):
        some = np.ascontiguousarray(keys[first : first + step])
        initial_rows(some, *how, whole[: some.size])
        out[first : first + some.size] = whole[: some.size, table.first_column :]
