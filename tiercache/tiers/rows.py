"""Rows within reach of a lookup: what the device tier, a resident table and an evaluation slice all show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store.table import Group
    from tiercache.training.row_optimizer import RowGradients


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Rows of one group: ``fields[f][slot_of_local[first[table] + local id]]``."""

    fields: tuple[NDArray[np.float32], ...]
    """One (slots, width) array for the vectors and one for each optimizer state."""
    slot_of_local: NDArray[np.int32]
    """The slot of each position."""
    first: dict[str, int]
    """By table: the position of its local id 0."""
    num_local: dict[str, int]
    """By table: how many local ids there are."""

    @classmethod
    def of(
        cls,
        group: Group,
        fields: tuple[NDArray[np.float32], ...],
        slots: NDArray[np.int32],
        table_starts: NDArray[np.int64],
    ) -> GroupRows:
        """Build it from where each table of the group starts."""
        names = [table.name for table in group.tables]
        return cls(
            fields,
            slots,
            {name: int(table_starts[i]) for i, name in enumerate(names)},
            {name: int(table_starts[i + 1] - table_starts[i]) for i, name in enumerate(names)},
        )


class RowView:
    """The rows that batches of one visit look up, and where their gradients go (nowhere in an evaluation)."""

    def __init__(self, groups: Sequence[GroupRows], gradients: RowGradients | None, name: str) -> None:
        self.groups = tuple(groups)
        self.gradients = gradients
        self.name = name
        self.ended = False

    def check(self) -> None:
        """Raise RuntimeError where the visit has ended: its local ids mean other rows now."""
        if self.ended:
            raise RuntimeError(f"this batch belongs to {self.name}, which has ended: use batches inside their own loop")
