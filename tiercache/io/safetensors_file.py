"""safetensors: for each table a file with the tensors ``keys`` (I64), ``vector`` and each optimizer state (F32; vectors
of 16-bit dtypes BF16 or F16).

The file is the bytes of its header (uint64), the header as JSON, and the tensors' bytes, one behind the other; see
the format's own page. It is written here, chunk by chunk, because the library wants all tensors in memory.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.errors import ImportExportError
from tiercache.io.column_file import ColumnFile, ColumnFiles
from tiercache.io.columns import BrainColumn, Columns, fields_of
from tiercache.store.optimizer import optimizer_to_record
from tiercache.store.vectors import ITEM_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.io.columns import Column
    from tiercache.store.table import Table

__all__ = ["read", "write"]

_DTYPES = {"I64": np.dtype("<i8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write(folder: Path, name: str, table: Table, rows: int, *, with_state: bool) -> ColumnFiles:
    """Begin to write ``rows`` rows."""
    fields = fields_of(table, with_state=with_state)
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
    return ColumnFiles(ColumnFile(path, offset=first), columns)


def read(folder: Path, name: str, table: Table) -> Columns:
    """Open a file through the library, which checks header and size. Raises ImportExportError."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportExportError("safetensors is not installed: pip install 'tiercache[exchange]'") from None
    path = folder / f"{name}.safetensors"
    try:
        file: Any = safe_open(path, framework="np")
        columns = {tensor: _column(path, file, tensor) for tensor in file.keys()}  # noqa: SIM118 - no mapping
    except FileNotFoundError:
        raise ImportExportError(f"there is no {path}: check the path and the format") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ImportExportError(f"{path} is no whole safetensors file ({error}): export it again") from error
    if "keys" not in columns:
        raise ImportExportError(f"{path} has no tensor 'keys' but {', '.join(map(repr, columns))}: check the format")
    return Columns(path, table, columns.pop("keys"), columns)


def _column(path: Path, file: Any, name: str) -> Column:
    """Return a tensor of a file; bfloat16 comes through torch, as NumPy has none."""
    found = file.get_slice(name)
    if found.get_dtype() != "BF16":
        return _Slices(found)
    import torch
    from safetensors import safe_open

    opened: Any = safe_open(path, framework="pt")
    tensor = opened.get_slice(name)
    return BrainColumn(
        tuple(found.get_shape()), lambda rows: tensor[rows].contiguous().view(torch.int16).numpy().view(np.uint16)
    )


class _Slices:
    """A tensor of a file: slices of its rows."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.get_shape())
        self.dtype = _DTYPES.get(tensor.get_dtype(), tensor.get_dtype())

    def __getitem__(self, rows: slice) -> Any:
        return self._tensor[rows]
