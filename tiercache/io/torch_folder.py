"""torch: for each table a folder with ``table.pt``, the state dict of an embedding, and ``vocabulary.npy``.

Row i of ``weight``, in the table's dtype, is the vector of key i of the vocabulary. A state dict of ``nn.Embedding``
has no optimizer state.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.atomic_io import sync
from tiercache.errors import ImportExportError
from tiercache.io.column_file import ColumnFile, ColumnFiles
from tiercache.io.columns import BrainColumn, Columns
from tiercache.io.numpy_folder import array_header, map_array

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.store.scan import Chunk
    from tiercache.store.table import Table

__all__ = ["read", "write"]

_RAW = "weight.raw"


def write(folder: Path, name: str, table: Table, rows: int, *, with_state: bool) -> _StateDictWriter:
    """Begin to write rows; there is no place for the optimizer state."""
    assert not with_state or len(table.fields) == 1
    place = folder / name
    place.mkdir()
    return _StateDictWriter(place, table, rows)


def read(folder: Path, name: str, table: Table) -> Columns:
    """Open a state dict, mapped, and its vocabulary; no object but tensors is loaded. Raises ImportExportError."""
    import torch

    path = folder / name / "table.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise ImportExportError(f"there is no {path}: check the path and the format") from None
    except (pickle.UnpicklingError, RuntimeError, ValueError, OSError, EOFError, KeyError, TypeError) as error:
        why = str(error).split("\n", maxsplit=1)[0]
        raise ImportExportError(f"{path} is no whole state dict of tensors ({why}): save it again") from error
    if not isinstance(state, dict) or list(state) != ["weight"] or not isinstance(state["weight"], torch.Tensor):
        names = ", ".join(map(repr, state)) if isinstance(state, dict) else type(state).__name__
        raise ImportExportError(f"{path} holds {names}: it must be the state dict of an embedding, a tensor 'weight'")
    weight = state["weight"].detach()
    if weight.dtype not in {torch.float32, getattr(torch, table.dtype)} or weight.layout != torch.strided:
        allowed = "float32" if table.dtype == "float32" else f"float32 or {table.dtype}"
        raise ImportExportError(f"'weight' in {path} is {weight.dtype}: it must be a dense {allowed} tensor")
    vectors: Any = weight
    if weight.dtype == torch.bfloat16:
        bits = weight.contiguous().view(torch.int16).numpy().view(np.uint16)
        vectors = BrainColumn(tuple(weight.shape), lambda rows: bits[rows])
    else:
        vectors = weight.numpy()
    return Columns(path.parent, table, map_array(path.parent / "vocabulary.npy"), {"vector": vectors})


class _StateDictWriter:
    """Writes vectors to a file of their own first, which torch then saves from a map: memory stays bounded."""

    def __init__(self, place: Path, table: Table, rows: int) -> None:
        self._place, self._shape, self._dtype = place, (rows, table.dim), table.dtype
        vocabulary = ColumnFile(place / "vocabulary.npy", header=array_header("<i8", (rows,)))
        self._columns = ColumnFiles(vocabulary, [ColumnFile(place / _RAW, dtype=table.dtype)])
        self._closed = False

    def write(self, chunk: Chunk) -> None:
        """Append a chunk of rows."""
        self._columns.write(chunk)

    def close(self) -> None:
        """Save the state dict; on return it is on disk."""
        import torch

        self._columns.close()
        raw, path = self._place / _RAW, self._place / "table.pt"
        descr = "<f4" if self._dtype == "float32" else "<i2"
        numbers: Any = np.empty(0, dtype=descr)
        if raw.stat().st_size:
            numbers = np.memmap(raw, dtype=descr, mode="r+")
        weight = torch.from_numpy(numbers).view(getattr(torch, self._dtype)).reshape(self._shape)
        torch.save({"weight": weight}, path)
        sync(path)
        raw.unlink()
