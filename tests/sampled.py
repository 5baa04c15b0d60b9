"""Tests of many cases: `make test` runs a few of them, `make test-long` all.

``@pytest.mark.sampled(3)`` marks all cases of a test but three as long: those with the values of parameters that the
cases before them used least, so that three cases of two engines and three sizes have each engine and each size.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest


def sample(cases: Sequence[Mapping[str, str]], number: int) -> list[int]:
    """Return the places of ``number`` cases, each given by the value of each parameter."""
    used = Counter[tuple[str, str]]()
    left, chosen = list(range(len(cases))), list[int]()
    while left and len(chosen) < number:
        rarest = min(left, key=lambda place: sum(used[value] for value in cases[place].items()))
        left.remove(rarest)
        chosen.append(rarest)
        used.update(cases[rarest].items())
    return chosen


def leave_to_long(items: Iterable[pytest.Item]) -> None:
    tests: dict[tuple[object, str], list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") is not None and item.get_closest_marker("long") is None:
            tests[item.parent, item.originalname].append(item)  # type: ignore[attr-defined]
    for cases in tests.values():
        (number,) = cases[0].get_closest_marker("sampled").args
        values = [{name: repr(value) for name, value in case.callspec.params.items()} for case in cases]
        chosen = sample(values, number)
        for place, case in enumerate(cases):
            if place not in chosen:
                case.add_marker(pytest.mark.long)
