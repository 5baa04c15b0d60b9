"""The embedding modules: EmbeddingBagCollection (pooled) and EmbeddingCollection (one vector for each id)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tiercache.train.lookup_ops import look_up_bags, look_up_rows, once_differentiable
from tiercache.train.plain_keys import given_bags, given_rows, shaped_as, table_weight
from tiercache.train.table_lookup import MODES, FeaturePart, PooledLookup, ReadyLookup, RowLookup, check_brought
from tiercache.train.table_module import TableModule
from tiercache.values.batch import Batch, JaggedIds
from tiercache.values.compiled import not_compiled

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tiercache.rows.backends.base import Backend
    from tiercache.schema import Schema
    from tiercache.train.anchors import Anchor, Anchors, Arrival


class EmbeddingBagCollection(TableModule):
    """Looks up features and pools each one: (N, sum of dims), the features side by side.

    The module exists without a cache; a cache that is given the model binds it. It has no rows and no gradient of a
    table: its only parameter is an anchor, see `TableModule`. Outputs have the anchor's dtype. Their memory is reused
    when you no longer refer to them.

    Args:
        schema: the schema of the dataset.
        features: names of the features, in the order of the output; default: all.
        mode: "sum", "mean" or "max", for all features or by name. Weights multiply the vectors before pooling; "mean"
            still divides by the number of ids, and "max" takes no weights. An empty bag gives zeros.
        weighted: features whose weights you will give to ``forward``. With several ranks this must be known before:
            other features may be pooled by the rank that owns them.

    Raises:
        ValueError: a feature or a mode is unknown.
    """

    def __init__(
        self,
        schema: Schema,
        features: Sequence[str] | None = None,
        *,
        mode: str | Mapping[str, str] = "sum",
        weighted: Sequence[str] = (),
    ) -> None:
        super().__init__(schema, features)
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
        self._modes = modes
        self._parts: dict[tuple[tuple[int, ...], frozenset[str], frozenset[str], bool], list[FeaturePart]] = {}
        self.pooling = {name: None if name in weighted else chosen for name, chosen in modes.items()}

    def forward(self, batch: Batch, weights: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Look up all features of ``batch``: (N, ``out_features``), in the dtype of the module.

        ``weights``: by feature, a differentiable float32 tensor (ids,) in place of the weights in the data. Raises
        IndexError if an id is not in the pass, RuntimeError if the pass has ended.
        """
        check_batch(self, batch)
        if torch.compiler.is_compiling():
            return self.cast(look_up_bags(self, batch, dict(weights or {})))
        found = self._prepare(batch, dict(weights or {}))
        return self.cast(_PooledFunction.apply(self.anchor, *found))  # type: ignore[no-untyped-call]

    def run(self, context: Any, batch: Batch, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """Look up for the custom operator; ``context`` keeps what its backward needs."""
        out = _PooledFunction.forward(context, self.anchor, *self._prepare(batch, weights))
        context.run_backward = _pooled_backward
        return out

    def _prepare(self, batch: Batch, given: dict[str, torch.Tensor], *, as_bags: bool = False) -> tuple[Any, ...]:
        """Return what `_PooledFunction` is given. as_bags: whether features have offsets, whatever the schema says."""
        self.check_rows(batch.rows)
        is_known = self.begin_lookup(batch)
        backend = batch.rows.backend
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
        groups = _groups_of(batch, [self.feature_specs[name].table for name in here])
        key = groups, frozenset(here), frozenset(arrays), as_bags
        if key not in self._parts:
            self._parts[key] = self._cut(here, groups, key[2], as_bags=as_bags)
        lookups = [
            PooledLookup(part, batch, {n: a for n, a in arrays.items() if n in part.features})
            for part in self._parts[key]
        ]
        shape, names = (batch.num_samples, self.out_features), tuple(given)
        marker = _Marker.of(self, batch, is_known)
        return marker, backend, lookups, list(ready.values()), shape, names, *given.values()

    def mode_of(self, feature: str) -> str | None:
        """Return how a feature is pooled."""
        return self._modes[feature]

    def split(self, out: torch.Tensor) -> list[torch.Tensor]:
        """Split an output into one view (N, dim) for each feature."""
        return list(torch.split(out, self.dims, dim=1))

    def _ready(self, batch: Batch, given: Mapping[str, torch.Tensor]) -> dict[str, ReadyLookup]:
        """Return the features that other ranks have pooled as they are looked up here, by name."""
        found = {name: one for name, one in batch.pooled.items() if self._modes.get(name) == one.mode}
        for name in given:
            if name in found:
                raise ValueError(
                    f"weights were given for {name!r}, which the rank that owns table "
                    f"{self.feature_specs[name].table!r} has pooled already: make the module with weighted=[{name!r}]"
                )
        return {name: ReadyLookup(batch, one, self._cols[name]) for name, one in found.items()}

    def _cut(
        self, features: Sequence[str], groups: Sequence[int], weighted: frozenset[str], *, as_bags: bool
    ) -> list[FeaturePart]:
        """Group features by their tables' group, those with exactly one plain id apart: their kernel is faster."""
        members: dict[tuple[int, bool], list[str]] = {}
        for name, group in zip(features, groups, strict=True):
            spec = self.feature_specs[name]
            bags = as_bags or spec.hotness != "one_hot" or name in weighted
            if bags and name in weighted and self._modes[name] == "max":
                raise ValueError(f"feature {name!r} has weights and is pooled by max: pool it by sum or mean")
            members.setdefault((group, bags), []).append(name)
        return [
            FeaturePart(
                group=group,
                features=tuple(names),
                tables=tuple(self.feature_specs[name].table for name in names),
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


class EmbeddingCollection(TableModule):
    """Looks up one vector for each id, without pooling.

    The output is a dict by feature: (N, dim) if each sample has one id, (N, length, dim) for a list of fixed length,
    and (ids, dim) for a ragged list, whose offsets are ``batch.features[name].offsets``. Weights in the data are not
    applied. To sum over many ids, use EmbeddingBagCollection, which never makes the single vectors.
    """

    def __init__(self, schema: Schema, features: Sequence[str] | None = None) -> None:
        super().__init__(schema, features)
        self._parts: dict[tuple[int, ...], list[FeaturePart]] = {}

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Look up all features of ``batch``."""
        check_batch(self, batch)
        if not self.features:
            return {}
        if torch.compiler.is_compiling():
            return dict(zip(self.features, map(self.cast, look_up_rows(self, batch)), strict=True))
        names, found = self._prepare(batch)
        outs = _RowFunction.apply(self.anchor, *found)  # type: ignore[no-untyped-call]
        return self._by_name(batch, names, outs if self.anchor.dtype == torch.float32 else [*map(self.cast, outs)])

    def run(self, context: Any, batch: Batch) -> list[torch.Tensor]:
        """Look up for the custom operator; ``context`` keeps what its backward needs."""
        names, found = self._prepare(batch)
        outs = self._by_name(batch, names, _RowFunction.forward(context, self.anchor, *found))
        by_name = dict(zip(names, context.features, strict=True))
        context.features = [by_name[name] for name in self.features]
        context.run_backward = _row_backward
        return [*outs.values()]

    def length_of(self, name: str) -> int:
        """Return how many ids each sample has: the fixed length, 0 for a single id, -1 for a ragged list."""
        spec = self.feature_specs[name]
        return {"one_hot": 0, "multi_hot": spec.length or 0}.get(spec.hotness, -1)

    def _prepare(self, batch: Batch) -> tuple[list[str], tuple[Any, ...]]:
        """Return the features in the order of the outputs, and what `_RowFunction` is given."""
        self.check_rows(batch.rows)
        is_known = self.begin_lookup(batch)
        check_brought(batch, self.features)
        groups = _groups_of(batch, [self.feature_specs[name].table for name in self.features])
        if groups not in self._parts:
            self._parts[groups] = self._cut(groups)
        parts = self._parts[groups]
        lookups = [RowLookup(part, batch) for part in parts]
        marker = _Marker.of(self, batch, is_known)
        return [name for part in parts for name in part.features], (marker, batch.rows.backend, lookups)

    def _by_name(self, batch: Batch, names: Sequence[str], outs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the vectors of each feature."""
        found: dict[str, torch.Tensor] = {}
        for name, out in zip(names, outs, strict=True):
            spec = self.feature_specs[name]
            found[name] = (
                out.view(batch.num_samples, spec.length or 0, out.shape[1]) if spec.hotness == "multi_hot" else out
            )
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
                tables=tuple(self.feature_specs[name].table for name in names),
                modes=np.zeros(len(names), dtype=np.int8),
                cols=np.zeros(len(names), dtype=np.int64),
                bags=False,
            )
            for group, names in members.items()
        ]


_WEIGHT = property(table_weight, doc="Device, dtype and shape of the table; it has no values.")
_EMBEDDING_DIM = property(lambda module: module.dims[0], doc="Numbers in a vector.")
_PADDING_IDX = property(lambda module: module.padding, doc="The key that stands for nothing.")


class EmbeddingBag(EmbeddingBagCollection):
    """Looks up and pools one feature: (N, dim). Takes the place of an `nn.EmbeddingBag`.

    ``padding_idx``: a key that counts nowhere and is not trained; with it ``mode`` is "sum" or "mean".
    ``include_last_offset``: whether ``offsets`` of a tensor of keys are (N + 1,) and end with the number of keys.
    """

    def __init__(
        self,
        schema: Schema,
        feature: str,
        *,
        mode: str = "mean",
        padding_idx: int | None = None,
        include_last_offset: bool = False,
    ) -> None:
        if padding_idx is not None and mode == "max":
            raise ValueError(f"feature {feature!r} is pooled by max and has padding: pool it by sum or mean")
        super().__init__(schema, [feature], mode=mode if padding_idx is None else "sum")
        self.padding, self._mode, self.include_last_offset = padding_idx, mode, include_last_offset
        self._padding = None if padding_idx is None else _Padding(feature, padding_idx)
        if padding_idx is not None:
            self.pooling = {feature: None}  # it is weighted by what is in each batch

    def mode_of(self, feature: str) -> str | None:
        """Return how the feature is pooled, which with padding is done by weights of a sum."""
        return self._mode

    weight, embedding_dim, padding_idx = _WEIGHT, _EMBEDDING_DIM, _PADDING_IDX

    def forward(  # type: ignore[override]
        self,
        input: Batch | JaggedIds | torch.Tensor,  # noqa: A002 - torch's name
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look up ``batch.features[name]``, for which a batch may stand, or a tensor of keys as `nn.EmbeddingBag` does.

        Keys are int64 or int32: (N, L), a nested tensor, or (E,) with ``offsets`` (N,). With gradients they have to be
        in the pass; without, any keys are read. ``per_sample_weights``: a differentiable float32 tensor, one for each
        key, in place of the weights in the data. A batch has offsets of its own. Raises ValueError for another feature,
        TypeError for anything else, and what `PlainKeys.batch` raises.
        """
        if isinstance(input, torch.Tensor):
            found: torch.Tensor = self._of_keys(input, offsets, per_sample_weights)
            return found
        batch = _batch_of(input, offsets, self.features[0])
        if self._padding is not None:
            per_sample_weights = self._padding.weights(batch, per_sample_weights, mean=self._mode == "mean")
        weights = None if per_sample_weights is None else {self.features[0]: per_sample_weights}
        return super().forward(batch, weights)

    @not_compiled
    def _of_keys(self, keys: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None) -> torch.Tensor:
        """Look up bags of keys, without those that are padding."""
        name = self.features[0]
        given = given_bags(name, keys, offsets, has_last=self.include_last_offset)
        if weights is not None:
            if weights.shape != keys.shape:
                raise ValueError(f"per_sample_weights have shape {tuple(weights.shape)}: expected {tuple(keys.shape)}")
            weights = weights.reshape(-1)[: given.keys.size]
        if self.padding is not None:
            given, kept = given.without(self.padding)
            weights = None if weights is None else weights[torch.from_numpy(kept).to(weights.device)]
        batch = self.batch_of_keys(given)
        found = self._prepare(batch, {} if weights is None else {name: weights}, as_bags=True)
        out: torch.Tensor = _PooledFunction.apply(self.anchor, *found)  # type: ignore[no-untyped-call]
        if self.padding is not None and self._mode == "mean":
            assert given.offsets is not None
            counts = torch.from_numpy(np.diff(given.offsets).astype(np.float32)).to(out.device)
            out = out / counts.clamp(min=1.0)[:, None]
        return self.cast(out)


class Embedding(EmbeddingCollection):
    """Looks up one vector for each id of one feature. Takes the place of an `nn.Embedding`.

    ``padding_idx``: a key whose vector is zeros, and is not trained.
    """

    def __init__(self, schema: Schema, feature: str, *, padding_idx: int | None = None) -> None:
        super().__init__(schema, [feature])
        self.padding = padding_idx
        self._padding = None if padding_idx is None else _Padding(feature, padding_idx)

    weight, embedding_dim, padding_idx = _WEIGHT, _EMBEDDING_DIM, _PADDING_IDX

    def forward(  # type: ignore[override]
        self,
        input: Batch | JaggedIds | torch.Tensor,  # noqa: A002 - torch's name
    ) -> torch.Tensor:
        """Look up ``batch.features[name]``, for which a batch may stand, or a tensor of keys as `nn.Embedding` does.

        Of keys, int64 or int32 of any shape or nested, the vectors have that shape with one more dimension. With
        gradients the keys have to be in the pass; without, any keys are read. Raises what `EmbeddingBag.forward` does.
        """
        if isinstance(input, torch.Tensor):
            of_keys: torch.Tensor = self._of_keys(input)
            return of_keys
        batch = _batch_of(input, None, self.features[0])
        found = super().forward(batch)[self.features[0]]
        if self._padding is None:
            return found
        kept: torch.Tensor = self._padding.kept(batch)
        return found * kept.view(*found.shape[:-1], 1)

    @not_compiled
    def _of_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """Look keys up, without those that are padding."""
        given, kept = given_rows(self.features[0], keys), None
        if self.padding is not None:
            given, kept = given.without(self.padding)
        _, found = self._prepare(self.batch_of_keys(given))
        out = self.cast(_RowFunction.apply(self.anchor, *found)[0])  # type: ignore[no-untyped-call]
        if kept is not None and given.keys.size < kept.size:
            places = torch.from_numpy(np.flatnonzero(kept)).to(out.device)
            out = out.new_zeros(kept.size, out.shape[1]).index_copy(0, places, out)
        return shaped_as(keys, out)


class _Padding(NamedTuple):
    """A key of a feature that stands for nothing."""

    feature: str
    key: int

    @not_compiled
    def kept(self, batch: Batch) -> torch.Tensor:
        """Return 1 for each id (ids,) that means something, 0 for padding: float32, where rows are trained."""
        kept = (~batch.rows.is_key(self.feature, batch.ids[self.feature], self.key)).astype(np.float32)
        return torch.from_numpy(kept).to(batch.rows.backend.device)

    def weights(self, batch: Batch, given: torch.Tensor | None, *, mean: bool) -> torch.Tensor:
        """Return a weight for each id: those given or of the data, without padding; of a mean what it divides by."""
        kept: torch.Tensor = self.kept(batch)
        ids = batch.ids[self.feature]
        if given is None and ids.weights is not None:
            given = torch.from_numpy(np.asarray(ids.weights)).to(kept.device)
        weights: torch.Tensor = kept if given is None else kept * given.reshape(-1)
        if not mean:
            return weights
        counts = kept
        if ids.offsets is not None:
            lengths = torch.from_numpy(np.diff(ids.offsets)).to(kept.device)
            sample = torch.repeat_interleave(torch.arange(lengths.numel(), device=kept.device), lengths)
            counts = torch.zeros(lengths.numel(), dtype=torch.float32, device=kept.device).index_add_(0, sample, kept)[
                sample
            ]
        return weights / counts.clamp(min=1.0)


def check_batch(module: TableModule, given: object) -> None:
    """Raise TypeError for anything but a batch."""
    if not isinstance(given, Batch):
        raise TypeError(
            f"{type(module).__name__} looks up whole batches and was given a {type(given).__name__}: give it a "
            "batch of a pass; make one of your own keys with Pass.batch(keys), or look one feature up with "
            "EmbeddingBag or Embedding"
        )


def _batch_of(given: Any, offsets: object, feature: str) -> Batch:
    """Return the batch that ids are of."""
    if offsets is not None:
        raise TypeError(f"offsets were given with feature {feature!r}: a feature of a batch has its own, so give none")
    if isinstance(given, JaggedIds):
        if given.feature != feature:
            raise ValueError(f"this module looks up {feature!r} and was given {given.feature!r}: give that feature")
        return given.batch
    if isinstance(given, Batch):
        return given
    raise TypeError(
        f"a module that looks up {feature!r} was given a {type(given).__name__}: give it batch.features[{feature!r}] "
        "or the batch, or a torch tensor of keys"
    )


class _Marker(NamedTuple):
    """Has the gradients of a module's rows wait for a step, once backward brings them."""

    parameter: nn.Parameter
    """The anchor, as the lookup had it."""
    anchor: Anchor | None
    """None: rows are not trained."""
    anchors: Anchors | None
    tables: Sequence[str]
    is_known: bool
    """Whether the cache has the module, or does not ask."""

    @classmethod
    def of(cls, module: TableModule, batch: Batch, is_known: bool) -> _Marker:
        """Return that of a lookup."""
        anchors = None if batch.rows.gradients is None else batch.rows.gradients.anchors
        return cls(module.anchor, None if anchors is None else anchors.of(module), anchors, module.tables, is_known)

    def arrive(self, gradients: Sequence[torch.Tensor | None], tables: Sequence[Iterable[str]]) -> list[Arrival | None]:
        """Note the gradients of outputs, of rows of ``tables``; nothing where the module is frozen."""
        if self.anchor is None or self.anchors is None or not self.parameter.requires_grad:
            return [None] * len(gradients)
        if not self.is_known:
            self.anchors.refuse_reader(self.tables)
        if self.anchors.ledger is not None:
            self.anchors.ledger.arrive()
        return self.anchor.arrive(self.parameter, gradients, [*map(frozenset, tables)])

    def gradient(self, gradients: Sequence[torch.Tensor | None], arrived: Sequence[Arrival | None]) -> Any:
        """Return the gradient of the anchor."""
        if self.anchors is None or not any(one is not None for one in arrived):
            return None
        return self.anchors.gradient_of(self.parameter, gradients)


class _PooledFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, marker: _Marker, backend: Backend, lookups: list[PooledLookup],
                ready: list[ReadyLookup], shape: tuple[int, int], names: tuple[str, ...],
                *_weights: torch.Tensor) -> torch.Tensor:  # fmt: skip
        # here, as torch lets nobody change in place what was given and comes back
        out = backend.empty(shape, np.float32)
        if lookups:
            for lookup, found in zip(
                lookups, backend.pool([(one.rows, one.entries) for one in lookups], out), strict=True
            ):
                lookup.found = found
        result = backend.tensor(out)
        for one in ready:
            one.write(result)
        ctx.marker, ctx.backend, ctx.lookups, ctx.ready, ctx.names = marker, backend, lookups, ready, names
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        backend: Backend = ctx.backend
        by_name: dict[str, torch.Tensor] = {}
        arrived: list[Arrival | None] = [None]
        if grads[0] is not None:
            if ctx.needs_input_grad[0]:
                arrived = ctx.marker.arrive(grads, [ctx.marker.tables])
            for lookup in ctx.lookups:
                if set(lookup.part.features) & set(ctx.names):
                    found = lookup.weight_gradients(backend.array(grads[0]))
                    by_name |= {name: backend.tensor(gradient) for name, gradient in found.items()}
            if arrived[0] is not None:
                for one in (*ctx.lookups, *ctx.ready):
                    one.backward(grads[0].shape[1], arrived[0])
        anchor = ctx.marker.gradient(grads, arrived)
        return anchor, None, None, None, None, None, None, *(by_name.get(name) for name in ctx.names)


def _pooled_backward(context: Any, grads: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """Return the anchor's gradient, and those of weights by feature."""
    anchor, *others = _PooledFunction.backward(context, *grads)
    return anchor, dict(zip(context.names, others[6:], strict=True))


class _RowFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, marker: _Marker, backend: Backend,
                lookups: list[RowLookup]) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.marker, ctx.backend = marker, backend
        ctx.features = [(lookup, feature) for lookup in lookups for feature in range(len(lookup.part.features))]
        ctx.set_materialize_grads(False)
        outs, every = backend.gather([(lookup.rows, lookup.entries) for lookup in lookups])
        for lookup, found in zip(lookups, every, strict=True):
            lookup.found = found
        return tuple(backend.tensor(out) for out in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        arrived = ctx.marker.arrive(grads, [[lookup.part.tables[feature]] for lookup, feature in ctx.features])
        for (lookup, feature), one in zip(ctx.features, arrived, strict=True):
            if one is not None:
                lookup.backward(feature, one)
        return ctx.marker.gradient(grads, arrived), None, None, None


def _row_backward(context: Any, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """Return the anchor's gradient, from those of each feature's vectors."""
    flat = [None if grad is None else grad.reshape(-1, grad.shape[-1]) for grad in grads]
    return _RowFunction.backward(context, *flat)[0], {}


def _groups_of(batch: Batch, tables: Sequence[str]) -> tuple[int, ...]:
    """Return the group of each table in the rows of ``batch``: what shares a layout is the store's matter."""
    group_of = {table: index for index, group in enumerate(batch.rows.groups) for table in group.first}
    return tuple(group_of[table] for table in tables)
