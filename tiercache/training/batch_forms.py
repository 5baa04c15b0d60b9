"""The forms in which loaders give the keys of a batch, brought to one: by feature keys, or (values, offsets).

Whatever torch and torchrec have for ids: tensors of one column for each feature, nested and sparse tensors, offsets
with or without the last, a whole KeyedJaggedTensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tiercache.data.offsets import lacks_last, num_samples

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiercache.schema import Schema

_FORMS = (
    "give a mapping from features to their keys, each (N,), (N, L), a pair (values, offsets), a nested tensor or a "
    "sparse one of shape (N, keys); or a KeyedJaggedTensor; or one tensor (N, features)"
)


class _WholeLists(NamedTuple):
    """Lists whose offsets are known to have the last."""

    values: Any
    offsets: Any


def by_feature(
    schema: Schema, keys: Any, weights: Mapping[str, Any] | None, columns: Iterable[Any] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return keys and weights by feature, offsets whole. Raises ValueError for what is none of the forms.

    columns: labels and dense features of the same samples, or None, which say how many there are.
    """
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
        found[name], weight = _form_of(value)
        if weight is not None:
            given.setdefault(name, weight)
    return _whole_offsets(found, {len(one) for one in columns if np.ndim(one)}), given


def _form_of(value: Any) -> tuple[Any, Any]:
    """Return keys as an array or a pair, and weights that stand with them."""
    if getattr(value, "is_nested", False):
        if value.layout != torch.jagged or value.lengths() is not None:  # with lengths, values may have gaps
            value = torch.nested.as_nested_tensor([*value.unbind()], layout=torch.jagged)
        return _WholeLists(value.values(), value.offsets()), None
    if isinstance(value, torch.Tensor) and value.layout in (torch.sparse_coo, torch.sparse_csr):
        if value.ndim != 2:
            raise ValueError(f"keys are a sparse tensor of shape {tuple(value.shape)}: give (N, keys)")
        if value.layout == torch.sparse_coo:
            value = value.coalesce().to_sparse_csr()
        return _WholeLists(value.col_indices(), value.crow_indices()), value.values()
    if _has(value, "values", "offsets", "weights"):  # a JaggedTensor's are methods
        weights = value.weights_or_none() if hasattr(value, "weights_or_none") else None
        return _WholeLists(_called(value.values), _called(value.offsets)), weights
    return value, None


def _whole_offsets(keys: dict[str, Any], counts: set[int]) -> dict[str, Any]:
    """Complete offsets that lack the last, as `nn.EmbeddingBag` takes them; counts: how many samples others say."""
    pairs = {name: one for name, one in keys.items() if isinstance(one, tuple) and len(one) == 2}
    counts |= {len(one) for name, one in keys.items() if name not in pairs and hasattr(one, "__len__")}
    counts |= {len(one.offsets) - 1 for one in pairs.values() if isinstance(one, _WholeLists)}
    pairs = {name: one for name, one in pairs.items() if not isinstance(one, _WholeLists)}
    ends = {
        name: (len(offsets), int(offsets[-1]) if len(offsets) else 0, len(values))
        for name, (values, offsets) in pairs.items()
    }
    samples = num_samples(counts, ends, as_bags=True)
    found = dict(keys)
    for name, (values, offsets) in pairs.items():
        if len(offsets) and lacks_last(samples, *ends[name]):
            last = torch.as_tensor(offsets, device=getattr(offsets, "device", "cpu"))
            found[name] = values, torch.cat([last, last.new_tensor([len(values)])])
    return found


def _is_keyed_jagged(value: Any) -> bool:
    return not isinstance(value, Mapping | torch.Tensor | np.ndarray) and _has(value, "keys", "values", "to_dict")


def _of_keyed_jagged(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    keys, weights = {}, {}
    for name, one in value.to_dict().items():
        keys[name], weight = _form_of(one)
        if weight is not None:
            weights[name] = weight
    return keys, weights


def _has(value: Any, *names: str) -> bool:
    return not isinstance(value, torch.Tensor | np.ndarray | Mapping) and all(hasattr(value, name) for name in names)


def _called(value: Any) -> Any:
    return value() if callable(value) else value
