"""JointOptimizer: steps dense parameters and rows."""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from tiercache.errors import StateError
from tiercache.train.table_module import table_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from tiercache.rows.backends.base import Backend
    from tiercache.store.table import Group
    from tiercache.train.arrival import Arrival
    from tiercache.train.cache import TierCache
    from tiercache.train.row_optimizer import RowOptimizer
    from tiercache.values.lookups import SavedGradient


_EPS = 1e-6
"""As torch.nn.utils.clip_grad_norm_ adds to the norm."""


def squared_norm(
    groups: Sequence[Group], pending_G: Sequence[Sequence[SavedGradient]], backend: Backend
) -> torch.Tensor:
    """Return the sum of squares of row gradients, float64 0-dim: duplicates of a row are added before."""
    total = torch.zeros((), dtype=torch.float64, device=backend.device)
    for group, pending in zip(groups, pending_G, strict=True):
        if not pending:
            continue
        slots = [backend.tensor(one.slots) for one in pending]
        rows, number = torch.unique(torch.cat(slots), return_inverse=True)
        numbers = torch.split(number.to(torch.int32), [one.numel() for one in slots])
        named = [
            replace(one, slots=backend.array(mine), sorted=None) for one, mine in zip(pending, numbers, strict=True)
        ]
        sums = backend.empty((rows.numel(), group.dim), np.float32)
        backend.sum(named, 1.0, sums)
        total += backend.tensor(sums).double().square().sum()
    return total


def clip(
    parameters: Iterable[torch.Tensor], row_squares: torch.Tensor, arrivals: Sequence[Arrival], max_norm: float,
    *, error_if_nonfinite: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Multiply the gradients of ``parameters``, and those of outputs in ``arrivals``, so that their norm is one given.

    parameters: without anchors. row_squares: of the rows that the gradients of ``arrivals`` are of. Returns the norm
    before, float32 0-dim; gradients of a smaller norm stay as they are. As `torch.nn.utils.clip_grad_norm_` with the
    2-norm. Raises RuntimeError for a norm that is not finite where that is asked for.
    """
    grads = [one.grad.detach() for one in parameters if one.grad is not None]
    squares = [_squares(grad).to(row_squares.device) for grad in grads]
    norm = torch.stack([row_squares, *squares]).sum().sqrt().float()
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of gradients is {float(norm)}, and cannot be clipped: skip this step, or give "
            "error_if_nonfinite=False"
        )
    factor = (max_norm / (norm + _EPS)).clamp(max=1.0)
    grads += [one.gradient for one in arrivals if one.gradient is not None]
    for grad in grads:
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        local.mul_(factor.to(local.device))
    return norm


def _squares(grad: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a gradient, of a DTensor that of all its parts."""
    found = torch.linalg.vector_norm(grad, dtype=torch.float64)
    whole: torch.Tensor = found.full_tensor() if hasattr(found, "full_tensor") else found
    return whole.square()


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


class RateWatch:
    """Compares the learning rates of a cache's dense optimizers and of its rows. Warns once."""

    def __init__(self, rows: RowOptimizer) -> None:
        self._rows = rows
        self._first: dict[int, list[float]] = {}
        """By the id of an optimizer, the rates that it began with."""
        self._is_warned = False

    def begin(self) -> None:
        """Note the rates that a loop begins with, and warn if a scheduler changes some of them."""
        self._first.clear()
        self.check()

    def check(self) -> None:
        """Warn if dense rates have a scheduler, or changed since the loop began, and those of rows did not."""
        rows, *dense = [self._follows_schedule(one) for one in (self._rows, *self._rows.dense)]
        rows |= self._rows.joint.has_scheduler
        if any(dense) and not rows and not self._is_warned:
            self._is_warned = True
            warnings.warn(
                "the learning rate of an optimizer of this cache follows a schedule, and rows keep theirs: make the "
                "scheduler of cache.optimizer, whose groups are those of that optimizer and of the tables",
                stacklevel=4,
            )

    def _follows_schedule(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer has a scheduler, or other rates than it began with."""
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        first = self._first.setdefault(id(optimizer), rates)
        changed = any(now != then for now, then in zip(rates, first, strict=False))  # groups may come later
        return changed or hasattr(optimizer.step, "_wrapped_by_lr_sched")


class JointOptimizer(torch.optim.Optimizer):
    """Steps dense parameters and rows together; a cache has it as ``cache.optimizer``.

    ``param_groups`` are those of the dense optimizers that the cache was given, then one for each table. They are made
    when they are read: the group of a table has the gradients that wait for its rows as parameters, so schedulers,
    `GradScaler` and clipping see all of them. A schedule multiplies the learning rate of each table as it multiplies
    those of dense parameters; one that sets rates, as OneCycleLR does, takes a list with one for each group. Nothing is
    copied: what is loaded into a dense optimizer counts.

    Stepping a dense optimizer alone raises StateError while its rows have gradients. ``part(optimizer)`` steps one of
    several, with the rows of the modules whose parameters it has: for loops that alternate.
    """

    def __init__(self, rows: RowOptimizer, dense: torch.optim.Optimizer | None = None) -> None:
        """dense: the one that this steps, with its rows; None: all."""
        self.rows = rows
        """The optimizer of rows."""
        self._dense, self._parts = dense, dict[int, JointOptimizer]()
        super().__init__([{"params": []}], {})

    @property
    def dense(self) -> list[torch.optim.Optimizer]:
        """The optimizers of dense parameters."""
        return self.rows.dense if self._dense is None else [self._dense]

    def part(self, optimizer: torch.optim.Optimizer) -> JointOptimizer:
        """Return what steps one of the dense optimizers, with the rows of the modules whose parameters it has.

        Raises StateError for an optimizer that the cache was not given.
        """
        if not any(optimizer is one for one in self.dense):
            raise StateError(
                f"the cache was not given this {type(optimizer).__name__}: give it every optimizer of its model "
                "(optimizer=[...], or register())"
            )
        return self._parts.setdefault(id(optimizer), JointOptimizer(self.rows, optimizer))

    @property
    def has_scheduler(self) -> bool:
        """True if a scheduler of torch changes the rates of all groups or of a part."""
        every = (self, *self._parts.values())
        return any(hasattr(one.step, "_wrapped_by_lr_sched") for one in every)

    # -- as torch's optimizers --------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all, as they are now."""
        return [group for one in self.dense for group in one.param_groups] + self.rows.groups_of(self._dense)

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Ignore what torch's constructor sets."""

    @property
    def state(self) -> defaultdict[Any, Any]:
        """The state of dense parameters, by parameter; that of rows is in the store."""
        return defaultdict(dict, {parameter: value for one in self.dense for parameter, value in one.state.items()})

    @state.setter
    def state(self, value: object) -> None:
        """Ignore what torch's constructor sets."""

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings that every group has. Schedules of momentum look here whether all groups have one."""
        first, *others = self.param_groups or [{}]
        return {name: value for name, value in first.items() if all(name in group for group in others)}

    @defaults.setter
    def defaults(self, value: object) -> None:
        """Ignore what torch's constructor sets."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the only dense optimizer."""
        if not param_group["params"]:
            return  # of torch's constructor
        if len(self.dense) != 1:
            raise StateError(
                f"parameters were added to cache.optimizer, which has {len(self.dense)} dense optimizers: add them to "
                "one of those"
            )
        self.dense[0].add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the dense parameters, then the rows that have gradients; returns what ``closure`` returns.

        Raises StateError for LBFGS, which evaluates its closure several times in a step.
        """
        loss = None
        for one in self.dense:
            if type(one) is torch.optim.LBFGS:
                raise StateError(
                    "LBFGS evaluates the loss several times in a step and moves parameters in between, and rows move "
                    "once, at its end: use another optimizer for the parameters of a model with rows"
                )
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.rows.step_behind(self.dense, self._dense)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that have arrived, of dense parameters and of rows."""
        for one in self.dense:
            one.zero_grad(set_to_none)
        self.rows.zero_grad(dense=self._dense)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of dense parameters and the settings of all groups. The state of rows is in the store."""
        groups, state, first = list[dict[str, Any]](), dict[Any, Any](), 0
        for one in self.dense:
            kept = one.state_dict()
            groups += [group | {"params": [first + n for n in group["params"]]} for group in kept["param_groups"]]
            state |= {first + n if isinstance(n, int) else n: value for n, value in kept["state"].items()}
            first += sum(len(group["params"]) for group in kept["param_groups"])
        mine = {group["table"] for group in self.rows.groups_of(self._dense)}
        tables = [group | {"params": []} for group in self.rows.state_dict()["param_groups"] if group["table"] in mine]
        return {"state": state, "param_groups": groups + tables}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned. Raises StateError if the tables differ, ValueError as torch does."""
        groups, first = [group for group in state_dict["param_groups"] if "table" not in group], 0
        for one in self.dense:
            mine, groups = groups[: len(one.param_groups)], groups[len(one.param_groups) :]
            count = sum(len(group["params"]) for group in mine)
            state = {n - first: v for n, v in state_dict["state"].items() if first <= n < first + count}
            moved = [group | {"params": [n - first for n in group["params"]]} for group in mine]
            one.load_state_dict({"state": state, "param_groups": moved})
            first += count
        if groups:
            raise ValueError(f"the state has {len(groups)} groups of parameters more than the optimizers of this cache")
        tables = [group for group in state_dict["param_groups"] if "table" in group]
        self.rows.load_state_dict({"state": {}, "param_groups": tables}, dense=self._dense)

    def __repr__(self) -> str:
        tables = ", ".join(group["table"] for group in self.rows.groups_of(self._dense))
        return f"JointOptimizer({', '.join(type(one).__name__ for one in self.dense)}; rows of {tables})"
