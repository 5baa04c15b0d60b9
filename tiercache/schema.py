"""The schema of a dataset: label, dense features, sparse features and their tables."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import InstanceOf, TypeAdapter
from pydantic.dataclasses import dataclass

from tiercache.errors import SchemaError
from tiercache.schema_parts import (
    STRICT,
    CsvFormat,
    DenseFeature,
    Feature,
    KeptColumn,
    SourceFormat,
    Text,
    checked,
    nearest,
    with_schema_errors,
)
from tiercache.schema_toml import load_schema
from tiercache.store.table import Table, group_tables

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["CsvFormat", "DenseFeature", "Feature", "KeptColumn", "Schema", "SourceFormat"]


@with_schema_errors
@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class Schema:
    """The columns of the data and the tables of the model. Order matters only for dense features."""

    _WHERE = "the schema"

    features: tuple[Feature, ...]
    """The sparse features; at least one."""
    tables: tuple[InstanceOf[Table], ...] = ()
    """Every table of the features. Optional for a table with one feature of the same name."""
    open_tables: tuple[Text, ...] = ()
    """Tables of a converted model that take any int64 as a key, beyond the rows that its modules had."""
    label: Text | None = None
    """The column of the label, number or bool; None: samples have none, or several."""
    labels: tuple[KeptColumn, ...] = ()
    """Several labels, each in its own dtype; ``label`` is None then."""
    label_null: Literal["error", "drop"] = "error"
    """The handling of a null or NaN label: an error, or the row is dropped."""
    keep: tuple[KeptColumn, ...] = ()
    """Other columns that are stored with the samples, each in its own dtype."""
    dense: tuple[DenseFeature, ...] = ()
    """The dense features, in the order of the columns of ``EncodedBatch.dense``."""
    csv: CsvFormat = dataclasses.field(default_factory=CsvFormat)
    """The format of text files."""
    source: SourceFormat = dataclasses.field(default_factory=SourceFormat)
    """The format and columns of data without them."""

    def __post_init__(self) -> None:
        if not self.features:
            raise ValueError("has no features: add at least one")
        _refuse_twice("feature", [f.name for f in self.features])
        _refuse_twice("dense column", [d.column for d in self.dense])
        if self.label is not None and self.labels:
            raise ValueError("has a label and labels: set only one of them")
        names = [one.name for one in self.kept]
        _refuse_twice("name of a column", names)
        used = [f.name for f in self.features] + [d.column for d in self.dense] + [self.label]
        for name in names:
            if name in used and self.kept:
                raise ValueError(
                    f"keeps the column {name!r}, which is also the name of a feature, a dense column or the label: "
                    "choose another name (name = ...)"
                )
        known = {table.name for table in self.tables}
        for feature in self.features:
            if feature.table == feature.name and feature.table not in known:
                object.__setattr__(self, "tables", (*self.tables, Table(name=feature.table)))
                known.add(feature.table)
        for feature in self.features:
            if feature.table not in known:
                raise ValueError(
                    f"has a feature {feature.name!r} with the unknown table {feature.table!r}"
                    f"{nearest(feature.table, known)}: add [tables.{feature.table}] or name another table"
                )
        for name in self.open_tables:
            if name not in known:
                raise ValueError(f"opens the unknown table {name!r}{nearest(name, known)}: name one of its tables")
        for name in self.csv.types:
            if name not in self.columns:
                raise ValueError(
                    f"has a type in [csv] for the column {name!r}, which it does not read"
                    f"{nearest(name, set(self.columns))}: name a column of a cross"
                )
        try:
            group_tables(self.tables)
        except ValueError as error:
            raise ValueError(f"has tables that cannot be combined: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Schema:
        """Read a schema from a TOML file (``docs/schema.md``). Raises SchemaError naming file and key."""
        return cls.of(path)

    @classmethod
    def of(cls, schema: Schema | str | Path | None, format: str | None = None) -> Schema:  # noqa: A002
        """Return a schema, or load the one at a path; ``format`` replaces the format in its source section.

        None is an empty file, which is enough for format "criteo". Raises SchemaError.
        """
        if isinstance(schema, Schema):
            if format is None:
                return schema
            return dataclasses.replace(schema, source=SourceFormat(format=format, columns=schema.source.columns))  # type: ignore[arg-type]
        if schema is None and format != "criteo":
            raise SchemaError('no schema was given: pass the path of a TOML file; only format "criteo" needs none')
        return load_schema(cls, schema, format)

    @property
    def ordered_tables(self) -> tuple[Table, ...]:
        """The tables by unsigned table id: the order of key sets."""
        return tuple(sorted(self.tables, key=lambda table: table.table_id))

    @property
    def singles(self) -> tuple[Feature, ...]:
        """The features with one key per sample, in the schema's order."""
        return tuple(f for f in self.features if f.hotness == "one_hot")

    @property
    def lists(self) -> tuple[Feature, ...]:
        """The features with lists of keys, in the schema's order."""
        return tuple(f for f in self.features if f.hotness != "one_hot")

    @property
    def kept(self) -> tuple[KeptColumn, ...]:
        """The columns that are stored in their own dtype: labels, then ``keep``."""
        return (*self.labels, *self.keep)

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns of the label or of the labels."""
        return (self.label,) if self.label is not None else tuple(one.column for one in self.labels)

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read, each once, in the order of first mention."""
        names = [*self.label_columns, *(d.column for d in self.dense), *(one.column for one in self.keep)]
        for feature in self.features:
            names += [*feature.columns, *([feature.weights] if feature.weights is not None else [])]
        return tuple(dict.fromkeys(names))

    def with_dtypes(self, dtypes: Mapping[str, str]) -> Schema:
        """Return the schema with a dtype for each kept column; ``dtypes``, by column, fills in those that have none."""

        def filled(columns: tuple[KeptColumn, ...]) -> tuple[KeptColumn, ...]:
            return tuple(
                one if one.dtype is not None else dataclasses.replace(one, dtype=dtypes[one.column])  # type: ignore[arg-type]
                for one in columns
            )

        return dataclasses.replace(self, labels=filled(self.labels), keep=filled(self.keep)) if self.kept else self

    def feature(self, name: str) -> Feature:
        """Return the feature called ``name``. Raises KeyError for an unknown one."""
        for feature in self.features:
            if feature.name == name:
                return feature
        raise KeyError(name)

    @property
    def digest(self) -> str:
        """Hexadecimal digest of the meaning of data: columns, keys and table names.

        It leaves out dims, optimizers, initializers, seeds and open tables, which do not change the content of a pass,
        and the format of files and names for a missing header, so that data may come from another format later.
        """
        record = self.to_record()
        record.pop("source", None)
        record.pop("open_tables", None)
        record["tables"] = sorted(table.name for table in self.tables)
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    def to_record(self) -> dict[str, Any]:
        """Return the schema as plain JSON values, without defaults; ``from_record`` reads them."""
        record: dict[str, Any] = TypeAdapter(Schema).dump_python(
            self, mode="json", exclude={"tables"}, exclude_defaults=True
        )
        return {**record, "tables": [table.to_record() for table in self.tables]}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Schema:
        """Read what ``to_record`` returned. Raises SchemaError."""
        return checked(cls, "the schema", {**record, "tables": [Table.from_record(t) for t in record["tables"]]})


def _refuse_twice(what: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"has the {what} {name!r} twice: list each once")
