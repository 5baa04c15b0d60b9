"""What other ranks ask for is looked at, on a GPU without waiting for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.training.devices import shim
from tiercache.errors import RankError
from tiercache.processors.cpu_processor import CpuProcessor
from tiercache.ranks.bounds import Bounds, confined

if TYPE_CHECKING:
    from tiercache.processors.processor import Processor

BAD = ([0, 5], [-1, 3], [2, 2147483647])


def two(lost: str = "") -> Any:
    """Return rank 2, which knows that one is ``lost``."""

    def check(_: str) -> None:
        if lost:
            raise RankError(lost)

    return SimpleNamespace(rank=2, check=check)


def made(processor: Processor) -> tuple[Bounds, list[object]]:
    """Return bounds on rank 2, and arrays that are outside of 5 rows."""
    return Bounds(two(), processor), [processor.bring(np.array(some, np.int32)) for some in BAD]


def test_a_cpu_reads_no_row_before_its_number_was_looked_at() -> None:
    """Its kernels would read what is no row."""
    bounds, arrays = made(CpuProcessor())
    for some, (low, high) in zip(arrays, BAD, strict=True):
        with pytest.raises(RankError, match=rf"rank 2 was asked for rows {low:,} to {high:,} of a table: start all"):
            bounds.expect(some, 5, "of a table")
    bounds.expect(np.array([0, 4], np.int32), 5, "of a table")
    bounds.expect(np.empty(0, np.int32), 0, "of an empty table")


def test_a_gpu_tells_later_and_once() -> None:
    """At the next batch or step; what was said or forgotten is not said again."""
    bounds, arrays = made(shim())
    for some in arrays:
        bounds.expect(some, 5, "of a table")
        with pytest.raises(RankError, match="rank 2 was asked for rows"):
            bounds.check()
        bounds.check()
        bounds.expect(some, 5, "of a table")
        bounds.forget()
        bounds.check()
    bounds.expect(torch.tensor([0, 4], dtype=torch.int32), 5, "of a table")
    bounds.expect(torch.empty(0, dtype=torch.int32), 0, "of an empty table")
    bounds.check()


def test_numbers_that_are_void_because_a_rank_was_lost_are_not_blamed_on_it() -> None:
    """What an aborted transfer leaves is nobody's asking; and it is no index that ends the device's work."""
    processor = shim()
    bounds = Bounds(two("rank 1 (process 77) ended"), processor)
    bounds.expect(torch.tensor([-5, 9], dtype=torch.int32), 5, "of a table")
    with pytest.raises(RankError, match=r"^rank 1 \(process 77\) ended$"):
        bounds.check()
    void = torch.tensor([-5, 3, 9])
    assert confined(void, 5, processor).tolist() == [0, 3, 4]
    assert confined(void, 5, CpuProcessor()) is void
