"""Training on compressed tables."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

import tiercache as tc
from tests.training.cases import (
    Case,
    Spec,
    assert_same_bits,
    resident_result,
    result_of,
    smallest_host_budget,
    table,
    tiered,
    train,
)
from tiercache.store import ZarrEngine

if TYPE_CHECKING:
    from pathlib import Path

CASE = Case(
    tables=(table("user", 24), table("item", 24), table("word", 40, tc.optim.Adam())),
    specs=(Spec(name="u", table="user"), Spec(name="i", table="item", hotness="fixed"), Spec(name="w", table="word")),
    num_samples=512,
    num_keys=1000,
    batch=64,
    epochs=2,
)


@pytest.mark.parametrize("kind", ["zstd", "blosc"])
def test_compressed_tables_train_to_the_same_bits(tmp_path: Path, kind: str) -> None:
    """With the least host memory, a resume in the middle of it, and passes of a schema that says nothing of it."""
    passes = CASE.cut(tmp_path / "passes")
    tables = [dataclasses.replace(CASE.tables[0], compression=kind), *CASE.tables[1:]]
    with tc.Store.open(tmp_path / "s", tables=tables) as store:
        assert isinstance(store._engine, ZarrEngine)
        assert len(store.groups) == 3
        budget = smallest_host_budget(store, passes, device_budget="64MiB")
        with tiered(store, passes, host_budget=budget) as cache:
            train(cache, CASE, epochs=1)
    with tc.Store.open(tmp_path / "s") as store:
        with tiered(store, passes, host_budget=budget) as cache:
            model = train(cache, CASE)
            assert store.counters.row_bytes_read > 0
        assert_same_bits(result_of(store, passes, model), resident_result(CASE, passes))
