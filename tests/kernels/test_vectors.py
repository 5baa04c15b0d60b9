"""Vectors of 16-bit dtypes in kernels: read exactly, rounded stochastically, fp32 in everything between."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import DIMS, Bags, bags, same_bits, use_threads
from tests.kernels.stochastic import random_bits, rounded
from tiercache.kernels.cpu import vectors
from tiercache.kernels.cpu.gradients import one_id_gradients
from tiercache.kernels.cpu.pooling import MAX, gather, pool_bags, pool_one, spread_one, weight_gradient
from tiercache.kernels.cpu.rounding import make_rounding, set_streams
from tiercache.kernels.cpu.simd import store
from tiercache.kernels.cpu.sorting import SortBuffers, sort_slots
from tiercache.kernels.cpu.update import UpdateBuffers, update_adagrad, update_adam, update_rowwise_adagrad, update_sgd
from tiercache.kernels.cpu.vectors import Vectors, expect_vectors, read
from tiercache.store.vectors import from_bits, nearest, to_bits

F4 = np.float32
DTYPES = ("bfloat16", "float16")
SEED, TABLE_ID = 7, 0x5FE193BB4B6B9CD0


def narrow(values: Any, dtype: str) -> Vectors:
    """Return numbers (S, D), rounded to the nearest, as kernels hold them: rows begin at a word."""
    slots, dim = values.shape
    bits = np.zeros((slots, dim + dim % 2), np.uint16)
    bits[:, :dim] = to_bits(values, dtype)
    return Vectors.of(bits.view(np.float32), dim, dtype)


def numbers(held: Vectors, dtype: str) -> Any:
    """Return what vectors hold, as float32."""
    return from_bits(np.ascontiguousarray(held.values[:, : held.dim]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_16_bits_is_read_exactly(dtype: str) -> None:
    """All 65,536 bit patterns, in full registers and in parts of them: subnormals, infinities and NaN too."""
    for dim in (1, 16, 37, 256):
        bits = np.resize(np.arange(1 << 16, dtype=np.uint16), (-(-(1 << 16) // dim), dim))
        padded = np.zeros((bits.shape[0], dim + dim % 2), np.uint16)
        padded[:, :dim] = bits
        out = np.empty(bits.shape, F4)
        gather(Vectors.of(padded.view(F4), dim, dtype), np.arange(bits.shape[0], dtype=np.int32), out)
        expected = from_bits(bits, dtype)
        nan = np.isnan(expected)
        assert np.array_equal(np.isnan(out), nan)
        assert same_bits(out[~nan], expected[~nan])


def test_processors_without_float16_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no instruction for it, integer arithmetic gives the same numbers."""

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


@settings(max_examples=30, deadline=None)
@given(bags(), st.sampled_from(DTYPES))
def test_pooling_is_that_of_the_same_numbers_in_float32(batch: Bags, dtype: str) -> None:
    """Outputs, slots, what the step needs and gradients of weights: the bits of float32 rows with these numbers."""
    held = narrow(batch.vectors, dtype)
    results = []
    for rows in (held, numbers(held, dtype)):
        out, slots = np.zeros((batch.num_samples, batch.width), F4), np.empty(batch.ids.size, np.int32)
        argmax, offset = np.full(out.shape, -1, np.int32), np.empty(batch.ids.size, np.int64)
        scale, of_weights = np.empty(batch.ids.size, F4), np.empty(batch.ids.size, F4)
        pool_bags(
            rows, batch.slot_of_local, batch.ids, batch.bases, batch.entry_starts, batch.offsets, batch.weights,
            batch.modes, batch.cols, out, slots, argmax, offset, scale,
        )  # fmt: skip
        weight_gradient(rows, slots, batch.entry_starts, batch.offsets, batch.modes, batch.cols, out, of_weights)
        of_weights[np.repeat(np.repeat(batch.modes == MAX, batch.num_samples), np.diff(batch.offsets))] = 0
        results.append((out, argmax, offset, scale, of_weights))
    for one, other in zip(*results, strict=True):
        assert one.tobytes() == other.tobytes()


@settings(max_examples=20, deadline=None)
@given(bags(one_id=True), st.sampled_from(DTYPES))
def test_lookups_of_one_id_are_those_of_the_same_numbers_in_float32(batch: Bags, dtype: str) -> None:
    """The same where every sample has one id."""
    held = narrow(batch.vectors, dtype)
    outs = []
    for rows in (held, numbers(held, dtype)):
        out, slots = np.zeros((batch.num_samples, batch.width), F4), np.empty(batch.ids.size, np.int32)
        pool_one(rows, batch.slot_of_local, batch.ids, batch.bases, batch.cols, batch.num_samples, out, slots)
        outs.append(out)
        spread = np.zeros_like(out)
        pairs = sort_slots(slots, num_rows(rows), SortBuffers())
        spread_one(rows, pairs, batch.cols, batch.num_samples, spread)
        outs.append(spread)
    assert all(same_bits(outs[0], other) for other in outs[1:])


def step(optimizer: str, rows: Any, state: list[Any], slots: Any, gradient: Any, rounding: Any) -> None:
    """Apply one step in place."""
    pairs, buffers = sort_slots(slots, num_rows(rows), SortBuffers()), UpdateBuffers()
    how = pairs, one_id_gradients(gradient, np.zeros(1, np.int64)), buffers
    shared = {"learning_rate": 0.3, "decay": 0.01} | ({"rounding": rounding} if rounding else {})
    match optimizer:
        case "sgd":
            update_sgd(rows, *how, **shared)
        case "adagrad":
            update_adagrad(rows, *state, *how, **shared)
        case "rowwise":
            update_rowwise_adagrad(rows, *state, *how, **shared)
        case "adam":
            update_adam(rows, *state, *how, step=3, **shared)


def num_rows(rows: Any) -> int:
    """Return the number of slots."""
    return int(rows.values.shape[0] if isinstance(rows, Vectors) else rows.shape[0])


STATE_WIDTHS = {"sgd": (), "adagrad": (0,), "rowwise": (1,), "adam": (0, 0)}


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    optimizer=st.sampled_from(sorted(STATE_WIDTHS)),
    dim=st.sampled_from(DIMS),
    seed=st.integers(0, 2**32),
    applied=st.integers(1, 2**40),
    scale=st.sampled_from([1.0, 1e-6, 3e4]),
)
def test_a_step_is_that_of_float32_rounded_by_the_bits_of_seed_table_key_and_step(
    dtype: str, optimizer: str, dim: int, seed: int, applied: int, scale: float
) -> None:
    """State has the bits of float32 training; vectors are its vectors, rounded as NumPy does; other rows stay."""
    rng = np.random.default_rng(seed)
    size, num_slots = 60, 20
    keys = rng.integers(-(2**62), 2**62, num_slots)
    order = rng.permutation(num_slots).astype(np.int32)  # the slot of each key
    slots = rng.integers(0, num_slots - 5, size).astype(np.int32)
    held = narrow((rng.standard_normal((num_slots, dim)) * scale).astype(F4), dtype)
    gradient = (rng.standard_normal((size, dim)) * scale).astype(F4)
    state = [rng.random((num_slots, width or dim), dtype=F4) for width in STATE_WIDTHS[optimizer]]
    wide, wide_state, before = numbers(held, dtype), [s.copy() for s in state], held.values.copy()
    streams = np.zeros(num_slots, np.uint64)
    set_streams(streams, order, keys, TABLE_ID, SEED)
    step(optimizer, wide, wide_state, slots, gradient, None)
    with use_threads(2):
        step(optimizer, held, state, slots, gradient, make_rounding(streams, applied))
    for one, other in zip(state, wide_state, strict=True):
        assert same_bits(one, other)
    for i, slot in enumerate(order):
        if slot not in slots:
            assert np.array_equal(held.values[slot], before[slot])
            continue
        noise = random_bits(TABLE_ID, SEED, int(keys[i]), applied, dim)
        expected = [rounded(value, int(bits), dtype) for value, bits in zip(wide[slot], noise, strict=True)]
        assert held.values[slot, :dim].tolist() == expected
        assert not held.values[slot, dim:].any()


def rounded_once(values: Any, dtype: str, applied: int = 1, *, rows: int = 1) -> Any:
    """Return the bits of numbers (D,) in each of ``rows`` rows after a step that subtracts their negative from 0."""
    dim = values.size
    held = narrow(np.zeros((rows, dim), F4), dtype)
    streams = np.zeros(rows, np.uint64)
    slots = np.arange(rows, dtype=np.int32)
    set_streams(streams, slots, np.arange(rows, dtype=np.int64), TABLE_ID, SEED)
    gradient = np.tile(-values, (rows, 1)).astype(F4)
    pairs = sort_slots(slots, rows, SortBuffers())
    how = pairs, one_id_gradients(gradient, np.zeros(1, np.int64)), UpdateBuffers()
    update_sgd(held, *how, learning_rate=1.0, rounding=make_rounding(streams, applied))
    return held.values[:, :dim]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=40),
    st.sampled_from(DTYPES),
    st.integers(1, 1000),
)
def test_a_number_becomes_one_of_its_two_neighbors(values: list[float], dtype: str, applied: int) -> None:
    """What the dtype has stays; infinity and NaN stay; beyond the largest number the neighbor is infinity."""
    given_numbers = np.array(values, F4)
    bits = rounded_once(given_numbers, dtype, applied)[0]
    found = from_bits(np.ascontiguousarray(bits), dtype)
    with np.errstate(all="ignore"):
        exact = from_bits(to_bits(given_numbers, dtype), dtype)
    for value, to, near in zip(given_numbers, found, exact, strict=True):
        if np.isnan(value):
            assert np.isnan(to)
        elif near == value:
            assert to == value
        else:
            low, high = neighbors(float(value), dtype)
            assert float(to) in {low, high}


def neighbors(value: float, dtype: str) -> tuple[float, float]:
    """Return the largest number of a dtype not above ``value``, and the smallest not below it."""
    lattice = from_bits(np.arange(1 << 16, dtype=np.uint16), dtype)
    lattice = np.sort(lattice[~np.isnan(lattice)])
    at = int(np.searchsorted(lattice, F4(value)))
    return float(lattice[at - 1]), float(lattice[at])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_many_roundings_is_the_number(dtype: str) -> None:
    """100,000 rows, one number each: the mean is off by less than five deviations of such a mean; seed and step fixed.

    Rounding to the nearest would be off by hundreds of them.
    """
    rows = 100_000
    for value in (1.0 + 2.0**-12, 0.3, -0.7123, 3e-6, -1.7e-7, 1234.567):
        found = from_bits(np.ascontiguousarray(rounded_once(np.array([value], F4), dtype, rows=rows)), dtype)
        low, high = neighbors(float(F4(value)), dtype)
        share = (float(F4(value)) - low) / (high - low)
        deviation = (high - low) * np.sqrt(share * (1 - share) / rows)
        assert 0 < abs(found.astype(np.float64).mean() - float(F4(value))) < 5 * deviation
        nearest = float(from_bits(to_bits(np.array([value], F4), dtype), dtype)[0])
        assert abs(nearest - float(F4(value))) > 50 * deviation


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_far_below_a_unit_in_the_last_place_add_up(dtype: str) -> None:
    """A thousand numbers of 1 take 64 steps of 2^-14: on the mean they go 2^-8 far; rounded to the nearest, nowhere."""
    dim, slots = 1000, np.zeros(1, np.int32)
    held, streams = narrow(np.ones((1, dim), F4), dtype), np.zeros(1, np.uint64)
    set_streams(streams, slots, np.array([5]), TABLE_ID, SEED)
    one_step = F4(2.0**-14)
    for applied in range(1, 65):
        pairs = sort_slots(slots, 1, SortBuffers())
        how = pairs, one_id_gradients(np.full((1, dim), one_step, F4), np.zeros(1, np.int64)), UpdateBuffers()
        update_sgd(held, *how, learning_rate=1.0, rounding=make_rounding(streams, applied))
    assert nearest(np.array([1 - one_step], F4), dtype)[0] == 1
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]  # below 1
    deviation = np.sqrt(64 * 2.0**-14 * unit / dim)
    assert abs(numbers(held, dtype).astype(np.float64).mean() - (1 - 2.0**-8)) < 5 * deviation


def test_another_seed_table_key_or_step_has_other_random_bits() -> None:
    """And none has those of initial rows."""
    bits = {
        tuple(random_bits(table, seed, key, step, 16).tolist())
        for table, seed, key, step in [
            (TABLE_ID, 7, 5, 1), (TABLE_ID + 1, 7, 5, 1), (TABLE_ID, 8, 5, 1), (TABLE_ID, 7, 6, 1), (TABLE_ID, 7, 5, 2),
        ]
    }  # fmt: skip
    assert len(bits) == 5


def test_vectors_that_do_not_fit_are_refused() -> None:
    """Each a sentence: rows of another width, and rows to round without a stream for each."""
    with pytest.raises(ValueError, match="stand 4 numbers apart, not 6"):
        expect_vectors(Vectors.of(np.zeros((3, 2), F4), 5, "bfloat16"))
    held, slots = narrow(np.zeros((3, 4), F4), "bfloat16"), np.arange(3, dtype=np.int32)
    with pytest.raises(ValueError, match="rounded by 0 streams"):
        step("sgd", held, [], slots, np.zeros((3, 4), F4), None)
