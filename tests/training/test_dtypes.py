"""Tables of 16-bit dtypes where trainings differ from one run in one store: days, evaluation, budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.training.cases import (
    Case,
    Spec,
    assert_same_bits,
    open_store,
    resident,
    resident_result,
    result_of,
    table,
    tiered,
    train,
)
from tests.training.test_reorganize import cuts_of, day_by_day, one_case
from tiercache.passes.from_arrays import write_dataset
from tiercache.passes.row_budget import RowBudget
from tiercache.store.initial import initial_rows
from tiercache.store.inspect import verify
from tiercache.store.vectors import nearest

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = ("bfloat16", "float16")


@pytest.mark.parametrize(("engine", "dtype"), [("memory", "float16"), ("lmdb", "bfloat16"), ("zarr", "float16")])
def test_days_into_one_store_equal_one_training_in_memory(tmp_path: Path, engine: str, dtype: str) -> None:
    """Reorganized between, with new keys on each day: the count of steps goes on, and with it the rounding."""
    plain = one_case(tc.optim.Adam(learning_rate=0.01), num_samples=12 * 32, pass_rows=32, num_keys=60)
    case = replace(plain, tables=tuple(replace(one, dtype=dtype) for one in plain.tables))
    cuts = cuts_of(case, drift=7)
    whole = write_dataset(tmp_path / "whole", case.schema, cuts)
    with open_store(tmp_path / "s.tc", case, engine) as store:
        for _, model, _ in day_by_day(case, cuts, 4, tmp_path, store):
            last = model
        assert store.commit is not None
        assert store.commit.settings["steps"] == sum(-(-cut.num_samples // case.batch) for cut in cuts)
        assert_same_bits(resident_result(case, whole), result_of(store, whole, last))
    if engine != "memory":
        assert verify(tmp_path / "s.tc")["problems"] == []


def case_of(dtype: str) -> Case:
    """Two tables of one group, looked up by lists and one by one."""
    return Case(
        tables=(table("a", 7, dtype=dtype), table("b", 7, seed=9, dtype=dtype)),
        specs=(Spec(name="f", table="a", hotness="ragged", mode="mean"), Spec(name="g", table="b")),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_evaluation_looks_up_what_training_sees(tmp_path: Path, dtype: str) -> None:
    """In the middle of a pass, of rows on the device, in the store and never trained; all in float32."""
    case = case_of(dtype)
    passes = case.cut(tmp_path / "passes")
    others = replace(case, num_keys=700, data_seed=5, num_samples=96, pass_rows=48).cut(tmp_path / "others")
    memory = resident(passes)
    with open_store(tmp_path / "s.tc", case, "lmdb") as store, tiered(store, passes) as cache:
        looked = 0

        def look(pass_index: int, batch: int) -> None:
            nonlocal looked
            if (pass_index, batch) != (2, 1):
                return
            now = {
                t.name: dict(zip(memory.keys(t.name).tolist(), memory.fields(t.name)[0], strict=True))
                for t in memory.tables
            }
            vectors = tc.EmbeddingCollection(cache.schema)
            for piece in cache.evaluate(others):
                source = others.passes[piece.sub_dataset]
                for part in piece.batches(20):
                    with torch.no_grad():
                        found = vectors(part)
                    for feature in others.schema.features:
                        spec = next(t for t in others.tables if t.name == feature.table)
                        for key, row in zip(
                            source.keys(feature.table)[part.ids[feature.name].ids].tolist(),
                            found[feature.name].reshape(-1, 7).cpu().numpy(),
                            strict=True,
                        ):
                            wanted = now[feature.table].get(key)
                            wanted = initial_rows(spec, np.array([key]))[0][0] if wanted is None else wanted
                            np.testing.assert_array_equal(row, wanted)
                            looked += 1

        class Stop(Exception):  # noqa: N818 - not an error
            pass

        def stop(pass_index: int, batch: int) -> None:
            if (pass_index, batch) == (2, 1):
                raise Stop

        with pytest.raises(Stop):
            train(memory, case, each_batch=stop)
        train(cache, case, each_batch=look)
        assert looked > 200
        assert_same_bits(result_of(store, passes, None), replace(resident_result(case, passes), dense={}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_device_budget_counts_two_bytes_a_number_and_the_key(tmp_path: Path, dtype: str) -> None:
    """Vector, state, slot maps and eight bytes of key for each row: the tier's arrays, and what extraction plans."""
    case = case_of(dtype)
    passes = case.cut(tmp_path / "passes")
    most = max(sum(p.rows(t.name) for t in case.tables) for p in passes.passes)
    with open_store(tmp_path / "s.tc", case, "memory") as store, tiered(store, passes) as cache:
        assert cache.device_bytes == most * (4 * 4 + 4 * 7 + 28 + 8)
        held = sum(field.nbytes for field in cache._rows.device.arrays_G[0].fields)
        assert held + cache._rows.device.arrays_G[0].streams.nbytes == most * (4 * 4 + 4 * 7 + 8)
        assert RowBudget(case.tables, 1).needed([most, 0]) == cache.device_bytes
    wide = replace(case, tables=tuple(replace(one, dtype="float32") for one in case.tables))
    assert RowBudget(wide.tables, 1).needed([most, 0]) == most * (4 * 7 + 4 * 7 + 28)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_memory_are_numbers_of_the_dtype(tmp_path: Path, dtype: str) -> None:
    """From the first row on; the state is not rounded."""
    case = case_of(dtype)
    cache = resident(case.cut(tmp_path / "passes"))
    for one in cache.tables:
        np.testing.assert_array_equal(cache.fields(one.name)[0], initial_rows(one, cache.keys(one.name))[0])
    train(cache, case)
    for one in cache.tables:
        vectors, sums = cache.fields(one.name)
        np.testing.assert_array_equal(vectors, nearest(vectors, dtype))
        assert not np.array_equal(sums, nearest(sums, dtype))
