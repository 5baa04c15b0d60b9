"""Initial rows from a counter-based generator."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import DIMS, DTYPES, every_machine, machine, machines, same_bits
from tests.kernels.machines import Cuda
from tests.kernels.shim.device import ShimDevice
from tests.kernels.stochastic import AWKWARD, philox, row_words
from tiercache.kernels.cpu.initial import CONSTANT, NORMAL, UNIFORM, ZEROS, initial_rows
from tiercache.kernels.cuda import initial as cuda_initial
from tiercache.kernels.cuda.launch import launch_parts, view
from tiercache.kernels.step import Vectors
from tiercache.store.bits import to_bits

MASK = 2**64 - 1
LOW = 2**32 - 1

# Known answers published with the generator (Random123, kat_vectors): counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((LOW,) * 4, (LOW,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_philox_is_as_published(
    counter: tuple[int, int, int, int], key: tuple[int, int], wanted: tuple[int, ...]
) -> None:
    assert philox(counter, key) == wanted


@settings(max_examples=30)
@given(keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), dim=st.sampled_from(DIMS))
def test_normal_rows_are_box_mullers(keys: list[int], dim: int) -> None:
    """Pairs of words become radius and angle; float32 arithmetic stays within 1e-5 of float64's."""
    out = np.full((len(keys), dim), np.nan, np.float32)
    initial_rows(np.array(keys, np.int64), 5, 6, NORMAL, 1.0, 2.0, out)
    for row, key in zip(out, keys, strict=True):
        words = (np.array(row_words(key, 5, 6, dim + dim % 2), np.uint64) >> np.uint64(8)).astype(np.float64)
        radius, angle = np.sqrt(-2 * np.log((words[::2] + 1) / 2**24)), 2 * np.pi * words[1::2] / 2**24
        wanted = 1 + 2 * np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:dim]
        np.testing.assert_allclose(row, wanted, rtol=0, atol=2e-5)


def test_a_normal_row_depends_on_table_seed_and_key_only() -> None:
    keys = np.random.default_rng(0).integers(-(2**62), 2**62, 300)
    whole, single, other = (np.empty((300, 33), np.float32) for _ in range(3))
    initial_rows(keys, 9, 8, NORMAL, -1.0, 1.0, whole)
    for i in np.random.default_rng(1).permutation(300):
        initial_rows(keys[i : i + 1], 9, 8, NORMAL, -1.0, 1.0, single[i : i + 1])
    assert same_bits(whole, single)
    for table_id, seed in ((10, 8), (9, 9)):
        initial_rows(keys, table_id, seed, NORMAL, -1.0, 1.0, other)
        assert not np.any(np.all(other == whole, axis=1))


def test_an_unknown_kind_or_a_wrong_length_is_refused() -> None:
    out = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match="kind 4"):
        initial_rows(np.arange(2), 0, 0, 4, 0.0, 0.0, out)
    with pytest.raises(ValueError, match="the same length"):
        initial_rows(np.arange(3), 0, 0, UNIFORM, 0.0, 1.0, out)


@every_machine
@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=70, unique=True),
    table_id=st.integers(0, MASK),
    seed=st.integers(-(2**63), MASK),
    dim=st.sampled_from(DIMS),
    kind_of_row=st.sampled_from((ZEROS, CONSTANT, UNIFORM)),
    low=st.floats(-10, 0, width=32) | st.just(-1e5),
    high=st.floats(0, 10, width=32) | st.just(1e-6),
    dtype=st.sampled_from(("float32", *DTYPES)),
    turn=st.integers(0, 2),
)
def test_rows_follow_their_definition_bit_for_bit(
    kind: str, keys: list[int], table_id: int, seed: int, dim: int, kind_of_row: int, low: float, high: float,
    dtype: str, turn: int,
) -> None:  # fmt: skip
    """Low + (word >> 8) * 2^-24 * (high - low) in float32, not fused; on a device also in 16 bits, and to slots."""
    f4, size = np.float32, len(keys)
    wanted = np.full((size, dim), low if kind_of_row == CONSTANT else 0, f4)
    if kind_of_row == UNIFORM:
        for row, key in zip(wanted, keys, strict=True):
            unit = (np.array(row_words(key, table_id, seed, dim), np.uint64) >> np.uint64(8)).astype(f4) * f4(2.0**-24)
            row[:] = f4(low) + unit * (f4(high) - f4(low))
    dtype = "float32" if kind == "cpu" else dtype
    with machine(kind, turn) as m:
        there, how = m.place(np.array(keys, np.int64)), (table_id, seed, kind_of_row, low, high)
        out = m.vectors(np.full((size, dim), 9, f4), dtype)
        m.initial_rows(there, *how, out)
        right = m.read(m.vectors(wanted, dtype).values)
        assert m.read(out.values).tobytes() == right.tobytes()
        if kind == "cpu":
            return
        slots = np.random.default_rng(0).permutation(size + 5)[:size].astype(np.int32)
        rows = m.vectors(np.full((size + 5, dim), 9, f4), dtype)
        expected = m.read(rows.values)
        expected[slots[1:]] = right[1:]
        slots[:1] = -1
        m.initial_rows(there, *how, rows, m.place(slots))
        assert m.read(rows.values).tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", [(0, 7), (5, 0)])
def test_nothing_to_write_launches_nothing_on_cuda(shape: tuple[int, int]) -> None:
    with machine("cuda") as m:
        m.initial_rows(m.place(np.arange(shape[0])), 1, 3, UNIFORM, -0.5, 0.5, m.vectors(np.zeros(shape, np.float32)))
        assert m.device.launches == []


@pytest.mark.parametrize("dim", [1, 3, 64])
def test_states_of_new_rows_begin_with_their_value_on_cuda(dim: int) -> None:
    wanted = np.zeros((9, dim), np.float32)
    wanted[[3, 0, 7]] = np.float32(0.1)
    for m in machines("cuda"):
        state = m.place(np.zeros((9, dim), np.float32))
        cuda_initial.fill_rows(m.device, 0.1, state, m.place(np.array([3, 0, -1, 7], np.int32)))
        assert same_bits(m.read(state), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_nearest_is_that_of_numpy_on_cuda(dtype: str) -> None:
    """Ends and ties of the dtypes, and three thousand bit patterns; NaN stays NaN with its sign and upper bits."""
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 3000, dtype=np.uint64).astype(np.uint32)
    drawn[:1000] = drawn[:1000] % 0x10000000 + 0x30000000  # where float16 has its numbers
    nan = np.array([0x7FC00001, 0xFFC12345, 0x7FFFFFFF], np.uint32)
    values = np.concatenate([np.array(AWKWARD, np.uint32), drawn, nan]).view(np.float32)
    values = values[~np.isnan(values) | (values.view(np.uint32) & 0x400000 != 0)]  # else Python makes NaN quiet
    with machine("cuda") as m:
        out, count = m.array((values.size, 2), np.float32), [1] * values.size
        at = view(m.device, "out", out, np.float32, ndim=2).address
        parts = [
            (0, 0, at + 8 * i, 1, 0, 3, 1, CONSTANT, value, 0, dtype == "float16") for i, value in enumerate(values)
        ]
        launch_parts(m.device, "initial.initial_rows_narrow", cuda_initial._PART, parts, count)  # a row of each number
        assert np.array_equal(m.read(out).view(np.uint16)[:, 2], to_bits(values, dtype))


def test_rows_that_do_not_fit_are_refused_on_cuda() -> None:
    m, out = Cuda(ShimDevice()), Vectors(np.zeros((2, 3), np.float32), 3)
    for keys, kind_of_row, slots, said in (
        (2, NORMAL, None, "unsupported initializer kind 3 on a device"),
        (2, 4, None, "unsupported initializer kind 4 on a device"),
        (3, UNIFORM, None, "2 rows for 3 keys"),
        (2, UNIFORM, np.zeros(1, np.int32), "2 keys have 1 slots"),
    ):
        with pytest.raises(ValueError, match=said):
            m.initial_rows(np.arange(keys), 0, 0, kind_of_row, 0.0, 1.0, out, slots)
    assert m.device.launches == []
