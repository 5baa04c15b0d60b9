"""KeyRecorder: a copy of a model whose lookups are recorded and return synthetic rows."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.checkpoint import CheckpointFunction

from tiercache.data.dataset_writer import as_keys
from tiercache.data.raw_batch import FeatureKeys
from tiercache.data.recording import RecordedBatch
from tiercache.data.sub_dataset import lookup_digest
from tiercache.errors import DatasetError
from tiercache.rows.backends.open_backend import open_backend
from tiercache.schema import Schema
from tiercache.store.bits import hash_keys
from tiercache.store.table import group_tables
from tiercache.train.missing_rows import MissingRows
from tiercache.train.random_numbers import mixed, seed_generators
from tiercache.train.raw_samples import RawSamples
from tiercache.train.table_module import check_within, named_table_modules, refuse_reserved

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from numpy.typing import NDArray
    from torch import nn

    from tiercache.schema import Feature
    from tiercache.store.table import Table
    from tiercache.train.plain_keys import KeyInput
    from tiercache.train.row_optimizer import RowOptimizer
    from tiercache.values.batch import Batch
    from tiercache.values.lookups import Unseen

_FORWARD = 3  # the purpose of the model's random numbers, for `mixed`
_PATTERNS = 61


def schema_of(model: nn.Module) -> Schema:
    """Return the features and tables that the modules of a model look up. Raises ValueError for a model without any."""
    features: dict[str, Feature] = {}
    tables: dict[str, Table] = {}
    for name, module in named_table_modules(model):
        known: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (features, module.feature_specs), (tables, module.table_specs),
        ]  # fmt: skip
        for specs, spec_of in known:
            for one, spec in spec_of.items():
                if specs.setdefault(one, spec) != spec:
                    raise ValueError(
                        f"module {name!r} and an earlier one describe {one!r} differently: create the modules of a "
                        "model with one schema"
                    )
    if not features:
        raise ValueError(
            "the model has no tiercache embedding, so it looks up no keys: pass the model returned by tc.convert, "
            "or one with tc.Embedding or tc.EmbeddingBag"
        )
    return Schema(features=tuple(features.values()), tables=tuple(tables.values()))


class KeyRecorder:
    """Finds the keys of batches by running a copy of the model, or by a function; changes the random generators."""

    unseen: Unseen = "initial"

    def __init__(
        self,
        model: nn.Module,
        schema: Schema,
        *,
        call: Callable[[nn.Module, Any], object] | None,
        keys: Callable[[Any], Mapping[str, Any]] | None,
        seed: int,
    ) -> None:
        self._call, self._keys, self._seed = call, keys, seed
        self._tables = {table.name: table for table in schema.tables}
        self._modules = dict(named_table_modules(model))
        self._bounds = {table: bound for one in self._modules.values() for table, bound in one.bounds.items()}
        self._lookups: list[tuple[str, NDArray[np.int64]]] = []
        self._num_samples = 0
        self._batch = ""  # the name of the batch that is being recorded
        if keys is None:
            device = next(iter(self._modules.values())).anchor.device
            backend = open_backend(device if device.type == "cuda" else "cpu", schema.ordered_tables)
            groups = group_tables(schema.tables)
            self._missing = MissingRows(schema, groups, cast("RowOptimizer", None), backend)  # it counts trained rows
            widest = max(table.dim for table in schema.tables)
            chance = np.random.Generator(np.random.Philox(0))
            self._patterns = chance.uniform(0.01, 0.05, (_PATTERNS, widest)).astype(np.float32)
            self._model = self._copy(model)

    def record(self, number: int, batch: Any, indices: NDArray[np.int64] | None) -> RecordedBatch:
        """Return the keys of a batch. Raises DatasetError for a batch without keys, IndexError for a key too large."""
        self._lookups, self._num_samples, self._batch = [], 0, f"batch {number} of the loader"
        if self._keys is None:
            self._run(number, batch)
        else:
            self._take(self._keys(batch))
        if not self._lookups:
            how = "keys= returned none" if self._keys is not None else "the model's forward looked up none"
            raise DatasetError(
                f"{self._batch} has no keys: {how}; look up keys with gradients enabled and outside of torch.compile, "
                "pass call= or keys=, or leave such batches out of the loader"
            )
        digests = [] if self._keys else sorted({lookup_digest(k, self._tables[t].table_id) for t, k in self._lookups})
        by_table: dict[str, list[NDArray[np.int64]]] = {}
        for table, keys in self._lookups:
            by_table.setdefault(table, []).append(keys)
        keys_of = {table: np.concatenate(parts) for table, parts in by_table.items()}
        count = max(1, self._num_samples) if indices is None else indices.size
        return RecordedBatch(keys_of, digests, count, indices)

    def _copy(self, model: nn.Module) -> nn.Module:
        memo: dict[int, Any] = {id(one.weights): {} for one in self._modules.values()}
        try:
            copied = cast("nn.Module", copy.deepcopy(getattr(model, "_orig_mod", model), memo))
        except Exception as error:
            raise ValueError(
                f"the model cannot be copied ({error}), but keys are recorded on a copy of it: pass keys=lambda batch: "
                "{...}, which needs no model"
            ) from error
        for name, module in named_table_modules(copied):
            lookup = partial(self._look_up, name)
            module.bind(lambda lookup=lookup: lookup, None)  # type: ignore[misc]
        return copied

    def _run(self, number: int, batch: Any) -> None:
        seed_generators(mixed(self._seed, _FORWARD, number))
        with torch.enable_grad():
            if self._call is not None:
                self._call(self._model, batch)
                return
            kind = type(batch).__name__
            advice = (
                "specify how to call the model on a batch: call=lambda model, batch: model(batch[0]) for (inputs, "
                "labels), model(**batch) for named arguments; or pass keys=lambda batch: {...}"
            )
            if isinstance(batch, tuple | list):
                raise TypeError(
                    f"{self._batch} is a {kind} of {len(batch)}, which may be arguments or labels: {advice}"
                )
            try:
                self._model(batch)
            except TypeError as error:
                raise TypeError(f"model(batch) failed for {self._batch}, a {kind} ({error}): {advice}") from error

    def _look_up(self, name: str, feature: Feature, plain: KeyInput, *, trains: bool, bound: int | None) -> Batch:
        """Record a lookup, with the signature of `PlainKeys.batch`, and return a batch with synthetic rows."""
        if torch.is_grad_enabled() or _is_recomputed():
            self._check(name, feature.table, plain.keys, bound)
            self._lookups.append((feature.table, plain.keys.copy()))
            self._num_samples = max(self._num_samples, plain.num_samples)
        none = torch.empty(0, dtype=torch.float32, device="cpu")
        keys = {feature.name: FeatureKeys(plain.keys, plain.offsets, None)}
        samples = RawSamples(plain.num_samples, keys, none, none, {}, lacking=True)
        return self._missing.read_only(samples, "a recording of keys", self)

    def fill(self, table_name: str, keys: NDArray[np.int64], out: tuple[NDArray[np.float32], ...]) -> None:
        """Write synthetic vectors of ``keys``, nonzero and seeded by the key, to the first array of ``out``."""
        table = self._tables[table_name]
        numbers = (hash_keys(keys, table.table_id) % np.uint64(_PATTERNS)).astype(np.int64)
        out[0][...] = self._patterns[numbers, : table.dim]

    def _take(self, given: Any) -> None:
        if not isinstance(given, Mapping):
            raise TypeError(
                f"keys= returned {type(given).__name__} for {self._batch}: return a mapping from names of tables or "
                "modules to tensors of keys"
            )
        for name, values in given.items():
            table = self._table_of(name)
            for part in values if isinstance(values, tuple) else (values,):
                keys = as_keys(f"the keys of {name!r} in {self._batch}", part)
                self._num_samples = max(self._num_samples, keys.shape[0] if keys.ndim else 1)
                flat = np.ascontiguousarray(keys.reshape(-1))
                if (padding := self._padding_of(table)) is not None:
                    flat = flat[flat != padding]
                refuse_reserved(flat, f"{name!r} in {self._batch}", DatasetError)
                self._check(name, table, flat, self._bounds.get(table))
                self._lookups.append((table, flat))

    def _table_of(self, name: str) -> str:
        if name in self._tables:
            return name
        module = self._modules.get(name)
        if module is None or len(module.tables) != 1:
            raise DatasetError(
                f"keys= returned keys of {name!r}, expected a table or a module of one table: the tables are "
                f"{', '.join(self._tables)} and the modules are {', '.join(self._modules)}"
            )
        return module.tables[0]

    def _padding_of(self, table: str) -> int | None:
        found = {one.padding for one in self._modules.values() if table in one.tables}
        return found.pop() if len(found) == 1 else None

    def _check(self, name: str, table: str, keys: NDArray[np.int64], bound: int | None) -> None:
        try:
            check_within(keys, bound, table)
        except IndexError as error:
            raise IndexError(f"{self._batch} in {name!r}: {error}") from None


def _is_recomputed() -> bool:
    """Return whether the caller is in reentrant activation checkpointing, whose backward repeats it with gradients."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False
