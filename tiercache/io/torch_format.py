"""torch: for each table a folder with ``table.pt``, the state dict of an embedding, and ``vocabulary.npy``.

Row i of ``weight``, in the table's dtype, is the vector of key i of the vocabulary. A state dict of ``nn.Embedding``
has no optimizer state. `load_tensors` reads the state dict of any model.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from tiercache.errors import ImportExportError
from tiercache.io.formats import Column, ColumnFile, ColumnWriter, Format, TableReader, parsing
from tiercache.io.numpy_format import keys_file, map_array
from tiercache.store.files import sync

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tiercache.store.optimizer import Field
    from tiercache.store.table import Table


def _write(folder: Path, name: str, table: Table, fields: tuple[Field, ...], rows: int) -> ColumnWriter:
    """Write vectors to a raw file first, which torch then saves from a memory map: memory stays bounded."""
    assert len(fields) == 1
    place = folder / name
    place.mkdir()
    raw, path = place / "weight.raw", place / "table.pt"

    def save() -> None:
        import torch

        shape, dtype = (rows, table.dim), getattr(torch, table.dtype)
        weight = torch.empty(shape, dtype=dtype, device="cpu")
        if rows:
            weight = torch.from_file(str(raw), shared=True, size=weight.numel(), dtype=dtype).view(shape)
        torch.save({"weight": weight}, path)
        sync(path)
        raw.unlink()

    return ColumnWriter(keys_file(place / "vocabulary.npy", rows), [ColumnFile(raw, dtype=table.dtype)], finish=save)


def _read(folder: Path, name: str, table: Table) -> TableReader:
    place = folder / name
    path = place / "table.pt"
    state = load_tensors(path)
    if list(state) != ["weight"]:
        names = ", ".join(map(repr, state)) or "no tensor"
        raise ImportExportError(f"{path} holds {names}: expected the state dict of an embedding, a tensor 'weight'")
    columns = {
        "keys": Column.of(map_array(place / "vocabulary.npy")),
        "vector": Column.of_tensor(state["weight"], f"'weight' in {path}"),
    }
    return TableReader(place, table, columns)


FORMAT = Format(
    write=_write,
    read=_read,
    dtypes=("bfloat16", "float16"),
    vector_copies=2,
    keeps_state=lambda table: len(table.fields) == 1,
)


def load_tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a state dict by name, mapped; names in nested dicts are joined by dots.

    Only tensors and plain values are loaded, so no code of the file runs. Files of torch before 1.6, which are no
    archives, are not mapped. Raises ImportExportError.
    """
    import torch

    from tiercache.values.torch_internals import refused_by

    with parsing(path, "state dict of tensors"):
        with path.open("rb") as file:
            is_pickle = file.read(1) == pickle.PROTO
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=not is_pickle)
        except pickle.UnpicklingError as error:  # torch advises to load it without weights_only
            raise ImportExportError(
                f"{path} has more than tensors and plain values ({refused_by(error)}), so it was not loaded and "
                "nothing in it was executed: save model.state_dict() alone with torch.save"
            ) from error
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            raise ImportExportError(
                f"{path} is not a file of torch.save: pass one, or the folder that holds the files of the tables"
            ) from error
    if not isinstance(state, dict):
        raise ImportExportError(f"{path} holds {type(state).__name__}: expected a state dict of names and tensors")
    try:
        return dict(_tensors(state, ""))
    except RecursionError as error:
        raise ImportExportError(
            f"{path} has dicts that are nested too deeply, or contain themselves: save flat names"
        ) from error


def _tensors(state: Mapping[Any, Any], prefix: str) -> Any:
    import torch

    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, dict):
            yield from _tensors(value, f"{prefix}{name}.")
