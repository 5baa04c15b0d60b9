"""RowOptimizer: the optimizer of the rows of all tables, as torch's optimizers are of dense parameters."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from tiercache.backends.jagged import OptimizerStep
from tiercache.errors import StateError
from tiercache.store.table import Adam, Group
from tiercache.training.clipping import clip, squared_norm
from tiercache.training.row_gradients import RowGradients, ended_unstepped
from tiercache.training.tracers import Tracers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch import nn

    from tiercache.backends.base import Backend
    from tiercache.backends.jagged import SavedGradient
    from tiercache.store.optimizer import Optimizer
    from tiercache.store.table import Table
    from tiercache.tiers.rows import GroupRows
    from tiercache.training.tracers import Mark, Tracer


class RowOptimizer(torch.optim.Optimizer):
    """The optimizer of rows: each table is updated by the optimizer in its specification.

    ``param_groups`` are the tables, with ``lr``, ``weight_decay`` (L2, for the rows that a step touches) and, if the
    table's optimizer has them, ``eps`` and ``betas``. They are read at each step, so the schedulers of
    `torch.optim.lr_scheduler` work. Tables with the same row layout share them. All gradients of a row since the last
    step are summed, in the order of the backward calls, then of features and samples; then the row is updated once.

    Rows step after the optimizers that the cache was given, or by ``step()`` of this one.
    """

    def __init__(self, groups: tuple[Group, ...], backend: Backend) -> None:
        self._groups, self._backend = groups, backend
        self.tracers = Tracers()
        self.gradients = RowGradients(len(groups), self.tracers)
        self.steps = 0
        """Steps applied so far."""
        self._now: dict[int, tuple[tuple[Any, ...], Group]] = {}
        """Groups as of the step before, by number, and the settings that they were made of."""
        self._step: Callable[[torch.optim.Optimizer | None], None] | None = None
        self._discard: Callable[[], None] = self.discard
        tables = [{"params": [], **_settings(table)} for group in groups for table in group.tables]
        all_adam = all("betas" in table for table in tables)
        super().__init__(tables, {"betas": (0.9, 0.999)} if all_adam else {})
        self._of = {group["table"]: group for group in self.param_groups}

    # -- as torch's optimizers ----------------------------------------------------------------------------

    def bind(self, step: Callable[[torch.optim.Optimizer | None], None], discard: Callable[[], None]) -> None:
        """Let ``step()`` and ``zero_grad()`` call these; whoever has this is not kept alive by a scheduler on it."""
        self._step, self._discard = step, discard

    def own(self, handle: nn.Parameter, tables: Sequence[str]) -> None:
        """Take the handle of a module that looks up ``tables`` among its parameters: those of the first table."""
        self.tracers.of(handle, tables)
        if not any(handle is other for group in self.param_groups for other in group["params"]):
            self._of[tables[0]]["params"].append(handle)

    def step(self, closure: Callable[[], Any] | None = None, *, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Update the rows that have gradients. Gradients that were dropped since backward are not applied.

        ``optimizer``: update only the tables that step with it; the cache passes it after each of its steps.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._step is None:
            raise StateError("this optimizer belongs to no cache: step the one that a cache has as cache.optimizer")
        self._step(optimizer)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all rows."""
        self.tracers.note_drop()
        super().zero_grad(set_to_none)
        self._discard()

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of all tables. The state of rows is in the store."""
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]
        return {"state": {}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the settings of all tables. Raises StateError if the tables differ."""
        stored, mine = [group.get("table") for group in state_dict["param_groups"]], [*self._of]
        if sorted(stored, key=str) != sorted(mine):
            raise StateError(f"the state is of tables {stored} and the cache has {mine}: use the same tables")
        for group in state_dict["param_groups"]:
            self._of[group["table"]].update(group)

    # -- for the cache ------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether a backward was not stepped yet."""
        return self.gradients.is_pending

    def check_stepped(self, pass_name: str) -> None:
        """Raise StateError where gradients are pending though ``pass_name`` ends."""
        if self.pending:
            raise StateError(f"{pass_name} {ended_unstepped(len(self.gradients.unstepped))}")
        self.gradients.leave(pass_name)

    def discard(self) -> None:
        """Drop the pending gradients."""
        self.gradients.clear()

    def begin_step(self, marks: Iterable[Mark], optimizer: torch.optim.Optimizer | None) -> dict[Tracer, float]:
        """Return what each module's gradients are multiplied by in the step of ``optimizer``; None: of all tables."""
        factors = self.tracers.factors(marks, optimizer)
        self.tracers.note_step(applied=any(factors.values()) or any(self.gradients.pending))
        return factors

    @staticmethod
    def stepped(factors: Mapping[Tracer, float]) -> set[str]:
        """Return the tables that a step updates: none without gradients, or whose gradients were dropped."""
        return {table for tracer, factor in factors.items() if factor for table in tracer.reached}

    def count_step(self, tables: Collection[str]) -> None:
        """Count a step of ``tables``, of which some rank has gradients; one of none is no step."""
        self.steps += bool(tables)
        for table in tables:
            self._of[table]["step"] += 1

    def apply(self, rows: Sequence[GroupRows], factors: Collection[Tracer] = ()) -> None:
        """Update ``rows`` by the pending gradients and drop them, and those of the handles of ``factors``."""
        due: list[OptimizerStep] = []
        for g, (mine, pending) in enumerate(zip(rows, self.gradients.pending, strict=True)):
            if pending:
                settings = self._shared(g)
                group, rate = self._with(g, settings), float(settings["lr"])
                parts = self._by_number(g, pending).items()
                due += [OptimizerStep(group, mine, saved, rate, number) for number, saved in parts]
        if due:
            self._backend.step(due)
        self.gradients.clear_settled()
        for tracer in factors:
            tracer.clear()

    def step_rows(self, rows: Sequence[GroupRows], optimizer: torch.optim.Optimizer | None) -> None:
        """Take the step of ``optimizer``, or of all tables: `begin_step` and `apply`."""
        factors = self.begin_step(self.gradients.marks, optimizer)
        self.count_step(self.stepped(factors))
        self.gradients.settle(factors)
        self.apply(rows, factors)

    def squared_norm(self, gradients_G: Sequence[Sequence[SavedGradient]]) -> torch.Tensor:
        """Return the sum of squares of gradients of rows, float64 0-dim."""
        return squared_norm(self._groups, gradients_G, self._backend)

    def clip(
        self, max_norm: float, optimizer: torch.optim.Optimizer | None, factors: Mapping[Tracer, float],
        row_squares: torch.Tensor, *, error_if_nonfinite: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Clip the gradients of ``optimizer``, or of all that are followed, and of the rows that step with it.

        factors: what the rows' gradients would be multiplied by in a step now; row_squares: of these.
        """
        optimizers = self.tracers.optimizers if optimizer is None else [optimizer]
        parameters = (one for found in optimizers for group in found.param_groups for one in group["params"])
        stepped = [tracer for tracer, factor in factors.items() if factor]
        return clip(parameters, row_squares, stepped, max_norm, error_if_nonfinite=error_if_nonfinite)

    def number(self, table: str) -> int:
        """Return the number of the step that a table takes now: Adam's bias correction and rounding go by it."""
        return int(self._of[table]["step"])

    def _by_number(self, g: int, pending: Sequence[SavedGradient]) -> dict[int, list[SavedGradient]]:
        """Return the gradients of a group by the number of the step that their tables take now."""
        tables = self._groups[g].tables
        names: dict[int, list[str]] = {}
        for table in tables:
            names.setdefault(self.number(table.name), []).append(table.name)
        if len(names) == 1 or not (isinstance(tables[0].optimizer, Adam) or tables[0].dtype != "float32"):
            return {max(names): [*pending]}  # other rules do not go by it
        parts = {
            number: [part for saved in pending for part in saved.of_tables(self._backend, some)]
            for number, some in names.items()
        }
        return {number: part for number, part in parts.items() if part}

    def learning_rate(self, g: int) -> float:
        """Return the rate of a group."""
        return float(self._shared(g)["lr"])

    @property
    def learning_rates(self) -> list[float]:
        """That of each group."""
        return [self.learning_rate(g) for g in range(len(self._groups))]

    def group(self, g: int) -> Group:
        """Return a group whose optimizer has the settings of now."""
        return self._with(g, self._shared(g))

    def _with(self, g: int, settings: Mapping[str, Any]) -> Group:
        values = settings["weight_decay"], settings.get("eps"), *settings.get("betas", ())
        if g not in self._now or self._now[g][0] != values:  # most steps have the settings of the step before
            group = self._groups[g]
            now = _optimizer(group.optimizer, settings)
            if now != group.optimizer:
                group = Group(index=group.index, tables=(replace(group.tables[0], optimizer=now),))
            self._now[g] = values, group
        return self._now[g][1]

    def _shared(self, g: int) -> dict[str, Any]:
        """Return the settings of a group. Raises ValueError where those of its tables differ, or are none."""
        first, *others = (self._of[table.name] for table in self._groups[g].tables)
        if not math.isfinite(first["lr"]) or first["lr"] < 0:
            raise ValueError(
                f"learning rate {first['lr']} of table {first['table']!r} is not a finite number of at least 0"
            )
        values = [first.get(name) for name in _HYPERPARAMETERS]
        for other in others:
            if [other.get(name) for name in _HYPERPARAMETERS] != values:
                name = next(name for name in _HYPERPARAMETERS if other.get(name) != first.get(name))
                raise ValueError(
                    f"tables {first['table']!r} and {other['table']!r} have one row layout and step together, with "
                    f"{name} {first.get(name)} and {other.get(name)}: set both, or give one a dim, dtype or "
                    "optimizer of its own"
                )
        return first

    def settings(self) -> dict[str, Any]:
        """Return what a commit keeps."""
        kept: dict[str, Any] = {"steps": self.steps, "learning_rates": self.learning_rates}
        changed = {
            table.name: {name: now[name] for name in ("step", *_HYPERPARAMETERS[1:]) if name in now}
            for group in self._groups
            for table in group.tables
            if (now := self._of[table.name])["step"] != self.steps
            or _optimizer(group.optimizer, now | {"lr": group.optimizer.learning_rate}) != group.optimizer
        }
        return kept | ({"tables": changed} if changed else {})

    def restore(self, settings: dict[str, Any]) -> None:
        """Take back what a commit kept; one of rows from outside may keep the steps alone, or nothing."""
        first = [group.optimizer.learning_rate for group in self._groups]
        rates = [float(rate) for rate in settings.get("learning_rates", first)]
        if len(rates) != len(self._groups):
            raise StateError(
                f"the commit has learning rates for {len(rates)} groups of tables and the cache has "
                f"{len(self._groups)}: open the store with the tables it was made with"
            )
        self.steps = int(settings.get("steps", 0))
        for group, rate in zip(self._groups, rates, strict=True):
            for table in group.tables:
                changed = dict(settings.get("tables", {}).get(table.name, {}))
                if "betas" in changed:
                    changed["betas"] = tuple(changed["betas"])  # a list once it was kept
                self._of[table.name].update(_settings(table) | {"lr": rate, "step": self.steps} | changed)


_HYPERPARAMETERS = ("lr", "weight_decay", "eps", "betas")


def _settings(table: Table) -> dict[str, Any]:
    """Return the settings of a table by torch's names."""
    kept = asdict(table.optimizer)
    found = {"table": table.name, "lr": float(kept["learning_rate"]), "weight_decay": kept["decay"], "step": 0}
    if "beta1" in kept:
        found["betas"] = (kept["beta1"], kept["beta2"])
    return found | ({"eps": kept["eps"]} if "eps" in kept else {})


def _optimizer(optimizer: Optimizer, settings: Mapping[str, Any]) -> Optimizer:
    """Return an optimizer with other settings but the learning rate, which is a step's."""
    changed: dict[str, Any] = {"decay": float(settings["weight_decay"])}
    if hasattr(optimizer, "eps"):
        changed["eps"] = float(settings["eps"])
    if hasattr(optimizer, "beta1"):
        changed["beta1"], changed["beta2"] = map(float, settings["betas"])
    return replace(optimizer, **changed)
