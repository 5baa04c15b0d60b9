"""The optimizer step of a batch's rows, on every machine and of rows of every dtype."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kernels.cases import DIMS, DTYPES, Bags, bags, every_machine, machine, machines, same_bits
from tests.kernels.machines import Cpu, Cuda
from tests.kernels.shim.device import ShimDevice
from tests.kernels.test_pooling import pool
from tiercache.kernels.cpu.pooling import MAX, MEAN, SUM
from tiercache.kernels.cuda.sorting import STRETCH
from tiercache.kernels.step import NO_ROUNDING, Gradients, Rule, Step, Vectors, make_rounding
from tiercache.rows.backends import optimizer_step
from tiercache.store.bits import from_bits
from tiercache.store.optimizer import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad, RowWiseAdam, RowWiseRMSprop

F4 = np.float32
BY_DECAY: dict[str, Callable[[float], Optimizer]] = {
    "sgd": lambda decay: SGD(decay=decay),
    "momentum": lambda decay: SGD(momentum=0.9, decay=decay),
    "nesterov": lambda decay: SGD(momentum=0.75, nesterov=True, decay=decay),
    "adagrad": lambda decay: Adagrad(decay=decay),
    "rowwise": lambda decay: RowWiseAdagrad(decay=decay),
    "adam": lambda decay: Adam(decay=decay),
    "adamw": lambda decay: Adam(decay=decay, decoupled=True),
    "rowwise_adam": lambda decay: RowWiseAdam(decay=decay),
    "rowwise_rmsprop": lambda decay: RowWiseRMSprop(alpha=0.9, decay=decay),
    "rowwise_adamw": lambda decay: RowWiseAdam(decay=decay, decoupled=True),
}
OPTIMIZERS = tuple(BY_DECAY)
APPLIED, RATE = 3, 0.1


def rule_of(optimizer: str, dim: int, decay: float = 0.0, rate: float = RATE) -> Rule:
    return optimizer_step.rule_of(BY_DECAY[optimizer](decay), dim, rate, APPLIED)


def states(optimizer: str, num_slots: int, dim: int, rng: np.random.Generator) -> list[NDArray[np.float32]]:
    return [rng.random((num_slots, one.width)).astype(F4) for one in BY_DECAY[optimizer](0.0).state_fields(dim)]


def stepped(
    m: Any, optimizer: str, fields: list[NDArray[np.float32]], slots: NDArray[np.int32], gradients: Gradients,
    decay: float = 0.0, *, dtype: str = "float32", rounding: Any = NO_ROUNDING,
) -> list[NDArray[Any]]:  # fmt: skip
    """Sort, step copies of the fields on a machine, and return them: 16-bit vectors as their bits."""
    vectors, placed = m.vectors(fields[0], dtype), [m.place(field) for field in fields[1:]]
    pairs = m.sort(m.place(slots), len(fields[0]))
    m.step(Step(vectors, placed, pairs, gradients, rule_of(optimizer, vectors.dim, decay), rounding))
    return [m.read(vectors.values), *(m.read(state) for state in placed)]


def oracle(
    optimizer: str, fields: list[NDArray[np.float32]], rows: NDArray[np.integer[Any]], g: NDArray[np.float64],
    decay: float,
) -> list[NDArray[np.float64]]:  # fmt: skip
    """Step `rows` by their gradients `g` in float64, by the optimizers' definitions."""
    vectors, *state = (field.astype(np.float64) for field in fields)
    if optimizer.endswith("w"):
        vectors[rows] *= 1 - RATE * decay
    else:
        g = g + decay * vectors[rows]
    squares = (g * g).mean(axis=1, keepdims=True) if optimizer.startswith("rowwise") else g * g
    match optimizer:
        case "sgd":
            vectors[rows] -= RATE * g
        case "momentum":
            state[0][rows] = 0.9 * state[0][rows] + g
            vectors[rows] -= RATE * state[0][rows]
        case "nesterov":
            state[0][rows] = 0.75 * state[0][rows] + g
            vectors[rows] -= RATE * (g + 0.75 * state[0][rows])
        case "adagrad" | "rowwise":
            state[0][rows] += squares
            vectors[rows] -= RATE * g / (np.sqrt(state[0][rows]) + (1e-10 if optimizer == "adagrad" else 1e-8))
        case "rowwise_rmsprop":
            state[0][rows] = 0.9 * state[0][rows] + 0.1 * squares
            vectors[rows] -= RATE * g / (np.sqrt(state[0][rows]) + 1e-8)
        case _:
            state[0][rows] += (g - state[0][rows]) * 0.1
            state[1][rows] += (squares - state[1][rows]) * 0.001
            rate = RATE * math.sqrt(1 - 0.999**APPLIED) / (1 - 0.9**APPLIED)
            vectors[rows] -= rate * state[0][rows] / (np.sqrt(state[1][rows]) + 1e-8)
    return [vectors, *state]


def hot_bags(modes: tuple[int, ...], *, weighted: bool) -> Bags:
    """Return 300 bags of two ids for each feature, nearly all of one row of two."""
    rng, num_entries = np.random.default_rng(1), 600 * len(modes)
    return Bags(
        num_samples=300, dim=5, table_rows=[2] * len(modes), modes=np.array(modes, np.int8),
        offsets=np.arange(0, num_entries + 1, 2), ids=(rng.random(num_entries) < 0.1).astype(np.int32),
        weights=rng.random(num_entries, F4) if weighted else np.zeros(0, F4),
        slot_of_local=rng.permutation(2 * len(modes)).astype(np.int32),
        vectors=rng.standard_normal((2 * len(modes), 5)).astype(F4), distance=1,
    )  # fmt: skip


@every_machine
@settings(max_examples=120)
@example(case=hot_bags((MEAN, MAX, SUM), weighted=False), optimizer="adam", decay=0.01, turn=2)
@example(case=hot_bags((SUM, MEAN), weighted=True), optimizer="rowwise", decay=0.0, turn=1)
@given(case=bags(), optimizer=st.sampled_from(OPTIMIZERS), decay=st.sampled_from((0.0, 0.01)), turn=st.integers(0, 2))
def test_a_step_sums_all_gradients_and_updates_once(
    kind: str, case: Bags, optimizer: str, decay: float, turn: int
) -> None:
    """It has the bits of a step of one entry per row that has the defined sum; the sum matches the definition."""
    rng, cpu = np.random.default_rng(0), Cpu()
    gradient = rng.standard_normal((case.num_samples, case.width)).astype(F4)
    fields = [case.vectors, *states(optimizer, case.vectors.shape[0], case.dim, rng)]
    with machine(kind, turn) as m:
        done = pool(m, case)
        described = m.of_bags(gradient, done)
        if not (case.modes == MAX).any():
            described = described._replace(argmax=np.empty(0, np.int32))
            if kind == "cuda" and turn:  # as torch.cat hands it out
                described = described._replace(flat=m.slice_of(gradient, turn))
        slots, found = m.read(done["slots"]), stepped(m, optimizer, fields, m.read(done["slots"]), described, decay)
        entries = gradients_of_entries(gradient, {name: m.read(array) for name, array in done.items()}, case.dim)
    rows = np.unique(slots)
    wanted = oracle(optimizer, fields, rows, case.row_gradients(gradient)[rows], decay)
    for field, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(field, right, rtol=1e-3, atol=1e-4)
    sums = sums_by_stretches(kind, slots, entries, len(case.vectors))[rows]
    defined = stepped(cpu, optimizer, fields, rows.astype(np.int32), cpu.one_id(sums), decay)
    assert all(same_bits(field, right) for field, right in zip(found, defined, strict=True))
    untouched = np.setdiff1d(np.arange(case.vectors.shape[0]), rows)
    for field, before in zip(found, fields, strict=True):
        assert same_bits(field[untouched], before[untouched])


def gradients_of_entries(gradient: NDArray[np.float32], done: dict[str, Any], dim: int) -> NDArray[np.float32]:
    """Compute the gradient of each entry of bags, (E, dim): scaled, or for a maximum only the winning elements."""
    offsets, flat = done["entry_offset"], gradient.reshape(-1)
    out = np.zeros((offsets.size, dim), F4)
    for entry, offset in enumerate(offsets.tolist()):
        begin = offset if offset >= 0 else ~offset
        out[entry] = flat[begin : begin + dim]
        if offset < 0:
            out[entry][done["argmax"].reshape(-1)[begin : begin + dim] != entry] = 0
        else:
            out[entry] *= done["entry_scale"][entry]
    return out


def sums_by_stretches(
    kind: str, slots: NDArray[np.int32], rows: NDArray[np.float32], num_slots: int
) -> NDArray[np.float32]:
    """Sum each slot's rows in float32 in batch order: above 8192 in stretches of 4096, on a device above 64 of 64."""
    stretch, most = (4096, 8192) if kind == "cpu" else (STRETCH, STRETCH)
    out = np.zeros((num_slots, rows.shape[1]), F4)
    for slot in np.unique(slots):
        mine = rows[slots == slot]
        length = len(mine) if len(mine) <= most else stretch
        parts = [functools.reduce(np.add, mine[i : i + length]) for i in range(0, len(mine), length)]
        out[slot] = functools.reduce(np.add, parts)
    return out


COUNTS = {"cpu": [9000, 8192, 8193, 1, 4097, 12_289, 300], "cuda": [1, 63, 64, 65, 127, 128, 129, 3, 577, 77, 300]}


@every_machine
@pytest.mark.parametrize("dim", [1, 3, 16, 17, 40, 49, 64, 96, 113, 130, 132])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_order_of_the_sum_is_defined_to_the_last_bit(kind: str, dim: int, optimizer: str) -> None:
    """Runs shorter and longer than each multiple of a stretch: like one entry with the sum, which is nearly exact."""
    if optimizer != "sgd" and (kind == "cpu" or dim not in {3, 16, 132}):
        return  # the sum knows no optimizer on the CPU
    rng, counts, cpu = np.random.default_rng(dim), COUNTS[kind], Cpu()
    slots = rng.permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int32)
    gradient = (rng.standard_normal((slots.size, dim)) * 10.0 ** rng.integers(-3, 4, (slots.size, 1))).astype(F4)
    fields = [rng.standard_normal((len(counts), dim)).astype(F4), *states(optimizer, len(counts), dim, rng)]
    sums, rows = sums_by_stretches(kind, slots, gradient, len(counts)), np.arange(len(counts), dtype=np.int32)
    wanted = stepped(cpu, optimizer, fields, rows, cpu.one_id(sums))
    exact = np.array([gradient[slots == slot].astype(float).sum(axis=0) for slot in rows])
    most = np.array([np.abs(gradient[slots == slot]).sum(axis=0, dtype=float) for slot in rows])
    assert (np.abs(sums - exact) <= 1e-5 * np.maximum(most, 1)).all()
    for m in machines(kind):
        done = stepped(m, optimizer, fields, slots, m.one_id(gradient))
        assert all(same_bits(field, right) for field, right in zip(done, wanted, strict=True))


@every_machine
@pytest.mark.parametrize("optimizer", ["rowwise", "rowwise_adam", "rowwise_rmsprop"])
def test_slices_of_columns_step_as_whole_rows_by_the_means_of_these(kind: str, optimizer: str) -> None:
    """Each slice gets the mean of squares of the whole row, in the order of entries."""
    rng, slots = np.random.default_rng(0), np.array([4, 0, 2], np.int32)
    fields = [rng.standard_normal((5, 12)).astype(F4), *states(optimizer, 5, 12, rng)]
    gradient = rng.standard_normal((3, 12)).astype(F4)
    means = (gradient.astype(float) ** 2).mean(axis=1).astype(F4)
    for m in machines(kind):
        whole = stepped(m, optimizer, fields, slots, m.one_id(gradient))
        for columns in (slice(0, 8), slice(8, 12)):
            part = [np.ascontiguousarray(one[:, columns] if one.shape[1] > 1 else one) for one in fields]
            vectors, placed = m.vectors(part[0]), [m.place(one) for one in part[1:]]
            described = m.one_id(np.ascontiguousarray(gradient[:, columns]))
            rule, pairs = rule_of(optimizer, vectors.dim), m.sort(m.place(slots), 5)
            m.step(Step(vectors, placed, pairs, described, rule, means=m.place(means)))
            for found, right in zip((m.read(one) for one in (vectors.values, *placed)), whole, strict=True):
                np.testing.assert_allclose(found, right[:, columns] if right.shape[1] > 1 else right, rtol=1e-5)


@every_machine
def test_one_hot_row_takes_all(kind: str) -> None:
    rng = np.random.default_rng(0)
    for num_slots, hot, size in ((5, 2, 3000), (1, 0, 3000), (5, -1, 600)):
        if kind == "cpu" and hot < 0:
            continue
        slots, gradient = np.full(size, hot, np.int32), rng.standard_normal((size, 8)).astype(F4)
        wanted = np.ones((num_slots, 8), F4)
        if hot >= 0:
            wanted[hot] -= F4(RATE) * sums_by_stretches(kind, slots, gradient, num_slots)[hot]
        for m in machines(kind):
            (done,) = stepped(m, "sgd", [np.ones((num_slots, 8), F4)], slots, m.one_id(gradient))
            assert same_bits(done, wanted)


@every_machine
@settings(max_examples=40)
@given(
    optimizer=st.sampled_from(OPTIMIZERS),
    dim=st.sampled_from(DIMS),
    decay=st.sampled_from((0.0, 0.01)),
    seed=st.integers(0, 2**32),
    size=st.sampled_from((1, 50, 3000, 20_000)),
    hot=st.booleans(),
)
def test_bits_are_those_of_any_threads_and_slots(
    kind: str, optimizer: str, dim: int, decay: float, seed: int, size: int, *, hot: bool
) -> None:
    size, rng = size if kind == "cpu" else min(size, 700), np.random.default_rng(seed)
    num_slots = 1 if hot else 300
    slots = (rng.random(size) ** 3 * num_slots).astype(np.int32)
    fields = [rng.standard_normal((num_slots, dim)).astype(F4), *states(optimizer, num_slots, dim, rng)]
    gradient, moved = rng.standard_normal((size, dim)).astype(F4), rng.permutation(num_slots).astype(np.int32)
    back = np.argsort(moved)
    with machine(kind, 0) as m:
        alone = stepped(m, optimizer, fields, slots, m.one_id(gradient), decay)
    with machine(kind, 1) as m:
        if kind == "cuda":
            m.device.num_sms = 3
        together = stepped(m, optimizer, fields, slots, m.one_id(gradient), decay)
        moved_fields = [field[back] for field in fields]
        elsewhere = stepped(m, optimizer, moved_fields, moved[slots], m.one_id(gradient), decay)
    for a, b, c in zip(alone, together, elsewhere, strict=True):
        assert same_bits(a, b)
        assert same_bits(a, np.ascontiguousarray(c[moved]))


@settings(max_examples=80)
@given(
    case=bags(),
    optimizer=st.sampled_from(OPTIMIZERS),
    dtype=st.sampled_from(DTYPES),
    decay=st.sampled_from((0.0, 0.01)),
    scale=st.sampled_from([1.0, 1e-6, 3e4]),
    applied=st.integers(1, 2**40),
    turn=st.integers(0, 2),
)
def test_a_step_of_16_bit_rows_on_cuda_has_the_cpus_bits(
    case: Bags, optimizer: str, dtype: str, decay: float, scale: float, applied: int, turn: int
) -> None:
    """As long as no row has more entries than a stretch: longer sums are covered by the float32 tests."""
    rng, num_slots = np.random.default_rng(0), case.vectors.shape[0]
    assume(np.bincount(case.slots()).max(initial=0) <= STRETCH)
    gradient = (rng.standard_normal((case.num_samples, case.width)) * scale).astype(F4)
    fields = [(case.vectors * scale).astype(F4), *states(optimizer, num_slots, case.dim, rng)]
    streams, results = rng.integers(0, 2**64, num_slots, np.uint64), []
    for kind in ("cpu", "cuda"):
        with machine(kind, turn) as m:
            done = pool(m, case)
            rounding = make_rounding(m.place(streams), applied)
            slots = m.read(done["slots"])
            results.append(
                stepped(m, optimizer, fields, slots, m.of_bags(gradient, done), decay, dtype=dtype, rounding=rounding)
            )
    for i, (found, wanted) in enumerate(zip(*results, strict=True)):
        assert same_but_nan(found, wanted, "float32" if i else dtype)


def same_but_nan(found: NDArray[Any], wanted: NDArray[Any], dtype: str = "float32") -> bool:
    """Return True if all but NaN, whose sign is the CPU's, have the same bits."""
    numbers_found, numbers_wanted = (
        bits if dtype == "float32" else from_bits(np.ascontiguousarray(bits), dtype) for bits in (found, wanted)
    )
    nan = np.isnan(numbers_wanted)
    return bool(np.array_equal(np.isnan(numbers_found), nan)) and found[~nan].tobytes() == wanted[~nan].tobytes()


@pytest.mark.parametrize("dim", [1, 17, 64, 130])
@pytest.mark.parametrize("turn", [0, 1])
def test_sums_are_the_steps_of_rows_of_zeros(dim: int, turn: int) -> None:
    rng = np.random.default_rng(dim)
    slots = np.minimum(rng.integers(0, 300, 30_000), 200).astype(np.int32)  # slot 200 has a third of all
    slots[slots == 7] = 8
    out = np.full((300, dim), np.nan, F4)
    zeros = np.zeros_like(out)
    with machine("cpu", turn) as m:
        gradients, pairs = m.one_id(rng.standard_normal((slots.size, dim), dtype=F4)), m.sort(slots, 300)
        m.step(Step(Vectors(zeros, dim), (), pairs, gradients, Rule("sgd", -0.25)))
        m.step(Step(Vectors(out, dim), (), pairs, gradients, Rule("sum", 0.25)))
    named = np.unique(slots)
    assert same_bits(out[named], zeros[named])
    assert np.isnan(np.delete(out, named, axis=0)).all()
    assert np.isnan(out[7]).all()


@every_machine
def test_adams_first_step_moves_by_the_learning_rate(kind: str) -> None:
    """Bias correction counts applied steps from 1; 0 is refused."""
    with pytest.raises(ValueError, match="step is 0"):
        Adam().rule(RATE, 0)
    for m in machines(kind):
        fields = [m.place(np.zeros((1, 4), F4)) for _ in range(3)]
        pairs = m.sort(m.place(np.zeros(1, np.int32)), 1)
        rule, gradients = optimizer_step.rule_of(Adam(), 4, RATE, 1), m.one_id(np.array([[1, -2, 3, -4]], F4))
        m.step(Step(Vectors(fields[0], 4), fields[1:], pairs, gradients, rule))
        np.testing.assert_allclose(m.read(fields[0])[0], [-RATE, RATE, -RATE, RATE], rtol=1e-5)


@every_machine
def test_arrays_that_do_not_belong_together_are_refused(kind: str) -> None:
    m: Any = Cpu() if kind == "cpu" else Cuda(ShimDevice())
    vectors, slots, gradient = np.zeros((5, 4), F4), np.array([0, 4, 2], np.int32), np.ones((3, 4), F4)
    pairs, state, good = m.sort(m.place(slots), 5), m.place(np.zeros((5, 4), F4)), m.one_id(gradient)
    bags_of = functools.partial(Gradients, good.flat, 3, 4, offsets=np.zeros(3, np.int64))
    right = Step(m.vectors(vectors), (), pairs, good, rule_of("sgd", 4))
    adagrad = right._replace(rule=rule_of("adagrad", 4), states=[state])
    narrow_rows = right._replace(vectors=m.vectors(vectors, "bfloat16"))
    for wrong, said in (
        (adagrad._replace(states=[m.place(np.zeros((5, 1), F4))]), "first state has shape"),
        (adagrad._replace(states=[]), "needs 1 states, but 0 were given"),
        (adagrad._replace(states=[m.place(np.zeros((5, 4)))]), "float64"),
        (right._replace(gradients=m.one_id(gradient[:2])), "3 entries were sorted"),
        (right._replace(gradients=good._replace(num_samples=4)), "not a gradient of 4 samples of 4"),
        (right._replace(gradients=bags_of(offsets=np.zeros(2, np.int64))), "describe 2 entries"),
        (right._replace(gradients=m.one_id(gradient, np.ones(1, np.int64))), "cols must be in"),
        (right._replace(gradients=bags_of(scales=np.ones(2, F4))), "entry_scale has 2"),
        (right._replace(gradients=bags_of(argmax=np.zeros(8, np.int32))), "argmax has shape"),
        (right._replace(means=m.place(np.ones(2, F4))), "means has 2 elements for 3 entries"),
        (narrow_rows, "5 rows of a 16-bit dtype have 0 streams"),
    ):
        with pytest.raises(ValueError, match=said):
            m.step(wrong)
    if kind == "cpu":
        with pytest.raises(ValueError, match="slot 4 was sorted"):
            m.step(right._replace(vectors=Vectors(vectors[:4], 4)))
    else:
        assert not any(kernel.startswith("update.") for kernel in m.device.launches)
    assert not m.read(right.vectors.values).any()
