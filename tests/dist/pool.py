"""Processes that play the ranks of every test of a session, so that no test waits for torch to be imported.

``pool.run(3, body, number=5)`` calls ``body(ranks, number=5)`` on three ranks, in process groups made for this run, and
returns each one's result. Nothing here is imported before the thread counts are set.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from torch.distributed import TCPStore

MOST_RANKS = 4
LIMIT_SECONDS = 60.0
PATIENCE = 0.75
"""Share of a run's limit after which a rank gives up on others, so that it reports before the run is killed."""
START_SECONDS = 300.0
"""Time for ranks to import everything; not part of a run's limit."""
LAST_WORDS_SECONDS = 2.0
"""Time for ranks to exit after one of them died, and to write their stacks."""


@dataclass(frozen=True)
class Raised:
    """An error of a body, as reported to the test."""

    kind: str
    sentence: str
    cause: str | None
    text: str


class RunFailedError(AssertionError):
    """A run did not return on every rank; ``errors`` has each rank's error, None without one."""

    def __init__(self, message: str, errors: list[Raised | None]) -> None:
        super().__init__(message)
        self.errors = errors


class RanksPool:
    """Up to four ranks on the CPU, each a process with one thread for torch and one for the kernels."""

    def __init__(self, folder: Path, most: int = MOST_RANKS) -> None:
        self._folder = folder
        self._most = most
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._store: TCPStore | None = None
        self._runs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def start(self) -> None:
        """Start the processes, unless they are there."""
        if not self._processes:
            self._start()

    def kill(self, *ranks: int) -> None:
        """Kill the processes of some ranks, during a run, or all, so that the next run starts new ones."""
        for rank in ranks:
            self._processes[rank].kill()
        if not ranks:
            self._kill()

    def run(
        self, size: int, body: str | Callable[..., Any], *, limit: float = LIMIT_SECONDS, **arguments: Any
    ) -> list[Any]:
        """Call ``body`` on ``size`` ranks with JSON arguments; return JSON values and arrays by rank.

        It is a function of a module, or "module:name".

        After ``limit`` seconds, or when a rank dies, all processes are killed and the test fails with all ranks'
        output; the next run starts new ones.
        """
        told = self._call(size, body, limit, arguments)
        errors = [answer if isinstance(answer, Raised) else None for answer in told]
        if any(errors):
            words = [f"rank {rank}: {error.text}" for rank, error in enumerate(errors) if error]
            raise RunFailedError("\n".join([f"{_name_of(body)} on {size} ranks", *words, self._output(size)]), errors)
        return told

    def errors(
        self, size: int, body: str | Callable[..., Any], *, limit: float = LIMIT_SECONDS, **arguments: Any
    ) -> list[tuple[str, str] | None]:
        """Do the same as ``run``, for bodies that raise: each rank's error as (type, message), None if it returned."""
        told = self._call(size, body, limit, arguments)
        return [(answer.kind, answer.sentence) if isinstance(answer, Raised) else None for answer in told]

    def _call(self, size: int, body: str | Callable[..., Any], limit: float, arguments: dict[str, Any]) -> list[Any]:
        self.start()
        body = _name_of(body)
        self._runs += 1
        until = time.monotonic() + limit
        for pipe in self._pipes[:size]:
            pipe.send((size, self._runs, body, limit, arguments))
        told: dict[int, Any] = {}
        while len(told) < size and (left := until - time.monotonic()) > 0:
            waiting = [self._pipes[rank] for rank in range(size) if rank not in told]
            wait(waiting, timeout=left)
            for rank in range(size):
                if rank in told or not self._pipes[rank].poll():
                    continue
                try:
                    told[rank] = self._pipes[rank].recv()
                except EOFError:  # its process is gone: the others get a moment to report
                    told[rank] = Raised("Dead", f"rank {rank} died", None, "died")
                    until = min(until, time.monotonic() + LAST_WORDS_SECONDS)
        if len(told) == size and not any(isinstance(a, Raised) and a.kind == "Dead" for a in told.values()):
            return [told[rank] for rank in range(size)]
        raise self._failure(size, body, limit, told)

    def _failure(self, size: int, body: str, limit: float, told: dict[int, Any]) -> RunFailedError:
        hanging = [rank for rank in range(size) if rank not in told]
        for rank in hanging:
            os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)  # faulthandler writes its threads' stacks
        if hanging:
            time.sleep(LAST_WORDS_SECONDS / 4)
        words = [f"{body} on {size} ranks did not return everywhere within {limit:g} seconds; hanging: {hanging}"]
        words += [f"rank {rank}: {answer.text}" for rank, answer in told.items() if isinstance(answer, Raised)]
        words.append(self._output(size))
        self._kill()
        errors = [told[rank] if isinstance(told.get(rank), Raised) else None for rank in range(size)]
        return RunFailedError("\n".join(words), errors)

    def _output(self, size: int) -> str:
        return "\n".join(
            f"--- output of rank {rank}:\n{self._log(rank).read_text(errors='replace')}" for rank in range(size)
        )

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.txt"

    def _start(self) -> None:
        from torch.distributed import TCPStore

        from tiercache.kernels.cpu.compile import is_cached, prepare

        if not is_cached(narrow=True):  # else every rank compiles them, within the limit of its first run
            prepare(None, narrow=True)
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        for rank in range(self._most):
            here, there = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, there, self._store.port, str(self._log(rank))), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        until = time.monotonic() + START_SECONDS
        for pipe in self._pipes:
            if not pipe.poll(max(0.0, until - time.monotonic())):
                self._kill()
                raise RunFailedError(f"the ranks did not start within {START_SECONDS:g} seconds", [])
            pipe.recv()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None


def _name_of(body: str | Callable[..., Any]) -> str:
    return body if isinstance(body, str) else f"{body.__module__}:{body.__qualname__}"


def serve(rank: int, pipe: Connection, port: int, log: str) -> None:
    """Be one rank: run bodies until the pipe closes."""
    with Path(log).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    import torch
    from torch.distributed import TCPStore

    torch.set_num_threads(1)
    importlib.import_module("tests.dist.warm")
    pipe.send("ready")
    store = TCPStore("localhost", port, is_master=False)
    with suppress(EOFError):
        while True:
            size, run, body, limit, arguments = pipe.recv()
            os.truncate(log, 0)
            os.lseek(1, 0, os.SEEK_SET)
            try:
                answer = _run(rank, size, run, store, body, limit, arguments)
            except Exception as error:
                cause = None if error.__cause__ is None else type(error.__cause__).__name__
                answer = Raised(type(error).__name__, str(error), cause, traceback.format_exc())
            pipe.send(answer)


def _run(rank: int, size: int, run: int, store: TCPStore, body: str, limit: float, arguments: dict[str, Any]) -> Any:
    import torch.distributed as dist

    from tiercache.dist.communicator import communicator_of

    module, name = body.split(":")
    patience = limit * PATIENCE
    function = getattr(importlib.import_module(module), name)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"run-{run}", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=patience),
    )
    try:
        dist.distributed_c10d.default_pg_timeout = timedelta(seconds=patience)
        ranks = communicator_of()
        try:
            return function(ranks, **arguments)
        finally:
            ranks.close()
    finally:
        dist.destroy_process_group()
