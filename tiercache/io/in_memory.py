"""Tables from arrays in memory or from the state dict of a model: key i is row i, or the keys are given too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.errors import ImportExportError
from tiercache.io.table_reader import Column, TableReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiercache.store.table import Table


def read_array(place: str, table: Table, arrays: Mapping[str, Any], names: Mapping[str, str]) -> TableReader:
    """Return the reader of a table's array: a vector for each key (n, dim), or a pair of keys (n,) and vectors.

    It is the array that ``names`` gives to the table, else the one of the table's own name or ``NAME.weight``, else the
    only one that ends with ``.NAME`` or ``.NAME.weight``. Raises ImportExportError where there is none, and for
    anything but arrays and dense tensors of the table's shape and dtype.
    """
    own = names.get(table.name)
    exact = [name for name in ([own] if own else [table.name, f"{table.name}.weight"]) if name in arrays]
    suffixes = () if own else (f".{table.name}", f".{table.name}.weight")
    found = exact[:1] or [name for name in arrays if name.endswith(suffixes)]
    if len(found) != 1:
        seen = f"no {own!r}" if own else "several arrays" if found else "no array"
        shown = ", ".join(list(arrays)[:12]) + (", ..." if len(arrays) > 12 else "")
        raise ImportExportError(
            f"{place} has {seen} for table {table.name!r}: name one of {shown} for it, as "
            f"names={{{table.name!r}: ...}} or --map {table.name}=..."
        )
    what, value = f"{found[0]!r} in {place}", arrays[found[0]]
    keys, vectors = value if isinstance(value, tuple) and len(value) == 2 else (None, value)
    vector = _column(what, vectors)
    if keys is not None:
        key = _column(f"the keys of {what}", keys)
    else:
        key = Column((vector.shape or (0,))[:1], "int64", lambda rows: np.arange(rows.start, rows.stop))
    return TableReader(what, table, {"keys": key, "vector": vector})


def _column(what: str, values: Any) -> Column:
    if isinstance(values, np.ndarray):
        return Column.of(values)
    if hasattr(values, "is_meta") and hasattr(values, "layout"):  # a tensor, without importing torch
        return Column.of_tensor(values, what)
    raise ImportExportError(
        f"{what} is of {type(values).__name__}: give an array or a tensor, or a pair (keys, vectors)"
    )
