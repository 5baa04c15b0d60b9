"""Columns that folders named ``name=value`` give: their values as the schema uses them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from tiercache.data.column_types import kind_of
from tiercache.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiercache.data.column_types import ColumnUse
    from tiercache.data.inputs import InputFile

_INTEGER = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_BOOLS = {"true": True, "false": False}


def partition_values(file: InputFile, uses: Iterable[ColumnUse]) -> dict[str, Any]:
    """Return columns that the folders of a file give, as Arrow scalars; uses: of columns that the file lacks.

    A column that some use needs as strings is a string; other keys are integers, which keep 64 bits up to 2^64.
    Columns of crosses and cuts alone are integers if they look so. Raises SourceError for a value that does not fit.
    """
    found: dict[str, Any] = {}
    by_column: dict[str, dict[str, str]] = {}
    for use in uses:
        by_column.setdefault(use.column, {}).setdefault(use.use, use.who)
    for name, text in partition_texts(file, by_column).items():
        found[name] = pa.scalar(None, pa.null()) if text is None else _scalar(file, name, text, by_column[name])
    return found


def partition_texts(file: InputFile, names: Iterable[str]) -> dict[str, str | None]:
    """Return the texts of those columns that the folders of a file give. Raises SourceError if two folders differ."""
    found = {}
    for name in names:
        texts = {text for column, text in file.partition if column == name}
        if len(texts) > 1:
            raise SourceError(f"{file.path} lies in several folders {name!r} of different values: rename all but one")
        for text in texts:
            found[name] = text
    return found


def check_repeated(file: InputFile, name: str, text: str | None, array: Any, row: int) -> None:
    """Raise SourceError if a column of the file has another value than its folder; row: in the file, of the first.

    Integers and strings are compared; columns of other types are not.
    """
    kind = kind_of(array.type)
    if kind not in ("integer", "string"):
        return
    plain = array.dictionary_decode() if types.is_dictionary(array.type) else array
    try:
        if text is None:
            differs = plain.is_valid()
        elif kind == "integer":
            differs = pc.fill_null(pc.not_equal(plain, pa.scalar(_integer(text), plain.type)), True)
        else:
            expected = pa.scalar(text.encode(), pa.large_binary())
            differs = pc.fill_null(pc.not_equal(plain.cast(pa.large_binary()), expected), True)
    except (ValueError, OverflowError):  # no number, none of the column's type, or no UTF-8
        differs = pa.repeat(True, len(plain))
    if differs.true_count:
        at = int(np.argmax(differs.to_numpy(zero_copy_only=False)))
        said = "null" if text is None else repr(text)
        raise SourceError(
            f"{file.path}, row {row + at}, column {name!r}: it is {plain[at].as_py()!r}, but its folder says {said}: "
            "correct one of them, or rename the folder"
        )


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError(text)
    return int(text)


def _scalar(file: InputFile, name: str, value: str, wanted: dict[str, str]) -> Any:
    def refuse(use: str, what: str, change: str) -> SourceError:
        return SourceError(
            f"{file.path}, column {name!r}: its folder says {value!r}, but {wanted[use]} needs {what}: {change}"
        )

    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise refuse(next(iter(wanted)), "text in UTF-8", "rename the folder")
    if "string" in wanted:
        return pa.scalar(value)
    number = int(value) if _INTEGER.fullmatch(value) and len(value) < 400 else None
    if number is not None and -(1 << 63) <= number < 1 << 64:
        return pa.scalar(number, pa.int64() if number < 1 << 63 else pa.uint64())
    if "integer" in wanted:
        raise refuse("integer", "integers from -2^63 to 2^64 - 1", 'rename the folder, or say key = "string"')
    if "number" in wanted:
        if value.lower() in _BOOLS:
            return pa.scalar(_BOOLS[value.lower()])
        if not _NUMBER.fullmatch(value):
            raise refuse("number", "numbers", "rename the folder")
        return pa.scalar(float(value))
    if "part" in wanted and number is not None:
        raise refuse("part", "integers below 2^64 or strings", "rename the folder")
    return pa.scalar(value)
