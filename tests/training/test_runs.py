"""What lies one behind the other is joined without a copy, and nothing else is taken for it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiercache.backends.runs import runs_of


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 20)), max_size=8))
def test_runs_are_the_arrays_in_their_order(places: list[tuple[int, int, int]]) -> None:
    """Of any parts of several flat arrays, overlapping and empty ones too; neighbors with ids are one."""
    flats = [np.arange(i * 100, i * 100 + 20, dtype=np.int32) for i in range(3)]
    arrays = [flats[which][min(a, b) : max(a, b)] for which, a, b in places]
    runs = runs_of(arrays)
    assert [i for run in runs for i in range(run.first, run.last)] == list(range(len(arrays)))
    for run in runs:
        np.testing.assert_array_equal(run.values, np.concatenate(arrays[run.first : run.last]))
    for run, following in pairwise(runs):
        one, other = places[run.last - 1], places[following.first]
        empty = not (arrays[run.last - 1].size and arrays[following.first].size)
        assert empty or (one[0], max(one[1:])) != (other[0], min(other[1:]))


def test_rows_of_what_was_read_are_one_run_and_strides_are_none() -> None:
    """Rows of a matrix over a flat array; columns, and a matrix that is no part of one, are single runs."""
    flat = np.arange(30, dtype=np.int32)
    matrix = flat.reshape(5, 6)
    (run,) = runs_of(list(matrix))
    assert run.values.base is flat
    np.testing.assert_array_equal(run.values, flat)
    assert len(runs_of(list(matrix.T))) == 6
    assert len(runs_of([matrix[1].copy(), matrix[2].copy()])) == 2
