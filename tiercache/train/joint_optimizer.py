"""JointOptimizer: steps dense parameters and rows."""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
import torch.optim.optimizer as optimizer_hooks
from torch.nn.parallel import DistributedDataParallel

from tiercache.errors import StateError
from tiercache.train.table_module import table_modules
from tiercache.train.torch_optimizers import check_defaults
from tiercache.values.compiled import not_compiled
from tiercache.values.torch_internals import is_profiled

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch.utils.hooks import RemovableHandle

    from tiercache.train.row_optimizer import RowOptimizer
    from tiercache.train.row_writes import RowHook


def state_without(optimizer: torch.optim.Optimizer, anchors: Collection[int]) -> dict[str, Any]:
    """Return its ``state_dict()`` without the parameters of ``anchors``, which are ids of objects."""
    state = optimizer.state_dict()
    numbers: dict[Any, int] = {}
    groups = []
    for group, kept in zip(state["param_groups"], _kept(optimizer, anchors), strict=True):
        others = [number for number, keep in zip(group["params"], kept, strict=True) if keep]
        numbers |= {number: len(numbers) + i for i, number in enumerate(others)}
        groups.append(group | {"params": [numbers[number] for number in others]})
    kept_state = {numbers[number]: value for number, value in state["state"].items() if number in numbers}
    return state | {"state": kept_state, "param_groups": groups}


def with_anchors(optimizer: torch.optim.Optimizer, anchors: Collection[int], state: dict[str, Any]) -> dict[str, Any]:
    """Return the state for ``optimizer`` to load: ``state``, from `state_without`, and its own state of anchors.

    Some optimizers, such as Adagrad before torch 2.13, create all state when they are constructed, and none later.
    """
    kept = _kept(optimizer, anchors)
    if [len(group["params"]) for group in state["param_groups"]] != [sum(flags) for flags in kept]:
        return state  # for other parameters: loading it raises
    last = max((number for group in state["param_groups"] for number in group["params"]), default=-1)
    present = optimizer.state_dict()
    groups, all_state = [], dict(state["state"])
    for group, current, flags in zip(state["param_groups"], present["param_groups"], kept, strict=True):
        others = iter(group["params"])
        numbers = []
        for number, keep in zip(current["params"], flags, strict=True):
            last += not keep
            numbers.append(next(others) if keep else last)
            if not keep and number in present["state"]:
                all_state[last] = present["state"][number]
        groups.append(group | {"params": numbers})
    return state | {"state": all_state, "param_groups": groups}


def _kept(optimizer: torch.optim.Optimizer, anchors: Collection[int]) -> list[list[bool]]:
    return [[id(one) not in anchors for one in group["params"]] for group in optimizer.param_groups]


def unwrapped_objects(objects: Mapping[str, Any], own: JointOptimizer) -> dict[str, Any]:
    """Return objects without their wrappers and ``own``, and the dense optimizer of another cache's optimizer."""
    found = {}
    for name, value in objects.items():
        inner = unwrapped(value)
        if isinstance(inner, JointOptimizer):
            if inner.rows is own.rows:
                continue
            if len(inner.dense) != 1:
                raise StateError(
                    f"{name} is the optimizer of another cache, with {len(inner.dense)} dense optimizers: pass these "
                    "to the cache (cache.optimizer.dense)"
                )
            inner = inner.dense[0]
        found[name] = inner
    return found


def unwrapped(value: Any) -> Any:
    """Return the object inside a DistributedDataParallel, a compiled module or a wrapper of Accelerate's."""
    while True:
        if isinstance(value, DistributedDataParallel):
            inner = value.module
        elif type(value).__module__.startswith("accelerate."):
            inner = getattr(value, "optimizer" if isinstance(value, torch.optim.Optimizer) else "scheduler", None)
        else:
            inner = getattr(value, "_orig_mod", None)
        if inner is None:
            return value
        value = inner


def named_objects(**objects: Any) -> dict[str, Any]:
    """Return objects by their registered names: "model", or "model0", "model1" of a list."""
    found: dict[str, Any] = {}
    for name, value in objects.items():
        if isinstance(value, list | tuple):
            found |= {f"{name}{i}": one for i, one in enumerate(value)}
        elif value is not None:
            found[name] = value
    return found


class JointOptimizer(torch.optim.Optimizer):
    """Steps dense parameters and rows together; a cache has it as ``cache.optimizer``.

    ``param_groups`` are the groups of the cache's dense optimizers, then one for each table. They are created when they
    are read: the group of a table has the pending gradients of its rows as parameters, so schedulers, `GradScaler` and
    clipping see all of them. A schedule multiplies the learning rate of each table as it multiplies those of dense
    parameters; one that sets rates, as OneCycleLR does, takes a list with one for each group. Nothing is copied: a
    state loaded into a dense optimizer takes effect.

    Stepping a dense optimizer alone raises StateError while its rows have gradients. ``part(optimizer)`` steps one of
    several, with the rows of the modules whose parameters it has: for loops that alternate.
    """

    def __init__(self, rows: RowOptimizer, dense: torch.optim.Optimizer | None = None) -> None:
        """dense: the only one to step, with its rows; None: all."""
        self.rows = rows
        """The optimizer of rows."""
        self._dense, self._parts, self._hooks = dense, dict[int, JointOptimizer](), list[Any]()
        super().__init__([{"params": []}], {})

    def bind(self, step: Callable[[torch.optim.Optimizer | None], None]) -> None:
        """Make steps call ``step``, a method of the cache; neither this nor its schedulers keep the cache alive."""
        method = weakref.WeakMethod(step)

        def run_step(dense: torch.optim.Optimizer | None) -> None:
            found = method()
            if found is None:
                raise StateError("the cache of this optimizer is gone: keep a reference to it during the loop")
            found(dense)

        self.rows.run_step = run_step

    def follow(self, objects: Collection[Any]) -> None:
        """Step the optimizers among ``objects``, and record the anchors of the modules among them."""
        rows = self.rows
        checked = weakref.ref(rows)

        def check_alone(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if (found := checked()) is not None and not found.is_stepping:
                found.check_alone(optimizer)

        for value in objects:
            if isinstance(value, torch.optim.Optimizer) and not any(value is one for one in rows.dense):
                rows.dense.append(value)
                rows.anchors.is_stepped = True
                self._hooks.append(value.register_step_pre_hook(check_alone))
            for module in table_modules([value]):
                if module.tables:
                    rows.anchors.of(module)
                if module.max_norm is not None:
                    rows.check_one_rank("max_norm")
        modules = [value for value in objects if isinstance(value, torch.nn.Module)]
        anchors = {id(module.anchor) for module in table_modules(modules)}
        others = (one for module in modules for one in module.parameters() if id(one) not in anchors)
        if anchors and not any(one.requires_grad for one in others):
            rows.anchors.is_stepped = True  # there is nothing for another optimizer to step
        check_defaults([*objects, *rows.anchors.readers], rows.dense)

    def register_row_hook(self, table: str, hook: RowHook) -> RemovableHandle:
        """Call ``hook`` after each step of ``table`` with the updated vectors, and write back those that it returns.

        For constraints, such as TransE's ``lambda vectors: functional.normalize(vectors, dim=1)``. The hook gets
        float32 (rows, dim) on the device of the rows, each row once, and returns the same shape; optimizer state stays.
        16-bit vectors are rounded to nearest. Hooks are not committed: register them in each run, before training. The
        handle's ``remove()`` ends it. Raises ValueError for an unknown table, StateError with several ranks.
        """
        self.rows.check_one_rank("a row hook")
        if table not in (known := [group["table"] for group in self.rows.groups_of(None)]):
            raise ValueError(f"a row hook is for the unknown table {table!r}: the cache has {', '.join(known)}")
        return self.rows.hooks.register(table, hook)

    def close(self) -> None:
        """Remove the hooks of optimizers and anchors."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.rows.anchors.close()

    @property
    def dense(self) -> list[torch.optim.Optimizer]:
        """The optimizers of dense parameters."""
        return self.rows.dense if self._dense is None else [self._dense]

    def part(self, optimizer: torch.optim.Optimizer) -> JointOptimizer:
        """Return a view of one dense optimizer with the rows of the modules whose parameters it has.

        Raises StateError for an optimizer that the cache does not have.
        """
        if not any(optimizer is one for one in self.dense):
            raise StateError(
                f"the cache does not have this {type(optimizer).__name__}: pass it every optimizer of its model "
                "(optimizer=[...], or register())"
            )
        return self._parts.setdefault(id(optimizer), JointOptimizer(self.rows, optimizer))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The current groups of dense parameters and tables."""
        return [group for one in self.dense for group in one.param_groups] + self.rows.groups_of(self._dense)

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Ignore what torch's constructor sets."""

    @property
    def state(self) -> defaultdict[Any, Any]:
        """The state of dense parameters, by parameter; the state of rows is in the store."""
        return defaultdict(dict, {parameter: value for one in self.dense for parameter, value in one.state.items()})

    @state.setter
    def state(self, value: object) -> None:
        """Ignore what torch's constructor sets."""

    def __getstate__(self) -> Any:
        """Raise TypeError: a copy would step the rows of no cache."""
        raise TypeError(
            "cache.optimizer cannot be copied or pickled, because it steps the rows of its cache: copy "
            "cache.optimizer.state_dict()"
        )

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings that all groups have, for schedulers of momentum."""
        first, *others = self.param_groups or [{}]
        return {name: value for name, value in first.items() if all(name in group for group in others)}

    @defaults.setter
    def defaults(self, value: object) -> None:
        """Ignore what torch's constructor sets."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the only dense optimizer."""
        if not param_group["params"]:
            return  # called by torch's constructor
        if len(self.dense) != 1:
            raise StateError(
                f"parameters were added to cache.optimizer, which has {len(self.dense)} dense optimizers: add them to "
                "one of those"
            )
        self.dense[0].add_param_group(param_group)

    @not_compiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the dense parameters, then the rows that have gradients; returns the result of ``closure``.

        Raises StateError for LBFGS, which evaluates its closure several times in a step.
        """
        has_hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or _HOOKS[0] or _HOOKS[1]
        if has_hooks or is_profiled():
            return _step_as_torch(self, closure)
        return self._step(closure)

    step.hooked = True  # type: ignore[attr-defined] # else torch wraps it in a record for profilers, which takes 20 us

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss, dense = None, self.dense
        for one in dense:
            if type(one) is torch.optim.LBFGS:
                raise StateError(
                    "LBFGS evaluates the loss several times in a step and moves parameters in between, but rows move "
                    "only once, at its end: use another optimizer for the parameters of a model with rows"
                )
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rows = self.rows
        for anchor in rows.anchors:
            anchor.check_parameter(steps=True)
            anchor.writes.forget()
        rows.settings_check.step(rows)
        rows.is_stepping = True
        try:
            for one in dense:
                if type(one) is torch.optim.SparseAdam:
                    self._step_sparse(one)
                else:
                    one.step()
        finally:
            rows.is_stepping = False
        rows.run_step(self._dense)
        return loss

    def _step_sparse(self, optimizer: torch.optim.Optimizer) -> None:
        """Step an optimizer that accepts only sparse gradients; anchors have dense ones, so they are hidden from it."""
        anchors = {id(one.parameter) for one in self.rows.anchors}
        every = [one for group in optimizer.param_groups for one in group["params"] if id(one) in anchors]
        hidden = [(one, one.grad) for one in every]
        try:
            for anchor in every:
                anchor.grad = None
            optimizer.step()
        finally:
            for anchor, grad in hidden:
                anchor.grad = grad

    @not_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the pending gradients of dense parameters and of rows."""
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
        names = {group["table"] for group in self.rows.groups_of(self._dense)}
        tables = [group | {"params": []} for group in self.rows.state_dict()["param_groups"] if group["table"] in names]
        return {"state": state, "param_groups": groups + tables}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of ``state_dict``. Raises StateError if the tables differ, ValueError as torch does."""
        groups, first = [group for group in state_dict["param_groups"] if "table" not in group], 0
        for one in self.dense:
            own, groups = groups[: len(one.param_groups)], groups[len(one.param_groups) :]
            count = sum(len(group["params"]) for group in own)
            state = {n - first: v for n, v in state_dict["state"].items() if first <= n < first + count}
            moved = [group | {"params": [n - first for n in group["params"]]} for group in own]
            one.load_state_dict({"state": state, "param_groups": moved})
            first += count
        if groups:
            raise ValueError(f"the state has {len(groups)} more parameter groups than the optimizers of this cache")
        tables = [group for group in state_dict["param_groups"] if "table" in group]
        self.rows.load_state_dict({"state": {}, "param_groups": tables}, dense=self._dense)

    def __repr__(self) -> str:
        tables = ", ".join(group["table"] for group in self.rows.groups_of(self._dense))
        return f"JointOptimizer({', '.join(type(one).__name__ for one in self.dense)}; rows of {tables})"


_step_as_torch = torch.optim.Optimizer.profile_hook_step(JointOptimizer._step)
"""Runs hooks of steps, and names the step for profilers."""
_HOOKS = optimizer_hooks._global_optimizer_pre_hooks, optimizer_hooks._global_optimizer_post_hooks
"""Hooks registered for all optimizers."""


class ScheduleCheck:
    """Compares the learning rates of a cache's dense optimizers and of its rows. Warns once."""

    def __init__(self, joint: JointOptimizer) -> None:
        self._joint = joint
        self._first: dict[int, list[float]] = {}  # the rates of each optimizer when the loop began, by its id
        self._is_warned = False

    def begin(self) -> None:
        """Record the rates at the start of a loop, and warn if a scheduler changes only some of them."""
        self._first.clear()
        self._joint.rows.settings_check.begin(self._joint.rows)
        self.check()

    def check(self) -> None:
        """Warn if dense rates have a scheduler, or changed since the loop began, but rates of rows did not."""
        rows, *dense = [self._follows_schedule(one) for one in (self._joint.rows, *self._joint.dense)]
        joint = (self._joint, *self._joint._parts.values())
        has_scheduler = any(hasattr(one.step, "_wrapped_by_lr_sched") for one in joint)
        if any(dense) and not rows and not has_scheduler and not self._is_warned:
            self._is_warned = True
            warnings.warn(
                "the learning rate of an optimizer of this cache follows a schedule, but rows keep theirs: create the "
                "scheduler for cache.optimizer, which has the groups of that optimizer and of the tables",
                stacklevel=4,
            )

    def _follows_schedule(self, optimizer: torch.optim.Optimizer) -> bool:
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        first = self._first.setdefault(id(optimizer), rates)
        changed = any(now != then for now, then in zip(rates, first, strict=False))  # groups may be added later
        return changed or hasattr(optimizer.step, "_wrapped_by_lr_sched")
