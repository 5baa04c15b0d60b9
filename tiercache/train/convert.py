"""Existing models: their embeddings become modules whose rows a cache trains, and plain modules again for serving."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tiercache.data.dataset import PassDataset
from tiercache.data.raw_batch import NULL_KEY, OOV_KEY
from tiercache.errors import StateError
from tiercache.schema import Schema
from tiercache.store.bits import hash_keys, keys_of
from tiercache.train.embedding import Embedding, EmbeddingBag
from tiercache.train.missing_rows import check_unseen, unseen_vectors
from tiercache.train.plain_keys import table_weight
from tiercache.train.replaceable import check_replaceable
from tiercache.train.table_module import TableModule, refuse_attribute, table_modules
from tiercache.train.torchrec_modules import (
    ConvertedBags,
    ConvertedRows,
    KeyedCollection,
    converted_collection,
    feature_names,
    is_collection,
    tables_of,
)
from tiercache.values.batch import Batch, JaggedIds

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.store import Store, Table
    from tiercache.store.scan import Chunk
    from tiercache.values.lookups import Unseen

_CHUNK_BYTES = 16 << 20
_AFFIXES = {"emb", "embed", "embedding", "embeddings", "bag", "table", "lookup"}


def convert(
    model: nn.Module,
    data: PassDataset | Schema | str | os.PathLike[str],
    features: Mapping[str, str | Sequence[str]] | None = None,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """Replace the `nn.Embedding`s and `nn.EmbeddingBag`s of ``model`` by modules that look up ``data``; returns it.

    And torchrec's `EmbeddingBagCollection`s and `EmbeddingCollection`s, which then take a batch where they took a
    `KeyedJaggedTensor`, look up the features that they name, and return torchrec's types.

    A module looks up the feature that has its name: ``user`` and ``user_emb`` look up "user". The new modules take a
    batch, or a feature of one (``batch.features["user"]``), where the old ones took ids and offsets, and return what
    they returned. The trained weights become rows of the store: row i that of key i. A cache that is given the model
    takes them when it makes the store; a store that has commits keeps its own rows. They are not copied before, and the
    model has none after. A module on "meta" has no weights: rows begin as the schema says.

    Args:
        model: the model. It is changed in place; if it is itself an embedding, use what is returned.
        data: the dataset, its path, or its schema.
        features: by name of a module (as in ``named_modules``) the feature that it looks up, or several for a module
            that the model uses for several features; by name of an `nn.ModuleList` a feature for each of its modules;
            by name of a collection its features, in its order.
        filter_fn: ``filter_fn(module, name)`` says whether a module is replaced; default: all are.

    Raises:
        ValueError: no feature has the name of a module, or the feature's table has another dimension; a module has
            ``max_norm`` or ``scale_grad_by_freq``, or ``padding_idx`` and pools by max; a module has its own forward,
            hooks, a parametrization, or a padding row that is not zeros; its weight is used elsewhere in the model, or
            by a module of another table; two modules of one table have different weights; a collection has
            ``need_indices``, or weights of ids where the schema has none, or has none where the schema has some. The
            model is unchanged then. ``sparse`` is ignored: no gradient of a whole table exists.
    """
    schema = data if isinstance(data, Schema) else PassDataset.of(data).schema
    names = _names_of(model, filter_fn)
    chosen = _features_of(model, names, schema, features or {})
    check_replaceable(model, {old: places for old, places in names.items() if not is_collection(old)})
    replacer = _Replacer(schema)
    made = {id(old): replacer.of(old, names[old][0], chosen[old]) for old in names}
    for old, places in names.items():
        for place in places:
            if not place:
                return made[id(old)]
            parent, _, child = place.rpartition(".")
            setattr(model.get_submodule(parent), child, made[id(old)])
    return model


def weights_of(objects: Iterable[object]) -> dict[str, torch.Tensor]:
    """Return by table the weights (rows, dim) that converted modules among ``objects`` had."""
    return {table: weight for one in table_modules(objects) for table, weight in one.weights.items()}


def warn_of_keys_beyond(weights: Mapping[str, torch.Tensor], passes: PassDataset) -> None:
    """Warn of keys of the dataset that a converted module had no row for, which torch would refuse."""
    for name, weight in weights.items():
        rows = weight.shape[0]
        for one in passes.passes:
            keys = one.keys(name)
            beyond = keys[(keys >= rows) | ((keys < 0) & (keys > NULL_KEY))]
            if beyond.size:
                warnings.warn(
                    f"the converted module of table {name!r} has {rows:,} rows (num_embeddings), and sub-dataset "
                    f"{one.index} of {passes.path} has {beyond.size:,} other keys, such as {int(beyond[0])}: rows of "
                    "these begin as the table's initializer says, and torch would raise IndexError; check the ids, or "
                    "convert a model with more rows",
                    stacklevel=3,
                )
                break


def drop_weights(objects: Iterable[object]) -> None:
    """Free the weights of converted modules."""
    for one in table_modules(objects):
        one.weights = {}


def refuse_weights(objects: Iterable[object]) -> None:
    """Raise StateError if a converted model still has its weights, because they would become no rows."""
    if weights_of(objects):
        raise StateError(
            "a converted model brings rows for the store that is made: give it to TierCache(model=...), and not to "
            "register()"
        )


def weight_rows(table: Table, weights: Mapping[str, torch.Tensor]) -> Iterator[Chunk]:
    """Yield keys (n,) and all fields (n, width) of a table's weights in hash order, a few MiB at a time."""
    weight = weights.get(table.name)
    if weight is None:
        return
    keys = keys_of(np.sort(hash_keys(np.arange(weight.shape[0], dtype=np.int64), table.table_id)), table.table_id)
    step = max(1, _CHUNK_BYTES // table.row_bytes)
    for low in range(0, keys.size, step):
        chunk = keys[low : low + step]
        vectors = weight[torch.from_numpy(chunk).to(weight.device)].detach().to("cpu", torch.float32).numpy()
        states = (np.full((chunk.size, field.width), field.initial, np.float32) for field in table.fields[1:])
        yield chunk, (vectors, *states)


def to_torch(
    model: nn.Module,
    store: Store,
    *,
    keys: Mapping[str, NDArray[np.int64] | torch.Tensor] | None = None,
    unseen: Unseen = "initial",
) -> nn.Module:
    """Return a copy of ``model`` whose embeddings are plain modules of torch with the rows of a store.

    What was a collection of torchrec takes a `KeyedJaggedTensor` of raw keys.
    They take raw keys, int64 of any shape, and map them to rows by a sorted list of keys, a buffer beside the weight:
    an `EmbeddingBag` (N, L), or (keys,) with offsets. Padding is zeros and counts in no mean, as it was trained.
    Modules of one table share it. ``keys``: by table those whose rows are taken, where not all are; a table is in
    memory whole.

    A key without a row has its table's out-of-vocabulary row if there is one; else ``unseen`` says, as in
    ``TierCache.evaluate_batch``: "initial" its initial row, "zeros" zeros, "error" KeyMissingError. The vector
    counts in a mean. Only "zeros" can be traced and exported, as it alone does not look at the keys.

    Raises ValueError for a model with an `EmbeddingBagCollection` or `EmbeddingCollection`, which look whole batches
    up, or without any embedding; KeyMissingError for keys that have no row, and what ``Store.scan`` raises.
    """
    check_unseen(unseen)
    made, tables = copy.deepcopy(model), dict[str, _KeyedRows]()
    places = [(name, one) for name, one in made.named_modules(remove_duplicate=False) if isinstance(one, TableModule)]
    if not places:
        raise ValueError("the model has no embedding of tiercache's: there is nothing to bring back")
    plain: dict[int, nn.Module] = {}
    for name, one in places:
        if not isinstance(one, EmbeddingBag | Embedding | ConvertedBags | ConvertedRows):
            raise ValueError(  # noqa: TRY004 - the model is what it should not have
                f"{name or 'the model'} is an {type(one).__name__}, which looks whole batches up: give a model whose "
                "modules look up one feature each"
            )
        for table in one.tables:
            if table not in tables:
                tables[table] = _KeyedRows.of(store, table, (keys or {}).get(table), unseen)
        lookups = [
            KeyedEmbedding(
                tables[one.feature_specs[feature].table], one.mode_of(feature), one.padding,
                has_last=getattr(one, "include_last_offset", False),
            )
            for feature in one.features
        ]  # fmt: skip
        collection = one if isinstance(one, ConvertedBags | ConvertedRows) else None
        plain.setdefault(id(one), KeyedCollection(lookups, collection) if collection is not None else lookups[0])
    for name, one in places:
        parent, _, child = name.rpartition(".")
        if not name:
            return plain[id(one)]
        setattr(made.get_submodule(parent), child, plain[id(one)])
    for shared in [one for one in made.modules() if isinstance(one, SharedLookup)]:
        shared.plain = next(iter(shared.lookups.values()))
    return made


class SharedLookup(nn.Module):
    """Looks up several features in one table, one feature of a batch at a time."""

    def __init__(self, lookups: Mapping[str, EmbeddingBag | Embedding]) -> None:
        super().__init__()
        self.lookups = nn.ModuleDict(dict(lookups))
        self.plain: nn.Module | None = None
        """The lookup of raw keys of any feature, in a model for serving."""

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            return table_weight(*self.lookups.values())  # type: ignore[arg-type]
        if name in ("embedding_dim", "num_embeddings", "padding_idx"):
            return getattr(next(iter(self.lookups.values())), name)
        refuse_attribute(self, name)
        return super().__getattr__(name)

    def forward(self, input: Any, *others: Any, **options: Any) -> torch.Tensor:  # noqa: A002 - torch's name
        """Look up one feature of a batch. Raises TypeError and ValueError for anything else."""
        names, lookup = ", ".join(self.lookups), self.plain
        if lookup is None and isinstance(input, torch.Tensor):  # keys, which mean the same rows for each feature
            lookup = next(iter(self.lookups.values()))
        if lookup is not None:
            return lookup(input, *others, **options)  # type: ignore[no-any-return]
        if not isinstance(input, JaggedIds):
            what = "a batch, which has several of them" if isinstance(input, Batch) else f"a {type(input).__name__}"
            raise TypeError(f"a module that looks up {names} was given {what}: give it batch.features[name]")
        if input.feature not in self.lookups:
            raise ValueError(f"this module looks up {names} and was given {input.feature!r}: give one of those")
        return self.lookups[input.feature](input, *others, **options)  # type: ignore[no-any-return]


class KeyedEmbedding(nn.Module):
    """Rows of a table by raw keys, pooled or not."""

    def __init__(self, rows: _KeyedRows, pooling: str | None, padding: int | None, *, has_last: bool = False) -> None:
        """has_last: whether offsets end with the number of keys."""
        super().__init__()
        self.rows, self.pooling, self.padding, self.has_last = rows, pooling, padding, has_last

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's name
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look raw keys up as `nn.EmbeddingBag` and `nn.Embedding` look up theirs."""
        rows, weight = self.rows.find(input, self.padding)
        none = None if self.padding is None else weight.shape[0] - 1
        if self.pooling is None:
            return functional.embedding(rows, weight, none)
        return functional.embedding_bag(
            rows if offsets is not None or rows.ndim > 1 else rows[:, None], weight, offsets, mode=self.pooling,
            per_sample_weights=per_sample_weights, padding_idx=none,
            include_last_offset=self.has_last and offsets is not None,
        )  # fmt: skip


class _KeyedRows(nn.Module):
    """The rows of a table and their keys, and two rows of zeros, for unseen keys and padding."""

    keys: torch.Tensor
    order: torch.Tensor

    def __init__(self, table: Table, keys: NDArray[np.int64], vectors: NDArray[np.float32], unseen: Unseen) -> None:
        super().__init__()
        self._table, self._unseen = table, unseen
        self.weight = nn.Parameter(torch.from_numpy(np.concatenate([vectors, np.zeros((2, table.dim), np.float32)])))
        order = np.argsort(keys)
        self.register_buffer("keys", torch.from_numpy(keys[order]))
        self.register_buffer("order", torch.from_numpy(order))
        shared = np.flatnonzero(keys == OOV_KEY)
        self._has_shared = bool(shared.size)
        self._default = int(shared[0]) if shared.size else keys.size
        """The row of all other keys."""

    @classmethod
    def of(cls, store: Store, name: str, keys: Any, unseen: Unseen) -> _KeyedRows:
        """Read all rows, or those of keys."""
        table = next(one for one in store.tables if one.name == name)
        if keys is not None:
            unique = np.unique(np.asarray(keys, dtype=np.int64))
            return cls(table, unique, store.lookup(name, unique)["vector"], unseen)
        chunks = [(stored, fields[0]) for stored, fields in store.scan(name)]
        chunks.append((np.empty(0, np.int64), np.empty((0, table.dim), np.float32)))
        all_keys, vectors = (np.concatenate(column) for column in zip(*chunks, strict=True))
        return cls(table, all_keys, vectors, unseen)

    def find(self, keys: torch.Tensor, padding: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a row for each key, and the rows, of which padding has the last one."""
        found = torch.zeros_like(keys, dtype=torch.bool)
        rows = torch.full_like(keys, self._default)
        if self.keys.numel():
            at = torch.searchsorted(self.keys, keys).clamp_(max=self.keys.numel() - 1)
            found = self.keys[at] == keys
            rows = torch.where(found, self.order[at], rows)
        if padding is not None:
            is_padding = keys == padding
            found, rows = found | is_padding, rows.masked_fill(is_padding, self.weight.shape[0] - 1)
        if self._has_shared or self._unseen == "zeros":
            return rows, self.weight
        if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined, no-untyped-call]
            raise RuntimeError(
                f"unseen={self._unseen!r} of table {self._table.name!r} looks at the keys, which no trace or exported "
                "program can: use to_torch(..., unseen='zeros')"
            )
        return (rows, self.weight) if bool(found.all()) else self._with_unseen(keys, rows, ~found)

    def _with_unseen(
        self, keys: torch.Tensor, rows: torch.Tensor, is_unseen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same with vectors for unseen keys: of rows of this lookup alone, one for each key."""
        unique, number = torch.unique(keys[is_unseen], return_inverse=True)
        vectors = torch.from_numpy(unseen_vectors(self._table, unique.cpu().numpy(), self._unseen))
        last = self.weight.shape[0] - 1
        gathered = self.weight[rows.reshape(-1)].clone()
        gathered[is_unseen.reshape(-1)] = vectors.to(gathered)[number]
        places = torch.arange(rows.numel(), device=rows.device).view(rows.shape).masked_fill(rows == last, rows.numel())
        return places, torch.cat([gathered, self.weight[last:]])


def _names_of(model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None) -> dict[nn.Module, list[str]]:
    """Return the modules to be replaced, each with all its names. Raises ValueError if there is none."""
    found: dict[nn.Module, list[str]] = {}
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
    if not found:
        raise ValueError("the model has no nn.Embedding and no nn.EmbeddingBag to convert: see filter_fn, too")
    return found


def _features_of(
    model: nn.Module, names: Mapping[nn.Module, list[str]], schema: Schema, features: Mapping[str, str | Sequence[str]]
) -> dict[nn.Module, list[str]]:
    """Return the features of each module. Raises ValueError if they are unknown."""
    known, listed_by = [feature.name for feature in schema.features], dict[str, list[str]]()
    for name, value in features.items():
        listed = [value] if isinstance(value, str) else [*value]
        try:
            inside = model.get_submodule(name)
        except AttributeError:
            raise ValueError(f"features= names the module {name!r}, which the model does not have") from None
        if isinstance(inside, nn.ModuleList):
            if len(listed) != len(inside):
                raise ValueError(f"{name} has {len(inside)} modules and features= names {len(listed)} features of it")
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
                f"no feature is called like the module {places[0]!r}: give features={{{places[0]!r}: NAME}}, where the "
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
        self._tables_of: dict[int, str] = {}
        """By the address of a weight."""

    def of(self, old: Any, name: str, features: Sequence[str]) -> nn.Module:
        """Return the replacement of a module."""
        if is_collection(old):
            return self._collection(old, name, features)
        if old.max_norm is not None:
            raise ValueError(f"{name} has max_norm={old.max_norm!r}: make it without, as rows are not renormalized")
        if old.scale_grad_by_freq:
            raise ValueError(f"{name} has scale_grad_by_freq=True: make it without, and give weights for ids instead")
        kept = self._weight(old, name, features)
        lookups: dict[str, EmbeddingBag | Embedding] = {}
        for feature in features:
            made: EmbeddingBag | Embedding
            if isinstance(old, nn.EmbeddingBag):
                made = EmbeddingBag(
                    self._schema, feature, mode=old.mode, padding_idx=old.padding_idx,
                    include_last_offset=old.include_last_offset,
                )  # fmt: skip
            else:
                made = Embedding(self._schema, feature, padding_idx=old.padding_idx)
            made.weights = kept
            made.requires_grad_(old.weight.requires_grad)
            made.num_embeddings = old.num_embeddings
            made.to(dtype=old.weight.dtype, device=None if old.weight.is_meta else old.weight.device)
            lookups[feature] = made.train(old.training)
        return next(iter(lookups.values())) if len(lookups) == 1 else SharedLookup(lookups)

    def _collection(self, old: Any, name: str, features: Sequence[str]) -> nn.Module:
        """Return the replacement of a collection of torchrec."""
        if len(features) != len(feature_names(old)):
            raise ValueError(
                f"{name} looks up {', '.join(feature_names(old))}, and {len(features)} features of the schema take "
                "their place: a feature has one table, so name as many in features=, all different"
            )
        trained = {plain.weight.requires_grad for _, plain in tables_of(old)}
        if len(trained) > 1:
            raise ValueError(
                f"{name} has tables that are frozen beside others that are not: make two collections of it"
            )
        made, rest = converted_collection(old, name, features, self._schema), iter(features)
        for config, plain in tables_of(old):
            of_table = [next(rest) for _ in config.feature_names]
            made.weights |= self._weight(plain, f"{name}.{config.name}", of_table)
        made.requires_grad_(trained.pop())
        return made.train(old.training)

    def _weight(self, old: Any, name: str, features: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the weight of ``old``'s table, which all its modules share; none if all are on "meta"."""
        table = self._tables[features[0]]
        if others := [one for one in features if self._tables[one] != table]:
            raise ValueError(
                f"{name} looks up {features[0]!r} and {others[0]!r}, which are of tables {table!r} and "
                f"{self._tables[others[0]]!r}: give both features one table"
            )
        dim = next(one.dim for one in self._schema.tables if one.name == table)
        if old.embedding_dim != dim:
            raise ValueError(f"{name} has {old.embedding_dim} columns and table {table!r} {dim}: make them the same")
        kept = None if old.weight.is_meta else old.weight.detach()
        if kept is not None:
            place = kept.untyped_storage().data_ptr()
            if (other := self._tables_of.setdefault(place, table)) != table:
                raise ValueError(
                    f"{name} shares its weight with a module of table {other!r} and looks up table {table!r}: give "
                    "their features one table, as they would part in training"
                )
            before = self._weights.setdefault(table, kept)
            if before.data_ptr() != kept.data_ptr() and not torch.equal(before, kept):
                raise ValueError(
                    f"{name} and a module before it are of table {table!r} and have different weights: give their "
                    "features tables of their own, or use one module for all"
                )
        return {table: self._weights[table]} if table in self._weights else {}
