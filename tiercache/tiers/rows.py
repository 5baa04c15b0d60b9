"""Rows within reach of a lookup: what the device tier, a resident table and an evaluation slice all show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiercache.backends.jagged import vectors_of
from tiercache.kernels.arrays import NONE_U8
from tiercache.values.rows import GroupRows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store.table import Group
    from tiercache.values.ids import Array


def group_rows(
    group: Group,
    fields: tuple[Array, ...],
    slots: Array,
    table_starts: NDArray[np.int64],
    *,
    streams: Array = NONE_U8,
    dtype: str | None = None,
) -> GroupRows:
    """Build the rows of a group from the words of each field and from where each table of the group starts.

    ``dtype``: of the vectors where they are brought in another than the group's.
    """
    names = [table.name for table in group.tables]
    return GroupRows(
        vectors_of(fields[0], group.dim, dtype or group.dtype),
        fields[1:],
        slots,
        {name: int(table_starts[i]) for i, name in enumerate(names)},
        {name: int(table_starts[i + 1] - table_starts[i]) for i, name in enumerate(names)},
        streams,
    )
