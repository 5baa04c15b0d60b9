"""Checks before tc.convert replaces a module of torch: the replacement must compute the same thing."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_FORWARDS = (nn.Embedding.forward, nn.EmbeddingBag.forward)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_replaceable(model: nn.Module, modules: Mapping[Any, Sequence[str]]) -> None:
    """Raise ValueError for a module that does more than look up rows, or whose weight is also used elsewhere.

    Args:
        model: the model that has the modules.
        modules: every `nn.Embedding` and `nn.EmbeddingBag` that is to be replaced, with its names.
    """
    weights: dict[Any, list[tuple[torch.Tensor, str]]] = {}
    for old, names in modules.items():
        _check_lookup(old, names[0])
        weights.setdefault(_place(old.weight), []).append((old.weight, names[0]))
    for name, found in _others(model, modules):
        module = next((one for weight, one in weights.get(_place(found), ()) if _overlap(weight, found)), None)
        if module is not None:
            raise ValueError(
                f"the weight of {module} is also {name}, which would keep its old values while rows are trained: call "
                f"the module there too, or exclude {module} with filter_fn"
            )


def _check_lookup(old: Any, name: str) -> None:
    kind = type(old).__name__
    if parametrize.is_parametrized(old):
        raise ValueError(
            f"{name} is parametrized ({', '.join(old.parametrizations)}), and rows are not: remove the parametrization "
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
    if old.weight._backward_hooks:
        raise ValueError(
            f"the weight of {name} has hooks, which would never run because the new module has no gradient of a whole "
            "table: remove them, or register hooks on the module's output"
        )
    is_padded = isinstance(old, nn.Embedding) and old.padding_idx is not None and not old.weight.is_meta
    if is_padded and bool(old.weight[old.padding_idx].detach().any()):
        raise ValueError(
            f"row {old.padding_idx} of {name} is padding and is not zero, but a converted module returns zeros for "
            f"padding: zero it (with torch.no_grad(): {name}.weight[{old.padding_idx}] = 0), or create the module "
            "without padding_idx, and the row will be trained"
        )


def _place(weight: torch.Tensor) -> Any:
    """Return a key for the storage of a tensor, which it shares with its views."""
    return id(weight) if weight.is_meta else weight.untyped_storage().data_ptr()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
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


def _others(model: nn.Module, modules: Mapping[nn.Module, Sequence[str]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of other modules by name: parameters, buffers, and those in attributes and closures."""
    inside = tuple(f"{name}." for names in modules.values() for name in names if name)
    for name, module in model.named_modules():
        if module in modules or name.startswith(inside):
            continue
        prefix = f"{name}." if name else ""
        others = {key: one for key, one in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}
        for named in (module._parameters, module._buffers, others):
            for key, value in named.items():
                yield from _tensors(f"{prefix}{key}", value, 0)


_DEEPEST = 4


def _tensors(name: str, value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            yield name, value
    elif depth < _DEEPEST:
        if isinstance(value, dict):
            parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
        elif isinstance(value, list | tuple | set):
            parts = [(f"{name}[{i}]", part) for i, part in enumerate(value)]
        else:
            parts = [(f"a variable of {name}", part) for part in _captured(value)]
        for part_name, part in parts:
            yield from _tensors(part_name, part, depth + 1)


def _captured(value: Any) -> list[Any]:
    """Return the variables that a function captured."""
    found = []
    for cell in getattr(value, "__closure__", None) or ():
        with suppress(ValueError):  # an empty cell
            found.append(cell.cell_contents)
    return found
