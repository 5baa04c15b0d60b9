"""The parameter store: segments of rows in an engine, with atomic commits; importing it loads neither."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercache.store.alter import alter
    from tiercache.store.bits import hash_keys, mix, xxh64
    from tiercache.store.bulk_load import load_rows
    from tiercache.store.changes import Difference, differences
    from tiercache.store.commit import Commit, Cursor
    from tiercache.store.engines.engine import Counters, Engine, MemoryEngine
    from tiercache.store.engines.lmdb_engine import LmdbEngine
    from tiercache.store.engines.zarr_engine import ZarrEngine
    from tiercache.store.forget import Forgotten, forget
    from tiercache.store.initializer import Constant, Normal, Uniform, Zeros, initializer_code
    from tiercache.store.inspect import info, verify
    from tiercache.store.layout import NEVER, Range, SegmentLayout
    from tiercache.store.optimizer import SGD, Adagrad, Adam, Field, RowWiseAdagrad
    from tiercache.store.segment import Segment
    from tiercache.store.store import Store
    from tiercache.store.store_errors import (
        BlockReadError,
        CommitMissingError,
        CorruptBlockError,
        CorruptStoreError,
        FormatVersionError,
        KeyMissingError,
        NotAStoreError,
        StoreClosedError,
        StoreError,
        StoreFullError,
        StoreInUseError,
        StoreMissingError,
        TableMismatchError,
    )
    from tiercache.store.table import Group, Table, group_tables

if __name__ != "tiercache.store":
    raise ImportError("import tiercache.store: the folder store at the top level is a link to it")


_HOME = {
    "alter": "alter",
    "Commit": "commit",
    "Cursor": "commit",
    "Counters": "engines.engine",
    "Difference": "changes",
    "differences": "changes",
    "Engine": "engines.engine",
    "BlockReadError": "store_errors",
    "CommitMissingError": "store_errors",
    "CorruptBlockError": "store_errors",
    "CorruptStoreError": "store_errors",
    "FormatVersionError": "store_errors",
    "KeyMissingError": "store_errors",
    "NotAStoreError": "store_errors",
    "StoreClosedError": "store_errors",
    "StoreError": "store_errors",
    "StoreFullError": "store_errors",
    "StoreInUseError": "store_errors",
    "StoreMissingError": "store_errors",
    "TableMismatchError": "store_errors",
    "Forgotten": "forget",
    "forget": "forget",
    "load_rows": "bulk_load",
    "hash_keys": "bits",
    "mix": "bits",
    "xxh64": "bits",
    "Constant": "initializer",
    "Normal": "initializer",
    "Uniform": "initializer",
    "Zeros": "initializer",
    "initializer_code": "initializer",
    "info": "inspect",
    "verify": "inspect",
    "LmdbEngine": "engines.lmdb_engine",
    "MemoryEngine": "engines.engine",
    "SGD": "optimizer",
    "Adagrad": "optimizer",
    "Adam": "optimizer",
    "Field": "optimizer",
    "RowWiseAdagrad": "optimizer",
    "Segment": "segment",
    "Store": "store",
    "NEVER": "layout",
    "Range": "layout",
    "SegmentLayout": "layout",
    "Group": "table",
    "Table": "table",
    "group_tables": "table",
    "ZarrEngine": "engines.zarr_engine",
}

__all__ = [
    "NEVER",
    "SGD",
    "Adagrad",
    "Adam",
    "BlockReadError",
    "Commit",
    "CommitMissingError",
    "Constant",
    "CorruptBlockError",
    "CorruptStoreError",
    "Counters",
    "Cursor",
    "Difference",
    "Engine",
    "Field",
    "Forgotten",
    "FormatVersionError",
    "Group",
    "KeyMissingError",
    "LmdbEngine",
    "MemoryEngine",
    "Normal",
    "NotAStoreError",
    "Range",
    "RowWiseAdagrad",
    "Segment",
    "SegmentLayout",
    "Store",
    "StoreClosedError",
    "StoreError",
    "StoreFullError",
    "StoreInUseError",
    "StoreMissingError",
    "Table",
    "TableMismatchError",
    "Uniform",
    "ZarrEngine",
    "Zeros",
    "alter",
    "differences",
    "forget",
    "group_tables",
    "hash_keys",
    "info",
    "initializer_code",
    "load_rows",
    "mix",
    "verify",
    "xxh64",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tiercache.store' has no attribute {name!r}")
    value = getattr(import_module(f"tiercache.store.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
