"""Launches of the CUDA update: with several groups, several lookups, and more parts than fit into one."""

import weakref
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.cases import Bags, machine, machines, same_bits
from tests.kernels.machines import Cuda
from tests.kernels.shim.device import ShimDevice
from tests.kernels.test_pooling import pool
from tests.kernels.test_update import F4, gradients_of_entries, rule_of, states, stepped
from tiercache.kernels.cpu.pooling import MAX, MEAN, SUM
from tiercache.kernels.cuda.launch import most_parts, struct, view
from tiercache.kernels.cuda.sorting import LookupPositions, SortPlan
from tiercache.kernels.step import NO_ROUNDING, Rule, Step, make_rounding


def test_groups_of_different_dims_and_widths_step_in_a_launch_each_on_cuda() -> None:
    """Rows with fewer than 16 elements, or that are not read four elements at a time, use other kernels."""
    rng, steps, wanted = np.random.default_rng(0), [], []
    with machine("cuda", 2) as m:
        for dim, size, dtype, optimizer in (
            (4, 500, "float32", "adagrad"), (7, 0, "float32", "adagrad"), (65, 900, "float32", "adagrad"),
            (7, 300, "bfloat16", "adagrad"), (64, 300, "float16", "adagrad"), (8, 300, "float16", "sgd"),
        ):  # fmt: skip
            slots, gradient = rng.integers(0, 20, size).astype(np.int32), rng.standard_normal((size, dim)).astype(F4)
            fields = [rng.standard_normal((20, dim)).astype(F4), *states(optimizer, 20, dim, rng)]
            noise = make_rounding(m.place(rng.integers(0, 1 << 63, 20).astype(np.uint64)), 4)
            noise = NO_ROUNDING if dtype == "float32" else noise
            described = m.one_id(gradient)
            wanted.append(stepped(m, optimizer, fields, slots, described, dtype=dtype, rounding=noise))
            pairs, placed = m.sort(m.place(slots), 20), [m.place(field) for field in fields[1:]]
            steps.append(Step(m.vectors(fields[0], dtype), placed, pairs, described, rule_of(optimizer, dim), noise))
        m.device.launches.clear()
        m.step(*steps)
        assert m.device.launches == [
            "update.sum_stretches_any", "update.sum_stretches", "update.update_adagrad_any",
            "update.update_adagrad_narrow_any", "update.update_adagrad_narrow", "update.update_sgd_narrow_any",
        ]  # fmt: skip
        for step, right in zip(steps, wanted, strict=True):
            found = [m.read(array) for array in (step.vectors.values, *step.states)]
            assert all(one.tobytes() == other.tobytes() for one, other in zip(found, right, strict=True))


@pytest.mark.parametrize(("optimizer", "kernel"), [("sgd", "sgd"), ("rowwise", "rowwise_adagrad")])
def test_gradients_between_multiples_of_16_bytes_take_the_quick_kernels_on_cuda(optimizer: str, kernel: str) -> None:
    """A column from another table with a single number misaligns most samples; the bits equal the CPU's."""
    rng, dim, samples = np.random.default_rng(1), 16, 90
    slots, wide = rng.integers(0, 9, samples).astype(np.int32), rng.standard_normal((samples, dim + 1)).astype(F4)
    fields = [rng.standard_normal((9, dim)).astype(F4), *states(optimizer, 9, dim, rng)]
    with machine("cpu") as m:
        wanted = stepped(m, optimizer, fields, slots, m.one_id(wide, np.array([1], np.int64)))
    for m in machines("cuda"):
        m.device.launches.clear()
        found = stepped(m, optimizer, fields, slots, m.one_id(wide, np.array([1], np.int64)))
        assert m.device.launches[-2:] == ["update.sum_stretches", f"update.update_{kernel}"]
        assert all(same_bits(one, other) for one, other in zip(found, wanted, strict=True))


def test_what_a_launch_reads_lives_until_then_on_cuda() -> None:
    """A device keeps few tables by itself: the table of a step's gradients must not be freed before it runs."""

    class Forgetful(ShimDevice):
        def __init__(self) -> None:
            super().__init__()
            self.made: list[weakref.ref[Any]] = []

        def put(self, table: NDArray[Any]) -> NDArray[Any]:
            there = super().put(table)
            self.made.append(weakref.ref(there))
            return there

        def launch(self, kernel: str, blocks: int, arguments: Any) -> None:
            if kernel.startswith("update."):
                assert [table() is not None for table in self.made] == [True], kernel
            super().launch(kernel, blocks, arguments)

    m, steps = Cuda(Forgetful()), []
    for _ in range(2):
        pairs = m.sort(m.place(np.arange(3, dtype=np.int32)), 3)
        steps.append(Step(m.vectors(np.ones((3, 4), F4)), (), pairs, m.one_id(np.ones((3, 4), F4)), Rule("sgd", 1.0)))
    m.step(*steps)
    assert m.device.launches[-2:] == ["update.sum_stretches_any", "update.update_sgd_any"]
    assert all(not step.vectors.values.any() for step in steps)


@pytest.mark.parametrize("dim", [1, 8, 16, 20, 128])
@pytest.mark.parametrize("mode", [SUM, MEAN, MAX])
def test_lookups_one_after_another_step_as_one_on_cuda(dim: int, mode: int) -> None:
    """Gradients are where each lookup left them; the bits are those of one array of each entry's gradient, in order."""
    rng, num_slots = np.random.default_rng(dim), 40
    bags = Bags(
        num_samples=60, dim=dim, table_rows=[num_slots], modes=np.array([mode], np.int8),
        offsets=np.arange(0, 181, 3), ids=(rng.random(180) ** 3 * num_slots).astype(np.int32),
        weights=np.zeros(0, F4), slot_of_local=rng.permutation(num_slots).astype(np.int32),
        vectors=rng.standard_normal((num_slots, dim)).astype(F4), distance=4,
    )  # fmt: skip
    for m in machines("cuda"):
        done = pool(m, bags)
        wide = rng.standard_normal((50, 3 * dim + 4)).astype(F4)
        alone, pooled = (rng.standard_normal((n, width)).astype(F4) for n, width in ((7, dim), (60, bags.width)))
        cols = np.array([0, dim + 4], np.int64)
        slots = [(rng.random(n) ** 4 * num_slots).astype(np.int32) for n in (100, 7)]
        entries = gradients_of_entries(pooled, {name: m.read(array) for name, array in done.items()}, dim)
        rows = [*(wide[:, col : col + dim] for col in cols.tolist()), entries, alone]
        order = np.concatenate([slots[0], m.read(done["slots"]), slots[1]])
        described = [m.one_id(wide, cols), m.of_bags(pooled, done, np.zeros(1, np.int64)), m.one_id(alone)]
        if mode != MAX:
            described[1] = described[1]._replace(argmax=np.empty(0, np.int32))
        fields = [bags.vectors, *states("adam", num_slots, dim, rng)]
        wanted = stepped(m, "adam", fields, order, m.one_id(np.ascontiguousarray(np.concatenate(rows))))
        found = stepped(m, "adam", fields, order, described)
        assert all(same_bits(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dim", [3, 64])
def test_ids_in_the_order_of_their_positions_step_the_same_rows_on_cuda(dim: int) -> None:
    rng, size, limits = np.random.default_rng(dim), 700, np.array([30, 9, 200], np.int64)
    starts, bases = np.array([0, 300, 300 + 50, size], np.int64), np.array([200, 230, 0], np.int64)
    feature = np.repeat(np.arange(3), np.diff(starts))
    ids = (rng.random(size) ** 3 * limits[feature]).astype(np.int32)
    slot_of = rng.permutation(300)[:239].astype(np.int32)
    slots, gradient = slot_of[ids + bases[feature]], rng.standard_normal((size, dim)).astype(F4)
    fields = [rng.standard_normal((300, dim)).astype(F4), *states("adagrad", 300, dim, rng)]
    for m in machines("cuda"):
        wanted = stepped(m, "adagrad", fields, slots, m.one_id(gradient))
        cut = [(40, starts[:3], bases[:2], limits[:2]), (40 + 4 * 350, starts[2:] - 350, bases[2:], limits[2:])]
        few = LookupPositions(4, np.array([0, 9]), bases[:1], limits[:1])
        plan = SortPlan.of([[few], [LookupPositions(*one) for one in cut]])
        for _ in range(2):  # a plan serves any block
            block = m.place(np.concatenate([ids[:1], ids[:9], ids]))
            memory = m.place(np.zeros(plan.num_bytes // 8, np.int64))
            at = [view(m.device, "", array, array.dtype.type).address for array in (block, memory)]
            first, runs = plan.launch(m.device, at[0], memory, at[1])
            assert first.address == at[1]
        assert np.array_equal(m.pairs(runs) >> np.uint64(32), np.sort(ids + bases[feature]))
        vectors, placed = m.vectors(fields[0]), [m.place(field) for field in fields[1:]]
        runs = runs._replace(slot_of=m.place(slot_of))
        m.step(Step(vectors, placed, runs, m.one_id(gradient), rule_of("adagrad", dim)))
        found = [m.read(vectors.values), *(m.read(state) for state in placed)]
        assert all(same_bits(one, other) for one, other in zip(found, wanted, strict=True))


def test_more_groups_than_travel_with_a_launch_step_in_several_on_cuda() -> None:
    m = Cuda(ShimDevice())
    steps = []
    for number in range(2 * most_parts(struct("UpdatePart", "update")) + 1):
        gradients = m.one_id(np.full((2, 16), number, F4))
        pairs = m.sort(m.place(np.array([1, 1], np.int32)), 3)
        steps.append(Step(m.vectors(np.zeros((3, 16), F4)), (), pairs, gradients, Rule("sgd", 1.0)))
    m.step(*steps)
    assert m.device.launches.count("update.update_sgd") == 3
    for number, step in enumerate(steps):
        assert step.vectors.values[:, 0].tolist() == [0, -2 * number, 0]
