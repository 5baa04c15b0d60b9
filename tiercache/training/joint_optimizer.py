"""JointOptimizer: steps dense parameters and rows."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from tiercache.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiercache.training.row_optimizer import RowOptimizer


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
