"""Raw keys of a batch, in the forms that loaders give them, checked against the schema.

Legend: N samples, L keys of each, E keys in all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiercache.data.key_sets import as_keys
from tiercache.data.raw_batch import NULL_KEY, FeatureKeys
from tiercache.schema import nearest
from tiercache.training.batch_forms import by_feature

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from tiercache.schema import Feature, Schema


def feature_keys(
    schema: Schema, keys: Any, weights: Mapping[str, Any] | None, columns: Iterable[Any] = ()
) -> tuple[int, dict[str, FeatureKeys]]:
    """Return N and the keys of every feature of the schema, in its order; columns: others of the samples, or None.

    Raises ValueError for a feature that is unknown or lacks, for forms and numbers that do not go together, and for
    the two keys that no data has.
    """
    keys, weights = by_feature(schema, keys, weights, columns)
    known = {feature.name for feature in schema.features}
    for what, given in (("keys", keys), ("weights", weights)):
        if unknown := sorted(set(given) - known):
            raise ValueError(
                f"{what} were given for {unknown[0]!r}{nearest(unknown[0], known)}, and the features are "
                f"{', '.join(f.name for f in schema.features)}"
            )
    found = {}
    for feature in schema.features:
        if feature.name not in keys:
            raise ValueError(f"feature {feature.name!r} was given no keys: give the keys of every feature")
        found[feature.name] = _one(feature, keys[feature.name], weights.get(feature.name))
    counts = {name: feature.keys.size if feature.offsets is None else feature.offsets.size - 1
              for name, feature in found.items()}  # fmt: skip
    if len(set(counts.values())) != 1:
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise ValueError(f"features have keys of different numbers of samples ({listed}): give those of one batch")
    return next(iter(counts.values())), found


def _one(feature: Feature, given: Any, weights: Any) -> FeatureKeys:
    where = f"feature {feature.name!r}"
    values, ends = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    keys = as_keys(f"the keys of {where}", values)
    offsets = None if ends is None else _offsets(where, as_keys(f"the offsets of {where}", ends), keys)
    length = {"one_hot": 1, "multi_hot": feature.length}.get(feature.hotness)
    if offsets is not None and length is not None and keys.ndim == 1 and (np.diff(offsets) == length).all():
        keys, offsets = keys if feature.hotness == "one_hot" else keys.reshape(-1, length), None  # as all have so many
    if keys.ndim not in ((1,) if offsets is not None else (1, 2)):
        raise ValueError(f"the keys of {where} have shape {keys.shape}: give (N,), (N, L) or a pair (values, offsets)")
    shape = keys.shape
    if feature.hotness == "one_hot" and (offsets is not None or keys.ndim != 1):
        seen = "values and offsets" if offsets is not None else f"shape {shape}"
        raise ValueError(f"the keys of {where} have {seen}: it has one key a sample in the schema, so give (N,)")
    if feature.hotness == "multi_hot" and (offsets is not None or keys.ndim != 2 or shape[1] != feature.length):
        seen = "values and offsets" if offsets is not None else f"shape {shape}"
        raise ValueError(f"the keys of {where} have {seen}: it has {feature.length} keys a sample in the schema, so "
                         f"give (N, {feature.length})")  # fmt: skip
    if offsets is None and feature.hotness != "one_hot":
        length = shape[1] if keys.ndim == 2 else 1
        offsets = np.arange(shape[0] + 1, dtype=np.int64) * length
    flat = np.ascontiguousarray(keys.reshape(-1))
    if flat.size and int(flat.min()) <= NULL_KEY:
        at = int(np.argmin(flat))
        raise ValueError(
            f"{where} has the key {int(flat[at])} at entry {at} of the batch: INT64_MIN and INT64_MIN + 1 are the keys "
            "of the out-of-vocabulary row and the null row, so give such values another key"
        )
    return FeatureKeys(flat, offsets, None if weights is None else _weights(where, weights, shape))


def _offsets(where: str, offsets: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.int64]:
    if offsets.ndim != 1 or not offsets.size or offsets[0] != 0 or offsets[-1] != keys.size or (
        np.diff(offsets) < 0
    ).any():  # fmt: skip
        seen = f"{offsets.shape}" + (
            f" from {offsets[0]} to {offsets[-1]}" if offsets.ndim == 1 and offsets.size else ""
        )
        raise ValueError(
            f"the offsets of {where} are {seen}: give (N + 1,) numbers that begin with 0, never fall and end with "
            f"the number of keys, {keys.size}"
        )
    return offsets.copy()  # loaders use their arrays again


def _weights(where: str, given: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if isinstance(given, torch.Tensor):
        if given.requires_grad:
            raise ValueError(f"the weights of {where} require a gradient: give them to the embedding module instead")
        given = given.numpy(force=True)
    weights = np.asarray(given)
    if weights.shape != shape or weights.dtype.kind not in "fiu":
        raise ValueError(
            f"the weights of {where} are {weights.dtype} of shape {weights.shape}: give a number for each of its keys, "
            f"of shape {shape}"
        )
    return np.array(weights.reshape(-1), dtype=np.float32)
