"""The order of shuffled samples: a permutation whose ranges are computed independently, and that shuffles well."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.stochastic import mix, sample_at
from tiercache.kernels.cpu.samples import shuffled

STATES = st.integers(0, 2**64 - 1)
SEEDS = 20_000


def assert_uniform(counts: np.ndarray) -> None:
    """Chi-squared of counts that are expected to be equal, within eight of its standard deviations."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 8 * (2 * freedom) ** 0.5


@given(st.integers(0, 3000), STATES)
def test_every_sample_stands_at_one_place(count: int, state: int) -> None:
    for n in {count, *(abs(2 ** (count % 12) + d) for d in (-1, 0, 1)), count % 4}:
        assert np.array_equal(np.sort(shuffled(state, n, 0, n)), np.arange(n))


@given(st.integers(1, 2**63 - 1) | st.integers(1, 600), STATES, st.data())
def test_a_stretch_is_what_the_slow_definition_gives_at_each_place(count: int, state: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, count - 1))
    last = min(first + data.draw(st.integers(0, 9)), count)
    made = shuffled(state, count, first, last)
    assert made.dtype == np.int64
    assert made.tolist() == [sample_at(place, count, state) for place in range(first, last)]


@given(st.integers(1, 5000), STATES, st.lists(st.integers(0, 5000), max_size=5))
def test_stretches_side_by_side_are_the_whole(count: int, state: int, cuts: list[int]) -> None:
    bounds = sorted({0, count, *(cut % count for cut in cuts)})
    pieces = [shuffled(state, count, low, high) for low, high in pairwise(bounds)]
    assert np.array_equal(np.concatenate(pieces), shuffled(state, count, 0, count))


@pytest.mark.parametrize("stretch", [(-1, 2), (3, 2), (0, 6), (6, 6)])
def test_places_that_there_are_not_are_refused(stretch: tuple[int, int]) -> None:
    """A walk from there might never end."""
    with pytest.raises(ValueError, match="expected it within 0 to 5"):
        shuffled(0, 5, *stretch)


@pytest.mark.parametrize("count", [5, 16, 33, 64, 100])
def test_a_sample_stands_anywhere_and_beside_any_other_equally_often(count: int) -> None:
    """Over many states: at each position, and for each pair at positions near or far from each other."""
    found = np.stack([shuffled(mix(seed), count, 0, count) for seed in range(SEEDS)])
    pairs = ~np.eye(count, dtype=bool)
    for place, other in ((0, 1), (count // 2, count // 2 + 1), (count - 2, count - 1), (0, count // 2), (1, count - 1)):
        assert_uniform(np.bincount(found[:, place], minlength=count))
        both = np.bincount(found[:, place] * count + found[:, other], minlength=count * count)
        assert_uniform(both.reshape(count, count)[pairs])
