"""A switch loads rows while others are dumped: into slots that are spare, or whose rows have left."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.train.cases import Case, Spec, assert_bits_of_memory, open_store, table, tiered, train
from tests.train.devices import DEVICES, shim
from tests.train.shim_gpu import ShimRuntime
from tests.train.shim_streams import Event
from tiercache.rows import packing
from tiercache.rows.backends.base import CompleteEvent, Streams
from tiercache.rows.backends.cpu import CpuBackend
from tiercache.rows.backends.cuda import CudaBackend
from tiercache.rows.packing import Packer
from tiercache.store import CorruptBlockError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

CASE = Case(
    tables=(table("a", 16), table("b", 3)), specs=(Spec(name="f", table="a"), Spec(name="g", table="b")),
    num_samples=600, pass_rows=120, num_keys=500, batch=40, epochs=2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a few rows move by each launch."""
    monkeypatch.setattr(packing, "_TRANSFER_BYTES", 1)


def bits(case: Case, folder: Path, device: Any, *, in_memory: str | None = None) -> None:
    """Train over tiers and in memory, and compare; ``in_memory``: where, if not on the device of the tests."""
    passes = case.cut(folder / "passes")
    with open_store(folder / "x", case, "memory") as store:
        with tiered(store, passes, device=device) as cache:
            model = train(cache, case)
        assert_bits_of_memory(store, passes, model, case, device=in_memory)


@pytest.mark.parametrize("device", [*DEVICES, "late"])
def test_rows_that_move_in_many_parts_have_the_bits_of_a_training_in_memory(tmp_path: Path, device: str) -> None:
    """Where the next pass has more rows than the last, as many, and fewer; and where rows come as late as they may."""
    there = shim(late_loads=True) if device == "late" else DEVICES[device]()
    bits(CASE, tmp_path, there, in_memory="cpu" if device == "cpu" else None)


@pytest.mark.parametrize(("owner", "wait"), [(Packer, "_await_dump"), (Event, "wait")])
def test_who_does_not_wait_for_what_was_begun_before_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, wait: str
) -> None:
    """On the shim moves are done as late as a GPU may do them, and loads before dumps where nothing holds them.

    So other bytes reach the store: of a load that does not wait for rows to leave, or a writer for the pack.
    """
    monkeypatch.setattr(owner, wait, lambda *_: None)
    with pytest.raises((AssertionError, CorruptBlockError)):
        bits(CASE, tmp_path, shim(), in_memory="cpu")


class Early(ShimRuntime):
    """Counts a load as held behind one dump less than it is."""

    def wait_event(self, dumped: Any) -> None:
        """Wait for all but the last thing."""
        dumped.end -= 1
        super().wait_event(dumped)


def test_a_load_that_waits_for_one_part_too_few_is_caught(tmp_path: Path) -> None:
    """So what it waits for is no more than what it must wait for."""
    with pytest.raises((AssertionError, CorruptBlockError)):
        bits(CASE, tmp_path, CudaBackend(Early()))


class Part(CompleteEvent):
    """The end of a part's dump."""

    def __init__(self, number: int) -> None:
        self.number = number


class NotingBackend(Streams, CpuBackend):
    """Notes how many parts each switch dumps, and how many of them each load comes behind."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = self
        self.begun, self.packed, self.awaited = False, 0, 0
        self.loads: list[tuple[int, int]] = []

    def pack(self, *arguments: Any) -> None:
        """Count it; behind a load it is the next switch's first."""
        self.packed, self.begun = (1 if self.begun else self.packed + 1), False
        super().pack(*arguments)

    def dumped(self) -> Part:
        """Tell its number."""
        return Part(self.packed)

    def loading(self) -> AbstractContextManager[None]:
        """Begin with nothing awaited."""
        self.begun, self.awaited = True, 0
        return super().loading()

    def wait_event(self, dumped: Any) -> None:
        """Note it."""
        assert dumped.number >= self.awaited, "it came behind more already"
        self.awaited = dumped.number

    def unpack(self, fields: Any, *arguments: Any) -> None:
        """Note what it comes behind, but of new rows, which have no state."""
        if len(fields) > 1:
            self.loads.append((self.awaited, self.packed))
        super().unpack(fields, *arguments)


def test_loads_come_behind_one_part_of_the_dump_after_the_other(tmp_path: Path) -> None:
    """What finds spare slots behind none, most behind some, and hardly anything behind all."""
    case, backend = replace(CASE, tables=(table("a", 16),), specs=(Spec(name="f", table="a"),)), NotingBackend()
    bits(case, tmp_path, backend, in_memory="cpu")
    behind = [(awaited, packed) for awaited, packed in backend.loads if packed]
    assert sum(awaited == 0 for awaited, _ in behind) > 0
    assert sum(0 < awaited < packed for awaited, packed in behind) > len(behind) // 2
