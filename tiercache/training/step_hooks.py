"""Rows step when a tracked optimizer does."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from tiercache.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable


class StepHooks:
    """Calls ``step`` behind each step of the optimizer that is followed: at most one."""

    def __init__(self, step: Callable[[], None]) -> None:
        """step: a method of whoever has this; an optimizer does not keep that one alive."""
        self._step = weakref.WeakMethod(step)
        self._hooks: list[Any] = []

    def check(self, objects: dict[str, Any]) -> None:
        """Raise StateError where ``objects`` would make it two optimizers."""
        if len(_optimizers(objects)) + len(self._hooks) > 1:
            raise StateError(
                "register() was given two optimizers, and rows step when the optimizer does: give one, and keep "
                "the other's state in an object of your own"
            )

    def follow(self, objects: dict[str, Any]) -> bool:
        """Follow the optimizers among ``objects``; returns whether any is followed now."""
        self._hooks += [found.register_step_post_hook(self._call) for found in _optimizers(objects)]
        return bool(self._hooks)

    def _call(self, *_: object) -> None:
        step = self._step()
        if step is not None:
            step()

    def remove(self) -> None:
        """Follow none any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def named_objects(**given: Any) -> dict[str, Any]:
    """Return objects by the names they are registered with: "model", or "model0", "model1" where several were given."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, list | tuple):
            found |= {f"{name}{i}": one for i, one in enumerate(value)}
        elif value is not None:
            found[name] = value
    return found


def _optimizers(objects: dict[str, Any]) -> list[torch.optim.Optimizer]:
    return [value for value in objects.values() if isinstance(value, torch.optim.Optimizer)]
