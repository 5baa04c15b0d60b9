"""The parts of a schema: dense and sparse features, and the format of files. A wrong value is a SchemaError."""

from __future__ import annotations

import dataclasses
from functools import wraps
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from tiercache.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterable

_LARGEST = float(np.finfo(np.float32).max)
STRICT = ConfigDict(extra="forbid")

NULL_WORDS = (
    "", "NA", "N/A", "n/a", "#N/A", "#N/A N/A", "#NA", "NULL", "null", "NaN", "nan", "-NaN", "-nan", "1.#IND",
    "-1.#IND", "1.#QNAN", "-1.#QNAN", r"\N",
)  # fmt: skip
"""The default strings for null in text files."""

Text = Annotated[str, Field(min_length=1)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1, le=(1 << 31) - 1)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-_LARGEST, le=_LARGEST)]
_T = TypeVar("_T")
_EXPECTED = {
    "dict_type": "a table of keys and values",
    "string_type": "a string",
    "string_too_short": "not be empty",
    "tuple_type": "a list",
    "list_type": "a list",
    "int_type": "a whole number",
    "bool_type": "true or false",
}
"""The expected value, by pydantic's name of an error."""


def checked(cls: type[_T], where: str, values: dict[str, Any], known: Iterable[str] = ()) -> _T:
    """Build a part of a schema. Raises SchemaError, with a message that begins with ``where``.

    known: the keys that a message offers; empty: the fields of ``cls``.
    """
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        raise SchemaError(_message(cls, where, error, known)) from None


def unknown_key(where: str, key: object, known: Iterable[str]) -> str:
    """Return the message for an unknown key."""
    options = sorted(known)
    return (
        f"{where} has the unknown key {key!r}{nearest(str(key), set(options))}: the known keys are {', '.join(options)}"
    )


def nearest(name: str, known: set[str]) -> str:
    """Return `` (did you mean '...'?)`` if ``known`` has a similar name, else ""."""
    from difflib import get_close_matches

    close = get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def difference(one: Any, other: Any) -> tuple[str, Any, Any] | None:
    """Return the first field in which two features or two tables differ, and its values; None if they are equal."""
    for field in dataclasses.fields(one):
        values = getattr(one, field.name), getattr(other, field.name)
        if field.compare and values[0] != values[1]:
            return field.name, *values
    return None


def _message(cls: type[Any], where: str, error: ValidationError, known: Iterable[str] = ()) -> str:
    first = error.errors(include_url=False)[0]
    kind, value = first["type"], shorten(repr(first["input"]), 80)
    key = ".".join(str(part) for part in first["loc"])
    if kind == "value_error":
        return f"{where} {first['ctx']['error']}"
    if kind == "unexpected_keyword_argument":
        return unknown_key(where, key, known or (field.name for field in dataclasses.fields(cls)))
    if kind == "missing":
        return f"{where} has no {key!r}: add it"
    must = _EXPECTED.get(kind, first["msg"].removeprefix("Input should be "))
    return f"{where} has {key} = {value}: it must {'' if must.startswith('not') else 'be '}{must}"


def with_schema_errors(cls: type[_T]) -> type[_T]:
    """Make the constructor of a pydantic dataclass raise SchemaError."""
    plain = cls.__init__

    @wraps(plain)
    def construct(self: Any, **values: Any) -> None:
        try:
            plain(self, **values)
        except ValidationError as error:
            where = cls._WHERE.format(values.get("name", values.get("column")))  # type: ignore[attr-defined]
            raise SchemaError(_message(cls, where, error)) from None

    cls.__init__ = construct  # type: ignore[method-assign]
    return cls


@with_schema_errors
@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class DenseFeature:
    """A number per sample for the dense part of the model, as float32."""

    _WHERE = "dense feature {!r}"

    column: Text
    """The column of numbers."""
    null: Number | None = None
    """The number for null and NaN; None: they are errors."""
    transform: Literal["log"] | None = None
    """"log": a number x becomes log(1 + max(x, 0)), null too; None: numbers stay as they are."""


KeptDtype = Literal[
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"
]


@with_schema_errors
@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class KeptColumn:
    """One number or bool per sample, stored as it is: a label of several, or a column that your code needs."""

    _WHERE = "kept column {!r}"

    column: Text
    """The column of the data."""
    name: str = ""
    """Its name in a batch; empty: the name of the column."""
    dtype: KeptDtype | None = None
    """The dtype of the values; None: the dtype of the data, which the extraction fills in."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.column)


@with_schema_errors
@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class Feature:
    """Keys per sample, looked up in one table."""

    _WHERE = "feature {!r}"

    name: Text
    """The name of the feature; unique in the schema."""
    columns: tuple[Text, ...] = ()
    """The columns of its keys: one, or two and more for a cross. Empty: the column with the feature's name."""
    table: str = ""
    """The table for its keys; several features may share one. Empty: the table with the feature's name."""
    key: Literal["integer", "string", "hex", "bucket", "cross"] | None = None
    """"integer": values are keys. "string": hashes of them. "hex": text of hexadecimal digits. "bucket": the bucket of
    a number. "cross": hashes over columns. None: from ``buckets`` and the number of columns."""
    hotness: Literal["one_hot", "multi_hot", "ragged"] = "one_hot"
    """The number of keys of a sample: one, ``length``, or any number."""
    length: Count | None = None
    """The number of keys per sample, for hotness "multi_hot"."""
    max_length: Count | None = None
    """Maximum keys to keep of a list, the last ones; only for hotness "ragged"."""
    weights: Text | None = None
    """The column of float weights, one per key; None: all 1."""
    null: Literal["error", "embed"] = "error"
    """"error", or "embed": null has its own row."""
    buckets: tuple[Number, ...] = ()
    """Ascending boundaries of buckets: the key of x is the number of boundaries that are at most x."""
    num_buckets: Count | None = None
    """The key is a hash modulo this: XXH64 of a string, a cross, or an integer's 8 bytes. None: the key itself."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", self.columns or (self.name,))
        object.__setattr__(self, "table", self.table or self.name)
        usual = "bucket" if self.buckets else "integer" if len(self.columns) == 1 else "cross"
        object.__setattr__(self, "key", self.key or usual)
        if self.key == "cross" and (len(self.columns) < 2 or self.hotness != "one_hot"):
            raise ValueError("is a cross: it takes at least 2 columns and one key per sample")
        if self.key != "cross" and len(self.columns) != 1:
            raise ValueError(f'takes {len(self.columns)} columns: only key = "cross" takes more than one')
        if self.hotness == "multi_hot" and self.length is None:
            raise ValueError('has hotness = "multi_hot" and no length: set length to the number of keys per sample')
        if self.hotness != "multi_hot" and self.length is not None:
            raise ValueError(f'has length = {self.length}: only hotness = "multi_hot" takes one')
        if self.max_length is not None and self.hotness != "ragged":
            raise ValueError(f'has max_length = {self.max_length}: only hotness = "ragged" takes one')
        if (self.key == "bucket") != bool(self.buckets):
            raise ValueError(f'has key = {self.key!r} and {len(self.buckets)} buckets: key = "bucket" takes boundaries')
        if any(high <= low for low, high in zip(self.buckets, self.buckets[1:], strict=False)):
            raise ValueError(f"has buckets = {list(self.buckets)}: each boundary must be above the previous one")
        if self.num_buckets is not None and self.key == "bucket":
            raise ValueError("has buckets and num_buckets: set only one of them")


@with_schema_errors
@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class CsvFormat:
    """The format of CSV and TSV files; other formats ignore it."""

    _WHERE = "[csv]"

    header: Flag = True
    """True if the first line has the names of columns; otherwise ``SourceFormat.columns``, or f0, f1, ..."""
    types: dict[str, Literal["integer", "string"]] = dataclasses.field(default_factory=dict)
    """Types of columns used only in crosses; others are inferred from the first lines of each file."""
    list_separator: Text | None = None
    """The separator of list values within a field; None: text files have no lists."""
    delimiter: Text | None = None
    """The text between two fields; None: a comma, or a tab in TSV files. Several characters need ``quote=""``."""
    quote: Annotated[str, Field(max_length=1)] | None = None
    """The character around fields that hold delimiters or line breaks; empty: quotes are plain characters. None: ``"``,
    and in tab-separated text none."""
    null_words: tuple[str, ...] = NULL_WORDS
    """The strings for null: unquoted, and in numeric columns also quoted."""
    bad_rows: Literal["error", "skip", "pad"] = "error"
    """Rows with a different number of fields than the header: an error; skipped; or filled with null if fields are
    missing and skipped if there are too many."""


@with_schema_errors
@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class SourceFormat:
    """The format and columns of data without them."""

    _WHERE = "[source]"

    format: Literal["parquet", "ipc", "csv", "tsv", "criteo", "numpy", "split_binary"] | None = None
    """The format of every file, whatever its suffix; None: by suffix."""
    columns: tuple[Text, ...] = ()
    """Names of columns for data without them: text without a header, tuples of a Python iterable."""
