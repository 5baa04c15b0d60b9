"""Reading ahead."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tiercache.store.read_ahead import read_ahead


def test_results_come_in_order_and_no_more_are_taken_than_are_ahead() -> None:
    """When a result is handed out, ``most`` items after it were taken, and no more."""
    taken: list[int] = []

    def items() -> object:
        for number in range(7):
            taken.append(number)
            yield (number,)

    with ThreadPoolExecutor(2) as pool:
        seen = []
        for (number,), square in read_ahead(pool, lambda n: n * n, items(), most=3):  # type: ignore[arg-type]
            seen.append((number, square))
            assert taken[-1] <= number + 3
    assert seen == [(n, n * n) for n in range(7)]


def test_an_error_comes_where_its_result_would() -> None:
    """After the results before it."""
    with ThreadPoolExecutor(2) as pool:
        results = read_ahead(pool, lambda n: 6 // n, [(3,), (2,), (0,), (1,)], most=3)
        assert [next(results)[1], next(results)[1]] == [2, 3]
        with pytest.raises(ZeroDivisionError):
            next(results)
