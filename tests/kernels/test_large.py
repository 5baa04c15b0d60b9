"""Arrays of more than 2^31 elements: without a GPU space is reserved, and only used pages take memory."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.cases import every_machine, machine, same_bits
from tests.kernels.shim.memory import repeated, reserved
from tests.kernels.test_update import rule_of
from tiercache.kernels.cpu.initial import CONSTANT, NORMAL, UNIFORM, ZEROS, initial_rows
from tiercache.kernels.cpu.pooling import MEAN, SUM
from tiercache.kernels.cuda import initial as cuda_initial
from tiercache.kernels.step import Gradients, Rule, Step, Vectors, make_rounding
from tiercache.rows.backends.optimizer_step import vectors_of
from tiercache.store.bits import to_bits

F4 = np.float32
DIM = 16
NUM_SLOTS = (1 << 31) // DIM + 100
LAST = np.array([NUM_SLOTS - 1, 0, NUM_SLOTS - 100, 5], np.int32)


def large(m: Any, rows: int = NUM_SLOTS, width: int = DIM) -> Any:
    return reserved(rows, width) if m.kind == "cpu" else m.device.large(rows, width)


def fill(m: Any, field: Any, slot: int, value: float) -> None:
    """Write a number to a row with our own kernel: CuPy would compile one, and lacks headers."""
    if m.kind == "cpu":
        field[slot] = value
    else:
        cuda_initial.fill_rows(m.device, value, field, m.place(np.array([slot], np.int32)))


@every_machine
@pytest.mark.parametrize("turn", [0, 1])
def test_rows_beyond_two_billion_elements_are_the_right_ones(kind: str, turn: int) -> None:
    with machine(kind, turn) as m:
        vectors, sums = large(m), large(m)
        held = Vectors(vectors, DIM)
        for i, slot in enumerate(LAST):
            fill(m, vectors, slot, i + 1.0)
        out, last = m.array((4, DIM), F4), m.place(LAST)
        m.gather(held, last, out)
        assert m.read(out)[:, 0].tolist() == [1, 2, 3, 4]
        pooled, slots = m.place(np.zeros((2, 2 * DIM), F4)), m.array((4,), np.int32)
        ids, cols = m.ids(np.arange(4, dtype=np.int32), np.int64), np.array([0, DIM])
        m.pool_one(held, last, ids, np.zeros(2, np.int64), cols, pooled, slots)
        assert m.read(pooled)[:, [0, DIM]].tolist() == [[1, 3], [2, 4]]
        gradients, pairs = m.one_id(np.ones((2, 2 * DIM), F4), cols), m.sort(slots, NUM_SLOTS)
        m.step(Step(held, [sums], pairs, gradients, rule_of("adagrad", DIM, rate=0.5)))
        assert [m.read(vectors[slot])[DIM - 1] for slot in LAST] == [0.5, 1.5, 2.5, 3.5]
        assert [m.read(sums[slot])[0] for slot in LAST] == [1, 1, 1, 1]
        data, pieces = m.array((4 * 2 * DIM,), F4), m.pieces(2 * DIM)
        pieces.add(0, np.array([4]), np.zeros(1, np.int64), data)
        m.pack((vectors, sums), last, m.place(np.arange(4, dtype=np.int32)), pieces)
        assert m.read(data)[: 4 * DIM : DIM].tolist() == [0.5, 1.5, 2.5, 3.5]
        m.unpack((vectors, sums), m.place(LAST[::-1]), pieces)
        assert [m.read(vectors[slot])[0] for slot in LAST] == [3.5, 2.5, 1.5, 0.5]
        assert not m.read(vectors[6:1000]).any()
        assert not m.read(vectors[-1000:-101]).any()


@every_machine
def test_rows_beyond_two_billion_numbers_of_16_bits_are_the_right_ones(kind: str) -> None:
    with machine(kind, 2) as m:
        words, streams = large(m, width=DIM // 2), large(m, width=2)
        streams = streams.view(np.uint64 if isinstance(streams, np.ndarray) else torch.uint64).reshape(-1)
        held, slots, out = vectors_of(words, DIM, "bfloat16"), m.place(LAST), m.array((4, DIM), F4)
        for i, slot in enumerate(LAST):
            fill(m, words, slot, float(np.array([int(F4(i + 1).view(np.uint32)) >> 16] * 2, np.uint16).view(F4)[0]))
        m.gather(held, slots, out)
        assert m.read(out)[:, 0].tolist() == [1, 2, 3, 4]
        gradients, pairs = m.one_id(np.ones((4, DIM), F4)), m.sort(slots, NUM_SLOTS)
        m.step(Step(held, (), pairs, gradients, Rule("sgd", 0.5), make_rounding(streams, 1)))
        m.gather(held, slots, out)
        assert m.read(out)[:, DIM - 1].tolist() == [0.5, 1.5, 2.5, 3.5]
        assert not m.read(words[6:1000]).any()
        assert not m.read(words[-1000:-101]).any()


@every_machine
def test_places_beyond_two_billion_elements_of_output_and_gradient_are_the_right_ones(kind: str) -> None:
    num_samples, width, dim = 33, (1 << 31) // 32, 4
    col, none, mode = width - 4, np.empty(0, F4), np.zeros(1, np.int8)
    with machine(kind) as m:
        out, held = large(m, num_samples, width), m.vectors(np.arange(8, dtype=F4).reshape(2, 4))
        ids, offsets = m.place(np.ones(1, np.int32)), m.place(np.array([0] * num_samples + [1]))
        slots, place, local = m.array((1,), np.int32), m.array((1,), np.int64), m.place(np.arange(2, dtype=np.int32))
        no_argmax = np.empty((0, 0), np.int32)
        m.pool_bags(
            held, local, ids, np.zeros(1, np.int64), offsets, none, mode, np.array([col]), out, slots, no_argmax,
            place, none,
        )  # fmt: skip
        assert m.read(place).tolist() == [(num_samples - 1) * width + col]
        assert m.read(out[-1, col:]).tolist() == [4, 5, 6, 7]
        gradients = Gradients(out.reshape(-1), num_samples, width, offsets=place)
        m.step(Step(held, (), m.sort(slots, 2), gradients, Rule("sgd", 1.0)))
        assert m.read(held.values).tolist() == [[0, 1, 2, 3], [0] * dim]


@every_machine
def test_a_piece_that_begins_behind_two_billion_floats_is_the_right_one(kind: str) -> None:
    """Places in pieces are counted in 64 bits, as are rows in moving order."""
    far = (1 << 31) + 12
    with machine(kind) as m:
        memory, pieces = large(m).reshape(-1), m.pieces(4)
        values, order = m.place(np.arange(12, dtype=F4).reshape(3, 4)), m.place(np.arange(3, dtype=np.int32))
        pieces.add(0, np.array([3]), np.array([far]), memory)
        m.pack((values,), m.place(np.array([2, 0, 1], np.int32)), order, pieces)
        assert m.read(memory[far : far + 12]).tolist() == [8, 9, 10, 11, *range(8)]
        assert not m.read(memory[far - 100 : far]).any()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind_of_row", [UNIFORM, NORMAL])
def test_initial_rows_beyond_two_billion_elements_are_the_right_ones(kind_of_row: int) -> None:
    dim = 1 << 20
    keys, wanted = np.arange((1 << 31) // dim + 1) - 7, np.empty((1, dim), F4)
    out = repeated(keys.size, dim)
    initial_rows(keys, 5, 6, kind_of_row, 0.25, 0.5, out)
    initial_rows(keys[-1:], 5, 6, kind_of_row, 0.25, 0.5, wanted)
    assert same_bits(out[-1:], wanted)


@pytest.mark.parametrize("kind_of_row", [UNIFORM, CONSTANT, ZEROS])
def test_initial_rows_go_to_slots_beyond_two_billion_elements_on_cuda(kind_of_row: int) -> None:
    """The first and the last slots are overwritten, and no other: float32, then 16 bits in as many bytes."""
    with machine("cuda", 1) as m:
        words, slots = large(m), m.place(LAST)
        keys, wanted = np.array([1 << 40, -1, 0, 7]), np.empty((4, 2 * DIM), F4)
        for slot in LAST:
            fill(m, words, slot, 9.0)
        assert [m.read(words[slot]).tolist() for slot in LAST] == [[9.0] * DIM] * 4
        initial_rows(keys, 5, 6, kind_of_row, -1.5, 2.5, wanted)
        there = m.place(keys)
        for out, right in (
            (vectors_of(words, DIM, "float32"), wanted[:, :DIM]),
            (vectors_of(words, 2 * DIM, "bfloat16"), to_bits(wanted, "bfloat16").view(F4)),
        ):
            m.initial_rows(there, 5, 6, kind_of_row, -1.5, 2.5, out, slots)
            assert [m.read(words[slot]).tobytes() for slot in LAST] == [row.tobytes() for row in right]
        assert not m.read(words[6:1000]).any()
        assert not m.read(words[-99:-1]).any()
        assert not m.read(words[-1000:-100]).any()


@every_machine
@pytest.mark.parametrize("mode", [SUM, MEAN])
def test_gradients_of_weights_beyond_two_billion_elements_are_the_right_ones(kind: str, mode: int) -> None:
    num_samples, width, col = 33, (1 << 31) // 32, (1 << 31) // 32 - DIM
    with machine(kind, 2) as m:
        vectors, gradient = large(m), large(m, num_samples, width)
        for i, slot in enumerate((NUM_SLOTS - 1, 0)):
            fill(m, vectors, slot, i + 2.0)
        blocks = gradient.reshape(-1, DIM)  # of which the last is the sample's
        fill(m, blocks, blocks.shape[0] - 1, 0.5)
        offsets, out = m.place(np.array([0] * num_samples + [2])), m.array((2,), F4)
        slots, modes = m.place(np.array([NUM_SLOTS - 1, 0], np.int32)), np.array([mode], np.int8)
        m.weight_gradient(Vectors(vectors, DIM), slots, offsets, modes, np.array([col]), gradient, out)
        assert m.read(out).tolist() == [DIM / (1 + mode), 1.5 * DIM / (1 + mode)]  # MEAN is 1, of two ids
