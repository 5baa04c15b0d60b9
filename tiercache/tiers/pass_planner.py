"""Preparing: each pass's plan and the slots of its rows, ahead of its staging, on the reader thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tiercache.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiercache.planning.next_use import Uses
    from tiercache.planning.pass_plan import PassPlan, Planner
    from tiercache.tiers.device_tier import DeviceTier, SlotAssignment


class Prepared(NamedTuple):
    """A pass whose rows have their slots."""

    plan: PassPlan
    assignments: list[SlotAssignment]


class PassPlanner:
    """Prepares the passes of one run, one after the other; called on the reader thread."""

    def __init__(self, planner: Planner, device: DeviceTier, uses_of: Callable[[int], Uses]) -> None:
        self._planner, self._device, self._uses_of = planner, device, uses_of
        self._before: Prepared | None = None
        self._failed = False

    def next(self) -> Prepared:
        """Plan the next pass, and find the slots of its rows from those of the one before.

        Raises StateError where it failed before: slots may be half given out.
        """
        if self._failed:
            raise StateError("the pass before could not be prepared, so this one is not: begin the run of passes anew")
        self._failed = True
        plan, before = self._planner.plan_next(), self._before
        assignments = self._device.place(
            plan,
            self._uses_of(plan.epoch),
            before.assignments if before else None,
            None if before is None else self._uses_of(before.plan.epoch),
            None if before is None else before.plan.sub_dataset,
        )
        self._before, self._failed = Prepared(plan, assignments), False
        return self._before
