"""The column types that each part of a schema accepts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from pyarrow import types

from tiercache.data.columns import is_list, plain_type
from tiercache.errors import SourceError
from tiercache.schema_parts import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tiercache.schema import Schema

Use = Literal["number", "own", "integer", "string", "part", "cut"]
_USE_OF_KEY: dict[str, Use] = {
    "integer": "integer", "string": "string", "hex": "string", "bucket": "number", "cross": "part",
}  # fmt: skip
_EXPECTED = {
    "number": "numbers", "own": "numbers or bools", "integer": "integers", "string": "strings",
    "part": "integers or strings", "cut": "numbers, strings, dates or times",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ColumnUse:
    """One use of a column: the user, the kind of use, and whether values are lists."""

    column: str
    who: str
    use: Use
    is_list: bool = False
    dtype: str | None = None
    """The dtype of a kept column, if the schema has one."""


def column_uses(schema: Schema, cut_column: str | None) -> tuple[ColumnUse, ...]:
    """Return every use of a column by the schema, and by the cut of passes."""
    uses = []
    if schema.label is not None:
        uses.append(ColumnUse(schema.label, "the label", "number"))
    uses += [ColumnUse(d.column, "a dense feature", "number") for d in schema.dense]
    uses += [ColumnUse(one.column, "a label", "own", dtype=one.dtype) for one in schema.labels]
    uses += [ColumnUse(one.column, "keep", "own", dtype=one.dtype) for one in schema.keep]
    for f in schema.features:
        use = _USE_OF_KEY[str(f.key)]
        uses += [ColumnUse(column, f"feature {f.name!r}", use, f.hotness != "one_hot") for column in f.columns]
        if f.weights is not None:
            uses.append(ColumnUse(f.weights, f"the weights of feature {f.name!r}", "number", f.hotness != "one_hot"))
    if cut_column is not None:
        uses.append(ColumnUse(cut_column, "the cut of passes", "cut"))
    return tuple(uses)


def check_columns(path: Path | str, arrow_schema: Any, uses: Iterable[ColumnUse]) -> None:
    """Raise SourceError unless an Arrow schema has every used column, once, with a type its uses can take."""
    uses = tuple(uses)
    used_as = uses_by_column(uses)
    for use in uses:
        indices = arrow_schema.get_all_field_indices(use.column)
        if not indices:
            close = nearest(use.column, set(arrow_schema.names))
            raise SourceError(f"{path} has no column {use.column!r}{close}, which {use.who} needs")
        if len(indices) > 1:
            raise SourceError(f"{path} has {len(indices)} columns {use.column!r}: name each column once")
        kind = arrow_schema.field(indices[0]).type
        plain = plain_type(kind, used_as[use.column])
        if not _fits(plain, use):
            expected = f"lists of {_EXPECTED[use.use]}" if use.is_list else _EXPECTED[use.use]
            raise SourceError(
                f"{path}, column {use.column!r}: it holds {kind}, but {use.who} needs {expected}: {_change(plain, use)}"
            )


def uses_by_column(uses: Iterable[ColumnUse]) -> dict[str, set[Use]]:
    """Return the kinds of use of each column."""
    by_column: dict[str, set[Use]] = {}
    for use in uses:
        by_column.setdefault(use.column, set()).add(use.use)
    return by_column


def kind_of(column_type: Any) -> Literal["integer", "string", "null"] | None:
    """Return the kind of keys that a type gives; None: no keys."""
    if types.is_dictionary(column_type):
        column_type = column_type.value_type
    if types.is_integer(column_type):
        return "integer"
    if types.is_null(column_type):
        return "null"
    is_text = types.is_string(column_type) or types.is_large_string(column_type)
    is_bytes = types.is_binary(column_type) or types.is_large_binary(column_type)
    return "string" if is_text or is_bytes else None


def csv_types(
    names: Iterable[str], guessed: Any, uses: Iterable[ColumnUse], declared: dict[str, str]
) -> dict[str, Any]:
    """Return the types to read the used columns of a text file as.

    The type of a key decides, then a kept column, which is bool, int64 or float64. Labels and numbers are float64, or
    bool if the first lines are. The type of a column in a cross comes from another feature, the schema (``declared``)
    or the first lines.
    """
    uses, chosen = tuple(uses), dict[str, Any]()
    by_column = uses_by_column(uses)
    for column in (name for name in names if name in by_column and name in guessed.names):
        kinds, guess = by_column[column], guessed.field(column).type
        if "integer" in kinds:
            chosen[column] = pa.int64()
        elif "string" in kinds:
            chosen[column] = pa.string()
        elif "part" in kinds:
            kind = declared.get(column) or kind_of(guess) or "string"
            chosen[column] = pa.int64() if kind == "integer" else pa.string()
        elif "own" in kinds:
            dtypes = {use.dtype for use in uses if use.column == column and use.dtype is not None}
            chosen[column] = _text_type(next(iter(dtypes), None), guess)
        elif "number" in kinds:
            chosen[column] = pa.bool_() if types.is_boolean(guess) else pa.float64()
        else:
            chosen[column] = pa.string()
    return chosen


def dtype_of(kind: Any) -> str:
    """Return the dtype of numbers or bools of a plain type: int64 for whole decimals, float64 for others and nulls."""
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_boolean(kind):
        return "bool"
    if types.is_decimal(kind) and kind.scale <= 0:
        return "int64"
    return np.dtype(kind.to_pandas_dtype()).name if types.is_integer(kind) or types.is_floating(kind) else "float64"


def _text_type(dtype: str | None, guess: Any) -> Any:
    """Return the type that text is read as for a kept column of a dtype; None: by the first lines."""
    kind = np.dtype(dtype_of(guess) if dtype is None else dtype).kind
    return {"b": pa.bool_(), "i": pa.int64(), "u": pa.int64()}.get(kind, pa.float64())


def _fits(kind: Any, use: ColumnUse) -> bool:
    if types.is_null(kind):
        return True
    if use.is_list:
        if not is_list(kind):
            return False
        kind = kind.value_type
    if use.use in ("number", "own"):
        return bool(
            types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)
        )
    if use.use == "cut":
        return not types.is_nested(kind) and not types.is_interval(kind)
    if use.use == "integer" and types.is_floating(kind):
        return True  # for whole numbers, which are checked value by value
    return kind_of(kind) in ("integer", "string", "null") if use.use == "part" else kind_of(kind) in (use.use, "null")


def _change(kind: Any, use: ColumnUse) -> str:
    """Return the advice for a column of a wrong type."""
    if is_list(kind) and not use.is_list:
        takes_lists = use.use != "part" and use.who.startswith("feature") and _fits(kind, replace(use, is_list=True))
        return 'set hotness = "ragged" for the feature' if takes_lists else "put one value in each row of the column"
    if use.is_list and not is_list(kind):
        return 'set hotness = "one_hot" for the feature, or put lists in the column'
    inner = kind.value_type if is_list(kind) else kind
    key_kind = kind_of(inner)
    if use.use == "integer" and key_kind == "string":
        return 'set key = "string" for the feature (or "hex" for hexadecimal digits), or cast the column to integers'
    if use.use == "string" and (key_kind == "integer" or types.is_decimal(inner)):
        return 'set key = "integer" for the feature, or cast the column to strings'
    if use.use == "own" and not types.is_nested(inner):
        return "keep a column of numbers, such as a code or a time in seconds, or make it a feature"
    if types.is_nested(inner):
        return "put the values to read in a separate column"
    return f"cast the column to {_EXPECTED[use.use]}"
