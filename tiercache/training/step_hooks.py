"""Rows step when an optimizer that the cache was given does."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tiercache.errors import StateError
from tiercache.training.joint_optimizer import JointOptimizer
from tiercache.training.table_module import table_modules

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tiercache.training.cache import TierCache
    from tiercache.training.row_optimizer import RowOptimizer


class StepHooks:
    """Has the rows of a cache step with the optimizers that it was given.

    Neither these nor a scheduler of the cache's optimizer keep the cache alive.
    """

    def __init__(self, cache: TierCache, rows: RowOptimizer) -> None:
        step = weakref.WeakMethod(cache._step)

        def call_step(optimizer: torch.optim.Optimizer | None) -> None:
            found = step()
            if found is None:
                raise StateError("the cache of this optimizer is gone: keep the cache as long as its loop")
            found(optimizer)

        rows.bind(call_step)
        self._rows = weakref.ref(rows)
        self._hooks: list[Any] = []

    def follow(self, objects: Iterable[Any]) -> None:
        """Step rows with the optimizers among ``objects``, and note the anchors of the modules among them."""
        rows = self._rows()
        assert rows is not None
        for value in objects:
            if isinstance(value, torch.optim.Optimizer) and not any(value is one for one in rows.dense):
                self._hooks.append(rows.follow(value))
            for part in table_modules([value]):
                if part.tables:
                    rows.anchors.of(part)

    def remove(self) -> None:
        """Follow none any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        rows = self._rows()
        if rows is not None:
            rows.anchors.close()


def unwrapped_objects(objects: Mapping[str, Any], own: JointOptimizer) -> dict[str, Any]:
    """Return what DistributedDataParallel, compiled modules, Accelerate's wrappers and optimizers of caches have.

    own: the optimizer of the cache, which commits have anyway. Raises StateError for one of another cache with several
    dense optimizers.
    """
    found = {}
    for name, value in objects.items():
        inner = unwrapped(value)
        if isinstance(inner, JointOptimizer):
            if inner.rows is own.rows:
                continue
            if len(inner.dense) != 1:
                raise StateError(
                    f"{name} is the optimizer of another cache, with {len(inner.dense)} dense optimizers: give the "
                    "cache these (cache.optimizer.dense)"
                )
            inner = inner.dense[0]
        found[name] = inner
    return found


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
