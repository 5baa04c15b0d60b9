"""The optimizer step by the CUDA sources, run on the CPU, against the numba kernels."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.kernels import one_group
from tests.kernels.cases import DIMS, Bags, bags, same_bits
from tests.kernels.shim.device import ORDERS, KernelError, ShimDevice, device_for, devices
from tests.kernels.test_pooling import pool
from tests.kernels.test_update import F4, OPTIMIZERS, RATE, STEP, states
from tests.kernels.test_update import update as update_on_cpu
from tiercache.kernels.cpu import update
from tiercache.kernels.cpu.optimizers import ADAGRAD, SGD, make_rule
from tiercache.kernels.cpu.pooling import MAX, MEAN, SUM
from tiercache.kernels.cuda import update as cuda_update

if TYPE_CHECKING:
    from numpy.typing import NDArray

STRETCH = cuda_update.STRETCH


def update_on(
    device: Any,
    optimizer: str,
    fields: list[NDArray[np.float32]],
    slots: NDArray[np.int32],
    gradients: cuda_update.Gradients,
    decay: float = 0.0,
) -> list[NDArray[np.float32]]:
    """Sort, step copies of the fields, and return them."""
    done: Any = [device.place(field) for field in fields]
    pairs = one_group.sort_slots(device, device.place(slots), len(fields[0]))
    call: Any = {
        "sgd": one_group.update_sgd,
        "adagrad": one_group.update_adagrad,
        "rowwise": one_group.update_rowwise_adagrad,
        "adam": functools.partial(one_group.update_adam, step=STEP),
    }[optimizer]
    buffers = None
    call(device, *done, pairs, gradients, buffers, learning_rate=RATE, decay=decay)
    return [device.read(field) for field in done]


def hot_bags(modes: tuple[int, ...], *, weighted: bool) -> Bags:
    """Return 300 bags of two ids for each feature, nearly all of one row of two."""
    rng, num_entries = np.random.default_rng(1), 600 * len(modes)
    return Bags(
        num_samples=300, dim=5, table_rows=[2] * len(modes), modes=np.array(modes, np.int8),
        offsets=np.arange(0, num_entries + 1, 2), ids=(rng.random(num_entries) < 0.1).astype(np.int32),
        weights=rng.random(num_entries, F4) if weighted else np.zeros(0, F4),
        slot_of_local=rng.permutation(2 * len(modes)).astype(np.int32),
        vectors=rng.standard_normal((2 * len(modes), 5)).astype(F4), gap=1,
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@example(case=hot_bags((MEAN, MAX, SUM), weighted=False), optimizer="adam", decay=0.01, order="random")
@example(case=hot_bags((SUM, MEAN), weighted=True), optimizer="rowwise", decay=0.0, order="reversed")
@given(
    case=bags(),
    optimizer=st.sampled_from(OPTIMIZERS),
    decay=st.sampled_from((0.0, 0.01)),
    order=st.sampled_from(ORDERS),
)
def test_a_step_of_bags_has_the_cpus_bits(case: Bags, optimizer: str, decay: float, order: str) -> None:
    """Every optimizer, any dim, sum, mean and max mixed, weights, empty bags, with and without decay.

    The CPU's as long as no row has more entries than a stretch; always those of one entry with the defined sum.
    """
    rng = np.random.default_rng(0)
    gradient, done = rng.standard_normal((case.num_samples, case.width)).astype(F4), pool(case)
    fields = [case.vectors, *states(optimizer, case.vectors.shape[0], case.dim, rng)]
    argmax = done["argmax"] if (case.modes == MAX).any() else None
    described = update.bag_gradients(gradient, done["entry_offset"], done["entry_scale"], argmax)
    wanted = update_on_cpu(optimizer, fields[0], fields[1:], done["slots"], described, decay)
    device = device_for(order)
    given_there = cuda_update.bag_gradients(
        device, device.place(gradient), device.place(done["entry_offset"]), device.place(done["entry_scale"]),
        None if argmax is None else device.place(argmax),
    )  # fmt: skip
    fields_after = update_on(device, optimizer, fields, done["slots"], given_there, decay)
    stepped, one_each = np.unique(done["slots"]), np.zeros(1, np.int64)
    rows = gradients_of_entries(gradient, done["entry_offset"], done["entry_scale"], argmax, case.dim)
    sums = sums_by_stretches(done["slots"], rows, fields[0].shape[0])[stepped]
    defined = update_on_cpu(
        optimizer, fields[0], fields[1:], stepped, update.one_id_gradients(sums, one_each), decay
    )  # fmt: skip
    assert all(same_bits(field, right) for field, right in zip(fields_after, defined, strict=True))
    if np.bincount(done["slots"]).max(initial=0) <= STRETCH:
        assert all(same_bits(field, right) for field, right in zip(fields_after, wanted, strict=True))
    device.close()


def gradients_of_entries(
    gradient: NDArray[np.float32],
    offsets: NDArray[np.int64],
    scales: NDArray[np.float32],
    argmax: NDArray[np.int32] | None,
    dim: int,
) -> NDArray[np.float32]:
    """Write out the gradient of each entry of bags, (E, dim): scaled, or where a maximum was taken only what it won."""
    out, flat = np.zeros((offsets.size, dim), F4), gradient.reshape(-1)
    for entry, offset in enumerate(offsets.tolist()):
        begin = offset if offset >= 0 else ~offset
        out[entry] = flat[begin : begin + dim]
        if offset < 0:
            assert argmax is not None
            out[entry][argmax.reshape(-1)[begin : begin + dim] != entry] = 0
        elif scales.size:
            out[entry] *= scales[entry]
    return out


def sums_by_stretches(slots: NDArray[np.int32], rows: NDArray[np.float32], num_slots: int) -> NDArray[np.float32]:
    """Sum each slot's rows in float32 in batch order; more than 256 in stretches of 256."""
    out = np.zeros((num_slots, rows.shape[1]), F4)
    for slot in np.unique(slots):
        mine = rows[slots == slot]
        parts = [functools.reduce(np.add, mine[i : i + STRETCH]) for i in range(0, len(mine), STRETCH)]
        out[slot] = functools.reduce(np.add, parts)
    return out


@pytest.mark.parametrize("dim", [1, 3, 16, 130, 132])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_order_of_the_sum_is_defined_to_the_last_bit(dim: int, optimizer: str) -> None:
    """Runs shorter and longer than each multiple of a stretch: as one entry with the sum; 1e-6 from the CPU's sum."""
    rng, cols = np.random.default_rng(dim), np.zeros(1, np.int64)
    counts = [1, 255, 256, 257, 511, 512, 513, 3, 1025, 77, 300]
    slots = rng.permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int32)
    gradient = (rng.standard_normal((slots.size, dim)) * 10.0 ** rng.integers(-3, 4, (slots.size, 1))).astype(F4)
    fields = [rng.standard_normal((len(counts), dim)).astype(F4), *states(optimizer, len(counts), dim, rng)]
    sums, rows = sums_by_stretches(slots, gradient, len(counts)), np.arange(len(counts), dtype=np.int32)
    wanted = update_on_cpu(optimizer, fields[0], fields[1:], rows, update.one_id_gradients(sums, cols))
    by_cpu = update_on_cpu(optimizer, fields[0], fields[1:], slots, update.one_id_gradients(gradient, cols))
    most = RATE * np.array([np.abs(gradient[slots == slot].astype(float)).sum(axis=0) for slot in rows])
    for device in devices():
        given_there = cuda_update.one_id_gradients(device, device.place(gradient), cols)
        done = update_on(device, optimizer, fields, slots, given_there)
        assert all(same_bits(field, right) for field, right in zip(done, wanted, strict=True))
        if optimizer == "sgd":
            assert (np.abs(done[0] - by_cpu[0]) <= 1e-6 * np.maximum(most, 1)).all()


def test_one_hot_row_takes_all() -> None:
    """3000 entries of one row, also of an only row; of 600 entries without a row nothing is taken."""
    rng = np.random.default_rng(0)
    for num_slots, hot, size in ((5, 2, 3000), (1, 0, 3000), (5, -1, 600)):
        slots, gradient = np.full(size, hot, np.int32), rng.standard_normal((size, 8)).astype(F4)
        wanted = np.ones((num_slots, 8), F4)
        if hot >= 0:
            wanted[hot] -= F4(RATE) * sums_by_stretches(slots, gradient, num_slots)[hot]
        for device in devices():
            given_there = cuda_update.one_id_gradients(device, device.place(gradient), np.zeros(1, np.int64))
            (done,) = update_on(device, "sgd", [np.ones((num_slots, 8), F4)], slots, given_there)
            assert same_bits(done, wanted)


@pytest.mark.parametrize("dim", DIMS)
def test_bits_do_not_depend_on_slots_or_blocks(dim: int) -> None:
    """The same batch with its rows in other slots, on devices of one and of three processors."""
    rng = np.random.default_rng(dim)
    keys = (rng.random(700) ** 6 * 40).astype(np.int32)
    gradient, vectors = rng.standard_normal((700, dim)).astype(F4), rng.standard_normal((40, dim)).astype(F4)
    seen = []
    for processors, order in ((1, "random"), (3, "forward")):
        device, slot_of_key = device_for(order), rng.permutation(60)[:40]
        device.num_processors = processors
        placed, state = np.zeros((60, dim), F4), np.zeros((60, dim), F4)
        placed[slot_of_key] = vectors
        given_there = cuda_update.one_id_gradients(device, device.place(gradient), np.zeros(1, np.int64))
        done = update_on(device, "adagrad", [placed, state], slot_of_key[keys].astype(np.int32), given_there)
        seen.append([field[slot_of_key] for field in done])
    assert all(same_bits(a, b) for a, b in zip(*seen, strict=True))


def test_groups_of_different_dims_step_in_two_launches() -> None:
    """Each as if it stepped alone; one of them has no entries."""
    rng, device = np.random.default_rng(0), device_for("random")
    steps, wanted = [], []
    for dim, size in ((4, 500), (7, 0), (65, 900)):
        slots, gradient = rng.integers(0, 20, size).astype(np.int32), rng.standard_normal((size, dim)).astype(F4)
        fields = [rng.standard_normal((20, dim)).astype(F4), *states("adagrad", 20, dim, rng)]
        described = update.one_id_gradients(gradient, np.zeros(1, np.int64))
        wanted.append(update_on_cpu("adagrad", fields[0], fields[1:], slots, described))
        pairs = one_group.sort_slots(device, device.place(slots), 20)
        steps.append(
            cuda_update.Step(
                device.place(fields[0]), device.place(fields[1]), None, pairs,
                cuda_update.one_id_gradients(device, device.place(gradient), np.zeros(1, np.int64)),
                make_rule(ADAGRAD, RATE, 1e-10, 0.0),
            )
        )  # fmt: skip
    device.launches.clear()
    cuda_update.update_many(device, steps)
    assert device.launches == ["update.sum_stretches", "update.update_adagrad"]
    for step, right in zip(steps, wanted, strict=True):
        assert same_bits(device.read(step.vectors), right[0])
        assert same_bits(device.read(step.first), right[1])


def test_the_step_needs_its_barrier() -> None:
    """Lanes read places that other lanes looked up: without the barrier the rows are wrong in some order."""
    rng, cols, barrier = np.random.default_rng(0), np.zeros(1, np.int64), "__syncwarp();  // from here on"
    slots, gradient = rng.integers(0, 40, 200).astype(np.int32), rng.standard_normal((200, 8)).astype(F4)
    wanted = update_on_cpu("sgd", np.zeros((40, 8), F4), [], slots, update.one_id_gradients(gradient, cols))

    def agrees(order: str, kept: str) -> bool:
        def changed(name: str, text: str) -> str:
            assert name != "update" or text.count(barrier) == 1
            return text.replace(barrier, kept)

        device = ShimDevice(order, changed=changed)
        described = cuda_update.one_id_gradients(device, device.place(gradient), cols)
        try:
            return same_bits(update_on(device, "sgd", [np.zeros((40, 8), F4)], slots, described)[0], wanted[0])
        except KernelError:
            return False

    assert all(agrees(order, barrier) for order in ORDERS)
    assert not all(agrees(order, "// from here on") for order in ORDERS)


def test_what_a_launch_reads_lives_until_then() -> None:
    """A device keeps few tables by itself: those of a step with more groups must not go before it runs."""

    class Forgetful(ShimDevice):
        def __init__(self) -> None:
            super().__init__()
            self.made: list[weakref.ref[Any]] = []

        def put(self, table: NDArray[Any]) -> NDArray[Any]:
            there = super().put(table)
            if table.dtype == np.int64:
                self.made.append(weakref.ref(there))
            return there

        def launch(self, kernel: str, blocks: int, arguments: Any) -> None:
            if kernel.startswith("update."):
                assert [columns() is not None for columns in self.made] == [True, True], kernel
            super().launch(kernel, blocks, arguments)

    device, steps = Forgetful(), []
    for _ in range(2):
        slots = np.arange(3, dtype=np.int32)
        pairs = one_group.sort_slots(device, device.place(slots), 3)
        described = cuda_update.one_id_gradients(device, device.place(np.ones((3, 4), F4)), np.zeros(1, np.int64))
        rule, rows = make_rule(SGD, 1.0, 0.0, 0.0), device.place(np.ones((3, 4), F4))
        steps.append(cuda_update.Step(rows, None, None, pairs, described, rule))
    cuda_update.update_many(device, steps)
    assert device.launches[-2:] == ["update.sum_stretches", "update.update_sgd"]
    assert all(not step.vectors.any() for step in steps)


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    """States of another shape, gradients of other entries, columns outside: a sentence, and nothing is launched."""
    device = ShimDevice()
    vectors, slots, cols = np.zeros((5, 4), F4), np.array([0, 4, 2], np.int32), np.zeros(1, np.int64)
    gradient = np.zeros((3, 4), F4)
    good = cuda_update.one_id_gradients(device, gradient, cols)
    with pytest.raises(ValueError, match="first state has shape"):
        update_on(device, "adagrad", [vectors, np.zeros((5, 1), F4)], slots, good)
    with pytest.raises(ValueError, match="3 entries were sorted"):
        update_on(device, "sgd", [vectors], slots, cuda_update.one_id_gradients(device, gradient[:2], cols))
    with pytest.raises(ValueError, match="describe 2 entries"):
        update_on(device, "sgd", [vectors], slots, cuda_update.bag_gradients(device, gradient, np.zeros(2, np.int64)))
    with pytest.raises(ValueError, match="cols must lie in"):
        update_on(device, "sgd", [vectors], slots, cuda_update.one_id_gradients(device, gradient, np.ones(1, np.int64)))
    with pytest.raises(ValueError, match="entry_scale has 2"):
        cuda_update.bag_gradients(device, gradient, np.zeros(3, np.int64), np.ones(2, F4))
    with pytest.raises(ValueError, match="argmax has shape"):
        cuda_update.bag_gradients(device, gradient, np.zeros(3, np.int64), np.ones(3, F4), np.zeros((2, 4), np.int32))
    with pytest.raises(ValueError, match="step is 0"):
        one_group.update_adam(
            device, vectors, vectors.copy(), vectors.copy(), np.zeros(3, np.uint64), good,
            None, step=0, learning_rate=RATE,
        )  # fmt: skip
    assert not any(kernel.startswith("update.") for kernel in device.launches)
