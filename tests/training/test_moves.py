"""What a switch and a commit bring over the link beside rows, in bytes, and which pages they lock for it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import tiercache as tc
from tests.training.cases import Case, Spec, assert_same_bits, open_store, result_of, table, tiered, train
from tests.training.shim_gpu import ShimRuntime
from tiercache.backends.cpu import CpuBackend
from tiercache.backends.cuda import CudaBackend
from tiercache.planning.budget import PAGE_BYTES, HostBudget, paged
from tiercache.store.segment_layout import Range, SegmentLayout
from tiercache.tiers.pinned_arena import PinnedArena

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    import torch

CASE = Case(
    tables=(table("a", 32), table("b", 32)), specs=(Spec(name="f", table="a"), Spec(name="g", table="b")),
    num_samples=400, pass_rows=200, num_keys=400, batch=100, epochs=1,
)  # fmt: skip


class CountingGpu(ShimRuntime):
    """Counts bytes that are copied to the device, and the bytes of each page range that is pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.copied, self.locks = 0, list[int]()

    def copy(self, host: torch.Tensor, there: torch.Tensor, *, lasting: bool = False) -> None:
        """Count and copy."""
        self.copied += host.nbytes
        super().copy(host, there, lasting=lasting)

    def pin(self, address: int, num_bytes: int) -> None:
        """Count and pin."""
        self.locks.append(num_bytes)
        super().pin(address, num_bytes)


def test_a_commit_inside_a_pass_brings_nothing_to_the_device(tmp_path: Path) -> None:
    """Its rows stand in the order of their positions: no order has to be there. It ends with the bits of a CPU."""
    passes, results = CASE.cut(tmp_path / "passes"), []
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
        with open_store(tmp_path / str(gpu is None), CASE, "lmdb") as store:
            with tiered(store, passes, device=device) as cache:
                model = train(cache, CASE, each_batch=commit)
            results.append(result_of(store, passes, model))
        assert seen
        assert set(seen) == {0}
    assert_same_bits(*results)


def test_of_16_bit_rows_a_switch_brings_the_keys_of_those_that_are_loaded(tmp_path: Path) -> None:
    """Kept rows have their random bits already: beside slots, a key and a slot for each other row, or all keys."""
    case = replace(CASE, tables=(table("a", 32, dtype="bfloat16"), table("b", 32, dtype="bfloat16")), num_keys=250)
    passes, gpu = case.cut(tmp_path / "passes"), CountingGpu()
    with open_store(tmp_path / "x", case, "memory") as store, tiered(store, passes, device=CudaBackend(gpu)) as cache:
        kept, noted = [], list[int]()
        note, tier = cache._rows.transfer.device.note_keys, cache._rows.transfer.device

        def count(*arguments: Any) -> None:
            copied = gpu.copied
            note(*arguments)
            noted.append(gpu.copied - copied)

        tier.note_keys = count  # type: ignore[method-assign]
        for p in cache.passes(epochs=2):
            plan = cache._rows.transfer.plan
            assert plan is not None
            assert plan.pass_index == p.index
            kept.append((plan.kept_G[0], plan.rows_G[0]))
    assert any(kept_rows > rows // 2 for kept_rows, rows in kept), kept
    for num_bytes, (kept_rows, rows) in zip(noted, kept, strict=True):
        assert num_bytes <= 12 * (rows - kept_rows)
        assert num_bytes <= 8 * rows


def test_single_vectors_of_tables_of_several_dims_are_gathered_in_one_launch(tmp_path: Path) -> None:
    """Ids become slots group by group; vectors, and rows stepped by either table's gradient, are a CPU's."""
    case = replace(CASE, tables=(table("a", 32), table("b", 5)))
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
    assert launches == ["gathering.map_slots", "gathering.gather"]
    assert [found.shape[1] for found in seen[0]] == [32, 5, 32, 5]
    assert all(np.array_equal(*pair) for pair in zip(*seen, strict=True))


def test_of_an_order_a_block_brings_what_it_has(tmp_path: Path) -> None:
    """Four bytes for each of its rows, whichever blocks are packed together; the same bytes come out."""
    passes, gpu = CASE.cut(tmp_path / "passes"), CountingGpu()
    with open_store(tmp_path / "x", CASE, "memory") as store, tiered(store, passes, device=CudaBackend(gpu)) as cache:
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
                packer.pack(0, order, packer.target(layout, blocks[0], [data[b] for b in blocks]))
                cache._backend.streams.dumped().wait()
            assert gpu.copied - before == 4 * layout.rows
            found.append(np.concatenate(data))
        assert np.array_equal(found[0], found[1])
        assert np.array_equal(found[0], found[2])
        loop.close()


def test_a_region_that_was_staging_becomes_a_block_without_pinning_a_page_anew() -> None:
    """Back and forth, where the block's last page is not full; one that lost pages is taken for a short block."""
    gpu = CountingGpu()
    memory = PinnedArena(64 * PAGE_BYTES, 8 * PAGE_BYTES, CudaBackend(gpu))
    for num_bytes in (8 * PAGE_BYTES, 8 * PAGE_BYTES - 100) * 3:
        memory.give_back(memory.take(num_bytes))
    assert gpu.locks == [8 * PAGE_BYTES]
    full, short = memory.take(8 * PAGE_BYTES), memory.take(3 * PAGE_BYTES)
    gpu.locks.clear()
    for _ in range(3):
        memory.give_back(short)
        memory.give_back(full)
        short, full = memory.take(3 * PAGE_BYTES - 5), memory.take(8 * PAGE_BYTES - 5)
    assert gpu.locks == []
    memory.give_back(short)
    memory.give_back(full)
    memory.close()
    assert not gpu.pinned_pages


@given(st.integers(1, PAGE_BYTES // 4), st.integers(1, 1 << 30), st.integers(1 << 20, 1 << 33))
def test_a_full_block_of_rows_of_a_page_at_most_has_the_pages_of_a_region(words: int, largest: int, total: int) -> None:
    """So staging and dumps take each other's regions as they are; and the plan counts as many bytes as before."""
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


def test_memory_that_nobody_closed_is_unlocked_when_it_goes() -> None:
    """A GPU would take the pages that come to these addresses next for it."""
    gpu = CountingGpu()
    memory = PinnedArena(64 * PAGE_BYTES, 8 * PAGE_BYTES, CudaBackend(gpu))
    region = memory.take(8 * PAGE_BYTES)
    memory.give_back(memory.take(PAGE_BYTES))
    assert gpu.pinned_pages
    del memory, region
    assert not gpu.pinned_pages


def test_a_process_that_was_forked_off_unlocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it lets go of is a copy: CUDA would refuse, and the pages are its parent's."""
    gpu = CountingGpu()
    memory = PinnedArena(64 * PAGE_BYTES, 8 * PAGE_BYTES, CudaBackend(gpu))
    region = memory.take(8 * PAGE_BYTES)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        del region
    assert gpu.pinned_pages


def test_closed_memory_holds_nothing() -> None:
    """Not even what it kept to give it again."""
    memory = PinnedArena(64 * PAGE_BYTES, 8 * PAGE_BYTES, CpuBackend())
    memory.give_back(memory.take(8 * PAGE_BYTES))
    assert memory.resident_bytes == 8 * PAGE_BYTES
    memory.close()
    assert memory.resident_bytes == 0
