"""Reading ahead: what comes next is read while what is there is worked on."""

from __future__ import annotations

from collections import deque
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future, ThreadPoolExecutor


Item = TypeVar("Item", bound=tuple[Any, ...])
Result = TypeVar("Result")


def read_ahead(
    pool: ThreadPoolExecutor, call: Callable[..., Result], items: Iterable[Item], *, most: int
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with ``call(*item)``, in order; up to ``most`` calls are made ahead, by the threads of ``pool``.

    Items are taken on the caller's thread, which makes the call itself where there is only one: no thread is begun for
    it. An error of a call is raised where its result would come.
    """
    coming = iter(items)
    begin = list(islice(coming, 2))
    if len(begin) == 1:
        yield begin[0], call(*begin[0])
        return
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    for item in chain(begin, coming):
        waiting.append((item, pool.submit(call, *item)))
        if len(waiting) > most:
            first, result = waiting.popleft()
            yield first, result.result()
    for first, result in waiting:
        yield first, result.result()
