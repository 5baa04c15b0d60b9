"""Lookups: gather and pool, on every machine and from rows of every dtype."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import DIMS, DTYPES, Bags, bags, every_machine, machine, machines, same_bits, use_threads
from tests.kernels.machines import Cpu, Cuda, narrow, numbers
from tests.kernels.shim.device import ShimDevice
from tiercache.kernels.cpu.gathering import can_spread, check_ids, map_slots, pool_one, spread_one
from tiercache.kernels.cpu.pooling import MAX, MEAN, SUM
from tiercache.kernels.cpu.sorting import SortBuffers, sort_slots
from tiercache.kernels.cuda.pooling import Features, Ids, PoolPlan
from tiercache.kernels.step import Vectors
from tiercache.store.bits import from_bits

F4 = np.float32
ALL_DTYPES = st.sampled_from(("float32", *DTYPES))
TURNS = st.integers(0, 2)
ID_DTYPES = st.sampled_from((np.int32, np.int64))
MODES = np.zeros(1, np.int8)


def as_held(case: Bags, dtype: str) -> Bags:
    held = case.vectors if dtype == "float32" else numbers(narrow(case.vectors, dtype), dtype)
    return dataclasses.replace(case, vectors=held)


def written(m: Any, case: Bags, *, scaled: bool = True) -> dict[str, Any]:
    size = case.ids.size
    return {
        "out": m.place(np.zeros((case.num_samples, case.width), F4)),
        "slots": m.place(np.full(size, -7, np.int32)),
        "argmax": m.place(np.full((case.num_samples, case.width), -7, np.int32)),
        "entry_offset": m.place(np.full(size, -7, np.int64)),
        "entry_scale": m.place(np.full(size if scaled else 0, np.nan, F4)),
    }


def pool(
    m: Any, case: Bags, dtype: str = "float32", *, ids_dtype: type = np.int32, scaled: bool = True
) -> dict[str, Any]:
    done = written(m, case, scaled=scaled)
    m.pool_bags(
        m.vectors(case.vectors, dtype), m.place(case.slot_of_local), m.ids(case.ids, ids_dtype), case.bases,
        m.place(case.offsets), m.place(case.weights), case.modes, case.cols, *done.values(),
    )  # fmt: skip
    return done


@every_machine
@settings(max_examples=60)
@given(case=bags(one_id=True, modes=(SUM,)), dtype=ALL_DTYPES, turn=TURNS, ids_dtype=ID_DTYPES)
def test_one_id_per_sample_copies_its_row(kind: str, case: Bags, dtype: str, turn: int, ids_dtype: type) -> None:
    with machine(kind, turn) as m:
        held, wanted = m.vectors(case.vectors, dtype), as_held(case, dtype).pooled()
        done = written(m, case)
        ids, local = m.ids(case.ids, ids_dtype), m.place(case.slot_of_local)
        m.pool_one(held, local, ids, case.bases, case.cols, done["out"], done["slots"])
        assert same_bits(m.read(done["out"]), wanted)
        assert np.array_equal(m.read(done["slots"]), case.slots())
        if kind == "cpu":
            out = np.zeros_like(wanted)
            spread_one(held, m.sort(case.slots(), len(case.vectors)), case.cols, out)
            assert same_bits(out, wanted)


@every_machine
@given(case=bags(), dtype=ALL_DTYPES, turn=TURNS, ids_dtype=ID_DTYPES)
def test_bags_pool_like_the_obvious_loop(kind: str, case: Bags, dtype: str, turn: int, ids_dtype: type) -> None:
    """Bits agree, as sums are in the order of entries; entry_offset, entry_scale and argmax place the gradients."""
    with machine(kind, turn) as m:
        done = {name: m.read(array) for name, array in pool(m, case, dtype, ids_dtype=ids_dtype).items()}
    case = as_held(case, dtype)
    assert same_bits(done["out"], case.pooled())
    assert np.array_equal(done["slots"], case.slots())
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
            share = F4(last - first) if case.modes[f] == MEAN else F4(1)
            assert all(done["entry_scale"][e] == case.weight(e) / share for e in range(first, last))


def by_halves(products: np.ndarray) -> Any:
    """Sum float32 as kernels do: sixteen sums in order, added by halves."""
    sums = functools.reduce(np.add, np.pad(products, (0, -products.size % 16)).reshape(-1, 16))
    while sums.size > 1:
        sums = sums[: sums.size // 2] + sums[sums.size // 2 :]
    return sums[0]


@every_machine
@settings(max_examples=60)
@given(case=bags(modes=(SUM, MEAN)), dtype=ALL_DTYPES, turn=TURNS)
def test_the_gradient_of_a_weight_is_row_times_gradient(kind: str, case: Bags, dtype: str, turn: int) -> None:
    """D out / d weight of each entry, divided by the ids of the bag for a mean: bit for bit, for any dim."""
    gradient = np.random.default_rng(0).standard_normal((case.num_samples, case.width)).astype(F4)
    slots = case.slots()
    with machine(kind, turn) as m:
        out = m.place(np.full(case.ids.size, np.nan, F4))
        m.weight_gradient(
            m.vectors(case.vectors, dtype), m.place(slots), m.place(case.offsets), case.modes, case.cols,
            m.place(gradient), out,
        )  # fmt: skip
        found, case = m.read(out), as_held(case, dtype)
    for f, n, first, last in case.entries():
        grad = gradient[n, case.cols[f] : case.cols[f] + case.dim]
        for e in range(first, last):
            share = F4(last - first) if case.modes[f] == MEAN else F4(1)
            assert found[e] == by_halves(case.vectors[slots[e]] * grad) / share
            assert found[e] == pytest.approx(grad.astype(float) @ case.vectors[slots[e]] / share, rel=1e-4, abs=1e-4)


@every_machine
@pytest.mark.parametrize("dim", DIMS)
def test_gather_copies_rows(kind: str, dim: int) -> None:
    rng = np.random.default_rng(dim)
    values = rng.standard_normal((50, dim)).astype(F4)
    for dtype in ("float32", DTYPES[dim % 2]):
        case = values if dtype == "float32" else numbers(narrow(values, dtype), dtype)
        for size in (0, 1, 31, 3000 if kind == "cpu" else 300):
            slots = rng.integers(0, 50, size).astype(np.int32)
            wanted = case[slots]
            if kind == "cuda":
                slots[:1], wanted[:1] = -1, 0
            for m in machines(kind):
                out = m.array((size, dim), F4)
                m.gather(m.vectors(values, dtype), m.place(slots), out)
                assert same_bits(m.read(out), wanted)


@every_machine
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 4, 16, 37, 256])
def test_every_number_of_16_bits_is_read_exactly(kind: str, dtype: str, dim: int) -> None:
    """In whole accesses and in parts of them; also by a GPU that takes subnormal float32 numbers for zero."""
    bits = np.resize(np.arange(1 << 16, dtype=np.uint16), (-(-(1 << 16) // dim), dim))
    padded = np.zeros((bits.shape[0], dim + dim % 2), np.uint16)
    padded[:, :dim] = bits
    expected = from_bits(bits, dtype)
    nan = np.isnan(expected)
    flushing = [Cuda(ShimDevice("random", flush=True))] if (kind, dim) == ("cuda", 4) else []
    with machine(kind, 2) as first:
        for m in (first, *flushing):
            out, held = m.array(bits.shape, F4), Vectors.of(padded.view(F4), dim, dtype)
            m.gather(held._replace(values=m.place(held.values)), m.place(np.arange(len(bits), dtype=np.int32)), out)
            found = m.read(out)
            assert np.array_equal(np.isnan(found), nan)
            assert same_bits(found[~nan], expected[~nan])


def test_groups_of_all_dims_and_dtypes_pool_in_a_launch_for_each_width_on_cuda() -> None:
    """One id per sample and bags, each into its own columns, as the CPU pools each; 16-bit dtypes share a launch."""
    rng, cpu = np.random.default_rng(0), Cpu()
    with machine("cuda", 2) as m:
        groups, col, wanted = [], 0, np.zeros((70, 110), F4)
        for dim, dtype, bagged in (
            (4, "float32", True), (5, "float32", False), (64, "float32", True), (16, "bfloat16", False),
            (21, "float16", True),
        ):  # fmt: skip
            offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, 70) if bagged else np.ones(70, np.int64))])
            size, values = int(offsets[-1]), rng.standard_normal((9, dim)).astype(F4)
            ids, local = rng.integers(0, 9, size).astype(np.int32), np.arange(9, dtype=np.int32)[::-1].copy()
            of_all = np.zeros(1, np.int64), np.array([col]), np.zeros(1, np.int8)
            slots, places, none = np.empty(size, np.int32), np.empty(size, np.int64), np.empty(0, F4)
            cpu.pool_bags(
                cpu.vectors(values, dtype), local, ids, of_all[0], offsets, none, of_all[2], of_all[1], wanted, slots,
                np.empty((0, 0), np.int32), places, none,
            )  # fmt: skip
            there = Ids(m.place(ids), m.place(slots))
            if bagged:
                there = there._replace(offsets=m.place(offsets), entry_offset=m.place(places))
            groups.append((Features(m.vectors(values, dtype), m.place(local), *of_all), there))
            col += dim
        out = m.place(np.zeros((70, 110), F4))
        m.device.launches.clear()
        m.pool(groups, out)
        assert m.device.launches == ["pooling.pool", "pooling.pool_narrow"]
        assert same_bits(m.read(out), wanted)


def test_a_table_of_one_number_leaves_four_elements_an_access_to_the_others_on_cuda() -> None:
    """Rows are read so wherever their columns are; the output decides sample by sample."""

    class Noting(ShimDevice):
        def put(self, table: Any) -> Any:
            self.noted = table
            return super().put(table)

    device, one = Noting(), np.zeros(1, np.int64)
    m = Cuda(device)
    features = [
        Features(m.vectors(np.ones((3, dim), F4)), m.place(np.arange(3, dtype=np.int32)), one, np.array([col]), MODES)
        for dim, col in ((1, 0), (16, 1), (16, 17))
    ]
    PoolPlan(device, features, 33)
    assert device.noted["vec"].tolist() == [1, 4, 4]
    assert device.noted["team"].tolist() == [1, 4, 4]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("bad", "where"), [(-1, 1), (10, 3), (2**31 - 1, 2), (-(2**31), 0), (2**32 + 1, 2)])
def test_an_id_outside_its_table_reads_as_zeros_on_cuda(bad: int, where: int, dtype: type) -> None:
    """A lookup skips that row; an id beyond 32 bits is bad even if its low half alone would be good."""
    if dtype == np.int32 and bad >= 2**31 + 1:
        return
    ids = np.array([0, 6, 6, 0, 3], dtype)
    ids[where] = bad
    right = np.repeat([0, 7], [4, 1]) + ids
    right[[where, 4]] = -1  # the second feature's table has the last three of ten positions
    for m in machines("cuda"):
        slots, local = m.array((5,), np.int32), m.place(np.arange(10, dtype=np.int32))
        m.map_slots(m.place(ids), np.array([0, 7]), np.array([0, 4, 5]), local, slots)
        assert m.read(slots).tolist() == right.tolist()
        out = m.array((5, 1), F4)
        m.gather(m.vectors(np.arange(1, 11, dtype=F4).reshape(10, 1)), slots, out)
        assert m.read(out)[:, 0].tolist() == (right + 1).tolist()


def test_a_large_output_is_the_same_past_the_caches() -> None:
    """Outputs above 4 MiB are streamed for whole lines, and written normally otherwise: the same values."""
    rng = np.random.default_rng(0)
    num_samples, features = 8200, 5
    for dim, distance in ((64, 0), (32, 16), (48, 3), (130, 0)):
        vectors = rng.standard_normal((400, dim)).astype(F4)
        ids = rng.integers(0, 400, features * num_samples).astype(np.int32)
        cols = np.arange(features, dtype=np.int64) * (dim + distance)
        room = np.zeros(num_samples * features * (dim + distance) + 16, F4)
        for shift in (0, 1):
            start = (-room.ctypes.data % 64) // 4 + shift
            out = room[start : start + room.size - 16].reshape(num_samples, -1)
            out[:] = 0
            slots = np.empty(ids.size, np.int32)
            slot_of_local = rng.permutation(400).astype(np.int32)
            pool_one(Vectors(vectors, dim), slot_of_local, ids, np.zeros(features, np.int64), cols, out, slots)
            for f in range(features):
                mine = slot_of_local[ids[f * num_samples : (f + 1) * num_samples]]
                assert np.array_equal(out[:, cols[f] : cols[f] + dim], vectors[mine])
            wanted = out.copy()
            out[:] = 0
            spread_one(Vectors(vectors, dim), sort_slots(slots, 400, SortBuffers()), cols, out)
            assert same_bits(out, wanted)
            assert can_spread(out, cols, dim) == (shift == 0 and dim % 16 == 0 and distance % 16 == 0)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_slots_are_mapped_by_several_threads(num_threads: int) -> None:
    """The same if threads share the entries in the middle of a feature; nothing before the first feature is touched."""
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
    """check_ids returns the first bad entry: negative, at the limit of its own feature's table, and far beyond."""
    ids = np.array([0, 6, 6, 0, 2], np.int32)
    starts, limits = np.array([0, 4, 5]), np.array([7, 3])
    assert check_ids(ids, starts, limits) == -1
    ids[where] = bad
    ids[4] = 3
    assert check_ids(ids, starts, limits) == where
    assert check_ids(np.array([6, 6], np.int32), np.array([0, 1, 2]), limits) == 1, "it fits the other table"
    assert check_ids(np.array([0], np.int32), np.array([0, 1]), np.array([0])) == 0
    assert check_ids(np.empty(0, np.int32), np.array([0, 0]), np.array([0])) == -1


@every_machine
def test_arrays_of_another_type_or_shape_are_refused(kind: str) -> None:
    m: Any = Cpu() if kind == "cpu" else Cuda(ShimDevice())
    vectors, slots, out = np.zeros((5, 4), F4), np.zeros(3, np.int32), np.zeros((3, 4), F4)
    odd, read_only = np.zeros(81, np.uint8)[1:].view(F4).reshape(5, 4), out.copy()
    read_only.flags.writeable = False
    for values, at, into, said in (
        (vectors.astype(np.float64), slots, out, "float64"),
        (np.asfortranarray(vectors), slots, out, "C-contiguous"),
        (odd, slots, out, "not aligned"),
        (vectors, slots.astype(np.int64), out, "int64"),
        (vectors, slots, out[:2], "3 rows of 4"),
        (vectors, slots, read_only, "read-only"),
    ):
        with pytest.raises(ValueError, match=said):
            m.gather(Vectors(values, 4), at, into)
    with pytest.raises(ValueError, match="of dim 5 are 6 numbers apart, expected 5"):
        m.gather(Vectors(np.zeros((2, 6), F4), 5), slots, np.zeros((3, 5), F4))
    with pytest.raises(ValueError, match="of dim 5 are 4 numbers apart, expected 6"):
        m.gather(Vectors.of(np.zeros((3, 2), F4), 5, "bfloat16"), slots, np.zeros((3, 5), F4))
    given_one: dict[str, Any] = {
        "vectors": Vectors(vectors, 4), "local": np.zeros(5, np.int32), "ids": slots, "bases": np.zeros(1, np.int64),
        "cols": np.zeros(1, np.int64), "out": out, "slots": slots.copy(),
    }  # fmt: skip
    for changed, said in (
        ({"cols": np.array([1])}, "cols must be in"),
        ({"ids": slots[:2]}, "2 ids"),
        ({"bases": np.array([0, 0]), "cols": np.array([0, 0])}, "one id for each of 3 samples and 2"),
    ):
        with pytest.raises(ValueError, match=said):
            m.pool_one(*{**given_one, **changed}.values())
    if kind == "cuda":
        with pytest.raises(ValueError, match="begins outside the 5 local positions"):
            m.pool_one(*{**given_one, "bases": np.array([6])}.values())
        with pytest.raises(ValueError, match="of type list: pass an array on the CUDA device"):
            m.gather(Vectors(vectors, 4), [0, 0, 0], out)
        assert m.device.launches == []
        return
    pairs = sort_slots(np.array([0, 0, 5], np.int32), 6, SortBuffers())
    for some, col, samples, said in (
        (pairs, 0, 2, "3 entries do not make"),
        (pairs, 0, 3, "slot 5: there are 5"),
        (pairs[:2], 1, 2, "cols must be in"),
    ):
        with pytest.raises(ValueError, match=said):
            spread_one(Vectors(vectors, 4), some, np.array([col]), np.zeros((samples, 4), F4))
    none = np.empty(0, F4)
    case = Bags(1, 4, [5], np.array([SUM], np.int8), np.array([0, 2]), slots, none, np.zeros(5, np.int32), vectors, 0)
    with pytest.raises(ValueError, match="from 0 to 3"):
        pool(m, case)
    case.offsets, case.modes = np.array([0, 3]), np.array([MEAN], np.int8)
    with pytest.raises(ValueError, match="entry_scale"):
        pool(m, case, scaled=False)
    case.num_samples, case.offsets = 2, np.array([0, 5, 3])
    with pytest.raises(ValueError, match="must not decrease"):
        pool(m, case)
