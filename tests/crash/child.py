"""Work in forked processes that may die at any moment, and the messages they sent before."""

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from socket import socket
from typing import Any

_PATIENCE_SECONDS = 120.0  # processes that take longer are considered hung


class Teller:
    """Sends facts that must outlive the process to the parent, through an unbuffered pipe."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.phase = ""  # the current activity, if a workload sets it; recorded with the points
        self.begun = self.done = -1  # the last noted commits

    def note(self, *, begun: Any = None, done: Any = None) -> None:
        """Note a commit that may exist from now on (begun), or must exist (done)."""
        if begun is not None:
            self.begun = begun
            self.say("begun", begun)
        if done is not None:
            self.done = done
            self.say("done", done)

    def say(self, kind: str, value: Any) -> None:
        os.write(self._handle, json.dumps([kind, value]).encode() + b"\n")


@dataclass(kw_only=True, slots=True)
class Ended:
    """The result of processes that have ended."""

    signals: list[int]  # the signals that ended them; 0: a normal exit
    said: list[list[Any]] = field(default_factory=list)  # kinds and values; "error" if one raised

    def of(self, kind: str) -> list[Any]:
        return [value for what, value in self.said if what == kind]

    @property
    def killed(self) -> int:
        return self.signals.count(signal.SIGKILL)

    @property
    def failure(self) -> str | None:
        """Describe the cause of death, unless all ended normally or by SIGKILL."""
        for number in self.signals:
            if number not in {0, signal.SIGKILL}:
                return f"it ended with {signal.Signals(number).name}"
        return next(iter(self.of("error")), None)


def run(
    work: Callable[[int, Teller], None],
    *,
    processes: int = 1,
    sockets: Sequence[socket] = (),
    kill_after: float | None = None,
    victim: int | None = None,
) -> Ended:
    """Fork children that each call ``work(rank, teller)``, and return when all have ended.

    After ``kill_after`` seconds the victim is killed; None: all. Several children form their own process group.
    ``sockets`` belong to the children: the parent closes them. The parent must have one thread and no open store: an
    LMDB environment never crosses a fork.
    """
    reading, writing = os.pipe()
    pids: list[int] = []
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            if processes > 1:
                try:
                    os.setpgid(0, pids[0] if pids else 0)
                except OSError:  # the first one has already exited
                    os.setpgid(0, 0)
            os.close(reading)
            _work(work, rank, Teller(writing))
        pids.append(pid)
        if processes > 1:
            with suppress(OSError):
                os.setpgid(pid, pids[0])
    for one in sockets:
        one.close()
    os.close(writing)
    victims = pids if victim is None else [pids[victim]]
    data, hung = _read(reading, pids, victims, kill_after)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    signals = [os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0 for status in statuses]
    said = [json.loads(line) for line in data.split(b"\n")[:-1]]
    if hung:
        said.append(["error", f"it had not ended after {_PATIENCE_SECONDS:.0f} seconds"])
    return Ended(signals=signals, said=said)


def _read(handle: int, pids: list[int], victims: list[int], kill_after: float | None) -> tuple[bytes, bool]:
    """Return all data from a pipe until the last process has ended, and True if a hung one was killed."""
    data, due, hung = b"", kill_after is not None, False
    deadline = time.monotonic() + (_PATIENCE_SECONDS if kill_after is None else kill_after)
    while True:
        ready, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            for pid in victims if due else pids:
                os.kill(pid, signal.SIGKILL)  # it has not been reaped, so its pid cannot be reused
            hung, due, deadline = hung or not due, False, time.monotonic() + _PATIENCE_SECONDS
            continue
        part = os.read(handle, 1 << 16)
        if not part:
            os.close(handle)
            return data, hung
        data += part


def _work(work: Callable[[int, Teller], None], rank: int, teller: Teller) -> None:
    try:
        work(rank, teller)
    except BaseException:  # the parent prints it
        teller.say("error", traceback.format_exc())
    finally:
        os._exit(0)
