"""Checks before tc.convert replaces a module of torch: the replacement must compute the same thing."""

from __future__ import annotations

import gc
import warnings
from collections import deque
from functools import partial
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from tiercache.store.checkpoint import initial_checkpoint_vectors
from tiercache.store.initializer import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from tiercache.store.table import Table

_FORWARDS = (nn.Embedding.forward, nn.EmbeddingBag.forward)
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_METHODS = (
    "__call__", "_call_impl", "__getattr__", "__getattribute__", "weight", "state_dict", "load_state_dict",
    "_save_to_state_dict", "_load_from_state_dict", "get_extra_state", "set_extra_state", "_apply", "parameters",
    "named_parameters", "_named_members",
)  # fmt: skip
"""Methods and properties by which a subclass changes what a module computes, saves or trains."""


def check_replaceable(model: nn.Module, modules: Mapping[Any, Sequence[str]]) -> None:
    """Raise ValueError for one of ``modules`` that does more than look up rows, or whose weight is used elsewhere."""
    weights: dict[Any, list[tuple[torch.Tensor, Any, str]]] = {}
    for old, names in modules.items():
        weight = weight_of(old)
        if isinstance(old, nn.Module):
            _check_lookup(old, names[0])
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"the weight of {names[0]} has hooks, which would never run because the new module has no gradient of "
                "a whole table: remove them, or register hooks on the module's output"
            )
        shared = weights.setdefault(place_of(weight), [])
        for other_weight, other, its_name in shared:
            if overlap(weight, other_weight):
                _check_alike((old, names[0]), (other, its_name))
        shared.append((weight, old, names[0]))
    for name, found in _others(model, modules):
        module = next((one for weight, _, one in weights.get(place_of(found), ()) if overlap(weight, found)), None)
        if module is not None:
            raise ValueError(
                f"the weight of {module} is also {name}, which would keep its old values while rows are trained: call "
                f"the module there too, or exclude {module} with filter_fn"
            )


def _settings(old: Any) -> dict[str, Any]:
    """Return the settings of a module by which its lookups change the rows, or leave them untrained."""
    names = ("padding_idx", "max_norm", "norm_type")
    found = {name: getattr(old, name, None) for name in names}
    return found if found["max_norm"] is not None else found | {"norm_type": None}


def _check_alike(one: tuple[Any, str], another: tuple[Any, str]) -> None:
    (old, name), (other, its_name) = one, another
    settings, others = _settings(old), _settings(other)
    for key, value in settings.items():
        returns_padding = any(isinstance(each, nn.Embedding) and each.padding_idx is not None for each in (old, other))
        if value != others[key] and (key != "padding_idx" or returns_padding):  # bags skip the row
            raise ValueError(
                f"{name} and {its_name} share a weight, but have {key}={value!r} and {key}={others[key]!r}: in torch "
                "one changes rows that the other returns, so create both with the same, or exclude both with filter_fn"
            )


def _check_lookup(old: Any, name: str) -> None:
    kind = type(old).__name__
    if parametrize.is_parametrized(old):
        raise ValueError(
            f"{name} is parametrized ({', '.join(old.parametrizations)}), but rows are not: remove the parametrization "
            "(torch.nn.utils.parametrize.remove_parametrizations) before tc.convert"
        )
    if type(old).forward not in _FORWARDS or "forward" in vars(old):
        raise ValueError(
            f"{name} ({kind}) has its own forward, which the new module would not run: move that code to the module "
            "that calls it, or exclude this one with filter_fn"
        )
    if hooks := [one for one in _HOOKS if getattr(old, one, None)]:
        what = hooks[0].strip("_").replace("_", " ")
        raise ValueError(f"{name} has {what}, which the new module would not call: register them after tc.convert")
    of_torch = nn.Embedding if isinstance(old, nn.Embedding) else nn.EmbeddingBag
    if own := [one for one in _METHODS if getattr(type(old), one, None) is not getattr(of_torch, one, None)]:
        raise ValueError(
            f"{name} ({kind}) has its own {own[0]}, which the new module would not have: move that code to the module "
            "that calls it, or exclude this one with filter_fn"
        )
    plain = vars(of_torch(1, 1, device="meta"))
    parts = [*old._parameters, *old._buffers, *old._modules, *(key for key in vars(old) if key[0] != "_")]
    if own := [one for one in parts if one != "weight" and one not in plain]:
        raise ValueError(
            f"{name} ({kind}) has its own {own[0]}, which the new module would not have: move it to the module that "
            "calls it, delete it, or exclude this module with filter_fn"
        )


def check_padding(old: nn.Embedding, name: str, table: Table) -> None:
    """Raise ValueError if the row of a padding key is not zeros: in the weight, or in the checkpoint of the table."""
    if old.padding_idx is None:
        return
    row: Any
    if not old.weight.is_meta:
        row = old.weight[old.padding_idx].detach()
        remedy = f"zero it (with torch.no_grad(): {name}.weight[{old.padding_idx}] = 0)"
    elif isinstance(table.initializer, Checkpoint):
        row = initial_checkpoint_vectors(table, np.array([old.padding_idx]))
        remedy = f"start from a checkpoint whose {table.initializer.tensor} has zeros there"
    else:
        return
    if bool(row.any()):
        raise ValueError(
            f"row {old.padding_idx} of {name} is padding and is not zero, but a converted module returns zeros for "
            f"padding: {remedy}, or create the module without padding_idx, and the row will be trained"
        )


def weight_of(one: nn.Module | nn.Parameter) -> torch.Tensor:
    """Return the weight (rows, dim) of an embedding of torch, or the parameter itself."""
    return one if isinstance(one, nn.Parameter) else one.weight  # type: ignore[return-value]


def place_of(weight: torch.Tensor) -> Any:
    """Return a key for the storage of a tensor, which it shares with its views."""
    return id(weight) if weight.is_meta else weight.untyped_storage().data_ptr()


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors in one storage share memory. On "meta" they are one tensor."""
    if one.is_meta:
        return True
    (first, last), (begin, end) = _range(one), _range(other)
    return first < end and begin < last


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first number of a strided tensor, and the end of its last one."""
    if not tensor.numel():
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _others(model: nn.Module, modules: Mapping[Any, Sequence[str]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of other modules by name: parameters, buffers, and those in attributes and closures."""
    inside = tuple(f"{name}." for names in modules.values() for name in names if name)
    roots: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        if module in modules or name.startswith(inside):
            continue
        prefix = f"{name}." if name else ""
        parameters = {key: one for key, one in module._parameters.items() if one not in modules}
        others = {key: one for key, one in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}
        of_class = {
            key: one
            for kind in type(module).__mro__
            if not is_of_torch(kind)
            for key, one in vars(kind).items()
            if not isinstance(one, FunctionType | staticmethod | classmethod | property)
        }
        for named in (parameters, module._buffers, others, of_class):
            roots += [(f"{prefix}{key}", value) for key, value in named.items()]
    yield from _tensors(roots, set(model.modules()))


_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, np.ndarray, np.generic)


def _tensors(roots: Iterable[tuple[str, Any]], modules: Collection[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors reachable through containers, attributes and captures, except from the model's ``modules``."""
    pending, seen = deque(roots), set[int]()
    while pending:
        name, value = pending.popleft()
        if isinstance(value, torch.Tensor):
            if value.layout == torch.strided:
                yield name, value
        elif not isinstance(value, _PLAIN) and id(value) not in seen:
            seen.add(id(value))
            pending += _parts(name, value, modules)


def _parts(name: str, value: Any, modules: Collection[nn.Module]) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict | MappingProxyType):  # other mappings may read files
        return [(f"{name}[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return ((f"{name}[{i}]", part) for i, part in enumerate(value) if not isinstance(part, _PLAIN))
    if isinstance(value, nn.Module):
        if isinstance(value, nn.Embedding | nn.EmbeddingBag):
            return [(f"{name}.weight", value.weight)]
        return [] if value in modules else [(f"{name}.{key}", part) for key, part in vars(value).items()]
    if isinstance(value, torch.optim.Optimizer):
        return [(f"{name}.param_groups", value.param_groups)]
    if isinstance(value, partial):
        return [(name, value.func), (f"an argument of {name}", [*value.args, *value.keywords.values()])]
    if isinstance(value, MethodType):
        return [(name, value.__func__), (f"{name}.__self__", value.__self__)]
    if isinstance(value, FunctionType):
        found = [(f"a variable of {name}", cell.cell_contents) for cell in value.__closure__ or () if _is_set(cell)]
        return [*found, (f"a default of {name}", [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()])]
    if isinstance(value, ModuleType):
        return []
    slots = [key for one in type(value).__mro__ for key in getattr(one, "__slots__", ()) if hasattr(value, key)]
    attributes = {key: getattr(value, key) for key in slots} | getattr(value, "__dict__", {})
    return [(f"{name}.{key}", part) for key, part in attributes.items()]


def _is_set(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def warn_of_references(
    model: nn.Module, replaced: Iterable[tuple[torch.Tensor, str]], optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Warn of dicts, lists and optimizers outside the model that have a weight, whose values would become stale."""
    named = {id(weight): (weight, name) for weight, name in replaced}
    known = {id(group["params"]) for one in optimizers for group in one.param_groups}
    known |= {id(one._parameters) for one in model.modules()} | {id(one.state) for one in optimizers}
    kinds: dict[str, list[str]] = {}
    weights = [weight for weight, _ in named.values()]
    known |= {id(weights), *map(id, named.values())}
    for holder in gc.get_referrers(*weights) if weights else ():
        if id(holder) in known or not isinstance(holder, dict | list | tuple | set):
            continue
        for part in holder.values() if isinstance(holder, dict) else holder:
            if isinstance(part, torch.Tensor) and id(part) in named:
                kinds.setdefault(named[id(part)][1], []).append(f"a {type(holder).__name__} of {len(holder)}")
    for name, holders in kinds.items():
        warnings.warn(
            f"the weight of {name} is also in {', '.join(sorted(set(holders)))} outside the model, which keeps its "
            "current values while rows are trained: if an optimizer has it, pass that as tc.convert(optimizer=...)",
            stacklevel=3,
        )


def is_of_torch(kind: type) -> bool:
    """Return True for a class defined by torch itself."""
    return kind.__module__.partition(".")[0] == "torch"
