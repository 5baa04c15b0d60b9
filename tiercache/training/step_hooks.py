"""Rows step when an optimizer that the cache was given does."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tiercache.errors import StateError
from tiercache.training.scaled_loss import note_unscaled
from tiercache.training.table_module import table_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tiercache.training.stepped_cache import SteppedCache


class StepHooks:
    """Steps the optimizer of a cache's rows behind the optimizers that are followed.

    Neither these nor a scheduler of the rows' optimizer keep the cache alive.
    """

    def __init__(self, cache: SteppedCache) -> None:
        step, discard = weakref.WeakMethod(cache._step), weakref.WeakMethod(cache._discard)

        def call_step(optimizer: torch.optim.Optimizer | None) -> None:
            found = step()
            if found is None:
                raise StateError("the cache of this optimizer is gone: keep the cache as long as its loop")
            found(optimizer)

        def call_discard() -> None:
            found = discard()
            if found is not None:
                found()

        cache.optimizer.bind(call_step, call_discard)
        note_unscaled(cache.optimizer, cache.optimizer.tracers.note_attempt)
        self._rows = weakref.ref(cache.optimizer)
        self._hooks: list[Any] = []

    def follow(self, objects: Iterable[Any]) -> None:
        """Follow the optimizers among ``objects``; the rows' optimizer gets the handles of the modules among them."""
        rows = self._rows()
        assert rows is not None
        for value in objects:
            if isinstance(value, torch.optim.Optimizer):
                self._hooks.append(value.register_step_post_hook(self._call))
                self._hooks.append(_ZeroGradHook(value, weakref.WeakMethod(rows.tracers.note_drop)))
                note_unscaled(value, rows.tracers.note_attempt)
                rows.tracers.follow(value)
            for part in table_modules([value]):
                if part.tables:
                    rows.own(part.handle, part.tables)

    def _call(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        rows = self._rows()
        if rows is not None:
            rows.step(optimizer=optimizer)

    def remove(self) -> None:
        """Follow none any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        rows = self._rows()
        if rows is not None:
            rows.tracers.close()


class _ZeroGradHook:
    """Calls a function before ``zero_grad`` of an optimizer, for which torch has no hook."""

    def __init__(self, optimizer: torch.optim.Optimizer, call: weakref.WeakMethod[Callable[[], None]]) -> None:
        of_class, mine, found = type(optimizer).zero_grad, vars(optimizer).get("zero_grad"), weakref.ref(optimizer)
        self._optimizer, self._mine = found, mine

        def zero_grad(*args: Any, **named: Any) -> None:
            if (note := call()) is not None:
                note()
            if mine is not None:
                mine(*args, **named)
            elif (followed := found()) is not None:
                of_class(followed, *args, **named)

        self._hook = zero_grad
        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def remove(self) -> None:
        """Call it no more."""
        optimizer = self._optimizer()
        if optimizer is None or vars(optimizer).get("zero_grad") is not self._hook:
            return
        if self._mine is None:
            del optimizer.zero_grad
        else:
            optimizer.zero_grad = self._mine  # type: ignore[method-assign]


def unwrapped(value: Any) -> Any:
    """Return what a DistributedDataParallel, a compiled module or one of Accelerate's wrappers has; else the value."""
    while (inner := _inside(value)) is not None:
        value = inner
    return value


def _inside(value: Any) -> Any:
    if isinstance(value, DistributedDataParallel):
        return value.module
    if type(value).__module__.startswith("accelerate."):
        return (
            getattr(value, "optimizer", None)
            if isinstance(value, torch.optim.Optimizer)
            else getattr(value, "scheduler", None)
        )
    return getattr(value, "_orig_mod", None)


def named_objects(**given: Any) -> dict[str, Any]:
    """Return objects by the names they are registered with: "model", or "model0", "model1" where several were given."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, list | tuple):
            found |= {f"{name}{i}": one for i, one in enumerate(value)}
        elif value is not None:
            found[name] = value
    return found
