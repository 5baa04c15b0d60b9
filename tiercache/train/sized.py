"""SizedIterator: an iterator that knows how many items it yields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

T = TypeVar("T")


class SizedIterator(Iterator[T]):
    """A generator with a length: the number of items that it yields in all, unless its loop ends early.

    Before it begins, the length is what an iteration starting now would yield; then it no longer changes. ``iter``
    returns the generator itself, so that a ``for`` loop pays nothing for the length.
    """

    def __init__(self, items: Generator[T, None, None], count: Callable[[], int]) -> None:
        """count: returns the number of items that an iteration from now would yield."""
        self._items, self._count = items, count
        self._total: int | None = None

    def __iter__(self) -> Generator[T, None, None]:
        self._begin()
        return self._items

    def __next__(self) -> T:
        self._begin()
        return next(self._items)

    def __len__(self) -> int:
        return self._count() if self._total is None else self._total

    def close(self) -> None:
        """End the iteration, as ``break`` does."""
        self._items.close()

    def _begin(self) -> None:
        if self._total is None:
            self._total = self._count()
