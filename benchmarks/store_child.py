"""Work in a forked child that may die at any moment, and what it said before."""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_PATIENCE_SECONDS = 120.0
"""A child that takes longer hangs."""


class Teller:
    """Tells the parent, by a pipe and without a buffer, what is to outlive the process."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.begun = self.done = -1
        """What was noted last."""

    def note(self, *, begun: int | None = None, done: int | None = None) -> None:
        """Note a commit: that it may be found from now on, or that it must be."""
        if begun is not None:
            self.begun = begun
            self.say("begun", begun)
        if done is not None:
            self.done = done
            self.say("done", done)

    def say(self, kind: str, value: Any) -> None:
        """Tell a plain value; of two of one kind the later counts."""
        os.write(self._handle, json.dumps([kind, value]).encode() + b"\n")


@dataclass(kw_only=True, slots=True)
class Ended:
    """A child that is no more."""

    signal: int
    """That ended it; 0: it came to its end."""
    said: dict[str, Any] = field(default_factory=dict)
    """By kind; "error" where it raised."""

    @property
    def killed(self) -> bool:
        """Whether it was killed as it was meant to be."""
        return self.signal == signal.SIGKILL

    @property
    def failure(self) -> str | None:
        """What ended it, in words, if neither its end nor SIGKILL."""
        if self.signal and not self.killed:
            return f"it ended with {signal.Signals(self.signal).name}"
        error: str | None = self.said.get("error")
        return error

    @property
    def begun(self) -> int:
        """The newest commit that may be found; -1 where none was begun."""
        return int(self.said.get("begun", -1))

    @property
    def done(self) -> int:
        """The newest commit that must be found; -1 where none was done."""
        return int(self.said.get("done", -1))


def run_in_child(work: Callable[[Teller], None], *, kill_after: float | None = None) -> Ended:
    """Fork, let the child work, and return when it has ended; after ``kill_after`` seconds it is killed.

    The caller must have one thread and no store open: an LMDB environment never crosses a fork.
    """
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        _work(work, Teller(writing))
    os.close(writing)
    deadline = time.monotonic() + (_PATIENCE_SECONDS if kill_after is None else kill_after)
    data, hung = b"", False
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(process, signal.SIGKILL)
            hung, deadline = kill_after is None, deadline + _PATIENCE_SECONDS
            continue
        part = os.read(reading, 1 << 16)
        if not part:
            break
        data += part
    os.close(reading)
    _, status = os.waitpid(process, 0)
    said = dict(json.loads(line) for line in data.split(b"\n")[:-1])
    if hung:
        said["error"] = f"it had not ended after {_PATIENCE_SECONDS:.0f} seconds"
    return Ended(signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, said=said)


def _work(work: Callable[[Teller], None], teller: Teller) -> None:
    """Work and leave the process without what an interpreter does at its end."""
    try:
        work(teller)
    except BaseException:  # the parent shows it
        teller.say("error", traceback.format_exc())
    finally:
        os._exit(0)
