"""The embedding modules: EmbeddingBagCollection (pooled) and EmbeddingCollection (one vector for each id)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiercache.train.lookup_ops import Marker, PooledFunction, RowFunction, look_up_bags, look_up_rows
from tiercache.train.plain_keys import bag_input, refuse_weight, row_input, shaped_as, table_weight
from tiercache.train.row_writes import renormalize
from tiercache.train.table_lookup import MODES, FeaturePart, RemoteLookup, TableLookup, check_ids_of
from tiercache.train.table_module import TableModule
from tiercache.values.batch import Batch, JaggedIds
from tiercache.values.compiled import not_compiled

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from tiercache.schema import Feature, Schema


class EmbeddingBagCollection(TableModule):
    """Looks up features and pools each one: (N, sum of dims), the features side by side.

    The module exists without a cache; registering the model with a cache binds it. It has no rows and no gradient of a
    table: its only parameter is an anchor, see `TableModule`. Outputs have the anchor's dtype. Their memory is reused
    when you no longer refer to them.

    Args:
        schema: the schema of the dataset.
        features: names of the features, in the order of the output; default: all.
        mode: "sum", "mean" or "max", for all features or by name. Weights multiply the vectors before pooling; "mean"
            still divides by the number of ids, and "max" takes no weights. An empty bag gives zeros.
        weighted: features whose weights you will pass to ``forward``. With several ranks this must be known in advance:
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
            raise ValueError(f"mode= has {unknown[0]!r}, but this module looks up {', '.join(self.features)}")
        if others := [name for name in weighted if name not in modes]:
            raise ValueError(f"weighted= has {others[0]!r}, but this module looks up {', '.join(self.features)}")
        for name, chosen in modes.items():
            if chosen not in MODES:
                raise ValueError(f"feature {name!r} is pooled by {chosen!r}: expected one of {', '.join(MODES)}")
        self.out_features = sum(self.dims)
        """Number of columns of the output."""
        cols = np.concatenate([[0], np.cumsum(self.dims)]).astype(np.int64)
        self._cols = {name: int(cols[i]) for i, name in enumerate(self.features)}
        self._modes = modes
        self._parts: dict[tuple[tuple[int, ...], frozenset[str], frozenset[str], bool], list[FeaturePart]] = {}
        self.pooling = {name: None if name in weighted else chosen for name, chosen in modes.items()}

    def forward(self, batch: Batch, weights: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Look up all features of ``batch``: (N, ``out_features``), in the dtype of the module.

        ``weights``: by feature, a differentiable float32 tensor (ids,) that replaces the weights in the data. Raises
        IndexError if an id is not in the pass, RuntimeError if the pass has ended.
        """
        _check_batch(self, batch)
        if torch.compiler.is_compiling():
            return self.cast(look_up_bags(self, batch, dict(weights or {})))
        inputs = self._prepare(batch, dict(weights or {}))
        return self.cast(PooledFunction.apply(self.anchor, *inputs))  # type: ignore[no-untyped-call]

    def run(self, context: Any, batch: Batch, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """Look up for the custom operator; ``context`` keeps what its backward needs."""
        context.run_backward = PooledFunction.run_backward
        return PooledFunction.forward(context, self.anchor, *self._prepare(batch, weights))

    def _prepare(self, batch: Batch, weights: dict[str, torch.Tensor], *, as_bags: bool = False) -> tuple[Any, ...]:
        """Return the inputs of `PooledFunction`. as_bags: features have offsets, whatever the schema says."""
        marker, backend = Marker.of(self, batch), batch.rows.backend
        for name, weight in weights.items():
            if name not in self._cols:
                raise ValueError(
                    f"weights were given for {name!r}, but this module looks up {', '.join(self.features)}"
                )
            if weight.dtype != torch.float32:
                raise ValueError(f"weights of feature {name!r} are {weight.dtype}: expected torch.float32")
            if weight.device != backend.device:
                raise ValueError(
                    f"weights of feature {name!r} are on {weight.device}, but rows are trained on {backend.device}: "
                    "move them there"
                )
        remote = self._remote(batch, weights)
        local = [name for name in self.features if name not in remote] if remote else self.features
        check_ids_of(batch, local)
        weighted = getattr(batch.ids, "weighted", local)  # if this is known, their other ids are not made
        arrays = {n: values for n in local if n in weighted and (values := batch.ids[n].weights) is not None}
        if weights:
            arrays |= {name: backend.array(value) for name, value in weights.items()}
        groups = self.groups_of(batch.rows.groups, local)
        key = groups, frozenset(local), frozenset(arrays), as_bags
        if key not in self._parts:
            self._parts[key] = self._cut(local, groups, key[2], as_bags=as_bags)
        lookups = [
            TableLookup(part, batch, {n: a for n, a in arrays.items() if n in part.features} if arrays else {})
            for part in self._parts[key]
        ]
        if self.max_norm is not None:
            for lookup in lookups:
                renormalize(lookup, self.max_norm, self.norm_type)
        shape = batch.num_samples, self.out_features
        return marker, backend, lookups, list(remote.values()), shape, tuple(weights), *weights.values()

    def mode_of(self, feature: str) -> str | None:
        """Return the pooling mode of a feature."""
        return self._modes[feature]

    def split(self, out: torch.Tensor) -> list[torch.Tensor]:
        """Split an output into one view (N, dim) for each feature."""
        return list(torch.split(out, self.dims, dim=1))

    def _remote(self, batch: Batch, weights: Collection[str]) -> dict[str, RemoteLookup]:
        """Return the features that other ranks have pooled in the mode of this module, by name."""
        if not batch.pooled:
            return {}
        found = {name: one for name, one in batch.pooled.items() if self._modes.get(name) == one.mode}
        for name in weights:
            if name in found:
                raise ValueError(
                    f"weights were given for {name!r}, which the rank that owns table "
                    f"{self.feature_specs[name].table!r} has already pooled: create the module with weighted=[{name!r}]"
                )
        return {name: RemoteLookup(batch, one, self._cols[name]) for name, one in found.items()}

    def _cut(
        self, features: Sequence[str], groups: Sequence[int], weighted: frozenset[str], *, as_bags: bool
    ) -> list[FeaturePart]:
        """Group features by their tables' group; features with exactly one plain id have a faster kernel."""
        members: dict[tuple[int, bool], list[str]] = {}
        for name, group in zip(features, groups, strict=True):
            if name in weighted and self._modes[name] == "max":
                raise ValueError(f"feature {name!r} has weights and is pooled by max: pool it by sum or mean")
            bags = as_bags or self.feature_specs[name].hotness != "one_hot" or name in weighted
            members.setdefault((group, bags), []).append(name)
        modes = {name: MODES[mode] for name, mode in self._modes.items()}
        return [
            FeaturePart.of(group, [self.feature_specs[name] for name in names], modes, self._cols, bags=bags)
            for (group, bags), names in members.items()
        ]

    def extra_repr(self) -> str:
        """Describe the lookups."""
        return ", ".join(
            f"{name}: {self.mode_of(name)}({dim})" for name, dim in zip(self.features, self.dims, strict=True)
        )


class EmbeddingCollection(TableModule):
    """Looks up one vector for each id, without pooling.

    The output is a dict by feature: (N, dim) if each sample has one id, (N, length, dim) for a list of fixed length,
    and (ids, dim) for a ragged list, whose offsets are ``batch.features[name].offsets``. Weights in the data are not
    applied. To sum over many ids, use EmbeddingBagCollection, which does not materialize the single vectors. On a GPU
    the vectors of tables with one row layout share memory, which is freed with the last of them.
    """

    def __init__(self, schema: Schema, features: Sequence[str] | None = None) -> None:
        super().__init__(schema, features)
        self._parts: dict[tuple[int, ...], list[FeaturePart]] = {}

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Look up all features of ``batch``."""
        _check_batch(self, batch)
        if not self.features:
            return {}
        if torch.compiler.is_compiling():
            return dict(zip(self.features, map(self.cast, look_up_rows(self, batch)), strict=True))
        names, inputs = self._prepare(batch)
        outs = RowFunction.apply(self.anchor, *inputs)  # type: ignore[no-untyped-call]
        return self._by_name(batch, names, outs if self.anchor.dtype == torch.float32 else [*map(self.cast, outs)])

    def run(self, context: Any, batch: Batch) -> list[torch.Tensor]:
        """Look up for the custom operator; ``context`` keeps what its backward needs."""
        names, inputs = self._prepare(batch)
        outs = self._by_name(batch, names, RowFunction.forward(context, self.anchor, *inputs))
        context.order = [self.features.index(name) for name in names]
        context.run_backward = RowFunction.run_backward
        return [*outs.values()]

    def extra_repr(self) -> str:
        """Describe the lookups."""
        return ", ".join(f"{name}({dim})" for name, dim in zip(self.features, self.dims, strict=True))

    def length_of(self, name: str) -> int:
        """Return the number of ids per sample: the fixed length, 0 for a single id, -1 for a ragged list."""
        spec = self.feature_specs[name]
        return {"one_hot": 0, "multi_hot": spec.length or 0}.get(spec.hotness, -1)

    def _prepare(self, batch: Batch) -> tuple[list[str], tuple[Any, ...]]:
        """Return the features in the order of the outputs, and the inputs of `RowFunction`."""
        marker = Marker.of(self, batch)
        check_ids_of(batch, self.features)
        groups = self.groups_of(batch.rows.groups, self.features)
        if groups not in self._parts:
            members: dict[int, list[Feature]] = {}
            for name, group in zip(self.features, groups, strict=True):
                members.setdefault(group, []).append(self.feature_specs[name])
            self._parts[groups] = [FeaturePart.of(group, specs, {}, {}, bags=False) for group, specs in members.items()]
        parts = self._parts[groups]
        lookups = [TableLookup(part, batch) for part in parts]
        if self.max_norm is not None:
            for lookup in lookups:
                renormalize(lookup, self.max_norm, self.norm_type)
        return [name for part in parts for name in part.features], (marker, batch.rows.backend, lookups)

    def _by_name(self, batch: Batch, names: Sequence[str], outs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, out in zip(names, outs, strict=True):
            spec = self.feature_specs[name]
            found[name] = (
                out.view(batch.num_samples, spec.length or 0, out.shape[1]) if spec.hotness == "multi_hot" else out
            )
        return {name: found[name] for name in self.features}


_WEIGHT = property(
    table_weight,
    lambda self, _: refuse_weight("weight", self.tables[0]),
    doc="Device, dtype and shape of the table; it has no values.",
)
_EMBEDDING_DIM = property(lambda module: module.dims[0], doc="Numbers in a vector.")
_PADDING_IDX = property(lambda module: module.padding, doc="The padding key.")


def _set_scale_grad_by_freq(module: TableModule, value: bool) -> None:
    if value:
        raise ValueError(
            f"scale_grad_by_freq of the module that looks up {module.features[0]!r} was set to {value}, but it is "
            "always False: pass weights for ids instead"
        )


_SCALE_GRAD_BY_FREQ = property(lambda _: False, _set_scale_grad_by_freq, doc="False: a row gets the sum of gradients.")


class EmbeddingBag(EmbeddingBagCollection):
    """Looks up and pools one feature: (N, dim). Replaces an `nn.EmbeddingBag`.

    ``padding_idx``: a key that is not pooled and not trained; with it ``mode`` must be "sum" or "mean".
    ``include_last_offset``: True if ``offsets`` of a tensor of keys are (N + 1,) and end with the number of keys.
    ``max_norm``, ``norm_type``: a lookup first scales the rows whose norm exceeds ``max_norm``, in place as torch does;
    for rows that the pass does not train, only the returned vectors are scaled. With one rank.
    """

    def __init__(
        self,
        schema: Schema,
        feature: str,
        *,
        mode: str = "mean",
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        include_last_offset: bool = False,
    ) -> None:
        if padding_idx is not None and mode == "max":
            raise ValueError(f"feature {feature!r} is pooled by max and has padding: pool it by sum or mean")
        super().__init__(schema, [feature], mode=mode if padding_idx is None else "sum")
        self.padding, self._mode, self.include_last_offset = padding_idx, mode, include_last_offset
        self.max_norm, self.norm_type = max_norm, norm_type
        if padding_idx is not None:
            self.pooling = {feature: None}  # weighted if the batch has weights

    def mode_of(self, feature: str) -> str | None:
        """Return the pooling mode; a mean with padding is a weighted sum."""
        return self._mode

    weight, embedding_dim, padding_idx = _WEIGHT, _EMBEDDING_DIM, _PADDING_IDX
    scale_grad_by_freq = _SCALE_GRAD_BY_FREQ
    mode = property(lambda module: module._mode, doc='"sum", "mean" or "max".')

    def forward(  # type: ignore[override]
        self,
        input: Batch | JaggedIds | torch.Tensor,  # noqa: A002 - torch's name
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look up ``batch.features[name]``, or a batch, or a tensor of keys as `nn.EmbeddingBag` does.

        Keys are int64 or int32: (N, L), a nested tensor, or (E,) with ``offsets`` (N,). With gradients they must be in
        the pass; without, any keys are read. ``per_sample_weights``: a differentiable float32 tensor, one for each key,
        that replaces the weights in the data. A batch has its own offsets. Raises ValueError for another feature,
        TypeError for any other input, and the errors of `PlainKeys.batch`.
        """
        if per_sample_weights is not None:
            per_sample_weights = self._as_float32(per_sample_weights)
        if isinstance(input, torch.Tensor):
            found: torch.Tensor = self._of_keys(input, offsets, per_sample_weights)
            return found
        batch = _batch_of(input, offsets, self.features[0])
        if self.padding is not None:
            per_sample_weights = self._padded_weights(batch, self.padding, per_sample_weights)
        weights = None if per_sample_weights is None else {self.features[0]: per_sample_weights}
        return super().forward(batch, weights)

    def _as_float32(self, weights: torch.Tensor) -> torch.Tensor:
        if not isinstance(weights, torch.Tensor):
            raise TypeError(
                f"per_sample_weights are a {type(weights).__name__}: expected a tensor of torch.float32, with a "
                "number for each key"
            )
        return weights.float() if weights.dtype == self.anchor.dtype else weights

    def _padded_weights(self, batch: Batch, padding: int, weights: torch.Tensor | None) -> torch.Tensor:
        """Return a weight for each id: ``weights`` or the data's, 0 for padding; divided for a mean."""
        kept: torch.Tensor = _kept(batch, self.features[0], padding)
        ids = batch.ids[self.features[0]]
        if weights is None and ids.weights is not None:
            weights = torch.from_numpy(np.asarray(ids.weights)).to(kept.device)
        weights = kept if weights is None else kept * weights.reshape(-1)
        if self._mode != "mean":
            return weights
        counts = kept
        if ids.offsets is not None:
            lengths = torch.from_numpy(np.diff(ids.offsets)).to(kept.device)
            sample = torch.repeat_interleave(torch.arange(lengths.numel(), device=kept.device), lengths)
            counts = torch.zeros(lengths.numel(), dtype=torch.float32, device=kept.device)
            counts = counts.index_add_(0, sample, kept)[sample]
        return weights / counts.clamp(min=1.0)

    @not_compiled
    def _of_keys(self, keys: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None) -> torch.Tensor:
        name = self.features[0]
        bags = bag_input(name, keys, offsets, has_last=self.include_last_offset)
        if weights is not None:
            if weights.shape != keys.shape:
                raise ValueError(f"per_sample_weights have shape {tuple(weights.shape)}: expected {tuple(keys.shape)}")
            weights = weights.reshape(-1)[: bags.keys.size]
        if self.padding is not None:
            bags, kept = bags.without(self.padding)
            weights = None if weights is None else weights[torch.from_numpy(kept).to(weights.device)]
        batch = self.batch_of_keys(bags)
        inputs = self._prepare(batch, {} if weights is None else {name: weights}, as_bags=True)
        out: torch.Tensor = PooledFunction.apply(self.anchor, *inputs)  # type: ignore[no-untyped-call]
        if self.padding is not None and self._mode == "mean":
            assert bags.offsets is not None
            counts = torch.from_numpy(np.diff(bags.offsets).astype(np.float32)).to(out.device)
            out = out / counts.clamp(min=1.0)[:, None]
        return self.cast(out)


class Embedding(EmbeddingCollection):
    """Looks up one vector for each id of one feature. Replaces an `nn.Embedding`.

    ``padding_idx``: a key whose vector is zeros, and is not trained. ``max_norm``, ``norm_type``: see `EmbeddingBag`.
    """

    def __init__(
        self,
        schema: Schema,
        feature: str,
        *,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> None:
        super().__init__(schema, [feature])
        self.padding, self.max_norm, self.norm_type = padding_idx, max_norm, norm_type

    weight, embedding_dim, padding_idx = _WEIGHT, _EMBEDDING_DIM, _PADDING_IDX
    scale_grad_by_freq = _SCALE_GRAD_BY_FREQ

    def forward(  # type: ignore[override]
        self,
        input: Batch | JaggedIds | torch.Tensor,  # noqa: A002 - torch's name
    ) -> torch.Tensor:
        """Look up ``batch.features[name]``, or a batch, or a tensor of keys as `nn.Embedding` does.

        Keys are int64 or int32 of any shape, or nested; vectors have one more dimension. With gradients the keys must
        be in the pass; without, any keys are read. Raises the errors of `EmbeddingBag.forward`.
        """
        if isinstance(input, torch.Tensor):
            of_keys: torch.Tensor = self._of_keys(input)
            return of_keys
        batch = _batch_of(input, None, self.features[0])
        found = super().forward(batch)[self.features[0]]
        if self.padding is None:
            return found
        kept: torch.Tensor = _kept(batch, self.features[0], self.padding)
        return found * kept.view(*found.shape[:-1], 1)

    @not_compiled
    def _of_keys(self, keys: torch.Tensor) -> torch.Tensor:
        flat, kept = row_input(self.features[0], keys), None
        if self.padding is not None:
            flat, kept = flat.without(self.padding)
        _, inputs = self._prepare(self.batch_of_keys(flat))
        out = self.cast(RowFunction.apply(self.anchor, *inputs)[0])  # type: ignore[no-untyped-call]
        if kept is not None and flat.keys.size < kept.size:
            places = torch.from_numpy(np.flatnonzero(kept)).to(out.device)
            out = out.new_zeros(kept.size, out.shape[1]).index_copy(0, places, out)
        return shaped_as(keys, out)


@not_compiled
def _kept(batch: Batch, feature: str, padding: int) -> torch.Tensor:
    """Return 1 for each id (ids,) of a feature, 0 for padding: float32, on the device of the rows."""
    kept = (~batch.rows.is_key(feature, batch.ids[feature], padding)).astype(np.float32)
    return torch.from_numpy(kept).to(batch.rows.backend.device)


def _check_batch(module: TableModule, batch: object) -> None:
    if not isinstance(batch, Batch):
        raise TypeError(
            f"{type(module).__name__} looks up whole batches, but got a {type(batch).__name__}: pass it a "
            "batch of a pass; make one from your own keys with Pass.batch(keys), or look up one feature with "
            "EmbeddingBag or Embedding"
        )


def _batch_of(ids: Any, offsets: object, feature: str) -> Batch:
    if offsets is not None:
        raise TypeError(f"offsets were given with feature {feature!r}: a feature of a batch has its own, so pass none")
    if isinstance(ids, JaggedIds):
        if ids.feature != feature:
            raise ValueError(f"this module looks up {feature!r}, but got {ids.feature!r}: pass {feature!r}")
        return ids.batch
    if isinstance(ids, Batch):
        return ids
    raise TypeError(
        f"a module that looks up {feature!r} got a {type(ids).__name__}: pass batch.features[{feature!r}], "
        "the batch, or a torch tensor of keys"
    )
