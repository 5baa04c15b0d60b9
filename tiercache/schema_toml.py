"""A schema as a TOML file: every key is known, or refused with the nearest known one (docs/schema.md)."""

from __future__ import annotations

import tomllib
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

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
    unknown_key,
)
from tiercache.store.files import local_path, read_whole
from tiercache.store.initializer import initializer_from_record
from tiercache.store.optimizer import optimizer_from_record
from tiercache.store.table import Table

if TYPE_CHECKING:
    from pathlib import Path

_FEATURE = {f.name for f in fields(Feature)} - {"name"} | {"column"}
_TABLE = {"dim", "optimizer", "initializer", "seed", "dtype", "compression", "open"}
_Section = dict[str, Any]
_T = TypeVar("_T")


def load_schema(cls: type[_T], path: str | Path | None, format: str | None = None) -> _T:  # noqa: A002
    """Build ``cls``, a Schema, from a TOML file; ``format`` replaces the one in its [source]. None: an empty file.

    Raises SchemaError, which names the file, the section and the key.
    """
    if path is None:
        return checked(cls, "the file", _schema_values(_File(), format))
    try:
        data = tomllib.loads(read_whole(str(local_path(path, "a schema"))).decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SchemaError(f"the schema {path} is not TOML: {error}") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        seen = getattr(error, "strerror", None) or error
        raise SchemaError(f"the schema {path} cannot be read: {seen}".replace("\0", "\\x00")) from error
    except RecursionError as error:
        raise SchemaError(f"the schema {path} has values that are nested too deeply: write them flat") from error
    try:
        return checked(cls, "the file", _schema_values(checked(_File, "the file", data), format))
    except SchemaError as error:
        raise SchemaError(f"the schema {path}: {error}") from error


@dataclass(config=STRICT)
class _File:
    label: Any = None
    dense: list[Any] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)
    features: dict[str, _Section] = field(default_factory=dict)
    tables: dict[str, _Section] = field(default_factory=dict)
    defaults: _Section = field(default_factory=dict)
    csv: _Section = field(default_factory=dict)
    source: _Section = field(default_factory=dict)


@dataclass(config=STRICT)
class _Label:
    column: Text | None = None
    columns: list[Any] = field(default_factory=list)
    null: Literal["error", "drop"] = "error"


def _schema_values(file: _File, format_: str | None) -> _Section:
    if file.label is not None and (not isinstance(file.label, dict) or isinstance(file.label.get("column"), list)):
        raise SchemaError(
            f'the file has label = {file.label!r}: write label = {{ column = "click" }}, or for several labels label = '
            '{ columns = ["click", "buy"] }'
        )
    label = None if file.label is None else checked(_Label, "[label]", file.label)
    if label is not None and (label.column is None) == (not label.columns):
        has = "'column' and 'columns'" if label.columns else "no 'column'"
        raise SchemaError(f"[label] has {has}: set the column of the label, or columns = [...] for several labels")
    source = checked(SourceFormat, "[source]", file.source | ({"format": format_} if format_ else {}))
    dense, features = [_dense(e) for e in file.dense], [_feature(name, e) for name, e in file.features.items()]
    if source.format == "criteo" and label is None and not dense and not features:
        label = _Label(column="label")
        dense = [DenseFeature(column=f"I{i}", null=0.0, transform="log") for i in range(1, 14)]
        features = [Feature(name=f"C{i}", key="hex", null="embed") for i in range(1, 27)]
    used = {feature.table for feature in features}
    if unused := [name for name in file.tables if name not in used]:
        hint = nearest(unused[0], used - file.tables.keys())
        raise SchemaError(
            f"[tables.{unused[0]}] is not used by any feature{hint}: remove it, or set it as the table of a feature"
        )
    own: dict[str, _Section] = {f.table: {} for f in features if f.table == f.name and f.table not in file.tables}
    return {
        "label": label and label.column,
        "labels": [_kept("[label] columns", e) for e in label.columns] if label else [],
        "keep": [_kept("keep", e) for e in file.keep],
        "label_null": label.null if label else "error",
        "dense": dense,
        "features": features,
        "tables": [_table(name, entry, file.defaults) for name, entry in {**file.tables, **own}.items()],
        "open_tables": [name for name, entry in {**file.tables, **own}.items() if _is_open(name, entry, file.defaults)],
        "csv": checked(CsvFormat, "[csv]", file.csv),
        "source": source,
    }


def _dense(entry: Any) -> DenseFeature:
    if not isinstance(entry, dict):
        return checked(DenseFeature, "dense", {"column": entry})
    if entry.get("null") == "error":
        entry = {**entry, "null": None}
    return checked(DenseFeature, "[[dense]]", entry)


def _kept(where: str, entry: Any) -> KeptColumn:
    return checked(KeptColumn, where, entry if isinstance(entry, dict) else {"column": entry})


def _feature(name: str, entry: _Section) -> Feature:
    where = f"[features.{name}]"
    if "name" in entry:
        raise SchemaError(unknown_key(where, "name", _FEATURE))
    if of_table := sorted(_TABLE.intersection(entry)):
        table = entry.get("table", name)
        raise SchemaError(
            f"{where} has {of_table[0]!r}, which belongs to its table: write it in [tables.{table}] or [defaults]"
        )
    if "column" in entry and "columns" in entry:
        raise SchemaError(f"{where} has 'column' and 'columns': set only one of them")
    for key in ("columns", "buckets"):
        if entry.get(key) == []:
            raise SchemaError(f"{where} has {key} = []: remove it, or list at least one")
    if "column" in entry:
        entry = {("columns" if key == "column" else key): value for key, value in entry.items()}
        entry["columns"] = [entry["columns"]]
    return checked(Feature, where, {"name": name, **entry}, _FEATURE)


def _table(name: str, entry: _Section, defaults: _Section) -> Table:
    where = f"[tables.{name}]"
    for section, keys in (("[defaults]", defaults), (where, entry)):
        for key in keys:
            if key not in _TABLE:
                raise SchemaError(unknown_key(section, key, _TABLE))
    values = {key: value for key, value in {**defaults, **entry}.items() if key != "open"}
    if values.get("compression") == "none":  # TOML has no null, and a table may want less than [defaults]
        del values["compression"]
    try:
        for key, build in (("optimizer", optimizer_from_record), ("initializer", initializer_from_record)):
            if key in values:
                choice = {"name": values[key]} if isinstance(values[key], str) else values[key]
                if not isinstance(choice, dict) or "name" not in choice:
                    raise ValueError(f"{key} is {choice!r}: expected a name, or a table with a name and settings")
                if "kind" in choice:
                    raise ValueError(f"{key} has the unknown key 'kind': set name instead")
                values[key] = build({("kind" if k == "name" else k): v for k, v in choice.items()})
        return Table(name=name, **values)
    except (ValueError, TypeError) as error:
        raise SchemaError(f"{where}: {error}") from error


def _is_open(name: str, entry: _Section, defaults: _Section) -> bool:
    value = {**defaults, **entry}.get("open", False)
    if not isinstance(value, bool):
        raise SchemaError(f"[tables.{name}]: open is {value!r}: expected true or false")
    return value
