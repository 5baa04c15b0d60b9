"""On a GPU, host memory is pinned once, ahead of its use, and no page of it is unpinned before the cache is closed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rows.test_host_memory import Pins
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
from tiercache.rows.backends.cuda import CudaBackend
from tiercache.rows.pinned import PinnedArena, PinnedRegion
from tiercache.store.layout import Range, SegmentLayout

if TYPE_CHECKING:
    from pathlib import Path

CASE = Case(
    tables=(table("a", 64), table("b", 24)), specs=(Spec(name="f", table="a"), Spec(name="g", table="b")),
    num_samples=2400, pass_rows=400, num_keys=4000, batch=200, epochs=2,
)  # fmt: skip
REGION = 4 * PAGE_BYTES


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
def test_each_region_is_pinned_once_whatever_the_host_keeps(
    tmp_path: Path, share: float, order_seed: int | None
) -> None:
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
    memory = PinnedArena(6 * REGION + 5, REGION, backend, pinned=True)
    memory.wanted_bytes = wanted * REGION
    memory.pin_ahead()
    ahead = len(backend.locks)
    assert ahead == min(wanted, 6)
    most = 0
    for what, a, b in operations:
        if what == "take" and len(held) < 6:
            held.append(memory.take(1 + a * REGION // 100))
            held[-1].data[:] = len(held)
            most = max(most, len(held))
        elif what == "shrink" and held:
            low, high = sorted((a * REGION // 99, b * REGION // 99))
            memory.shrink(held[a % len(held)], low, max(high, low + 1))
        elif what == "give back" and held:
            memory.give_back(held.pop(a % len(held)))
        assert backend.locks == [REGION] * max(ahead, most)
        assert memory.resident_bytes == len(backend.pinned) * REGION == len(backend.locks) * REGION
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
    assert cached_bytes(layout, PageRange(first, last), REGION) == len(blocks) * REGION
