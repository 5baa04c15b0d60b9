"""The state of an optimizer without that of anchors: their values mean nothing, so commits do not keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch


def state_without(optimizer: torch.optim.Optimizer, anchors: Collection[int]) -> dict[str, Any]:
    """Return its ``state_dict()`` as if it had no parameter of ``anchors``, which are ids of objects."""
    state = optimizer.state_dict()
    numbers: dict[Any, int] = {}
    groups = []
    for group, kept in zip(state["param_groups"], _kept(optimizer, anchors), strict=True):
        mine = [number for number, keep in zip(group["params"], kept, strict=True) if keep]
        numbers |= {number: len(numbers) + i for i, number in enumerate(mine)}
        groups.append(group | {"params": [numbers[number] for number in mine]})
    kept_state = {numbers[number]: value for number, value in state["state"].items() if number in numbers}
    return state | {"state": kept_state, "param_groups": groups}


def with_anchors(optimizer: torch.optim.Optimizer, anchors: Collection[int], state: dict[str, Any]) -> dict[str, Any]:
    """Return what ``optimizer`` loads of a ``state`` that `state_without` returned; anchors keep what they have.

    Some optimizers, such as Adagrad before torch 2.13, create all state when they are constructed, and none later.
    """
    kept = _kept(optimizer, anchors)
    if [len(group["params"]) for group in state["param_groups"]] != [sum(some) for some in kept]:
        return state  # of other parameters: loading it says so
    last = max((number for group in state["param_groups"] for number in group["params"]), default=-1)
    present = optimizer.state_dict()
    groups, all_state = [], dict(state["state"])
    for group, now, some in zip(state["param_groups"], present["param_groups"], kept, strict=True):
        mine = iter(group["params"])
        numbers = []
        for number, keep in zip(now["params"], some, strict=True):
            last += not keep
            numbers.append(next(mine) if keep else last)
            if not keep and number in present["state"]:
                all_state[last] = present["state"][number]
        groups.append(group | {"params": numbers})
    return state | {"state": all_state, "param_groups": groups}


def _kept(optimizer: torch.optim.Optimizer, anchors: Collection[int]) -> list[list[bool]]:
    return [[id(one) not in anchors for one in group["params"]] for group in optimizer.param_groups]
