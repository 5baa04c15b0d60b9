"""A schema as a TOML file: every key is known, or refused with the nearest known one (docs/schema.md)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from tiercache.errors import SchemaError
from tiercache.schema import CsvFormat, DenseFeature, Feature, Schema, nearest
from tiercache.store.table import Table

__all__ = ["load_schema"]

_TOP = {"label", "dense", "features", "tables", "defaults", "csv"}
_LABEL = {"column"}
_DENSE = {"column", "null"}
_FEATURE = {"column", "columns", "table", "key", "hotness", "weights", "null"}
_TABLE = {"dim", "optimizer", "initializer", "seed", "dtype", "compression"}
_CSV = {"header", "types"}


def load_schema(path: str | Path) -> Schema:
    """Read the schema in a TOML file. Raises SchemaError, which names the file and the key."""
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SchemaError(f"the schema {path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SchemaError(f"the schema {path} is not TOML: {error}") from error
    except RecursionError as error:
        raise SchemaError(f"the schema {path} nests its values too deep: write them flat") from error
    try:
        return _schema(data)
    except (SchemaError, ValueError) as error:
        raise SchemaError(f"the schema {path}: {error}") from error


def _schema(data: dict[str, Any]) -> Schema:
    _check("the file", data, _TOP)
    label = _section("[label]", data.get("label", {}), _LABEL)
    if "label" in data and "column" not in label:
        raise SchemaError("[label] has no 'column': name the column of the label")
    csv = _section("[csv]", data.get("csv", {}), _CSV)
    defaults = _section("[defaults]", data.get("defaults", {}), _TABLE)
    features = _mapping("[features]", data.get("features", {}))
    tables = _mapping("[tables]", data.get("tables", {}))
    return Schema(
        label=_text("[label]", "column", label["column"]) if label else None,
        dense=tuple(_dense(entry) for entry in _array("dense", data.get("dense", []))),
        features=tuple(_feature(name, entry) for name, entry in features.items()),
        tables=tuple(_table(name, entry, defaults) for name, entry in tables.items()),
        csv=CsvFormat(header=_flag("[csv]", "header", csv.get("header", True)), types=_types(csv)),
    )


def _dense(entry: Any) -> DenseFeature:
    if isinstance(entry, str):
        return DenseFeature(column=entry)
    entry = _section("[[dense]]", entry, _DENSE)
    if "column" not in entry:
        raise SchemaError("[[dense]] has no 'column': name the column of numbers")
    null = entry.get("null", "error")
    is_number = isinstance(null, float) or (type(null) is int and abs(null) < 2**1023)
    if null != "error" and not is_number:
        raise SchemaError(f"[[dense]] has null = {null!r}: 'error' or the number that null stands for")
    return DenseFeature(
        column=_text("[[dense]]", "column", entry["column"]), null=None if null == "error" else float(null)
    )


def _feature(name: str, entry: Any) -> Feature:
    where = f"[features.{name}]"
    entry = _section(where, entry, _FEATURE)
    if "column" in entry and "columns" in entry:
        raise SchemaError(f"{where} has 'column' and 'columns': give one of them")
    columns = [entry["column"]] if "column" in entry else _array(f"{where} columns", entry.get("columns", []))
    hotness: Any = entry.get("hotness", "one")
    length: int | None = None
    if isinstance(hotness, int) and not isinstance(hotness, bool):
        hotness, length = "fixed", hotness
    elif not isinstance(hotness, str) or hotness not in {"one", "ragged"}:
        raise SchemaError(f"{where} has hotness = {hotness!r}: 'one', 'ragged', or the number of keys per sample")
    return Feature(
        name=name,
        columns=tuple(_text(where, "columns", column) for column in columns),
        table=_text(where, "table", entry.get("table", name)),
        key=entry.get("key"),
        hotness=hotness,
        length=length,
        weights=_text(where, "weights", entry["weights"]) if "weights" in entry else None,
        null=entry.get("null", "error"),
    )


def _table(name: str, entry: Any, defaults: dict[str, Any]) -> Table:
    where = f"[tables.{name}]"
    values = {**defaults, **_section(where, entry, _TABLE)}
    for key in ("dim", "optimizer", "initializer"):
        if key not in values:
            raise SchemaError(f"{where} has no {key!r}: give it there or in [defaults]")
    record = {"name": name, "seed": 0, "dtype": "float32", **values}
    if record.get("compression") == "none":  # TOML has no null, and a table may want less than [defaults]
        del record["compression"]
    for key in ("optimizer", "initializer"):
        choice = values[key]
        if isinstance(choice, str):
            choice = {"name": choice}
        if not isinstance(choice, dict) or "name" not in choice:
            raise SchemaError(f"{where} has {key} = {choice!r}: a name, or a table with a name and its numbers")
        record[key] = {"kind": choice["name"], **{k: v for k, v in choice.items() if k != "name"}}
    try:
        return Table.from_record(record)
    except ValueError as error:
        raise SchemaError(f"{where}: {error}") from error


def _types(csv: dict[str, Any]) -> dict[str, Any]:
    types = _mapping("[csv] types", csv.get("types", {}))
    return {column: _text("[csv] types", column, kind) for column, kind in types.items()}


def _section(where: str, entry: Any, known: set[str]) -> dict[str, Any]:
    section = _mapping(where, entry)
    _check(where, section, known)
    return section


def _check(where: str, entry: dict[str, Any], known: set[str]) -> None:
    for key in entry:
        if key not in known:
            options = ", ".join(sorted(known))
            raise SchemaError(f"{where} has the unknown key {key!r}{nearest(key, known)}: known are {options}")


def _mapping(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SchemaError(f"{where} is {value!r}: it must be a table of keys and values")
    return value


def _array(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise SchemaError(f"{where} is {value!r}: it must be a list")
    return value


def _text(where: str, key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise SchemaError(f"{where} has {key} = {value!r}: it must be a text that is not empty")
    return value


def _flag(where: str, key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SchemaError(f"{where} has {key} = {value!r}: true or false")
    return value
