"""What other ranks ask for is looked at, on a GPU without waiting for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.training.devices import shim
from tiercache.backends.cpu import CpuBackend
from tiercache.errors import RankError
from tiercache.ranks.bounds import Bounds, confined

if TYPE_CHECKING:
    from tiercache.backends.base import Backend

BAD = ([0, 5], [-1, 3], [2, 2147483647])


def made(backend: Backend) -> tuple[Bounds, list[object]]:
    """Return bounds on rank 2, and arrays that are outside of 5 rows."""
    return Bounds(SimpleNamespace(rank=2), backend), [backend.to_device(np.array(some, np.int32)) for some in BAD]


def test_a_cpu_reads_no_row_before_its_number_was_looked_at() -> None:
    """Its kernels would read what is no row."""
    bounds, arrays = made(CpuBackend())
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


def test_a_number_outside_is_no_index_that_ends_the_work_of_a_gpu() -> None:
    """It is confined until it is told."""
    void = torch.tensor([-5, 3, 9])
    assert confined(void, 5, shim()).tolist() == [0, 3, 4]
    assert confined(void, 5, CpuBackend()) is void
