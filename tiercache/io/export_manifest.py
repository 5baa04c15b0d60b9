"""``tables.json``: what an export holds. It lies beside the files, so that they can be imported without a schema."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tiercache.errors import ImportExportError
from tiercache.store.table import Adam, Table

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LISTING", "MOST", "ExportManifest", "Listed", "file_name"]

LISTING = "tables.json"
_MARK, _VERSION = "tiercache export", 1
_LONGEST_NAME = 200
MOST = (1 << 63) - 1
"""Of rows, and of steps of training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """One table of an export."""

    table: Table
    rows: int
    has_state: bool
    """Whether the optimizer state was exported with the vectors."""
    reserved_keys: bool
    """Whether INT64_MIN or INT64_MIN + 1 is among the keys: the out-of-vocabulary row, the null row."""

    @property
    def counts_steps(self) -> bool:
        """Whether training goes on from its rows with the count of steps of the training that made them.

        Adam's state counts them, and they decide how vectors of 16 bits are rounded; without its state a row begins
        anew.
        """
        whole = self.has_state or len(self.table.fields) == 1
        return whole and (isinstance(self.table.optimizer, Adam) or self.table.dtype != "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportManifest:
    """The tables of an export, and its format."""

    format: str
    tables: tuple[Listed, ...]
    steps: int | None = None
    """Steps of training so far, where a table goes on with their count; None: it is not known."""

    def to_bytes(self) -> bytes:
        """Return the content of ``tables.json``."""
        tables = [
            {
                "table": listed.table.to_record(),
                "rows": listed.rows,
                "has_state": listed.has_state,
                "reserved_keys": listed.reserved_keys,
            }
            for listed in self.tables
        ]
        record = {"format": _MARK, "version": _VERSION, "files": self.format, "tables": tables}
        if self.steps is not None:
            record["steps"] = self.steps
        return json.dumps(record, indent=2).encode() + b"\n"

    @classmethod
    def find(cls, folder: Path) -> ExportManifest | None:
        """Read the listing in a folder; None where there is none. Raises ImportExportError."""
        path = folder / LISTING
        try:
            record = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except RecursionError as error:
            raise ImportExportError(
                f"{path} nests its values too deep: export again, or remove it and give tables"
            ) from error
        except ValueError as error:
            raise ImportExportError(
                f"{path} is not JSON ({error}): export again, or remove it and give tables"
            ) from error
        if not isinstance(record, dict) or record.get("format") != _MARK or record.get("version") != _VERSION:
            raise ImportExportError(f"{path} is not of this tiercache's exports: remove it and give tables")
        try:
            tables = tuple(_listed(item) for item in record["tables"])
            steps = None if "steps" not in record else _count("steps", record["steps"])
            return cls(format=str(record["files"]), tables=tables, steps=steps)
        except (KeyError, TypeError, ValueError) as error:
            raise ImportExportError(
                f"{path} cannot be read ({error}): export again, or remove it and give tables"
            ) from error


def _listed(record: Any) -> Listed:
    return Listed(
        table=Table.from_record(record["table"]),
        rows=_count("rows", record["rows"]),
        has_state=bool(record["has_state"]),
        reserved_keys=bool(record["reserved_keys"]),
    )


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        raise ValueError(f"{name} is {value!r}, and must be 0 .. {MOST:,}")
    return value


def file_name(table: Table) -> str:
    """Return what the files of a table are called: its name, percent-encoded where a path could misunderstand it.

    Names that would be too long become the table id in hexadecimal.
    """
    name = quote(table.name, safe=" ")
    if name.startswith(".") or name == LISTING:
        name = name.replace(".", "%2E")
    return name if len(name) <= _LONGEST_NAME else f"%{table.table_id:016x}"
