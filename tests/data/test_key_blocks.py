"""write_key_sets with a device budget: blocks of keys are packed into sub-datasets that fit."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tiercache as tc
from tests.train.test_bad_input import one_sentence
from tiercache.data.pass_builder import RowBudget
from tiercache.errors import BudgetError, DatasetError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TABLES = tuple(
    tc.Table(name=name, dim=dim, optimizer=tc.optim.Adagrad(learning_rate=0.1)) for name, dim in (("a", 16), ("b", 4))
)
BUDGET = 60 << 10


def blocks(count: int = 15) -> list[dict[str, Any]]:
    """Return blocks of keys of two tables, the second one missing in some."""
    chance = np.random.default_rng(0)
    found: list[dict[str, Any]] = []
    for number in range(count):
        block = {"a": chance.integers(-400, 400, 150)}
        found.append(block | ({"b": chance.integers(0, 200, (30, 2))} if number % 4 else {}))
    return found


def merged(chosen: list[dict[str, Any]], name: str) -> Any:
    """Return the keys of a table in some blocks."""
    return np.concatenate([np.empty(0, np.int64), *(np.reshape(one[name], -1) for one in chosen if name in one)])


def test_sub_datasets_have_as_many_blocks_as_fit(tmp_path: Path) -> None:
    """Each has the keys and counts of its blocks; one more block would not have fit."""
    given = blocks()
    data = tc.write_key_sets(tmp_path / "keys", TABLES, iter(given), device_budget=BUDGET)
    assert [one for chosen in data.blocks for one in chosen] == list(range(len(given)))
    assert 2 < len(data) < len(given)
    budget = RowBudget(data.schema.tables, BUDGET)

    def rows(chosen: range) -> list[int]:
        return [np.unique(merged([given[i] for i in chosen], table.name)).size for table in data.tables]

    for one, chosen in zip(data.passes, data.blocks, strict=True):
        for name in "ab":
            unique, counts = np.unique(merged([given[i] for i in chosen], name), return_counts=True)
            order = np.argsort(one.keys(name))
            np.testing.assert_array_equal(one.keys(name)[order], unique)
            np.testing.assert_array_equal(one.counts(name)[order], counts)
    for chosen, following in pairwise(data.blocks):
        assert budget.fits(rows(chosen))
        assert not budget.fits(rows(range(chosen.start, following.start + 1)))
        budget.close(rows(chosen))
    assert data.digest == tc.PassDataset.open(tmp_path / "keys").digest
    assert tc.PassDataset.open(tmp_path / "keys").blocks == data.blocks


def test_a_block_may_be_an_iterator_of_arrays(tmp_path: Path) -> None:
    """It is read once, although a block may be tried in two sub-datasets."""

    def pieces(keys: Any) -> Iterator[Any]:
        yield from np.array_split(np.reshape(keys, -1), 4)

    one = tc.write_key_sets(tmp_path / "whole", TABLES, blocks(), device_budget=BUDGET)
    given = ({name: pieces(keys) for name, keys in block.items()} for block in blocks())
    assert tc.write_key_sets(tmp_path / "pieces", TABLES, given, device_budget=BUDGET).digest == one.digest


def test_without_a_budget_each_block_is_a_sub_dataset(tmp_path: Path) -> None:
    """A block of any size."""
    data = tc.write_key_sets(tmp_path / "keys", TABLES, blocks(3))
    assert data.blocks == (range(1), range(1, 2), range(2, 3))


def test_several_devices_hold_more(tmp_path: Path) -> None:
    """The budget is per device."""
    one = tc.write_key_sets(tmp_path / "one", TABLES, blocks(), device_budget=BUDGET)
    two = tc.write_key_sets(tmp_path / "two", TABLES, blocks(), device_budget=BUDGET, devices=2)
    assert len(two) < len(one)


def test_a_block_that_no_budget_holds_is_refused(tmp_path: Path) -> None:
    """The error has its number and a remedy."""
    with one_sentence(BudgetError, "block 0 needs", "device budget is 4 KiB: raise device_budget, or give smaller"):
        tc.write_key_sets(tmp_path / "keys", TABLES, blocks(), device_budget="4KiB")
    assert not (tmp_path / "keys" / "dataset.json").exists()


@pytest.mark.parametrize("keys", [{"c": [1]}, {"a": [-(1 << 63)]}, [1, 2]])
def test_bad_blocks_are_named(tmp_path: Path, keys: Any) -> None:
    with one_sentence(DatasetError, "block 1"):
        tc.write_key_sets(tmp_path / "keys", TABLES, [blocks(1)[0], keys], device_budget=BUDGET)


def test_a_training_with_a_smaller_budget_says_how_to_make_the_key_sets_smaller(tmp_path: Path) -> None:
    """The advice is not to extract again, because nothing was extracted."""
    data = tc.write_key_sets(tmp_path / "keys", TABLES, blocks(), device_budget=BUDGET)
    with pytest.raises(BudgetError) as caught:
        tc.TierCache(tmp_path / "store", data, device_budget="8KiB", host_budget="64MiB")
    assert "make the dataset again with tc.write_key_sets for device_budget='8KiB'" in str(caught.value)
    assert "extract" not in str(caught.value)
