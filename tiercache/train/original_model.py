"""A model of the class that was passed to tc.convert, filled with the trained weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from tiercache.data.raw_batch import OOV_KEY
from tiercache.train.convert import SharedLookup
from tiercache.train.embedding import Embedding, EmbeddingBag
from tiercache.train.missing_rows import unseen_vectors
from tiercache.train.table_module import TableModule

if TYPE_CHECKING:
    from tiercache.store import Store, Table
    from tiercache.values.lookups import Unseen

_CHUNK_BYTES = 16 << 20


def fill_original(like: nn.Module, model: nn.Module, store: Store, unseen: Unseen) -> nn.Module:
    """Copy the dense values of ``model`` and the rows of ``store`` to ``like``; see `to_torch`."""
    if like is model:
        raise ValueError("like= is the converted model itself: pass a new one of the original class, as in like=Net()")
    weights, tables = {}, {one.name: one for one in store.tables}
    for name, (of_table, weight) in _weights(like, model).items():
        if (table := tables.get(of_table)) is None:
            raise ValueError(f"{store.label} has no table {of_table!r}: it has {', '.join(tables)}")
        if weight.shape[1] != table.dim:
            raise ValueError(f"{name} has {weight.shape[1]} columns in like=, but table {table.name!r} has {table.dim}")
        weights[name] = table, weight
    own = like.state_dict()
    inside = tuple(f"{name}." for name, part in model.named_modules() if isinstance(part, SharedLookup))
    dense = {_plain(name): value for name, value in model.state_dict().items() if not name.startswith(inside)}
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


def _weights(like: nn.Module, model: nn.Module) -> dict[str, tuple[str, nn.Parameter]]:
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
        name = _plain(name)  # noqa: PLW2901 - in ``like``
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


def _plain(name: str) -> str:
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
