"""One training on several ranks ends with the rows, the states and the dense weights of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.ranks.trainings import CASES, resident, stored

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks.pool import RanksPool

KINDS = ("row", "table", "column", "replicate")


def assert_close(folder: Path, case: str, dense: dict[str, np.ndarray], *, steps: int | None = None) -> None:
    """Compare a sharded store and dense weights with one process."""
    import tiercache as tc

    theirs = resident(CASES[case], tc.PassSet.open(folder / "passes"), steps=steps)
    ours = stored(folder)
    assert ours.keys() == theirs.rows.keys()
    for name, (keys, fields) in ours.items():
        np.testing.assert_array_equal(keys, theirs.rows[name][0], err_msg=name)
        for mine, other in zip(fields, theirs.rows[name][1], strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-5, rtol=1e-5, err_msg=name)
    for name, weight in theirs.dense.items():
        np.testing.assert_allclose(dense[f"dense.{name}"], weight.numpy(), atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_divided_by_hash_train_as_on_one_process(
    ranks_pool: RanksPool, tmp_path: Path, size: int, case: str
) -> None:
    """Two epochs of shuffled batches, every hotness and optimizer; and batches that leave ranks without samples."""
    CASES[case].cut(tmp_path / "passes")

    found = ranks_pool.run(
        size, "tests.ranks.trainings:train", case=case, folder=str(tmp_path),
        placement=dict.fromkeys([t.name for t in CASES[case].tables], "row"),
    )  # fmt: skip

    assert_close(tmp_path, case, found[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_every_placement_trains_as_one_process(ranks_pool: RanksPool, tmp_path: Path, size: int, kind: str) -> None:
    """All tables by one kind: whole on a rank, in slices of columns, on all ranks."""
    CASES["bags"].cut(tmp_path / "passes")

    found = ranks_pool.run(
        size, "tests.ranks.trainings:train", case="bags", folder=str(tmp_path),
        placement=dict.fromkeys([t.name for t in CASES["bags"].tables], kind),
    )  # fmt: skip

    assert_close(tmp_path, "bags", found[0])
