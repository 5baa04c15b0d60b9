"""LMDB's tree read in its file: every value is found where LMDB put it."""

import os
from contextlib import closing
from pathlib import Path

import lmdb
import numpy as np
import pytest

from tiercache.store.engines.lmdb_map import LmdbFile


@pytest.mark.disk
def test_the_file_tells_where_lmdb_has_each_value(tmp_path: Path) -> None:
    """For values of all sizes, in trees of several levels: one after another, and each by its key."""
    generator = np.random.default_rng(0)
    values = {f"{i:05d}".encode(): generator.bytes(int(generator.integers(0, 9000))) for i in range(1500)}
    gone = list(values)[::7]
    with lmdb.open(str(tmp_path), map_size=1 << 26, sync=False) as environment:
        for _ in range(3):
            with environment.begin(write=True) as txn:
                for key, value in values.items():
                    txn.put(key, value)
        for key in gone:
            with environment.begin(write=True) as txn:
                txn.delete(key)
            del values[key]
    with closing(LmdbFile(str(tmp_path / "data.mdb"))) as file:
        found = {value.key: os.pread(file.handle, value.size, value.offset) for value in file.values()}
        assert found == values
        assert list(found) == sorted(values)
        assert {value.key: file.read(value) for value in file.values()} == values
        for key, data in values.items():
            value = file.find(key)
            assert value is not None
            assert file.read(value) == data
        for key in [*gone, b"", b"0", b"99999", b"00000\0", b"zzz"]:
            assert file.find(key) is None


def test_an_empty_tree_has_no_value(tmp_path: Path) -> None:
    """One that was never filled, and one that lost all values."""
    with lmdb.open(str(tmp_path), map_size=1 << 20) as environment:
        for _ in range(2):
            with closing(LmdbFile(str(tmp_path / "data.mdb"))) as file:
                assert (file.find(b"a"), list(file.values())) == (None, [])
            with environment.begin(write=True) as txn:
                txn.put(b"a", b"1")
                txn.delete(b"a")
