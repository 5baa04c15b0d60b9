"""Bounds: whether other ranks ask for what this one has. On the host, before a kernel reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiercache.errors import RankError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def out_of_bounds(rank: int, numbers: NDArray[np.int32], count: int, what: str) -> RankError | None:
    """Return what is wrong with numbers that came to ``rank``, where some are none of [0, count): rows ``what``."""
    if not numbers.size or (int(numbers.min()) >= 0 and int(numbers.max()) < count):
        return None
    return RankError(
        f"rank {rank} was asked for rows {int(numbers.min()):,} to {int(numbers.max()):,} {what}: start all ranks "
        "again with one dataset and one sharding"
    )
