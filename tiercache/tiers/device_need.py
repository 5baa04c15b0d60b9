"""What the passes need on a device, counted before anything is allocated there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercache.errors import BudgetError
from tiercache.passes.row_budget import device_bytes
from tiercache.processors.processor import Layout
from tiercache.sizes import format_bytes

if TYPE_CHECKING:
    from tiercache.planning.positions import Positions
    from tiercache.processors.processor import Mover
    from tiercache.store.table import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceNeed:
    """The memory of each group's largest pass."""

    groups: tuple[Group, ...]
    rows_G: tuple[int, ...]
    """Of the pass that has the most, by group."""
    layouts: tuple[Layout, ...]
    """The arrays of each group."""
    num_bytes: int

    @classmethod
    def of(cls, positions: Positions, mover: Mover) -> DeviceNeed:
        """Count the rows of these passes on the device of ``mover``."""
        groups = positions.groups
        rows_G = tuple(max(positions.num_rows(p, g) for p in range(positions.num_passes)) for g in range(len(groups)))
        layouts = tuple(
            Layout(rows, tuple(field.words for field in group.fields), rows, group.dtype != "float32")
            for rows, group in zip(rows_G, groups, strict=True)
        )
        needs = sum(rows * device_bytes(group) for rows, group in zip(rows_G, groups, strict=True))
        num_bytes = max(needs, mover.bytes_of(layouts))  # the latter for rows so few that gaps count
        return cls(groups=groups, rows_G=rows_G, layouts=layouts, num_bytes=num_bytes)

    def check(self, budget: int) -> None:
        """Raise BudgetError where the passes exceed ``budget``, or slots."""
        if self.num_bytes > budget:
            raise BudgetError(
                f"the passes need {format_bytes(self.num_bytes)} on the device ("
                + ", ".join(
                    f"{rows:,} rows of dim {group.fields[0].width}"
                    for rows, group in zip(self.rows_G, self.groups, strict=True)
                )
                + f") but device_budget is {format_bytes(budget)}: raise it, extract again with "
                f"--device-budget {format_bytes(budget)}, or cut the passes with tiercache.split_passes"
            )
        for rows in self.rows_G:
            if rows >= 2**31:
                raise BudgetError(f"a group has {rows:,} rows in one pass, and a slot is an int32: cut smaller passes")
