"""What other ranks ask for is looked at before a kernel reads it."""

from __future__ import annotations

import numpy as np
import pytest

from tiercache.ranks.bounds import out_of_bounds


@pytest.mark.parametrize(("low", "high"), [(0, 5), (-1, 3), (2, 2147483647)])
def test_numbers_that_are_no_rows_are_named(low: int, high: int) -> None:
    """With the rank that was asked, and what they are of."""
    said = str(out_of_bounds(2, np.array([low, high], np.int32), 5, "of a table"))
    assert f"rank 2 was asked for rows {low:,} to {high:,} of a table: start all" in said


def test_rows_that_are_there_may_be_asked_for() -> None:
    """All of them, and none of an empty table."""
    assert out_of_bounds(2, np.array([0, 4], np.int32), 5, "of a table") is None
    assert out_of_bounds(2, np.empty(0, np.int32), 0, "of an empty table") is None
