"""The fewest rows that can be read from the store, found row by row: farthest next use out first, at given capacities.

Nothing here uses the planner's code. What it takes from the plan is how many bytes of cached rows each pass grants,
and the rules of the tiers: rows that two passes in a row need stay on the device, a dump is in memory until the load
of the pass after next is done, and what is thinned out at pass v serves the loads of v + 1 on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

NEVER = np.iinfo(np.int64).max


def fewest_rows_read(keys_P: Sequence[NDArray[np.int64]], capacity_V: Sequence[int], row_bytes: int) -> list[int]:
    """Return the rows read at each pass, beginning at pass 0 with empty memory.

    keys_P: the keys of each sub-dataset, any order; sub-datasets repeat in their order. capacity_V: bytes granted at
    each pass.
    """
    keys, numbers = np.unique(np.concatenate(keys_P), return_inverse=True)
    rows_P = np.split(numbers, np.cumsum([k.size for k in keys_P])[:-1])
    gaps_P = _next_gaps(rows_P, keys.size)
    last_use = np.full(keys.size, -NEVER, dtype=np.int64)
    next_use = np.full(keys.size, NEVER, dtype=np.int64)
    held = np.zeros(keys.size, dtype=bool)
    read = []
    for pass_index, capacity in enumerate(capacity_V):
        rows = rows_P[pass_index % len(rows_P)]
        before = last_use[rows]
        read.append(int(np.count_nonzero((before >= 0) & (before < pass_index - 2) & ~held[rows])))
        held[rows] = False
        last_use[rows], next_use[rows] = pass_index, pass_index + gaps_P[pass_index % len(rows_P)]
        held[last_use == pass_index - 2] = True
        _thin_out(held, next_use, capacity // row_bytes)
    return read


def _next_gaps(rows_P: Sequence[NDArray[np.int64]], num_rows: int) -> list[NDArray[np.int64]]:
    """Return, for each row of each sub-dataset, how many passes later it is needed again."""
    coming = np.full(num_rows, NEVER, dtype=np.int64)
    gaps: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(rows_P)
    for pass_index in reversed(range(2 * len(rows_P))):
        rows = rows_P[pass_index % len(rows_P)]
        if pass_index < len(rows_P):
            gaps[pass_index] = coming[rows] - pass_index
        coming[rows] = pass_index
    return gaps


def _thin_out(held: NDArray[np.bool_], next_use: NDArray[np.int64], most: int) -> None:
    """Keep the ``most`` rows that are needed soonest."""
    rows = np.nonzero(held)[0]
    if rows.size > most:
        far = np.argsort(next_use[rows], kind="stable")[most:]
        held[rows[far]] = False
