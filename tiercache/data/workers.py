"""The threads of an extraction: all cores of the process, or as many as were asked for."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

_T = TypeVar("_T")


class Workers:
    """Threads that take work in its order. What they run lets go of the GIL: kernels, decoding and files."""

    def __init__(self, count: int | None = None) -> None:
        """``count``: threads; None: one for each core that the process may use."""
        self.count = count or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self.count, "extraction")

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Have one thread do it, after what was given before."""
        return self._pool.submit(work)

    def run(self, work: Iterable[Callable[[], Any]]) -> None:
        """Do all of it, on this thread too, and raise the first error."""
        left = deque(work)

        def take() -> None:
            while left:
                try:
                    one = left.popleft()
                except IndexError:
                    return
                one()

        helpers = [self._pool.submit(take) for _ in range(min(self.count, len(left)) - 1)]
        try:
            take()
        finally:
            left.clear()
            for helper in helpers:
                helper.cancel()
            errors = [error for helper in helpers if not helper.cancelled() and (error := helper.exception())]
        if errors:
            raise errors[0]

    def ahead(self, items: Iterator[_T]) -> Iterator[_T]:
        """Yield the items; while one is used the next one is made, on a thread of its own."""
        end = object()
        with closing(items), ThreadPoolExecutor(1, "reading") as thread:  # type: ignore[type-var]
            coming = thread.submit(next, items, end)
            while (item := coming.result()) is not end:
                coming = thread.submit(next, items, end)
                yield item  # type: ignore[misc]

    def close(self) -> None:
        """Wait for the threads to end."""
        self._pool.shutdown(cancel_futures=True)
