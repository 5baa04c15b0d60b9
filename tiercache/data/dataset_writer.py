"""Datasets of key sets alone, for lookups by raw key with your own loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.data.dataset import PassDataset
from tiercache.data.keyset import KeyPacker, key_schema, write_key_set
from tiercache.data.manifest import MANIFEST, Manifest, SubDatasetRecord, file_name, new_folder
from tiercache.data.pass_builder import RowBudget
from tiercache.data.raw_batch import NULL_KEY
from tiercache.errors import DatasetError
from tiercache.kernels.cpu.unique_keys import UniqueKeys
from tiercache.schema import Schema
from tiercache.schema_parts import nearest
from tiercache.sizes import parse_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.table import Table


_CHUNK_KEYS = 1 << 20


def write_key_sets(
    out: str | Path,
    tables: Schema | Iterable[Table],
    passes: Iterable[Mapping[str, Any]],
    *,
    device_budget: int | str | None = None,
    devices: int = 1,
) -> PassDataset:
    """Write a dataset whose sub-datasets have key sets but no samples; ``Pass.batch`` looks up keys in it.

    tables: the tables, each with one feature of the same name and any number of keys per sample; or a schema. passes:
    for each sub-dataset its keys by table, as one array or an iterable of arrays: integers of NumPy or torch in any
    order, or files mapped by ``tiercache.io.key_set_file.read_key_set``. A key may repeat: occurrences are counted. A
    missing table has no keys in the sub-dataset.
    device_budget: the device memory for the rows of a pass, as in `extract`. ``passes`` are then blocks of samples that
    stay together, such as the files of your data: a sub-dataset has as many of them as fit, in their order (see
    ``PassDataset.blocks``). The keys of a block are in memory at once. None: each of ``passes`` is one sub-dataset.
    devices: the number of devices with that budget that train a pass together, as in `extract`.

    Reads one pass at a time, and within it one table at a time, in chunks of a million keys. Memory: 16 bytes for each
    unique key of a sub-dataset and up to 100 for each of one table. The dataset is finished on return; after a kill,
    call again. Raises DatasetError for the reserved keys INT64_MIN and INT64_MIN + 1, for unknown tables and for a
    directory with a dataset, BudgetError for a block that exceeds the budget alone, and ValueError for anything but
    integers.
    """
    schema = tables if isinstance(tables, Schema) else key_schema(tables)
    directory = new_folder(out)
    if (directory / MANIFEST).exists():
        raise DatasetError(f"{directory} holds a dataset already: choose another directory")
    given: Iterable[Mapping[str, Any]] = () if passes is None else passes
    options: dict[str, Any] = {}
    if device_budget is None:
        records = [_write(directory, index, schema, keys) for index, keys in enumerate(given)]
    else:
        budget = RowBudget(schema.tables, parse_bytes(device_budget), devices)
        blocks: list[int] = []
        records = list(_write_packed(directory, schema, given, budget, blocks))
        options = {"blocks": blocks}
    if not records:
        raise DatasetError("no passes were given: pass the keys of at least one")
    Manifest(schema=schema, passes=tuple(records), options=options, inputs=()).write(directory)
    return PassDataset.open(directory)


def as_keys(what: str, values: Any) -> NDArray[np.int64]:
    """Return integers of NumPy, torch or Python as int64 in their shape, uncopied if possible. Raises ValueError."""
    values = _numpy(values)
    if np.ma.is_masked(values):
        raise ValueError(f"{what} have masked values: drop these, or use a key for them")
    if values.dtype.kind not in "iu" or values.dtype == np.uint64:
        if values.dtype.kind in "USO":
            raise ValueError(
                f"{what} are strings or objects: keys are int64, use tiercache.key_of(text) for strings, and a pair "
                "(values, offsets) for lists of different lengths"
            )
        raise ValueError(f"{what} are {values.dtype}: keys are int64, pass integers that fit")
    return values.astype(np.int64, copy=False)  # type: ignore[no-any-return]


def _numpy(values: Any) -> NDArray[Any]:
    if hasattr(values, "detach"):  # a tensor on any device
        if values.is_sparse or values.is_meta:
            raise ValueError("keys are a sparse tensor, or one without values: pass a dense tensor of integers")
        return values.detach().numpy(force=True)  # type: ignore[no-any-return]
    if isinstance(values, np.ndarray):
        return values
    try:
        array: NDArray[Any] = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.asarray(values, object)
    return array if array.size else array.astype(np.int64)  # NumPy makes an empty list float


def _write_packed(
    directory: Path, schema: Schema, given: Iterable[Mapping[str, Any]], budget: RowBudget, blocks: list[int]
) -> Iterator[SubDatasetRecord]:
    """Write as many blocks into each sub-dataset as fit; ``blocks`` gets the number of each."""
    tables = schema.ordered_tables
    packer = KeyPacker(tables, budget)

    def close() -> SubDatasetRecord:
        blocks.append(packer.num_blocks)
        return packer.write(directory / file_name(len(blocks) - 1))

    for number, keys in enumerate(given):
        where = f"block {number}"
        _check_tables(where, schema, keys)
        of_tables = {
            table.name: np.concatenate([np.empty(0, np.int64), *_key_chunks(table, where, keys[table.name])])
            for table in tables
            if table.name in keys
        }
        if not packer.add(of_tables, where, "give smaller blocks"):
            yield close()
            packer.add(of_tables, where, "give smaller blocks")
    if packer.num_blocks:
        yield close()


def _check_tables(where: str, schema: Schema, keys: Mapping[str, Any]) -> None:
    if not isinstance(keys, Mapping):
        raise DatasetError(f"{where} is {type(keys).__name__}: pass a mapping from tables to their keys")
    known = {table.name for table in schema.tables}
    for name in keys:
        if name not in known:
            raise DatasetError(
                f"{where} has keys of the unknown table {name!r}{nearest(name, known)}: the tables are "
                f"{', '.join(sorted(known))}"
            )


def _write(directory: Path, index: int, schema: Schema, keys: Mapping[str, Any]) -> SubDatasetRecord:
    _check_tables(f"sub-dataset {index}", schema, keys)
    tables = schema.ordered_tables
    columns = [_column(table, f"sub-dataset {index}", keys.get(table.name, ())) for table in tables]
    rows = {table.name: unique.size for table, (unique, _) in zip(tables, columns, strict=True)}
    return write_key_set(directory / file_name(index), tables, rows, columns)


def _column(table: Table, where: str, keys: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the unique keys of one table in hash order, and their counts."""
    unique, numbers = UniqueKeys(table.table_id), np.empty(_CHUNK_KEYS, np.int32)
    for chunk in _key_chunks(table, where, keys):
        unique.add(chunk, numbers[: chunk.size])
    return unique.sorted()[:2]


def _key_chunks(table: Table, where: str, keys: Any) -> Iterator[NDArray[np.int64]]:
    """Yield the keys of a table in chunks. Raises DatasetError for reserved keys."""
    for chunk in _chunks(f"the keys of table {table.name!r} in {where}", keys):
        if int(chunk.min()) <= NULL_KEY:
            raise DatasetError(
                f"{where} has the key {int(chunk.min())} in table {table.name!r}: INT64_MIN and INT64_MIN + 1 are the "
                "keys of the out-of-vocabulary row and the null row, so use another key for such values"
            )
        yield chunk


def _chunks(what: str, keys: Any) -> Iterator[NDArray[np.int64]]:
    """Yield the keys of one array or of several, in chunks that are not empty."""
    if not hasattr(keys, "__iter__") and not _is_array(keys):
        raise ValueError(f"{what} are {keys!r}: pass an array of integers, or an iterable of such arrays")
    for array in [keys] if _is_array(keys) else keys:
        flat = _numpy(array).reshape(-1)
        for low in range(0, flat.size, _CHUNK_KEYS):
            yield np.ascontiguousarray(as_keys(what, flat[low : low + _CHUNK_KEYS]))


def _is_array(keys: Any) -> bool:
    """Return True for one array of keys, False for several."""
    if hasattr(keys, "__array__"):
        return True
    return isinstance(keys, list | tuple | range) and all(isinstance(key, int | np.integer) for key in keys)
