"""Steps of 16-bit rows by the CUDA sources, run on the CPU: the numba kernels' bits, whatever the slot."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.kernels import one_group
from tests.kernels.cases import DIMS, Bags, bags, same_bits
from tests.kernels.shim.device import ORDERS, ShimDevice, device_for, devices
from tests.kernels.stochastic import random_bits, rounded
from tests.kernels.test_cuda_vectors import AWKWARD, bits_on, place
from tests.kernels.test_large import DIM, LAST, NUM_SLOTS
from tests.kernels.test_pooling import pool
from tests.kernels.test_update import OPTIMIZERS, states
from tests.kernels.test_vectors import DTYPES, F4, SEED, TABLE_ID, narrow, numbers
from tiercache.kernels.cpu import rounding, sorting, update
from tiercache.kernels.cpu.optimizers import ADAGRAD, SGD, make_rule
from tiercache.kernels.cpu.pooling import MAX
from tiercache.kernels.cuda import gathering as cuda_gathering
from tiercache.kernels.cuda import rounding as cuda_rounding
from tiercache.kernels.cuda import update as cuda_update
from tiercache.kernels.cuda.vectors import Vectors
from tiercache.store.vectors import from_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray

RATE, ADAM_STEP = 0.3, 3


def step(
    device: Any, optimizer: str, held: Any, state: list[Any], slots: Any, described: Any, noise: Any, decay: float = 0.0
) -> None:
    """Step rows in place, on the CPU where ``device`` is None."""
    module, first = (update, []) if device is None else (one_group, [device])
    num_slots = len(held.values if device is None else held.words)
    buffers = update.UpdateBuffers() if device is None else None
    if device is None:
        pairs = sorting.sort_slots(slots, num_slots, sorting.SortBuffers())
    else:
        pairs = one_group.sort_slots(device, device.place(slots), num_slots)
    call: Any = {
        "sgd": module.update_sgd,
        "adagrad": module.update_adagrad,
        "rowwise": module.update_rowwise_adagrad,
        "adam": functools.partial(module.update_adam, step=ADAM_STEP),
    }[optimizer]
    call(*first, held, *state, pairs, described, buffers, learning_rate=RATE, decay=decay, rounding=noise)


def streams_of(keys: NDArray[np.int64], slots: NDArray[np.int32], num_slots: int) -> NDArray[np.uint64]:
    """Return the streams of rows in their slots."""
    streams = np.zeros(num_slots, np.uint64)
    rounding.set_streams(streams, slots, keys, TABLE_ID, SEED)
    return streams


@settings(max_examples=80, deadline=None)
@given(
    case=bags(),
    optimizer=st.sampled_from(OPTIMIZERS),
    dtype=st.sampled_from(DTYPES),
    decay=st.sampled_from((0.0, 0.01)),
    scale=st.sampled_from([1.0, 1e-6, 3e4]),
    applied=st.integers(1, 2**40),
    order=st.sampled_from(ORDERS),
)
def test_a_step_of_bags_has_the_cpus_bits(
    case: Bags, optimizer: str, dtype: str, decay: float, scale: float, applied: int, order: str
) -> None:
    """Every optimizer, dim and mode; numbers below float16's smallest and above its largest; rows of no entry stay.

    As long as no row has more entries than a stretch: how the others are summed, the updates of float32 are tested for.
    """
    rng, done, num_slots = np.random.default_rng(0), pool(case), case.vectors.shape[0]
    assume(np.bincount(done["slots"]).max(initial=0) <= cuda_update.STRETCH)
    gradient = (rng.standard_normal((case.num_samples, case.width)) * scale).astype(F4)
    held, state = narrow((case.vectors * scale).astype(F4), dtype), states(optimizer, num_slots, case.dim, rng)
    keys = rng.integers(-(2**62), 2**62, num_slots)
    streams = streams_of(keys, np.arange(num_slots, dtype=np.int32), num_slots)
    argmax = done["argmax"] if (case.modes == MAX).any() else None
    described = update.bag_gradients(gradient, done["entry_offset"], done["entry_scale"], argmax)
    device = device_for(order)
    there, states_there = place(device, held, dtype), [device.place(one) for one in state]
    described_there = cuda_update.bag_gradients(
        device, device.place(gradient), device.place(done["entry_offset"]), device.place(done["entry_scale"]),
        None if argmax is None else device.place(argmax),
    )  # fmt: skip
    noise = cuda_rounding.make_rounding(device, device.place(streams), applied)
    step(device, optimizer, there, states_there, done["slots"], described_there, noise, decay)
    step(None, optimizer, held, state, done["slots"], described, rounding.make_rounding(streams, applied), decay)
    assert same_but_nan(bits_on(device, there), held.values, dtype)
    for one, other in zip(states_there, state, strict=True):
        assert same_but_nan(device.read(one), other)
    device.close()


def same_but_nan(found: NDArray[Any], wanted: NDArray[Any], dtype: str = "float32") -> bool:
    """Tell whether all but NaN, whose sign is the processor's, have the same bits."""
    numbers_found, numbers_wanted = (
        bits if dtype == "float32" else from_bits(np.ascontiguousarray(bits), dtype) for bits in (found, wanted)
    )
    nan = np.isnan(numbers_wanted)
    return bool(np.array_equal(np.isnan(numbers_found), nan)) and found[~nan].tobytes() == wanted[~nan].tobytes()


@pytest.mark.parametrize("dim", [1, 8, 130, 132])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_hot_rows_are_the_float32_step_rounded_by_key_whatever_the_slot(dim: int, optimizer: str) -> None:
    """Runs around each multiple of a stretch: as these kernels step float32, rounded as the definition says."""
    rng, cols, applied = np.random.default_rng(dim), np.zeros(1, np.int64), 2**33 + 5
    dtype = DTYPES[dim // 8 % 2]
    counts = [1, 255, 256, 257, 513, 3, 1025]
    entries = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    gradient = rng.standard_normal((entries.size, dim)).astype(F4)
    held = narrow(rng.standard_normal((len(counts), dim)).astype(F4), dtype)
    state, keys = states(optimizer, len(counts), dim, rng), rng.integers(-(2**62), 2**62, len(counts))
    for turn, device in enumerate(devices()):
        order = np.random.default_rng(turn).permutation(len(counts)).astype(np.int32)  # the slot of each key
        slots, there = order[entries].astype(np.int32), np.empty_like(held.values)
        there[order] = held.values
        moved = [np.empty_like(one) for one in state]
        for one, other in zip(moved, state, strict=True):
            one[order] = other
        placed, states_there = Vectors(device.place(there.view(F4)), dim, dtype), [device.place(one) for one in moved]
        described = cuda_update.one_id_gradients(device, device.place(gradient), cols)
        streams = device.place(np.zeros(len(counts), np.uint64))
        cuda_rounding.set_streams(device, streams, device.place(order), device.place(keys), TABLE_ID, SEED)
        noise = cuda_rounding.make_rounding(device, streams, applied)
        step(device, optimizer, placed, states_there, slots, described, noise)
        if turn == 0:
            wide = numbers(held, dtype)[np.argsort(order)]
            wanted = step_of_float32(device, optimizer, [wide, *moved], slots, described)
            by_key, states_by_key = wanted[0][order], [one[order] for one in wanted[1:]]
            expected = [
                [
                    rounded(value, int(noise_of), dtype)
                    for value, noise_of in zip(row, random_bits(TABLE_ID, SEED, int(key), applied, dim), strict=True)
                ]
                for row, key in zip(by_key, keys, strict=True)
            ]
        assert bits_on(device, placed)[order][:, :dim].tolist() == expected
        assert not bits_on(device, placed)[:, dim:].any()
        for one, other in zip(states_there, states_by_key, strict=True):
            assert same_bits(device.read(one)[order], other)


def step_of_float32(device: Any, optimizer: str, fields: list[Any], slots: Any, described: Any) -> list[Any]:
    """Return copies of float32 fields after the step."""
    placed = [device.place(field) for field in fields]
    step(device, optimizer, Vectors(placed[0], fields[0].shape[1], "float32"), placed[1:], slots, described,
         cuda_rounding.NO_ROUNDING)  # fmt: skip
    return [device.read(field) for field in placed]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 65])
def test_any_float32_is_rounded_as_on_the_cpu(dtype: str, dim: int) -> None:
    """Ends, ties and subnormals of the dtypes, 8,000 bit patterns, infinities; NaN stays NaN."""
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 8000, dtype=np.uint64).astype(np.uint32)
    drawn[:4000] = drawn[:4000] % 0x18000000 + 0x30000000  # where float16 has its numbers
    values = np.concatenate([np.repeat(np.array(AWKWARD, np.uint32), 40), drawn, [0x7F800001, 0xFFC12345]])
    values = np.resize(values.astype(np.uint32), (-(-values.size // dim), dim)).view(F4)
    slots = np.arange(len(values), dtype=np.int32)
    held, streams = narrow(np.zeros_like(values), dtype), streams_of(slots.astype(np.int64), slots, len(values))
    cols, device = np.zeros(1, np.int64), device_for("random")
    there, by_one = place(device, held, dtype), {"learning_rate": 1.0}
    pairs = one_group.sort_slots(device, device.place(slots), len(values))
    one_group.update_sgd(
        device, there, pairs, cuda_update.one_id_gradients(device, device.place(-values), cols),
        None, **by_one,
        rounding=cuda_rounding.make_rounding(device, device.place(streams), 9),
    )  # fmt: skip
    update.update_sgd(
        held, sorting.sort_slots(slots, len(values), sorting.SortBuffers()), update.one_id_gradients(-values, cols),
        update.UpdateBuffers(), **by_one, rounding=rounding.make_rounding(streams, 9),
    )  # fmt: skip
    assert np.isnan(values).sum() > 5
    assert same_but_nan(bits_on(device, there)[:, :dim], held.values[:, :dim], dtype)
    device.close()


@pytest.mark.parametrize("dim", DIMS)
def test_streams_are_those_of_the_cpu(dim: int) -> None:
    """In the slots that were named, of which -1 is passed over; without slots side by side."""
    rng = np.random.default_rng(dim)
    keys, slots = rng.integers(-(2**63), 2**63 - 1, 3 * dim), rng.permutation(3 * dim + 4)[: 3 * dim].astype(np.int32)
    wanted = np.zeros(3 * dim + 4, np.uint64)
    rounding.set_streams(wanted, named := slots[1:].copy(), keys[1:].copy(), TABLE_ID, SEED)
    slots[0] = -1
    device = device_for(ORDERS[dim % 3])
    streams = device.place(np.zeros(3 * dim + 4, np.uint64))
    cuda_rounding.set_streams(device, streams, device.place(slots), device.place(keys), TABLE_ID, SEED)
    assert np.array_equal(device.read(streams), wanted)
    rounding.set_streams(beside := np.zeros(3 * dim, np.uint64), None, keys, TABLE_ID, SEED)
    cuda_rounding.set_streams(device, streams[: 3 * dim], None, device.place(keys), TABLE_ID, SEED)
    assert np.array_equal(device.read(streams)[: 3 * dim], beside)
    assert np.array_equal(beside[1:], wanted[named])
    device.close()


def test_groups_of_two_widths_step_in_a_launch_each() -> None:
    """And one for long runs; each group as if it stepped alone."""
    rng, device, cols = np.random.default_rng(0), device_for("random"), np.zeros(1, np.int64)
    steps, wanted = [], []
    for dim, dtype, kind in ((4, "float32", ADAGRAD), (7, "bfloat16", ADAGRAD), (64, "float16", ADAGRAD),
                             (8, "float16", SGD)):  # fmt: skip
        slots, gradient = rng.integers(0, 20, 300).astype(np.int32), rng.standard_normal((300, dim)).astype(F4)
        values, state = rng.standard_normal((20, dim)).astype(F4), rng.random((20, dim), F4)
        optimizer, fields = ("adagrad", [state]) if kind == ADAGRAD else ("sgd", [])
        described = cuda_update.one_id_gradients(device, device.place(gradient), cols)
        streams = device.place(rng.integers(0, 1 << 63, 20).astype(np.uint64))
        noise = cuda_rounding.make_rounding(device, streams, 4)
        wide = dtype == "float32"

        def there(values: Any = values, dtype: str = dtype) -> Vectors:
            return Vectors(device.place(values), values.shape[1], dtype) if dtype == "float32" else place(
                device, narrow(values, dtype), dtype
            )  # fmt: skip

        alone, of_alone = there(), [device.place(field) for field in fields]
        step(device, optimizer, alone, of_alone, slots, described, noise)
        wanted.append([device.read(array) for array in (alone.words, *of_alone)])
        rule = make_rule(kind, RATE, 1e-10, 0.0)
        pairs = one_group.sort_slots(device, device.place(slots), 20)
        first = device.place(state) if fields else None
        rounds = cuda_rounding.NO_ROUNDING if wide else noise
        steps.append(cuda_update.Step(there(), first, None, pairs, described, rule, rounds))
    device.launches.clear()
    cuda_update.update_many(device, steps)
    assert device.launches == [
        "update.sum_stretches", "update.update_sgd_narrow", "update.update_adagrad", "update.update_adagrad_narrow",
    ]  # fmt: skip
    for one, right in zip(steps, wanted, strict=True):
        assert device.read(one.vectors.words).tobytes() == right[0].tobytes()
        assert one.first is None or same_bits(device.read(one.first), right[1])
    device.close()


def test_rows_beyond_two_billion_numbers_are_the_right_ones() -> None:
    """Lookup and step of the first and the last rows of a table of 2^31 numbers of 16 bits and more."""
    words = (device := device_for("random")).large(NUM_SLOTS, DIM // 2)
    streams = device.large(NUM_SLOTS, 2).view(np.uint64).reshape(-1)
    held = Vectors(words, DIM, "bfloat16")
    for i, slot in enumerate(LAST):
        words.view(np.uint16)[slot] = int(F4(i + 1).view(np.uint32)) >> 16
    out, slots = device.array((4, DIM), F4), device.place(LAST)
    cuda_gathering.gather(device, held, slots, out)
    assert device.read(out)[:, 0].tolist() == [1, 2, 3, 4]
    pairs = one_group.sort_slots(device, slots, NUM_SLOTS)
    described = cuda_update.one_id_gradients(device, device.place(np.ones((4, DIM), F4)), np.zeros(1, np.int64))
    noise, buffers = cuda_rounding.make_rounding(device, streams, 1), None
    one_group.update_sgd(device, held, pairs, described, buffers, learning_rate=0.5, rounding=noise)
    cuda_gathering.gather(device, held, slots, out)
    assert device.read(out)[:, DIM - 1].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert not device.read(words[6:1000]).any()
    assert not device.read(words[-1000:-101]).any()


def test_rows_of_16_bits_need_a_stream_each() -> None:
    """A sentence, and nothing is launched; streams need a slot for each key."""
    device, slots, cols = ShimDevice(), np.arange(3, dtype=np.int32), np.zeros(1, np.int64)
    held = place(device, narrow(np.zeros((3, 4), F4), "bfloat16"), "bfloat16")
    described = cuda_update.one_id_gradients(device, np.zeros((3, 4), F4), cols)
    with pytest.raises(ValueError, match="3 rows of a 16-bit dtype are rounded by 0 streams"):
        step(device, "sgd", held, [], slots, described, cuda_rounding.NO_ROUNDING)
    with pytest.raises(ValueError, match="2 keys have 3 slots"):
        cuda_rounding.set_streams(device, np.zeros(3, np.uint64), slots, np.zeros(2, np.int64), 0, 0)
    with pytest.raises(ValueError, match="2 keys have 3 slots"):
        cuda_rounding.set_streams(device, np.zeros(3, np.uint64), None, np.zeros(2, np.int64), 0, 0)
    assert not any(kernel.startswith(("update.", "rounding.")) for kernel in device.launches)
