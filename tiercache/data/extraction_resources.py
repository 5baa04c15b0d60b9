"""The threads of an extraction, and how its memory limit is divided."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tiercache.errors import BudgetError
from tiercache.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

_T = TypeVar("_T")
_SMALLEST_CHUNK = 256 << 10
_LARGEST_CHUNK = 128 << 20


class Workers:
    """Threads that run work in order. The work releases the GIL: kernels, decoding and files."""

    def __init__(self, count: int | None = None) -> None:
        """``count``: threads; None: one for each core that the process may use."""
        self.count = count or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self.count, "extraction")

    def run(self, work: Iterable[Callable[[], Any]]) -> None:
        """Run all of it, also on this thread, and raise the first error."""
        pending = deque(work)

        def take() -> None:
            while pending:
                try:
                    task = pending.popleft()
                except IndexError:
                    return
                task()

        helpers = [self._pool.submit(take) for _ in range(min(self.count, len(pending)) - 1)]
        try:
            take()
        finally:
            pending.clear()
            for helper in helpers:
                helper.cancel()
            errors = [error for helper in helpers if not helper.cancelled() and (error := helper.exception())]
        if errors:
            raise errors[0]

    def prefetch(self, items: Iterator[_T]) -> Generator[_T, None, None]:
        """Yield the items; the next one is made on a separate thread while one is in use."""
        end = object()
        with closing(items), ThreadPoolExecutor(1, "reading") as thread:  # type: ignore[type-var]
            pending = thread.submit(next, items, end)
            while (item := pending.result()) is not end:
                pending = thread.submit(next, items, end)
                yield item  # type: ignore[misc]

    def close(self) -> None:
        """Wait for the threads to end."""
        self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShares:
    """Bytes of host memory, besides the 250 MiB or so of Python, its libraries and compiled kernels."""

    total: int
    chunk: int
    """Samples that are numbered at once. Reading ahead, joining, numbering and closing take nine times as much."""
    unit: int
    """Limit for one batch multiple of samples."""
    use_threads: bool
    """True if decoding may use several threads, which doubles its memory."""
    keys: int
    """Tables of keys, and the memory for closing a pass or writing a run of counts."""

    @classmethod
    def plan(cls, total: int, decoding: int) -> MemoryShares:
        """Divide ``total``: ``decoding`` for files, 3/8 of the rest for samples. Raises BudgetError if too small."""
        least = decoding + 32 * _SMALLEST_CHUNK
        if total < least:
            raise BudgetError(
                f"the memory limit is {format_bytes(total)}, but extraction of these files with this schema needs at "
                f"least {format_bytes(least)} for decoding and samples in progress: raise memory_limit"
            )
        use_threads = total >= 8 * decoding
        rest = total - decoding * (2 if use_threads else 1)
        return cls(
            total=total,
            chunk=max(_SMALLEST_CHUNK, min(_LARGEST_CHUNK, rest // 32)),
            unit=max(_SMALLEST_CHUNK, rest // 8),
            use_threads=use_threads,
            keys=rest - rest * 3 // 8,
        )
