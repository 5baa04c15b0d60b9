"""Ranks tell each other values, counts and rows, and all fail where one fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.ranks.pool import RanksPool

SIZES = (1, 2, 3, 4)


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_knows_itself_and_hears_all(ranks_pool: RanksPool, size: int) -> None:
    """Values arrive in rank order, whatever their kinds and lengths."""
    assert ranks_pool.run(size, "tests.ranks.bodies:who") == [[rank, size] for rank in range(size)]
    expected = [{"rank": r, "words": "é" * r, "list": list(range(r)), "none": None} for r in range(size)]
    assert ranks_pool.run(size, "tests.ranks.bodies:tell") == [expected] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["int64", "int32", "float32", "bfloat16", "float16", "uint8"])
def test_uneven_pieces_of_any_dtype_arrive_in_rank_order(ranks_pool: RanksPool, size: int, dtype: str) -> None:
    """Rank r gets what each rank s meant for it, one after the other."""
    for silent in (False, True):
        got = ranks_pool.run(size, "tests.ranks.bodies:uneven_exchange", dtype=dtype, silent=silent)
        for rank in range(size):
            from_each = [(16 * s + rank, 0 if silent and s == 0 else 3 * s + rank) for s in range(size)]
            assert got[rank] == [value for value, count in from_each for _ in range(count)]
