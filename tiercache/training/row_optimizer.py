"""The row optimizers: pending gradients of the batches since the last step, and the step that applies them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.backends.jagged import OptimizerStep
from tiercache.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercache.backends.base import Backend
    from tiercache.backends.jagged import SavedGradient
    from tiercache.store.table import Group
    from tiercache.tiers.rows import GroupRows

NOBODY_STEPS = (
    "row gradients of an earlier batch are pending, but the cache has no optimizer and step() was never called, so no "
    "row would be trained: give the cache the optimizer (optimizer=...) before the loop, or step() after each backward"
)


class RowGradients:
    """What backward leaves for the step, by group, in the order of the backward calls."""

    def __init__(self, num_groups: int) -> None:
        self.pending: list[list[SavedGradient]] = [[] for _ in range(num_groups)]
        self.is_stepped = False
        """Whether the cache has an optimizer, or a step was taken: else nobody may ever step them."""

    def add(self, group: int, pending: SavedGradient) -> None:
        """Add the gradient of one lookup."""
        self.pending[group].append(pending)

    def check_stepped(self) -> None:
        """Raise StateError where gradients wait for a step that nobody takes; called before another lookup."""
        if not self.is_stepped and any(self.pending):
            raise StateError(NOBODY_STEPS)

    def clear(self) -> None:
        """Drop everything."""
        for pending in self.pending:
            pending.clear()


class RowOptimizer:
    """Steps rows of every group: all gradients of a row since the last step are summed, then it is updated once.

    The sum is in the order of the backward calls, in each by feature and sample, whatever slots rows have and
    however many threads there are.
    """

    def __init__(self, groups: tuple[Group, ...], backend: Backend) -> None:
        self._groups, self._backend = groups, backend
        self.gradients = RowGradients(len(groups))
        self.learning_rates = [float(group.optimizer.learning_rate) for group in groups]
        """One rate for each group."""
        self.steps = 0
        """Steps applied so far: Adam's bias correction counts them, and stochastic rounding draws its bits by them."""

    @property
    def pending(self) -> bool:
        """Whether a backward was not stepped yet."""
        return any(self.gradients.pending)

    def check_stepped(self, visit: str) -> None:
        """Raise StateError where gradients are pending though ``visit`` ends."""
        if self.pending:
            raise StateError(
                f"{visit} ended between backward and step, and its row gradients would be lost: call step() after its "
                "last batch, or discard()"
            )

    def discard(self) -> None:
        """Drop the pending gradients."""
        self.gradients.clear()

    def step(self, rows: Sequence[GroupRows]) -> None:
        """Apply the pending gradients to ``rows`` and drop them. Without any, only the step is counted."""
        self.steps += 1
        self.gradients.is_stepped = True
        every = zip(self._groups, rows, self.gradients.pending, self.learning_rates, strict=True)
        due = [OptimizerStep(group, mine, pending, rate) for group, mine, pending, rate in every if pending]
        self._backend.step(due, self.steps)
        self.gradients.clear()

    def set_learning_rate(self, learning_rate: float, tables: Sequence[str] | None = None) -> None:
        """Change the rate of the groups of ``tables``, or of all, from the next step on."""
        self.learning_rates = changed_rates(self._groups, self.learning_rates, learning_rate, tables)

    def settings(self) -> dict[str, Any]:
        """Return what a commit keeps."""
        return {"steps": self.steps, "learning_rates": list(self.learning_rates)}

    def restore(self, settings: dict[str, Any]) -> None:
        """Take back what a commit kept; one of rows from outside may keep the steps alone, or nothing."""
        rates = [float(rate) for rate in settings.get("learning_rates", self.learning_rates)]
        if len(rates) != len(self._groups):
            raise StateError(
                f"the commit has learning rates for {len(rates)} groups of tables and the cache has "
                f"{len(self._groups)}: open the store with the tables it was made with"
            )
        self.learning_rates, self.steps = rates, int(settings.get("steps", 0))


def changed_rates(
    groups: Sequence[Group], rates: Sequence[float], learning_rate: float, tables: Sequence[str] | None
) -> list[float]:
    """Return the rates of ``groups`` with that of the groups of ``tables``, or of all, changed.

    Raises ValueError for a rate that is none, an unknown table, and where only a part of a group is named.
    """
    if not np.isfinite(learning_rate) or learning_rate < 0:
        raise ValueError(f"learning rate {learning_rate} is not a finite number of at least 0")
    known = {table.name for group in groups for table in group.tables}
    wanted = known if tables is None else set(tables)
    if unknown := wanted - known:
        raise ValueError(f"there is no table {sorted(unknown)[0]!r}: there are {', '.join(sorted(known))}")
    changed = list(rates)
    for g, group in enumerate(groups):
        names = {table.name for table in group.tables}
        if names <= wanted:
            changed[g] = float(learning_rate)
        elif both := names & wanted:
            others = ", ".join(sorted(names - wanted))
            raise ValueError(
                f"table {sorted(both)[0]!r} shares its group, and so its rate, with {others}: "
                "name them all, or give the table an optimizer of its own (any other value of eps or decay will do)"
            )
    return changed
