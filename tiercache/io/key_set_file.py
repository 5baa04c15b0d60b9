"""HugeCTR's key-set files: keys packed as uint32 or int64, little-endian, without a header and in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.errors import ImportExportError
from tiercache.io.exporting import file_name
from tiercache.io.formats import ColumnFile, regular_file
from tiercache.io.staging import file_errors, staging_directory, to_path
from tiercache.store.files import publish, sync

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

    from tiercache.data.dataset import PassDataset

_DTYPES: dict[str, np.dtype[Any]] = {"uint32": np.dtype("<u4"), "int64": np.dtype("<i8")}


def read_key_set(path: str | os.PathLike[str], dtype: str) -> NDArray[np.int64] | NDArray[np.uint32]:
    """Return the keys of a file, in its order and its dtype: a memory map, read-only. Raises ImportExportError."""
    path, kind = to_path(path, "a key set"), _dtype(dtype)
    with file_errors(f"reading the key set {path}"):
        size = regular_file(path).stat().st_size
        if size % kind.itemsize:
            raise ImportExportError(
                f"{path} has {size:,} bytes, not whole {dtype} keys: check dtype, or write it again"
            )
        if size:
            return np.memmap(path, dtype=kind, mode="r")
    return np.empty(0, dtype=kind)  # an empty file cannot be mapped


def export_key_sets(dataset: PassDataset, out: str | os.PathLike[str], dtype: str = "int64") -> None:
    """Write the key sets of all passes to a folder ``out``, which must not exist yet: ``TABLE/pass-00000.keys`` on.

    The folder gets its name when all is on disk. Raises ImportExportError, also for keys that uint32 cannot hold.
    """
    out, kind = to_path(out, "an export of key sets"), _dtype(dtype)
    if out.exists():
        raise ImportExportError(f"{out} exists: choose another path for the key sets")
    with file_errors(f"writing key sets to {out}"), staging_directory(out) as draft:
        for table in dataset.tables:
            folder = draft / file_name(table)
            folder.mkdir(parents=True)
            for part in dataset:
                keys = part.keys(table.name)
                if dtype == "uint32" and keys.size and not (keys.min() >= 0 and keys.max() < 1 << 32):
                    raise ImportExportError(
                        f"keys {keys.min()} to {keys.max()} of table {table.name!r} do not all fit uint32, which holds "
                        f"0 to {(1 << 32) - 1}: write them as int64"
                    )
                file = ColumnFile(folder / f"pass-{part.index:05d}.keys")
                file.write(keys.astype(kind))
                file.close()
            sync(folder)
        sync(draft)
        publish(draft, out)


def _dtype(name: str) -> np.dtype[Any]:
    if name not in _DTYPES:
        raise ImportExportError(f"unknown dtype {name!r} of a key set: expected 'uint32' or 'int64'")
    return _DTYPES[name]
