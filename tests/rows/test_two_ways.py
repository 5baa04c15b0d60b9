"""A switch loads rows while others are dumped: into spare slots, or slots whose rows have left."""

import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.cases import Case, Spec, assert_bits_of_memory, open_store, registered, run, table, tiered, train
from tests.train.devices import DEVICES, shim
from tests.train.shim_gpu import ShimRuntime
from tests.train.shim_streams import Event
from tiercache.planning.budgets import MOST_SLOTS, reserved_rows
from tiercache.planning.row_offsets import RowOffsets
from tiercache.reporting.report import PassReport
from tiercache.rows import packing
from tiercache.rows.backends.base import CompleteEvent, Streams
from tiercache.rows.backends.cpu import CpuBackend
from tiercache.rows.backends.open_backend import open_backend
from tiercache.rows.device import DeviceMemoryPlan
from tiercache.rows.packing import Packer, PassLoad
from tiercache.store import CorruptBlockError
from tiercache.store.table import group_tables


def arrive(_pass_index: int, _batch: int) -> None:
    """Give other threads the time of a batch on a GPU."""
    time.sleep(0.02)


CASE = Case(
    tables=(table("a", 16), table("b", 3)), specs=(Spec(name="f", table="a"), Spec(name="g", table="b")),
    num_samples=600, pass_rows=120, num_keys=500, batch=40, epochs=2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_TRANSFER_BYTES", 1)


def bits(
    case: Case, folder: Path, device: Any, *, in_memory: str | None = None, device_budget: Any = "64MiB", **options: Any
) -> list[PassReport]:
    """Train over tiers and in memory, and compare; ``in_memory``: the device for it, by default that of the tests.

    device_budget: None for one that leaves no reserve. Returns the reports.
    """
    passes = case.cut(folder / "passes")
    if device_budget is None:
        positions = RowOffsets.of(passes, group_tables(passes.tables))
        device_budget = DeviceMemoryPlan.of(positions, open_backend(device, ())).num_bytes
    with open_store(folder / "x", case, "memory") as store:
        with tiered(store, passes, device=device, device_budget=device_budget) as cache:
            model = train(cache, case, **options)
            reports = cache.reports
        assert_bits_of_memory(store, passes, model, case, device=in_memory)
    return reports


@pytest.mark.sampled(3)
@pytest.mark.parametrize("budget", ["64MiB", None])
@pytest.mark.parametrize("device", [*DEVICES, "late"])
def test_rows_that_move_in_many_parts_have_the_bits_of_memory(tmp_path: Path, device: str, budget: str | None) -> None:
    """On a GPU with a reserve, rows move during the previous pass: at once, or late."""
    there = shim(late_loads=True) if device == "late" else DEVICES[device]()
    reports = bits(
        CASE, tmp_path, there, in_memory="cpu" if device == "cpu" else None, device_budget=budget, each_batch=arrive
    )
    ahead, loaded = (sum(count) for count in zip(*((r.rows_ahead, r.rows - r.rows_kept) for r in reports), strict=True))
    assert loaded > ahead
    assert (ahead > 0) == (device != "cpu") or budget is None
    assert all(r.planned_equals_measured for r in reports)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("late_loads", [True, False])
def test_a_loop_left_while_rows_travel_ahead_goes_on_with_the_same_bits(tmp_path: Path, late_loads: bool) -> None:
    """In a pass that was committed there, and in one that was not; in another run of the cache, and another cache."""
    passes = CASE.cut(tmp_path / "passes")
    with open_store(tmp_path / "x", CASE, "memory") as store:
        with tiered(store, passes, device=shim(late_loads=late_loads)) as cache:
            model, optimizer = registered(cache, CASE)

            def leave(pass_index: int, batch: int) -> None:
                cache._rows.drain(staged=True)
                if pass_index in {6, 8} and batch == 1:
                    loading = cache._rows.transfer._loading
                    assert loading is not None
                    assert loading.rows_ahead
                    if pass_index == 6:
                        cache.commit()
                    raise KeyboardInterrupt

            for _ in range(2):
                with pytest.raises(KeyboardInterrupt):
                    run(cache, CASE, model, optimizer, each_batch=leave)
                optimizer.zero_grad()
        with tiered(store, passes, device=shim(late_loads=late_loads)) as cache:
            model = train(cache, CASE, each_batch=arrive)
        assert_bits_of_memory(store, passes, model, CASE, device="cpu")


def test_the_reserve_is_a_tenth_at_most_of_what_rows_and_index_leave(tmp_path: Path) -> None:
    """None on a CPU, for a single pass, and in a budget that exactly holds the rows, or rows and index."""
    data, shimmed = CASE.cut(tmp_path / "passes"), shim()
    positions = RowOffsets.of(data, group_tables(data.tables))
    need = DeviceMemoryPlan.of(positions, shimmed).num_bytes
    most = 2 * need + 100_000
    for budget, index_bytes, backend, bound in (
        (need, 0, shimmed, 0), (need + 9000, 9000, shimmed, 0), (most, 0, CpuBackend(), 0),
        (most, 0, shimmed, most // 10), (need + 99_999, 20_000, shimmed, 79_999),
        (need + 200_000, 200_001, shimmed, 200_000),
    ):  # fmt: skip
        plan = DeviceMemoryPlan.of(positions, backend, budget, index_bytes=index_bytes)
        assert plan.num_bytes <= max(need, budget)
        reserved = sum((layout.rows - layout.positions) * 4 * sum(layout.widths) for layout in plan.layouts)
        assert reserved <= min(bound, budget // 10)
        assert (reserved > 0) == (min(bound, budget // 10) > 9000)
    one = replace(CASE, num_samples=120).cut(tmp_path / "one")
    plan = DeviceMemoryPlan.of(RowOffsets.of(one, group_tables(one.tables)), shimmed, 1 << 30)
    assert all(layout.rows == layout.positions for layout in plan.layouts)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(4, 2000)), min_size=1, max_size=5), st.integers(0, 1 << 26))
def test_the_reserve_takes_no_more_than_it_may(groups: list[tuple[int, int]], num_bytes: int) -> None:
    """It has no more slots than the largest pass, which suffices for all arriving rows."""
    rows_G, row_bytes_G = zip(*groups, strict=True)
    reserve_G = reserved_rows(rows_G, row_bytes_G, num_bytes)
    assert all(0 <= more <= rows for more, rows in zip(reserve_G, rows_G, strict=True))
    assert sum(more * size for more, size in zip(reserve_G, row_bytes_G, strict=True)) <= num_bytes
    assert reserved_rows([MOST_SLOTS - 9], [4], 1 << 60) == (9,)
    if num_bytes > 60_000_000:
        assert list(reserve_G) == list(rows_G)


def load_more(load_ahead: Any, packer: Packer, load: PassLoad) -> None:
    """Load one more row of each group than there are free slots: the rows of the current pass have changed."""
    for assignment in load.layout.staged.assignments:
        assignment.free = min(assignment.free + 20, assignment.load_K.size)
    load_ahead(packer, load)


def wait_for_fewer(wait_event: Any, runtime: ShimRuntime, dumped: Any) -> None:
    """Wait for all but the last of the dumps that a load waits for."""
    dumped.end -= 1
    wait_event(runtime, dumped)


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        pytest.param(Packer, "_await_dump", lambda *_: None, id="a load before rows have left"),
        pytest.param(Event, "wait", lambda *_: None, id="a write before the pack"),
        pytest.param(ShimRuntime, "wait_event", wait_for_fewer, id="a load that waits for one part too few"),
        pytest.param(Packer, "load_ahead", load_more, id="a load into a slot in use"),
    ],
)
def test_wrong_orders_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrong: Any) -> None:
    """On the shim moves are done as late as a GPU may do them, and loads before dumps unless they wait."""
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *arguments: wrong(right, self, *arguments))
    with pytest.raises((AssertionError, CorruptBlockError)):
        bits(CASE, tmp_path, shim(), in_memory="cpu", device_budget=None, each_batch=arrive)


class Part(CompleteEvent):
    def __init__(self, number: int) -> None:
        self.number = number


class NotingBackend(Streams, CpuBackend):
    """Records the number of parts that each switch dumps, and how many of them each load waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = self
        self.begun, self.packed, self.awaited = False, 0, 0
        self.loads: list[tuple[int, int]] = []

    def pack(self, *arguments: Any) -> None:
        """Count it; after a load it is the next switch's first."""
        self.packed, self.begun = (1 if self.begun else self.packed + 1), False
        super().pack(*arguments)

    def dumped(self) -> Part:
        return Part(self.packed)

    def loading(self) -> AbstractContextManager[None]:
        self.begun, self.awaited = True, 0
        return super().loading()

    def wait_event(self, dumped: Any) -> None:
        assert dumped.number >= self.awaited, "it already waits for more"
        self.awaited = dumped.number

    def unpack(self, fields: Any, *arguments: Any) -> None:
        """Record the number of dumps that it waits for, except for new rows, which have no state."""
        if len(fields) > 1:
            self.loads.append((self.awaited, self.packed))
        super().unpack(fields, *arguments)


def test_loads_come_behind_one_part_of_the_dump_after_the_other(tmp_path: Path) -> None:
    """Rows with spare slots wait for none, most rows for some, and few for all."""
    case, backend = replace(CASE, tables=(table("a", 16),), specs=(Spec(name="f", table="a"),)), NotingBackend()
    bits(case, tmp_path, backend, in_memory="cpu")
    waiting = [(awaited, packed) for awaited, packed in backend.loads if packed]
    assert sum(awaited == 0 for awaited, _ in waiting) > 0
    assert sum(0 < awaited < packed for awaited, packed in waiting) > len(waiting) // 2
