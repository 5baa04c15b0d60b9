"""The parameter store: segments of rows in an engine, with atomic commits. Loads neither torch nor an engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercache.store.commit import Commit, Cursor
    from tiercache.store.counters import Counters
    from tiercache.store.engine import Contents, Engine
    from tiercache.store.errors import (
        BlockReadError,
        CorruptBlockError,
        CorruptStoreError,
        FormatVersionError,
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
    from tiercache.store.store import Store
    from tiercache.store.stream import NEVER, Range, Stream
    from tiercache.store.table import Group, Table, group_tables

_MODULES = {
    "commit": ("Commit", "Cursor"),
    "counters": ("Counters",),
    "engine": ("Contents", "Engine"),
    "errors": (
        "BlockReadError",
        "CorruptBlockError",
        "CorruptStoreError",
        "FormatVersionError",
        "NotAStoreError",
        "StoreClosedError",
        "StoreError",
        "StoreFullError",
        "StoreInUseError",
        "StoreMissingError",
        "TableMismatchError",
    ),
    "hashing": ("hash_keys", "mix", "xxh64"),
    "initializer": ("Constant", "Normal", "Uniform", "Zeros", "initializer_code"),
    "inspect": ("info", "verify"),
    "lmdb_engine": ("LmdbEngine",),
    "memory_engine": ("MemoryEngine",),
    "optimizer": ("SGD", "Adagrad", "Adam", "Field", "RowWiseAdagrad"),
    "segment": ("Segment",),
    "store": ("Store",),
    "stream": ("NEVER", "Range", "Stream"),
    "table": ("Group", "Table", "group_tables"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [  # noqa: PLE0604 - the names stand once, in _MODULES
    *sorted(_HOME)
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tiercache.store' has no attribute {name!r}")
    value = getattr(import_module(f"tiercache.store.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
