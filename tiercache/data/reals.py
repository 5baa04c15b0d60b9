"""Columns to float32: labels, dense features and weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import types

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tiercache.data.source import SourceBatch


@dataclass(frozen=True, slots=True)
class Nulls:
    """What null and NaN mean in a column of numbers."""

    advice: str
    """Said where they, or infinite numbers, are errors."""
    fill: float | None = None
    """The number that null and NaN stand for; None: they are errors."""


def reals(
    batch: SourceBatch,
    column: str,
    rule: Nulls,
    *,
    values: Any = None,
    lengths: NDArray[np.int64] | None = None,
) -> NDArray[np.float32]:
    """Return a column of numbers or bools as float32, all finite. Raises SourceError naming file, row and column.

    values, lengths: the values of a column of lists, and how many belong to each row.
    """
    array = batch.columns.column(column) if values is None else values
    with np.errstate(over="ignore"):  # what overflows becomes infinite, and infinite is refused below
        out = _plain(array).astype(np.float32)
    if rule.fill is not None:
        missing = np.isnan(out)
        if array.null_count:
            missing |= array.is_null().to_numpy(zero_copy_only=False)
        out[missing] = rule.fill
    elif array.null_count:
        at = int(array.is_null().to_numpy(zero_copy_only=False).argmax())
        raise batch.error(_row(at, lengths), column, f"it is null, but {rule.advice}")
    is_finite = np.isfinite(out)
    if not is_finite.all():
        at = int(is_finite.argmin())
        raise batch.error(_row(at, lengths), column, f"it is {array[at].as_py()}, but {rule.advice}")
    return out


def _plain(array: Any) -> NDArray[Any]:
    if types.is_null(array.type):
        return np.full(len(array), np.nan)
    if types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    elif types.is_decimal(array.type):
        array = array.cast(pa.float64())
    if array.null_count and types.is_integer(array.type):
        array = array.fill_null(0)
    return array.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _row(at: int, lengths: NDArray[np.int64] | None) -> int:
    return at if lengths is None else int(np.searchsorted(np.cumsum(lengths), at, side="right"))
