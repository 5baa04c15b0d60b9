"""Numbers below 2^-126, which a GPU could take for zero and must not: rows would differ from the CPU's."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from tests.kernels.cases import Bags, machine, same_bits
from tests.kernels.machines import Cpu, Cuda, narrow
from tests.kernels.shim.device import ShimDevice
from tests.kernels.test_pooling import pool
from tests.kernels.test_update import stepped
from tiercache.kernels.cpu.pooling import SUM
from tiercache.kernels.step import NO_ROUNDING, make_rounding

F4 = np.float32
SMALL = (np.arange(1, 25, dtype=F4) * F4(2.0**-133)).reshape(6, 4)
CASE = Bags(
    num_samples=3, dim=4, table_rows=[6], modes=np.array([SUM], np.int8), offsets=np.array([0, 2, 4, 6]),
    ids=np.array([0, 1, 2, 3, 3, 5], np.int32), weights=np.empty(0, F4), slot_of_local=np.arange(6, dtype=np.int32),
    vectors=SMALL, gap=0,
)  # fmt: skip


def results(m: Any, dtype: str) -> list[Any]:
    """Pool small rows, and step them by small gradients."""
    done = pool(m, CASE, dtype)
    streams = m.place(np.arange(6, dtype=np.uint64))
    rounding = NO_ROUNDING if dtype == "float32" else make_rounding(streams, 1)
    gradients = m.of_bags(SMALL[:3], done)._replace(argmax=np.empty(0, np.int32))
    (rows,) = stepped(m, "sgd", [SMALL], m.read(done["slots"]), gradients, dtype=dtype, rounding=rounding)
    return [m.read(done["out"]), rows]


def agrees(m: Any, dtype: str) -> bool:
    """Tell whether a machine has the CPU's bits, none of which is 0."""
    (out, rows), (wanted, stepped_rows) = results(m, dtype), results(Cpu(), dtype)
    before = SMALL if dtype == "float32" else narrow(SMALL, dtype).values
    assert not np.array_equal(stepped_rows, before), "the step changed nothing"
    return bool(wanted.all()) and same_bits(out, wanted) and np.array_equal(rows, stepped_rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_subnormal_rows_and_gradients_are_kept_on_cuda(dtype: str) -> None:
    """Sums, products and steps of numbers from 2^-133 on: the CPU's bits."""
    with machine("cuda", 2) as m:
        assert agrees(m, dtype)


@pytest.mark.skipif(bool(os.environ.get("TIERCACHE_TEST_GPU")), reason="shows what a GPU must not do")
def test_a_device_that_takes_them_for_zero_is_found_on_cuda() -> None:
    """What -ftz=true would do, on the shim."""
    assert agrees(Cuda(ShimDevice("random")), "float32")
    assert not agrees(Cuda(ShimDevice("random", flush=True)), "float32")
