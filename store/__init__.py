"""The parameter store: segments of rows in an engine, with atomic commits; importing it loads neither."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercache.store.bulk_load import load_rows
    from tiercache.store.commit import Commit, Cursor
    from tiercache.store.counters import Counters
    from tiercache.store.diff import Difference, differences
    from tiercache.store.engine import Engine
    from tiercache.store.errors import (
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
    from tiercache.store.hashing import hash_keys, mix, xxh64
    from tiercache.store.initializer import Constant, Normal, Uniform, Zeros, initializer_code
    from tiercache.store.inspect import info, verify
    from tiercache.store.lmdb_engine import LmdbEngine
    from tiercache.store.memory_engine import MemoryEngine
    from tiercache.store.optimizer import SGD, Adagrad, Adam, Field, RowWiseAdagrad
    from tiercache.store.segment import Segment
    from tiercache.store.segment_layout import NEVER, Range, SegmentLayout
    from tiercache.store.store import Store
    from tiercache.store.table import Group, Table, group_tables
    from tiercache.store.zarr_engine import ZarrEngine

_HOME = {
    "Commit": "commit",
    "Cursor": "commit",
    "Counters": "counters",
    "Difference": "diff",
    "differences": "diff",
    "Engine": "engine",
    "BlockReadError": "errors",
    "CommitMissingError": "errors",
    "CorruptBlockError": "errors",
    "CorruptStoreError": "errors",
    "FormatVersionError": "errors",
    "KeyMissingError": "errors",
    "NotAStoreError": "errors",
    "StoreClosedError": "errors",
    "StoreError": "errors",
    "StoreFullError": "errors",
    "StoreInUseError": "errors",
    "StoreMissingError": "errors",
    "TableMismatchError": "errors",
    "load_rows": "bulk_load",
    "hash_keys": "hashing",
    "mix": "hashing",
    "xxh64": "hashing",
    "Constant": "initializer",
    "Normal": "initializer",
    "Uniform": "initializer",
    "Zeros": "initializer",
    "initializer_code": "initializer",
    "info": "inspect",
    "verify": "inspect",
    "LmdbEngine": "lmdb_engine",
    "MemoryEngine": "memory_engine",
    "SGD": "optimizer",
    "Adagrad": "optimizer",
    "Adam": "optimizer",
    "Field": "optimizer",
    "RowWiseAdagrad": "optimizer",
    "Segment": "segment",
    "Store": "store",
    "NEVER": "segment_layout",
    "Range": "segment_layout",
    "SegmentLayout": "segment_layout",
    "Group": "table",
    "Table": "table",
    "group_tables": "table",
    "ZarrEngine": "zarr_engine",
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
    "differences",
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
