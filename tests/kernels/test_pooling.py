"""Lookups: gather and pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.kernels.cases import DIMS, Bags, bags, same_bits, use_threads
from tiercache.kernels.cpu.pooling import (
    MAX,
    MEAN,
    SUM,
    can_spread,
    check_ids,
    gather,
    map_slots,
    pool_bags,
    pool_one,
    spread_one,
    weight_gradient,
)
from tiercache.kernels.cpu.sorting import SortBuffers, sort_slots

NONE = np.empty(0, np.float32)


def pool(case: Bags, *, scaled: bool = True) -> dict[str, Any]:
    """Call ``pool_bags`` on a case."""
    done: dict[str, Any] = {
        "out": np.zeros((case.num_samples, case.width), np.float32),
        "slots": np.full(case.ids.size, -7, np.int32),
        "argmax": np.full((case.num_samples, case.width), -7, np.int32),
        "entry_offset": np.full(case.ids.size, -7, np.int64),
        "entry_scale": np.full(case.ids.size if scaled else 0, np.nan, np.float32),
    }
    pool_bags(
        case.vectors, case.slot_of_local, case.ids, case.bases, case.entry_starts, case.offsets, case.weights,
        case.modes, case.cols, *done.values(),
    )  # fmt: skip
    return done


@settings(max_examples=60, deadline=None)
@given(bags(one_id=True, modes=(SUM,)))
def test_one_id_per_sample_copies_its_row(case: Bags) -> None:
    """pool_one writes each id's row to its columns, and its slot, and nothing else."""
    out = np.zeros((case.num_samples, case.width), np.float32)
    slots = np.empty(case.ids.size, np.int32)
    pool_one(case.vectors, case.slot_of_local, case.ids, case.bases, case.cols, case.num_samples, out, slots)
    assert same_bits(out, case.pooled())
    assert np.array_equal(slots, case.slots())


@settings(max_examples=60, deadline=None)
@given(bags(one_id=True, modes=(SUM,)))
def test_rows_in_the_order_of_memory_fill_the_same_output(case: Bags) -> None:
    """spread_one writes what pool_one writes, and nothing else."""
    out = np.zeros((case.num_samples, case.width), np.float32)
    pairs = sort_slots(case.slots(), len(case.vectors), SortBuffers())
    spread_one(case.vectors, pairs, case.cols, case.num_samples, out)
    assert same_bits(out, case.pooled())


@settings(max_examples=80, deadline=None)
@given(bags())
def test_bags_pool_like_the_obvious_loop_bit_for_bit(case: Bags) -> None:
    """Sum, mean and max, weights, empty bags: the sums go over the entries in order, so bits agree."""
    done = pool(case)
    assert same_bits(done["out"], case.pooled())
    assert np.array_equal(done["slots"], case.slots())


@settings(max_examples=40, deadline=None)
@given(bags())
def test_bags_describe_their_entries_for_the_step(case: Bags) -> None:
    """entry_offset, entry_scale and argmax say where gradients come from."""
    done = pool(case)
    for f, n, first, last in case.entries():
        place = n * case.width + case.cols[f]
        assert (done["entry_offset"][first:last] == (~place if case.modes[f] == MAX else place)).all()
        if case.modes[f] == MAX:
            piece = done["argmax"][n, case.cols[f] : case.cols[f] + case.dim]
            if first == last:
                assert (piece == -1).all()
            else:
                assert np.array_equal(piece, first + np.argmax(case.vectors[case.slots()[first:last]], axis=0))
        else:
            share = np.float32(last - first) if case.modes[f] == MEAN else np.float32(1)
            assert all(done["entry_scale"][e] == case.weight(e) / share for e in range(first, last))


@settings(max_examples=20, deadline=None)
@given(bags())
def test_lookups_do_not_depend_on_the_number_of_threads(case: Bags) -> None:
    """One thread or two: the same bits."""
    both = []
    for count in (1, 2):
        with use_threads(count):
            both.append(pool(case))
    assert all(np.array_equal(both[0][name], both[1][name], equal_nan=True) for name in both[0])


@settings(max_examples=40, deadline=None)
@given(bags(modes=(SUM, MEAN)))
def test_the_gradient_of_a_weight_is_row_times_gradient(case: Bags) -> None:
    """D out / d weight of each entry, divided by the ids of the bag for a mean."""
    rng = np.random.default_rng(0)
    gradient = rng.standard_normal((case.num_samples, case.width)).astype(np.float32)
    out, slots = np.full(case.ids.size, np.nan, np.float32), case.slots()
    weight_gradient(case.vectors, slots, case.entry_starts, case.offsets, case.modes, case.cols, gradient, out)
    for f, n, first, last in case.entries():
        grad = gradient[n, case.cols[f] : case.cols[f] + case.dim].astype(np.float64)
        for e in range(first, last):
            wanted = grad @ case.vectors[slots[e]] / (last - first if case.modes[f] == MEAN else 1)
            assert out[e] == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def test_a_large_output_is_the_same_past_the_caches() -> None:
    """Outputs above 4 MiB are streamed where lines are whole, and ordinary where they are not: the same values."""
    rng = np.random.default_rng(0)
    num_samples, features = 8200, 5
    for dim, gap in ((64, 0), (32, 16), (48, 3), (130, 0)):
        vectors = rng.standard_normal((400, dim)).astype(np.float32)
        ids = rng.integers(0, 400, features * num_samples).astype(np.int32)
        cols = np.arange(features, dtype=np.int64) * (dim + gap)
        room = np.zeros(num_samples * features * (dim + gap) + 16, np.float32)
        for shift in (0, 1):
            start = (-room.ctypes.data % 64) // 4 + shift
            out = room[start : start + room.size - 16].reshape(num_samples, -1)
            out[:] = 0
            slots = np.empty(ids.size, np.int32)
            slot_of_local = rng.permutation(400).astype(np.int32)
            pool_one(vectors, slot_of_local, ids, np.zeros(features, np.int64), cols, num_samples, out, slots)
            for f in range(features):
                mine = slot_of_local[ids[f * num_samples : (f + 1) * num_samples]]
                assert np.array_equal(out[:, cols[f] : cols[f] + dim], vectors[mine])
            wanted = out.copy()
            out[:] = 0
            spread_one(vectors, sort_slots(slots, 400, SortBuffers()), cols, num_samples, out)
            assert same_bits(out, wanted)
            assert can_spread(out, cols, dim) == (shift == 0 and dim % 16 == 0 and gap % 16 == 0)


@pytest.mark.parametrize("dim", DIMS)
def test_gather_copies_rows(dim: int) -> None:
    """Unpooled: one row for each entry, in order; none at all works too."""
    rng = np.random.default_rng(dim)
    vectors = rng.standard_normal((50, dim)).astype(np.float32)
    for size in (0, 1, 3000):
        slots = rng.integers(0, 50, size).astype(np.int32)
        out = np.empty((size, dim), np.float32)
        gather(vectors, slots, out)
        assert np.array_equal(out, vectors[slots])


def test_map_slots_follows_each_features_table() -> None:
    """Each feature's ids count from its table's first position."""
    slots = np.empty(4, np.int32)
    map_slots(
        np.array([0, 1, 0, 2], np.int32), np.array([0, 2], np.int64), np.array([0, 2, 4]),
        np.array([9, 8, 7, 6, 5], np.int32), slots,
    )  # fmt: skip
    assert slots.tolist() == [9, 8, 7, 5]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_slots_are_mapped_by_several_threads(num_threads: int) -> None:
    """The same where threads share the entries in the middle of a feature; none before the first feature is touched."""
    rng = np.random.default_rng(num_threads)
    starts = np.array([3, 20_000, 20_000, 51_000, 90_001])
    bases, slot_of_local = np.array([0, 7, 30, 1000]), rng.permutation(2000).astype(np.int32)
    ids = rng.integers(0, 1000, 90_001).astype(np.int32)
    slots = np.full(ids.size, -5, np.int32)
    with use_threads(num_threads):
        map_slots(ids, bases, starts, slot_of_local, slots)
    assert (slots[:3] == -5).all()
    assert np.array_equal(slots[3:], slot_of_local[ids[3:] + np.repeat(bases, np.diff(starts))])


@pytest.mark.parametrize(("bad", "where"), [(-1, 1), (7, 3), (2**31 - 1, 2), (-(2**31), 0)])
def test_an_id_outside_its_table_is_found(bad: int, where: int) -> None:
    """check_ids names the first bad entry: negative, at the limit, and far beyond."""
    ids = np.array([0, 6, 6, 0, 2], np.int32)
    starts, limits = np.array([0, 4, 5]), np.array([7, 3])
    assert check_ids(ids, starts, limits) == -1
    ids[where] = bad
    ids[4] = 3
    assert check_ids(ids, starts, limits) == where


def test_check_ids_takes_the_limit_of_each_feature() -> None:
    """An id that fits another feature's table is bad in its own; an empty table has no good id."""
    assert check_ids(np.array([6, 6], np.int32), np.array([0, 1, 2]), np.array([7, 3])) == 1
    assert check_ids(np.array([0], np.int32), np.array([0, 1]), np.array([0])) == 0
    assert check_ids(np.empty(0, np.int32), np.array([0, 0]), np.array([0])) == -1


def test_arrays_of_another_type_or_shape_are_refused() -> None:
    """A wrong dtype, order, length or column is a sentence, never memory of someone else."""
    vectors, slots = np.zeros((5, 4), np.float32), np.zeros(3, np.int32)
    with pytest.raises(ValueError, match="float64"):
        gather(vectors.astype(np.float64), slots, np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match="C-contiguous"):
        gather(np.asfortranarray(vectors), slots, np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match="3 rows of 4"):
        gather(vectors, slots, np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match="not aligned"):
        gather(np.zeros(81, np.uint8)[1:].view(np.float32).reshape(5, 4), slots, np.zeros((3, 4), np.float32))
    read_only = np.zeros((3, 4), np.float32)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        gather(vectors, slots, read_only)
    with pytest.raises(ValueError, match="cols must lie in"):
        pool_one(
            vectors, np.zeros(5, np.int32), slots, np.zeros(1, np.int64), np.array([1]), 3,
            np.zeros((3, 4), np.float32), slots.copy(),
        )  # fmt: skip
    case = Bags(1, 4, [5], np.array([SUM], np.int8), np.array([0, 3]), slots, NONE, np.zeros(5, np.int32), vectors, 0)
    pairs = sort_slots(np.array([0, 0, 5], np.int32), 6, SortBuffers())
    with pytest.raises(ValueError, match="3 entries do not make"):
        spread_one(vectors, pairs, np.zeros(1, np.int64), 2, np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match="slot 5: there are 5"):
        spread_one(vectors, pairs, np.zeros(1, np.int64), 3, np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match="cols must lie in"):
        spread_one(vectors, pairs[:2], np.ones(1, np.int64), 2, np.zeros((2, 4), np.float32))
    case.offsets = np.array([0, 2])
    with pytest.raises(ValueError, match="from 0 to 3"):
        pool(case)
    case.offsets, case.modes = np.array([0, 3]), np.array([MEAN], np.int8)
    with pytest.raises(ValueError, match="entry_scale"):
        pool(case, scaled=False)
    case.num_samples, case.offsets = 2, np.array([0, 5, 3])
    with pytest.raises(ValueError, match="must not decrease"):
        pool(case)
