"""What the columns of the data mean: label, dense features, sparse features and the tables they look into."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tiercache.errors import SchemaError
from tiercache.store.table import Table, group_tables

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["CsvFormat", "DenseFeature", "Feature", "Schema"]

KeyKind = Literal["integer", "string", "cross"]
Hotness = Literal["one", "fixed", "ragged"]
NullRule = Literal["error", "own"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseFeature:
    """A number per sample that goes to the dense part of the model, as float32."""

    column: str
    """The column of numbers."""
    null: float | None = None
    """The number that null and NaN stand for; None: they are errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """Keys per sample, looked up in one table."""

    name: str
    """Its name in every sample; unique in the schema."""
    columns: tuple[str, ...] = ()
    """The columns its keys come from: one, or two and more for a cross. Empty: the column of its own name."""
    table: str = ""
    """The table it looks into; several features may share one. Empty: the table of its own name."""
    key: KeyKind | None = None
    """"integer": values are keys. "string": hashes of them. "cross": hashes over columns. None: by their number."""
    hotness: Hotness = "one"
    """How many keys a sample has: one, a fixed number, or any number."""
    length: int | None = None
    """The number of keys per sample where hotness is "fixed"."""
    weights: str | None = None
    """The column of float weights, one per key; None: all 1."""
    null: NullRule = "error"
    """What null means: an error, or a row of its own."""

    def __post_init__(self) -> None:
        where = f"feature {self.name!r}"
        if not self.name:
            raise SchemaError("a feature has an empty name: every feature needs one")
        object.__setattr__(self, "columns", tuple(self.columns) or (self.name,))
        object.__setattr__(self, "table", self.table or self.name)
        object.__setattr__(self, "key", self.key or ("integer" if len(self.columns) == 1 else "cross"))
        _one_of(where, "key", self.key, ("integer", "string", "cross"))
        _one_of(where, "hotness", self.hotness, ("one", "fixed", "ragged"))
        _one_of(where, "null", self.null, ("error", "own"))
        if self.key == "cross" and (len(self.columns) < 2 or self.hotness != "one"):
            raise SchemaError(f"{where} is a cross: it takes at least 2 columns and one key per sample")
        if self.key != "cross" and len(self.columns) != 1:
            raise SchemaError(f'{where} takes {len(self.columns)} columns: only key = "cross" takes more than one')
        if self.hotness == "fixed" and (self.length is None or self.length < 1):
            raise SchemaError(f"{where} has a fixed number of keys: it must be at least 1, not {self.length}")
        if self.hotness != "fixed" and self.length is not None:
            raise SchemaError(f'{where} has length = {self.length}: only hotness = "fixed" takes one')

    @property
    def null_is_key(self) -> bool:
        """Whether null stands for the null row."""
        return self.null == "own"


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvFormat:
    """What a CSV or TSV file cannot say itself; other formats ignore it."""

    header: bool = True
    """Whether the first line names the columns; without it they are f0, f1, f2, ..."""
    types: Mapping[str, Literal["integer", "string"]] = field(default_factory=dict)
    """Types of columns that appear in crosses only; absent ones are taken from the first lines of each file."""

    def __post_init__(self) -> None:
        for column, kind in self.types.items():
            _one_of("[csv] types", column, kind, ("integer", "string"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """The columns of the data and the tables of the model. Order matters only for dense features."""

    features: tuple[Feature, ...]
    """The sparse features; at least one."""
    tables: tuple[Table, ...]
    """Every table that a feature names."""
    label: str | None = None
    """The column of the label, number or bool; None: samples have none."""
    dense: tuple[DenseFeature, ...] = ()
    """The dense features, in the order of the columns of ``Samples.dense``."""
    csv: CsvFormat = field(default_factory=CsvFormat)
    """How text files are read."""

    def __post_init__(self) -> None:
        for name in ("features", "tables", "dense"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.features:
            raise SchemaError("the schema has no features: name at least one that looks into a table")
        _refuse_twice("feature", [f.name for f in self.features])
        _refuse_twice("dense column", [d.column for d in self.dense])
        try:
            group_tables(self.tables)
        except ValueError as error:
            raise SchemaError(f"the tables of the schema do not go together: {error}") from error
        known = {table.name for table in self.tables}
        for feature in self.features:
            if feature.table not in known:
                raise SchemaError(
                    f"feature {feature.name!r} looks into the unknown table {feature.table!r}"
                    f"{nearest(feature.table, known)}: add [tables.{feature.table}] or name another table"
                )

    @classmethod
    def load(cls, path: str | Path) -> Schema:
        """Read a schema from a TOML file (``docs/schema.md``). Raises SchemaError naming file and key."""
        from tiercache.schema_toml import load_schema

        return load_schema(path)

    @property
    def ordered_tables(self) -> tuple[Table, ...]:
        """The tables by unsigned table id: the order of key sets."""
        return tuple(sorted(self.tables, key=lambda table: table.table_id))

    @property
    def singles(self) -> tuple[Feature, ...]:
        """The features with one key per sample, in the schema's order."""
        return tuple(f for f in self.features if f.hotness == "one")

    @property
    def lists(self) -> tuple[Feature, ...]:
        """The features with lists of keys, in the schema's order."""
        return tuple(f for f in self.features if f.hotness != "one")

    def feature(self, name: str) -> Feature:
        """Return the feature called ``name``. Raises KeyError for an unknown one."""
        for feature in self.features:
            if feature.name == name:
                return feature
        raise KeyError(name)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read, each once, in the order of first mention."""
        names = [self.label] if self.label is not None else []
        names += [d.column for d in self.dense]
        for feature in self.features:
            names += [*feature.columns, *([feature.weights] if feature.weights is not None else [])]
        return tuple(dict.fromkeys(names))

    @property
    def digest(self) -> str:
        """Hexadecimal digest of what the data means: columns, keys and table names.

        Dims, optimizers, initializers and seeds are no part of it: they do not change what a pass holds.
        """
        record = self.to_record()
        record["tables"] = sorted(table.name for table in self.tables)
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    def to_record(self) -> dict[str, Any]:
        """Return the schema as plain JSON values; ``from_record`` reads them."""
        return {
            "label": self.label,
            "dense": [{"column": d.column, "null": d.null} for d in self.dense],
            "features": [
                {
                    "name": f.name,
                    "columns": list(f.columns),
                    "table": f.table,
                    "key": f.key,
                    "hotness": f.hotness,
                    "length": f.length,
                    "weights": f.weights,
                    "null": f.null,
                }
                for f in self.features
            ],
            "csv": {"header": self.csv.header, "types": dict(self.csv.types)},
            "tables": [table.to_record() for table in self.tables],
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Schema:
        """Read what ``to_record`` returned."""
        return cls(
            label=record["label"],
            dense=tuple(DenseFeature(**d) for d in record["dense"]),
            features=tuple(Feature(**{**f, "columns": tuple(f["columns"])}) for f in record["features"]),
            csv=CsvFormat(**record["csv"]),
            tables=tuple(Table.from_record(t) for t in record["tables"]),
        )


def nearest(name: str, known: set[str]) -> str:
    """Return `` (did you mean '...'?)`` where ``known`` has a similar name, and nothing where it has none."""
    from difflib import get_close_matches

    close = get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _one_of(where: str, name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        options = ", ".join(repr(option) for option in allowed)
        raise SchemaError(f"{where} has {name} = {value!r}: one of {options}")


def _refuse_twice(what: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise SchemaError(f"the {what} {name!r} stands twice in the schema: each may stand once")
