"""Tables that a model has as plain parameters: finding them and replacing them by objects with the same lookups."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tiercache.train.embedding import Embedding
from tiercache.train.replaceable import is_of_torch
from tiercache.train.table_module import TableModule, refuse_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_LIKE_WEIGHT = ("shape", "size", "dim", "ndim", "device", "dtype", "numel")
"""Attributes that a `TableWeight` has of a table, and that a ParameterTable has itself."""
_USES = "embedding(x, {0}), torch.index_select({0}, 0, x), {0}.index_select(0, x) and {0}[x]"


class ParameterTable(Embedding):
    """Replaces an `nn.Parameter` (rows, dim) in which a model looks up rows.

    It supports `torch.nn.functional.embedding`, `torch.index_select` and ``index_select`` with dim 0, and indexing by a
    tensor of keys, a number, a slice or a mask. A slice or a mask means the keys of the whole table, which with
    gradients must be in the pass. It is not a tensor: everything else raises TypeError or AttributeError.
    """

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is functional.embedding:
            return _embedding(*args, **kwargs)
        if function is torch.index_select:
            return _index_select(*args, **kwargs)
        tables = [one for one in (*args, *kwargs.values()) if isinstance(one, ParameterTable)]
        name = getattr(function, "__name__", function)
        raise TypeError(tables[0].refusal(f"torch.{name}") if tables else f"torch.{name} of a table is not defined")

    def index_select(self, dim: int, index: torch.Tensor) -> torch.Tensor:
        """Return the rows of keys (n,): (n, dim). Raises TypeError for another dimension than the first."""
        if dim not in (0, -2):
            raise TypeError(self.refusal(f"index_select with dim {dim}"))
        if index.ndim > 1:
            raise IndexError(f"index_select() takes keys (n,) or one key, but got shape {tuple(index.shape)}")
        return self(index.reshape(-1))  # type: ignore[no-any-return]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the rows of keys of any shape, of one key, a slice, a list or a mask of the table's keys."""
        index, *others = index if isinstance(index, tuple) else (index,)
        if isinstance(index, np.ndarray):
            index = torch.from_numpy(index)
        if isinstance(index, slice | list) or (isinstance(index, torch.Tensor) and index.dtype == torch.bool):
            keys = torch.arange(self.num_embeddings, device="cpu")[index]
        elif isinstance(index, torch.Tensor):
            keys = index
        elif hasattr(index, "__index__") and not isinstance(index, bool):
            keys = torch.tensor(int(index), dtype=torch.int64, device="cpu")
        else:
            raise TypeError(self.refusal(f"indexing by a {type(index).__name__}"))
        if keys.ndim and not isinstance(index, slice) and any(map(_is_array, others)):
            raise TypeError(
                self.refusal("indexing by arrays of rows and of columns, which torch pairs,")
                + f"; index twice, as in {self.features[0]}[rows][..., columns]"
            )
        found: torch.Tensor = self(torch.where(keys < 0, keys + self.num_embeddings, keys))
        return found[(slice(None),) * keys.ndim + tuple(others)] if others else found

    def __getattr__(self, name: str) -> Any:
        if name in _LIKE_WEIGHT:
            return getattr(self.weight, name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or not hasattr(torch.Tensor, name):
                raise
            raise AttributeError(self.refusal(f".{name}")) from None

    def __len__(self) -> int:
        return self.num_embeddings

    def refusal(self, what: str) -> str:
        """Return the error message for an unsupported use of the parameter that was replaced."""
        name = self.features[0]
        return (
            f"{what} is not defined for the table {name!r}, whose rows are in the store and on the device, not in a "
            f"tensor: look up keys ({_USES.format(name)}), and put a penalty on the outputs of lookups"
        )


def refuse_parameters(
    parent: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any, _strict: bool, *lists: list[str]
) -> None:
    """Add an error for each table that a state has as a parameter of ``parent``: a hook of its ``load_state_dict``."""
    tables = [f"{prefix}{name}" for name, one in parent._modules.items() if isinstance(one, ParameterTable)]
    refuse_tables(state_dict, tables, lists[-1])


def _is_array(index: Any) -> bool:
    """Return True for a part of an index that is neither a number, a slice, None nor an ellipsis."""
    if isinstance(index, torch.Tensor | np.ndarray):
        return index.ndim > 0 or str(index.dtype).endswith("bool")
    is_number = hasattr(index, "__index__") and not isinstance(index, bool)
    return not (index is None or index is Ellipsis or isinstance(index, slice) or is_number)


def _embedding(
    keys: torch.Tensor,
    table: ParameterTable,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Look up as `torch.nn.functional.embedding` does; rows at ``padding_idx`` are returned but not trained."""
    if not isinstance(table, ParameterTable):
        raise TypeError(f"F.embedding got a table as its keys, and a {type(table).__name__} as its weight")
    for name, value in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq or None)):
        if value is not None:
            raise TypeError(table.refusal(f"F.embedding with {name}={value!r}"))
    if padding_idx is None:
        return table(keys)  # type: ignore[no-any-return]
    padding = padding_idx if padding_idx >= 0 else table.num_embeddings + padding_idx
    if torch.is_grad_enabled() and bool((keys == padding).any()):
        frozen = (keys == padding)[..., None]
        found: torch.Tensor = table(keys)
        return torch.where(frozen.to(found.device), found.detach(), found)
    return table(keys)  # type: ignore[no-any-return]


def _index_select(input: Any, dim: int, index: torch.Tensor, *, out: Any = None) -> torch.Tensor:  # noqa: A002
    if not isinstance(input, ParameterTable) or out is not None:
        raise TypeError("torch.index_select of a table takes no out=, and the table as its input")
    return input.index_select(dim, index)


def table_parameters(model: nn.Module, names: Sequence[str]) -> dict[Any, list[str]]:
    """Return the parameters with these names, each with all its names. Raises ValueError if one is not a table."""
    if isinstance(names, str):
        raise TypeError(f"parameters= is the string {names!r}: pass a list of names, as in parameters=[{names!r}]")
    found: dict[Any, list[str]] = {}
    for name in names:
        parent, _, child = name.rpartition(".")
        try:
            module = model.get_submodule(parent)
            parameter = None if isinstance(module, TableModule) else module._parameters.get(child)
        except AttributeError:
            parameter = None
        if parameter is None:
            known = ", ".join(key for key, _ in _candidates(model)) or "none that looks like a table"
            raise ValueError(f"parameters= names {name!r}, which is not a parameter of the model: it has {known}")
        if parameter.ndim != 2:
            raise ValueError(f"the parameter {name} has shape {tuple(parameter.shape)}: expected a table, (rows, dim)")
        found.setdefault(parameter, []).append(name)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in found and name not in found[parameter]:
            found[parameter].append(name)
    return found


def check_parameters(model: nn.Module) -> None:
    """Raise ValueError, naming them, if a model without embeddings has parameters in which it looks up rows."""
    if found := [*_candidates(model)]:
        listed = ", ".join(f"{name} {tuple(parameter.shape)}" for name, parameter in found)
        raise ValueError(
            "the model has no nn.Embedding and no nn.EmbeddingBag, but it has parameters that may be tables: "
            f"{listed}. List those in which it looks up rows: tc.convert(model, "
            f"parameters={[name for name, _ in found]})"
        )


def warn_of_tables(model: nn.Module) -> None:
    """Warn of parameters in which the model looks up rows and that stay whole in memory."""
    if found := [name for name, _ in _looked_up(model)]:
        warnings.warn(
            f"the model looks up rows in its parameters {', '.join(found)}, which stay parameters: if they are tables, "
            f"list them, as in tc.convert(model, parameters={found})",
            stacklevel=3,
        )


def _candidates(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters (rows, dim) outside torch's own modules; if any are looked up in, only these."""
    return [*_looked_up(model)] or [(path, one) for path, _, one, _ in _matrices(model)]


def _matrices(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter, type]]:
    """Yield path, name, parameter and class of module for the parameters (rows, dim) outside torch's own modules."""
    for prefix, module in model.named_modules():
        if isinstance(module, TableModule):
            continue  # its parameter is an anchor
        for name, one in module._parameters.items():
            if one is not None and one.ndim == 2 and not is_of_torch(type(module)):
                yield f"{prefix}.{name}" if prefix else name, name, one, type(module)


def _looked_up(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield those in which the source code of their module looks up rows."""
    for path, name, parameter, kind in _matrices(model):
        try:
            source = inspect.getsource(kind)
        except (OSError, TypeError):
            continue  # typed into an interpreter
        use = re.escape(f"self.{name}")
        pattern = rf"embedding\([^()]*(\([^()]*\)[^()]*)*{use}\b|index_select\(\s*{use}\b|{use}(\.index_select\(|\[)"
        if re.search(pattern, source):
            yield path, parameter
