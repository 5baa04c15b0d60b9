"""Whole trainings by the CUDA kernels: on the shim, or on the GPU of `make test-gpu`, against those of the CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import tiercache as tc
from tests.training.cases import (
    SPECS,
    Case,
    assert_same_bits,
    open_store,
    result_of,
    result_of_resident,
    table,
    tiered,
    train,
)  # fmt: skip
from tests.training.devices import DEVICES, shim
from tests.training.shim_gpu import ShimRuntime
from tests.training.shim_streams import Event
from tiercache.backends.cuda import CudaBackend
from tiercache.data.row_budget import RowBudget
from tiercache.errors import BudgetError, CudaError
from tiercache.store.errors import CorruptBlockError
from tiercache.tiers.pinned_arena import PinnedArena

if TYPE_CHECKING:
    from pathlib import Path

KILLED_CASE = Case(
    tables=(table("a", 16, tc.optim.Adam(learning_rate=0.01)),), specs=SPECS[:1], num_samples=96, pass_rows=32
)


def test_a_writer_that_does_not_wait_for_the_pack_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the shim moves are done as late as a GPU may do them: without the waits other bytes reach the store."""
    case = replace(KILLED_CASE, epochs=1)
    passes = case.cut(tmp_path / "passes")
    expected = result_of_resident(cache := tc.InMemoryCache(passes, device=shim()), train(cache, case))
    monkeypatch.setattr(Event, "wait", lambda _: None)

    def train_and_compare() -> None:
        with open_store(tmp_path / "x", case, "memory") as store:
            with tiered(store, passes, device=shim()) as tiers:
                model = train(tiers, case)
            assert_same_bits(result_of(store, passes, model), expected)

    with pytest.raises((AssertionError, CorruptBlockError)):
        train_and_compare()


def test_pages_are_locked_while_they_are_held_and_only_then() -> None:
    """What is given back is not pinned while that is done, and what is left is pinned again."""
    gpu = ShimRuntime()
    memory = PinnedArena(16 << 12, 8 << 12, CudaBackend(gpu))
    region = memory.take(8 << 12)
    assert sum(gpu.pinned_pages.values()) == 8 << 12
    memory.shrink(region, 2 << 12, 5 << 12)
    (begin,) = gpu.pinned_pages
    assert (begin - region.data.ctypes.data, gpu.pinned_pages[begin]) == (2 << 12, 3 << 12)
    other = memory.take(8 << 12)
    assert sum(gpu.pinned_pages.values()) == memory.resident_bytes == 11 << 12
    memory.give_back(region)
    again = memory.take((6 << 12) - 100)
    assert again is region
    assert sum(gpu.pinned_pages.values()) == memory.resident_bytes == 14 << 12
    memory.give_back(again)
    memory.give_back(other)
    memory.close()
    assert not gpu.pinned_pages


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "float16"), ("cpu", "bfloat16"), ("cpu", "float16")])
def test_the_device_tier_is_one_allocation_of_the_bytes_that_are_planned(
    tmp_path: Path, device: str, dtype: str
) -> None:
    """Fields, slots, orders and keys of all groups, each from a cache line on; a budget of a byte less is refused.

    Of each row vector, state and slot maps; of 16-bit ones, two bytes a number and eight of key, which float32 rows do
    without: the tier's arrays, and what extraction plans.
    """
    case = Case(tables=(table("a", 7, dtype=dtype), table("b", 3)), specs=SPECS, num_keys=500)
    passes = case.cut(tmp_path / "passes")
    rows = {name: max(p.rows(name) for p in passes) for name in "ab"}
    with open_store(tmp_path / "x", case, "memory") as store:
        with tiered(store, passes, device=DEVICES[device]()) as cache:
            need, arrays_G = cache.device_bytes, cache._rows.device.arrays_G
            by_name = {group.tables[0].name: arrays for group, arrays in zip(store.groups, arrays_G, strict=True)}
            for name, row_bytes, key_bytes in (("a", 4 * 4 + 4 * 7, 8), ("b", 4 * 3 + 4 * 3, 0)):
                assert sum(field.nbytes for field in by_name[name].fields) == rows[name] * row_bytes
                assert by_name[name].streams.nbytes == rows[name] * key_bytes
            parts = [part for arrays in arrays_G for part in (*arrays.fields, *arrays[1:])]
        assert need == rows["a"] * (4 * 4 + 4 * 7 + 28 + 8) + rows["b"] * (4 * 3 + 4 * 3 + 28)
        budget = RowBudget(case.tables, 1)
        assert budget.needed([rows[one.name] for one in passes.tables]) == need
        if device == "cuda":
            assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
            assert parts[0].untyped_storage().nbytes() <= need
            assert all(part.data_ptr() % 128 == 0 for part in parts)
        tiered(store, passes, device=DEVICES[device](), device_budget=need).close()
        with pytest.raises(BudgetError, match="the passes need"):
            tiered(store, passes, device=DEVICES[device](), device_budget=need - 1)


def test_a_gpu_with_too_little_memory_is_told_in_bytes(tmp_path: Path) -> None:
    """Needed and free bytes, and which budget fits; nothing is written."""
    case = Case(tables=(table("a", 64),), specs=SPECS[:1])
    passes = case.cut(tmp_path / "passes")
    device = CudaBackend(ShimRuntime(free_bytes=5000))
    with open_store(tmp_path / "model.tc", case, "lmdb") as store:
        with pytest.raises(
            BudgetError, match=r"need .* on the shim, which has 4.88 KiB .* budget of at most 5000 bytes"
        ):
            tiered(store, passes, device=device)
        assert store.commit is None
    with pytest.raises(BudgetError, match=r"InMemoryCache holds all rows .* need"):
        tc.InMemoryCache(passes, device=device)


def test_what_cuda_lacks_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy missing, an unknown device."""
    case = Case(tables=(table("a", 64),), specs=SPECS[:1])
    passes = case.cut(tmp_path / "passes")
    with open_store(tmp_path / "model.tc", case, "lmdb") as store:
        with pytest.raises(ValueError, match="device is 'gpu': it must be 'cpu', 'cuda'"):
            tiered(store, passes, device="gpu")
        monkeypatch.setitem(sys.modules, "cupy", None)
        with pytest.raises(CudaError, match=r"CuPy cannot be imported .*install tiercache\[cuda13\]"):
            tiered(store, passes, device="cuda")
        assert store.commit is None
    with pytest.raises(CudaError, match="CuPy cannot be imported"):
        tc.InMemoryCache(passes, device="cuda:1")
