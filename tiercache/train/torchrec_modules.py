"""The collections of torchrec in a model, and their replacements in training and serving."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiercache.train.embedding import EmbeddingBagCollection, EmbeddingCollection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiercache.schema import Schema
    from tiercache.values.batch import Batch


def is_collection(module: nn.Module) -> bool:
    """Return True for torchrec's EmbeddingBagCollection or EmbeddingCollection."""
    torchrec = sys.modules.get("torchrec.modules.embedding_modules")
    return torchrec is not None and isinstance(module, torchrec.EmbeddingBagCollection | torchrec.EmbeddingCollection)


def tables_of(collection: Any) -> list[tuple[Any, Any]]:
    """Return the configuration and the plain module of each table of a collection."""
    if hasattr(collection, "embedding_bags"):
        return [*zip(collection.embedding_bag_configs(), collection.embedding_bags.values(), strict=True)]
    return [*zip(collection.embedding_configs(), collection.embeddings.values(), strict=True)]


def feature_names(collection: Any) -> list[str]:
    """Return the features of a collection in the order of its outputs; a feature of two tables appears twice."""
    return [name for config, _ in tables_of(collection) for name in config.feature_names]


def converted_collection(old: Any, name: str, features: Sequence[str], schema: Schema) -> ConvertedBags | ConvertedRows:
    """Return the replacement of a collection. Raises ValueError if it would compute something else."""
    configs, inputs = [config for config, _ in tables_of(old)], feature_names(old)
    outputs = [
        f"{feature}@{config.name}" if inputs.count(feature) > 1 else feature
        for config in configs
        for feature in config.feature_names
    ]
    if not hasattr(old, "embedding_bags"):
        if old.need_indices():
            raise ValueError(f"{name} has need_indices=True, but a batch has local ids: create it without")
        return ConvertedRows(schema, features, inputs, outputs)
    pools = [config.pooling.name.lower() for config in configs for _ in config.feature_names]
    weighted = {one.name: one.weights is not None for one in schema.features}
    for feature in features:
        if weighted[feature] != old.is_weighted():
            raise ValueError(
                f"{name} has is_weighted={old.is_weighted()}, but feature {feature!r} has "
                f"{'' if weighted[feature] else 'no '}weights in the schema: make them agree"
            )
    return ConvertedBags(schema, features, dict(zip(features, pools, strict=True)), inputs, outputs)


class ConvertedBags(EmbeddingBagCollection):
    """Replaces torchrec's `EmbeddingBagCollection`: takes a batch, and returns torchrec's `KeyedTensor`."""

    def __init__(
        self,
        schema: Schema,
        features: Sequence[str],
        mode: Mapping[str, str],
        inputs: Sequence[str],
        outputs: Sequence[str],
    ) -> None:
        super().__init__(schema, features, mode=mode)
        self.inputs, self.outputs = [*inputs], [*outputs]  # the names of each feature and its vectors in torchrec

    def tables_in(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        """Return the names of the plain modules' weights in a state of torchrec's collection."""
        return [name for name in state_dict if name.startswith(f"{prefix}embedding_bags.") and name.endswith(".weight")]

    def forward(self, batch: Batch, weights: Mapping[str, torch.Tensor] | None = None) -> Any:
        """Look up all features of ``batch``. Raises the errors of `EmbeddingBagCollection`."""
        return _keyed(self.outputs, self.dims, super().forward(batch, weights))


class ConvertedRows(EmbeddingCollection):
    """Replaces torchrec's `EmbeddingCollection`: takes a batch, and returns `JaggedTensor`s by feature."""

    def __init__(self, schema: Schema, features: Sequence[str], inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__(schema, features)
        self.inputs, self.outputs = [*inputs], [*outputs]  # the names of each feature and its vectors in torchrec

    def tables_in(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        """Return the names of the plain modules' weights in a state of torchrec's collection."""
        return [name for name in state_dict if name.startswith(f"{prefix}embeddings.") and name.endswith(".weight")]

    def forward(self, batch: Batch) -> dict[str, Any]:
        """Look up all features of ``batch``. Raises the errors of `EmbeddingCollection`."""
        found = super().forward(batch)
        return {
            output: _jagged(vectors, batch.features[name].offsets)
            for output, (name, vectors) in zip(self.outputs, found.items(), strict=True)
        }


class KeyedCollection(nn.Module):
    """Serves like a collection of torchrec, from a `KeyedJaggedTensor` of raw keys."""

    def __init__(self, lookups: Sequence[nn.Module], like: ConvertedBags | ConvertedRows) -> None:
        super().__init__()
        self.lookups, self._dims = nn.ModuleList(lookups), like.dims
        self._inputs, self._outputs, self._pools = like.inputs, like.outputs, isinstance(like, ConvertedBags)

    def forward(self, features: Any) -> Any:
        """Return the same type as torchrec's collection: a `KeyedTensor`, or `JaggedTensor`s by name."""
        by_name = features.to_dict()
        tensors = [by_name[name] for name in self._inputs]
        if not self._pools:
            return {
                output: _jagged(lookup(one.values()), one.offsets())
                for output, lookup, one in zip(self._outputs, self.lookups, tensors, strict=True)
            }
        found = [
            lookup(one.values(), one.offsets()[:-1], one.weights_or_none())
            for lookup, one in zip(self.lookups, tensors, strict=True)
        ]
        return _keyed(self._outputs, self._dims, torch.cat(found, dim=1))


def _keyed(outputs: Sequence[str], dims: Sequence[int], values: torch.Tensor) -> Any:
    from torchrec.sparse.jagged_tensor import KeyedTensor

    return KeyedTensor(keys=[*outputs], length_per_key=[*dims], values=values)


def _jagged(vectors: torch.Tensor, offsets: Any) -> Any:
    """Return vectors in torchrec's form: (ids, dim), and the number of each sample's ids."""
    from torchrec.sparse.jagged_tensor import JaggedTensor

    flat = vectors.reshape(-1, vectors.shape[-1])
    if offsets is None:
        return JaggedTensor(values=flat, lengths=torch.ones(flat.shape[0], dtype=torch.int64, device=flat.device))
    return JaggedTensor(values=flat, offsets=torch.as_tensor(offsets, device=flat.device))
