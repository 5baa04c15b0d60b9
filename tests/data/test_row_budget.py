"""Rows that one of several devices has to hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.cases import table
from tiercache.data.row_budget import RowBudget, device_bytes, most_rows
from tiercache.store import hash_keys
from tiercache.store.shards.sharding import hash_bounds
from tiercache.store.table import group_tables

if TYPE_CHECKING:
    from numpy.typing import NDArray

A = table("a", 8)


def rows_of(keys: NDArray[np.int64], devices: int) -> list[int]:
    """Return how many keys fall to each device."""
    bounds = np.array(hash_bounds(devices)[1:-1], dtype=np.uint64)
    return np.bincount(np.searchsorted(bounds, hash_keys(keys, A.table_id), side="right"), minlength=devices).tolist()


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(0, 20_000), devices=st.integers(1, 64), seed=st.integers(0, 1 << 32))
def test_no_device_gets_more_rows_than_are_counted_with(rows: int, devices: int, seed: int) -> None:
    """Of random keys: one example in 10^9 / W may."""
    keys = np.unique(np.random.default_rng(seed).integers(-(1 << 63), 1 << 63, rows, dtype=np.int64))
    assert max(rows_of(keys, devices)) <= most_rows(keys.size, devices)


def test_an_even_share_is_too_few() -> None:
    """Hashes do not divide evenly, and few rows may well fall to one device; of many the margin is small."""
    keys = np.arange(10_000)
    assert max(rows_of(keys, 8)) > 10_000 // 8
    assert most_rows(5, 4) == 5
    assert most_rows(10**6, 8) < 1.02 * 10**6 / 8
    assert all(most_rows(n, 3) <= most_rows(n + 1, 3) <= most_rows(n, 3) + 1 for n in range(5000))


def test_one_device_gets_all_rows() -> None:
    """To the row, as ever."""
    assert all(most_rows(n, 1) == n for n in (0, 1, 7, 10**9))
    assert RowBudget([A], 10**6, devices=1).needed([1000]) == RowBudget([A], 10**6).needed([1000])


@pytest.mark.parametrize("devices", [2, 8])
def test_a_budget_of_several_devices_counts_what_each_holds(devices: int) -> None:
    """The most that a pass gives to any of them."""
    budget = RowBudget([A], 0, devices=devices)
    budget.close([5000])
    assert budget.needed([3000]) == most_rows(5000, devices) * device_bytes(group_tables([A])[0])
    assert f"on each of {devices} devices with what earlier passes need" in budget.excess([3000])
