"""The embedding modules: EmbeddingBagCollection (pooled) and EmbeddingCollection (one vector for each id)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tiercache.errors import StateError
from tiercache.training.batch import Batch, JaggedIds
from tiercache.training.data_parallel import hide_handles
from tiercache.training.joining import FeaturePart
from tiercache.training.lookup import MODES, PooledLookup, ReadyLookup, RowLookup, check_brought
from tiercache.training.scaled_loss import watch_scalers
from tiercache.training.tracers import tracer_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tiercache.backends.base import Backend
    from tiercache.schema import Feature, Schema
    from tiercache.training.row_gradients import RowGradients
    from tiercache.training.tracers import Mark


class TableModule(nn.Module):
    """A module that looks tables up.

    It has no rows: it has a 0-dim parameter, by which rows follow what a loop does to gradients (see `tracers`). The
    optimizer that owns it steps the rows that the module looks up; ``requires_grad_(False)`` freezes them. Its value
    means nothing, and it is not part of the module's state.
    """

    def __init__(self, schema: Schema, features: Sequence[str] | None) -> None:
        super().__init__()
        watch_scalers()
        hide_handles(handle_names)
        self.features, self.dims, self._specs = _choose(schema, features)
        self.tables = [*dict.fromkeys(self._specs[name].table for name in self.features)]
        """The tables looked up."""
        self.handle = nn.Parameter(torch.zeros((), device="cpu"))
        """The parameter; on the CPU also of a module that is made on "meta"."""
        self._rows: Callable[[], Callable[[], dict[str, Any]] | None] = _of_no_cache
        self._loaded: dict[str, Any] | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        found = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # no 16-bit number holds a tracer, and to_empty() leaves anything
        self.handle.data = torch.zeros((), device=self.handle.device)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_rows": _of_no_cache}  # a copy, or one that was pickled, belongs to no cache

    def bind(self, rows: Callable[[], Callable[[], dict[str, Any]] | None]) -> None:
        """Belong to the rows of a cache: a reference to what names their store and commit, None once that is gone.

        Raises StateError where a state was loaded that belongs to others.
        """
        self._rows = rows
        self._check_rows()

    def _check_rows(self) -> None:
        """Raise StateError where the rows are not those that the loaded state belongs to."""
        state, rows = self._loaded, self._rows()
        if state is None or rows is None or state == (now := rows()):
            return
        self._loaded = None
        raise StateError(
            f"this state belongs to the rows of commit {state['commit']} of {state['store']}, and the cache has those "
            f"of commit {now['commit']} of {now['store']}: roll the store back, or load the state of its rows"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state: no rows and no handle; its metadata say to which commit of which store it belongs."""
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        found.pop(f"{prefix}handle", None)
        rows = self._rows()
        if rows is not None and hasattr(found, "_metadata"):
            found._metadata[prefix[:-1]]["rows"] = rows()
        return found

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self._loaded = local_metadata.get("rows")
        self._check_rows()
        state_dict.setdefault(f"{prefix}handle", self.handle.detach())
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def _of_no_cache() -> None:
    """Nobody's rows."""


def table_modules(objects: Iterable[object]) -> list[TableModule]:
    """Return the modules that look tables up, of all modules among ``objects``."""
    modules = [one for one in objects if isinstance(one, nn.Module)]
    return [part for module in modules for part in module.modules() if isinstance(part, TableModule)]


def handle_names(module: nn.Module) -> list[str]:
    """Return the names that the handles of a module have among its parameters."""
    return [
        f"{name}.handle" if name else "handle" for name, part in module.named_modules() if isinstance(part, TableModule)
    ]


def handle_ids(objects: Iterable[object]) -> set[int]:
    """Return the ids of the handles of all modules among ``objects``."""
    return {id(module.handle) for module in table_modules(objects)}


class EmbeddingBagCollection(TableModule):
    """Looks up features and pools each: (N, sum of dims), features side by side in the order given.

    schema: that of the dataset. The module exists without a cache, and is bound to one by being given to it.

    mode: "sum", "mean" or "max", for all features or by feature name. Per-id weights multiply the vectors before
    pooling ("mean" still divides by the number of ids; "max" takes none); an empty bag is zeros. No gradient of a table
    ever exists: the only parameter is a handle, see `TableModule`. Outputs are float32 and come from a pool: they are
    yours as long as you refer to them.

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
        self._parts: dict[tuple[tuple[int, ...], frozenset[str], frozenset[str]], list[FeaturePart]] = {}
        self.pooling = {name: None if name in weighted else chosen for name, chosen in modes.items()}
        """By feature, how it is pooled; None where its rows are needed."""

    def forward(self, batch: Batch, weights: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Look up all features of ``batch``: float32 (N, ``out_features``).

        weights: by feature, one float32 tensor (ids,), differentiable; they take the place of the data's own.
        Raises IndexError for ids that are not of the visit, RuntimeError where the visit has ended.
        """
        watch_scalers()
        batch.rows.look_up(batch.end)
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
            self.handle, _Marker(self.handle, self.tables, batch.rows.gradients), backend, lookups,
            list(ready.values()), shape, names, *given.values(),
        )  # fmt: skip
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


class EmbeddingCollection(TableModule):
    """Looks up one vector for each id, without pooling.

    The output is a dictionary by feature: (N, dim) where a sample has one id, (N, length, dim) for a fixed list,
    (ids, dim) for a ragged one, whose offsets are in ``batch.ids[feature].offsets``. Weights of the data are not
    applied. Not for sums over many ids: EmbeddingBagCollection never makes the single vectors.
    """

    def __init__(self, schema: Schema, features: Sequence[str] | None = None) -> None:
        super().__init__(schema, features)
        self._parts: dict[tuple[int, ...], list[FeaturePart]] = {}
        self.pooling: dict[str, str | None] = dict.fromkeys(self.features)

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Look up all features of ``batch``."""
        watch_scalers()
        batch.rows.look_up(batch.end)
        check_brought(batch, self.features)
        if not self.features:
            return {}
        groups = _groups_of(batch, [self._specs[name].table for name in self.features])
        if groups not in self._parts:
            self._parts[groups] = self._cut(groups)
        parts = self._parts[groups]
        lookups = [RowLookup(part, batch) for part in parts]
        marker = _Marker(self.handle, self.tables, batch.rows.gradients)
        outs = _RowFunction.apply(  # type: ignore[no-untyped-call]
            self.handle, marker, batch.rows.backend, lookups
        )
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


class EmbeddingBag(EmbeddingBagCollection):
    """Looks up and pools one feature, in place of an `nn.EmbeddingBag`: (N, dim)."""

    def __init__(self, schema: Schema, feature: str, *, mode: str = "mean") -> None:
        super().__init__(schema, [feature], mode=mode)

    def forward(  # type: ignore[override]
        self,
        input: Batch | JaggedIds,  # noqa: A002 - torch's name
        offsets: None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look up ``batch.features[name]``, or its feature of a batch.

        per_sample_weights: float32 (ids,), differentiable; they take the place of the data's own. offsets: those of the
        batch; give none. Raises ValueError for another feature, TypeError for what is no feature of a batch.
        """
        batch = _batch_of(input, offsets, self.features[0])
        weights = None if per_sample_weights is None else {self.features[0]: per_sample_weights}
        return super().forward(batch, weights)


class Embedding(EmbeddingCollection):
    """Looks up one vector for each id of one feature, in place of an `nn.Embedding`."""

    def __init__(self, schema: Schema, feature: str) -> None:
        super().__init__(schema, [feature])

    def forward(  # type: ignore[override]
        self,
        input: Batch | JaggedIds,  # noqa: A002 - torch's name
    ) -> torch.Tensor:
        """Look up ``batch.features[name]``, or its feature of a batch: as `EmbeddingCollection` does."""
        return super().forward(_batch_of(input, None, self.features[0]))[self.features[0]]


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
        "or the batch; make one of your own keys with Visit.batch"
    )


class _Marker(NamedTuple):
    """Marks, in backward, that gradients of a module's rows wait for a step."""

    handle: nn.Parameter
    tables: Sequence[str]
    gradients: RowGradients | None

    def mark(self) -> Mark | None:
        """Note one more gradient; None where the module is frozen or rows are not trained."""
        tracer = None if self.gradients is None else self.gradients.tracers.of(self.handle, self.tables)
        return None if tracer is None else tracer.mark()


class _PooledFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _handle: torch.Tensor, marker: _Marker, backend: Backend, lookups: list[PooledLookup],
                ready: list[ReadyLookup], shape: tuple[int, int], names: tuple[str, ...],
                *_weights: torch.Tensor) -> torch.Tensor:  # fmt: skip
        # here, as torch lets nobody change in place what was given and comes back
        out = backend.empty(shape, np.float32)
        if lookups:
            backend.pool([(lookup.rows, lookup.entries) for lookup in lookups], out)
        result = backend.tensor(out)
        for found in ready:
            found.write(result)
        ctx.marker, ctx.backend, ctx.lookups, ctx.ready, ctx.names = marker, backend, lookups, ready, names
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        backend: Backend = ctx.backend
        mark = ctx.marker.mark() if ctx.needs_input_grad[0] else None
        grad = backend.array(grads[0])
        by_name: dict[str, torch.Tensor] = {}
        for lookup in ctx.lookups:
            if set(lookup.part.features) & set(ctx.names):
                by_name |= {n: backend.tensor(g) for n, g in lookup.weight_gradients(grad).items()}
            if mark is not None:
                lookup.backward(grad, mark)
        if mark is not None:
            for found in ctx.ready:
                found.backward(grads[0], mark)
        tracer = None if mark is None else tracer_gradient(ctx.marker.handle, grads)
        return tracer, None, None, None, None, None, None, *(by_name.get(name) for name in ctx.names)


class _RowFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _handle: torch.Tensor, marker: _Marker, backend: Backend,
                lookups: list[RowLookup]) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.marker, ctx.backend = marker, backend
        ctx.features = [(lookup, feature) for lookup in lookups for feature in range(len(lookup.part.features))]
        ctx.set_materialize_grads(False)
        outs = backend.gather([(lookup.rows, lookup.entries) for lookup in lookups])
        return tuple(backend.tensor(out) for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        mark = ctx.marker.mark()
        if mark is None:
            return None, None, None, None
        for (lookup, feature), grad in zip(ctx.features, grads, strict=True):
            if grad is not None:
                lookup.backward(feature, ctx.backend.array(grad), mark)
        return tracer_gradient(ctx.marker.handle, grads), None, None, None


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
