"""Rows of one group on the device, and a request for some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tiercache.values.ids import Array


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Rows of one group: row ``slot_of_local[first[table] + local id]`` of the vectors and of each state.

    Arrays are those of the backend that looks them up.
    """

    vectors: Any
    """(slots, dim): the `Vectors` that kernels take, in their dtype; those of 16 bits as the bits of uint16."""
    states: tuple[Array, ...]
    """One (slots, width) array for each optimizer state."""
    slot_of_local: Array
    """The slot of each position."""
    first: dict[str, int]
    """By table: the position of its local id 0."""
    num_local: dict[str, int]
    """By table: how many local ids there are."""
    streams: Array
    """The random stream of the row in each slot if rows have 16 bits; else empty."""


class RowRequest(NamedTuple):
    """A request for rows of a group by their positions."""

    rows: GroupRows
    positions: Array
    """(n,) int32, each below the number of positions of ``rows``."""
    slots: Array
    """(n,) int32; written."""
    out: Array | None
    """(n, dim) float32 for the vectors; None: only slots are needed."""
