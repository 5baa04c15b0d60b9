"""tc.to_torch: converts a trained model back to plain torch modules, for serving or for the original class."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tiercache.data.dataset_writer import as_keys
from tiercache.data.raw_batch import OOV_KEY
from tiercache.store import Store
from tiercache.store.store_errors import KeyMissingError
from tiercache.train.batches import check_word
from tiercache.train.convert import SharedLookup
from tiercache.train.dense_state import load_module
from tiercache.train.embedding import Embedding, EmbeddingBag
from tiercache.train.joint_optimizer import unwrapped
from tiercache.train.missing_rows import unseen_vectors
from tiercache.train.table_module import TableModule
from tiercache.train.torchrec_modules import ConvertedBags, ConvertedRows, KeyedCollection
from tiercache.values.lookups import UNSEEN

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from tiercache.store import Table
    from tiercache.values.lookups import Unseen


def to_torch(
    model: nn.Module,
    store: Store | str | os.PathLike[str],
    *,
    like: nn.Module | None = None,
    keys: Mapping[str, NDArray[np.int64] | torch.Tensor] | None = None,
    unseen: Unseen = "initial",
    at: int | str | None = None,
) -> nn.Module:
    """Return a copy of ``model`` whose embeddings are plain torch modules with the rows of a store, open or a path.

    Dense parameters and buffers come from ``model``. With ``at``, the id of a commit or the name of a pin, they and the
    rows come from that commit, whatever ``model`` has now.

    With ``like``, a model of the class that was converted, its weights are filled instead: its embeddings and parameter
    tables get the rows of the store, row i from key i, and everything else the values of ``model``. It then has the
    state dict of the original class. A table is in memory whole. ``unseen`` decides the rows of keys that the store
    lacks.

    On several ranks ``cache.store`` has one rank's rows: pass the path, whose newest commit has all.

    Without ``like``, embeddings take raw keys, int64 of any shape, and map them to rows by a sorted list of keys, a
    buffer next to the weight: an `EmbeddingBag` (N, L), or (keys,) with offsets. A converted torchrec collection takes
    a `KeyedJaggedTensor` of raw keys. Padding is zeros and counts in no mean, as in training. Modules of one table and
    dtype share it. ``keys``: by table, the keys whose rows are taken, besides the out-of-vocabulary row; default: all.
    A table is in memory whole.

    A key without a row has its table's out-of-vocabulary row if there is one; else ``unseen`` decides, as in
    ``TierCache.evaluate_batch``: "initial" its initial row, "zeros" zeros, "error" KeyMissingError. The vector counts
    in a mean. Only "zeros" can be traced and exported, because only it does not look at the keys.

    Raises ValueError for one rank's shard, for a model with an `EmbeddingBagCollection` or `EmbeddingCollection`, which
    look whole batches up, or without any embedding, for a ``like`` with other modules, or fewer rows than the store
    has, and for ``keys`` of other tables, or that are not integers; KeyMissingError for keys that have no row,
    CommitMissingError, StateError if commit ``at`` does not have the state of one module like ``model``, and the errors
    of ``Store.open`` and ``Store.scan``.
    """
    check_word("unseen", unseen, UNSEEN)
    if not isinstance(store, Store):
        with Store.open(store, mode="r") as opened:
            return to_torch(model, opened, like=like, keys=keys, unseen=unseen, at=at)
    store.check_whole()
    model = unwrapped(model)
    if at is not None:
        with store.at(at) as there:
            assert there.commit is not None, "the store has a commit"
            before = _copied(model)
            load_module(before, there.state(), f"commit {there.commit.id} of {store.label}")
            return to_torch(before, there, like=like, keys=keys, unseen=unseen)
    if like is not None:
        if keys is not None:
            raise ValueError("to_torch() takes keys= or like=: a model of the original class has all rows")
        return _fill_original(like, model, store, unseen)
    made, tables = _copied(model), dict[tuple[str, torch.dtype], _KeyedRows]()
    places = [(name, one) for name, one in made.named_modules(remove_duplicate=False) if isinstance(one, TableModule)]
    if not places:
        raise ValueError("the model has no tiercache embedding, so there is nothing to convert back")
    known = {table for _, one in places for table in one.tables}
    if unknown := [*(keys or {}).keys() - known]:
        raise ValueError(f"keys= has a table {min(unknown)!r}, but the model looks up {', '.join(sorted(known))}")
    plain: dict[int, nn.Module] = {}
    for name, one in places:
        if not isinstance(one, EmbeddingBag | Embedding | ConvertedBags | ConvertedRows):
            raise ValueError(  # noqa: TRY004 - the model is what it should not have
                f"{name or 'the model'} is an {type(one).__name__}, which looks up whole batches: pass a model whose "
                "modules look up one feature each"
            )
        dtype = one.anchor.dtype
        for table in one.tables:
            if (table, dtype) not in tables:
                tables[table, dtype] = _KeyedRows.of(store, table, (keys or {}).get(table), unseen, dtype)
        lookups = [KeyedEmbedding(tables[one.feature_specs[name].table, dtype], one, name) for name in one.features]
        collection = one if isinstance(one, ConvertedBags | ConvertedRows) else None
        plain.setdefault(id(one), KeyedCollection(lookups, collection) if collection is not None else lookups[0])
    for name, one in places:
        path, _, last = name.rpartition(".")
        if not name:
            return plain[id(one)]
        setattr(made.get_submodule(path), last, plain[id(one)])
    for shared in [one for one in made.modules() if isinstance(one, SharedLookup)]:
        shared.plain = next(iter(shared.lookups.values()))
    return made


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy whose parts are not compiled: compiled code would call modules that are replaced."""
    copied = copy.deepcopy(model)
    for parent in [*copied.modules()]:
        for name, child in parent.named_children():
            setattr(parent, name, unwrapped(child))
    return copied


class KeyedEmbedding(nn.Module):
    """Rows of a table by raw keys, pooled or not."""

    def __init__(self, rows: _KeyedRows, trained: TableModule, feature: str) -> None:
        """trained: the module that looked up the feature; its settings are copied."""
        super().__init__()
        self.rows, self.pooling, self.padding = rows, trained.mode_of(feature), trained.padding
        self.max_norm, self.norm_type = trained.max_norm, trained.norm_type
        self.has_last = bool(getattr(trained, "include_last_offset", False))

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 - torch's name
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look raw keys up as `nn.EmbeddingBag` and `nn.Embedding` look up theirs."""
        rows, weight = self.rows.find(input, self.padding)
        if per_sample_weights is not None and per_sample_weights.dtype == torch.float32:
            per_sample_weights = per_sample_weights.to(weight.dtype)
        none = None if self.padding is None else weight.shape[0] - 1
        if self.pooling is None:
            return functional.embedding(rows, weight, none, self.max_norm, self.norm_type)
        return functional.embedding_bag(
            rows if offsets is not None or rows.ndim > 1 else rows[:, None], weight, offsets, mode=self.pooling,
            per_sample_weights=per_sample_weights, padding_idx=none,
            include_last_offset=self.has_last and offsets is not None, max_norm=self.max_norm,
            norm_type=self.norm_type,
        )  # fmt: skip


class _KeyedRows(nn.Module):
    """The rows of a table and their keys, and two rows of zeros, for unseen keys and padding."""

    keys: torch.Tensor
    order: torch.Tensor

    def __init__(
        self, table: Table, keys: NDArray[np.int64], vectors: NDArray[np.float32], unseen: Unseen, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._table, self._unseen = table, unseen
        weight = torch.from_numpy(np.concatenate([vectors, np.zeros((2, table.dim), np.float32)]))
        self.weight = nn.Parameter(weight.to(dtype))
        order = np.argsort(keys)
        self.register_buffer("keys", torch.from_numpy(keys[order]))
        self.register_buffer("order", torch.from_numpy(order))
        shared = np.flatnonzero(keys == OOV_KEY)
        self._has_shared = bool(shared.size)
        self._default = int(shared[0]) if shared.size else keys.size  # the out-of-vocabulary row of all other keys

    @classmethod
    def of(cls, store: Store, name: str, keys: Any, unseen: Unseen, dtype: torch.dtype) -> _KeyedRows:
        """Read all rows, or the rows of ``keys``."""
        table = next(one for one in store.tables if one.name == name)
        if keys is not None:
            unique = np.unique(as_keys(f"the keys of table {name!r}", keys))
            with suppress(KeyMissingError):
                store.lookup(name, np.array([OOV_KEY]))
                unique = np.union1d(unique, [OOV_KEY])
            return cls(table, unique, store.lookup(name, unique)["vector"], unseen, dtype)
        chunks = [(stored, fields[0]) for stored, fields in store.scan(name)]
        chunks.append((np.empty(0, np.int64), np.empty((0, table.dim), np.float32)))
        all_keys, vectors = (np.concatenate(column) for column in zip(*chunks, strict=True))
        return cls(table, all_keys, vectors, unseen, dtype)

    def find(self, keys: torch.Tensor, padding: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a row for each key, and the rows; the last one is for padding."""
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
                f"unseen={self._unseen!r} of table {self._table.name!r} looks at the keys, which a trace or exported "
                "program cannot do: use to_torch(..., unseen='zeros')"
            )
        return (rows, self.weight) if bool(found.all()) else self._with_unseen(keys, rows, ~found)

    def _with_unseen(
        self, keys: torch.Tensor, rows: torch.Tensor, is_unseen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same with vectors for unseen keys: extra rows of this lookup alone, one for each key."""
        unique, number = torch.unique(keys[is_unseen], return_inverse=True)
        vectors = torch.from_numpy(unseen_vectors(self._table, unique.cpu().numpy(), self._unseen))
        last = self.weight.shape[0] - 1
        gathered = self.weight[rows.reshape(-1)].clone()
        gathered[is_unseen.reshape(-1)] = vectors.to(gathered)[number]
        places = torch.arange(rows.numel(), device=rows.device).view(rows.shape).masked_fill(rows == last, rows.numel())
        return places, torch.cat([gathered, self.weight[last:]])


_CHUNK_BYTES = 16 << 20


def _fill_original(like: nn.Module, model: nn.Module, store: Store, unseen: Unseen) -> nn.Module:
    """Copy the dense values of ``model`` and the rows of ``store`` to ``like``; see `to_torch`."""
    if like is model:
        raise ValueError("like= is the converted model itself: pass a new one of the original class, as in like=Net()")
    weights, tables = {}, {one.name: one for one in store.tables}
    for name, (of_table, weight) in _original_weights(like, model).items():
        if (table := tables.get(of_table)) is None:
            raise ValueError(f"{store.label} has no table {of_table!r}: it has {', '.join(tables)}")
        if weight.shape[1] != table.dim:
            raise ValueError(f"{name} has {weight.shape[1]} columns in like=, but table {table.name!r} has {table.dim}")
        weights[name] = table, weight
    own = like.state_dict()
    inside = tuple(f"{name}." for name, part in model.named_modules() if isinstance(part, SharedLookup))
    dense = {_plain_name(name): value for name, value in model.state_dict().items() if not name.startswith(inside)}
    if missing := [name for name in own if name not in dense and name not in weights]:
        raise ValueError(f"like= has {missing[0]}, which the model does not have: pass a model of the original class")
    if unknown := [name for name in dense if name not in own]:
        raise ValueError(f"the model has {unknown[0]}, which like= does not have: pass a model of the original class")
    filled: set[int] = set()
    with torch.no_grad():
        for table, weight in weights.values():
            if id(weight) not in filled:  # not its storage, which other weights may share
                filled.add(id(weight))
                _fill(store, table, weight, unseen)
        for name, (_, weight) in weights.items():
            if (padding := _padding(like, name)) is not None:
                weight[padding] = 0
    like.load_state_dict(dense, strict=False)
    return like


def _original_weights(like: nn.Module, model: nn.Module) -> dict[str, tuple[str, nn.Parameter]]:
    """Return, by name in ``like``, each weight that is rows of a table, with the table's name. Raises ValueError."""
    found: dict[str, tuple[str, nn.Parameter]] = {}
    shared: tuple[str, ...] = ()
    for name, part in model.named_modules(remove_duplicate=False):
        if name.startswith(shared):
            continue
        one = part
        if isinstance(part, SharedLookup):
            shared += (f"{name}." if name else "lookups.",)
            one = next(iter(part.lookups.values()))
        if not isinstance(one, TableModule):
            continue
        if not isinstance(one, Embedding | EmbeddingBag):
            raise ValueError(  # noqa: TRY004 - the model is what it should not have
                f"{name} is a {type(one).__name__}, which has no counterpart in torch: leave out like="
            )
        name = _plain_name(name)  # noqa: PLW2901 - in ``like``
        parent, _, child = name.rpartition(".")
        try:
            parameter = like.get_submodule(parent)._parameters.get(child) if name else None
            place = name if parameter is not None else f"{name}.weight" if name else "weight"
            weight = parameter if parameter is not None else like.get_submodule(name).weight
        except AttributeError:
            weight = None
        if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
            raise ValueError(f"like= has no embedding {name!r}, which the model has: pass one of the original class")
        found[place] = (one.tables[0], weight)
    if not found:
        raise ValueError("the model has no tiercache embedding, so there is nothing to convert back")
    return found


def _plain_name(name: str) -> str:
    """Return a name without the parts that torch.compile adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _padding(like: nn.Module, weight: str) -> int | None:
    """Return the row of a weight that is padding, which torch's modules keep at zero."""
    module, _, name = weight.rpartition(".")
    return getattr(like.get_submodule(module), "padding_idx", None) if name == "weight" else None


def _fill(store: Store, table: Table, weight: torch.Tensor, unseen: Unseen) -> None:
    """Write the row of key i to row i of ``weight``."""
    rows, step = weight.shape[0], max(1, _CHUNK_BYTES // (4 * table.dim))
    seen, shared = torch.zeros(rows, dtype=torch.bool), None
    for keys, fields in store.scan(table.name):
        oov = np.flatnonzero(keys == OOV_KEY)
        if oov.size:
            shared = fields[0][oov[0]].copy()
        inside = (keys >= 0) & (keys < rows)
        if bool((keys >= rows).any()):
            raise ValueError(
                f"table {table.name!r} has the key {int(keys.max())}, but the embedding of like= has {rows:,} rows: "
                "pass a model with more rows"
            )
        places = torch.from_numpy(keys[inside].copy())
        weight[places.to(weight.device)] = torch.from_numpy(fields[0][inside].copy()).to(weight)
        seen[places] = True
    missing = np.flatnonzero(~seen.numpy())
    for low in range(0, missing.size, step):
        keys = missing[low : low + step].astype(np.int64)
        found = unseen_vectors(table, keys, unseen) if shared is None else np.tile(shared, (keys.size, 1))
        weight[torch.from_numpy(keys).to(weight.device)] = torch.from_numpy(found).to(weight)
