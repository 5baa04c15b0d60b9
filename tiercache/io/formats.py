"""The formats by name: how a table is written in each, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from tiercache.errors import ImportExportError
from tiercache.store.vectors import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiercache.store.scan import Chunk
    from tiercache.store.table import Table

__all__ = ["FORMATS", "Format", "TableReader", "TableWriter", "find_format"]


class TableWriter(Protocol):
    """Takes the rows of one table."""

    def write(self, chunk: Chunk) -> None:
        """Append a chunk of rows."""

    def close(self) -> None:
        """Finish the files; on return they are on disk."""


class TableReader(Protocol):
    """Gives the rows of one table, whose files were found to be whole and of the right shape."""

    rows: int
    has_state: bool
    """Whether the optimizer state is there, too; True for tables without one."""

    def chunks(self, chunk_rows: int) -> Iterator[Chunk]:
        """Yield keys and the vector, then the optimizer state where it is there."""


class _Module(Protocol):
    def write(self, folder: Path, name: str, table: Table, rows: int, *, with_state: bool) -> TableWriter: ...

    def read(self, folder: Path, name: str, table: Table) -> TableReader: ...


@dataclass(frozen=True, slots=True)
class Format:
    """A format: its module is loaded when it is used."""

    name: str
    module: str
    dtypes: tuple[str, ...] = ()
    """In which 16-bit dtypes it has vectors; those of others are written as float32."""
    vector_copies: int = 1
    """How often the vectors lie on the disk while they are written."""

    def keeps_state(self, table: Table) -> bool:
        """Return whether the optimizer state of ``table`` has a place in the format."""
        if len(table.fields) == 1:
            return True
        if self.name == "hugectr":
            from tiercache.io.hugectr_folder import state_files

            return bool(state_files(table))
        return self.name != "torch"

    def row_bytes(self, table: Table, *, with_state: bool) -> int:
        """Return the bytes that a row of ``table`` takes while it is written, headers apart."""
        vector, *states = table.fields
        item_bytes = ITEM_BYTES[vector.dtype] if vector.dtype in self.dtypes else ITEM_BYTES["float32"]
        state_bytes = sum(4 * state.width for state in states) if with_state else 0
        return 8 + self.vector_copies * item_bytes * vector.width + state_bytes

    def writer(self, folder: Path, name: str, table: Table, rows: int, *, with_state: bool) -> TableWriter:
        """Begin to write ``rows`` rows of a table to ``folder``, under ``name``."""
        return self._loaded().write(folder, name, table, rows, with_state=with_state)

    def reader(self, folder: Path, name: str, table: Table) -> TableReader:
        """Open the files of a table. Raises ImportExportError."""
        return self._loaded().read(folder, name, table)

    def _loaded(self) -> _Module:
        return cast("_Module", import_module(f"tiercache.io.{self.module}"))


FORMATS = {
    "numpy": Format("numpy", "numpy_folder", ("float16",)),
    "parquet": Format("parquet", "parquet_file", ("float16",)),
    "safetensors": Format("safetensors", "safetensors_file", ("bfloat16", "float16")),
    "hugectr": Format("hugectr", "hugectr_folder"),
    "torch": Format("torch", "torch_folder", ("bfloat16", "float16"), vector_copies=2),
}


def find_format(name: str) -> Format:
    """Return a format by its name. Raises ImportExportError."""
    if name not in FORMATS:
        raise ImportExportError(f"format {name!r} is unknown: it must be one of {', '.join(FORMATS)}")
    return FORMATS[name]
