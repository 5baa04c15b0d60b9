"""Closing a pass: numbers become positions in hash order, and two files get their final names."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import numpy as np

from tiercache.atomic_io import publish, sync
from tiercache.data.dataset import record_sub_dataset
from tiercache.data.keyset import KeySet, in_hash_order, write_key_set
from tiercache.data.manifest import keys_name, samples_name
from tiercache.data.samples_file import SamplesFile
from tiercache.kernels.cpu.samples import permute, permute_columns

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.data.manifest import SubDatasetRecord
    from tiercache.data.numbering import OpenPass
    from tiercache.data.samples_file import Region

__all__ = ["close_pass"]


def close_pass(open_pass: OpenPass, out: Path, index: int) -> SubDatasetRecord:
    """Write pass ``index`` of the dataset in ``out``; its files are on disk under their final names on return.

    The numbered file is rewritten in place, region by region, and renamed: memory holds one region and the keys.
    """
    open_pass.finish()
    tables = open_pass.tables
    columns: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    rows = dict(zip((table.name for table in tables), open_pass.rows(), strict=True))
    first = dict(zip(rows, np.cumsum([0, *rows.values()]).tolist(), strict=False))
    positions = np.empty(sum(rows.values()), np.int32)
    for table in tables:
        keys, counts = open_pass.take_keys(table)
        order = in_hash_order(keys, table)
        positions[first[table.name] : first[table.name] + keys.size][order] = np.arange(keys.size, dtype=np.int32)
        columns[table.name] = (keys[order], counts[order])
        del keys, counts, order
    samples_digest = _rewrite(open_pass, positions, first)
    sync(open_pass.path)
    keys_path = open_pass.path.with_name(keys_name(index))
    write_key_set(keys_path, tables, columns.values())
    final = (out / samples_name(index), out / keys_name(index))
    publish(open_pass.path, final[0])
    publish(keys_path, final[1])
    return record_sub_dataset(open_pass.samples, samples_digest, KeySet(final[1], tables), *final)


def _rewrite(open_pass: OpenPass, positions: NDArray[np.int32], first: dict[str, int]) -> str:
    """Replace all numbers in the file by positions and return the digest of the result."""
    schema = open_pass.layout.schema
    bases = np.array([first[f.table] for f in schema.singles], np.int64)
    file = SamplesFile(open_pass.path, open_pass.layout)
    digest = hashlib.sha256(str(file.num_samples).encode())
    with open_pass.path.open("r+b", buffering=0) as handle:
        for region in file.regions():
            data = bytearray(region.num_bytes)
            os.preadv(handle.fileno(), [data], region.offset)
            if not region.is_offsets and region.column.dtype is np.int32:
                ids = np.frombuffer(data, np.int32)
                if region.column.feature is None:
                    permute_columns(ids.reshape(-1, bases.size), positions, bases)
                else:
                    permute(ids, positions[first[schema.feature(region.column.feature).table] :])
                _write_all(handle.fileno(), data, region)
            digest.update(data)
    return digest.hexdigest()


def _write_all(descriptor: int, data: bytearray, region: Region) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, memoryview(data)[done:], region.offset + done)
