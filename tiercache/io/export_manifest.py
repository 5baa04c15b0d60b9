"""``tables.json``: what an export holds. It lies beside the files, so that they can be imported without a schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from tiercache.errors import ImportExportError
from tiercache.io.table_reader import regular_file
from tiercache.store.table import Adam, Table

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "tables.json"
MAX_COUNT = (1 << 63) - 1
"""Of rows, and of steps of training."""
_LONGEST_NAME = 200


def _table(value: Any) -> Table:
    """Return a table, or that of a record. Raises ValueError."""
    return value if isinstance(value, Table) else Table.from_record(value)


_Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_Record = Annotated[Table, PlainValidator(_table), PlainSerializer(Table.to_record)]


class ExportedTable(BaseModel):
    """One table of an export."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    table: _Record
    rows: _Count
    has_state: bool
    """Whether the optimizer state was exported with the vectors."""
    reserved_keys: bool
    """Whether INT64_MIN or INT64_MIN + 1 is among the keys: the out-of-vocabulary row, the null row."""
    steps: _Count | None = None
    """Steps of the table so far, where it needs them and they are not those of the training."""

    @property
    def needs_steps(self) -> bool:
        """Whether training goes on from these rows with the number of steps trained so far.

        Adam's state depends on it, and so does the rounding of 16-bit vectors; without its state a row begins anew.
        """
        whole = self.has_state or len(self.table.fields) == 1
        return whole and (isinstance(self.table.optimizer, Adam) or self.table.dtype != "float32")


def _distinct(tables: tuple[ExportedTable, ...]) -> tuple[ExportedTable, ...]:
    names = [one.table.name for one in tables]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two tables are named {min(twice)!r}")
    return tables


class ExportManifest(BaseModel):
    """The tables of an export, and its format."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    version: Literal[1] = 1
    format: str
    tables: Annotated[tuple[ExportedTable, ...], AfterValidator(_distinct)]
    steps: _Count | None = None
    """Steps of training so far, where a table needs them; None: not known."""
    since: int | None = None
    """The commit since which the rows changed; None: all rows were exported."""

    def to_bytes(self) -> bytes:
        """Return the content of ``tables.json``."""
        return self.model_dump_json(indent=2).encode() + b"\n"

    @classmethod
    def find(cls, folder: Path) -> ExportManifest | None:
        """Read the manifest in a folder; None where there is none. Raises ImportExportError."""
        path = folder / MANIFEST
        if not path.exists():
            return None
        try:
            return cls.model_validate_json(regular_file(path).read_bytes())
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ImportExportError(
                f"{path} cannot be read ({place and place + ': '}{first['msg']}): export again, or remove it and give "
                "tables"
            ) from error


def file_name(table: Table) -> str:
    """Return what the files of a table are called: its name, percent-encoded where a path could misunderstand it.

    Names that would be too long become the table id in hexadecimal.
    """
    name = quote(table.name, safe=" ")
    if name.startswith(".") or name == MANIFEST:
        name = name.replace(".", "%2E")
    return name if len(name) <= _LONGEST_NAME else f"%{table.table_id:016x}"
