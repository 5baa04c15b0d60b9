"""Rows between slots and pieces by the CUDA sources, run on the CPU, against the numba kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import DIMS
from tests.kernels.shim.device import ORDERS, KernelError, ShimDevice, device_for, devices
from tests.kernels.test_large import DIM, LAST, NUM_SLOTS
from tests.kernels.test_rows import pieces_of
from tiercache.kernels.cpu import rows
from tiercache.kernels.cpu.initial import UNIFORM, initial_rows
from tiercache.kernels.cuda import initial as cuda_initial
from tiercache.kernels.cuda import rows as cuda_rows


def mapped(device: Any, array: Any, *, writable: bool = True) -> cuda_rows.Memory:
    """Give an array by its address, as pinned host memory is given."""
    return cuda_rows.Memory(device.describe(array).address, array.size, array, writable)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    widths=st.lists(st.sampled_from([0, *DIMS]), min_size=1, max_size=3),
    arrays=st.lists(st.lists(st.sampled_from([0, 1, 2, 31, 33, 200]), min_size=1, max_size=5), min_size=1, max_size=3),
    gap=st.sampled_from([0, 4, 5]),
    order=st.sampled_from(ORDERS),
)
def test_pieces_are_packed_as_on_the_cpu_and_unpacked_into_their_slots(
    seed: int, widths: list[int], arrays: list[list[int]], gap: int, order: str
) -> None:
    """Any widths and sizes of pieces, at any float; what lies between pieces and in other slots stays as it is."""
    rng, device = np.random.default_rng(seed), device_for(order)
    num_rows, row_floats = sum(map(sum, arrays)), sum(widths)
    fields = tuple(rng.standard_normal((num_rows + 3, w)).astype(np.float32) for w in widths)
    slots = rng.permutation(num_rows + 3).astype(np.int32)
    places = rng.permutation(num_rows + 3)[:num_rows].astype(np.int32)
    there, here = cuda_rows.Pieces(device, row_floats), rows.Pieces(row_floats)
    back_pieces, packed, wanted, begun = cuda_rows.Pieces(device, row_floats), [], [], 0
    begins, counts, offsets, sources = list[int](), [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], []
    for number, sizes in enumerate(arrays):
        first, offset, size = pieces_of(sizes, row_floats, gap)
        filled = np.full(size, np.nan, np.float32)
        out = device.place(filled)
        wanted.append(filled)
        packed.append(out)
        there.add(begun, np.diff(first), offset, mapped(device, out) if number == 1 else out)
        counts.append(np.diff(first))
        begins.append(begun)
        offsets.append(offset)
        sources.append(mapped(device, out, writable=False) if number == 1 else out)
        here.add(begun, np.diff(first), offset, filled)
        begun += int(first[-1])
    cuts = np.cumsum([0, *(len(sizes) for sizes in arrays)])
    back_pieces.add_each(np.array(begins), np.concatenate(counts), np.concatenate(offsets), sources, cuts)
    rows.pack(fields, slots, places, here)
    placed = tuple(device.place(field) for field in fields)
    cuda_rows.pack(device, placed, device.place(slots), device.place(places), there)
    for out, expected in zip(packed, wanted, strict=True):
        assert np.array_equal(device.read(out), expected, equal_nan=True)
    assert len(device.launches) == (1 if num_rows and row_floats else 0)
    targets = slots[places]
    back = tuple(device.place(np.full_like(field, -1)) for field in fields)
    cuda_rows.unpack(device, back, device.place(targets), back_pieces)
    for field, there_now in zip(fields, back, strict=True):
        copy = device.read(there_now)
        assert np.array_equal(copy[targets], field[targets])
        assert (copy[np.setdiff1d(np.arange(num_rows + 3), targets)] == -1).all()
    device.close()


@pytest.mark.parametrize("dim", DIMS)
def test_one_large_piece_is_shared_by_all_warps(dim: int) -> None:
    """A piece of 3,000 rows, more than the blocks of a small device take at once, with a state of one float."""
    rng = np.random.default_rng(dim)
    fields = [rng.standard_normal((3000, width)).astype(np.float32) for width in (dim, 1)]
    slots, whole = rng.permutation(3000).astype(np.int32), np.array([3000])
    wanted = np.concatenate([field[slots].reshape(-1) for field in fields])
    device = device_for("random")
    out, back = device.empty(wanted.size, np.float32), [device.place(np.zeros_like(field)) for field in fields]
    pieces = cuda_rows.Pieces(device, dim + 1)
    pieces.add(0, whole, np.zeros(1, np.int64), out)
    cuda_rows.pack(device, [device.place(field) for field in fields], device.place(slots), None, pieces)
    assert np.array_equal(device.read(out), wanted)
    cuda_rows.unpack(device, back, device.place(slots), pieces)
    assert all(np.array_equal(field, device.read(copy)) for field, copy in zip(fields, back, strict=True))
    device.close()


def test_rows_beyond_two_billion_elements_are_the_right_ones() -> None:
    """The first and the last rows of a field of 2^31 elements and more: made, packed, unpacked."""
    values = (device := device_for("random")).large(NUM_SLOTS, DIM)
    slots, keys = device.place(LAST), np.arange(4)
    wanted, out = np.empty((4, DIM), np.float32), device.empty(4 * DIM, np.float32)
    initial_rows(keys, 1, 2, UNIFORM, -1.0, 1.0, wanted)
    cuda_initial.initial_rows(device, device.place(keys), 1, 2, UNIFORM, -1.0, 1.0, values, slots)
    assert all(np.array_equal(device.read(values[slot]), row) for slot, row in zip(LAST, wanted, strict=True))
    pieces = cuda_rows.Pieces(device, DIM)
    pieces.add(0, np.array([4]), np.zeros(1, np.int64), out)
    cuda_rows.pack(device, [values], slots, None, pieces)
    assert np.array_equal(device.read(out).reshape(4, DIM), wanted)
    cuda_rows.unpack(device, [values], device.place(LAST[::-1]), pieces)
    assert all(np.array_equal(device.read(values[slot]), row) for slot, row in zip(LAST[::-1], wanted, strict=True))


def test_a_piece_that_begins_behind_two_billion_floats_is_the_right_one() -> None:
    """Places in pieces are counted in 64 bits, as are rows in the order of moving."""
    device, far = device_for("forward"), (1 << 31) + 12
    memory = device.large(NUM_SLOTS, DIM).reshape(-1)
    values = device.place(np.arange(12, dtype=np.float32).reshape(3, 4))
    pieces = cuda_rows.Pieces(device, 4)
    pieces.add(0, np.array([3]), np.array([far]), memory)
    cuda_rows.pack(device, [values], device.place(np.array([2, 0, 1], np.int32)), None, pieces)
    assert device.read(memory[far : far + 12]).tolist() == [8, 9, 10, 11, *range(8)]
    assert not device.read(memory[far - 100 : far]).any()


def test_slot_minus_one_packs_zeros_and_unpacks_nothing() -> None:
    """As everywhere, -1 is no row."""
    slots = np.array([2, -1, 0], np.int32)
    for device in devices():
        values = device.place(np.arange(12, dtype=np.float32).reshape(3, 4))
        out, pieces = device.empty(12, np.float32), cuda_rows.Pieces(device, 4)
        pieces.add(0, np.array([3]), np.zeros(1, np.int64), out)
        cuda_rows.pack(device, [values], device.place(slots), None, pieces)
        assert device.read(out).tolist() == [8, 9, 10, 11, 0, 0, 0, 0, 0, 1, 2, 3]
        back = device.place(np.full((3, 4), 7, np.float32))
        cuda_rows.unpack(device, [back], device.place(slots), pieces)
        assert device.read(back).tolist() == [[0, 1, 2, 3], [7, 7, 7, 7], [8, 9, 10, 11]]


def test_an_access_of_16_bytes_that_is_not_aligned_is_caught() -> None:
    """A piece at any float, taken for one at a multiple of 16 bytes: a GPU would stop, and so does the shim."""

    def changed(_: str, text: str) -> str:
        assert text.count("reinterpret_cast<uint64>(at) | ") == 1
        return text.replace("reinterpret_cast<uint64>(at) | ", "")

    def pack(device: ShimDevice) -> None:
        pieces, values = cuda_rows.Pieces(device, 8), device.place(np.zeros((3, 8), np.float32))
        pieces.add(0, np.array([3]), np.array([1]), device.empty(28, np.float32))
        cuda_rows.pack(device, [values], device.place(np.arange(3, dtype=np.int32)), None, pieces)

    pack(ShimDevice())
    with pytest.raises(KernelError, match="an access not aligned"):
        pack(ShimDevice(changed=changed))


def test_pieces_that_do_not_fit_are_refused() -> None:
    """Too few floats, rows that nothing names, rows of another width, read-only arrays: a sentence, and no launch."""
    device = ShimDevice()
    field, slots, of_three = (np.zeros((3, 4), np.float32),), np.arange(3, dtype=np.int32), np.array([3])
    pieces = cuda_rows.Pieces(device, 4)
    for data, at, said in (
        (np.zeros(11, np.float32), 0, "within the 11 floats"),
        (np.zeros(12, np.float32), -1, "within the 12 floats"),
        (mapped(device, np.zeros(11, np.float32)), 0, "within the 11 floats"),
        (cuda_rows.Memory(1026, 99, None), 0, "a multiple of 4"),
        (np.zeros(12, np.float64), 0, "float64"),
    ):
        with pytest.raises(ValueError, match=said):
            pieces.add(0, of_three, np.array([at]), data)
    with pytest.raises(ValueError, match="begin at place -1"):
        pieces.add(-1, of_three, np.array([0]), np.zeros(12, np.float32))
    with pytest.raises(ValueError, match="2 pieces need 2 offsets, not 1"):
        pieces.add(0, np.array([1, 2]), np.array([0]), np.zeros(12, np.float32))
    pieces.add(1, of_three, np.array([0]), np.zeros(12, np.float32))
    with pytest.raises(ValueError, match="rows up to 4, and there are 3"):
        cuda_rows.unpack(device, field, slots, pieces)
    with pytest.raises(ValueError, match="rows of 4 floats, the fields of 8"):
        cuda_rows.unpack(device, field * 2, slots, pieces)
    frozen = np.zeros(12, np.float32)
    frozen.flags.writeable = False
    for data in (frozen, mapped(device, frozen, writable=False)):
        pieces = cuda_rows.Pieces(device, 4)
        pieces.add(0, of_three, np.array([0]), data)
        with pytest.raises(ValueError, match="read-only"):
            cuda_rows.pack(device, field, slots, slots, pieces)
    assert device.launches == []
