"""Rows between slots and pieces, on every machine."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.cases import DIMS, every_machine, machine, machines
from tests.kernels.machines import Cpu, Cuda
from tests.kernels.shim.device import KernelError, ShimDevice
from tiercache.kernels.arrays import View
from tiercache.kernels.cpu.rows import pack
from tiercache.kernels.cuda.rows import pack as cuda_pack
from tiercache.kernels.pieces import Pieces


def pieces_of(sizes: list[int], width: int, distance: int) -> tuple[np.ndarray, np.ndarray, int]:
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    offset = (first[:-1] * width + distance * np.arange(len(sizes))).astype(np.int64)
    return first, offset, int(first[-1]) * width + distance * len(sizes)


def mapped(m: Any, array: Any, *, writable: bool = True) -> Any:
    """Pass an array to a device by its address, like pinned host memory."""
    if m.kind != "cuda":
        return array
    return m.device.describe(array)._replace(writable=writable)


def frozen(m: Any, array: Any) -> Any:
    if m.kind == "cuda":
        return mapped(m, array, writable=False)
    seen = array.view()
    seen.flags.writeable = False
    return seen


@every_machine
@given(
    seed=st.integers(0, 2**32),
    widths=st.lists(st.sampled_from([0, *DIMS]), min_size=1, max_size=3),
    arrays=st.lists(
        st.lists(st.sampled_from([0, 1, 2, 31, 33, 200, 700]), min_size=1, max_size=5), min_size=1, max_size=3
    ),
    distance=st.sampled_from([0, 4, 5]),
    others=st.sampled_from([3, 5000]),
    any_bits=st.booleans(),
    turn=st.integers(0, 2),
)
def test_pack_is_field_major_in_each_piece_and_unpack_reverses_it(
    kind: str, seed: int, widths: list[int], arrays: list[list[int]], distance: int, others: int, turn: int, *,
    any_bits: bool,
) -> None:  # fmt: skip
    """A piece has all vectors, then each state, at any float of an array. A word may be NaN: two 16-bit numbers."""
    rng = np.random.default_rng(seed)
    num_rows, row_floats = sum(map(sum, arrays)), sum(widths)
    others = others if kind == "cpu" else 3
    fields = [rng.standard_normal((num_rows + others, w)).astype(np.float32) for w in widths]
    if any_bits:
        fields = [rng.integers(0, 1 << 32, f.shape, np.uint64).astype(np.uint32).view(np.float32) for f in fields]
    slots = rng.permutation(num_rows + others).astype(np.int32)
    order = rng.permutation(num_rows + others)[:num_rows].astype(np.int32)
    targets = slots[order]
    with machine(kind, turn) as m:
        packing, unpacking, packed, wanted, begun = m.pieces(row_floats), m.pieces(row_floats), [], [], 0
        begins, counts, offsets, sources = list[int](), [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], []
        for number, sizes in enumerate(arrays):
            first, offset, size = pieces_of(sizes, row_floats, distance)
            out, expected = m.place(np.full(size, np.nan, np.float32)), np.full(size, np.nan, np.float32)
            for p in range(len(sizes)):
                rows = targets[begun + first[p] : begun + first[p + 1]]
                piece = np.concatenate([field[rows].reshape(-1) for field in fields])
                expected[offset[p] : offset[p] + piece.size] = piece
            packing.add(begun, np.diff(first), offset, mapped(m, out) if number == 1 else out)
            packed.append(out)
            wanted.append(expected)
            counts.append(np.diff(first))
            begins.append(begun)
            offsets.append(offset)
            sources.append(frozen(m, out) if number == 1 else out)
            begun += int(first[-1])
        cuts = np.cumsum([0, *(len(sizes) for sizes in arrays)])
        unpacking.add_each(np.array(begins), np.concatenate(counts), np.concatenate(offsets), sources, cuts)
        m.pack(tuple(m.place(field) for field in fields), m.place(slots), m.place(order), packing)
        for out, expected in zip(packed, wanted, strict=True):
            assert m.read(out).tobytes() == expected.tobytes()
        assert kind == "cpu" or len(m.device.launches) == (1 if num_rows and row_floats else 0)
        back = tuple(m.place(np.full_like(field, -1)) for field in fields)
        m.unpack(back, m.place(targets), unpacking)
        for field, there in zip(fields, back, strict=True):
            copy = m.read(there)
            assert copy[targets].tobytes() == field[targets].tobytes()
            assert (copy[np.setdiff1d(np.arange(num_rows + others), targets)] == -1).all()


@given(st.permutations(range(4)), st.integers(0, 2))
def test_pieces_in_any_order_with_places_left_out_are_packed(places: list[int], left_out: int) -> None:
    field, rng = np.arange(40, dtype=np.float32).reshape(40, 1), np.random.default_rng(sum(places[:2]))
    slots, order = rng.permutation(40).astype(np.int32), rng.permutation(40).astype(np.int32)
    pieces, packed = Pieces(1), {}
    for place in places[left_out:]:
        packed[place] = np.zeros(10, np.float32)
        pieces.add(10 * place, np.array([10]), np.zeros(1, np.int64), packed[place])
    pack((field,), slots, order, pieces)
    for place, out in packed.items():
        assert np.array_equal(out, slots[order[10 * place : 10 * place + 10]])


def steps_of(call: Callable[[], None]) -> int:
    steps = 0

    def count(frame: Any, event: str, _: Any) -> Any:
        nonlocal steps
        steps, frame.f_trace_opcodes = steps + (event == "opcode"), True
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return steps


def test_python_does_as_much_for_thousands_of_pieces_as_for_ten() -> None:
    """The pages of 32 MiB may be thousands, and a switch prepares and launches all of them."""
    device = ShimDevice()
    device.launch = lambda *_: None  # type: ignore[method-assign]
    values, slots, out = np.zeros((8000, 2), np.float32), np.arange(8000, dtype=np.int32), np.zeros(16000, np.float32)

    def prepare(count: int) -> None:
        pieces = Pieces(2)
        pieces.add(0, np.full(count, 4), np.arange(count) * 8, out)
        cuda_pack(device, [values], slots, None, pieces)

    assert steps_of(lambda: prepare(10)) == steps_of(lambda: prepare(2000)) > 100


@pytest.mark.parametrize("dim", DIMS)
def test_one_large_piece_is_shared_by_all_warps_on_cuda(dim: int) -> None:
    """A piece of 3,000 rows, more than the blocks of a small device process at once, with a state of one float."""
    rng = np.random.default_rng(dim)
    fields = [rng.standard_normal((3000, width)).astype(np.float32) for width in (dim, 1)]
    slots, whole = rng.permutation(3000).astype(np.int32), np.array([3000])
    wanted = np.concatenate([field[slots].reshape(-1) for field in fields])
    with machine("cuda", 2) as m:
        out, back = m.array((wanted.size,), np.float32), [m.place(np.zeros_like(field)) for field in fields]
        pieces = m.pieces(dim + 1)
        pieces.add(0, whole, np.zeros(1, np.int64), out)
        m.pack([m.place(field) for field in fields], m.place(slots), None, pieces)
        assert np.array_equal(m.read(out), wanted)
        m.unpack(back, m.place(slots), pieces)
        assert all(np.array_equal(field, m.read(copy)) for field, copy in zip(fields, back, strict=True))


def test_slot_minus_one_packs_zeros_and_unpacks_nothing_on_cuda() -> None:
    slots = np.array([2, -1, 0], np.int32)
    for m in machines("cuda"):
        values = m.place(np.arange(12, dtype=np.float32).reshape(3, 4))
        out, pieces = m.array((12,), np.float32), m.pieces(4)
        pieces.add(0, np.array([3]), np.zeros(1, np.int64), out)
        m.pack([values], m.place(slots), None, pieces)
        assert m.read(out).tolist() == [8, 9, 10, 11, 0, 0, 0, 0, 0, 1, 2, 3]
        back = m.place(np.full((3, 4), 7, np.float32))
        m.unpack([back], m.place(slots), pieces)
        assert m.read(back).tolist() == [[0, 1, 2, 3], [7, 7, 7, 7], [8, 9, 10, 11]]


def test_an_access_of_16_bytes_that_is_not_aligned_is_caught_on_cuda() -> None:
    """A piece at any float, used as if it were at a multiple of 16 bytes: a GPU would stop, and so does the shim."""

    def changed(_: str, text: str) -> str:
        assert text.count("reinterpret_cast<uint64>(at) | ") == 1
        return text.replace("reinterpret_cast<uint64>(at) | ", "")

    def unpack_on(m: Cuda) -> None:
        pieces, values = m.pieces(8), m.place(np.zeros((3, 8), np.float32))
        pieces.add(0, np.array([3]), np.array([1]), m.array((28,), np.float32))
        m.unpack([values], m.place(np.arange(3, dtype=np.int32)), pieces)

    unpack_on(Cuda(ShimDevice()))
    with pytest.raises(KernelError, match="an access not aligned"):
        unpack_on(Cuda(ShimDevice(changed=changed)))


@pytest.mark.parametrize(
    ("slots", "order", "place"),
    [([0, 1, 2], [0, 1, 1], 2), ([0, 0, 2], [2, 0, 1], 2), ([0, 1, 3], [0, 2, 1], 1), ([0, 1, 2], [3, 1, 2], 0)],
)
def test_rows_without_a_slot_of_their_own_are_refused(slots: list[int], order: list[int], place: int) -> None:
    pieces, out = Pieces(1), np.full(3, -1, np.float32)
    pieces.add(0, np.array([3]), np.zeros(1, np.int64), out)
    with pytest.raises(ValueError, match=f"row at place {place} has an invalid or repeated slot"):
        pack((np.zeros((3, 1), np.float32),), np.array(slots, np.int32), np.array(order, np.int32), pieces)
    assert (out == -1).all()


@every_machine
def test_pieces_that_do_not_fit_are_refused(kind: str) -> None:
    m: Any = Cpu() if kind == "cpu" else Cuda(ShimDevice())
    field, slots, of_three = (np.zeros((3, 4), np.float32),), np.arange(3, dtype=np.int32), np.array([3])
    pieces, places = m.pieces(4), np.array([0, 3])
    pieces.add(0, np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))
    m.pack(field, slots, slots, pieces)  # no pieces move nothing
    for rows, offset, data, said in (
        (of_three, [0], np.zeros(11, np.float32), "within the 11 floats"),
        (of_three, [-1], np.zeros(12, np.float32), "within the 12 floats"),
        (of_three, [0], mapped(m, np.zeros(11, np.float32)), "within the 11 floats"),
        (of_three, [0], np.zeros(12, np.float64), "float64"),
        (np.array([1, 2]), [0], np.zeros(12, np.float32), "2 pieces need 2 offsets, not 1"),
    ):
        with pytest.raises(ValueError, match=said):
            pieces.add(0, rows, np.array(offset), data)
    with pytest.raises(ValueError, match="begin at place -1"):
        pieces.add(-1, of_three, np.array([0]), np.zeros(12, np.float32))
    with pytest.raises(ValueError, match="a multiple of 4"):
        Pieces(4, lambda _: View(1026, (99,), np.dtype(np.float32))).add(0, of_three, np.array([0]), None)
    two = [np.zeros(12, np.float32), np.zeros(11, np.float32)]
    for first, rows, cuts, said in (
        (places, [1, 2, 3], [0, 2, 3], "piece 2 is not within the 11 floats"),
        (places, [1, 1, 1], [0, 2], r"2 arrays, 2 first places and cuts .* do not fit 3 pieces"),
        (places, [1, 1, 1], [0, 4, 3], r"cuts \[0, 4, 3\] do not fit 3 pieces"),
        (places[:1], [1, 1, 1], [0, 2, 3], "2 arrays, 1 first places"),
    ):
        with pytest.raises(ValueError, match=said):
            pieces.add_each(first, np.array(rows), np.array([0, 4, 0]), two, np.array(cuts))
    assert pieces.num_rows == 0
    pieces.add(1, of_three, np.array([0]), np.zeros(12, np.float32))
    with pytest.raises(ValueError, match="rows up to 4, but there are 3"):
        m.unpack(field, slots, pieces)
    with pytest.raises(ValueError, match="rows of 4 floats, but the fields have 8"):
        m.unpack(field * 2, slots, pieces)
    pieces = m.pieces(4)
    pieces.add(0, of_three, np.array([0]), frozen(m, np.zeros(12, np.float32)))
    with pytest.raises(ValueError, match="read-only"):
        m.pack(field, slots, slots, pieces)
    assert kind == "cpu" or m.device.launches == []
