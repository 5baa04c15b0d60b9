"""Vectors of 16-bit dtypes read and made by the CUDA sources, run on the CPU, against the numba kernels."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import one_group
from tests.kernels.cases import DIMS, Bags, bags, same_bits
from tests.kernels.shim.device import ORDERS, ShimDevice, device_for, devices
from tests.kernels.test_cuda_pooling import outputs
from tests.kernels.test_pooling import pool
from tests.kernels.test_rows import pieces_of
from tests.kernels.test_vectors import DTYPES, F4, SEED, TABLE_ID, narrow
from tiercache.kernels.cpu import gathering, initial, pooling, rows
from tiercache.kernels.cpu.pooling import MAX, SUM
from tiercache.kernels.cuda import gathering as cuda_gathering
from tiercache.kernels.cuda import initial as cuda_initial
from tiercache.kernels.cuda import rows as cuda_rows
from tiercache.kernels.cuda.launch import launch_parts, view
from tiercache.kernels.cuda.vectors import Vectors
from tiercache.store.vectors import from_bits, to_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tiercache.kernels.cpu import vectors


def words_of(held: vectors.Vectors) -> Any:
    """Return the words of vectors of 16 bits."""
    return held.values.view(F4)


def place(device: Any, held: vectors.Vectors, dtype: str) -> Vectors:
    """Return a copy of vectors of 16 bits on the device."""
    return Vectors(device.place(words_of(held)), held.dim, dtype)


def bits_on(device: Any, placed: Vectors) -> NDArray[np.uint16]:
    """Return the 16-bit numbers (S, P) of vectors on the device."""
    return device.read(placed.words).view(np.uint16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "flush"), [(1, False), (4, False), (37, False), (4, True)])
def test_every_number_of_16_bits_is_read_exactly(dtype: str, dim: int, flush: bool) -> None:
    """All 65,536 bit patterns, by accesses of 2 and 8 bytes: subnormals, infinities and NaN too.

    Reading does not depend on subnormal numbers of float32: a GPU that takes them for zero reads the same.
    """
    bits = np.resize(np.arange(1 << 16, dtype=np.uint16), (-(-(1 << 16) // dim), dim))
    padded = np.zeros((bits.shape[0], dim + dim % 2), np.uint16)
    padded[:, :dim] = bits
    expected, device = from_bits(bits, dtype), ShimDevice("random", flush=True) if flush else device_for("random")
    out = device.array(bits.shape, F4)
    placed = Vectors(device.place(padded.view(F4)), dim, dtype)
    cuda_gathering.gather(device, placed, device.place(np.arange(bits.shape[0], dtype=np.int32)), out)
    nan, found = np.isnan(expected), device.read(out)
    assert np.array_equal(np.isnan(found), nan)
    assert same_bits(found[~nan], expected[~nan])
    device.close()


@pytest.mark.parametrize("dim", DIMS)
def test_gather_reads_numbers_as_on_the_cpu(dim: int) -> None:
    """One row for each entry, in order; none at all works too; slot -1 reads as zeros."""
    rng = np.random.default_rng(dim)
    dtype = DTYPES[dim % 2]
    held = narrow(rng.standard_normal((50, dim)).astype(F4), dtype)
    for size in (0, 1, 31, 300):
        slots = rng.integers(0, 50, size).astype(np.int32)
        wanted = np.empty((size, dim), F4)
        gathering.gather(held, slots, wanted)
        slots[:1], wanted[:1] = -1, 0
        for device in devices():
            out = device.array((size, dim), F4)
            cuda_gathering.gather(device, place(device, held, dtype), device.place(slots), out)
            assert same_bits(device.read(out), wanted)


@settings(max_examples=40, deadline=None)
@given(bags(), st.sampled_from(ORDERS), st.sampled_from(DTYPES), st.sampled_from([np.int32, np.int64]))
def test_bags_pool_as_on_the_cpu(case: Bags, order: str, dtype: str, ids_dtype: type) -> None:
    """Sum, mean, max, weights, empty bags, any dim: the rows, all that is written for the step, weights' gradients."""
    held, device = narrow(case.vectors, dtype), device_for(order)
    wanted = pool(dataclasses.replace(case, vectors=held))
    done, placed, offsets = outputs(device, case), place(device, held, dtype), device.place(case.offsets)
    one_group.pool_bags(
        device, placed, device.place(case.slot_of_local), device.place(case.ids.astype(ids_dtype)), case.bases, offsets,
        device.place(case.weights), case.modes, case.cols, *done.values(),
    )  # fmt: skip
    for name, array in wanted.items():
        assert np.array_equal(device.read(done[name]).view(np.uint8), array.view(np.uint8)), name
    of_weights, there = np.zeros(case.ids.size, F4), device.place(np.zeros(case.ids.size, F4))
    shared = case.modes, case.cols
    pooling.weight_gradient(held, wanted["slots"], case.entry_starts, case.offsets, *shared, wanted["out"], of_weights)
    one_group.weight_gradient(device, placed, done["slots"], offsets, *shared, done["out"], there)
    of_max = np.repeat(np.repeat(case.modes == MAX, case.num_samples), np.diff(case.offsets))
    assert same_bits(device.read(there)[~of_max], of_weights[~of_max])
    device.close()


@settings(max_examples=20, deadline=None)
@given(bags(one_id=True, modes=(SUM,)), st.sampled_from(ORDERS), st.sampled_from(DTYPES))
def test_one_id_per_sample_reads_its_row(case: Bags, order: str, dtype: str) -> None:
    """pool_one writes each id's row to its columns, and its slot, and nothing else."""
    device, held = device_for(order), narrow(case.vectors, dtype)
    there, shared = outputs(device, case), (case.bases, case.cols, case.num_samples)
    wanted, slots = np.zeros((case.num_samples, case.width), F4), np.empty(case.ids.size, np.int32)
    pooling.pool_one(held, case.slot_of_local, case.ids, *shared, wanted, slots)
    placed = place(device, held, dtype), device.place(case.slot_of_local), device.place(case.ids)
    one_group.pool_one(device, *placed, *shared, there["out"], there["slots"])
    assert same_bits(device.read(there["out"]), wanted)
    assert np.array_equal(device.read(there["slots"]), slots)
    device.close()


def test_groups_of_all_dtypes_pool_in_two_launches() -> None:
    """One for each width: 16-bit dtypes share theirs."""
    rng, device = np.random.default_rng(0), device_for("random")
    groups, col, dims, wanted = [], 0, {"float32": 12, "bfloat16": 16, "float16": 5}, np.zeros((70, 33), F4)
    ids, none = rng.integers(0, 9, 70).astype(np.int32), np.zeros(1, np.int64)
    local, slots = np.arange(9, dtype=np.int32), np.empty(70, np.int32)
    for dtype, dim in dims.items():
        values = rng.standard_normal((9, dim)).astype(F4)
        wide = dtype == "float32"
        held: Any = values if wide else narrow(values, dtype)
        pooling.pool_one(held, local, ids, none, np.array([col]), 70, wanted, slots)
        placed = Vectors(device.place(values), dim, dtype) if wide else place(device, held, dtype)
        shared = device.place(local), device.place(ids), none, np.array([col]), device.empty(70, np.int32)
        groups.append(one_group.Bags(placed, *shared))
        col += dim
    out = device.place(np.zeros((70, 33), F4))
    device.launches.clear()
    one_group.pool_many(device, groups, out)
    assert device.launches == ["pooling.pool", "pooling.pool_narrow"]
    assert same_bits(device.read(out), wanted)
    device.close()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(0, 70),
    dim=st.sampled_from(DIMS),
    dtype=st.sampled_from(DTYPES),
    span=st.sampled_from([1.0, 1e-6, 1e5]),
    order=st.sampled_from(ORDERS),
)
def test_initial_rows_are_the_cpus_rounded_to_the_nearest(
    seed: int, size: int, dim: int, dtype: str, span: float, order: str
) -> None:
    """Side by side and into slots, where other rows stay; what fills the last word is zero; too large is infinity."""
    device, rng = device_for(order), np.random.default_rng(seed)
    keys, made = rng.integers(-(2**63), 2**63 - 1, size), np.empty((size, dim), F4)
    how = TABLE_ID, SEED, initial.UNIFORM, -span, span
    initial.initial_rows(keys, *how, made)
    wanted = narrow(made, dtype).values
    beside = Vectors(device.array((size, (dim + 1) // 2), F4), dim, dtype)
    cuda_initial.initial_rows(device, device.place(keys), *how, beside)
    assert np.array_equal(bits_on(device, beside), wanted)
    slots = rng.permutation(size + 5)[:size].astype(np.int32)
    into, expected = narrow(np.full((size + 5, dim), 9, F4), dtype), narrow(np.full((size + 5, dim), 9, F4), dtype)
    expected.values[slots[1:]] = wanted[1:]
    slots[:1] = -1
    there = place(device, into, dtype)
    cuda_initial.initial_rows(device, device.place(keys), *how, there, device.place(slots))
    assert np.array_equal(bits_on(device, there), expected.values)
    device.close()


AWKWARD = (
    0x00000000, 0x80000000, 0x00000001, 0x0003A5C1, 0x33000000, 0x33000001, 0xB3800000, 0x33C00000, 0x34200000,
    0x387FC000, 0x387FE000, 0x387FFFFF, 0x38800000, 0x38801000, 0x38803000, 0x3F800000, 0x3F801000, 0x3F808000,
    0x3F818000, 0x3F803000, 0x477FE000, 0x477FEFFF, 0xC77FF000, 0x47800000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF,
    0x7F800000, 0xFF800000,
)  # fmt: skip
"""float32 bits: zeros, subnormals of both, ties, the ends of float16 and bfloat16, infinities."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_nearest_is_that_of_numpy(dtype: str) -> None:
    """Ends and ties of the dtypes, and three thousand bit patterns; NaN stays NaN with its sign and upper bits."""
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 3000, dtype=np.uint64).astype(np.uint32)
    drawn[:1000] = drawn[:1000] % 0x10000000 + 0x30000000  # where float16 has its numbers
    nan = np.array([0x7FC00001, 0xFFC12345, 0x7FFFFFFF], np.uint32)
    values = np.concatenate([np.array(AWKWARD, np.uint32), drawn, nan]).view(F4)
    values = values[~np.isnan(values) | (values.view(np.uint32) & 0x400000 != 0)]  # else Python makes NaN quiet
    device = device_for("forward")
    out, count = device.array((values.size, 2), F4), [1] * values.size
    at = view(device, "out", out, F4, ndim=2).address
    parts = [
        (0, 0, at + 8 * i, 1, 0, 3, 1, initial.CONSTANT, value, 0, dtype == "float16") for i, value in enumerate(values)
    ]
    launch_parts(device, "initial.initial_rows_narrow", cuda_initial._PART, parts, count)  # a row with each number
    assert np.array_equal(bits_on(device, Vectors(out, 3, dtype))[:, 2], to_bits(values, dtype))
    device.close()


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dim=st.sampled_from(DIMS),
    states=st.sampled_from([(), (0,), (1,), (0, 0)]),
    sizes=st.lists(st.sampled_from([0, 1, 2, 31, 33, 200]), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
    order=st.sampled_from(ORDERS),
)
def test_rows_of_whole_words_are_packed_and_unpacked(
    seed: int, dim: int, states: tuple[int, ...], sizes: list[int], dtype: str, order: str
) -> None:
    """Any bits, those that are NaN as float32 too: a piece has the vectors' words, then each state."""
    rng, device = np.random.default_rng(seed), device_for(order)
    num_rows = sum(sizes)
    bits = rng.integers(0, 1 << 16, (num_rows + 3, dim + dim % 2)).astype(np.uint16)
    fields = [bits.view(F4), *(rng.random((num_rows + 3, width or dim), F4) for width in states)]
    row_words = sum(field.shape[1] for field in fields)
    first, offset, size = pieces_of(sizes, row_words, 3)
    slots, order_of = rng.permutation(num_rows + 3).astype(np.int32), np.arange(num_rows, dtype=np.int32)[::-1].copy()
    here, wanted = rows.Pieces(row_words), np.zeros(size, F4)
    here.add(0, np.diff(first), offset, wanted)
    rows.pack(tuple(fields), slots, order_of, here)
    placed = [Vectors(device.place(fields[0]), dim, dtype).words, *(device.place(field) for field in fields[1:])]
    there, out = cuda_rows.Pieces(device, row_words), device.place(np.zeros(size, F4))
    there.add(0, np.diff(first), offset, out)
    cuda_rows.pack(device, placed, device.place(slots), device.place(order_of), there)
    assert device.read(out).tobytes() == wanted.tobytes()
    back = [device.place(np.zeros_like(field)) for field in fields]
    targets = slots[order_of]
    cuda_rows.unpack(device, back, device.place(targets), there)
    for field, copy in zip(fields, back, strict=True):
        assert device.read(copy)[targets].tobytes() == field[targets].tobytes()
    device.close()


def test_vectors_that_do_not_fit_are_refused() -> None:
    """Another number of words, an unknown dtype: a sentence, and nothing is launched."""
    device, slots, out = ShimDevice(), np.zeros(2, np.int32), np.zeros((2, 5), F4)
    with pytest.raises(ValueError, match="of bfloat16 and dim 5 have 5 words, not 3"):
        cuda_gathering.gather(device, Vectors(np.zeros((2, 5), F4), 5, "bfloat16"), slots, out)
    with pytest.raises(ValueError, match="of float32 and dim 5 have 3 words, not 5"):
        cuda_gathering.gather(device, Vectors(np.zeros((2, 3), F4), 5, "float32"), slots, out)
    with pytest.raises(ValueError, match="of dtype int8: rows are kept in float32, bfloat16, float16"):
        cuda_gathering.gather(device, Vectors(np.zeros((2, 3), F4), 5, "int8"), slots, out)
    assert device.launches == []
