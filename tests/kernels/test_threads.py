"""Threads of kernels: next to torch's, after a fork, and idle when a call has ended."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import pytest

from tiercache.kernels.cpu import kernel_threads

PROGRAM = """
import torch
torch.set_num_threads(1)
from tiercache.kernels.cpu.kernel_threads import set_threads, threads
threads()
set_threads(1)
print(torch.get_num_threads())
"""


def printed(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_starting_the_threads_of_kernels_leaves_the_thread_count_of_torch() -> None:
    """Both share one OpenMP; a count that changes within a run changes the bits of dense layers."""
    for layer in ("omp", "default"):
        assert printed(PROGRAM, NUMBA_THREADING_LAYER=layer) == "1"


SHARED = """
import torch
from tiercache.kernels.cpu.kernel_threads import threads
from tiercache.rows.threads import share_threads
share_threads()
print(torch.get_num_threads(), threads())
"""


def test_kernels_use_the_threads_of_torch_as_far_as_numba_has_them() -> None:
    assert printed(SHARED, OMP_NUM_THREADS="2", NUMBA_NUM_THREADS="1") == "2 1"


FORKED = """
import os
import numpy as np
from tiercache.kernels.cpu.gathering import map_slots
def use():
    slots = np.empty(100_000, np.int32)
    bounds, local = np.array([0, slots.size]), np.arange(7, dtype=np.int32)
    map_slots(np.full(slots.size, 6, np.int32), np.zeros(1, np.int64), bounds, local, slots)
    return bool((slots == 6).all())
assert use()
if os.fork() == 0:
    os._exit(0 if use() else 1)
assert os.wait()[1] == 0
"""


def test_a_process_that_ran_kernels_may_fork() -> None:
    """The child runs parallel kernels too, and nothing is written to standard error."""
    assert printed(FORKED) == ""


class Work:
    """A kernel with slow helpers: it records the threads that still run it."""

    def __init__(self) -> None:
        self.caller, self.begun, self.ended = threading.get_ident(), threading.Event(), 0
        self._lock = threading.Lock()
        self._entered = 0

    def __call__(self, what: str) -> None:
        """Make the first helper take half as long again as the caller."""
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
        assert self._entered == self.ended >= 1


@pytest.fixture(autouse=True)
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})


@pytest.mark.parametrize("what", ["all is well", "caller fails", "helper fails"])
def test_nobody_works_on_when_the_call_has_ended(what: str) -> None:
    """Memory that it writes to may be reused by then; an error on any thread is raised."""
    work = Work()
    if what == "all is well":
        kernel_threads.on_all_cores(work, 3, [(what,), (what,)])
    else:
        with pytest.raises(ArithmeticError, match="of a helper" if what == "helper fails" else "of the caller"):
            kernel_threads.on_all_cores(work, 3, [(what,)])
    work.assert_over()


def test_nobody_works_on_where_a_thread_could_not_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses the second: the first has ended before that is raised."""
    work, pool = Work(), kernel_threads._helpers(os.getpid())

    class OneThread:
        given = 0

        def submit(self, *what: object) -> object:
            if self.given:
                assert work.begun.wait(30)
                raise RuntimeError("can't start new thread")
            self.given = 1
            return pool.submit(*what)  # type: ignore[arg-type]

    one: Any = OneThread()
    monkeypatch.setattr(kernel_threads, "_helpers", lambda _: one)
    with pytest.raises(RuntimeError, match="new thread"):
        kernel_threads.on_all_cores(work, 3, [("",)])
    work.assert_over()


def test_a_process_that_was_forked_off_has_helpers_of_its_own() -> None:
    """It does not have its parent's threads, and work given to them would never be done."""
    kernel_threads.on_all_cores(Work(), 3, [("",)])
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # about forks with threads
        child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(60)
            work = Work()
            kernel_threads.on_all_cores(work, 3, [("",)])
            status = 0 if work.ended else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
