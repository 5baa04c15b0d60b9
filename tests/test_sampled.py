"""The cases that `make test` runs of a test of many."""

from tests.sampled import sample

ENGINES, SIZES = ("lmdb", "zarr"), (1, 2, 3)
CASES = [{"engine": engine, "size": str(size)} for engine in ENGINES for size in SIZES]


def test_a_sample_has_each_value_before_one_again() -> None:
    assert [CASES[place] for place in sample(CASES, 3)] == [
        {"engine": "lmdb", "size": "1"},
        {"engine": "zarr", "size": "2"},
        {"engine": "lmdb", "size": "3"},
    ]
    assert sorted(sample(CASES, 10)) == list(range(6))
