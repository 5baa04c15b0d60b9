"""Host memory hands out pages that nobody else holds, keeps what is held, and stays within its budget."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.planning.budget import PAGE_BYTES
from tiercache.processors.cpu_processor import CpuMover
from tiercache.tiers import host_memory, host_region
from tiercache.tiers.host_memory import HostMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiercache.tiers.host_region import HostRegion

REGION = 96
"""Pages of a region."""
BUDGET = 5 * REGION
Operation = tuple[str, int, int]
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["take", "shrink", "give back"]), st.integers(0, REGION), st.integers(0, REGION)),
    max_size=60,
)


class Owner:
    """Takes, fills, shrinks and gives back, and knows what its regions must have."""

    def __init__(self) -> None:
        self.memory = HostMemory(BUDGET * PAGE_BYTES, REGION * PAGE_BYTES, CpuMover())
        self.seen: set[HostRegion] = set()
        self.held: dict[HostRegion, tuple[int, int, int]] = {}
        """First and last page, and the number that stands in all of them."""
        self._number = 0

    def run(self, operation: Operation) -> None:
        """Do one thing, if there is room, or a region, for it."""
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

    def _shrink(self, region: HostRegion, a: int, b: int) -> None:
        first, last, number = self.held[region]
        low, high = (min(max(n * PAGE_BYTES + 5, 0), region.data.size) for n in sorted((a, b)))
        self.memory.shrink(region, low, high)
        assert first <= region.first_page <= region.last_page <= last
        if low < high and first * PAGE_BYTES <= low and high <= last * PAGE_BYTES:
            assert region.holds(low, high)
        self.held[region] = region.first_page, region.last_page, number

    def check(self) -> None:
        """Look at every byte that is held, and count the pages that the system has given."""
        for region, (first, last, number) in self.held.items():
            assert (region.first_page, region.last_page) == (first, last)
            assert (region.data[first * PAGE_BYTES : last * PAGE_BYTES] == number).all()
        there = sum(resident_pages(region) for region in self.seen) * PAGE_BYTES
        assert there == self.memory.resident_bytes <= BUDGET * PAGE_BYTES
        assert self.memory.resident_bytes >= sum(region.resident_bytes for region in self.held)


def resident_pages(region: HostRegion) -> int:
    """Ask the system how many pages of a region there are."""
    found = np.zeros(REGION, dtype=np.uint8)
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    assert mincore(region._address, REGION * PAGE_BYTES, found.ctypes.data) == 0
    return int((found & 1).sum())


@pytest.fixture(autouse=True, params=["moved", "refused"])
def pages_are(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs of four pages are moved already; and all of it where the system moves none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "_MOVED_PAGES", 4)
        if request.param == "refused":
            patch.setattr(host_region, "_mremap", lambda *_: host_region._FAILED)
        yield


@given(OPERATIONS)
def test_what_is_held_keeps_its_bytes_and_the_budget_is_what_the_system_gave(operations: list[Operation]) -> None:
    """Whatever regions are taken, shrunk and given back before, with pages moved among them or fresh ones."""
    owner = Owner()
    for operation in operations:
        owner.run(operation)
        owner.check()
    for region in list(owner.held):
        owner.memory.give_back(region)
    owner.memory.close()
    assert owner.memory.resident_bytes == 0


def test_pages_given_back_are_those_taken_next(request: pytest.FixtureRequest) -> None:
    """With what stood in them: the system neither frees nor zeroes a page, unless it moves none."""
    memory = HostMemory(BUDGET * PAGE_BYTES, REGION * PAGE_BYTES, CpuMover())
    first, second = (memory.take(REGION * PAGE_BYTES) for _ in range(2))
    first.data[:], second.data[:] = 3, 4
    for region in (first, second):
        memory.shrink(region, 0, REGION // 2 * PAGE_BYTES)
    before = memory.resident_bytes
    third = memory.take(REGION * PAGE_BYTES)
    found = set(np.unique(third.data).tolist())
    if "refused" in request.node.name:
        assert found == {0}
    else:
        assert found == {3, 4}
        assert memory.resident_bytes == before
    third.data[:] = 5
    assert (first.data[: REGION // 2 * PAGE_BYTES] == 3).all()
    assert (second.data[: REGION // 2 * PAGE_BYTES] == 4).all()
    assert memory.take(REGION * PAGE_BYTES) not in (first, second, third)


def test_a_long_run_of_visits_does_not_break_memory_into_crumbs() -> None:
    """Short runs go back to the system, so that the maps of a process stay as few as the budget allows."""
    owner = Owner()
    generator = np.random.default_rng(3)
    for _ in range(3000):
        what = ["take", "shrink", "give back"][int(generator.integers(0, 3))]
        owner.run((what, int(generator.integers(0, REGION + 1)), int(generator.integers(0, REGION + 1))))
    owner.check()
    assert all(spare.pages() >= 4 for spare in owner.memory._spares)
    assert sum(len(region._cuts) for region in owner.seen) < len(owner.seen) * REGION // 4
