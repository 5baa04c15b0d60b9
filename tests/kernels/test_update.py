"""The optimizer step of a batch's rows."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import DIMS, Bags, bags, same_bits, use_threads
from tiercache.kernels.cpu.pooling import MAX, pool_bags
from tiercache.kernels.cpu.sorting import SortBuffers, sort_slots
from tiercache.kernels.cpu.update import (
    Gradients,
    UpdateBuffers,
    bag_gradients,
    one_id_gradients,
    sum_rows,
    update_adagrad,
    update_adam,
    update_rowwise_adagrad,
    update_sgd,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

F4 = np.float32
OPTIMIZERS = ("sgd", "adagrad", "rowwise", "adam")
STEP, RATE = 3, 0.1


def states(optimizer: str, num_slots: int, dim: int, rng: np.random.Generator) -> list[NDArray[np.float32]]:
    """Return positive states for an optimizer."""
    widths = {"sgd": [], "adagrad": [dim], "rowwise": [1], "adam": [dim, dim]}[optimizer]
    return [rng.random((num_slots, width)).astype(F4) for width in widths]


def update(
    optimizer: str,
    vectors: NDArray[np.float32],
    state: list[NDArray[np.float32]],
    slots: NDArray[np.int32],
    gradients: Gradients,
    decay: float = 0.0,
) -> list[NDArray[np.float32]]:
    """Sort, step copies of the fields, and return them."""
    fields: Any = [vectors.copy(), *(s.copy() for s in state)]
    pairs = sort_slots(slots, vectors.shape[0], SortBuffers())
    buffers = UpdateBuffers()
    call: Any = {
        "sgd": update_sgd,
        "adagrad": update_adagrad,
        "rowwise": update_rowwise_adagrad,
        "adam": functools.partial(update_adam, step=STEP),
    }[optimizer]
    call(*fields, pairs, gradients, buffers, learning_rate=RATE, decay=decay)
    return list(fields)


def oracle(
    optimizer: str,
    fields: list[NDArray[np.float32]],
    rows: NDArray[np.integer[Any]],
    g: NDArray[np.float64],
    decay: float,
) -> list[NDArray[np.float64]]:
    """Step `rows` by their gradients `g` in float64, by the optimizers' definitions."""
    vectors, *state = (field.astype(np.float64) for field in fields)
    g = g + decay * vectors[rows]
    if optimizer == "sgd":
        vectors[rows] -= RATE * g
    elif optimizer == "adagrad":
        state[0][rows] += g * g
        vectors[rows] -= RATE * g / (np.sqrt(state[0][rows]) + 1e-10)
    elif optimizer == "rowwise":
        state[0][rows] += (g * g).mean(axis=1, keepdims=True)
        vectors[rows] -= RATE * g / (np.sqrt(state[0][rows]) + 1e-8)
    else:
        state[0][rows] += (g - state[0][rows]) * 0.1
        state[1][rows] += (g * g - state[1][rows]) * 0.001
        rate = RATE * math.sqrt(1 - 0.999**STEP) / (1 - 0.9**STEP)
        vectors[rows] -= rate * state[0][rows] / (np.sqrt(state[1][rows]) + 1e-8)
    return [vectors, *state]


@settings(max_examples=120, deadline=None)
@given(
    case=bags(),
    optimizer=st.sampled_from(OPTIMIZERS),
    decay=st.sampled_from((0.0, 0.01)),
    num_threads=st.sampled_from((1, 2)),
)
def test_a_step_of_bags_is_the_sum_of_all_gradients_then_one_update(
    case: Bags, optimizer: str, decay: float, num_threads: int
) -> None:
    """Every optimizer, any dim, sum, mean and max mixed, weights, empty bags, with and without decay."""
    rng = np.random.default_rng(0)
    gradient = rng.standard_normal((case.num_samples, case.width)).astype(F4)
    size = case.ids.size
    slots, offset, scale = np.empty(size, np.int32), np.empty(size, np.int64), np.empty(size, F4)
    out, argmax = np.zeros_like(gradient), np.zeros(gradient.shape, np.int32)
    with use_threads(num_threads):
        pool_bags(
            case.vectors, case.slot_of_local, case.ids, case.bases, case.entry_starts, case.offsets, case.weights,
            case.modes, case.cols, out, slots, argmax, offset, scale,
        )  # fmt: skip
        state = states(optimizer, case.vectors.shape[0], case.dim, rng)
        gradients = bag_gradients(gradient, offset, scale, argmax if (case.modes == MAX).any() else None)
        done = update(optimizer, case.vectors, state, slots, gradients, decay)
    rows = np.unique(slots)
    wanted = oracle(optimizer, [case.vectors, *state], rows, case.row_gradients(gradient)[rows], decay)
    for field, right in zip(done, wanted, strict=True):
        np.testing.assert_allclose(field, right, rtol=1e-3, atol=1e-4)
    untouched = np.setdiff1d(np.arange(case.vectors.shape[0]), rows)
    for field, before in zip(done, [case.vectors, *state], strict=True):
        assert same_bits(field[untouched], before[untouched])


def sums_in_order(slots: NDArray[np.int32], rows: NDArray[np.float32], num_slots: int) -> NDArray[np.float32]:
    """Sum each slot's rows in float32 in batch order; more than 8192 in stretches of 4096."""
    out = np.zeros((num_slots, rows.shape[1]), F4)
    for slot in np.unique(slots):
        mine = rows[slots == slot]
        stretches = [mine] if len(mine) <= 8192 else [mine[i : i + 4096] for i in range(0, len(mine), 4096)]
        for stretch in stretches:
            part = np.zeros(rows.shape[1], F4)
            for row in stretch:
                part = part + row
            out[slot] = out[slot] + part
    return out


@pytest.mark.parametrize("dim", [1, 3, 16, 17, 32, 40, 50, 64, 96, 130])
def test_the_order_of_the_sum_is_defined_to_the_last_bit(dim: int) -> None:
    """A row's gradients are added in batch order; above 8192 entries by stretches of 4096."""
    rng = np.random.default_rng(dim)
    num_samples, features = 9000, 2
    slots = rng.choice(40, num_samples * features, p=[0.5, 0.3, 0.12, *[0.08 / 37] * 37]).astype(np.int32)
    gradient = (rng.standard_normal((num_samples, features * dim)) * 10 ** rng.uniform(-3, 3)).astype(F4)
    cols = np.arange(features) * dim
    done = update("sgd", np.zeros((40, dim), F4), [], slots, one_id_gradients(gradient, cols))
    rows = np.concatenate([gradient[:, c : c + dim] for c in cols])
    assert same_bits(done[0], F4(0) - F4(RATE) * sums_in_order(slots, rows, 40))


@settings(max_examples=40, deadline=None)
@given(
    optimizer=st.sampled_from(OPTIMIZERS),
    dim=st.sampled_from(DIMS),
    decay=st.sampled_from((0.0, 0.01)),
    seed=st.integers(0, 2**32),
    size=st.sampled_from((1, 50, 3000, 20_000)),
    hot=st.booleans(),
)
def test_bits_depend_on_neither_threads_nor_slots(
    optimizer: str, dim: int, decay: float, seed: int, size: int, *, hot: bool
) -> None:
    """The same batch on one thread and on two, and with rows in other slots: the same rows, bit for bit."""
    rng = np.random.default_rng(seed)
    num_slots = 1 if hot else 300
    slots = (rng.random(size) ** 3 * num_slots).astype(np.int32)
    vectors = rng.standard_normal((num_slots, dim)).astype(F4)
    state = states(optimizer, num_slots, dim, rng)
    gradients = one_id_gradients(rng.standard_normal((size, dim)).astype(F4), np.zeros(1, np.int64))
    with use_threads(1):
        alone = update(optimizer, vectors, state, slots, gradients, decay)
    moved = rng.permutation(num_slots).astype(np.int32)
    back = np.argsort(moved)
    with use_threads(2):
        together = update(optimizer, vectors, state, slots, gradients, decay)
        elsewhere = update(optimizer, vectors[back], [s[back] for s in state], moved[slots], gradients, decay)
    for a, b, c in zip(alone, together, elsewhere, strict=True):
        assert same_bits(a, b)
        assert same_bits(a, np.ascontiguousarray(c[moved]))


@pytest.mark.parametrize("dim", [1, 17, 64, 130])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_sums_are_the_steps_of_rows_of_zeros(dim: int, num_threads: int) -> None:
    """To the last bit, hot rows too, whatever stood there; rows without an entry stay as they are."""
    rng = np.random.default_rng(dim)
    slots = np.minimum(rng.integers(0, 300, 30_000), 200).astype(np.int32)  # slot 200 has a third of all
    slots[slots == 7] = 8
    gradients = one_id_gradients(rng.standard_normal((slots.size, dim), dtype=F4), np.zeros(1, np.int64))
    pairs, out = sort_slots(slots, 300, SortBuffers()), np.full((300, dim), np.nan, F4)
    stepped = np.zeros_like(out)
    with use_threads(num_threads):
        update_sgd(stepped, pairs, gradients, UpdateBuffers(), learning_rate=-0.25)
        sum_rows(out, pairs, gradients, UpdateBuffers(), scale=0.25)
    named = np.unique(slots)
    assert same_bits(out[named], stepped[named])
    assert np.isnan(np.delete(out, named, axis=0)).all()
    assert np.isnan(out[7]).all()


def test_no_entries_change_nothing() -> None:
    """An empty batch is a step without rows."""
    vectors = np.ones((3, 4), F4)
    none = one_id_gradients(np.empty((0, 4), F4), np.zeros(1, np.int64))
    assert same_bits(update("sgd", vectors, [], np.empty(0, np.int32), none)[0], vectors)


def test_adams_first_step_moves_by_the_learning_rate() -> None:
    """Bias correction counts applied steps from 1; 0 is refused."""
    vectors, first, second = np.zeros((1, 4), F4), np.zeros((1, 4), F4), np.zeros((1, 4), F4)
    gradients = one_id_gradients(np.array([[1, -2, 3, -4]], F4), np.zeros(1, np.int64))
    pairs = sort_slots(np.zeros(1, np.int32), 1, SortBuffers())
    with pytest.raises(ValueError, match="step is 0"):
        update_adam(vectors, first, second, pairs, gradients, UpdateBuffers(), step=0, learning_rate=RATE)
    update_adam(vectors, first, second, pairs, gradients, UpdateBuffers(), step=1, learning_rate=RATE)
    np.testing.assert_allclose(vectors[0], [-RATE, RATE, -RATE, RATE], rtol=1e-5)


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    """States of another shape, gradients of other entries, slots without rows, columns outside: each a sentence."""
    vectors, slots = np.zeros((5, 4), F4), np.array([0, 4, 2], np.int32)
    gradient, cols = np.zeros((3, 4), F4), np.zeros(1, np.int64)
    good = one_id_gradients(gradient, cols)
    with pytest.raises(ValueError, match="first state has shape"):
        update("adagrad", vectors, [np.zeros((5, 1), F4)], slots, good)
    with pytest.raises(ValueError, match="3 entries were sorted"):
        update("sgd", vectors, [], slots, one_id_gradients(gradient[:2], cols))
    with pytest.raises(ValueError, match="describe 2 entries"):
        update("sgd", vectors, [], slots, bag_gradients(gradient, np.zeros(2, np.int64)))
    with pytest.raises(ValueError, match="cols must lie in"):
        update("sgd", vectors, [], slots, one_id_gradients(gradient, np.ones(1, np.int64)))
    pairs = sort_slots(slots, 5, SortBuffers())
    with pytest.raises(ValueError, match="slot 4 was sorted"):
        update_sgd(vectors[:4].copy(), pairs, good, UpdateBuffers(), learning_rate=1.0)
    with pytest.raises(ValueError, match="entry_scale has 2"):
        bag_gradients(gradient, np.zeros(3, np.int64), np.ones(2, F4))
    with pytest.raises(ValueError, match="argmax has shape"):
        bag_gradients(gradient, np.zeros(3, np.int64), np.ones(3, F4), np.zeros((2, 4), np.int32))
