"""safetensors: for each table a file with the tensors ``keys`` (I64), ``vector`` and each optimizer state (F32; vectors
of 16-bit dtypes BF16 or F16).

The file is the bytes of its header (uint64), the header as JSON, and the tensors' bytes one after the other. It is
written here, chunk by chunk, because the library needs all tensors in memory.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tiercache.distribution import install_command
from tiercache.errors import ImportExportError
from tiercache.io.formats import Column, ColumnFile, ColumnWriter, Format, TableReader, parsing, tensor_values
from tiercache.store.bits import ITEM_BYTES
from tiercache.store.optimizer import optimizer_to_record

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.store.optimizer import Field
    from tiercache.store.table import Table

_NAMES = {"int64": "I64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def _write(folder: Path, name: str, table: Table, fields: tuple[Field, ...], rows: int) -> ColumnWriter:
    header: dict[str, Any] = {
        "__metadata__": {"table": table.name, "optimizer": json.dumps(optimizer_to_record(table.optimizer))},
        "keys": {"dtype": "I64", "shape": [rows], "data_offsets": [0, 8 * rows]},
    }
    ends = [8 * rows]
    for field in fields:
        ends.append(ends[-1] + ITEM_BYTES[field.dtype] * rows * field.width)
        header[field.name] = {"dtype": _NAMES[field.dtype], "shape": [rows, field.width], "data_offsets": ends[-2:]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    path = folder / f"{name}.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(first + ends[-1])
    columns = [
        ColumnFile(path, offset=first + start, dtype=field.dtype) for start, field in zip(ends, fields, strict=False)
    ]
    return ColumnWriter(ColumnFile(path, offset=first), columns)


def _read(folder: Path, name: str, table: Table) -> TableReader:
    """Open a file through the library, which checks header and size."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise ImportExportError(f"safetensors is not installed: {install_command('safetensors')}") from None
    path = folder / f"{name}.safetensors"
    with parsing(path, "safetensors file"):
        file: Any = safe_open(path, framework="pt")
        columns = {tensor: _column(file.get_slice(tensor)) for tensor in file.keys()}  # noqa: SIM118 - no mapping
    return TableReader(path, table, columns)


FORMAT = Format(write=_write, read=_read, dtypes=("bfloat16", "float16"))


def _column(tensor: Any) -> Column:
    dtype = tensor.get_dtype()
    return Column(tuple(tensor.get_shape()), _DTYPES.get(dtype, dtype), lambda rows: tensor_values(tensor[rows]))
