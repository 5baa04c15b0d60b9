"""Steps of 16-bit rows: stochastic rounding with float32 intermediates; and numbers below 2^-126, which are kept."""

import os
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import DIMS, DTYPES, Bags, every_machine, machine, same_bits
from tests.kernels.machines import Cpu, Cuda, narrow, numbers
from tests.kernels.shim.device import ShimDevice
from tests.kernels.stochastic import AWKWARD, mix, random_bits, rounded
from tests.kernels.test_pooling import pool
from tests.kernels.test_update import OPTIMIZERS, same_but_nan, states, stepped
from tiercache.kernels.cpu import vectors
from tiercache.kernels.cpu.pooling import SUM
from tiercache.kernels.cpu.rounding import set_streams
from tiercache.kernels.cpu.simd import store
from tiercache.kernels.cpu.vectors import read
from tiercache.kernels.step import NO_ROUNDING, Rule, Step, Vectors, make_rounding
from tiercache.store.bits import from_bits, to_bits

F4 = np.float32
SEED, TABLE_ID = 7, 0x5FE193BB4B6B9CD0


def test_cpus_without_float16_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    @numba.njit
    def read_all(held: Vectors, out: Any) -> None:
        for at in range(0, out.size, 16):
            store(out, at, read(held, at, 16), 16)

    monkeypatch.setattr(vectors, "_has_halves", lambda: False)
    bits, out = np.arange(1 << 16, dtype=np.uint16), np.empty(1 << 16, F4)
    read_all(Vectors.of(bits.view(F4)[None, :], 1 << 16, "float16"), out)
    expected = from_bits(bits, "float16")
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(out), nan)
    assert same_bits(out[~nan], expected[~nan])


@every_machine
@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    optimizer=st.sampled_from(OPTIMIZERS),
    dim=st.sampled_from(DIMS),
    seed=st.integers(0, 2**32),
    applied=st.integers(1, 2**40),
    scale=st.sampled_from([1.0, 1e-6, 3e4]),
    hot=st.booleans(),
    turn=st.integers(0, 2),
)
def test_a_step_is_that_of_float32_rounded_by_the_bits_of_seed_table_key_and_step(
    kind: str, dtype: str, optimizer: str, dim: int, seed: int, applied: int, scale: float, turn: int, *, hot: bool
) -> None:
    """State has the bits of float32 training, for any slot of a key; also for runs longer than a device's stretches."""
    rng, num_slots = np.random.default_rng(seed), 20
    keys, order = rng.integers(-(2**62), 2**62, num_slots), rng.permutation(num_slots).astype(np.int32)
    counts = [1, 255, 256, 257, 513, 3, 1025] if hot and dim < 20 else [4] * 15
    slots = rng.permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int32)
    values = numbers(narrow((rng.standard_normal((num_slots, dim)) * scale).astype(F4), dtype), dtype)
    gradient = (rng.standard_normal((slots.size, dim)) * scale).astype(F4)
    fields = [values, *states(optimizer, num_slots, dim, rng)]
    with machine(kind, turn) as m:
        streams = m.place(np.zeros(num_slots, np.uint64))
        m.set_streams(streams, m.place(order), m.place(keys), TABLE_ID, SEED)
        wide, *wide_states = stepped(m, optimizer, fields, slots, m.one_id(gradient), 0.01)
        rounding = make_rounding(streams, applied)
        bits, *after = stepped(m, optimizer, fields, slots, m.one_id(gradient), 0.01, dtype=dtype, rounding=rounding)
    for one, other in zip(after, wide_states, strict=True):
        assert same_bits(one, other)
    before = narrow(values, dtype).values
    for i, slot in enumerate(order):
        if slot not in slots:
            assert np.array_equal(bits[slot], before[slot])
            continue
        noise = random_bits(TABLE_ID, SEED, int(keys[i]), applied, dim)
        expected = [rounded(value, int(drawn), dtype) for value, drawn in zip(wide[slot], noise, strict=True)]
        assert bits[slot, :dim].tolist() == expected
        assert not bits[slot, dim:].any()


def rounded_once(m: Any, values: Any, dtype: str, applied: int = 1, *, rows: int = 1) -> Any:
    """Return the bits of numbers (D,), or (S, D), in each of ``rows`` rows after a step from 0 to them."""
    values = np.atleast_2d(values) if values.ndim == 2 else np.tile(values, (rows, 1))
    slots, zeros = np.arange(len(values), dtype=np.int32), np.zeros_like(values, F4)
    streams = np.zeros(len(values), np.uint64)
    set_streams(streams, slots, slots.astype(np.int64), TABLE_ID, SEED)
    held, pairs = m.vectors(zeros, dtype), m.sort(m.place(slots), len(values))
    rounding, gradients = make_rounding(m.place(streams), applied), m.one_id(-values.astype(F4))
    m.step(Step(held, (), pairs, gradients, Rule("sgd", 1.0), rounding))
    return m.read(held.values)[:, : values.shape[1]]


def neighbors(value: float, dtype: str) -> tuple[float, float]:
    """Return the largest number of a dtype not above ``value``, and the smallest not below it."""
    lattice = from_bits(np.arange(1 << 16, dtype=np.uint16), dtype)
    lattice = np.sort(lattice[~np.isnan(lattice)])
    at = int(np.searchsorted(lattice, F4(value)))
    return float(lattice[at - 1]), float(lattice[at])


@every_machine
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 65])
def test_any_float32_is_rounded_by_the_definition(kind: str, dtype: str, dim: int) -> None:
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 8000, dtype=np.uint64).astype(np.uint32)
    drawn[:4000] = drawn[:4000] % 0x18000000 + 0x30000000  # where float16 has its numbers
    values = np.concatenate([np.repeat(np.array(AWKWARD, np.uint32), 40), drawn, [0x7F800001, 0xFFC12345]])
    values = np.resize(values.astype(np.uint32), (-(-values.size // dim), dim)).view(F4)
    assert np.isnan(values).sum() > 5
    wanted = [
        [
            rounded(value, int(bits), dtype)
            for value, bits in zip(row, random_bits(TABLE_ID, SEED, i, 9, dim), strict=True)
        ]
        for i, row in enumerate(np.where(values == 0, F4(0), values))  # no step from 0 ends at -0
    ]
    with machine(kind, 2) as m:
        assert same_but_nan(rounded_once(m, values, dtype, 9), np.array(wanted, np.uint16), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_many_roundings_is_the_number(dtype: str) -> None:
    """It is off by less than five standard errors; rounding to the nearest would be off by hundreds of them."""
    rows = 100_000
    for value in (1.0 + 2.0**-12, 0.3, -0.7123, 3e-6, -1.7e-7, 1234.567):
        bits = rounded_once(Cpu(), np.array([value], F4), dtype, rows=rows)
        found = from_bits(np.ascontiguousarray(bits), dtype)
        low, high = neighbors(float(F4(value)), dtype)
        share = (float(F4(value)) - low) / (high - low)
        deviation = (high - low) * np.sqrt(share * (1 - share) / rows)
        assert 0 < abs(found.astype(np.float64).mean() - float(F4(value))) < 5 * deviation
        nearest_number = float(from_bits(to_bits(np.array([value], F4), dtype), dtype)[0])
        assert abs(nearest_number - float(F4(value))) > 50 * deviation


@every_machine
@pytest.mark.parametrize("dim", DIMS)
def test_streams_go_to_the_slots_of_their_keys(kind: str, dim: int) -> None:
    """Only in the given slots, of which a device skips -1; without slots, side by side."""
    rng, size = np.random.default_rng(dim), 3 * dim
    keys, slots = rng.integers(-(2**63), 2**63 - 1, size), rng.permutation(size + 4)[:size].astype(np.int32)
    of_keys = keys.view(np.uint64) ^ np.uint64(mix(SEED ^ TABLE_ID))
    wanted = np.zeros(size + 4, np.uint64)
    first = int(kind == "cuda")
    slots[:first] = -1
    wanted[slots[first:]] = of_keys[first:]
    with machine(kind, dim) as m:
        streams = m.place(np.zeros(size + 4, np.uint64))
        m.set_streams(streams, m.place(slots), m.place(keys), TABLE_ID, SEED)
        assert np.array_equal(m.read(streams), wanted)
        m.set_streams(streams[:size], None, m.place(keys), TABLE_ID, SEED)
        assert np.array_equal(m.read(streams)[:size], of_keys)
        for given_slots, room in ((m.place(slots[:2]), 3), (None, 2)):
            with pytest.raises(ValueError, match=r"3 keys have 2 slots|the same length"):
                m.set_streams(streams[:room], given_slots, m.place(keys[:3]), 0, 0)


SUBNORMAL = (np.arange(1, 25, dtype=F4) * F4(2.0**-133)).reshape(6, 4)
CASE = Bags(
    num_samples=3, dim=4, table_rows=[6], modes=np.array([SUM], np.int8), offsets=np.array([0, 2, 4, 6]),
    ids=np.array([0, 1, 2, 3, 3, 5], np.int32), weights=np.empty(0, F4), slot_of_local=np.arange(6, dtype=np.int32),
    vectors=SUBNORMAL, distance=0,
)  # fmt: skip


def results(m: Any, dtype: str) -> list[Any]:
    done = pool(m, CASE, dtype)
    streams = m.place(np.arange(6, dtype=np.uint64))
    rounding = NO_ROUNDING if dtype == "float32" else make_rounding(streams, 1)
    gradients = m.of_bags(SUBNORMAL[:3], done)._replace(argmax=np.empty(0, np.int32))
    (rows,) = stepped(m, "sgd", [SUBNORMAL], m.read(done["slots"]), gradients, dtype=dtype, rounding=rounding)
    return [m.read(done["out"]), rows]


def agrees(m: Any, dtype: str) -> bool:
    (out, rows), (wanted, stepped_rows) = results(m, dtype), results(Cpu(), dtype)
    before = SUBNORMAL if dtype == "float32" else narrow(SUBNORMAL, dtype).values
    assert not np.array_equal(stepped_rows, before), "the step changed nothing"
    return bool(wanted.all()) and same_bits(out, wanted) and np.array_equal(rows, stepped_rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_subnormal_rows_and_gradients_are_kept_on_cuda(dtype: str) -> None:
    with machine("cuda", 2) as m:
        assert agrees(m, dtype)


@pytest.mark.skipif(bool(os.environ.get("TIERCACHE_TEST_GPU")), reason="shows what a GPU must not do")
def test_a_device_that_takes_them_for_zero_is_found_on_cuda() -> None:
    """The effect of -ftz=true, on the shim."""
    assert agrees(Cuda(ShimDevice("random")), "float32")
    assert not agrees(Cuda(ShimDevice("random", flush=True)), "float32")
