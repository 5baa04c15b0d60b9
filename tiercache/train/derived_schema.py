"""The schema of a model that has no dataset yet: one table and one feature for each of its embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiercache.schema import Feature, Schema
from tiercache.store.initializer import Normal, Uniform
from tiercache.store.table import Table
from tiercache.train.torch_optimizers import as_row_optimizer
from tiercache.train.torchrec_modules import is_collection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercache.store.initializer import Initializer
    from tiercache.store.optimizer import Optimizer
    from tiercache.train.torch_optimizers import OptimizerOfRows

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_ITSELF = "embedding"
"""The name of a model that is an embedding itself."""


def derive_schema(
    places: Mapping[Any, Sequence[str]], optimizer: OptimizerOfRows | None, initializer: Initializer | None = None
) -> tuple[Schema, dict[Any, list[str]]]:
    """Return a schema for modules and parameters, and the feature of each.

    A feature has the name of its module and any number of keys; so has its table, which modules with one weight share.
    Rows of a module on "meta" start as ``initializer`` says, or from N(0, 1) like those of `nn.Embedding`.

    Args:
        places: modules and `nn.Parameter`s, with their names in the model.
        optimizer: the row optimizer; see `convert`. None: the default of `Table`.

    Raises:
        ValueError: a weight has a dtype that rows do not have, a collection of torchrec needs a dataset's schema, or no
            row optimizer does the same as the given one; or a module has weights and there is an initializer.
    """
    chosen = optimizer if isinstance(optimizer, Mapping) else {}
    first: dict[int, Table] = {}
    """By the id of a weight."""
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


def weight_of(one: nn.Module | nn.Parameter) -> torch.Tensor:
    """Return the weight (rows, dim) of an embedding of torch, or the parameter itself."""
    return one if isinstance(one, nn.Parameter) else one.weight  # type: ignore[return-value]


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
