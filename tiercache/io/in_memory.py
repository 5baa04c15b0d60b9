"""Tables from arrays in memory or from the state dict of a model: key i is row i, or the keys are given too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.errors import ImportExportError
from tiercache.io.table_reader import Column, TableReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiercache.store.table import Table

__all__ = ["find_array", "read_array"]


def find_array(place: object, table: Table, arrays: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return the name of a table's array among ``arrays``.

    It is the one that ``names`` gives to the table, else the table's own name, ``NAME.weight``, or the only one that
    ends with ``.NAME`` or ``.NAME.weight``. Raises ImportExportError.
    """
    own = names.get(table.name)
    suffixes = (f".{table.name}", f".{table.name}.weight")
    found = [name for name in (own or table.name, f"{table.name}.weight") if name in arrays][:1]
    if own is None and not found:
        found = [name for name in arrays if name.endswith(suffixes)]
    if len(found) == 1 and (own is None or found == [own]):
        return found[0]
    shown = ", ".join(list(arrays)[:12]) + (", ..." if len(arrays) > 12 else "")
    seen = f"no {own!r}" if own else "several arrays" if found else "no array"
    raise ImportExportError(
        f"{place} has {seen} for table {table.name!r}: name one of {shown} for it, as names={{{table.name!r}: ...}} or "
        f"--map {table.name}=..."
    )


def read_array(place: str, name: str, table: Table, value: Any) -> TableReader:
    """Return the reader of one table: a vector for each key (n, dim), or a pair of keys (n,) and vectors.

    Raises ImportExportError for anything but arrays and dense tensors of the table's shape and dtype.
    """
    keys, vectors = value if isinstance(value, tuple) and len(value) == 2 else (None, value)
    what = f"{name!r} in {place}"
    column = _column(what, vectors)
    rows = column.shape[0] if column.shape else 0
    columns = {
        "keys": Column.of_row_numbers(rows) if keys is None else _column(f"the keys of {what}", keys),
        "vector": column,
    }
    return TableReader(f"{what}", table, columns)


def _column(what: str, values: Any) -> Column:
    if isinstance(values, np.ndarray):
        return Column.of(values)
    if hasattr(values, "is_meta") and hasattr(values, "layout"):  # a tensor, without importing torch
        return Column.of_tensor(values, what)
    raise ImportExportError(
        f"{what} is of {type(values).__name__}: give an array or a tensor, or a pair (keys, vectors)"
    )
