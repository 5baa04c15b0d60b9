"""The schedule: cyclic or seeded orders, and a digest that only dataset and order decide."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.planning.schedule import Schedule


def test_without_a_seed_every_epoch_goes_through_the_passes_in_their_order() -> None:
    schedule = Schedule(num_passes=3, dataset_digest="d")
    assert [schedule.sub_dataset_of(v) for v in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert schedule.epoch_of(7) == 2


@given(st.integers(1, 50), st.integers(0, 2**64 - 1), st.integers(-2, 100))
def test_a_seeded_order_has_every_pass_once_in_each_epoch(num_passes: int, seed: int, epoch: int) -> None:
    schedule = Schedule(num_passes=num_passes, dataset_digest="d", order=seed)
    order = schedule.order_of(epoch)
    assert sorted(order) == list(range(num_passes))
    np.testing.assert_array_equal(order, schedule.order_of(epoch))


@given(st.integers(1, 8), st.none() | st.integers(0, 99), st.integers(0, 5), st.data())
def test_what_is_left_is_the_sum_of_passes(
    num_passes: int, order_seed: int | None, epochs: int, data: st.DataObject
) -> None:
    """From any pass; and for more epochs than can be visited one by one."""
    schedule = Schedule(num_passes=num_passes, dataset_digest="d", order=order_seed)
    samples_P = [3**i for i in range(num_passes)]
    end = epochs * num_passes
    pass_index = data.draw(st.integers(0, end))
    left = sum(samples_P[schedule.sub_dataset_of(v)] for v in range(pass_index, end))
    assert schedule.samples_left(pass_index, epochs, samples_P) == left
    assert schedule.samples_left(pass_index, epochs + 10**15, samples_P) == left + 10**15 * sum(samples_P)


def test_seeded_orders_differ_between_epochs_and_seeds() -> None:
    schedules = [Schedule(num_passes=20, dataset_digest="d", order=seed) for seed in range(10)]
    orders = {tuple(schedule.order_of(epoch)) for schedule in schedules for epoch in range(10)}
    assert len(orders) == 100


def test_the_digest_changes_with_dataset_and_order_only() -> None:
    one = Schedule(num_passes=3, dataset_digest="d")
    assert one.digest == Schedule(num_passes=3, dataset_digest="d").digest
    assert one.digest != Schedule(num_passes=3, dataset_digest="e").digest
    assert one.digest != Schedule(num_passes=3, dataset_digest="d", order=0).digest


def test_a_schedule_of_no_passes_is_refused() -> None:
    with pytest.raises(ValueError, match="extract some data first"):
        Schedule(num_passes=0, dataset_digest="d")
