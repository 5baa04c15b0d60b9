"""Whole trainings by the CUDA kernels: on the shim, or on the GPU of `make test-gpu`, against those of the CPU."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.training.cases import (
    SPECS,
    Case,
    Result,
    Spec,
    assert_same_bits,
    open_store,
    resident_result,
    result_of,
    result_of_resident,
    smallest_host_budget,
    table,
    tiered,
    train,
)  # fmt: skip
from tests.training.devices import DEVICE, cuda_device, shim
from tests.training.raw import key_sets, train_raw
from tests.training.shim_gpu import ShimRuntime
from tests.training.shim_streams import Event
from tests.training.test_missing_keys import missing_some
from tests.training.test_parity import INITIALIZERS, OPTIMIZERS, Stop, cases
from tiercache.backends.cuda import CudaBackend
from tiercache.errors import BudgetError, CudaError
from tiercache.store.errors import CorruptBlockError
from tiercache.store.vectors import nearest
from tiercache.tiers.pinned_arena import PinnedArena

ROOT = Path(__file__).parents[2]


def on_cuda(case: Case, passes: tc.PassDataset, order: str = "forward") -> Result:
    """Train ``case`` in the device's memory."""
    cache = tc.InMemoryCache(passes, order_seed=case.order_seed, device=cuda_device(order))
    return result_of_resident(cache, train(cache, case))


def on_a_cpu(case: Case, passes: tc.PassDataset) -> Result:
    """Train ``case`` in memory."""
    return resident_result(case, passes, device="cpu")


def assert_close(ours: Result, theirs: Result) -> None:
    """Compare keys exactly, rows, optimizer state and dense weights within 1e-5."""
    assert ours.rows.keys() == theirs.rows.keys()
    for name, (keys, fields) in ours.rows.items():
        np.testing.assert_array_equal(keys, theirs.rows[name][0])
        for mine, other in zip(fields, theirs.rows[name][1], strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5, err_msg=name)
    for name, weight in ours.dense.items():
        torch.testing.assert_close(weight.cpu(), theirs.dense[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("optimizer", "initializer"), list(zip(OPTIMIZERS, INITIALIZERS, strict=True)))
def test_tiers_on_cuda_end_with_the_bits_of_memory_on_cuda(tmp_path: Path, optimizer: Any, initializer: Any) -> None:
    """Two groups, four ways of pooling; as the CPU within 1e-5, and on the shim, whose dense layers are the CPU's,
    to the last bit, as no row has more than 256 entries in a step.
    """
    case = Case(
        tables=(table("a", 8, optimizer, initializer), table("b", 3, optimizer, initializer)), specs=SPECS,
        num_samples=128, pass_rows=32,
    )  # fmt: skip
    passes = case.cut(tmp_path / "passes")
    expected, cpu = on_cuda(case, passes), on_a_cpu(case, passes)
    device = cuda_device("random")
    with open_store(tmp_path / "model.tc", case, "lmdb") as store:
        with tiered(store, passes, device=device) as cache:
            model = train(cache, case)
            assert all(report.planned_equals_measured for report in cache.reports)
        assert_same_bits(result_of(store, passes, model), expected)
    assert_close(expected, cpu)
    if not isinstance(device, str):
        assert_same_bits(expected, cpu)
        launched = {kernel.split(".")[0] for kernel in device._runtime.kernels.launches}
        assert launched == {"rows", "initial", "pooling", "sorting", "update"}
        assert not device._runtime.pinned_pages, "the cache is closed and pages are still pinned"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_rows_of_16_bits_on_cuda_are_rounded_as_on_a_cpu(tmp_path: Path, optimizer: Any, dtype: str) -> None:
    """Beside a float32 group; new rows made by the GPU and by the reader; the tiers' slots are not those of memory.

    On the shim to the CPU's bits; on a GPU, whose dense layers have bits of their own, to those of memory on it.
    """
    case = Case(
        tables=(
            table("a", 8, optimizer, dtype=dtype), table("c", 5, optimizer, tc.init.Normal(mean=0.0, std=0.1), dtype=dtype),
            table("b", 3, optimizer),
        ),
        specs=(*SPECS, Spec(name="j", table="c", hotness="ragged", mode="max"), Spec(name="k", table="c")),
        num_samples=128, pass_rows=32,
    )  # fmt: skip
    passes = case.cut(tmp_path / "passes")
    device = cuda_device("random")
    with open_store(tmp_path / "model.tc", case, "lmdb") as store:
        with tiered(store, passes, device=device) as cache:
            model = train(cache, case)
            assert all(report.planned_equals_measured for report in cache.reports)
        ended = result_of(store, passes, model)
    assert_same_bits(ended, on_cuda(case, passes))
    vectors, *state = ended.rows["a"][1]
    assert np.array_equal(vectors, nearest(vectors, dtype))
    assert not any(np.array_equal(one, nearest(one, dtype)) for one in state)
    if not isinstance(device, str):
        assert_same_bits(ended, on_a_cpu(case, passes))
        assert {"pooling.pool_narrow", "rounding.set_streams"} <= set(device._runtime.kernels.launches)


@pytest.mark.parametrize("missing", ["zero", "init", "load"])
def test_raw_keys_that_a_pass_lacks_are_looked_up_on_cuda_and_train_nothing(tmp_path: Path, missing: str) -> None:
    """A third of all keys: maxima, means and weights with rows of the pass beside others, of 16 bits too."""
    case = Case(
        tables=(table("a", 8), table("b", 3, dtype="float16")), specs=SPECS, num_samples=96, pass_rows=32, shuffle=False
    )
    samples = case.cut(tmp_path / "samples")
    passes = key_sets(tmp_path / "keys", samples)
    options = {"change": missing_some(case, samples), "missing": missing}

    def in_memory(device: Any) -> Result:
        cache = tc.InMemoryCache(passes, device=device)
        return result_of_resident(cache, train_raw(cache, case, samples, **options))

    expected = in_memory(cuda_device())
    with open_store(tmp_path / "model.tc", case, "lmdb") as store:
        with tiered(store, passes, device=cuda_device("random")) as cache:
            model = train_raw(cache, case, samples, **options)
        assert_same_bits(result_of(store, passes, model), expected)
    if DEVICE != "cuda":
        assert_same_bits(in_memory("cpu"), expected)


def test_an_evaluation_of_raw_keys_on_cuda_sees_rows_as_of_now(tmp_path: Path) -> None:
    """In the middle of a pass: rows of the device, of the store, of no sub-dataset, and a feature without keys."""
    case = replace(KILLED_CASE, tables=(table("a", 16, dtype="bfloat16"), table("b", 3)), specs=SPECS[:3])
    passes = case.cut(tmp_path / "passes")
    keys = np.unique(np.concatenate([passes.passes[0].keys("a"), passes.passes[1].keys("a"), [10**9]]))
    none = np.zeros(keys.size + 1, np.int64)
    asked = {"f": keys, "g": (np.empty(0, np.int64), none), "h": np.stack([keys] * 3, 1)}
    seen = 0

    def each_batch(pass_index: int, batch: int) -> None:
        nonlocal seen
        if (pass_index, batch) != (1, 0):
            return
        made = cache.evaluate_batch(asked)
        vectors, now = tc.EmbeddingCollection(cache.schema)(made), cache.live_rows()
        np.testing.assert_array_equal(vectors["f"].detach().cpu().numpy(), now.fields("a", keys)[0])
        found = vectors["h"].detach().cpu().numpy().reshape(keys.size, 3, 3)
        np.testing.assert_array_equal(found, np.stack([now.fields("b", keys)[0]] * 3, 1))
        assert not tc.EmbeddingBagCollection(cache.schema, ["g"], mode="max")(made).abs().sum().item()
        seen += 1

    with open_store(tmp_path / "x", case, "memory") as store, tiered(store, passes, device=cuda_device()) as cache:
        train(cache, case, each_batch=each_batch)
    assert seen == 1


def test_streams_of_16_bit_rows_are_within_the_device_budget(tmp_path: Path) -> None:
    """Part of the one allocation, 8 bytes a row; float32 rows have none."""
    case = Case(tables=(table("a", 5, dtype="float16"), table("b", 3)), specs=SPECS, num_keys=500)
    passes = case.cut(tmp_path / "passes")
    with open_store(tmp_path / "x", case, "memory") as store, tiered(store, passes, device=cuda_device()) as cache:
        by_dtype = {
            group.dtype: arrays for group, arrays in zip(store.groups, cache._rows.device.arrays_G, strict=True)
        }
        rounded, plain = by_dtype["float16"], by_dtype["float32"]
        assert rounded.streams.shape[0] == rounded.fields[0].shape[0]
        assert plain.streams.shape[0] == 0
        storage = rounded.streams.untyped_storage()
        assert storage.data_ptr() == plain.fields[0].untyped_storage().data_ptr()
        assert storage.nbytes() <= cache.device_bytes


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.sampled_from(("forward", "reversed", "random")))
def test_budgets_commits_and_restarts_on_cuda_change_no_bit(drawn: tuple[Case, dict[str, Any]], order: str) -> None:
    """Commits inside passes, accumulation, a restart in the middle, the smallest budget: the bits of memory on CUDA."""
    case, how = drawn
    case = replace(case, num_samples=64, pass_rows=16)
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        passes = case.cut(tmp / "passes")
        with open_store(tmp / "model.tc", case, how["engine"]) as store:
            options: dict[str, Any] = {"commit_every": how["commit_every"], "order_seed": case.order_seed}
            options["device_budget"] = "64MiB"
            if how["tight"]:
                options["host_budget"] = smallest_host_budget(store, passes, device=cuda_device(order), **options)

            def each_batch(pass_index: int, batch: int) -> None:
                if (pass_index, batch) in how["commits"]:
                    cache.commit()
                if (pass_index, batch) == how["stop_after"]:
                    raise Stop

            with tiered(store, passes, device=cuda_device(order), **options) as cache:
                try:
                    model = train(cache, case, each_batch=each_batch)
                except Stop:
                    how["stop_after"] = None
                    with tiered(store, passes, device=cuda_device(order), **options) as cache:  # noqa: PLW2901 - goes on
                        model = train(cache, case, seed=99, each_batch=each_batch)
                assert all(report.planned_equals_measured for report in cache.reports)
                assert cache.host_bytes_peak <= cache._rows.budget.rows
            ended = result_of(store, passes, model)
        assert_same_bits(ended, on_cuda(case, passes, order))
        if DEVICE != "cuda" or all(one.dtype == "float32" for one in case.tables):  # rounding makes a last bit a step
            assert_close(ended, on_a_cpu(case, passes))


KILLED = """
import os, sys
from pathlib import Path
import tiercache as tc
from tests.training.cases import tiered, train
from tests.training.test_cuda_training import KILLED_CASE, cuda_device
passes = tc.PassDataset.open(Path(sys.argv[1]))
def each_batch(pass_index, batch):
    if (pass_index, batch) == (1, 0):
        cache.commit()
    if (pass_index, batch) == (2, 1):
        os.kill(os.getpid(), 9)
with tc.Store.open(sys.argv[2], tables=KILLED_CASE.tables) as store:
    with tiered(store, passes, device=cuda_device()) as cache:
        train(cache, KILLED_CASE, each_batch=each_batch)
"""
KILLED_CASE = Case(
    tables=(table("a", 16, tc.optim.Adam(learning_rate=0.01)),), specs=SPECS[:1], num_samples=96, pass_rows=32
)


def test_a_training_on_cuda_that_was_killed_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """SIGKILL inside a pass; another process goes on from the last commit."""
    passes = KILLED_CASE.cut(tmp_path / "passes")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "passes"), str(tmp_path / "model.tc")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    with tc.Store.open(tmp_path / "model.tc", tables=KILLED_CASE.tables) as store:
        assert store.commit is not None
        with tiered(store, passes, device=cuda_device()) as cache:
            model = train(cache, KILLED_CASE, seed=99)
        assert_same_bits(result_of(store, passes, model), on_cuda(KILLED_CASE, passes))


def test_single_vectors_and_weights_have_the_gradients_of_a_cpu(tmp_path: Path) -> None:
    """EmbeddingCollection, and weights given as tensors beside the data's own, in one step with accumulation."""
    case = Case(tables=(table("a", 8), table("b", 3)), specs=SPECS, num_samples=32, pass_rows=32)
    passes, seen = case.cut(tmp_path / "passes"), []
    for device in ("cpu", cuda_device("random")):
        cache = tc.InMemoryCache(passes, device=device)
        single, bag = (
            tc.EmbeddingCollection(cache.schema),
            tc.EmbeddingBagCollection(cache.schema, ["g", "i"], mode={"g": "mean"}),
        )
        weight_grads = []
        for p in cache.passes(epochs=1):
            for batch in p.batches(8):
                ids = batch.ids["g"].num_ids
                weights = torch.linspace(0.5, 2.0, ids).to(cache.device).requires_grad_()
                out = bag(batch, weights={"g": weights}).square().sum()
                (out + sum(part.square().sum() for part in single(batch).values())).backward()
                weight_grads.append(weights.grad.cpu())
                cache.optimizer.step()
        seen.append((torch.cat(weight_grads), cache.fields("a"), cache.fields("b")))
    cpu, cuda = seen
    torch.testing.assert_close(cpu[0], cuda[0], rtol=1e-5, atol=1e-6)
    for mine, other in zip((*cpu[1], *cpu[2]), (*cuda[1], *cuda[2]), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_evaluation_on_cuda_sees_the_rows_of_a_cpu(tmp_path: Path) -> None:
    """In the middle of a pass: rows of the device, of host blocks and of the store, and keys never trained."""
    case = Case(tables=(table("a", 8), table("b", 3)), specs=SPECS, num_samples=96, pass_rows=32, epochs=1)
    passes = case.cut(tmp_path / "passes")
    others = replace(case, num_keys=400, data_seed=3, num_samples=48).cut(tmp_path / "others")
    seen: list[list[torch.Tensor]] = []
    for device in ("cpu", cuda_device()):
        outs: list[torch.Tensor] = []

        def each_batch(pass_index: int, batch: int, outs: list[torch.Tensor] = outs) -> None:
            if (pass_index, batch) == (2, 0):
                bag = tc.EmbeddingBagCollection(cache.schema)
                outs.extend(bag(b).detach().cpu() for part in cache.evaluate(others) for b in part.batches(16))

        with open_store(tmp_path / "x", case, "memory") as store, tiered(store, passes, device=device) as cache:
            train(cache, case, each_batch=each_batch)
        seen.append(outs)
    assert seen[0]
    for cpu, cuda in zip(*seen, strict=True):
        torch.testing.assert_close(cpu, cuda, rtol=1e-5, atol=1e-5)


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


def test_the_device_tier_is_one_allocation_within_the_budget(tmp_path: Path) -> None:
    """Fields, slots, orders and keys of all groups, each from a cache line on; a budget of a byte less is refused."""
    case = Case(tables=(table("a", 5), table("b", 3)), specs=SPECS, num_keys=500)
    passes = case.cut(tmp_path / "passes")
    with open_store(tmp_path / "x", case, "memory") as store:
        with tiered(store, passes, device=cuda_device()) as cache:
            parts = [part for arrays in cache._rows.device.arrays_G for part in (*arrays.fields, *arrays[1:])]
            need = cache.device_bytes
        assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
        assert parts[0].untyped_storage().nbytes() <= need
        assert all(part.data_ptr() % 128 == 0 for part in parts)
        tiered(store, passes, device=cuda_device(), device_budget=need).close()
        with pytest.raises(BudgetError, match="the passes need"):
            tiered(store, passes, device=cuda_device(), device_budget=need - 1)


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


def test_nothing_of_cuda_is_imported_before_a_gpu_is_asked_for() -> None:
    """Neither by the import of the package, nor by its names, nor by a cache on a CPU."""
    script = (
        "import sys, tiercache as tc\n"
        "assert tc.TierCache and tc.InMemoryCache and tc.EmbeddingBagCollection\n"
        "from tiercache.backends.opening import open_backend\n"
        "open_backend('cpu', ())\n"
        "print([name for name in sys.modules if 'cupy' in name or name.startswith('tiercache.backends.cuda')])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
