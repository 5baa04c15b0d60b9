"""The weights of converted modules: rows for a store that is made, and the keys that the modules had."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tiercache.data.raw_batch import NULL_KEY
from tiercache.errors import DatasetError, StateError
from tiercache.store.bits import hash_keys, keys_of
from tiercache.train.table_module import table_modules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tiercache.data.dataset import DatasetView
    from tiercache.store import Table
    from tiercache.store.scan import Chunk

_CHUNK_BYTES = 16 << 20


def weights_of(objects: Iterable[object]) -> dict[str, torch.Tensor]:
    """Return by table the weights (rows, dim) that converted modules among ``objects`` had."""
    return {table: weight for one in table_modules(objects) for table, weight in one.weights.items()}


def bounds_of(objects: Iterable[object]) -> dict[str, int]:
    """Return by table the number of keys that converted modules had, without open tables."""
    return {table: rows for one in table_modules(objects) for table, rows in one.bounds.items()}


def check_keys_within(bounds: Mapping[str, int], passes: DatasetView) -> None:
    """Raise DatasetError if a dataset has keys that a converted module had no row for, as torch would raise."""
    for name, rows in bounds.items():
        for one in passes.passes:
            keys = one.keys(name)
            beyond = keys[(keys >= rows) | ((keys < 0) & (keys > NULL_KEY))]
            if beyond.size:
                raise DatasetError(
                    f"the converted module of table {name!r} has {rows:,} rows (num_embeddings), and sub-dataset "
                    f"{one.index} of {passes.path} has {beyond.size:,} other keys, such as {int(beyond[0])}, for which "
                    "torch would raise IndexError: check the ids, convert a model with more rows, or open the table in "
                    f"the schema (Schema(open_tables=[{name!r}]), or open = true in [tables.{name}]), so that any "
                    "int64 is a key"
                )


def drop_weights(objects: Iterable[object]) -> None:
    """Free the weights of converted modules."""
    for one in table_modules(objects):
        one.weights = {}


def refuse_weights(objects: Iterable[object], *, has_store: bool) -> None:
    """Raise StateError if a converted model still has its weights, because they would become no rows."""
    if found := weights_of(objects):
        raise StateError(
            "a converted model has rows for the new store: pass it to TierCache(model=...), not to register()"
            if has_store
            else f"the converted module of table {next(iter(found))!r} has a weight, which becomes rows of a new "
            "store, but a cache without a store starts from initializers: use TierCache(path, ...), or create the "
            'module on "meta" before tc.convert'
        )


def weight_rows(table: Table, weights: Mapping[str, torch.Tensor]) -> Iterator[Chunk]:
    """Yield keys (n,) and all fields (n, width) of a table's weights in hash order, a few MiB at a time."""
    weight = weights.get(table.name)
    if weight is None:
        return
    keys = keys_of(np.sort(hash_keys(np.arange(weight.shape[0], dtype=np.int64), table.table_id)), table.table_id)
    step = max(1, _CHUNK_BYTES // table.row_bytes)
    for low in range(0, keys.size, step):
        chunk = keys[low : low + step]
        vectors = weight[torch.from_numpy(chunk).to(weight.device)].detach().to("cpu", torch.float32).numpy()
        states = (np.full((chunk.size, field.width), field.initial, np.float32) for field in table.fields[1:])
        yield chunk, (vectors, *states)
