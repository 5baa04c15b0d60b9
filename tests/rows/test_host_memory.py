"""Host memory hands out unused pages only, keeps and locks pages in use, and stays within its budget."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.planning.budgets import PAGE_BYTES
from tiercache.rows import pinned as pinned_arena
from tiercache.rows import pinned as pinned_region
from tiercache.rows.backends.cpu import CpuBackend
from tiercache.rows.pinned import PinnedArena

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiercache.rows.pinned import PinnedRegion

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
        move, advise, moves = pinned_region._mremap, pinned_region._madvise, list[int]()
        assert move is not None

        def watched_move(source: int, size: int, new_size: int, flags: int, target: int) -> int | None:
            self.check(source, size)
            self.check(target, size)
            moves.append(size // PAGE_BYTES)
            return move(source, size, new_size, flags, target)

        def watched_advice(address: int, size: int, advice: int) -> int:
            self.check(address, size)
            return advise(address, size, advice)

        patch.setattr(pinned_region, "_mremap", watched_move)
        patch.setattr(pinned_region, "_madvise", watched_advice)
        return moves

    def check(self, address: int, size: int) -> None:
        for begin, pinned in self.pinned.items():
            assert address + size <= begin or begin + pinned <= address, "a GPU would read other pages than these"


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
        patch.setattr(pinned_arena, "_MOVED_PAGES", 4)
        yield


@pytest.fixture(params=["by the system", "refused", "unknown"])
def moving(request: pytest.FixtureRequest) -> Iterator[str]:
    """The system's moves of pages: it moves them, refuses in the middle, or never moves them."""
    if request.param == "by the system" and not pinned_region.moves_pages():
        pytest.skip("this system does not move pages and leave the map they were in: Linux does since 5.7")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "refused":
            patch.setattr(pinned_region, "moves_pages", lambda: True)
            patch.setattr(pinned_region, "_mremap", lambda *_: pinned_region._FAILED)
        if request.param == "unknown":
            patch.setattr(pinned_region, "moves_pages", lambda: False)
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
    if not pinned_region.moves_pages():
        pytest.skip("this system does not move pages and leave the map they were in: Linux does since 5.7")
    owner, generator = Owner(), np.random.default_rng(3)
    moves = owner.backend.watch(monkeypatch)
    move, before, crossed = pinned_region._mremap, maps(), 0
    assert move is not None

    def looked_at(source: int, size: int, *rest: int) -> int | None:
        nonlocal crossed
        crossed += not any(first <= source and source + size <= last for first, last in maps())
        return move(source, size, *rest)

    monkeypatch.setattr(pinned_region, "_mremap", looked_at)
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


def test_memory_that_nobody_closed_is_unlocked_when_it_goes() -> None:
    """A GPU would mistake later pages at these addresses for it."""
    gpu = Pins()
    memory = PinnedArena(64 * PAGE_BYTES, 8 * PAGE_BYTES, gpu, pinned=True)
    region = memory.take(8 * PAGE_BYTES)
    memory.give_back(memory.take(PAGE_BYTES))
    assert gpu.pinned
    del memory, region
    assert not gpu.pinned


def test_a_process_that_was_forked_off_unlocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It releases a copy: CUDA would refuse, and the pages belong to its parent."""
    gpu = Pins()
    memory = PinnedArena(64 * PAGE_BYTES, 8 * PAGE_BYTES, gpu, pinned=True)
    region = memory.take(8 * PAGE_BYTES)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        del region
    assert gpu.pinned
