"""How many rows a pass may need on the device before it closes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tiercache.sizes import told_apart
from tiercache.store.table import group_tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercache.store.table import Group, Table

SLOT_MAP_BYTES = 28
"""Bytes on the device for each row beside the row itself: int32 maps from local ids to slots of this pass and the
next, the order of loading, the orders of the last dump, this one and the next, and spare slots."""
STREAM_BYTES = 8
"""Bytes on the device for each row of a 16-bit dtype beside these: its key, which stochastic rounding takes its random
bits from."""
_UNLIKELY = 21.0
"""The natural logarithm of one in 10^9."""


def device_bytes(group: Group) -> int:
    """Return the bytes on the device of a row of ``group``, with all that stands beside it."""
    return group.row_bytes + SLOT_MAP_BYTES + (0 if group.dtype == "float32" else STREAM_BYTES)


def most_rows(rows: int, devices: int) -> int:
    """Return how many of ``rows`` one of so many devices gets at most where the hashes of their keys divide them.

    Each of n keys falls to one of W devices with the chance 1/W: a device gets a binomial number of them, n/W in the
    mean with the variance v = n/W (1 - 1/W), and, by Bernstein's inequality, more than
    ``n/W + L/3 + sqrt((L/3)^2 + 2 L v)`` with the chance exp(-L) at most, for any n and W. L = 21 makes that 10^-9 for
    each device, group of tables and pass: 6.5 standard deviations, 2 percent more than an 8th of a million rows.
    """
    mean = rows / devices
    margin = _UNLIKELY / 3 + math.sqrt((_UNLIKELY / 3) ** 2 + 2 * _UNLIKELY * mean * (1 - 1 / devices))
    return min(rows, math.ceil(mean + margin))


class RowBudget:
    """Bytes of each of some devices against rows.

    Each group of tables has memory for the most rows that any pass needs, so a pass counts with the high water of
    the passes before it. ``rows`` are always by table, in the order of table ids, of all devices together; a device has
    ``most_rows`` of them.
    """

    def __init__(self, tables: Sequence[Table], num_bytes: int, devices: int = 1) -> None:
        groups = group_tables(tables)
        places = {t.name: g.index for g in groups for t in g.tables}
        self.num_bytes, self.devices = num_bytes, devices
        self._group_of = [places[t.name] for t in sorted(tables, key=lambda table: table.table_id)]
        self._row_bytes = [device_bytes(group) for group in groups]
        self._high_water = [0] * len(groups)

    def needed(self, rows: Sequence[int]) -> int:
        """Return the bytes on each device of all passes closed and of one more with ``rows``."""
        return sum(
            max(high, new) * size
            for high, new, size in zip(self._high_water, self._by_group(rows), self._row_bytes, strict=True)
        )

    def fits(self, rows: Sequence[int]) -> bool:
        """Say whether a pass with ``rows`` may still grow to this size."""
        return self.needed(rows) <= self.num_bytes

    def close(self, rows: Sequence[int]) -> None:
        """Count a closed pass."""
        self._high_water = [max(high, new) for high, new in zip(self._high_water, self._by_group(rows), strict=True)]

    def excess(self, rows: Sequence[int]) -> str:
        """Say, for an error, what ``rows`` would need and what there is."""
        need, given = told_apart(self.needed(rows), self.num_bytes)
        device = "the device" if self.devices == 1 else f"each of {self.devices} devices"
        return (
            f"needs {sum(rows):,} rows, {need} on {device} with what earlier passes need, "
            f"but the device budget is {given}"
        )

    def _by_group(self, rows: Sequence[int]) -> list[int]:
        totals = [0] * len(self._row_bytes)
        for group, count in zip(self._group_of, rows, strict=True):
            totals[group] += count
        return [most_rows(total, self.devices) for total in totals]
