"""The embedding modules: EmbeddingBagCollection (pooled) and EmbeddingCollection (one vector for each id)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tiercache.training.joining import FeaturePart
from tiercache.training.lookup import MODES, PooledLookup, ReadyLookup, RowLookup, check_brought
from tiercache.training.scaled_loss import check_unscaled, watch_scalers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tiercache.backends.base import Backend
    from tiercache.schema import Feature, Schema
    from tiercache.training.batch import Batch


class EmbeddingBagCollection(nn.Module):
    """Looks up features and pools each: (N, sum of dims), features side by side in the order given.

    schema: that of the dataset. The module exists without a cache, and is bound to one by being given to it.

    mode: "sum", "mean" or "max", for all features or by feature name. Per-id weights multiply the vectors before
    pooling ("mean" still divides by the number of ids; "max" takes none); an empty bag is zeros. It has no
    parameters: rows step with the tracked optimizer, and no gradient of a table ever exists. Outputs are float32 and
    come from a pool: they are yours as long as you refer to them.

    weighted: the features whose weights ``forward`` will be given. On several ranks it has to be known before: their
    rows are brought, and other features may be pooled by the rank that owns them.

    Raises ValueError for an unknown feature or mode.
    """

    def __init__(
        self,
        schema: Schema,
        features: Sequence[str] | None = None,
        *,
        mode: str | Mapping[str, str] = "sum",
        weighted: Sequence[str] = (),
    ) -> None:
        super().__init__()
        watch_scalers()
        self.features, self.dims, specs = _choose(schema, features)
        modes = {name: mode if isinstance(mode, str) else mode.get(name, "sum") for name in self.features}
        if not isinstance(mode, str) and (unknown := [name for name in mode if name not in modes]):
            raise ValueError(
                f"a mode was given for {unknown[0]!r}, and this module looks up {', '.join(self.features)}"
            )
        if others := [name for name in weighted if name not in modes]:
            raise ValueError(
                f"weights were announced for {others[0]!r}, and this module looks up {', '.join(self.features)}"
            )
        for name, chosen in modes.items():
            if chosen not in MODES:
                raise ValueError(f"feature {name!r} is pooled by {chosen!r}: it must be one of {', '.join(MODES)}")
        self.out_features = sum(self.dims)
        """Columns of the output."""
        cols = np.concatenate([[0], np.cumsum(self.dims)]).astype(np.int64)
        self._cols = {name: int(cols[i]) for i, name in enumerate(self.features)}
        self._specs, self._modes = specs, modes
        self._anchor = torch.zeros((), requires_grad=True)
        self._parts: dict[tuple[tuple[int, ...], frozenset[str], frozenset[str]], list[FeaturePart]] = {}
        self.pooling = {name: None if name in weighted else chosen for name, chosen in modes.items()}
        """By feature, how it is pooled; None where its rows are needed."""

    def forward(self, batch: Batch, weights: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Look up all features of ``batch``: float32 (N, ``out_features``).

        weights: by feature, one float32 tensor (ids,), differentiable; they take the place of the data's own.
        Raises IndexError for ids that are not of the visit, RuntimeError where the visit has ended.
        """
        watch_scalers()
        batch.rows.check()
        given, backend = dict(weights or {}), batch.rows.backend
        for name, weight in given.items():
            if name not in self._cols:
                raise ValueError(
                    f"weights were given for {name!r}, and this module looks up {', '.join(self.features)}"
                )
            if weight.dtype != torch.float32:
                raise ValueError(f"weights of feature {name!r} are {weight.dtype}: give torch.float32")
            if weight.device != backend.device:
                raise ValueError(
                    f"weights of feature {name!r} are on {weight.device}, and rows are trained on {backend.device}: "
                    "move them there"
                )
        ready = self._ready(batch, given)
        here = [name for name in self.features if name not in ready]
        check_brought(batch, here)
        arrays = {name: values for name in here if (values := batch.ids[name].weights) is not None} | {
            name: backend.array(value) for name, value in given.items()
        }
        groups = _groups_of(batch, [self._specs[name].table for name in here])
        key = groups, frozenset(here), frozenset(arrays)
        if key not in self._parts:
            self._parts[key] = self._cut(here, groups, key[2])
        lookups = [
            PooledLookup(part, batch, {n: a for n, a in arrays.items() if n in part.features})
            for part in self._parts[key]
        ]
        shape, names = (batch.num_samples, self.out_features), tuple(given)
        result: torch.Tensor = _PooledFunction.apply(  # type: ignore[no-untyped-call]
            self._anchor, backend, lookups, list(ready.values()), shape, names, *given.values()
        )
        return result

    def split(self, out: torch.Tensor) -> list[torch.Tensor]:
        """Cut an output into one (N, dim) view for each feature."""
        return list(torch.split(out, self.dims, dim=1))

    def _ready(self, batch: Batch, given: Mapping[str, torch.Tensor]) -> dict[str, ReadyLookup]:
        """Return the features that other ranks have pooled as they are looked up here, by name."""
        found = {name: one for name, one in batch.pooled.items() if self._modes.get(name) == one.mode}
        for name in given:
            if name in found:
                raise ValueError(
                    f"weights were given for {name!r}, which the rank that owns table {self._specs[name].table!r} has "
                    f"pooled already: make the module with weighted=[{name!r}]"
                )
        return {name: ReadyLookup(batch, one, self._cols[name]) for name, one in found.items()}

    def _cut(self, features: Sequence[str], groups: Sequence[int], weighted: frozenset[str]) -> list[FeaturePart]:
        """Group features by their tables' group, those with exactly one plain id apart: their kernel is faster."""
        members: dict[tuple[int, bool], list[str]] = {}
        for name, group in zip(features, groups, strict=True):
            spec = self._specs[name]
            bags = spec.hotness != "one" or name in weighted
            if bags and name in weighted and self._modes[name] == "max":
                raise ValueError(f"feature {name!r} has weights and is pooled by max: pool it by sum or mean")
            members.setdefault((group, bags), []).append(name)
        return [
            FeaturePart(
                group=group,
                features=tuple(names),
                tables=tuple(self._specs[name].table for name in names),
                modes=np.array([MODES[self._modes[name]] for name in names], dtype=np.int8),
                cols=np.array([self._cols[name] for name in names], dtype=np.int64),
                bags=bags,
            )
            for (group, bags), names in members.items()
        ]

    def extra_repr(self) -> str:
        """Say what is looked up."""
        return ", ".join(
            f"{name}: {self._modes[name]}({dim})" for name, dim in zip(self.features, self.dims, strict=True)
        )


class EmbeddingCollection(nn.Module):
    """Looks up one vector for each id, without pooling.

    The output is a dictionary by feature: (N, dim) where a sample has one id, (N, length, dim) for a fixed list,
    (ids, dim) for a ragged one, whose offsets are in ``batch.ids[feature].offsets``. Weights of the data are not
    applied. Not for sums over many ids: EmbeddingBagCollection never makes the single vectors.
    """

    def __init__(self, schema: Schema, features: Sequence[str] | None = None) -> None:
        super().__init__()
        watch_scalers()
        self.features, self.dims, self._specs = _choose(schema, features)
        self._parts: dict[tuple[int, ...], list[FeaturePart]] = {}
        self._anchor = torch.zeros((), requires_grad=True)
        self.pooling: dict[str, str | None] = dict.fromkeys(self.features)

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Look up all features of ``batch``."""
        watch_scalers()
        batch.rows.check()
        check_brought(batch, self.features)
        if not self.features:
            return {}
        groups = _groups_of(batch, [self._specs[name].table for name in self.features])
        if groups not in self._parts:
            self._parts[groups] = self._cut(groups)
        parts = self._parts[groups]
        lookups = [RowLookup(part, batch) for part in parts]
        outs = _RowFunction.apply(self._anchor, batch.rows.backend, lookups)  # type: ignore[no-untyped-call]
        found: dict[str, torch.Tensor] = {}
        for name, out in zip((name for part in parts for name in part.features), outs, strict=True):
            spec = self._specs[name]
            found[name] = out.view(batch.num_samples, spec.length, out.shape[1]) if spec.hotness == "fixed" else out
        return {name: found[name] for name in self.features}

    def _cut(self, groups: Sequence[int]) -> list[FeaturePart]:
        """Group features by their tables' group."""
        members: dict[int, list[str]] = {}
        for name, group in zip(self.features, groups, strict=True):
            members.setdefault(group, []).append(name)
        return [
            FeaturePart(
                group=group,
                features=tuple(names),
                tables=tuple(self._specs[name].table for name in names),
                modes=np.zeros(len(names), dtype=np.int8),
                cols=np.zeros(len(names), dtype=np.int64),
                bags=False,
            )
            for group, names in members.items()
        ]


class _PooledFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, backend: Backend, lookups: list[PooledLookup],
                ready: list[ReadyLookup], shape: tuple[int, int], names: tuple[str, ...],
                *_weights: torch.Tensor) -> torch.Tensor:  # fmt: skip
        # here, as torch lets nobody change in place what was given and comes back
        out = backend.empty(shape, np.float32)
        if lookups:
            backend.pool([(lookup.rows, lookup.entries) for lookup in lookups], out)
        result = backend.tensor(out)
        for found in ready:
            found.write(result)
        ctx.backend, ctx.lookups, ctx.ready, ctx.names = backend, lookups, ready, names
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        check_unscaled()
        backend: Backend = ctx.backend
        grad = backend.array(grads[0])
        by_name: dict[str, torch.Tensor] = {}
        for lookup in ctx.lookups:
            if set(lookup.part.features) & set(ctx.names):
                by_name |= {n: backend.tensor(g) for n, g in lookup.weight_gradients(grad).items()}
            lookup.backward(grad)
        for found in ctx.ready:
            found.backward(grads[0])
        return None, None, None, None, None, None, *(by_name.get(name) for name in ctx.names)


class _RowFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, backend: Backend,
                lookups: list[RowLookup]) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.backend = backend
        ctx.features = [(lookup, feature) for lookup in lookups for feature in range(len(lookup.part.features))]
        ctx.set_materialize_grads(False)
        outs = backend.gather([(lookup.rows, lookup.entries) for lookup in lookups])
        return tuple(backend.tensor(out) for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        check_unscaled()
        for (lookup, feature), grad in zip(ctx.features, grads, strict=True):
            if grad is not None:
                lookup.backward(feature, ctx.backend.array(grad))
        return None, None, None


def poolings(modules: Iterable[nn.Module], features: Iterable[str]) -> dict[str, str | None]:
    """Return how each feature that some of ``modules`` looks up is pooled, in the order of ``features``.

    None: in several ways, or its rows are needed. Without any embedding module all are looked up, by their rows.
    """
    asked: dict[str, set[str | None]] = {}
    for module in modules:
        for part in module.modules():
            if isinstance(part, EmbeddingBagCollection | EmbeddingCollection):
                for name, mode in part.pooling.items():
                    asked.setdefault(name, set()).add(mode)
    if not asked:
        return dict.fromkeys(features)
    return {name: next(iter(asked[name])) if len(asked[name]) == 1 else None for name in features if name in asked}


def _choose(schema: Schema, features: Sequence[str] | None) -> tuple[list[str], list[int], dict[str, Feature]]:
    specs = {feature.name: feature for feature in schema.features}
    names = list(specs) if features is None else list(features)
    for name in names:
        if name not in specs:
            raise ValueError(f"the schema has no feature {name!r}: it has {', '.join(specs)}")
        if names.count(name) > 1:
            raise ValueError(f"feature {name!r} was given twice: name each feature once")
    dims = {table.name: table.dim for table in schema.tables}
    return names, [dims[specs[name].table] for name in names], {name: specs[name] for name in names}


def _groups_of(batch: Batch, tables: Sequence[str]) -> tuple[int, ...]:
    """Return the group of each table in the rows of ``batch``: what shares a layout is the store's matter."""
    group_of = {table: index for index, group in enumerate(batch.rows.groups) for table in group.first}
    return tuple(group_of[table] for table in tables)
