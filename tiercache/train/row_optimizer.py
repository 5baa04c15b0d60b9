"""RowOptimizer: the optimizer of the rows of all tables, with the interface of torch's optimizers."""

from __future__ import annotations

import math
import uuid
import warnings
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from tiercache.errors import StateError
from tiercache.rows.backends.optimizer_step import OptimizerStep
from tiercache.rows.backends.saved_gradients import of_tables
from tiercache.train.anchors import Anchors
from tiercache.train.arrivals import State, splitting
from tiercache.train.row_gradients import RowGradients
from tiercache.train.row_writes import RowHooks
from tiercache.train.settings_check import SettingsCheck
from tiercache.train.torch_optimizers import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tiercache.rows.backends.base import Backend
    from tiercache.store.optimizer import Optimizer
    from tiercache.store.table import Group, Table
    from tiercache.train.anchors import Anchor
    from tiercache.train.arrivals import Arrival
    from tiercache.values.lookups import GroupRows, SavedGradient


class RowOptimizer(torch.optim.Optimizer):
    """The optimizer of rows: each table is updated by the optimizer in its specification.

    ``param_groups`` are the tables, each with the placeholders of its pending gradients (see `anchors`) and the
    settings of its optimizer by torch's names, which are read at each step, so schedulers work. Tables with the same
    row layout share them. All gradients of a row since the last step are summed, in the order of the backward calls,
    then of features and samples; then the row is updated once. `JointOptimizer` steps it after the dense optimizers.
    """

    def __init__(self, groups: tuple[Group, ...], backend: Backend) -> None:
        self._groups, self._backend = groups, backend
        self.anchors, self.hooks = Anchors(), RowHooks()
        self.gradients = RowGradients(len(groups), self.anchors)
        self.num_ranks = 1
        self.max_norm: float | None = None  # the norm that gradients were last clipped to
        self.steps = 0  # steps applied so far
        self._names = [tuple(group.optimizer.settings()) for group in groups]  # by group; the rate is the first
        self._values_of = [itemgetter(*names) for names in self._names]
        self._now: dict[int, tuple[list[Any], Optimizer]] = {}  # of the previous step, with their settings
        self.run_step: Callable[[torch.optim.Optimizer | None], None] = _of_no_cache
        """Makes the cache step the rows that step with a dense optimizer; None: all."""
        self.is_stepping = False  # True while `JointOptimizer` steps the dense optimizers
        self.is_restored = False  # True once the steps are those of the store's last commit
        self.identity = uuid.uuid4().hex  # the name of these rows if no store has them
        self._is_warned = False  # True once a loop without zero_grad() was warned
        self.settings_check = SettingsCheck()
        self.dense: list[torch.optim.Optimizer] = []  # the cache's optimizers of dense parameters
        tables = [{"params": [], **_settings(table)} for group in groups for table in group.tables]
        cycled = {name: tables[0][name] for name in ("betas", "momentum") if all(table.get(name) for table in tables)}
        super().__init__(tables, cycled)
        self._of = {group["table"]: group for group in self.param_groups}
        self._own = {table["table"]: {*table} for table in tables}  # the settings that the optimizer of a table has

    def lacked_by(self, group: dict[str, Any]) -> set[str]:
        """Return the settings of torch's optimizers that the rows of a parameter group do not have."""
        return set(SETTINGS) - self._own[group["table"]]

    def check_alone(self, dense: torch.optim.Optimizer) -> None:
        """Raise StateError if a dense optimizer is stepped by itself while its rows have gradients."""
        for anchor in self.anchors:
            anchor.writes.forget()
            if not anchor.has_gradient:
                continue
            written = anchor.drop_dropped()
            is_mine = len(self.dense) == 1 or self._owned().get(id(anchor.parameter)) is dense
            if is_mine and not anchor.pending:
                anchor.check_by_hand(written)
            elif is_mine:
                raise StateError(
                    f"{type(dense).__name__} was stepped by itself, but gradients of the rows of {anchor.tables} wait "
                    "to be stepped with it: write optimizer = cache.optimizer before the loop (with several "
                    "optimizers, cache.optimizer.part(optimizer) is one with its rows)"
                )

    def step(
        self, closure: Callable[[], Any] | None = None, *, dense: torch.optim.Optimizer | None = None
    ) -> Any:  # fmt: skip
        """Update the rows that have undropped gradients: of modules that step with ``dense``, or of all."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.run_step(dense)
        return loss

    def zero_grad(self, set_to_none: bool = True, *, dense: torch.optim.Optimizer | None = None) -> None:
        """Drop the pending gradients of rows: of modules that step with ``dense``, or of all."""
        if self.anchors.ledger is not None:
            self.anchors.ledger.drop()
        owned = self._owned()
        for anchor in self.anchors:
            if dense is None or owned.get(id(anchor.parameter)) is dense or len(self.dense) == 1:
                anchor.clear()
                if (parameter := anchor.parameter) is not None and id(parameter) not in owned:
                    parameter.grad = None

    def groups_of(self, dense: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
        """Return the tables that are stepped with ``dense``, None: all; their parameters are the current ones."""
        owned = self._owned()
        mine = [one for one in self.anchors if dense is None or self._steps_with(one, dense, owned)]
        found: dict[str, list[torch.Tensor]] = {}
        for anchor in mine:
            parameter = anchor.parameter
            alone = [] if parameter is None or id(parameter) in owned else [parameter]
            found.setdefault(anchor.first_table, []).extend(alone)
            found[anchor.first_table] += anchor.expose()
        dense_parameters = (one for each in self.dense for group in each.param_groups for one in group["params"])
        if found and any(hasattr(one, "to_local") for one in dense_parameters):
            next(iter(found.values())).extend(splitting(leaf for leaves in found.values() for leaf in leaves))
        for group in self.param_groups:
            group["params"] = found.get(group["table"], [])
        if dense is None:
            return self.param_groups
        tables = {table for anchor in mine for table in anchor.table_names}
        return [group for group in self.param_groups if group["table"] in tables]

    def _steps_with(
        self, anchor: Anchor, dense: torch.optim.Optimizer, owned: Mapping[int, torch.optim.Optimizer]
    ) -> bool:
        """Return True if a module's rows step with ``dense``; False if it is in no optimizer and trains no rows."""
        is_idle = id(anchor.parameter) not in owned and not anchor.pending
        if is_idle and any(id(one.parameter) in owned for one in self.anchors):
            return False
        return self._owner(anchor, owned) is dense

    def _owner(self, anchor: Anchor, owned: Mapping[int, torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
        """Return the dense optimizer that a module's rows step with: the one that has its anchor.

        If no optimizer has any anchor, it is the only optimizer, or None. owned: from ``_owned``. Raises StateError for
        an anchor that is in no optimizer if others are.
        """
        found = owned.get(id(anchor.parameter))
        if found is None and self.dense:
            if len(self.dense) > 1 or any(id(one.parameter) in owned for one in self.anchors):
                raise StateError(
                    f"a module that looks up {anchor.tables} is in none of the cache's optimizers, so its rows would "
                    "not be trained: add the module's parameters to an optimizer, or freeze it with "
                    "requires_grad_(False)"
                )
            return self.dense[0]
        return found

    def _owned(self) -> dict[int, torch.optim.Optimizer]:
        return {id(p): one for one in self.dense for group in one.param_groups for p in group["params"]}

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of all tables. The state of rows is in the store."""
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]
        return {"state": {}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any], *, dense: torch.optim.Optimizer | None = None) -> None:
        """Load the settings of the tables that step with ``dense``, or of all. Raises StateError if they differ."""
        stored = [group.get("table") for group in state_dict["param_groups"]]
        mine = [group["table"] for group in self.groups_of(dense)]
        if sorted(stored, key=str) != sorted(mine):
            raise StateError(f"the state has tables {stored}, but the cache has {mine}: use the same tables")
        for group in state_dict["param_groups"]:
            self._of[group["table"]].update({name: value for name, value in group.items() if name != "params"})

    def check_one_rank(self, what: str) -> None:
        """Raise StateError if there are several ranks, each with copies of the rows that it looks up."""
        if self.num_ranks > 1:
            raise StateError(
                f"{what} writes rows on the rank that looks them up, but this cache has {self.num_ranks} ranks: "
                "train on one, or do not use it"
            )

    @property
    def pending(self) -> bool:
        """True if a backward was not stepped yet."""
        return self.gradients.is_pending

    def discard(self) -> None:
        """Drop the gradients of a pass that has ended; the loop must drop those that `expire` recorded."""
        self.gradients.clear()
        for anchor in self.anchors:
            anchor.writes.end_pass()
            if not anchor.expired:
                anchor.clear()

    def ready(self, dense: torch.optim.Optimizer | None) -> list[Arrival]:
        """Return the gradients that the step of ``dense``, or of all, applies."""
        mine = [anchor for anchor in self.anchors if anchor.has_gradient]
        if dense is not None:
            owned = self._owned()
            for anchor in mine:
                anchor.drop_dropped()
            owners = [self._owner(one, owned) if one.pending else owned.get(id(one.parameter)) for one in mine]
            mine = [anchor for anchor, owner in zip(mine, owners, strict=True) if owner is dense]
        return [one for anchor in mine for one in anchor.ready()]

    def begin_step(self, dense: torch.optim.Optimizer | None) -> set[str]:
        """Let the step of ``dense``, or of all tables, apply gradients; return the tables that it updates."""
        found = self.ready(dense)
        self._check_zeroed(dense)
        for one in found:
            one.state = State.STEPPING
        self.anchors.note_step(applied=bool(found) or any(self.gradients.collected))
        tables = {table for one in found for table in one.tables}
        self.gradients.num_steps.update(tables)
        return tables

    def _check_zeroed(self, dense: torch.optim.Optimizer | None) -> None:
        """Warn, once, if a step follows another one without zero_grad(): torch steps its gradients again."""
        if self._is_warned:
            return
        owned = self._owned()
        for anchor in self.anchors:
            parameter = anchor.parameter
            owner = owned.get(id(parameter))
            if parameter is None or owner is None or (dense is not None and owner is not dense):
                continue
            if anchor.stepped.is_repeated(parameter.grad, has_new=bool(anchor.pending)):
                self._is_warned = True
                warnings.warn(
                    f"gradients were stepped again, because zero_grad() was not called after the step before: "
                    f"parameters accumulate them, but the rows of {anchor.tables} step each gradient once: call "
                    "optimizer.zero_grad() once for each step",
                    stacklevel=9,
                )
                return

    def count_step(self, tables: Collection[str]) -> None:
        """Count a step of ``tables``, which have gradients on some rank; does nothing without any."""
        self.steps += bool(tables)
        for table in tables:
            self._of[table]["step"] += 1

    def num_steps(self, tables: Collection[str]) -> int | None:
        """Return the steps that ``tables`` have taken, in total; None before a commit was restored."""
        is_known = self.is_restored or self.steps > 0
        return sum(int(self._of[table]["step"]) for table in tables) if is_known else None

    def steps_of(self, rows: Sequence[GroupRows]) -> list[OptimizerStep]:
        """Return the steps of ``rows`` by the collected gradients."""
        steps: list[OptimizerStep] = []
        for g, (of_group, gradients) in enumerate(zip(rows, self.gradients.collected, strict=True)):
            if gradients:
                group, optimizer = self._groups[g], self.optimizer(g)
                rate, parts = float(self._of[group.tables[0].name]["lr"]), self._by_number(g, gradients).items()
                steps += [OptimizerStep(group, optimizer, of_group, saved, rate, number) for number, saved in parts]
        return steps

    def end_step(self) -> None:
        """Drop the gradients that were applied."""
        self.gradients.clear_collected()
        for anchor in self.anchors:
            anchor.end_stepped()

    def step_rows(self, rows: Sequence[GroupRows], dense: torch.optim.Optimizer | None) -> None:
        """Step the rows of one rank that step with ``dense``, or all."""
        self.count_step(self.begin_step(dense))
        self.gradients.collect(self._backend.gradient)
        if steps := self.steps_of(rows):
            self._backend.step(steps)
        try:
            self.hooks.run(steps, self._backend)
        finally:
            self.end_step()  # the gradients are applied, even if a hook raised

    def squared_norm(self, gradients_G: Sequence[Sequence[SavedGradient]]) -> torch.Tensor:
        """Return the sum of squares of row gradients, float64 0-dim; duplicates of a row are added first."""
        backend = self._backend
        total = torch.zeros((), dtype=torch.float64, device=backend.device)
        for group, gradients in zip(self._groups, gradients_G, strict=True):
            if not gradients:
                continue
            slots = [backend.tensor(one.slots) for one in gradients]
            rows, number = torch.unique(torch.cat(slots), return_inverse=True)
            numbers = torch.split(number.to(torch.int32), [one.numel() for one in slots])
            numbered = [
                replace(one, slots=backend.array(rank), sorted=None)
                for one, rank in zip(gradients, numbers, strict=True)
            ]
            sums = backend.empty((rows.numel(), group.dim), np.float32)
            backend.sum(numbered, 1.0, sums)
            total += backend.tensor(sums).double().square().sum()
        return total

    def clip(
        self, max_norm: float, dense: torch.optim.Optimizer | None, due: Sequence[Arrival], row_squares: torch.Tensor,
        *, error_if_nonfinite: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Clip the gradients of ``dense``, or of all dense optimizers, and of the rows that step with it.

        due: the output gradients that a step now would apply; row_squares: their `squared_norm`. Returns the norm
        before, float32 0-dim, as `torch.nn.utils.clip_grad_norm_` does. Raises RuntimeError if it is not finite and
        ``error_if_nonfinite``.
        """
        self.max_norm = max_norm
        anchors = {id(anchor.parameter) for anchor in self.anchors}
        optimizers = self.dense if dense is None else [dense]
        parameters = [one for each in optimizers for group in each.param_groups for one in group["params"]]
        grads = [one.grad.detach() for one in parameters if id(one) not in anchors and one.grad is not None]
        squares = [_squares(grad).to(row_squares.device) for grad in grads]
        norm = torch.stack([row_squares, *squares]).sum().sqrt().float()
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the norm of gradients is {float(norm)}, which cannot be clipped: skip this step, or pass "
                "error_if_nonfinite=False"
            )
        factor = (max_norm / (norm + _EPS)).clamp(max=1.0)
        for one in due:
            one.make_private()
        for grad in grads + [gradient for one in due for gradient in one.present]:
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            local.mul_(factor.to(local.device))
        return norm

    def _by_number(self, g: int, pending: Sequence[SavedGradient]) -> dict[int, list[SavedGradient]]:
        """Return the gradients of a group by the step number of their tables, if rules or rounding use it."""
        tables = self._groups[g].tables
        if len(numbers := {self._of[table.name]["step"] for table in tables}) == 1:
            return {int(numbers.pop()): [*pending]}
        names: dict[int, list[str]] = {}
        for table in tables:
            names.setdefault(int(self._of[table.name]["step"]), []).append(table.name)
        if not (tables[0].optimizer.counts_steps or tables[0].dtype != "float32"):
            return {max(names): [*pending]}  # other rules do not use it
        parts = {
            number: [part for saved in pending for part in of_tables(self._backend, saved, some)]
            for number, some in names.items()
        }
        return {number: part for number, part in parts.items() if part}

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each group."""
        return [float(self._shared(g)["lr"]) for g in range(len(self._groups))]

    def optimizer(self, g: int) -> Optimizer:
        """Return the optimizer of a group, with current settings. Raises ValueError for those without state."""
        settings, group = self._shared(g), self._groups[g]
        values = [settings[name] for name in self._names[g][1:]]
        if g not in self._now or self._now[g][0] != values:  # mostly unchanged between steps
            now = group.optimizer.with_settings(settings)
            lacking = {one.name for one in now.state_fields(group.dim)} - {one.name for one in group.fields}
            if lacking:
                raise ValueError(
                    f"momentum of table {settings['table']!r} is {settings['momentum']}, but its rows have no "
                    f"{lacking.pop()}: use SGD(momentum=...) for the table, or alter the store"
                )
            self._now[g] = values, now
        return self._now[g][1]

    def _shared(self, g: int) -> dict[str, Any]:
        """Return the settings of a group. Raises ValueError if its tables' settings differ or are invalid."""
        first, *others = (self._of[table.name] for table in self._groups[g].tables)
        if not math.isfinite(first["lr"]) or first["lr"] < 0:
            raise ValueError(
                f"learning rate {first['lr']} of table {first['table']!r} is not a finite number of at least 0"
            )
        values_of = self._values_of[g]
        values = values_of(first)
        for other in others:
            if values_of(other) != values:
                name = next(name for name in self._names[g] if other[name] != first[name])
                raise ValueError(
                    f"tables {first['table']!r} and {other['table']!r} have the same row layout and step together, "
                    f"but have {name} {first[name]} and {other[name]}: set both, or use a different dim, dtype or "
                    "optimizer"
                )
        return first

    def settings(self) -> dict[str, Any]:
        """Return the settings that a commit stores."""
        rates = {table.name: rate for group, rate in zip(self._groups, self.learning_rates, strict=True)
                 for table in group.tables}  # fmt: skip
        kept: dict[str, Any] = {"steps": self.steps, "learning_rates": rates}
        changed = {
            table.name: {name: now[name] for name in ("step", *names[1:])}
            for group, names in zip(self._groups, self._names, strict=True)
            for table in group.tables
            if (now := self._of[table.name])["step"] != self.steps
            or group.optimizer.with_settings(now) != group.optimizer
        }
        return kept | ({"tables": changed} if changed else {})

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that decide a step, by names for users: the ranks compare them."""
        found: dict[str, Any] = {"max_norm of clip_grad_norm_": None if self.max_norm is None else float(self.max_norm)}
        for group, names in zip(self._groups, self._names, strict=True):
            for table in group.tables:
                for name in names:
                    value = self._of[table.name][name]
                    found[f"{name} of table {table.name!r}"] = np.array(value, np.float64).tolist()
        return found

    def restore(self, settings: dict[str, Any]) -> None:
        """Restore settings from a commit; one of imported rows has only the steps, or nothing, and changes no other."""
        rates, self.is_restored = settings.get("learning_rates"), True
        self.steps = int(settings.get("steps", 0))
        for group in self._groups:
            for table in group.tables:
                stored: dict[str, Any] = {}
                if rates is not None:  # else a scheduler may have set the rate of the first step
                    stored = _settings(table) | {"lr": float(rates.get(table.name, group.optimizer.learning_rate))}
                changed = dict(settings.get("tables", {}).get(table.name, {}))
                if "betas" in changed:
                    changed["betas"] = tuple(changed["betas"])  # stored as a list
                self._of[table.name].update(stored | {"step": self.steps} | changed)


_EPS = 1e-6  # the epsilon that torch.nn.utils.clip_grad_norm_ adds to the norm


def _settings(table: Table) -> dict[str, Any]:
    return {"table": table.name, **table.optimizer.settings(), "step": 0}


def _squares(grad: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a gradient; for a DTensor, over all its parts."""
    found = torch.linalg.vector_norm(grad, dtype=torch.float64)
    whole: torch.Tensor = found.full_tensor() if hasattr(found, "full_tensor") else found
    return whole.square()


def _of_no_cache(_: torch.optim.Optimizer | None) -> NoReturn:
    raise StateError("this optimizer belongs to no cache: step cache.optimizer instead")
