"""What a plan file gives a training: its budgets and order where none are given, and rates that predict seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercache.errors import BudgetError, PlanError
from tiercache.planning.plan import TrainingPlan
from tiercache.ranks.budgets import Budgets
from tiercache.store.local_path import local_path

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from tiercache.data.dataset import PassDataset
    from tiercache.planning.plan import Rates


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a training, if it has one."""

    plan: TrainingPlan | None = None

    @classmethod
    def read(cls, path: str | os.PathLike[str] | None, data: PassDataset) -> Planned:
        """Read and check a plan. Raises PlanError."""
        if path is None:
            return cls()
        try:
            text = local_path(path, "a plan").read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise PlanError(f"the plan {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
        plan = TrainingPlan.from_toml(text, str(path))
        plan.check(data.digest, len(data), str(path))
        return cls(plan)

    @property
    def rates(self) -> Rates | None:
        """What predicts seconds."""
        return None if self.plan is None else self.plan.machine

    def order(self, order: Sequence[int] | str | None, order_seed: int | None) -> Sequence[int] | str | None:
        """Return the order that was given, or the plan's."""
        return order if self.plan is None or order is not None or order_seed is not None else self.plan.order

    def budgets(
        self,
        device: int | str | None,
        host: int | str | None,
        evaluation: int | str | None,
        store: int | str | None,
        commit_every: int | None,
    ) -> Budgets:
        """Return the budgets that were given, and the plan's for those that were not.

        Raises BudgetError where neither says what device and host may take.
        """
        given = [device, host, evaluation, store, commit_every]
        if self.plan is not None:
            ours = self.plan.budgets
            planned = (ours.device, ours.host, ours.evaluation, ours.store, ours.commit_every)
            given = [theirs if mine is None else mine for mine, theirs in zip(given, planned, strict=True)]
        device, host, evaluation, store, every = given
        if device is None or host is None:
            raise BudgetError(
                f"device_budget is {device!r} and host_budget {host!r}: give both, or the plan of `tiercache plan`"
            )
        return Budgets.parse(device, host, evaluation, store, 1 if every is None else int(every))
