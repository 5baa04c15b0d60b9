"""The pool that tests share: a run that hangs or dies fails its test within its limit, and the next run works."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.ranks.pool import RanksPool, RunFailedError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.long
def test_a_rank_that_hangs_fails_its_test_and_no_other(tmp_path: Path) -> None:
    """The test sees where each rank hangs and what it wrote; new processes serve the next run."""
    with RanksPool(tmp_path, most=2) as pool:
        pool.run(2, "tests.ranks.bodies:who")
        begin = time.monotonic()
        with pytest.raises(RunFailedError, match=r"(?s)hanging: \[1\].*about to hang.*in hangs"):
            pool.run(2, "tests.ranks.bodies:hangs", limit=3)
        assert time.monotonic() - begin < 30
        assert pool.run(2, "tests.ranks.bodies:who") == [[0, 2], [1, 2]]


@pytest.mark.long
def test_a_rank_that_dies_fails_its_test_and_no_other(tmp_path: Path) -> None:
    """The others say who died."""
    with RanksPool(tmp_path, most=2) as pool:
        with pytest.raises(RunFailedError, match=r"rank 1 died|rank 1: died") as failed:
            pool.run(2, "tests.ranks.bodies:dies")
        assert "while rank 0 was waiting for all ranks" in str(failed.value)
        assert pool.run(2, "tests.ranks.bodies:who") == [[0, 2], [1, 2]]
