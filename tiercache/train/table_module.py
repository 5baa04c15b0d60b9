"""TableModule: the common part of modules that look up tables. Created without a cache and bound to one later."""

from __future__ import annotations

import secrets
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tiercache.data.raw_batch import NULL_KEY
from tiercache.errors import DatasetError, StateError
from tiercache.schema import Schema
from tiercache.schema_parts import difference
from tiercache.values.compiled import known_module, number_module
from tiercache.values.named_rows import both_named
from tiercache.values.torch_internals import is_in_transform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.data.dataset import DatasetView
    from tiercache.train.row_optimizer import RowOptimizer
    from tiercache.values.batch import Batch
    from tiercache.values.lookups import GroupRows


class TableModule(nn.Module):
    """A module that looks up tables, without rows.

    Its parameter of one element, the anchor, makes gradients of rows visible to torch (see `anchors`): rows step with
    its optimizer, ``requires_grad_(False)`` freezes them, and outputs have its dtype. It is no part of the state.
    """

    is_restoring = False  # True while a cache restores a commit, whose state belongs to the rows of that commit

    def __init__(self, schema: Schema, features: Sequence[str] | None) -> None:
        super().__init__()
        unchecked: object = schema
        if not isinstance(unchecked, Schema):
            kind = type(self).__name__
            argument = "" if kind.endswith("Collection") else ", feature"
            raise TypeError(
                f"{kind} got {type(unchecked).__name__} as its schema: it takes the schema of the dataset "
                f"instead of torch's num_embeddings and embedding_dim, as in "
                f"tc.{kind}(PassDataset.open(path).schema{argument})"
            )
        specs = {feature.name: feature for feature in schema.features}
        self.features = [*specs] if features is None else [*features]
        for name in self.features:
            if name not in specs:
                raise ValueError(f"the schema has no feature {name!r}: it has {', '.join(specs)}")
            if self.features.count(name) > 1:
                raise ValueError(f"feature {name!r} was given twice: list each feature once")
        self.feature_specs = {name: specs[name] for name in self.features}
        dims = {table.name: table.dim for table in schema.tables}
        self.dims = [dims[spec.table] for spec in self.feature_specs.values()]
        self.tables = [*dict.fromkeys(self.feature_specs[name].table for name in self.features)]  # the tables looked up
        self.table_specs = {table.name: table for table in schema.tables if table.name in self.tables}  # by name
        self.schema = schema  # the schema it was created with: the whole schema, with all tables of its model
        self._checked: Schema | None = None  # of the rows looked up last, with the same features and tables
        self.pooling: dict[str, str | None] = dict.fromkeys(self.features)
        """By feature, the mode in which owners of its rows may pool it for other ranks; None if its rows are needed."""
        self.padding: int | None = None  # the padding key
        self.max_norm: float | None = None  # the largest norm of a row that is looked up; None: any
        self.norm_type = 2.0
        of_one = torch.full((1, 1), _ANCHOR, dtype=torch.float32, device="cpu")
        self.anchor = nn.Parameter(of_one, requires_grad=bool(self.features))
        """The anchor, a matrix, because loops that choose parameters by ``dim() > 1`` mean embeddings too; on the CPU
        also for a module that is created on "meta"."""
        self._rows: Callable[[], Callable[[], dict[str, Any]] | None] = _of_no_cache
        self._plain: Callable[[], Callable[..., Batch] | None] = _of_no_cache
        self._optimizer: Callable[[], RowOptimizer | None] = _of_no_cache
        self._group_of: tuple[weakref.ref[GroupRows], dict[str, int]] | None = None
        """The first group of the rows that were looked up last, and the group of each feature there."""
        self._loaded: dict[str, Any] | None = None
        self.weights: dict[str, torch.Tensor] = {}  # by table, of the module that it replaced: initial rows
        self.bounds: dict[str, int] = {}  # by table, rows of the module that it replaced; larger keys are refused
        self.has_default_optimizer = False  # True if converted without a dataset and without an optimizer for rows
        self.stepped_as: dict[str, Any] | None = None  # of torch's optimizer, if they became those of the rows
        buckets = [self.feature_specs[name].num_buckets for name in self.features]
        self.num_embeddings = buckets[0] if len(buckets) == 1 and buckets[0] is not None else UNBOUNDED
        """The range of keys of the only feature: its hash buckets, or the rows of the module that this replaced."""
        self.number = number_module(self)  # the number by which compiled models find the module
        self.num_resets = 0  # the number of times that `_apply` reset the anchor, which is no write of the loop
        self.was_bound = False  # True once this module, or the one that this is a copy of, was in a cache
        self.copied_from = 0  # the number of the module that this is a copy of; 0: not a copy
        self._original = 0  # the same, if it was copied in this process

    def __getattr__(self, name: str) -> Any:
        if name == "anchor" and (found := self._parameters.get(name)) is not None:  # at each lookup
            return found
        refuse_attribute(self, name)
        return super().__getattr__(name)

    @property
    def _names(self) -> str:
        return ", ".join(map(repr, self.tables))

    def mode_of(self, feature: str) -> str | None:
        """Return the pooling mode of a feature; None: not pooled."""
        return None

    def check(self, name: str, schema: Schema, data: str) -> None:
        """Raise DatasetError unless the features and tables looked up match those of a dataset, from which rows come.

        name: of the module, "" for one that is not registered. data: the dataset's name in errors.
        """
        module = f"{type(self).__name__} {name!r}" if name else f"an unregistered {type(self).__name__}"
        advice = (
            "create the module with the schema of the dataset (PassDataset.open(path).schema), or extract the dataset "
            "again with the edited schema"
        )
        tables, features = ({one.name: one for one in some} for some in (schema.tables, schema.features))
        parts: list[tuple[str, Any, Mapping[str, Any]]] = [
            (f"feature {one.name!r} of table {one.table!r}", one, features) for one in self.feature_specs.values()
        ]
        parts += [(f"table {one.name!r}", one, tables) for one in self.table_specs.values()]
        for what, mine, theirs in parts:
            if mine.name not in theirs:
                raise DatasetError(
                    f"{module} looks up {what}, which {data} does not have (it has {', '.join(theirs)}): {advice}"
                )
            if found := difference(mine, theirs[mine.name]):
                field, ours, other = found
                raise DatasetError(
                    f"{module} has {field} {ours!r} for {what}, but {data} has {field} {other!r}: {advice}"
                )

    def check_initialized(self, name: str) -> None:
        """Raise ValueError if this module was in no cache yet and its anchor was overwritten."""
        anchor = self.anchor
        if self.was_bound or type(anchor) is not nn.Parameter or anchor.is_meta or anchor.numel() != 1:
            return
        if (value := anchor.item()) != _ANCHOR:
            raise ValueError(
                f"the parameter of {name} was overwritten ({value:g} instead of {_ANCHOR:g}), as by a loop over "
                f"all parameters, but this does not initialize rows of {', '.join(self.tables)}: exclude "
                f"{name}.anchor, and set the initializer of the table, or initialize the model before tc.convert"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        found = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.num_resets += 1
        with torch.no_grad():
            self.anchor.data.fill_(_ANCHOR)  # to_empty() leaves garbage; this does not count as a write
        return found

    def groups_of(self, rows: Sequence[GroupRows], features: Sequence[str]) -> tuple[int, ...]:
        """Return the group of each feature's table among ``rows``: the store decides which tables share a layout."""
        if not features:
            return ()
        if self._group_of is None or self._group_of[0]() is not rows[0]:
            group_of = {table: index for index, group in enumerate(rows) for table in group.first}
            by_name = {
                name: group_of[spec.table] for name, spec in self.feature_specs.items() if spec.table in group_of
            }
            self._group_of = weakref.ref(rows[0]), by_name
        return tuple([self._group_of[1][name] for name in features])

    def cast(self, out: torch.Tensor) -> torch.Tensor:
        """Return vectors in the dtype of the module."""
        return out if out.dtype == self.anchor.dtype else out.to(self.anchor.dtype)

    def begin_lookup(self, batch: Batch) -> bool:
        """Load the rows of a batch; return True if this module may train them. Raises DatasetError for other tables."""
        rows = batch.rows
        if rows.schema is not None and rows.schema is not self._checked:
            self.check("", rows.schema, f"the dataset of {rows.name}")
            self._checked = rows.schema
        trains = rows.gradients is not None and torch.is_grad_enabled() and self.anchor.requires_grad
        is_known = not trains or rows.gradients.anchors.check_reader(self)
        rows.look_up(batch.end, trains=trains)
        if trains:
            rows.gradients.anchors.check_written(self)
        return is_known

    def __getstate__(self) -> dict[str, Any]:
        unbound: dict[str, Any] = dict.fromkeys(("_rows", "_plain", "_optimizer"), _of_no_cache)
        return self.__dict__ | unbound | {"_group_of": None, "_parts": {}, "_process": _PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        is_copy = self.__dict__.pop("_process", None) == _PROCESS
        self.copied_from = self.number
        self._original = self.number if is_copy else 0
        self.number = number_module(self)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter as torch does; a module that has the ``weight`` of a table refuses another one."""
        if isinstance(own := getattr(type(self), name, None), property) and own.fset is not None:
            own.fset(self, param)  # raises
        super().register_parameter(name, param)

    def bind(
        self,
        plain: Callable[[], Callable[..., Batch] | None],
        rows: Callable[[], Callable[[], dict[str, Any]] | None] | None,
        optimizer: Callable[[], RowOptimizer | None] | None = None,
    ) -> None:
        """Bind the module to a cache. Raises StateError if the loaded state belongs to other rows.

        plain: makes batches of plain keys. rows: names the store and the commit; None without a store.
        """
        if plain == self._plain:
            return
        self._plain, self._rows, self.was_bound = plain, rows or self._rows, True
        self._optimizer = optimizer or self._optimizer
        self._check_rows()

    def batch_of_keys(self, keys: Any) -> Batch:
        """Return a batch of the only feature's keys, a `KeyInput`. Raises StateError for an unregistered module."""
        plain = self._plain_or_original()
        if plain is None:
            raise StateError(
                f"a module that looks up {', '.join(self.features)} got a tensor of keys but belongs to no "
                "cache: pass its model to the cache (model=..., or register())"
            )
        trains = torch.is_grad_enabled() and self.anchor.requires_grad
        bound = next(iter(self.bounds.values()), None)
        return plain(self.feature_specs[self.features[0]], keys, trains=trains, bound=bound)

    def _named_rows(self) -> dict[str, Any] | None:
        """Return the names of the current rows, and the number of their steps; None without a cache."""
        rows, optimizer = self._rows(), self._optimizer()
        if optimizer is None:
            return None if rows is None else rows()
        steps = optimizer.num_steps(self.tables)
        if rows is None:
            return {"memory": optimizer.identity, "steps": steps or 0}
        return rows() if steps is None else rows() | {"steps": steps}

    def _plain_or_original(self) -> Callable[..., Batch] | None:
        """Return the cache's method that makes batches, or for a copy that is not registered, that of its original."""
        if (found := self._plain()) is not None or not self._original:
            return found
        original = known_module(self._original)
        return None if original is None else original._plain_or_original()

    def _check_rows(self) -> None:
        state, now = self._loaded, self._named_rows()
        if state is None or now is None:
            return
        self._loaded = None
        steps, taken = state.get("steps"), now.get("steps")
        if all(state.get(name) == now.get(name) for name in ("rows", "memory")):
            if steps is None or taken is None or steps == taken:
                return
            raise StateError(
                f"this state belongs to the rows of {self._names} after {steps} steps, but they have taken {taken}: "
                "to return to the best weights, keep a commit of them (cache.commit() and cache.keep(name)) and resume "
                "from it (TierCache(at=name)), or load the state of other modules only"
            )
        if "rows" not in state or "rows" not in now:
            return  # of rows in memory, which end with their cache
        at, own = both_named(state, now)
        raise StateError(
            f"this state belongs to the rows of {at}, but the cache has those of {own}: load the state of its rows, or "
            "roll the store back to that commit if it has it (cache.keep(name) keeps one, and TierCache(at=name) "
            "resumes from it)"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return a state without rows and anchor; its metadata names the store and the commit that it belongs to."""
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        found.pop(f"{prefix}anchor", None)
        rows = self._named_rows()
        if rows is not None and hasattr(found, "_metadata"):
            found._metadata[prefix[:-1]]["rows"] = rows
        return found

    def tables_in(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        """Return the names of the tables of the module that this replaced, in a state of the original model."""
        return [f"{prefix}weight"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self._loaded = None if TableModule.is_restoring else local_metadata.get("rows")
        self._check_rows()
        rows = {} if TableModule.is_restoring else self._named_rows() or {}
        if not local_metadata and (rows.get("commit", 0) > 0 or rows.get("steps", 0) > 0):
            place = f"commit {rows['commit']} or later" if "commit" in rows else f"step {rows['steps']}"
            warnings.warn(
                f"the loaded state does not say which rows of {self._names} it belongs to, "
                f"because it was copied into a plain dict. The rows stay at {place}: "
                "copy a state with copy.deepcopy or torch.save, and roll the store back when you load it",
                stacklevel=2,
            )
        refuse_tables(state_dict, self.tables_in(state_dict, prefix), args[3])
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if (anchor := f"{prefix}anchor") in args[1]:  # not missing: states never have it
            args[1].remove(anchor)


def refuse_tables(state_dict: dict[str, Any], names: Iterable[str], errors: list[str]) -> None:
    """Remove tables of the original model from a state, and add an error for each."""
    errors += [
        f"{name} is a whole table, whose rows are in the store now: load it into the plain model before tc.convert, or "
        "import it into a new store with tc.import_store"
        for name in names
        if state_dict.pop(name, None) is not None
    ]


def refuse_transform(tables: Iterable[str]) -> None:
    """Raise StateError inside a transform of torch.func."""
    if is_in_transform() is not None:
        raise StateError(
            f"keys of {', '.join(map(repr, tables))} were looked up inside a transform of torch.func, such as vmap or "
            "grad, but a lookup is no function of parameters: call the model outside of it, with backward(), or look "
            "up keys before it and pass it the vectors"
        )


def refuse_trace(tables: Iterable[str]) -> None:
    """Raise StateError inside torch.jit.trace and torch.export, which would keep the vectors of their example."""
    if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined, no-untyped-call]
        raise StateError(
            f"keys of {', '.join(map(repr, tables))} were looked up while the model was traced or exported, but traces "
            'do not read rows of the cache: trace tc.to_torch(model, store, unseen="zeros") instead'
        )


def refuse_reserved(keys: NDArray[np.int64], where: str, error: type[Exception] = ValueError) -> None:
    """Raise ``error`` for the key of a shared row. where: has the keys, in messages."""
    if keys.size and int(keys.min()) <= NULL_KEY:
        at = int(keys.argmin())
        raise error(
            f"{where} has the key {int(keys[at])} at entry {at} of the batch: INT64_MIN and INT64_MIN + 1 are the keys "
            "of the out-of-vocabulary row and the null row, so use another key for such values"
        )


def check_within(keys: NDArray[np.int64], bound: int | None, table: str) -> None:
    """Raise IndexError if a key is outside [0, bound), as torch's embeddings do; None: any key is inside."""
    if bound is None or not keys.size or int(keys.view(np.uint64).max()) < bound:  # negative keys are the largest
        return
    beyond = keys[((keys < 0) & (keys > NULL_KEY)) | (keys >= bound)]
    if beyond.size:
        first = int(beyond[0])
        wrapped = "" if not -(1 << 31) <= first < 0 else "; ids from 2**31 on become negative as int32"
        raise IndexError(
            f"index out of range: {beyond.size:,} of {keys.size:,} keys of table {table!r} are outside [0, {bound:,}), "
            f"such as {first}, but the converted module had {bound:,} rows: check the ids, or open the table in the "
            f"schema (open = true) to allow any int64 as a key{wrapped}"
        )


_PROCESS = secrets.token_hex(8)  # differs between processes but not forks: module numbers are of one process
_ANCHOR = 2.0**-10  # the value of anchors, exact in every dtype: a penalty on it has a gradient, see `anchors`
UNBOUNDED = (1 << 63) - 1  # the key range of a table that accepts any int64
_INSTEAD = {
    "weight": "it looks up several tables, whose rows are in the store and on the device: read them with Store.lookup",
    "embedding_dim": "the columns of each feature are in .dims",
    "padding_idx": "tc.Embedding and tc.EmbeddingBag have one",
    "max_norm": "tc.Embedding and tc.EmbeddingBag have one",
    "norm_type": "tc.Embedding and tc.EmbeddingBag have one",
    "scale_grad_by_freq": "pass weights for ids instead",
    "sparse": "no gradient of a whole table ever exists",
    "include_last_offset": "a batch has its own offsets",
    "reset_parameters": "rows are initialized by the initializer of their table",
}
"""By name, attributes of torch's embeddings that ours do not have, and what to use instead."""


def refuse_attribute(module: nn.Module, name: str) -> None:
    """Raise AttributeError, with advice, for an attribute that only torch's embeddings have."""
    if name in _INSTEAD:
        raise AttributeError(f"{type(module).__name__} has no {name}, unlike torch's embeddings: {_INSTEAD[name]}")


def _of_no_cache() -> None:
    """Placeholder for a module not yet bound to a cache."""


def table_modules(objects: Iterable[object]) -> list[TableModule]:
    """Return the modules that look up tables, among all modules of ``objects``."""
    return [part for one in objects for _, part in named_table_modules(one)]


def named_table_modules(one: object) -> list[tuple[str, TableModule]]:
    """Return the modules in ``one``, which may be any object, that look up tables, with their names in it."""
    if not isinstance(one, nn.Module):
        return []
    return [(name, part) for name, part in one.named_modules() if isinstance(part, TableModule)]


def check_modules(objects: Mapping[str, object], passes: DatasetView) -> None:
    """Raise DatasetError for a module made with other tables, ValueError for one whose anchor was initialized."""
    for name, one in objects.items():
        for path, module in named_table_modules(one):
            full = f"{name}.{path}" if path else name
            module.check(full, passes.schema, f"the dataset {passes.path}")
            module.check_initialized(full)


def anchor_ids(objects: Iterable[object]) -> set[int]:
    """Return the ids of the anchors of all modules among ``objects``."""
    return {id(module.anchor) for module in table_modules(objects)}


def poolings(modules: Iterable[nn.Module], features: Iterable[str]) -> dict[str, str | None]:
    """Return the modes of features that ``modules`` look up, or of all; None: several modes, or rows are needed."""
    modes: dict[str, set[str | None]] = {}
    for part in table_modules(modules):
        for name, mode in part.pooling.items():
            modes.setdefault(name, set()).add(mode)
    if not modes:
        return dict.fromkeys(features)
    return {name: next(iter(modes[name])) if len(modes[name]) == 1 else None for name in features if name in modes}
