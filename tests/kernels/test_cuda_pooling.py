"""Pooled lookups by the CUDA sources, run on the CPU, against the numba kernels: bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import one_group
from tests.kernels.cases import Bags, bags, same_bits
from tests.kernels.shim.device import ORDERS, ShimDevice, device_for, devices
from tests.kernels.test_pooling import pool
from tiercache.kernels.cpu import pooling
from tiercache.kernels.cpu.pooling import MAX, MEAN, SUM
from tiercache.kernels.cuda import gathering as cuda_gathering

if TYPE_CHECKING:
    from numpy.typing import NDArray


def outputs(device: Any, case: Bags, *, scaled: bool = True) -> dict[str, NDArray[Any]]:
    """Return the arrays that `pool_bags` writes, as tests of the CPU's kernel begin with them."""
    size = case.ids.size
    return {
        "out": device.place(np.zeros((case.num_samples, case.width), np.float32)),
        "slots": device.place(np.full(size, -7, np.int32)),
        "argmax": device.place(np.full((case.num_samples, case.width), -7, np.int32)),
        "entry_offset": device.place(np.full(size, -7, np.int64)),
        "entry_scale": device.place(np.full(size if scaled else 0, np.nan, np.float32)),
    }


def group(device: Any, case: Bags, done: dict[str, Any], ids_dtype: type = np.int32) -> one_group.Bags:
    """Return a case as a group on the device."""
    return one_group.Bags(
        device.place(case.vectors), device.place(case.slot_of_local), device.place(case.ids.astype(ids_dtype)),
        case.bases, case.cols, done["slots"], device.place(case.offsets), device.place(case.weights), case.modes,
        done["argmax"], done["entry_offset"], done["entry_scale"], np.array(case.table_rows, np.int64),
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(bags(), st.sampled_from(ORDERS), st.sampled_from([np.int32, np.int64]))
def test_bags_pool_as_on_the_cpu(case: Bags, order: str, ids_dtype: type) -> None:
    """Sum, mean, max, weights, empty bags, any dim: the rows and all that is written for the step."""
    wanted, device = pool(case), device_for(order)
    done = outputs(device, case)
    one_group.pool_many(device, [group(device, case, done, ids_dtype)], done["out"])
    for name, array in wanted.items():
        assert np.array_equal(device.read(done[name]).view(np.uint8), array.view(np.uint8)), name
    device.close()


@settings(max_examples=60, deadline=None)
@given(bags(one_id=True, modes=(SUM,)), st.sampled_from(ORDERS), st.sampled_from([np.int32, np.int64]))
def test_one_id_per_sample_copies_its_row(case: Bags, order: str, ids_dtype: type) -> None:
    """pool_one writes each id's row to its columns, and its slot, and nothing else."""
    device = device_for(order)
    done = outputs(device, case)
    one_group.pool_one(
        device, device.place(case.vectors), device.place(case.slot_of_local), device.place(case.ids.astype(ids_dtype)),
        case.bases, case.cols, case.num_samples, done["out"], done["slots"],
    )  # fmt: skip
    assert same_bits(device.read(done["out"]), case.pooled())
    assert np.array_equal(device.read(done["slots"]), case.slots())
    device.close()


def test_groups_of_different_dims_pool_in_one_launch() -> None:
    """One id per sample and bags, dims 4, 5 and 64, each into columns of its own."""
    rng = np.random.default_rng(0)
    num_samples, dims = 70, (4, 5, 64)
    for device in devices():
        out, wanted = device.place(np.zeros((num_samples, 76), np.float32)), np.zeros((num_samples, 76), np.float32)
        groups, col = [], 0
        for dim in dims:
            counts = np.ones(num_samples, np.int64) if dim == 5 else rng.integers(0, 4, num_samples)
            offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
            size = int(offsets[-1])
            ids, vectors = rng.integers(0, 9, size).astype(np.int32), rng.standard_normal((9, dim)).astype(np.float32)
            local, cols, slots = np.arange(9, dtype=np.int32)[::-1].copy(), np.array([col]), np.empty(size, np.int32)
            pooling.pool_bags(
                vectors, local, ids, np.zeros(1, np.int64), np.array([0, size]), offsets, np.empty(0, np.float32),
                np.array([SUM], np.int8), cols, wanted, slots, np.empty((0, 0), np.int32), np.empty(size, np.int64),
                np.empty(size, np.float32),
            )  # fmt: skip
            one = dim == 5
            groups.append(
                one_group.Bags(
                    device.place(vectors), device.place(local), device.place(ids), np.zeros(1, np.int64), cols,
                    device.place(slots), None if one else device.place(offsets), modes=np.array([SUM], np.int8),
                    entry_offset=device.empty(size, np.int64),
                )
            )  # fmt: skip
            col += dim
        one_group.pool_many(device, groups, out)
        assert device.launches == ["pooling.pool"]
        assert same_bits(device.read(out), wanted)


@settings(max_examples=60, deadline=None)
@given(bags(modes=(SUM, MEAN)), st.sampled_from(ORDERS))
def test_the_gradient_of_a_weight_has_the_cpus_bits(case: Bags, order: str) -> None:
    """Sixteen sums, added by halves: for any dim, aligned or not."""
    gradient = np.random.default_rng(0).standard_normal((case.num_samples, case.width)).astype(np.float32)
    wanted, slots = np.full(case.ids.size, np.nan, np.float32), case.slots()
    pooling.weight_gradient(
        case.vectors, slots, case.entry_starts, case.offsets, case.modes, case.cols, gradient, wanted
    )
    device = device_for(order)
    out = device.place(np.full(case.ids.size, np.nan, np.float32))
    one_group.weight_gradient(
        device, device.place(case.vectors), device.place(slots), device.place(case.offsets), case.modes, case.cols,
        device.place(gradient), out,
    )  # fmt: skip
    assert same_bits(device.read(out), wanted)
    device.close()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("bad", "where"), [(-1, 1), (7, 3), (2**31 - 1, 2), (-(2**31), 0), (2**32 + 1, 2)])
def test_an_id_outside_its_table_reads_as_zeros(bad: int, where: int, dtype: type) -> None:
    """A lookup goes on without that row; one beyond 32 bits is bad though its low half alone would be good."""
    if dtype == np.int32 and bad >= 2**31 + 1:
        return
    ids = np.array([0, 6, 6, 0, 2], dtype)
    starts, limits, bases = np.array([0, 4, 5]), np.array([7, 3]), np.array([0, 7])
    vectors = np.arange(1, 11, dtype=np.float32).reshape(10, 1)
    for device in devices():
        wrong = ids.copy()
        wrong[where], wrong[4] = bad, 3
        slots, local = device.empty(5, np.int32), device.place(np.arange(10, dtype=np.int32))
        one_group.map_slots(device, device.place(wrong), bases, starts, local, slots, limits=limits)
        right = np.repeat(bases, [4, 1]) + wrong
        right[[where, 4]] = -1
        assert device.read(slots).tolist() == right.tolist()
        out = device.array((5, 1), np.float32)
        cuda_gathering.gather(device, device.place(vectors), slots, out)
        assert device.read(out)[:, 0].tolist() == (right + 1).tolist()


def test_max_pooling_keeps_the_first_of_equals_and_none_of_an_empty_bag() -> None:
    """The entry of the largest element, as the CPU has it, where several are equal."""
    vectors = np.array([[1, 2, 3, 4], [1, 3, 3, 0]], np.float32)
    case = Bags(
        2, 4, [2], np.array([MAX], np.int8), np.array([0, 3, 3]), np.array([0, 1, 0], np.int32),
        np.empty(0, np.float32), np.arange(2, dtype=np.int32), vectors, 0,
    )  # fmt: skip
    for device in devices():
        done = outputs(device, case)
        one_group.pool_many(device, [group(device, case, done)], done["out"])
        assert device.read(done["argmax"]).tolist() == [[0, 1, 0, 0], [-1, -1, -1, -1]]
        assert device.read(done["out"]).tolist() == [[1, 3, 3, 4], [0, 0, 0, 0]]


def test_arrays_of_another_type_or_shape_are_refused() -> None:
    """A wrong dtype, order, length, column or table is a sentence, never memory of someone else."""
    device = ShimDevice()
    vectors, slots = np.zeros((5, 4), np.float32), np.zeros(3, np.int32)
    with pytest.raises(ValueError, match="float64"):
        cuda_gathering.gather(device, vectors.astype(np.float64), slots, np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match="C-contiguous"):
        cuda_gathering.gather(device, np.asfortranarray(vectors), slots, np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match="3 rows of 4"):
        cuda_gathering.gather(device, vectors, slots, np.zeros((2, 4), np.float32))
    odd = np.zeros(81, np.uint8)[1:].view(np.float32).reshape(5, 4)
    with pytest.raises(ValueError, match="not aligned"):
        cuda_gathering.gather(device, odd, slots, np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match="of type list: give an array on the CUDA device"):
        cuda_gathering.gather(device, vectors, [0, 0, 0], np.zeros((3, 4), np.float32))
    read_only = np.zeros((3, 4), np.float32)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        cuda_gathering.gather(device, vectors, slots, read_only)
    arguments: dict[str, Any] = {
        "vectors": vectors, "slot_of_local": np.zeros(5, np.int32), "ids": slots, "bases": np.zeros(1, np.int64),
        "cols": np.zeros(1, np.int64), "num_samples": 3, "out": np.zeros((3, 4), np.float32), "slots": slots.copy(),
    }  # fmt: skip
    for changed, said in (
        ({"cols": np.array([1])}, "cols must lie in"),
        ({"ids": slots[:2]}, "slots has 3 elements for 2 ids"),
        ({"bases": np.array([0, 0]), "cols": np.array([0, 0])}, "one id for each of 3 samples and 2"),
        ({"limits": np.array([6])}, "ends behind the 5 local positions"),
    ):
        with pytest.raises(ValueError, match=said):
            one_group.pool_one(device, **{**arguments, **changed})
    assert device.launches == []
