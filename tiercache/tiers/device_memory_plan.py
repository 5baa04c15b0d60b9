"""What the passes need on a device, counted before anything is allocated there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercache.backends.base import Layout
from tiercache.data.row_budget import device_bytes
from tiercache.errors import BudgetError
from tiercache.sizes import format_bytes, option_bytes, told_apart

if TYPE_CHECKING:
    from tiercache.backends.base import Backend
    from tiercache.planning.positions import Positions
    from tiercache.store.table import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemoryPlan:
    """The memory of each group's largest pass."""

    groups: tuple[Group, ...]
    rows_G: tuple[int, ...]
    """Of the pass that has the most, by group."""
    layouts: tuple[Layout, ...]
    """The arrays of each group."""
    num_bytes: int

    @classmethod
    def of(cls, positions: Positions, backend: Backend) -> DeviceMemoryPlan:
        """Count the rows of these passes on the device of ``backend``."""
        groups = positions.groups
        rows_G = tuple(max(positions.num_rows(p, g) for p in range(positions.num_passes)) for g in range(len(groups)))
        layouts = tuple(
            Layout(rows, tuple(field.words for field in group.fields), rows, group.dtype != "float32")
            for rows, group in zip(rows_G, groups, strict=True)
        )
        needs = sum(rows * device_bytes(group) for rows, group in zip(rows_G, groups, strict=True))
        num_bytes = max(needs, backend.bytes_of(layouts))  # the latter for rows so few that gaps count
        return cls(groups=groups, rows_G=rows_G, layouts=layouts, num_bytes=num_bytes)

    def check(self, budget: int, *, num_ranks: int = 1, mirrors: int = 0, advice: str = "") -> None:
        """Raise BudgetError where the passes, and so many bytes of ``mirrors``, exceed ``budget``; or slots.

        num_ranks: how many devices hold them together. advice: what else to do.
        """
        if self.num_bytes + mirrors > budget:
            need, given = told_apart(self.num_bytes + mirrors, budget)
            told = [
                f"{rows:,} rows of dim {group.fields[0].width}"
                for rows, group in zip(self.rows_G, self.groups, strict=True)
            ]
            told += [f"{format_bytes(mirrors)} of replicated vectors"] if mirrors else []
            each, devices = "", ""
            if num_ranks > 1:
                each, devices = f" on each of {num_ranks} ranks", f" --devices {num_ranks}"
            raise BudgetError(
                f"the passes need {need} on the device ({', '.join(told)}) but device_budget is {given}{each}: raise "
                f"it, extract again with --device-budget {option_bytes(budget)}{devices}, or cut the passes with "
                f"tiercache.repartition for this budget{f' and devices={num_ranks}' if devices else ''}{advice}"
            )
        for rows in self.rows_G:
            if rows >= 2**31:
                raise BudgetError(f"a group has {rows:,} rows in one pass, and a slot is an int32: cut smaller passes")
