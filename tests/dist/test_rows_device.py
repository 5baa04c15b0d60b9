"""Rows are on the ranks' device, together with the memory of process groups."""

from pathlib import Path
from typing import Any, Self

import pytest
import torch

import tiercache as tc
from tests.cache_options import gathered
from tests.train.cases import SPECS, Case, table
from tiercache.dist.communicator import LocalCommunicator
from tiercache.errors import BudgetError
from tiercache.rows.backends.cpu import CpuBackend
from tiercache.rows.device import DeviceTier
from tiercache.train import cache_parts, rank_rows

log: list[str] = []


class Noting:
    """A communicator alone on GPU 1 that records its calls."""

    def __init__(self, device: str) -> None:
        self._alone, self._closed = LocalCommunicator(torch.device("cuda:1")), False
        log.append(device)

    def clone(self, device: str = "all") -> Self:
        return type(self)(f"clone of {device}")

    def close(self, *, failed: bool = False) -> None:
        if not self._closed:
            log.append("fails" if failed else "leaves")
        self._closed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._alone, name)


@pytest.fixture(autouse=True)
def gpu_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a backend of the CPU in place of the GPU."""
    log.clear()

    def open_backend(device: str, _: Any) -> CpuBackend:
        log.append(device)
        return CpuBackend()

    def rows(*arguments: Any, **options: Any) -> DeviceTier:
        log.append("rows")
        return DeviceTier(*arguments, **options)

    monkeypatch.setattr(cache_parts, "communicator_of", lambda _, device: Noting(device))
    monkeypatch.setattr(cache_parts, "open_backend", open_backend)
    monkeypatch.setattr(rank_rows, "DeviceTier", rows)


def opened(folder: Path, **options: Any) -> tc.TierCache:
    passes = Case(tables=(table("a", 8),), specs=SPECS[:1], num_samples=64, pass_rows=32).cut(folder / "passes")
    budgets: dict[str, Any] = {"device": "cuda", "device_budget": "1MiB", "host_budget": "1MiB"}
    return tc.TierCache(folder / "x.tc", passes, **gathered(budgets | options))


def test_process_groups_are_connected_on_the_ranks_device_before_rows_take_its_memory(tmp_path: Path) -> None:
    """A device without a number is the communicator's, not the one that is current to torch."""
    opened(tmp_path).close()
    assert log == ["cuda", "cuda:1", "clone of all", "clone of cpu", "rows", *["leaves"] * 3]


def test_process_groups_are_left_where_rows_find_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would stay on the device until the process ends."""

    def full(*_: Any) -> Any:
        raise BudgetError("the device has less")

    monkeypatch.setattr(CpuBackend, "reserve", full)
    with pytest.raises(BudgetError, match="the device has less"):
        opened(tmp_path)
    assert log == ["cuda", "cuda:1", "clone of all", "clone of cpu", "rows", *["leaves"] * 3]


def test_a_budget_that_passes_exceed_is_refused_before_anything_is_made_of_the_store(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="but device_budget is 1 bytes"):
        opened(tmp_path, device_budget=1)
    assert log == ["cuda", "cuda:1", "leaves"]
    assert not (tmp_path / "x.tc").exists()


def test_a_rank_with_an_error_in_its_loop_leaves_before_anything_waits(tmp_path: Path) -> None:
    """Closing would wait forever for the other ranks."""

    def train() -> None:
        with opened(tmp_path):
            log.clear()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert log == ["fails"] * 3
