"""Ranks without torch: threads of one process, or forked processes that may be killed."""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tiercache.errors import RankError

SECONDS = 60.0
"""Time-out for a rank."""


class _Agreeing:
    """The methods of a meeting built on ``all_gather_object``."""

    rank: int
    size: int

    def agree(self, what: str, error: BaseException | None = None) -> None:
        told = self.all_gather_object(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, sentence in enumerate(told):
            if sentence is not None:
                raise RankError(f"rank {rank} failed while {what}: {sentence}")

    @contextmanager
    def raise_on_all(self, what: str) -> Iterator[None]:
        """Run the body on each rank, without a meeting inside; if one fails, all raise."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.agree(what, error)

    def all_gather_object(self, mine: Any, what: str = "") -> list[Any]:
        """Gather an object from each rank."""
        raise NotImplementedError

    def all_reduce_min(self, values: Sequence[int], what: str = "") -> list[int]:
        return [min(column) for column in zip(*self.all_gather_object([*values], what), strict=True)]


class _Threads(_Agreeing):
    """A rank that is a thread."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(shared)
        self._shared, self._barrier = shared, barrier

    def all_gather_object(self, mine: Any, what: str = "") -> list[Any]:
        try:
            self._barrier.wait()
            self._shared[self.rank] = json.dumps(mine)
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankError("a rank left, or gave no answer") from error
        return [json.loads(value) for value in self._shared]


def meet(size: int, body: Callable[[Any], Any]) -> list[Any]:
    """Run ``body(ranks)`` on ``size`` threads; returns each one's result or error, in rank order."""
    shared, barrier = [None] * size, threading.Barrier(size, timeout=SECONDS)

    def run(rank: int) -> Any:
        try:
            return body(_Threads(rank, shared, barrier))
        except Exception as error:  # the test checks it
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


class Processes(_Agreeing):
    """A rank in a process: rank 0 has a socket to each other one, the others one to rank 0."""

    def __init__(self, rank: int, size: int, sockets: Sequence[socket.socket]) -> None:
        self.rank, self.size = rank, size
        self._sockets = sockets
        self._files = [one.makefile("rwb") for one in sockets]
        for one in sockets:
            one.settimeout(SECONDS)

    def all_gather_object(self, mine: Any, what: str = "") -> list[Any]:
        """Gather an object from each rank. Raises RankError if one is gone."""
        try:
            if self.rank == 0:
                told = [mine, *(self._hear(i) for i in range(self.size - 1))]
                for i in range(self.size - 1):
                    self._say(i, told)
                return json.loads(json.dumps(told))
            self._say(0, mine)
            return self._hear(0)
        except OSError as error:
            raise RankError("a rank left, or gave no answer") from error

    def _say(self, index: int, value: Any) -> None:
        self._files[index].write(json.dumps(value).encode() + b"\n")
        self._files[index].flush()

    def _hear(self, index: int) -> Any:
        line = self._files[index].readline()
        if not line.endswith(b"\n"):
            raise ConnectionResetError
        return json.loads(line)
