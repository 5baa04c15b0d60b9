"""Numbers below 2^-126, which a GPU could take for zero and must not: rows would differ from the CPU's."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import pytest

from tests.kernels import one_group
from tests.kernels.cases import same_bits
from tests.kernels.shim.device import ShimDevice, device_for
from tests.kernels.test_vectors import narrow
from tiercache.kernels.cpu import pooling, rounding, sorting, update
from tiercache.kernels.cuda import rounding as cuda_rounding
from tiercache.kernels.cuda import update as cuda_update
from tiercache.kernels.cuda.vectors import Vectors

F4 = np.float32
SMALL = (np.arange(1, 25, dtype=F4) * F4(2.0**-133)).reshape(6, 4)
IDS, LOCAL = np.array([0, 1, 2, 3, 3, 5], np.int32), np.arange(6, dtype=np.int32)
OFFSETS, COL = np.array([0, 2, 4, 6]), np.zeros(1, np.int64)


def agrees(device: Any, dtype: str) -> bool:
    """Pool small rows, and step them by small gradients: tell whether the device has the CPU's bits, none of them 0."""
    wide = dtype == "float32"
    held: Any = SMALL.copy() if wide else narrow(SMALL, dtype)
    placed: Any = device.place(SMALL) if wide else Vectors(device.place(held.values.view(F4)), 4, dtype)
    modes, none = np.zeros(1, np.int8), np.empty(0, F4)
    out, slots, places = np.zeros((3, 4), F4), np.empty(6, np.int32), np.empty(6, np.int64)
    pooling.pool_bags(
        held, LOCAL, IDS, COL, np.array([0, 6]), OFFSETS, none, modes, COL, out, slots, np.empty((0, 0), np.int32),
        places, none,
    )  # fmt: skip
    there = device.place(np.zeros((3, 4), F4)), device.empty(6, np.int32), device.empty(6, np.int64)
    one_group.pool_bags(
        device, placed, device.place(LOCAL), device.place(IDS), COL, device.place(OFFSETS), none, modes, COL,
        there[0], there[1], None, there[2], None,
    )  # fmt: skip
    same = same_bits(device.read(there[0]), out) and bool(out.all())
    gradient, streams = SMALL[:3], np.arange(6, dtype=np.uint64)
    here = {} if wide else {"rounding": rounding.make_rounding(streams, 1)}
    on_device = {} if wide else {"rounding": cuda_rounding.make_rounding(device, device.place(streams), 1)}
    pairs = sorting.sort_slots(slots, 6, sorting.SortBuffers())
    update.update_sgd(
        held, pairs, update.bag_gradients(gradient, places), update.UpdateBuffers(), learning_rate=0.5, **here
    )
    one_group.update_sgd(
        device, placed, one_group.sort_slots(device, there[1], 6),
        cuda_update.bag_gradients(device, device.place(gradient), there[2]), None,
        learning_rate=0.5, **on_device,
    )  # fmt: skip
    stepped = held if wide else held.values
    found = device.read(placed if wide else placed.words).view(stepped.dtype)
    assert not np.array_equal(stepped, SMALL if wide else narrow(SMALL, dtype).values), "the step changed nothing"
    return same and np.array_equal(found, stepped)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_subnormal_rows_and_gradients_are_kept(dtype: str) -> None:
    """Sums, products and steps of numbers from 2^-133 on: the CPU's bits."""
    device = device_for("random")
    assert agrees(device, dtype)
    device.close()


@pytest.mark.skipif(bool(os.environ.get("TIERCACHE_TEST_GPU")), reason="shows what a GPU must not do")
def test_a_device_that_takes_them_for_zero_is_found() -> None:
    """What -ftz=true would do, on the shim."""
    device = functools.partial(ShimDevice, "random")
    assert agrees(device(), "float32")
    assert not agrees(device(flush=True), "float32")
