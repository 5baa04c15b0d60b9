"""The forms in which loaders give the keys of a batch, brought to one: by feature keys, or (values, offsets).

Whatever torch and torchrec have for ids: tensors of one column for each feature, nested and sparse tensors, offsets
with or without the last, a whole KeyedJaggedTensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from tiercache.schema import Schema

_FORMS = (
    "give a mapping from features to their keys, each (N,), (N, L), a pair (values, offsets), a nested tensor or a "
    "sparse one of shape (N, keys); or a KeyedJaggedTensor; or one tensor (N, features)"
)


def by_feature(schema: Schema, keys: Any, weights: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return keys and weights by feature, offsets whole. Raises ValueError for what is none of the forms."""
    names = [feature.name for feature in schema.features]
    if _is_keyed_jagged(keys):
        keys, more = _of_keyed_jagged(keys)
        weights = {**more, **(weights or {})}
    elif isinstance(keys, torch.Tensor | np.ndarray) and not getattr(keys, "is_nested", False):
        if keys.ndim != 2 or keys.shape[1] != len(names):
            raise ValueError(
                f"the keys are one array of shape {tuple(keys.shape)} and there are {len(names)} features "
                f"({', '.join(names)}): {_FORMS}"
            )
        keys = {name: keys[:, column] for column, name in enumerate(names)}
    elif not isinstance(keys, Mapping):
        raise ValueError(f"the keys are a {type(keys).__name__}: {_FORMS}")
    found, given = {}, dict(weights or {})
    for name, value in keys.items():
        found[name], weight = _one(value)
        if weight is not None:
            given.setdefault(name, weight)
    return _whole_offsets(found), given


def _one(value: Any) -> tuple[Any, Any]:
    """Return keys as an array or a pair, and weights that stand with them."""
    if getattr(value, "is_nested", False):
        if value.layout != torch.jagged:
            value = torch.nested.as_nested_tensor([*value.unbind()], layout=torch.jagged)
        return (value.values(), value.offsets()), None
    if isinstance(value, torch.Tensor) and value.layout in (torch.sparse_coo, torch.sparse_csr):
        if value.ndim != 2:
            raise ValueError(f"keys are a sparse tensor of shape {tuple(value.shape)}: give (N, keys)")
        if value.layout == torch.sparse_coo:
            value = value.coalesce().to_sparse_csr()
        return (value.col_indices(), value.crow_indices()), value.values()
    if _has(value, "values", "offsets", "weights"):  # a JaggedTensor's are methods
        weights = value.weights_or_none() if hasattr(value, "weights_or_none") else None
        return (_called(value.values), _called(value.offsets)), weights
    return value, None


def _whole_offsets(keys: dict[str, Any]) -> dict[str, Any]:
    """Complete offsets that lack the last, as `nn.EmbeddingBag` takes them; other features say how many samples."""
    pairs = {name: one for name, one in keys.items() if isinstance(one, tuple) and len(one) == 2}
    counts = {len(one) for name, one in keys.items() if name not in pairs and hasattr(one, "__len__")}
    sure = {len(offsets) - 1 for values, offsets in pairs.values() if not _lacks_last(values, offsets)}
    samples = next(iter(counts or sure), None)
    found = dict(keys)
    for name, (values, offsets) in pairs.items():
        if _lacks_last(values, offsets) if samples is None else len(offsets) == samples:
            last = torch.as_tensor(offsets)
            found[name] = values, torch.cat([last, last.new_tensor([len(values)])])
    return found


def _lacks_last(values: Any, offsets: Any) -> bool:
    return len(offsets) > 0 and int(offsets[-1]) < len(values)


def _is_keyed_jagged(value: Any) -> bool:
    return not isinstance(value, Mapping | torch.Tensor | np.ndarray) and _has(value, "keys", "values", "to_dict")


def _of_keyed_jagged(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    keys, weights = {}, {}
    for name, one in value.to_dict().items():
        keys[name], weight = _one(one)
        if weight is not None:
            weights[name] = weight
    return keys, weights


def _has(value: Any, *names: str) -> bool:
    return not isinstance(value, torch.Tensor | np.ndarray | Mapping) and all(hasattr(value, name) for name in names)


def _called(value: Any) -> Any:
    return value() if callable(value) else value
