"""tiercache: embedding tables larger than memory, trained in PyTorch from an SSD parameter store.

Public names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiercache.distribution import warn_of_foreign_files
from tiercache.version import __version__ as __version__

if TYPE_CHECKING:
    from tiercache import init as init
    from tiercache import optim as optim
    from tiercache.data.dataset import PassDataset as PassDataset
    from tiercache.data.dataset_writer import write_key_sets as write_key_sets
    from tiercache.data.encode import key_of as key_of
    from tiercache.data.extract import extract as extract
    from tiercache.data.ngram_recording import record_ngrams as record_ngrams
    from tiercache.data.ngrams import NGrams as NGrams
    from tiercache.data.ngrams import ngrams as ngrams
    from tiercache.data.repartition import repartition as repartition
    from tiercache.data.token_files import TokenFiles as TokenFiles
    from tiercache.dist.reorganize import reorganize as reorganize
    from tiercache.errors import TierCacheError as TierCacheError
    from tiercache.io.exporting import export_store as export_store
    from tiercache.io.importing import import_store as import_store
    from tiercache.io.overlay import export_overlay as export_overlay
    from tiercache.planning.sharding_rules import CostModel as CostModel
    from tiercache.planning.sharding_rules import ShardingRules as ShardingRules
    from tiercache.rows.sizing import estimate as estimate
    from tiercache.schema import DenseFeature as DenseFeature
    from tiercache.schema import Feature as Feature
    from tiercache.schema import KeptColumn as KeptColumn
    from tiercache.schema import Schema as Schema
    from tiercache.store import Store as Store
    from tiercache.store.sharding import ShardingPlan as ShardingPlan
    from tiercache.store.store_errors import StoreError as StoreError
    from tiercache.store.table import Table as Table
    from tiercache.train.cache import TierCache as TierCache
    from tiercache.train.convert import convert as convert
    from tiercache.train.embedding import Embedding as Embedding
    from tiercache.train.embedding import EmbeddingBag as EmbeddingBag
    from tiercache.train.embedding import EmbeddingBagCollection as EmbeddingBagCollection
    from tiercache.train.embedding import EmbeddingCollection as EmbeddingCollection
    from tiercache.train.in_memory import InMemoryCache as InMemoryCache
    from tiercache.train.options import TierCacheOptions as TierCacheOptions
    from tiercache.train.parameter_table import ParameterTable as ParameterTable
    from tiercache.train.passes import Pass as Pass
    from tiercache.train.record import record_key_sets as record_key_sets
    from tiercache.train.to_torch import to_torch as to_torch
    from tiercache.values.batch import Batch as Batch

_HOME = {
    "Batch": "values.batch",
    "DenseFeature": "schema",
    "Embedding": "train.embedding",
    "EmbeddingBag": "train.embedding",
    "Feature": "schema",
    "KeptColumn": "schema",
    "NGrams": "data.ngrams",
    "PassDataset": "data.dataset",
    "ShardingPlan": "store.sharding",
    "CostModel": "planning.sharding_rules",
    "ShardingRules": "planning.sharding_rules",
    "InMemoryCache": "train.in_memory",
    "Schema": "schema",
    "Store": "store",
    "StoreError": "store.store_errors",
    "Table": "store.table",
    "TierCache": "train.cache",
    "TierCacheError": "errors",
    "TierCacheOptions": "train.options",
    "TokenFiles": "data.token_files",
    "EmbeddingCollection": "train.embedding",
    "EmbeddingBagCollection": "train.embedding",
    "ParameterTable": "train.parameter_table",
    "Pass": "train.passes",
    "convert": "train.convert",
    "estimate": "rows.sizing",
    "export_overlay": "io.overlay",
    "export_store": "io.exporting",
    "extract": "data.extract",
    "import_store": "io.importing",
    "key_of": "data.encode",
    "ngrams": "data.ngrams",
    "record_key_sets": "train.record",
    "record_ngrams": "data.ngram_recording",
    "reorganize": "dist.reorganize",
    "repartition": "data.repartition",
    "to_torch": "train.to_torch",
    "write_key_sets": "data.dataset_writer",
}

__all__ = [
    "Batch",
    "CostModel",
    "DenseFeature",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "Feature",
    "InMemoryCache",
    "KeptColumn",
    "NGrams",
    "ParameterTable",
    "Pass",
    "PassDataset",
    "Schema",
    "ShardingPlan",
    "ShardingRules",
    "Store",
    "StoreError",
    "Table",
    "TierCache",
    "TierCacheError",
    "TierCacheOptions",
    "TokenFiles",
    "convert",
    "estimate",
    "export_overlay",
    "export_store",
    "extract",
    "import_store",
    "init",
    "key_of",
    "ngrams",
    "optim",
    "record_key_sets",
    "record_ngrams",
    "reorganize",
    "repartition",
    "to_torch",
    "write_key_sets",
]


warn_of_foreign_files(Path(__file__).parents[1])


def __getattr__(name: str) -> Any:
    if name in ("init", "optim"):
        return import_module(f"tiercache.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'tiercache' has no attribute {name!r}")
    value = getattr(import_module(f"tiercache.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
