"""A budget that is too small is refused while the store still stands as it stood."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tiercache as tc
from tests.ranks.trainings import CASES, ONE, open_sharded, stored
from tests.training.cases import Case

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks.pool import RanksPool
    from tiercache.ranks.group import Ranks

TRAIN = "tests.ranks.trainings:train"
OPEN = "tests.ranks.test_budgets:opened"
SENTENCES = {
    "device_budget": "but device_budget is 4 KiB",
    "host_budget": "host_budget is 1 bytes, but the dump of one",
}
TOO_SMALL = {"device_budget": 4096, "host_budget": 1}


def opened(ranks: Ranks, folder: str, **options: Any) -> list[int]:
    """Open the store and leave; return where it stands."""
    with open_sharded(ranks, ONE, folder, **options) as cache:
        commit = cache.store.commit
        assert commit is not None
        return list(commit.cursor)


def placed(kind: str) -> dict[str, str]:
    """Place all tables of the case alike."""
    return dict.fromkeys([one.name for one in ONE.tables], kind)


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def trained(ranks_pool: RanksPool, folder: Path) -> None:
    """Train the case on two ranks, with two commits kept."""
    CASES["one"].cut(folder / "passes")
    ranks_pool.run(2, TRAIN, case="one", folder=str(folder), placement=placed("row"), retention=2)


def assert_refused(errors: list[tuple[str, str] | None], sentence: str) -> None:
    """Every rank raises: one with an error of its own, each with the sentence."""
    assert all(error is not None and sentence in error[1] for error in errors), errors
    assert "BudgetError" in [error[0] for error in errors if error is not None]


@pytest.mark.parametrize(("size", "kind"), [(1, "row"), (2, "table")])
def test_parts_are_not_written_anew_for_a_budget_that_is_too_small(
    ranks_pool: RanksPool, tmp_path: Path, size: int, kind: str
) -> None:
    """For another number of ranks or another placement; the record and every part keep their bytes and commits."""
    trained(ranks_pool, tmp_path)
    rows = stored(tmp_path)
    before = files_of(tmp_path / "model.tc")
    options: dict[str, Any] = {"folder": str(tmp_path), "placement": placed(kind), "retention": 2}

    for name, sentence in SENTENCES.items():
        assert_refused(ranks_pool.errors(size, OPEN, **options | {name: TOO_SMALL[name]}), sentence)
        assert files_of(tmp_path / "model.tc") == before

    assert ranks_pool.run(size, OPEN, **options) == [[8, 0]] * size
    for name, (keys, fields) in stored(tmp_path).items():
        np.testing.assert_array_equal(keys, rows[name][0])
        for mine, other in zip(fields, rows[name][1], strict=True):
            np.testing.assert_array_equal(mine.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("order_seed", [None, 5])
def test_rows_are_not_put_in_the_order_of_other_passes_for_a_budget_that_is_too_small(
    ranks_pool: RanksPool, tmp_path: Path, order_seed: int | None
) -> None:
    """The commits of the passes before stay the newest ones."""
    trained(ranks_pool, tmp_path)
    record = (tmp_path / "model.tc" / "record.json").read_bytes()
    (tmp_path / "passes").rename(tmp_path / "old")
    Case(tables=ONE.tables, specs=ONE.specs, data_seed=7).cut(tmp_path / "passes")
    options: dict[str, Any] = {"folder": str(tmp_path), "reorganised": True, "order_seed": order_seed}

    for name, sentence in SENTENCES.items():
        assert_refused(ranks_pool.errors(2, OPEN, **options | {name: TOO_SMALL[name]}), sentence)
        assert (tmp_path / "model.tc" / "record.json").read_bytes() == record
        with tc.ShardedStore.open(tmp_path / "model.tc") as store:
            assert [commit.cursor for commit in store.commits] == [(7, 0), (8, 0)]

    assert ranks_pool.run(2, OPEN, **options) == [[0, 0]] * 2
