"""Rows are on the device of the ranks, beside what the wires between ranks need there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import tiercache as tc
from tests.training.cases import SPECS, Case, table
from tiercache.errors import BudgetError
from tiercache.processors.cpu_mover import CpuMover
from tiercache.processors.cpu_processor import CpuProcessor
from tiercache.ranks import cache as cache_module
from tiercache.ranks.group import Ranks
from tiercache.ranks.opening import choose_device
from tiercache.training.cache import TierCache

if TYPE_CHECKING:
    from pathlib import Path

log: list[str] = []


class Noting(Ranks):
    """Notes what it is asked for."""

    def beside(self) -> Ranks:
        """Note it."""
        log.append("wires")
        return Noting(device=self.device, timeout=self.timeout)

    def give_up(self, error: BaseException) -> None:
        """Note it."""
        log.append(f"gives up by {type(error).__name__}")
        super().give_up(error)

    def close(self) -> None:
        """Note it."""
        log.append("leaves")
        super().close()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """A rank alone on GPU 1, which a processor of the CPU stands in for."""
    log.clear()

    def open_processor(device: str, _: Any) -> CpuProcessor:
        log.append(device)
        return CpuProcessor()

    def rows(*arguments: Any, **options: Any) -> TierCache:
        log.append("rows")
        return TierCache(*arguments, **options)

    monkeypatch.setattr(cache_module, "open_processor", open_processor)
    monkeypatch.setattr(cache_module, "TierCache", rows)
    return Noting(device=torch.device("cuda:1"), timeout=5.0)


def sharded(folder: Path, ranks: Ranks, **options: Any) -> tc.ShardedCache:
    """Return a small cache."""
    passes = Case(tables=(table("a", 8),), specs=SPECS[:1], num_samples=64, pass_rows=32).cut(folder / "passes")
    budgets: dict[str, Any] = {"device_budget": "1MiB", "host_budget": "1MiB"}
    return tc.ShardedCache(folder / "x.tc", passes, ranks=ranks, **budgets | options)


@pytest.mark.parametrize("device", [None, "cuda", "cuda:1"])
def test_wires_are_connected_on_the_device_of_the_ranks_before_rows_take_its_memory(
    tmp_path: Path, ranks: Ranks, device: str | None
) -> None:
    """A device without a number is theirs, not the one that is current to torch."""
    sharded(tmp_path, ranks, device=device).close()
    assert log == ["cuda:1", "wires", "rows", "leaves"]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_another_device_than_that_of_the_ranks_is_refused_before_anything_is_opened(
    tmp_path: Path, ranks: Ranks, device: str
) -> None:
    """With how to choose it."""
    with pytest.raises(ValueError, match=r"joined on 'cuda:1', where its rows have to be: join with Ranks\.join"):
        sharded(tmp_path, ranks, device=device)
    with pytest.raises(ValueError, match="device is 'cuda', but rank 0 joined on 'cpu'"):
        choose_device(Ranks.join(), "cuda")
    assert log == []


def test_wires_are_left_where_rows_find_no_room(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would stay on the device until the process ends."""

    def full(*_: Any) -> Any:
        raise BudgetError("the device has less")

    monkeypatch.setattr(CpuMover, "reserve", full)
    with pytest.raises(BudgetError, match="the device has less"):
        sharded(tmp_path, ranks)
    assert log == ["cuda:1", "wires", "rows", "leaves"]


def test_a_budget_that_passes_exceed_is_refused_before_wires_are_connected(tmp_path: Path, ranks: Ranks) -> None:
    """And before anything is made of the store."""
    with pytest.raises(BudgetError, match="but device_budget is 1 bytes"):
        sharded(tmp_path, ranks, device_budget=1)
    assert log == ["cuda:1"]
    assert not (tmp_path / "x.tc").exists()


def test_an_error_in_the_loop_is_told_before_anything_waits(tmp_path: Path, ranks: Ranks) -> None:
    """Closing would wait for what the other ranks will never do."""

    def train() -> None:
        with sharded(tmp_path, ranks):
            log.clear()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert log == ["gives up by ZeroDivisionError", "leaves"]
