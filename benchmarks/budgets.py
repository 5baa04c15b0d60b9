"""Budgets of the tiers for a dataset, and the bytes of its rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import tiercache as tc
from tiercache.data.pass_builder import RowBudget
from tiercache.planning.budgets import HostBudget
from tiercache.planning.row_offsets import RowOffsets
from tiercache.store.table import group_tables


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """The budgets of the tiers."""

    device: int
    host: int

    @classmethod
    def least(cls, passes: tc.PassDataset, *, evaluation: int | None = None) -> Budgets:
        """Return the device budget of the extraction, and a host budget for barely more than two passes.

        evaluation: the part of the host budget for evaluation, as in `TierCache`.
        """
        groups = group_tables(passes.tables)
        positions = RowOffsets.of(passes, groups)
        largest = max(positions.row_bytes(p) for p in range(positions.num_passes))
        host = HostBudget.of(positions, 1 << 30, evaluation).smallest(int(2.25 * largest) + (4 << 20))
        return cls(device=device_need(passes), host=host)

    @classmethod
    def in_host(cls, passes: tc.PassDataset) -> Budgets:
        """Return the same device budget, and a host budget for all rows."""
        return cls(device=device_need(passes), host=int(1.25 * rows_held(passes)[1]) + 2 * cls.least(passes).host)


def device_need(passes: tc.PassDataset) -> int:
    """Return the device bytes of each group's largest pass, with each array aligned to a cache line."""
    budget = RowBudget(passes.tables, 0)
    ordered = passes.schema.ordered_tables
    for one in passes.passes:
        budget.close([one.rows(table.name) for table in ordered])
    return budget.needed([0] * len(ordered)) + 4096 * len(ordered)


def rows_held(passes: tc.PassDataset) -> tuple[int, int]:
    """Return the number of rows in all passes, and their bytes with optimizer state."""
    rows = num_bytes = 0
    for group in group_tables(passes.tables):
        for table in group.tables:
            keys = np.unique(np.concatenate([one.keys(table.name) for one in passes.passes])).size
            rows, num_bytes = rows + keys, num_bytes + keys * group.row_bytes
    return rows, num_bytes
