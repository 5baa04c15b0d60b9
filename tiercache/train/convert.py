"""tc.convert: the embeddings of an existing model become modules whose rows a cache trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from tiercache.data.dataset import PassDataset
from tiercache.schema import Feature, Schema
from tiercache.store.initializer import Normal, Uniform
from tiercache.store.table import Table
from tiercache.train.embedding import Embedding, EmbeddingBag
from tiercache.train.parameter_table import (
    ParameterTable,
    check_parameters,
    refuse_parameters,
    table_parameters,
    warn_of_tables,
)
from tiercache.train.plain_keys import refuse_weight, table_weight
from tiercache.train.replaceable import (
    check_padding,
    check_replaceable,
    overlap,
    place_of,
    warn_of_references,
    weight_of,
)
from tiercache.train.table_module import (
    TableModule,
    named_table_modules,
    refuse_attribute,
    refuse_tables,
    table_modules,
)
from tiercache.train.torch_optimizers import (
    as_list,
    as_row_optimizer,
    check_owned_once,
    check_unused,
    replace_parameters,
    step_alike,
)
from tiercache.train.torchrec_modules import converted_collection, feature_names, is_collection, tables_of
from tiercache.values.batch import Batch, JaggedIds

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from tiercache.store.initializer import Initializer
    from tiercache.store.optimizer import Optimizer
    from tiercache.train.torch_optimizers import OptimizerOfRows

_Lookup = TypeVar("_Lookup", bound=TableModule)
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_ITSELF = "embedding"  # the name of a model that is an embedding itself
_AFFIXES = {"emb", "embed", "embedding", "embeddings", "bag", "table", "lookup"}


def convert(
    model: nn.Module,
    data: PassDataset | Schema | str | os.PathLike[str] | None = None,
    features: Mapping[str, str | Sequence[str]] | None = None,
    *,
    optimizer: OptimizerOfRows | None = None,
    initializer: Initializer | None = None,
    parameters: Sequence[str] = (),
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """Replace the `nn.Embedding`s and `nn.EmbeddingBag`s of ``model`` by modules whose rows a cache trains; returns it.

    The new modules have the same inputs and outputs as the old ones, so ``forward`` does not change. They also take a
    batch, or a feature of one (``batch.features["user"]``). The trained weights become rows of the store: row i is that
    of key i. A cache with the model takes them when it creates the store; a store that has commits keeps its own rows.
    They are not copied before that, and the model has none afterwards. A module on "meta" has no weights: its rows
    start as the schema says.

    Without ``data`` each module gets a table and a feature named after it: `record_key_sets` then gets the key sets
    from your loader. With it a module looks up the feature that has its name: ``user`` and ``user_emb`` look up "user".
    And torchrec's `EmbeddingBagCollection`s and `EmbeddingCollection`s are replaced, which then take a batch where they
    took a `KeyedJaggedTensor`, look up the features that they name, and return torchrec's types.

    Keys outside the old module's range (``num_embeddings``) are refused, as in torch, unless the table is open in the
    schema. Modules that would compute something else are also refused; references to a weight from outside the model,
    such as a saved dict, only warn.

    Args:
        model: the model. It is changed in place; if it is itself an embedding, use the returned module.
        data: the dataset, its path, or its schema; None if there is none yet.
        features: by name of a module (as in ``named_modules``) the feature that it looks up, or several for a module
            that the model uses for several features; by name of an `nn.ModuleList` a feature for each of its modules;
            by name of a collection its features, in its order.
        optimizer: the row optimizer. One of `tc.optim`, or a mapping from names of modules to them; or an optimizer of
            torch, or several, that may have the model's parameters already: rows then step as it steps, and modules
            replace their weights in it. None: Adagrad. With ``data`` the schema has the row optimizers, and only
            optimizers of torch are accepted.
        initializer: the initial rows of modules on "meta", such as ``tc.init.Checkpoint(...)``; None: normally
            distributed, as in `nn.Embedding`. With ``data`` the schema has the initializers.
        parameters: names of `nn.Parameter`s (rows, dim) that the model uses as tables, by `F.embedding`,
            `torch.index_select` or indexing. A `ParameterTable` that supports these uses replaces each.
        filter_fn: ``filter_fn(module, name)`` returns True for modules to replace; default: all.

    Raises:
        ValueError: the model has nothing to replace; no feature has the name of a module, or the feature's table has
            another dimension; a module has ``scale_grad_by_freq``, or ``padding_idx`` and pools by max; a module has
            its own forward, parameters, attributes, hooks, a parametrization, or a padding row that is not zeros, in
            its weight or in the checkpoint of a module on "meta"; its weight is used elsewhere in the model, by a
            module of another table, or by one with another ``padding_idx`` or ``max_norm``; two modules of one table
            have different weights; a collection has ``need_indices``, or
            weights of ids where the schema has none, or has none where the schema has some; no row optimizer does the
            same as torch's, torch's has already trained a weight, or two of them have it. The model is unchanged then.
            ``sparse`` is ignored: no gradient of a whole table exists.
    """
    listed = table_parameters(model, parameters)
    modules = _names_of(model, filter_fn, required=not listed)
    names: dict[Any, list[str]] = modules | listed
    if data is None:
        if features is not None:
            raise ValueError("features= maps modules to features of a dataset: pass the dataset, or omit features=")
        schema, chosen = _derive_schema(names, optimizer, initializer)
    else:
        schema = data if isinstance(data, Schema) else PassDataset.of(data).schema
        chosen = _features_of(model, names, schema, features or {})
        if optimizer is not None and not as_list(optimizer):
            raise ValueError("optimizer= is given along with data, whose schema has the row optimizers: omit it")
        if initializer is not None:
            raise ValueError("initializer= is given along with data, whose schema has the initializers: omit it")
    check_replaceable(model, {old: places for old, places in names.items() if not is_collection(old)})
    check_unused(as_list(optimizer), _weights(names))
    check_owned_once(as_list(optimizer), _weights(names))
    replacer = _Replacer(schema)
    made = {id(old): replacer.of(old, names[old][0], chosen[old]) for old in names}
    warn_of_references(model, _weights(names), as_list(optimizer))
    anchors: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}
    for old in names:
        if not is_collection(old):
            weight = weight_of(old)
            for module in table_modules([made[id(old)]]):
                _, module.anchor = anchors.setdefault(id(weight), (weight, module.anchor))
                if data is None:
                    is_default = optimizer is None or (
                        isinstance(optimizer, Mapping) and module.tables[0] not in optimizer
                    )
                    step_alike(module, weight, as_list(optimizer), is_default=is_default)
    replace_parameters(as_list(optimizer), anchors)
    for old, places in names.items():
        for place in places:
            if not place:
                return made[id(old)]
            parent, _, child = place.rpartition(".")
            within = model.get_submodule(parent)
            if isinstance(old, nn.Parameter):
                delattr(within, child)
                within.register_load_state_dict_pre_hook(refuse_parameters)  # type: ignore[no-untyped-call]
            setattr(within, child, made[id(old)])
    warn_of_tables(model)
    return model


class SharedLookup(nn.Module):
    """Looks up several features in one table, one feature of a batch at a time."""

    def __init__(self, lookups: Mapping[str, EmbeddingBag | Embedding]) -> None:
        super().__init__()
        self.lookups = nn.ModuleDict(dict(lookups))
        self.plain: nn.Module | None = None
        """The lookup of raw keys of any feature, in a model for serving."""

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            return table_weight(next(iter(self.lookups.values())))  # type: ignore[arg-type]
        if name in ("embedding_dim", "num_embeddings", "padding_idx"):
            return getattr(next(iter(self.lookups.values())), name)
        refuse_attribute(self, name)
        return super().__getattr__(name)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        refuse_tables(state_dict, [f"{prefix}weight"], args[4])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter as torch does. Raises AttributeError for a new weight."""
        refuse_weight(name, next(iter(self.lookups.values())).tables[0])  # type: ignore[index,arg-type]
        super().register_parameter(name, param)

    def forward(self, input: Any, *others: Any, **options: Any) -> torch.Tensor:  # noqa: A002 - torch's name
        """Look up one feature of a batch. Raises TypeError and ValueError for anything else."""
        names, lookup = ", ".join(self.lookups), self.plain
        if lookup is None and isinstance(input, torch.Tensor):  # keys, which mean the same rows for each feature
            lookup = next(iter(self.lookups.values()))
        if lookup is not None:
            return lookup(input, *others, **options)  # type: ignore[no-any-return]
        if not isinstance(input, JaggedIds):
            what = "a batch, which has several of them" if isinstance(input, Batch) else f"a {type(input).__name__}"
            raise TypeError(f"a module that looks up {names} was given {what}: pass it batch.features[name]")
        if input.feature not in self.lookups:
            raise ValueError(f"this module looks up {names} but was given {input.feature!r}: pass one of those")
        return self.lookups[input.feature](input, *others, **options)  # type: ignore[no-any-return]


def _names_of(
    model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None, *, required: bool
) -> dict[Any, list[str]]:
    found: dict[Any, list[str]] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules(remove_duplicate=False):
        if name.startswith(inside):
            continue  # the plain modules that a collection consists of
        if is_collection(module):
            inside += (f"{name}." if name else "",)
        elif not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if filter_fn is None or filter_fn(module, name):
            found.setdefault(module, []).append(name)
    if not found and required:
        check_parameters(model)
        converted = [name or type(one).__name__ for name, one in named_table_modules(model)]
        if converted and filter_fn is None:
            raise ValueError(
                f"the model has nothing to convert, because its embeddings are tiercache's already "
                f"({', '.join(converted)}): remove this call of tc.convert"
            )
        raise ValueError("the model has no nn.Embedding and no nn.EmbeddingBag to convert: check filter_fn too")
    return found


def _derive_schema(
    places: Mapping[Any, Sequence[str]], optimizer: OptimizerOfRows | None, initializer: Initializer | None
) -> tuple[Schema, dict[Any, list[str]]]:
    """Return a schema for modules and parameters, by their names in the model, and the feature of each.

    A feature and its table have the name of its module; modules with one weight share a table. Raises ValueError for an
    unsupported dtype, a collection of torchrec, or an optimizer that rows do not have.
    """
    chosen = optimizer if isinstance(optimizer, Mapping) else {}
    first: dict[int, Table] = {}  # by the id of a weight
    features, found = list[Feature](), dict[Any, list[str]]()
    names = {(listed[0] or _ITSELF): one for one, listed in places.items()}
    if unknown := [name for name in chosen if name not in names]:
        raise ValueError(f"optimizer= names {unknown[0]!r}, but tc.convert replaces {', '.join(names)}")
    for name, one in names.items():
        if is_collection(one):
            raise ValueError(
                f"{name} is a {type(one).__name__}, which looks up features of a dataset: pass its schema, as in "
                "tc.convert(model, PassDataset.open(path))"
            )
        weight = weight_of(one)
        if id(weight) not in first:
            of_table = as_row_optimizer(chosen.get(name) if isinstance(optimizer, Mapping) else optimizer, name, weight)
            first[id(weight)] = _table(name, weight, of_table, initializer)
        features.append(Feature(name=name, table=first[id(weight)].name, hotness="ragged"))
        found[one] = [name]
    return Schema(features=tuple(features), tables=tuple(first.values())), found


def _table(name: str, weight: torch.Tensor, optimizer: Optimizer | None, initializer: Initializer | None) -> Table:
    if weight.dtype not in _DTYPES:
        raise ValueError(
            f"the weight of {name} is {weight.dtype}, but vectors of rows are {', '.join(_DTYPES.values())}: convert "
            "the model to one of these first, as in model.float()"
        )
    if initializer is not None and not weight.is_meta:
        raise ValueError(
            f'initializer= is given, but {name} has weights, from which its rows start: build the model on "meta", or '
            'choose modules on "meta" by filter_fn'
        )
    start: Any = initializer or (Normal() if weight.is_meta else Uniform())
    table = Table(name=name, dim=weight.shape[1], initializer=start, dtype=_DTYPES[weight.dtype])
    return table if optimizer is None else replace(table, optimizer=optimizer)


def _weights(names: Mapping[Any, list[str]]) -> Iterator[tuple[torch.Tensor, str]]:
    for old, places in names.items():
        if not is_collection(old):
            yield weight_of(old), places[0]


def _features_of(
    model: nn.Module, names: Mapping[Any, list[str]], schema: Schema, features: Mapping[str, str | Sequence[str]]
) -> dict[Any, list[str]]:
    known, listed_by = [feature.name for feature in schema.features], dict[str, list[str]]()
    for name, value in features.items():
        listed = [value] if isinstance(value, str) else [*value]
        if any(name in places for places in names.values()):
            listed_by[name] = listed
            continue
        try:
            inside = model.get_submodule(name)
        except AttributeError:
            raise ValueError(f"features= names the module {name!r}, which the model does not have") from None
        if isinstance(inside, nn.ModuleList):
            if len(listed) != len(inside):
                raise ValueError(f"{name} has {len(inside)} modules, but features= lists {len(listed)} features for it")
            listed_by |= {f"{name}.{i}" if name else str(i): [one] for i, one in enumerate(listed)}
        else:
            listed_by[name] = listed
    found = {}
    for module, places in names.items():
        chosen = [one for place in places for one in listed_by.get(place, [])]
        if not chosen:
            chosen = feature_names(module) if is_collection(module) else _by_name(places, known)
        if not chosen:
            raise ValueError(
                f"no feature matches the module {places[0]!r}: pass features={{{places[0]!r}: NAME}}, where the "
                f"features are {', '.join(known)}, or leave it out by filter_fn"
            )
        if unknown := [one for one in chosen if one not in known]:
            raise ValueError(f"the schema has no feature {unknown[0]!r}, which {places[0]!r} is to look up")
        found[module] = [*dict.fromkeys(chosen)]
    return found


def _by_name(places: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the features that modules are named for, with or without an affix such as "emb"."""
    found = []
    for place in places:
        last = place.rpartition(".")[2]
        first_word, _, without_first = last.partition("_")
        without_last, _, last_word = last.rpartition("_")
        names = [place, last]
        names += [without_first] if first_word in _AFFIXES else []
        names += [without_last] if last_word in _AFFIXES else []
        found += [name for name in names if name in known][:1]
    return found


class _Replacer:
    """Creates replacements of modules, and keeps the weights of these by table."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._tables = {feature.name: feature.table for feature in schema.features}
        self._weights: dict[str, torch.Tensor] = {}
        self._tables_of: dict[Any, list[tuple[torch.Tensor, str]]] = {}  # by address of a storage, what is in it

    def of(self, old: Any, name: str, features: Sequence[str]) -> nn.Module:
        """Return the replacement of a module."""
        if is_collection(old):
            return self._collection(old, name, features)
        kept = self._weight(weight_of(old), name, features)
        if isinstance(old, nn.Parameter):
            if len(features) > 1:
                raise ValueError(f"the parameter {name} looks up {', '.join(features)}: choose one feature for it")
            table = ParameterTable(self._schema, features[0])
            return self._prepared(table, old, kept, is_training=True)
        if old.scale_grad_by_freq:
            raise ValueError(f"{name} has scale_grad_by_freq=True: create it without, and pass weights for ids instead")
        lookups: dict[str, EmbeddingBag | Embedding] = {}
        if isinstance(old, nn.Embedding):
            check_padding(old, name, self._table(features[0]))
        for feature in features:
            made: EmbeddingBag | Embedding
            if isinstance(old, nn.EmbeddingBag):
                made = EmbeddingBag(
                    self._schema, feature, mode=old.mode, padding_idx=old.padding_idx,
                    include_last_offset=old.include_last_offset, max_norm=old.max_norm, norm_type=old.norm_type,
                )  # fmt: skip
            else:
                made = Embedding(
                    self._schema, feature, padding_idx=old.padding_idx, max_norm=old.max_norm, norm_type=old.norm_type
                )
            lookups[feature] = self._prepared(made, old.weight, kept, is_training=old.training)
        return next(iter(lookups.values())) if len(lookups) == 1 else SharedLookup(lookups)

    def _table(self, feature: str) -> Table:
        return next(one for one in self._schema.tables if one.name == self._tables[feature])

    def _prepared(
        self, made: _Lookup, weight: torch.Tensor, kept: dict[str, torch.Tensor], *, is_training: bool
    ) -> _Lookup:
        made.weights, made.num_embeddings = kept, weight.shape[0]
        made.bounds = {name: weight.shape[0] for name in made.tables if name not in self._schema.open_tables}
        made.requires_grad_(weight.requires_grad)
        made.to(dtype=weight.dtype, device=None if weight.is_meta else weight.device)
        return made.train(is_training)

    def _collection(self, old: Any, name: str, features: Sequence[str]) -> nn.Module:
        if len(features) != len(feature_names(old)):
            raise ValueError(
                f"{name} looks up {', '.join(feature_names(old))}, but {len(features)} features of the schema replace "
                "them: a feature has one table, so list the same number in features=, all distinct"
            )
        trained = {plain.weight.requires_grad for _, plain in tables_of(old)}
        if len(trained) > 1:
            raise ValueError(f"{name} has frozen and trained tables: split it into two collections")
        made, rest = converted_collection(old, name, features, self._schema), iter(features)
        for config, plain in tables_of(old):
            of_table = [next(rest) for _ in config.feature_names]
            made.weights |= self._weight(plain.weight, f"{name}.{config.name}", of_table)
            table = self._tables[of_table[0]]
            made.bounds |= {} if table in self._schema.open_tables else {table: plain.num_embeddings}
        made.requires_grad_(trained.pop())
        return made.train(old.training)

    def _weight(self, weight: torch.Tensor, name: str, features: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the weight of a table, which all its modules share; none if all are on "meta"."""
        table = self._tables[features[0]]
        if others := [one for one in features if self._tables[one] != table]:
            raise ValueError(
                f"{name} looks up {features[0]!r} and {others[0]!r}, which are of tables {table!r} and "
                f"{self._tables[others[0]]!r}: use one table for both features"
            )
        dim = self._table(features[0]).dim
        if weight.shape[1] != dim:
            raise ValueError(f"{name} has {weight.shape[1]} columns, but table {table!r} has {dim}: make them the same")
        kept = None if weight.is_meta else weight.detach()
        if kept is not None:
            same = self._tables_of.setdefault(place_of(kept), [])
            same.append((kept, table))
            if other := next((one for weight, one in same if one != table and overlap(weight, kept)), None):
                raise ValueError(
                    f"{name} shares its weight with a module of table {other!r} but looks up table {table!r}: use "
                    "one table for their features, because their weights would diverge in training"
                )
            before = self._weights.setdefault(table, kept)
            if before.data_ptr() != kept.data_ptr() and not torch.equal(before, kept):
                raise ValueError(
                    f"{name} and an earlier module are of table {table!r} but have different weights: use separate "
                    "tables for their features, or one module for all"
                )
        return {table: self._weights[table]} if table in self._weights else {}
