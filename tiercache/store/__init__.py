"""The parameter store: segments of rows in an engine, with atomic commits; importing it loads neither."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercache.store.alteration import Forgotten as Forgotten
    from tiercache.store.alteration import alter as alter
    from tiercache.store.alteration import forget as forget
    from tiercache.store.bits import hash_keys as hash_keys
    from tiercache.store.bits import mix as mix
    from tiercache.store.bits import xxh64 as xxh64
    from tiercache.store.bulk_load import load_rows as load_rows
    from tiercache.store.commit import Commit as Commit
    from tiercache.store.commit import Cursor as Cursor
    from tiercache.store.engines.engine import Counters as Counters
    from tiercache.store.engines.engine import Engine as Engine
    from tiercache.store.engines.engine import MemoryEngine as MemoryEngine
    from tiercache.store.engines.lmdb_engine import LmdbEngine as LmdbEngine
    from tiercache.store.engines.zarr_engine import ZarrEngine as ZarrEngine
    from tiercache.store.initializer import Checkpoint as Checkpoint
    from tiercache.store.initializer import Constant as Constant
    from tiercache.store.initializer import Normal as Normal
    from tiercache.store.initializer import Uniform as Uniform
    from tiercache.store.initializer import Zeros as Zeros
    from tiercache.store.initializer import initializer_code as initializer_code
    from tiercache.store.inspect import Difference as Difference
    from tiercache.store.inspect import differences as differences
    from tiercache.store.inspect import info as info
    from tiercache.store.inspect import verify as verify
    from tiercache.store.layout import NEVER as NEVER
    from tiercache.store.layout import Range as Range
    from tiercache.store.layout import SegmentLayout as SegmentLayout
    from tiercache.store.optimizer import SGD as SGD
    from tiercache.store.optimizer import Adagrad as Adagrad
    from tiercache.store.optimizer import Adam as Adam
    from tiercache.store.optimizer import Field as Field
    from tiercache.store.optimizer import RowWiseAdagrad as RowWiseAdagrad
    from tiercache.store.segment import Segment as Segment
    from tiercache.store.store import Store as Store
    from tiercache.store.store_errors import BlockReadError as BlockReadError
    from tiercache.store.store_errors import CommitMissingError as CommitMissingError
    from tiercache.store.store_errors import CorruptBlockError as CorruptBlockError
    from tiercache.store.store_errors import CorruptStoreError as CorruptStoreError
    from tiercache.store.store_errors import FormatVersionError as FormatVersionError
    from tiercache.store.store_errors import KeyMissingError as KeyMissingError
    from tiercache.store.store_errors import NotAStoreError as NotAStoreError
    from tiercache.store.store_errors import StoreClosedError as StoreClosedError
    from tiercache.store.store_errors import StoreError as StoreError
    from tiercache.store.store_errors import StoreFullError as StoreFullError
    from tiercache.store.store_errors import StoreInUseError as StoreInUseError
    from tiercache.store.store_errors import StoreMissingError as StoreMissingError
    from tiercache.store.store_errors import TableMismatchError as TableMismatchError
    from tiercache.store.table import Group as Group
    from tiercache.store.table import Table as Table
    from tiercache.store.table import group_tables as group_tables

if __name__ != "tiercache.store":
    raise ImportError("import tiercache.store: the folder store at the top level is a link to it")


_NAMES = {
    "alteration": "alter forget Forgotten",
    "bits": "hash_keys mix xxh64",
    "bulk_load": "load_rows",
    "commit": "Commit Cursor",
    "engines.engine": "Counters Engine MemoryEngine",
    "engines.lmdb_engine": "LmdbEngine",
    "engines.zarr_engine": "ZarrEngine",
    "initializer": "Checkpoint Constant initializer_code Normal Uniform Zeros",
    "inspect": "Difference differences info verify",
    "layout": "NEVER Range SegmentLayout",
    "optimizer": "Adagrad Adam Field RowWiseAdagrad SGD",
    "segment": "Segment",
    "store": "Store",
    "store_errors": "BlockReadError CheckpointError CommitMissingError CorruptBlockError CorruptStoreError "
    "FormatVersionError KeyMissingError NotAStoreError StoreClosedError StoreError StoreFullError StoreInUseError "
    "StoreMissingError TableMismatchError",
    "table": "Group group_tables Table",
}
"""By module the names that it has."""
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tiercache.store' has no attribute {name!r}")
    value = getattr(import_module(f"tiercache.store.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
