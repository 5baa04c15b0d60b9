"""Samples with raw keys, in any form that loaders use, checked against the schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from tiercache.data.dataset_writer import as_keys
from tiercache.data.python_batches import by_sample, is_collated, is_pair, refuse_listed_pair
from tiercache.data.raw_batch import FeatureKeys, lacks_last, num_samples
from tiercache.schema_parts import nearest
from tiercache.train.table_module import refuse_reserved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from tiercache.schema import Feature, Schema
    from tiercache.values.ids import FoundIds


Missing = Literal["error", "zero", "init", "load"]
MISSING = ("error", "zero", "init", "load")

_FORMS = (
    "pass a mapping from features to their keys, each (N,), (N, L), a pair (values, offsets), a nested tensor or a "
    "sparse one of shape (N, keys); or a KeyedJaggedTensor; or one tensor (N, features)"
)


class _WholeLists(NamedTuple):
    """Lists whose offsets include the last."""

    values: Any
    offsets: Any


def by_feature(
    schema: Schema, keys: Any, weights: Mapping[str, Any] | None, columns: Iterable[Any] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return keys and weights by feature, with complete offsets. columns: others of the samples, which count them."""
    names = [feature.name for feature in schema.features]
    if _has(keys, "columns", "dtypes"):  # a data frame of pandas or Polars
        keys = {str(name): keys[name] for name in keys.columns}
    elif _has(keys, "keys", "values", "to_dict"):  # a KeyedJaggedTensor
        keys = keys.to_dict()
    elif isinstance(keys, torch.Tensor | np.ndarray) and not getattr(keys, "is_nested", False):
        if keys.ndim != 2 or keys.shape[1] != len(names):
            raise ValueError(
                f"the keys are one array of shape {tuple(keys.shape)}, but there are {len(names)} features "
                f"({', '.join(names)}): {_FORMS}"
            )
        keys = {name: keys[:, column] for column, name in enumerate(names)}
    elif not isinstance(keys, Mapping):
        raise ValueError(f"the keys are a {type(keys).__name__}: {_FORMS}")
    found, all_weights = {}, dict(weights or {})
    for name, value in keys.items():
        try:
            refuse_listed_pair(value)
        except ValueError as error:
            raise ValueError(f"the keys of feature {name!r} are {error}") from error
        found[name], own_weights = _form_of(value)
        if own_weights is not None:
            all_weights.setdefault(name, own_weights)
    for by_name in (found, all_weights):
        _give_columns(schema, by_name)
    return _whole_offsets(found, {len(one) for one in columns if np.ndim(one)}), all_weights


def _give_columns(schema: Schema, by_name: dict[str, Any]) -> None:
    """Give features the values named for their column, since two tables may look up one column."""
    names = {feature.name for feature in schema.features}
    others = {name: value for name, value in by_name.items() if name not in names}
    for feature in schema.features:
        if feature.name not in by_name and len(feature.columns) == 1 and feature.columns[0] in by_name:
            by_name[feature.name] = by_name[feature.columns[0]]
            others.pop(feature.columns[0], None)
    for name in [*by_name]:
        if name not in names and name not in others:
            del by_name[name]


def _form_of(value: Any) -> tuple[Any, Any]:
    """Return keys as an array or a pair, and their weights."""
    if getattr(value, "is_nested", False):
        if value.layout != torch.jagged or value.lengths() is not None:  # with lengths, values may have gaps
            value = torch.nested.as_nested_tensor([*value.unbind()], layout=torch.jagged)
        return _WholeLists(value.values(), value.offsets()), None
    if isinstance(value, torch.Tensor) and value.layout in (torch.sparse_coo, torch.sparse_csr):
        if value.ndim != 2:
            raise ValueError(f"keys are a sparse tensor of shape {tuple(value.shape)}: expected (N, keys)")
        if value.layout == torch.sparse_coo:
            value = value.coalesce().to_sparse_csr()
        return _WholeLists(value.col_indices(), value.crow_indices()), value.values()
    if _has(value, "values", "offsets", "weights"):  # a JaggedTensor's are methods
        weights = value.weights_or_none() if hasattr(value, "weights_or_none") else None
        return _WholeLists(_called(value.values), _called(value.offsets)), weights
    return value, None


def _whole_offsets(keys: dict[str, Any], counts: set[int]) -> dict[str, Any]:
    """Complete offsets that lack the last, as `nn.EmbeddingBag` takes them; counts: known numbers of samples."""
    pairs = {name: one for name, one in keys.items() if is_pair(one)}
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


def _has(value: Any, *names: str) -> bool:
    return not isinstance(value, torch.Tensor | np.ndarray | Mapping) and all(hasattr(value, name) for name in names)


def _called(value: Any) -> Any:
    return value() if callable(value) else value


def feature_keys(
    schema: Schema, keys: Any, weights: Mapping[str, Any] | None, columns: Iterable[Any] = (), *, needs_all: bool = True
) -> tuple[int, dict[str, FeatureKeys]]:
    """Return N and the keys of every feature of the schema, in order; columns: others of the samples, or None.

    The arrays are copies: loaders reuse theirs, and batches may be made ahead. needs_all: False: at least one feature
    suffices; a lookup of a missing one is an error. Raises ValueError for a feature that is unknown or missing, for
    forms and numbers that do not go together, and for the two reserved keys.
    """
    keys, weights = by_feature(schema, keys, weights, columns)
    known = {feature.name for feature in schema.features}
    for what, by_name in (("keys", keys), ("weights", weights)):
        if unknown := sorted(set(by_name) - known):
            raise ValueError(
                f"{what} were given for {unknown[0]!r}{nearest(unknown[0], known)}, but the features are "
                f"{', '.join(f.name for f in schema.features)}"
            )
    found = {}
    for feature in schema.features:
        if feature.name not in keys:
            if keys and not needs_all:
                continue
            raise ValueError(f"feature {feature.name!r} was given no keys: pass the keys of every feature")
        found[feature.name] = _check_feature(feature, keys[feature.name], weights.get(feature.name))
    counts = {name: feature.keys.size if feature.offsets is None else feature.offsets.size - 1
              for name, feature in found.items()}  # fmt: skip
    if len(set(counts.values())) != 1:
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise ValueError(f"features have keys of different numbers of samples ({listed}): use keys of one batch")
    return next(iter(counts.values())), found


def _check_feature(feature: Feature, values: Any, weights: Any) -> FeatureKeys:
    where, ends = f"feature {feature.name!r}", None
    if is_pair(values):
        values, ends = values
    keys = as_keys(f"the keys of {where}", values)
    offsets = None if ends is None else _offsets(where, as_keys(f"the offsets of {where}", ends), keys)
    if weights is not None:
        weights = _plain_weights(where, weights, offsets)
    length = {"one_hot": 1, "multi_hot": feature.length}.get(feature.hotness)
    if offsets is not None and length is not None and keys.ndim == 1 and (np.diff(offsets) == length).all():
        keys, offsets = keys if feature.hotness == "one_hot" else keys.reshape(-1, length), None  # fixed length
    if keys.ndim not in ((1,) if offsets is not None else (1, 2)):
        raise ValueError(
            f"the keys of {where} have shape {keys.shape}: expected (N,), (N, L) or a pair (values, offsets)"
        )
    shape = keys.shape
    is_single = feature.hotness == "one_hot"
    if length is not None and (offsets is not None or shape[1:] != (() if is_single else (length,))):
        seen = "values and offsets" if offsets is not None else f"shape {shape}"
        number, form = ("one key", "(N,)") if is_single else (f"{length} keys", f"(N, {length})")
        raise ValueError(f"the keys of {where} have {seen}: it has {number} per sample in the schema, so pass {form}")
    if offsets is None and feature.hotness != "one_hot":
        length = shape[1] if keys.ndim == 2 else 1
        offsets = np.arange(shape[0] + 1, dtype=np.int64) * length
    flat = keys.flatten()
    refuse_reserved(flat, where)
    return FeatureKeys(flat, offsets, None if weights is None else _weights(where, weights, shape))


def _offsets(where: str, offsets: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.int64]:
    if offsets.ndim != 1 or not offsets.size or offsets[0] != 0 or offsets[-1] != keys.size or (
        np.diff(offsets) < 0
    ).any():  # fmt: skip
        seen = f"{offsets.shape}" + (
            f" from {offsets[0]} to {offsets[-1]}" if offsets.ndim == 1 and offsets.size else ""
        )
        raise ValueError(
            f"the offsets of {where} are {seen}: expected (N + 1,) numbers that begin with 0, never decrease and end "
            f"with the number of keys, {keys.size}"
        )
    return offsets.copy()


def _plain_weights(where: str, weights: Any, offsets: NDArray[np.int64] | None) -> Any:
    """Return the values of weights that are a nested tensor or a pair, whose offsets must be those of the keys."""
    weights = _form_of(weights)[0] if getattr(weights, "is_nested", False) else weights
    if not is_pair(weights):
        return weights
    values, ends = weights[0], as_keys(f"the offsets of the weights of {where}", weights[1])
    if offsets is None or not (np.array_equal(ends, offsets) or np.array_equal(ends, offsets[:-1])):
        raise ValueError(f"the weights of {where} have other offsets than its keys: expected a weight for each key")
    return values


def _weights(where: str, values: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if isinstance(values, torch.Tensor):
        if values.requires_grad:
            raise ValueError(f"the weights of {where} require a gradient: pass them to the embedding module instead")
        values = values.numpy(force=True)
    weights = np.asarray(values)
    if weights.shape != shape or weights.dtype.kind not in "fiu":
        raise ValueError(
            f"the weights of {where} are {weights.dtype} of shape {weights.shape}: expected a number for each of its "
            f"keys, of shape {shape}"
        )
    with np.errstate(over="ignore"):  # overflow becomes infinite
        found = np.array(weights.reshape(-1), dtype=np.float32)
    if not np.isfinite(found).all():
        at = int(np.isfinite(found).argmin())
        raise ValueError(f"the weights of {where} have {weights.reshape(-1)[at]} at entry {at}: use finite numbers")
    return found


@dataclass(frozen=True, slots=True, eq=False)
class RawSamples:
    """Samples from a loader: ``label`` (N,) and ``dense`` (N, columns) are on the device."""

    num_samples: int
    features: dict[str, FeatureKeys]  # by name, in the order of the schema
    label: torch.Tensor
    dense: torch.Tensor
    ids: dict[str, FoundIds]  # By feature, local ids of the pass; -1 for keys that it lacks. Empty outside a pass.
    lacking: bool  # True if the pass lacks any of the keys

    def places(self) -> dict[str, NDArray[np.int32]]:
        """Return the local ids of each feature, in host memory; waits for the search. Without a pass all are -1."""
        if self.ids:
            return {name: found.ids for name, found in self.ids.items()}
        return {name: np.full(feature.keys.size, -1, np.int32) for name, feature in self.features.items()}


def dense_numbers(what: str, values: Any, shape: tuple[int, int] | tuple[int]) -> torch.Tensor:
    """Copy labels or dense features as float32. Raises ValueError unless they have ``shape``, -1: any size."""
    try:
        if not isinstance(values, torch.Tensor):  # torch supports neither negative strides nor other byte orders
            values = torch.from_numpy(np.ascontiguousarray(values, np.float32))
        found: torch.Tensor = values.detach().to(torch.float32, copy=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} is not an array of numbers ({error}): pass one, or a tensor") from error
    if found.is_sparse or found.is_meta:
        raise ValueError(f"{what} is a sparse tensor, or one without values: pass a dense tensor")
    if found.ndim != len(shape) or any(s not in (-1, n) for s, n in zip(shape, found.shape, strict=True)):
        expected = "(N,)" if len(shape) == 1 else "(N, columns)"
        raise ValueError(
            f"{what} has shape {tuple(found.shape)}: expected {expected} for the batch's {shape[0]} samples"
        )
    if found.device.type == "cpu" and not found.isfinite().all():  # on a GPU the check would wait for it
        at = int((~found.isfinite()).nonzero()[0, 0])
        raise ValueError(f"{what} of sample {at} is not finite: use finite numbers, or leave the sample out")
    return found


def samples_of(
    loader: Iterable[Any], num_before: int, make: Callable[[Any], Mapping[str, Any]] | None
) -> Iterator[Mapping[str, Any]]:
    """Yield the arguments of a batch for each item, without the first ``num_before`` unless the loader has a state.

    Then, endlessly, a batch without keys. make: converts an item to arguments.
    """
    items = iter(loader)
    for item in items if hasattr(loader, "state_dict") else islice(items, num_before, None):
        if make is None and is_collated(loader):
            yield {name: _by_sample(value) for name, value in parts_of(item).items()}
        else:
            yield (make or parts_of)(item)
    while True:
        yield {"keys": None}


def _by_sample(value: Any) -> Any:
    return {name: by_sample(one) for name, one in value.items()} if isinstance(value, Mapping) else by_sample(value)


def parts_of(item: Any) -> Mapping[str, Any]:
    """Return the arguments of ``Pass.batch`` for an item of a loader."""
    if isinstance(item, Mapping) and "keys" in item and item.keys() <= {"keys", "weights", "label", "dense"}:
        return item
    if isinstance(item, tuple | list) and len(item) in (2, 3):
        return dict(zip(("keys", "label") if len(item) == 2 else ("keys", "dense", "label"), item, strict=True))
    what = f"a mapping of {', '.join(map(repr, item))}" if isinstance(item, Mapping) else f"a {type(item).__name__}"
    if isinstance(item, tuple | list):
        what += f" of {len(item)}"
    raise TypeError(
        f'the loader yielded {what}: expected (keys, label), (keys, dense, label) or a mapping with "keys", "label" '
        'and "dense"; or pass a function that makes such a mapping, wrap(loader, make)'
    )
