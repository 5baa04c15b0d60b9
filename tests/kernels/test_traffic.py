"""Bytes that the kernels of a step read and write, against the necessary ones."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.machines import Cuda
from tests.kernels.shim.device import ShimDevice
from tests.kernels.test_update import rule_of
from tiercache.kernels.cpu.pooling import SUM
from tiercache.kernels.cuda.gathering import Gathered, Mapped, gather
from tiercache.kernels.cuda.pooling import Features, Ids, PoolPlan
from tiercache.kernels.cuda.sorting import LookupPositions, SortPlan
from tiercache.kernels.step import Gradients, Step

TABLES, ROWS, SAMPLES, DIM = 10, 6_562, 410, 128
"""The goal's step (10 tables of 1.68 million rows, 1,048,570 ids, power law of 1.05) with 1 of 256 rows and ids."""
ENTRIES, LARGEST = TABLES * SAMPLES, 1.03
STATES = {"sgd": 0, "adam": 2}


class Goal(NamedTuple):
    """The goal's step on a device that counts."""

    machine: Cuda
    ids: NDArray[np.int32]  # (E,), feature-major
    slot_of: NDArray[np.int32]
    bases: NDArray[np.int64]
    distinct: int

    @property
    def traffic(self) -> dict[str, dict[int, Any]]:
        found: dict[str, dict[int, Any]] = self.machine.device.traffic
        return found


@pytest.fixture
def goal() -> Iterator[Goal]:
    rng, device = np.random.default_rng(0), ShimDevice(counted=True)
    share = np.cumsum(np.arange(1, ROWS + 1) ** -1.05)
    drawn = np.searchsorted(share, rng.random(ENTRIES) * share[-1]).astype(np.int32)
    ids = rng.permutation(ROWS).astype(np.int32)[np.minimum(drawn, ROWS - 1)]
    bases = np.arange(TABLES) * ROWS
    distinct = np.unique(ids + np.repeat(bases, SAMPLES)).size
    slot_of = rng.permutation(TABLES * ROWS).astype(np.int32)
    yield Goal(Cuda(device), ids, slot_of, bases, distinct)
    device.close()


def moved(goal: Goal, kernels: Callable[[str], bool]) -> int:
    return sum(
        one.sectors_read + one.sectors_written
        for kernel, arrays in goal.traffic.items()
        if kernels(kernel)
        for one in arrays.values()
    )


def test_a_lookup_moves_what_it_must(goal: Goal) -> None:
    m, cols = goal.machine, np.arange(TABLES) * DIM
    vectors, local = m.vectors(np.zeros((TABLES * ROWS, DIM), np.float32)), m.place(goal.slot_of)
    ids, slots, out = m.place(goal.ids), m.array((ENTRIES,), np.int32), m.array((SAMPLES, TABLES * DIM), np.float32)
    plan = PoolPlan(m.device, [Features(vectors, local, goal.bases, cols, np.full(TABLES, SUM, np.int8))], out.shape[1])
    plan.pool([Ids(ids, slots)], out)
    rows = 4 * DIM * (goal.distinct + ENTRIES)
    must = rows + 4 * (2 * ENTRIES + goal.distinct)
    assert must <= moved(goal, lambda name: name == "pooling.pool") <= LARGEST * must
    written = goal.traffic["pooling.pool"][m.device.describe(out).address]
    assert (written.written, written.read) == (4 * DIM * ENTRIES, 0), "each element of the output once"
    mapped = Mapped(ids, goal.bases, np.arange(TABLES + 1) * SAMPLES, local)
    gather(m.device, [Gathered(vectors, slots, m.array((ENTRIES, DIM), np.float32), mapped)])
    assert must <= moved(goal, lambda name: name == "gathering.gather") <= LARGEST * must


@pytest.mark.parametrize("optimizer", STATES)
@pytest.mark.parametrize("strided", [False, True])
def test_an_update_moves_what_it_must(goal: Goal, optimizer: str, strided: bool) -> None:
    """Lanes without an entry repeat another lane's read, which moves nothing."""
    m, rng = goal.machine, np.random.default_rng(1)
    cols = np.arange(TABLES) * DIM
    wide = rng.standard_normal((SAMPLES, TABLES * DIM)).astype(np.float32)
    if strided:
        gradients: list[Gradients] = [m.one_id(wide, cols)]
    else:
        gradients = [m.one_id(np.ascontiguousarray(wide[:, col : col + DIM])) for col in cols]
    starts, limits = np.arange(TABLES + 1) * SAMPLES, np.full(TABLES, ROWS)
    plan, ids = SortPlan.of([[LookupPositions(0, starts, goal.bases, limits)]]), m.place(goal.ids)
    memory = m.array((plan.num_bytes // 8,), np.int64)
    at = [m.device.describe(array).address for array in (ids, memory)]
    (runs,) = plan.launch(m.device, at[0], memory, at[1])
    runs = runs._replace(slot_of=m.place(goal.slot_of))
    vectors = m.vectors(np.zeros((TABLES * ROWS, DIM), np.float32))
    states = [m.place(np.zeros((TABLES * ROWS, DIM), np.float32)) for _ in range(STATES[optimizer])]
    m.step(Step(vectors, states, runs, gradients, rule_of(optimizer, DIM)))
    rows = 4 * DIM * goal.distinct
    must = 4 * DIM * ENTRIES + 2 * rows * (1 + len(states)) + 4 * ENTRIES + (8 + 4) * goal.distinct
    assert must <= moved(goal, lambda name: name.startswith("update.")) <= LARGEST * must
    update = goal.traffic[f"update.update_{optimizer}"]
    for array in (vectors.values, *states):
        found = update[m.device.describe(array).address]
        assert (found.read, found.written) == (rows, rows)
    launches = [arrays for name, arrays in goal.traffic.items() if name.startswith("update.")]
    places = [m.device.describe(one.flat).address for one in gradients]
    read = sum(arrays[place].sectors_read for arrays in launches for place in places if place in arrays)
    assert read == 4 * DIM * ENTRIES, "no gradient is read for a stretch of a hot row and for the row again"


def test_a_count_sees_a_second_read() -> None:
    """A kernel that reads a row again is counted again, so that the tests above can fail."""

    def again(name: str, text: str) -> str:
        old = "held.row = load_written<VEC>("
        assert name != "update" or old in text
        return text.replace(old, "volatile float again = *(static_cast<const float*>(part.vectors) + d); " + old)

    device = ShimDevice(changed=again, counted=True)
    m = Cuda(device)
    runs = m.sort(m.place(np.array([0, 1, 1], np.int32)), 2)
    vectors = m.vectors(np.zeros((2, DIM), np.float32))
    m.step(Step(vectors, (), runs, m.one_id(np.ones((3, DIM), np.float32)), rule_of("sgd", DIM)))
    found = device.traffic["update.update_sgd"][device.describe(vectors.values).address]
    device.close()
    assert (found.read, found.written) == (2 * 4 * DIM + 2 * 4 * DIM // 4, 2 * 4 * DIM), "one of four elements again"
