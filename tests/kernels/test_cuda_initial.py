"""Initial rows by the CUDA sources, run on the CPU, against the numba kernels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import DIMS, same_bits
from tests.kernels.shim.device import ORDERS, ShimDevice, device_for, devices
from tiercache.kernels.cpu.initial import CONSTANT, NORMAL, UNIFORM, ZEROS, initial_rows
from tiercache.kernels.cuda import initial as cuda_initial

MASK = 2**64 - 1


@settings(max_examples=150, deadline=None)
@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=70, unique=True),
    table_id=st.integers(0, MASK),
    seed=st.integers(-(2**63), MASK),
    dim=st.sampled_from(DIMS),
    kind=st.sampled_from((ZEROS, CONSTANT, UNIFORM)),
    low=st.floats(-10, 0, width=32),
    high=st.floats(0, 10, width=32),
    order=st.sampled_from(ORDERS),
)
def test_rows_have_the_cpus_bits(
    keys: list[int], table_id: int, seed: int, dim: int, kind: int, low: float, high: float, order: str
) -> None:
    """Uniform, zeros and constant; side by side and straight into slots, where other rows stay as they are."""
    device, rng = device_for(order), np.random.default_rng(0)
    wanted = np.full((len(keys), dim), np.nan, np.float32)
    given_keys = np.array(keys, np.int64)
    initial_rows(given_keys, table_id, seed, kind, low, high, wanted)
    out, placed = device.array(wanted.shape, np.float32), device.place(given_keys)
    cuda_initial.initial_rows(device, placed, table_id, seed, kind, low, high, out)
    assert same_bits(device.read(out), wanted)
    slots = rng.permutation(len(keys) + 5)[: len(keys)].astype(np.int32)
    rows, expected = np.full((len(keys) + 5, dim), 9, np.float32), np.full((len(keys) + 5, dim), 9, np.float32)
    expected[slots[1:]] = wanted[1:]
    slots[:1] = -1
    there = device.place(rows)
    cuda_initial.initial_rows(device, placed, table_id, seed, kind, low, high, there, device.place(slots))
    assert same_bits(device.read(there), expected)
    device.close()


@pytest.mark.parametrize("shape", [(0, 7), (5, 0)])
def test_nothing_to_write_launches_nothing(shape: tuple[int, int]) -> None:
    """No new keys, or rows of no elements."""
    device = device_for("forward")
    out, keys = device.array(shape, np.float32), device.place(np.arange(shape[0]))
    cuda_initial.initial_rows(device, keys, 1, 3, UNIFORM, -0.5, 0.5, out)
    assert device.launches == []
    device.close()


@pytest.mark.parametrize("dim", [1, 3, 64])
def test_states_of_new_rows_begin_with_their_value(dim: int) -> None:
    """In the slots that were named and no other."""
    slots = np.array([3, 0, -1, 7], np.int32)
    for device in devices():
        state = device.place(np.zeros((9, dim), np.float32))
        cuda_initial.fill_rows(device, 0.1, state, device.place(slots))
        wanted = np.zeros((9, dim), np.float32)
        wanted[[3, 0, 7]] = np.float32(0.1)
        assert same_bits(device.read(state), wanted)


def test_rows_that_do_not_fit_are_refused() -> None:
    """An unknown kind, another number of rows or slots: a sentence, and nothing is launched."""
    device, out = ShimDevice(), np.zeros((2, 3), np.float32)
    for kind in (NORMAL, 4):
        with pytest.raises(ValueError, match=f"kind {kind} is not made on a device"):
            cuda_initial.initial_rows(device, np.arange(2), 0, 0, kind, 0.0, 0.0, out)
    with pytest.raises(ValueError, match="2 rows for 3 keys"):
        cuda_initial.initial_rows(device, np.arange(3), 0, 0, UNIFORM, 0.0, 1.0, out)
    with pytest.raises(ValueError, match="2 keys have 1 slots"):
        cuda_initial.initial_rows(device, np.arange(2), 0, 0, UNIFORM, 0.0, 1.0, out, np.zeros(1, np.int32))
    assert device.launches == []
