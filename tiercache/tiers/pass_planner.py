"""Preparing: each visit's plan and the slots of its rows, ahead of its staging, on the reader thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tiercache.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiercache.planning.next_use import Uses
    from tiercache.planning.visit_plan import Planner, VisitPlan
    from tiercache.tiers.device_tier import DeviceTier, Placement


class Prepared(NamedTuple):
    """A visit whose rows have their slots."""

    plan: VisitPlan
    placements: list[Placement]


class PassPlanner:
    """Prepares the visits of one run, one after the other; called on the reader thread."""

    def __init__(self, planner: Planner, device: DeviceTier, uses_of: Callable[[int], Uses]) -> None:
        self._planner, self._device, self._uses_of = planner, device, uses_of
        self._before: Prepared | None = None
        self._failed = False

    def next(self) -> Prepared:
        """Plan the next visit, and find the slots of its rows from those of the one before.

        Raises StateError where it failed before: slots may be half given out.
        """
        if self._failed:
            raise StateError("the visit before could not be prepared, so this one is not: begin the run of visits anew")
        self._failed = True
        plan, before = self._planner.plan_next(), self._before
        placements = self._device.place(
            plan,
            self._uses_of(plan.epoch),
            before.placements if before else None,
            None if before is None else self._uses_of(before.plan.epoch),
            None if before is None else before.plan.pass_index,
        )
        self._before, self._failed = Prepared(plan, placements), False
        return self._before
