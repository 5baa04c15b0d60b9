"""Host memory hands out unused pages only, keeps and locks pages in use, and stays within its budget.

For a GPU each region is pinned once, ahead of its use, and unpinned when the cache is closed.
"""

import ctypes
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.cases import (
    Case,
    Spec,
    assert_bits_of_memory,
    open_store,
    registered,
    run,
    smallest_host_budget,
    table,
    tiered,
    train,
)
from tests.train.shim_gpu import ShimRuntime
from tiercache.errors import CudaError
from tiercache.planning.budgets import PAGE_BYTES
from tiercache.planning.host_plan import PageRange, cached_bytes
from tiercache.rows import pinned
from tiercache.rows.backends.cpu import CpuBackend
from tiercache.rows.backends.cuda import CudaBackend
from tiercache.rows.pinned import PinnedArena, PinnedRegion
from tiercache.store.layout import Range, SegmentLayout

REGION = 96
"""Pages of a region."""
BUDGET = 5 * REGION
Operation = tuple[str, int, int]
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["take", "shrink", "give back"]), st.integers(0, REGION), st.integers(0, REGION)),
    max_size=60,
)


class Pins(CpuBackend):
    """Records pinned memory, as for a GPU, and lets the system touch no page of it."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.locks: list[int] = []

    def pin(self, address: int, num_bytes: int) -> None:
        assert address not in self.pinned
        self.pinned[address] = num_bytes
        self.locks.append(num_bytes)

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def watch(self, patch: pytest.MonkeyPatch) -> list[int]:
        """Check every system call against pinned memory; the pages of each move are recorded."""
        move, advise, moves = pinned._mremap, pinned._madvise, list[int]()
        assert move is not None

        def watched_move(source: int, size: int, new_size: int, flags: int, target: int) -> int | None:
            self.check(source, size)
            self.check(target, size)
            moves.append(size // PAGE_BYTES)
            return move(source, size, new_size, flags, target)

        def watched_advice(address: int, size: int, advice: int) -> int:
            self.check(address, size)
            return advise(address, size, advice)

        patch.setattr(pinned, "_mremap", watched_move)
        patch.setattr(pinned, "_madvise", watched_advice)
        return moves

    def check(self, address: int, size: int) -> None:
        for begin, length in self.pinned.items():
            assert address + size <= begin or begin + length <= address, "a GPU would read other pages than these"


class Owner:
    """Takes, fills, shrinks and returns regions, and knows their expected contents."""

    def __init__(self) -> None:
        self.backend = Pins()
        self.memory = PinnedArena(BUDGET * PAGE_BYTES, REGION * PAGE_BYTES, self.backend)
        self.seen: set[PinnedRegion] = set()
        self.held: dict[PinnedRegion, tuple[int, int, int]] = {}
        """First and last page, and the number that all of them contain."""
        self._number = 0

    def run(self, operation: Operation) -> None:
        what, a, b = operation
        if what == "take":
            pages = max(1, a)
            if pages + sum(last - first for first, last, _ in self.held.values()) <= BUDGET:
                self._take(pages, b)
        elif self.held:
            region = list(self.held)[a % len(self.held)]
            if what == "give back":
                del self.held[region]
                self.memory.give_back(region)
            else:
                self._shrink(region, a, b)

    def _take(self, pages: int, fewer: int) -> None:
        region = self.memory.take(pages * PAGE_BYTES - 40 * fewer)
        self._number += 1
        assert region not in self.held
        assert region.holds(0, region.data.size)
        region.data[:] = self._number % 251
        self.seen.add(region)
        self.held[region] = 0, region.last_page, self._number % 251

    def _shrink(self, region: PinnedRegion, a: int, b: int) -> None:
        first, last, number = self.held[region]
        low, high = (min(max(n * PAGE_BYTES + 5, 0), region.data.size) for n in sorted((a, b)))
        self.memory.shrink(region, low, high)
        assert first <= region.first_page <= region.last_page <= last
        if low < high and first * PAGE_BYTES <= low and high <= last * PAGE_BYTES:
            assert region.holds(low, high)
        self.held[region] = region.first_page, region.last_page, number

    def check(self) -> None:
        assert not self.backend.pinned
        for region, (first, last, number) in self.held.items():
            assert (region.first_page, region.last_page) == (first, last)
            assert (region.data[first * PAGE_BYTES : last * PAGE_BYTES] == number).all()
        there = sum(resident_pages(region) for region in self.seen) * PAGE_BYTES
        assert there == self.memory.resident_bytes <= BUDGET * PAGE_BYTES
        assert self.memory.resident_bytes >= sum(region.resident_bytes for region in self.held)


def resident_pages(region: PinnedRegion) -> int:
    found = np.zeros(REGION, dtype=np.uint8)
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    assert mincore(region._address, REGION * PAGE_BYTES, found.ctypes.data) == 0
    return int((found & 1).sum())


@pytest.fixture(autouse=True)
def few_pages_are_moved() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned, "_MOVED_PAGES", 4)
        yield


@pytest.fixture(params=["by the system", "refused", "unknown"])
def moving(request: pytest.FixtureRequest) -> Iterator[str]:
    """The system's moves of pages: it moves them, refuses in the middle, or never moves them."""
    if request.param == "by the system" and not pinned.moves_pages():
        pytest.skip("this system does not move pages and leave the map they were in: Linux does since 5.7")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "refused":
            patch.setattr(pinned, "moves_pages", lambda: True)
            patch.setattr(pinned, "_mremap", lambda *_: pinned._FAILED)
        if request.param == "unknown":
            patch.setattr(pinned, "moves_pages", lambda: False)
        yield request.param


@pytest.mark.usefixtures("moving")
@given(OPERATIONS)
def test_what_is_held_keeps_its_bytes_and_the_budget_is_what_the_system_gave(operations: list[Operation]) -> None:
    """After any regions are taken, shrunk and returned, with pages moved between them or fresh ones."""
    owner = Owner()
    with pytest.MonkeyPatch.context() as patch:
        owner.backend.watch(patch)
        for operation in operations:
            owner.run(operation)
            owner.check()
    for region in list(owner.held):
        owner.memory.give_back(region)
    owner.memory.close()
    assert owner.memory.resident_bytes == 0
    assert owner.backend.pinned == {}


def test_pages_given_back_are_those_taken_next(moving: str) -> None:
    """With their contents: the system neither frees nor zeroes a page, unless it moves none."""
    memory = PinnedArena(BUDGET * PAGE_BYTES, REGION * PAGE_BYTES, CpuBackend())
    first, second = (memory.take(REGION * PAGE_BYTES) for _ in range(2))
    first.data[:], second.data[:] = 3, 4
    for region in (first, second):
        memory.shrink(region, 0, REGION // 2 * PAGE_BYTES)
    before = memory.resident_bytes
    third = memory.take(REGION * PAGE_BYTES)
    found = set(np.unique(third.data).tolist())
    if moving == "by the system":
        assert found == {3, 4}
        assert memory.resident_bytes == before
    else:
        assert found == {0}
    third.data[:] = 5
    assert (first.data[: REGION // 2 * PAGE_BYTES] == 3).all()
    assert (second.data[: REGION // 2 * PAGE_BYTES] == 4).all()
    assert memory.take(REGION * PAGE_BYTES) not in (first, second, third)


def test_a_long_run_of_passes_does_not_break_memory_into_crumbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs are returned to the system, and moved runs are in one map of it, so that maps stay few."""
    if not pinned.moves_pages():
        pytest.skip("this system does not move pages and leave the map they were in: Linux does since 5.7")
    owner, generator = Owner(), np.random.default_rng(3)
    moves = owner.backend.watch(monkeypatch)
    move, before, crossed = pinned._mremap, maps(), 0
    assert move is not None

    def looked_at(source: int, size: int, *rest: int) -> int | None:
        nonlocal crossed
        crossed += not any(first <= source and source + size <= last for first, last in maps())
        return move(source, size, *rest)

    monkeypatch.setattr(pinned, "_mremap", looked_at)
    for _ in range(400):
        what = ["take", "shrink", "give back"][int(generator.integers(0, 3))]
        owner.run((what, int(generator.integers(0, REGION + 1)), int(generator.integers(0, REGION + 1))))
    owner.check()
    assert len(moves) > 100
    assert min(moves) >= 4
    assert crossed == 0
    assert all(spare.pages() >= 4 for spare in owner.memory._free_runs)
    assert len(maps()) - len(before) <= 4 * BUDGET // 4


def maps() -> list[tuple[int, int]]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [(int(first, 16), int(last, 16)) for first, last in (line.split()[0].split("-") for line in lines)]


@pytest.mark.parametrize("is_fork", [False, True])
def test_memory_that_nobody_closed_is_unlocked_when_it_goes(monkeypatch: pytest.MonkeyPatch, is_fork: bool) -> None:
    """A GPU would mistake later pages at these addresses for it.

    A process that was forked off releases a copy: CUDA would refuse, and the pages belong to its parent.
    """
    gpu = Pins()
    memory = PinnedArena(64 * PAGE_BYTES, 8 * PAGE_BYTES, gpu, pinned=True)
    region = memory.take(8 * PAGE_BYTES)
    memory.give_back(memory.take(PAGE_BYTES))
    assert gpu.pinned
    with monkeypatch.context() as patched:
        if is_fork:
            patched.setattr(os, "getpid", lambda: -1)
        del memory, region
    assert bool(gpu.pinned) == is_fork


# -- trainings ------------------------------------------------------------------------------------------------


CASE = Case(
    tables=(table("a", 64), table("b", 24)), specs=(Spec(name="f", table="a"), Spec(name="g", table="b")),
    num_samples=2400, pass_rows=400, num_keys=4000, batch=200, epochs=2,
)  # fmt: skip
PINNED = 4 * PAGE_BYTES
"""Bytes of a region that is pinned."""


class PinningGpu(ShimRuntime):
    """Records the bytes of each pin and the number of unpins; refuses pins above ``most`` bytes."""

    def __init__(self, most: int = 1 << 40) -> None:
        super().__init__()
        self.pins, self.unpins, self.most = list[int](), 0, most

    def pin(self, address: int, num_bytes: int) -> None:
        if sum(self.pins) + num_bytes > self.most:
            raise CudaError(f"{num_bytes:,} bytes of host memory cannot be pinned for the GPU")
        super().pin(address, num_bytes)
        self.pins.append(num_bytes)

    def unpin(self, address: int) -> None:
        super().unpin(address)
        self.unpins += 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("share", "order_seed"), [(1.0, None), (1.0, 3), (1.3, None), (4.0, None)])
def test_each_region_is_pinned_once_for_any_budget(tmp_path: Path, share: float, order_seed: int | None) -> None:
    """From the smallest budget of the plan to one that caches all rows: with the bits of a CPU."""
    case, gpu = replace(CASE, order_seed=order_seed), PinningGpu()
    passes = case.cut(tmp_path / "passes")
    with open_store(tmp_path / "x", case, "memory") as store:
        options: dict[str, Any] = {"device": CudaBackend(gpu), "order_seed": order_seed}
        budget = int(share * smallest_host_budget(store, passes, **options))
        with tiered(store, passes, host_budget=budget, **options) as cache:
            plan = cache._rows.budget
            assert plan.grain == plan.region > PAGE_BYTES
            model = train(cache, case)
            assert gpu.unpins == 0
            assert sum(gpu.pins) == cache._rows.memory.resident_bytes <= plan.rows
            assert set(gpu.pins) == {plan.region}
            assert all(report.planned_equals_measured for report in cache.reports)
            assert any(report.rows_from_host for report in cache.reports)
        assert gpu.unpins == len(gpu.pins)
        assert_bits_of_memory(store, passes, model, case, device="cpu")


def test_memory_that_cannot_be_pinned_is_told_by_who_needs_it(tmp_path: Path) -> None:
    """The training ends with the error, without hanging, and resumes once there is more memory."""
    passes, gpu = CASE.cut(tmp_path / "passes"), PinningGpu(most=200_000)
    with open_store(tmp_path / "x", CASE, "memory") as store:
        budget = smallest_host_budget(store, passes, device=CudaBackend(gpu))
        with tiered(store, passes, device=CudaBackend(gpu), host_budget=budget) as cache:
            model, optimizer = registered(cache, CASE)
            for _ in range(20):
                with pytest.raises(CudaError, match="cannot be pinned"):
                    run(cache, CASE, model, optimizer)
            assert cache._rows.memory.resident_bytes <= cache._rows.budget.rows
            gpu.most = 1 << 40
            optimizer.zero_grad()
            run(cache, CASE, model, optimizer)
            assert gpu.unpins == 0
        assert_bits_of_memory(store, passes, model, CASE, device="cpu")


@given(
    st.lists(st.tuples(st.sampled_from(["take", "shrink", "give back"]), st.integers(0, 99), st.integers(0, 99))),
    st.integers(0, 9),
)
def test_a_region_has_all_of_its_pages_until_the_end(operations: list[tuple[str, int, int]], wanted: int) -> None:
    """Whatever is taken, shrunk and returned: shrinking frees nothing, and nothing is pinned twice."""
    backend, held = Pins(), list[PinnedRegion]()
    memory = PinnedArena(6 * PINNED + 5, PINNED, backend, pinned=True)
    memory.wanted_bytes = wanted * PINNED
    memory.pin_ahead()
    ahead = len(backend.locks)
    assert ahead == min(wanted, 6)
    most = 0
    for what, a, b in operations:
        if what == "take" and len(held) < 6:
            held.append(memory.take(1 + a * PINNED // 100))
            held[-1].data[:] = len(held)
            most = max(most, len(held))
        elif what == "shrink" and held:
            low, high = sorted((a * PINNED // 99, b * PINNED // 99))
            memory.shrink(held[a % len(held)], low, max(high, low + 1))
        elif what == "give back" and held:
            memory.give_back(held.pop(a % len(held)))
        assert backend.locks == [PINNED] * max(ahead, most)
        assert memory.resident_bytes == len(backend.pinned) * PINNED == len(backend.locks) * PINNED
    for region in held:
        memory.give_back(region)
    memory.close()
    assert (memory.resident_bytes, backend.pinned) == (0, {})


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 9), st.data())
def test_the_bytes_charged_are_those_of_the_blocks(rows: list[int], block_rows: int, data: st.DataObject) -> None:
    """A block with any kept page stays whole."""
    layout = SegmentLayout.of(
        [Range(next_use=use, table_rows=(count,)) for use, count in enumerate(rows)],
        row_bytes=16, page_rows=3, block_bytes=16 * block_rows,
    )  # fmt: skip
    first = data.draw(st.integers(0, layout.num_pages))
    last = data.draw(st.integers(first, layout.num_pages))
    blocks = {layout.block_of_page(page) for page in range(first, last)}
    assert cached_bytes(layout, PageRange(first, last), PINNED) == len(blocks) * PINNED
