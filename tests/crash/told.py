"""Calls that report progress and die at one of its events, in processes of the session's fork server."""

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

from tests.crash.schedule import die

_CONTEXT = multiprocessing.get_context("forkserver")
_PATIENCE_SECONDS = 120


class Told:
    """A progress function that counts its events and dies at one of them; -1: at none."""

    def __init__(self, fatal: int) -> None:
        self.events, self._fatal = 0, fatal

    def __call__(self, *_: object) -> None:
        self.events += 1
        if self.events == self._fatal:
            die()


def start(work: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    process = _CONTEXT.Process(target=work, args=arguments)
    process.start()
    return process


def finish(process: ForkServerProcess) -> int:
    """Wait for a process and return its end: success or kill -9."""
    process.join(_PATIENCE_SECONDS)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode
