"""Torch optimizers in a conversion: equivalent row optimizers, and anchors in their groups."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tiercache.errors import StateError
from tiercache.store.optimizer import SGD, Adagrad, Adam, Optimizer
from tiercache.train.table_module import table_modules

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiercache.train.table_module import TableModule

OptimizerOfRows = Optimizer | torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, Optimizer]
"""The optimizer of rows, as `convert` takes it."""
_KNOWN = "SGD, Adagrad, SparseAdam, Adam, AdamW"
REFUSED = ("maximize", "amsgrad", "lr_decay", "dampening")  # settings of torch's optimizers that rows do not have
SETTINGS = (*REFUSED, "weight_decay", "momentum", "nesterov", "betas", "eps", "decoupled_weight_decay")
"""Settings that a row optimizer follows or refuses, besides the learning rate."""


def as_list(optimizer: object) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers among the argument of `convert`."""
    every = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    return [one for one in every if isinstance(one, torch.optim.Optimizer)]


def as_row_optimizer(optimizer: object, name: str, weight: torch.Tensor) -> Optimizer | None:
    """Return the row optimizer for a replaced weight; None: none was given. Raises ValueError if torch's has none."""
    if optimizer is None or isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, str | bytes | Mapping) or not (found := as_list(optimizer)):
        raise TypeError(
            f"optimizer= is {optimizer!r}: pass one of tc.optim, a torch optimizer, or a mapping from names of "
            "modules to optimizers of tc.optim"
        )
    for one in found:
        for group in one.param_groups:
            if any(parameter is weight for parameter in group["params"]):
                return row_optimizer(one, group, name)
    if not weight.requires_grad:
        return None
    raise ValueError(
        f"{name} is in none of the given optimizers: pass the one that has it, or freeze it with requires_grad_(False)"
    )


def row_optimizer(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], name: str) -> Optimizer:
    """Return the row optimizer that is equivalent to a torch optimizer for a group of parameters.

    Warns if torch's also moves rows that a step does not touch, as with dense gradients and momentum or decay. Raises
    ValueError if there is none.
    """
    kind, settings = type(optimizer), dict(group)

    def number(key: str) -> float:
        return float(settings[key])

    settings["lr"] = settings.get("initial_lr", settings["lr"])  # the base rate if a scheduler changed it

    adams = torch.optim.SparseAdam, torch.optim.Adam, torch.optim.AdamW
    refused = [key for key in REFUSED if settings.get(key)]
    if kind not in (torch.optim.SGD, torch.optim.Adagrad, *adams) or refused:
        what = f"{kind.__name__}({refused[0]}={settings[refused[0]]!r})" if refused else kind.__name__
        raise ValueError(
            f"{name} is trained by {what}, but no row optimizer does the same: choose one, as in "
            f"tc.convert(model, optimizer=tc.optim.Adagrad(learning_rate={number('lr'):g})); supported are {_KNOWN}"
        )
    decay, momentum = (float(settings.get(key, 0.0)) for key in ("weight_decay", "momentum"))
    if decay or momentum or kind in adams[1:]:
        how = " with weight_decay" if decay else " with momentum" if momentum else ""
        warnings.warn(
            f"{name} is trained by {kind.__name__}{how}, which moves every row in "
            "every step; rows move only in steps whose batch has their key, as with SparseAdam and sparse gradients",
            stacklevel=2,
        )
    if kind is torch.optim.SGD:
        nesterov = bool(momentum and settings["nesterov"])
        return SGD(learning_rate=number("lr"), momentum=momentum, nesterov=nesterov, decay=decay)
    if kind is torch.optim.Adagrad:
        return Adagrad(
            learning_rate=number("lr"), eps=number("eps"), decay=decay,
            initial_accumulator=number("initial_accumulator_value"),
        )  # fmt: skip
    beta1, beta2 = map(float, settings["betas"])
    return Adam(
        learning_rate=number("lr"), beta1=beta1, beta2=beta2, eps=number("eps"), decay=decay,
        decoupled=bool(settings.get("decoupled_weight_decay", kind is torch.optim.AdamW)),
        corrected_eps=kind is not torch.optim.SparseAdam,
    )  # fmt: skip


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that decide how rows step; the rate is the base rate of a scheduler."""
    found = {name: group[name] for name in SETTINGS if name in group}
    return found | {"lr": float(group.get("initial_lr", group["lr"]))}


def step_alike(
    module: TableModule, weight: torch.Tensor, optimizers: Sequence[torch.optim.Optimizer], *, is_default: bool
) -> None:
    """Record in a module the settings of the group that has the weight it replaces, as `row_optimizer` took them."""
    found = [group for one in optimizers for group in one.param_groups if any(weight is p for p in group["params"])]
    module.stepped_as = settings_of(found[0]) if found else None
    module.has_default_optimizer = is_default or (bool(optimizers) and not found)  # frozen: it may be added later


def replace_parameters(
    optimizers: Iterable[torch.optim.Optimizer], replaced: Mapping[int, tuple[torch.Tensor, torch.nn.Parameter]]
) -> None:
    """Put anchors in the place of replaced weights in optimizers. replaced: both, by the id of the weight."""
    for one in optimizers:
        for group in one.param_groups:
            for i, parameter in enumerate(group["params"]):
                if id(parameter) not in replaced:
                    continue
                weight, anchor = replaced[id(parameter)]
                group["params"][i] = anchor
                if state := one.state.pop(weight, None):
                    one.state[anchor] = {key: _like_anchor(value, weight, anchor) for key, value in state.items()}


def check_owned_once(optimizers: Sequence[torch.optim.Optimizer], tensors: Iterable[tuple[torch.Tensor, str]]) -> None:
    """Raise ValueError for a weight or an anchor that two optimizers have: its rows step with one."""
    names = {id(one): name for one, name in tensors}
    first: dict[int, torch.optim.Optimizer] = {}
    for one in optimizers:
        for group in one.param_groups:
            for parameter in group["params"]:
                if id(parameter) in names and first.setdefault(id(parameter), one) is not one:
                    raise ValueError(
                        f"{type(first[id(parameter)]).__name__} and {type(one).__name__} both have the parameter of "
                        f"{names[id(parameter)]}, but rows step with one optimizer: leave it out of the other"
                    )


def check_state(optimizers: Sequence[torch.optim.Optimizer], anchors: Iterable[tuple[torch.Tensor, str]]) -> None:
    """Raise StateError for an optimizer with the state of a whole table: rows have theirs in the store."""
    for anchor, name in anchors:
        for one in optimizers:
            for state in one.state.get(anchor, {}).values():
                if isinstance(state, torch.Tensor) and state.dim() and state.shape != anchor.shape:
                    raise StateError(
                        f"{type(one).__name__} has loaded state of shape {tuple(state.shape)} for rows of {name}, "
                        "whose state is in the store: leave it out of the state dict, or import the checkpoint with "
                        "its state (tiercache import)"
                    )


def check_unused(optimizers: Sequence[torch.optim.Optimizer], weights: Iterable[tuple[torch.Tensor, str]]) -> None:
    """Raise ValueError for an optimizer that has stepped a weight: its state would be lost."""
    for weight, name in weights:
        for one in optimizers:
            state = one.state.get(weight)
            if state and (float(state.get("step", 0)) > 0 or "momentum_buffer" in state):
                raise ValueError(
                    f"{type(one).__name__} has trained {name} already, and its state would be lost: convert the model "
                    "before its first step, or import the checkpoint with its state (tiercache import)"
                )


def _like_anchor(value: Any, weight: torch.Tensor, anchor: torch.Tensor) -> Any:
    """Return state of a weight that was never stepped, reshaped for its anchor."""
    if isinstance(value, torch.Tensor) and value.shape == weight.shape and value.numel():
        return torch.full_like(anchor, float(value.reshape(-1)[0]))
    return value


def check_defaults(objects: Iterable[object], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise StateError if rows have the default optimizer, but that of their model would train them otherwise."""
    modules: list[TableModule] = [one for one in table_modules(objects) if one.has_default_optimizer]
    for one in optimizers:
        for group in one.param_groups:
            present = {id(parameter) for parameter in group["params"]}
            for module in modules:
                if id(module.anchor) not in present:
                    continue
                name = module.features[0]
                table = module.table_specs[module.tables[0]]
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        same = row_optimizer(one, group, name) == table.optimizer
                except ValueError:
                    same = False
                if not same:
                    raise StateError(
                        f"rows of {name} step with {table.optimizer}, the default of tc.convert, but their model with "
                        f"{type(one).__name__}(lr={group['lr']}): choose the optimizer of rows, as in "
                        f"tc.convert(model, optimizer=tc.optim.Adagrad(learning_rate={float(group['lr']):g})), or pass "
                        "tc.convert the optimizer"
                    )
