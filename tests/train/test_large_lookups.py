"""Lookups whose output exceeds the caches: rows are read in memory order, and the step need not sort."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.train.cases import Case, Net, Spec, assert_same_bits, resident, resident_result, result_of_resident, table
from tests.train.loops import first_pass
from tiercache.kernels.arrays import NONE_F4, NONE_I4
from tiercache.kernels.cpu import gathering, sorting
from tiercache.rows.backends import cpu as cpu_backend
from tiercache.values.lookups import SavedGradient, SortedSlots

CASE = Case(
    tables=(table("a", 32, tc.optim.Adagrad(learning_rate=0.1)), table("b", 32, tc.optim.Adagrad(learning_rate=0.1))),
    specs=(Spec(name="f", table="a"), Spec(name="g", table="b"), Spec(name="h", table="a"), Spec(name="i", table="b")),
    num_samples=20_000, pass_rows=20_000, num_keys=3000, batch=8192, epochs=1,
)  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the calls of kernels."""
    counts: dict[str, int] = {}

    def counted(name: str, kernel: Any, *arguments: Any) -> Any:
        counts[name] = counts.get(name, 0) + 1
        return kernel(*arguments)

    for name in ("spread_one", "pool_one", "sort_slots"):
        monkeypatch.setattr(cpu_backend, name, partial(counted, name, getattr(cpu_backend, name)))
    return counts


@pytest.mark.parametrize("accumulate", [1, 3])
def test_rows_are_trained_to_the_same_bits_whatever_order_they_are_read_in(
    tmp_path: Path, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    """Two batches are large and sorted ahead of the step, one is not; lookups of one step are sorted together again."""
    case = replace(CASE, accumulate=accumulate)
    passes = case.cut(tmp_path / "passes")
    ours = resident_result(case, passes, device="cpu")
    assert calls == {"spread_one": 2, "pool_one": 1, "sort_slots": 3}
    monkeypatch.setattr(gathering, "STREAM_BYTES", 1 << 40)
    assert_same_bits(ours, resident_result(case, passes, device="cpu"))
    assert calls["spread_one"] == 2


def test_a_lookup_that_no_step_follows_is_not_sorted(tmp_path: Path, calls: dict[str, int]) -> None:
    passes = CASE.cut(tmp_path / "passes")
    cache = resident(passes, device="cpu")
    model = Net(cache, CASE)
    before = result_of_resident(cache, model)
    with first_pass(cache) as p:
        batch = next(p.batches(8192))
        with torch.no_grad():
            looked_up = model.bag(batch)
        assert calls == {"pool_one": 1}
        assert torch.equal(looked_up, model.bag(batch))
        assert calls == {"pool_one": 1, "spread_one": 1, "sort_slots": 1}
    assert_same_bits(before, result_of_resident(cache, model))


@pytest.mark.parametrize("missing", ["zero", "load"])
@pytest.mark.parametrize("few", [0, 10])
def test_rows_beside_missing_keys_are_trained_to_the_same_bits(
    tmp_path: Path, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch, missing: str, few: int
) -> None:
    """Such a lookup numbers rows differently from the step: a sort for one is not used for the other."""
    rng = np.random.default_rng(few)
    every = np.arange(2000)
    schema = tc.Schema(features=tuple(tc.Feature(name=s.name, table=s.table) for s in CASE.specs), tables=CASE.tables)
    passes = tc.write_key_sets(tmp_path / "keys", schema, [{"a": every, "b": every}])
    keys = {spec.name: rng.permutation(np.arange(9000) % (2000 + few)) for spec in CASE.specs}
    gradient = torch.from_numpy(rng.standard_normal((9000, 128)).astype(np.float32))
    results = []
    for stream_bytes in (gathering.STREAM_BYTES, 1 << 40):
        monkeypatch.setattr(gathering, "STREAM_BYTES", stream_bytes)
        cache = resident(passes, device="cpu")
        bag = tc.EmbeddingBagCollection(cache.schema)
        loop = cache.passes(epochs=1)
        p = next(loop)
        for _ in range(2):
            bag(p.batch(keys, missing=missing)).backward(gradient)
            cache.optimizer.step()
        results.append(result_of_resident(cache, bag))
    assert calls["spread_one"] == 2
    assert_same_bits(*results)


def test_sums_take_what_the_lookup_sorted(calls: dict[str, int]) -> None:
    rng = np.random.default_rng(0)
    slots, gradient = rng.integers(0, 50, 400).astype(np.int32), rng.standard_normal((400, 8)).astype(np.float32)
    pairs = sorting.sort_slots(slots, 50, sorting.SortBuffers())
    backend, sums = cpu_backend.CpuBackend(), []
    for found in (None, SortedSlots(slots, pairs)):
        pending = SavedGradient(
            slots=slots, gradient=gradient.reshape(-1), width=8, cols=np.zeros(1, np.int64), places=None,
            scales=NONE_F4, argmax=NONE_I4, sorted=found,
        )  # fmt: skip
        sums.append(np.zeros((50, 8), np.float32))
        backend.sum([pending], 0.5, sums[-1])
        assert calls == {"sort_slots": 1}
    assert np.array_equal(*sums)
    with pytest.raises(ValueError, match="slots go from 0 to 39"):
        backend.sum([pending], 0.5, np.zeros((40, 8), np.float32))
