"""A training's use of a GPU, on the shim or on the GPU of `make test-gpu`: bytes, memory and the order of moves."""

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import tiercache as tc
from tests.train.cases import SPECS, Case, Spec, assert_same_bits, open_store, result_of, table, tiered, train
from tests.train.devices import DEVICES
from tests.train.shim_gpu import ShimRuntime
from tiercache.data.pass_builder import RowBudget
from tiercache.errors import BudgetError, CudaError
from tiercache.planning.budgets import PAGE_BYTES, HostBudget, paged
from tiercache.planning.row_offsets import RowOffsets
from tiercache.rows.backends.cpu import CpuBackend
from tiercache.rows.backends.cuda import CudaBackend
from tiercache.rows.backends.open_backend import open_backend
from tiercache.rows.device import DeviceMemoryPlan
from tiercache.store.layout import Range, SegmentLayout
from tiercache.store.table import group_tables


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "float16"), ("cpu", "bfloat16"), ("cpu", "float16")])
def test_the_device_tier_is_one_allocation_of_the_planned_bytes(tmp_path: Path, device: str, dtype: str) -> None:
    """Fields, slots, orders and keys of all groups, each aligned to a cache line; one byte less of budget is refused.

    For each row: vector, state and slot maps; for 16-bit rows, two bytes per number and eight for the key, which
    float32 rows do not need. Extraction plans slot maps of 28 bytes on any device; on a GPU they take 16.
    """
    case = Case(tables=(table("a", 7, dtype=dtype), table("b", 3)), specs=SPECS, num_keys=500)
    passes = case.cut(tmp_path / "passes")
    rows = {name: max(p.rows(name) for p in passes) for name in "ab"}
    positions = RowOffsets.of(passes, group_tables(passes.tables))
    need = DeviceMemoryPlan.of(positions, open_backend(DEVICES[device](), passes.tables)).num_bytes
    with open_store(tmp_path / "x", case, "memory") as store:
        with tiered(store, passes, device=DEVICES[device](), device_budget=need) as cache:
            assert cache.device_bytes == need
            arrays_G = cache._rows.device.arrays_G
            by_name = {group.tables[0].name: arrays for group, arrays in zip(store.groups, arrays_G, strict=True)}
            for name, row_bytes, key_bytes in (("a", 4 * 4 + 4 * 7, 8), ("b", 4 * 3 + 4 * 3, 0)):
                assert sum(field.nbytes for field in by_name[name].fields) == rows[name] * row_bytes
                assert by_name[name].streams.nbytes == rows[name] * key_bytes
            parts = [part for arrays in arrays_G for part in (*arrays.fields, *arrays[1:])]

        planned = rows["a"] * (4 * 4 + 4 * 7 + 8) + rows["b"] * (4 * 3 + 4 * 3)
        slots = rows["a"] + rows["b"]
        assert RowBudget(case.tables, 1).needed([rows[one.name] for one in passes.tables]) == planned + 28 * slots
        assert (
            0 <= need - planned - (16 if device == "cuda" else 28) * slots < len(parts) * 128 * (device == "cuda") + 1
        )
        if device == "cuda":
            assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
            assert parts[0].untyped_storage().nbytes() <= need
            assert all(part.data_ptr() % 128 == 0 for part in parts)
        tiered(store, passes, device=DEVICES[device](), device_budget=need).close()
        with pytest.raises(BudgetError, match="the passes need"):
            tiered(store, passes, device=DEVICES[device](), device_budget=need - 1)


def test_what_cannot_be_trained_on_is_said_before_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tables=(table("a", 64),), specs=SPECS[:1])
    passes = case.cut(tmp_path / "passes")
    device = CudaBackend(ShimRuntime(free_bytes=5000))
    with open_store(tmp_path / "model.tc", case, "lmdb") as store:
        words = r"need .* on the shim, which has 4.88 KiB .* budget of at most 5000 bytes"
        with pytest.raises(BudgetError, match=words):
            tiered(store, passes, device=device)
        with pytest.raises(ValueError, match="device is 'gpu': expected 'cpu', 'cuda'"):
            tiered(store, passes, device="gpu")
        monkeypatch.setitem(sys.modules, "cupy", None)
        with pytest.raises(CudaError, match=r"CuPy cannot be imported .*pip install 'tiercache-embeddings\[cuda13\]'"):
            tiered(store, passes, device="cuda")
        assert store.commit is None
    with pytest.raises(BudgetError, match=r"InMemoryCache holds all rows .* need"):
        tc.InMemoryCache(passes, device=device)
    with pytest.raises(CudaError, match="CuPy cannot be imported"):
        tc.InMemoryCache(passes, device="cuda:1")


MOVED = Case(
    tables=(table("a", 32), table("b", 32)), specs=(Spec(name="f", table="a"), Spec(name="g", table="b")),
    num_samples=400, pass_rows=200, num_keys=400, batch=100, epochs=1,
)  # fmt: skip


class CountingGpu(ShimRuntime):
    """Counts bytes that are copied to the device other than those of batches, which threads make ahead of time."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = 0

    def copy(self, host: torch.Tensor, there: torch.Tensor, *, lasting: bool = False) -> None:
        if not threading.current_thread().name.startswith("tiercache-batches"):
            self.copied += host.nbytes
        super().copy(host, there, lasting=lasting)


def test_a_commit_inside_a_pass_brings_nothing_to_the_device(tmp_path: Path) -> None:
    """Its rows are in position order, so no order has to be uploaded. It ends with the bits of a CPU."""
    passes, results = MOVED.cut(tmp_path / "passes"), []
    for gpu in (None, CountingGpu()):
        seen: list[int] = []

        def commit(pass_index: int, batch: int, gpu: Any = gpu, seen: list[int] = seen) -> None:
            cache.drain()  # the reader copies keys of new rows
            before = 0 if gpu is None else gpu.copied
            cache.commit()
            blocks = next(s for s in store.segments if s.within).layouts[0].num_blocks
            assert blocks > 10
            seen.append(0 if gpu is None else gpu.copied - before)

        device = CpuBackend() if gpu is None else CudaBackend(gpu)
        with open_store(tmp_path / str(gpu is None), MOVED, "lmdb") as store:
            with tiered(store, passes, device=device) as cache:
                model = train(cache, MOVED, each_batch=commit)
            results.append(result_of(store, passes, model))
        assert seen
        assert set(seen) == {0}
    assert_same_bits(*results)


def test_of_16_bit_rows_a_switch_brings_the_keys_of_those_that_are_loaded(tmp_path: Path) -> None:
    """Kept rows already have their random bits: besides slots, a key and a slot for each other row, or all keys."""
    case = replace(MOVED, tables=(table("a", 32, dtype="bfloat16"), table("b", 32, dtype="bfloat16")), num_keys=250)
    passes, gpu = case.cut(tmp_path / "passes"), CountingGpu()
    with open_store(tmp_path / "x", case, "memory") as store, tiered(store, passes, device=CudaBackend(gpu)) as cache:
        kept, noted = [], list[int]()
        note, tier = cache._rows.transfer.device.write_streams, cache._rows.transfer.device

        def count(*arguments: Any) -> None:
            copied = gpu.copied
            note(*arguments)
            noted.append(gpu.copied - copied)

        tier.write_streams = count  # type: ignore[method-assign]
        for p in cache.passes(epochs=2):
            plan = cache._rows.transfer.plan
            assert plan is not None
            assert plan.pass_index == p.index
            kept.append((plan.kept_G[0], plan.rows_G[0]))
            p.skip()
    assert any(kept_rows > rows // 2 for kept_rows, rows in kept), kept
    for num_bytes, (kept_rows, rows) in zip(noted, kept, strict=True):
        assert num_bytes <= 12 * (rows - kept_rows)
        assert num_bytes <= 8 * rows


def test_single_vectors_of_tables_of_several_dims_are_gathered_in_one_launch(tmp_path: Path) -> None:
    """Ids become slots group by group; vectors, and rows stepped by either table's gradient, equal a CPU's."""
    case = replace(MOVED, tables=(table("a", 32), table("b", 5)))
    passes, gpu, seen = case.cut(tmp_path / "passes"), ShimRuntime(), []
    for device in (CpuBackend(), CudaBackend(gpu)):
        cache = tc.InMemoryCache(passes, device=device)
        loop = cache.passes(epochs=1)
        batch = next(next(loop).batches(100))
        gpu.kernels.launches.clear()
        vectors = tc.EmbeddingCollection(cache.schema)(batch)
        launches = [kernel for kernel in gpu.kernels.launches if kernel.startswith("gathering.")]
        for name in ("f", "g"):
            (vectors[name] ** 2).sum().backward()
        cache.optimizer.step()
        seen.append([found.detach() for found in vectors.values()] + [cache.fields(name)[0] for name in ("a", "b")])
    assert launches == ["gathering.gather"]
    assert [found.shape[1] for found in seen[0]] == [32, 5, 32, 5]
    assert all(np.array_equal(*pair) for pair in zip(*seen, strict=True))


def test_of_an_order_a_block_brings_what_it_has(tmp_path: Path) -> None:
    """Four bytes for each of its rows, for any blocks packed together; with the same bytes."""
    passes, gpu = MOVED.cut(tmp_path / "passes"), CountingGpu()
    with open_store(tmp_path / "x", MOVED, "memory") as store, tiered(store, passes, device=CudaBackend(gpu)) as cache:
        next(loop := cache.passes(epochs=1))
        packer, plan = cache._rows.transfer._packer, cache._rows.transfer.plan
        assert plan is not None
        layout, order = plan.dumps[0], cache._rows.transfer.assignments[0].dump_order_K
        num = layout.num_blocks
        assert num > 10
        found = []
        for together in ([range(num)], [range(3), range(3, num)], [range(b, b + 1) for b in range(num)]):
            before = gpu.copied
            data = [cache._backend.scratch(layout.bytes_of_block(b)) for b in range(layout.num_blocks)]
            for blocks in together:
                packer.pack(0, order, packer.lay_out(layout, blocks[0], [data[b] for b in blocks]))
                cache._backend.streams.dumped().wait()
            assert gpu.copied - before == 4 * layout.rows
            found.append(np.concatenate(data))
        assert np.array_equal(found[0], found[1])
        assert np.array_equal(found[0], found[2])
        loop.close()


@given(st.integers(1, PAGE_BYTES // 4), st.integers(1, 1 << 30), st.integers(1 << 20, 1 << 33))
def test_a_full_block_of_rows_of_a_page_at_most_has_the_pages_of_a_region(words: int, largest: int, total: int) -> None:
    """So staging and dumps can reuse each other's regions; and the plan counts as many bytes as before."""
    row_bytes = 4 * words
    budget = HostBudget.plan(total, evaluation=None, largest_row=row_bytes, largest_pass=largest)
    rows = budget.block // row_bytes
    layout = SegmentLayout.of(
        row_bytes=row_bytes, page_rows=max(1, budget.page // row_bytes), block_bytes=budget.block,
        ranges=(Range(next_use=1, table_rows=(rows,)),),
    )  # fmt: skip
    assert layout.num_blocks == 1
    assert paged(layout.bytes_of_block(0)) == budget.region == paged(budget.block)
    unrounded = max(min(largest // 32, 16 << 20), row_bytes, PAGE_BYTES)
    assert budget.region == paged(unrounded)


class Copies(TorchDispatchMode):
    """Counts the bytes that operators of torch copy."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in {torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten.cat}:
            self.num_bytes += found.nbytes
        return found


def trained(passes: tc.PassDataset, device: str, modules: Sequence[Callable[[tc.Schema], Any]], batch: int) -> Any:
    """Train an epoch with concatenated outputs; return the fields of all tables, and the bytes that steps copied."""
    with tc.InMemoryCache(passes, device=DEVICES[device]()) as cache, Copies() as copies:
        model = torch.nn.ModuleList([make(cache.schema) for make in modules])
        cache.register(model=model)
        copied = 0
        for p in cache.passes(epochs=1):
            for samples in p.batches(batch):
                outs = [module(samples) for module in model]
                parts = [one for out in outs for one in ([out] if isinstance(out, torch.Tensor) else out.values())]
                wide = [torch.cat([one, one.detach().abs() + 1], dim=1) for one in parts]
                torch.cat([one.sin().prod(dim=1) + (one * one).sum(dim=1) for one in wide]).sum().backward()
                before = copies.num_bytes
                cache.optimizer.step()
                copied += copies.num_bytes - before
                cache.optimizer.zero_grad()
        return [cache.fields(one.name) for one in passes.tables], copied


def bags(mode: str, feature: str) -> Callable[[tc.Schema], Any]:
    return partial(tc.EmbeddingBagCollection, features=[feature], mode=mode)


@pytest.mark.parametrize("hotness", ["one_hot", "ragged"])
@pytest.mark.parametrize(
    ("modules", "dims"),
    [
        pytest.param([tc.EmbeddingCollection], (8, 5), id="vectors"),
        pytest.param([tc.EmbeddingBagCollection], (8, 5), id="bags"),
        pytest.param([bags("max", "f"), bags("sum", "g")], (32, 32), id="beside maxima, which are contiguous"),
        pytest.param([bags("mean", "f"), bags("max", "g")], (32, 32), id="before maxima"),
    ],
)
def test_gradients_are_read_in_place(tmp_path: Path, modules: list[Any], dims: tuple[int, int], hotness: str) -> None:
    """Their samples are apart, and nothing is copied; rows end with the bits of a CPU."""
    specs = (Spec(name="f", table="a", hotness=hotness), Spec(name="g", table="b", hotness=hotness))
    case = replace(MOVED, tables=(table("a", dims[0]), table("b", dims[1])), specs=specs)
    passes = case.cut(tmp_path / "passes")
    (cpu, _), (cuda, copied) = (trained(passes, device, modules, case.batch) for device in ("cpu", "cuda"))
    assert copied == 0 or len(modules) > 1
    for ours, theirs in zip(cuda, cpu, strict=True):
        assert all(map(np.array_equal, ours, theirs))
