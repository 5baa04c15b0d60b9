"""Export back to a checkpoint: the rows of a store as an overlay of a tensor, or merged into a copy of its file.

An overlay is a safetensors file with ``<tensor>.keys``, int64 (n,) ascending, and ``<tensor>.rows`` (n, dim): row i
replaces row ``keys[i]`` of the tensor. Its metadata gives the table, the tensor, and the size and header of the file
that it belongs to.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiercache.errors import CheckpointError, ImportExportError
from tiercache.io.staging import check_space, file_errors, staging_directory, to_path
from tiercache.store import Checkpoint, Store
from tiercache.store.bits import ITEM_BYTES, row_beyond, to_bits
from tiercache.store.checkpoint import CheckpointTensor
from tiercache.store.files import publish, sync
from tiercache.store.scan import SCAN_BYTES
from tiercache.store.table import Table, table_named

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_COPY_BYTES = 64 << 20


class Overlaid(NamedTuple):
    """The result of an export to a checkpoint."""

    table: str
    tensor: str
    rows: int
    num_bytes: int
    """Bytes of the file."""
    commit: int


def export_overlay(
    store: Store | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    table: str | None = None,
    tensor: str | None = None,
    merge: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Overlaid:
    """Write the rows of a table to a file ``out``, which must not exist, as an overlay of a checkpoint.

    With ``merge`` the file is a copy of the checkpoint's file with the rows in their places, so that it loads as the
    checkpoint does; holes of the file stay holes. If the tensor is cut into several files, ``out`` is a folder with a
    copy of each. An overlay has the dtype of the table, a merged tensor the dtype of the
    checkpoint, to whose nearest numbers rows are rounded, ties to even.

    ``store``: an open store, at any of its commits, or the path of one. ``base``: a .safetensors file, an index, or a
    folder; ``tensor``: a name in it. The default is the checkpoint that the table starts from, if there is one; they
    must then be the tensor that the store knows. ``table``: None if there is one. ``progress(done, total)`` is called
    with rows. Memory: 8 bytes per row and 128 MiB. The file gets its name when it is on disk.

    Raises ImportExportError, CheckpointError and what ``Store.open`` and ``Store.scan`` raise.
    """
    out = to_path(out, "an export")
    with file_errors(f"the export to {out}"), ExitStack() as stack:
        if isinstance(store, (str, os.PathLike)):
            store = stack.enter_context(Store.open(to_path(store, "a store"), mode="r"))
        store.check_whole()
        if store.commit is None:
            raise ImportExportError(f"{store.label} has no commit, so no rows to export: train it or import into it")
        if out.exists():
            raise ImportExportError(f"{out} exists: choose another path for the export")
        chosen = _table(store, table)
        base_tensor = _base(store, chosen, base, tensor)
        out.parent.mkdir(parents=True, exist_ok=True)
        draft, said = stack.enter_context(staging_directory(out)) / "new", progress or (lambda *_: None)
        pinned = stack.enter_context(store.at(store.commit.id))  # both scans see one commit
        rows, keys, dtype = pinned.live_rows(chosen.name), None, base_tensor.dtype
        if merge:
            places = _merged(draft, base_tensor)
        else:
            dtype, keys = chosen.dtype, _keys(pinned, chosen, rows)
            places = [_new_file(draft, keys, chosen, base_tensor, store.commit.id)]
        assert dtype is not None, "8-bit numbers were refused"
        done = 0
        with ExitStack() as files:
            handles = {one.path: files.enter_context(one.path.open("rb+", buffering=0)).fileno() for one in places}
            for found, fields in pinned.scan(chosen.name, memory_bytes=SCAN_BYTES, scratch=draft.parent):
                _check_keys(found, chosen, base_tensor)
                order = np.argsort(found)
                at, vectors = found[order], fields[0][order]
                if (bad := row_beyond(vectors, dtype)) is not None:
                    raise ImportExportError(
                        f"the row of key {int(at[bad])} of table {chosen.name!r} has numbers beyond the largest of "
                        f"{dtype}, the dtype of {base_tensor.label}: omit merge (--merge), and export an overlay"
                    )
                data = _bytes(vectors, dtype)
                if keys is not None:
                    at = np.searchsorted(keys, at)
                for one in places:
                    low, high = np.searchsorted(at, [one.first, one.first + one.rows]).tolist()
                    _write_rows(handles[one.path], one, at[low:high] - one.first, data[low:high])
                done += found.size
                said(done, rows)
            assert done == rows, f"{done} rows of {rows}"
        for file in base_tensor.files:
            file.check_unchanged()
        for path in [draft] if draft.is_file() else [*draft.iterdir(), draft]:
            sync(path)
        publish(draft, out)
        num_bytes = sum(path.stat().st_size for path in ([out] if out.is_file() else out.iterdir()))
        return Overlaid(chosen.name, base_tensor.name, done, num_bytes, store.commit.id)


class _Place(NamedTuple):
    """A place for rows in a file."""

    path: Path
    begin: int
    """Its first byte."""
    row_bytes: int
    first: int
    """The number of its first row."""
    rows: int


def _write_rows(handle: int, place: _Place, rows: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
    """Write data (n, row bytes) to ascending rows (n,) of a place, neighbors together. Raises OSError."""
    ends = [*(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), rows.size] if rows.size else []
    low = 0
    for high in ends:
        part, at = data[low:high].reshape(-1).data, place.begin + int(rows[low]) * place.row_bytes
        while part:
            count = os.pwrite(handle, part, at)
            part, at = part[count:], at + count
        low = high


def _check_keys(keys: NDArray[np.int64], table: Table, tensor: CheckpointTensor) -> None:
    """Raise ImportExportError unless the tensor has a row for each key."""
    outside = (keys < 0) | (keys >= tensor.num_rows)
    if outside.any():
        raise ImportExportError(
            f"table {table.name!r} has a row of key {int(keys[np.argmax(outside)])}, but {tensor.label} has "
            f"{tensor.num_rows:,} rows: forget the key, or export without the checkpoint"
        )


def _merged(draft: Path, tensor: CheckpointTensor) -> list[_Place]:
    """Copy the files of a tensor; returns the places of its parts."""
    if tensor.dtype is None:
        raise ImportExportError(f"{tensor.label} has 8-bit numbers: omit merge, and export an overlay")
    paths = [*dict.fromkeys(part.values.path for part in tensor.parts)]
    check_space(draft.parent, sum(path.stat().st_blocks * 512 for path in paths), "the export")
    if len(paths) > 1:
        draft.mkdir()
    to = {path: draft / path.name if len(paths) > 1 else draft for path in paths}
    for path in paths:
        _copy(path, to[path])
    return [
        _Place(to[one.path], one.begin, one.row_bytes, start, one.shape[0])
        for start, one in zip(tensor.starts.tolist(), (part.values for part in tensor.parts), strict=False)
    ]


def _table(store: Store, name: str | None) -> Table:
    """Return the table with a name; None: the only one, or the only one that starts from a checkpoint."""
    if name is not None:
        return table_named(store.tables, name, store.label)
    found = [one for one in store.tables if isinstance(one.initializer, Checkpoint)] or list(store.tables)
    if len(found) != 1:
        raise ImportExportError(f"{store.label} has tables {', '.join(repr(one.name) for one in found)}: pass one")
    return found[0]


def _base(store: Store, table: Table, base: str | os.PathLike[str] | None, tensor: str | None) -> CheckpointTensor:
    """Open the tensor that the rows belong to. Raises CheckpointError if the store started from another one."""
    start = table.initializer if isinstance(table.initializer, Checkpoint) else None
    if start is None:
        if base is None or tensor is None:
            missing = ["base (--overlay)"] * (base is None) + ["tensor (--tensor)"] * (tensor is None)
            raise ImportExportError(
                f"table {table.name!r} does not start from a checkpoint: pass {' and '.join(missing)}"
            )
        start = Checkpoint(path=str(to_path(base, "a checkpoint")), tensor=tensor)
    elif tensor not in {None, start.tensor}:
        raise ImportExportError(
            f"table {table.name!r} starts from tensor {start.tensor!r}, not {tensor!r}: omit tensor (--tensor)"
        )
    if base is not None:
        start = replace(start, path=str(to_path(base, "a checkpoint")))
    found = CheckpointTensor(start)
    if found.dim != table.dim:
        raise ImportExportError(
            f"{found.label} has {found.dim} columns, but table {table.name!r} has dim {table.dim}: pass its tensor"
        )
    for part in store.parts:
        record = part.checkpoints.get(table.name)
        if record is None or not record.identities:
            continue
        if record.identities != found.identities:
            raise CheckpointError(
                f"{found.label} is not what table {table.name!r} started from: pass that file as base"
            )
        record.check(found)  # another model of the same shape has the same header
    return found


def _keys(store: Store, table: Table, rows: int) -> NDArray[np.int64]:
    """Return the keys of a table, ascending."""
    found, done = np.empty(rows, np.int64), 0
    for keys, _ in store.scan(table.name, memory_bytes=SCAN_BYTES):
        found[done : done + keys.size] = keys
        done += keys.size
    found.sort()
    return found


def _bytes(values: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    """Return numbers (n, dim), rounded to the nearest of a dtype, as bytes (n, row bytes)."""
    rounded = np.ascontiguousarray(values) if dtype == "float32" else to_bits(values, dtype)
    return rounded.view(np.uint8).reshape(values.shape[0], -1)


def _new_file(path: Path, keys: NDArray[np.int64], table: Table, tensor: CheckpointTensor, commit: int) -> _Place:
    """Write header and keys of an overlay; returns the place of its rows."""
    row_bytes, size = ITEM_BYTES[table.dtype] * table.dim, 8 * keys.size
    metadata = {
        "format": "tiercache overlay 1", "table": table.name, "tensor": tensor.name, "commit": str(commit),
        "base_bytes": " ".join(str(one.size) for one in tensor.identities),
        "base_header": " ".join(one.header for one in tensor.identities),
    }  # fmt: skip
    tensors: dict[str, Any] = {
        f"{tensor.name}.keys": {"dtype": "I64", "shape": [keys.size], "data_offsets": [0, size]},
        f"{tensor.name}.rows": {
            "dtype": _NAMES[table.dtype], "shape": [keys.size, table.dim],
            "data_offsets": [size, size + keys.size * row_bytes],
        },
    }  # fmt: skip
    text = json.dumps({"__metadata__": metadata, **tensors}).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text) + size
    check_space(path.parent, begin + keys.size * row_bytes, "the export")
    with path.open("wb") as new:
        new.write(len(text).to_bytes(8, "little") + text)
        keys.astype("<i8", copy=False).tofile(new)
        new.truncate(begin + keys.size * row_bytes)
    return _Place(path, begin, row_bytes, 0, keys.size)


def _copy(source: Path, to: Path) -> None:
    """Copy the data of a file; holes stay holes."""
    with source.open("rb") as old, to.open("wb") as new:
        size, at = os.fstat(old.fileno()).st_size, 0
        new.truncate(size)
        while at < size:
            try:
                at = os.lseek(old.fileno(), at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # a hole up to the end
                    return
                raise
            end = os.lseek(old.fileno(), at, os.SEEK_HOLE)
            while at < end:
                if not (count := _copy_part(old.fileno(), new.fileno(), at, min(_COPY_BYTES, end - at))):
                    raise CheckpointError(f"{source} became shorter while it was copied: restore the original file")
                at += count


def _copy_part(old: int, new: int, at: int, size: int) -> int:
    """Copy up to ``size`` bytes at one place of two files; returns how many."""
    try:
        return os.copy_file_range(old, new, size, at, at)
    except OSError as error:
        if error.errno not in {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
            raise
    data, done = memoryview(os.pread(old, size, at)), 0
    while done < len(data):
        done += os.pwrite(new, data[done:], at + done)
    return done
