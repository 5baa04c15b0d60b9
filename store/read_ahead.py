"""Reading ahead: what comes next is read while what is there is worked on."""

from __future__ import annotations

import mmap
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future, ThreadPoolExecutor

    from numpy.typing import NDArray

Item = TypeVar("Item", bound=tuple[Any, ...])
Result = TypeVar("Result")


def read_ahead(
    pool: ThreadPoolExecutor, call: Callable[..., Result], items: Iterable[Item], *, most: int
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with ``call(*item)``, in order; up to ``most`` calls are made ahead, by the threads of ``pool``.

    Items are taken on the caller's thread. An error of a call is raised where its result would come.
    """
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    for item in items:
        waiting.append((item, pool.submit(call, *item)))
        if len(waiting) > most:
            first, result = waiting.popleft()
            yield first, result.result()
    for first, result in waiting:
        yield first, result.result()


def huge_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Return page-aligned memory, in huge pages where there are any: past the page cache those fill twice as fast."""
    memory = mmap.mmap(-1, max(1, num_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
