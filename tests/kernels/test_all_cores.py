"""Work that is shared by all cores has ended when the call has, however that ends."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from typing import TYPE_CHECKING

import pytest

from tiercache.kernels.cpu import jit

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor


class Work:
    """A kernel that helpers are slow at: it notes who is still at it."""

    def __init__(self) -> None:
        self.caller, self.begun, self.ended = threading.get_ident(), threading.Event(), 0
        self._lock = threading.Lock()
        self._entered = 0

    def __call__(self, what: str) -> None:
        """Take the first thread that helps half as long again as the caller."""
        if threading.get_ident() != self.caller:
            with self._lock:
                self._entered += 1
            self.begun.set()
            time.sleep(0.05)
            with self._lock:
                self.ended += 1
            if what == "helper fails":
                raise ArithmeticError("of a helper")
            return
        assert self.begun.wait(30)
        if what == "caller fails":
            raise ArithmeticError("of the caller")

    def assert_over(self) -> None:
        """Nobody is at it any more."""
        assert self._entered == self.ended >= 1


@pytest.fixture(autouse=True)
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller and up to two helpers."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})


@pytest.mark.parametrize("what", ["all is well", "caller fails", "helper fails"])
def test_nobody_works_on_when_the_call_has_ended(what: str) -> None:
    """Memory that it writes to may be another's by then; what went wrong on any thread is raised."""
    work = Work()
    if what == "all is well":
        jit.on_all_cores(work, 3, [(what,), (what,)])
    else:
        with pytest.raises(ArithmeticError, match="of a helper" if what == "helper fails" else "of the caller"):
            jit.on_all_cores(work, 3, [(what,)])
    work.assert_over()


def test_nobody_works_on_where_a_thread_could_not_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses the second: the first has ended before that is raised."""
    work, pool = Work(), jit._helpers(os.getpid())

    class OneThread:
        """Takes one thing to do."""

        given = 0

        def submit(self, *what: object) -> object:
            if self.given:
                assert work.begun.wait(30)
                raise RuntimeError("can't start new thread")
            self.given = 1
            return pool.submit(*what)  # type: ignore[arg-type]

    one: ThreadPoolExecutor = OneThread()  # type: ignore[assignment]
    monkeypatch.setattr(jit, "_helpers", lambda _: one)
    with pytest.raises(RuntimeError, match="new thread"):
        jit.on_all_cores(work, 3, [("",)])
    work.assert_over()


def test_a_process_that_was_forked_off_has_helpers_of_its_own() -> None:
    """Its parent's threads are not there, and work given to them would never be done."""
    jit.on_all_cores(Work(), 3, [("",)])
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of forks beside threads
        child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(60)
            work = Work()
            jit.on_all_cores(work, 3, [("",)])
            status = 0 if work.ended else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
