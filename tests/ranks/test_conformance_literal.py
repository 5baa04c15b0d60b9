"""Literal rows, bags and steps on 1 to 4 ranks: every number stands here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.ranks.conformance import WAYS
from tests.ranks.literals import cut
from tests.ranks.trainings import stored

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks.pool import RanksPool

SUM = [[2, 4], [4, 6], [0, 0], [12, 15]]
MEAN = [[0, 1], [3, 4], [0, 0], [4 / 3, 7 / 3]]
ROWS = [[-2, -1], [1, 2], [0, 1], [6, 7]]
"""[[0, 1], [2, 3], [4, 5], [6, 7]] less how often each was in a bag."""


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_literal_rows_bags_and_steps(ranks_pool: RanksPool, tmp_path: Path, size: int) -> None:
    """A table [[0, 1], [2, 3], [4, 5], [6, 7]] in every sharding: sums, ragged means, empty bags, and the step of
    their gradients; and by each rule a row that is in all samples' bags, several times in some: its gradient is summed
    over all ranks before it is squared.
    """
    cut(tmp_path / "passes")
    parts = ranks_pool.run(size, "tests.ranks.literals:train", folder=str(tmp_path))
    g = np.array([2 * 0 + 2 + 3 * 4 + 6, 2 * 1 + 3 + 3 * 5 + 7], np.float32)  # [20, 27]
    fields = {
        "sgd": [-g],
        "adagrad": [-g / abs(g), g**2],
        "rowwise": [-g / np.sqrt((g**2).mean()), [(g**2).mean()]],
        "adam": [-0.5 * g / abs(g), 0.1 * g, 0.001 * g**2],
    }
    for way in WAYS:
        found = np.concatenate([part[way] for part in parts])
        np.testing.assert_allclose(found, np.hstack([SUM, MEAN]), rtol=0, atol=2e-6, err_msg=way)
        rows = stored(tmp_path, f"{way}.tc")
        assert rows["rows"][0].tolist() == [0, 1, 2, 3]
        np.testing.assert_allclose(rows["rows"][1][0], ROWS, rtol=0, atol=2e-6, err_msg=way)
        for name, wanted in fields.items():
            keys, found = rows[name]
            assert keys.tolist() == [5]
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one[0], other, rtol=1e-6, err_msg=f"{name} {way}")
