"""The reader and writer threads, and one number of threads for torch and the kernels."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tiercache.kernels.cpu.kernel_threads import most_threads, set_threads

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tiercache.rows.backends.base import Backend, Event, Streams


_NICER = 10
"""Added to the niceness of a thread."""
_POLL_SECONDS = 0.5
"""Seconds between checks that a thread is alive."""


def nicer_thread(name: str, backend: Backend) -> ThreadPoolExecutor:
    """Return a thread of low priority that runs submitted calls in order."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"tiercache-{name}", initializer=partial(_begin, backend.streams))


def wait_for(thread: ThreadPoolExecutor) -> None:
    """Wait until a thread has run all submitted calls, was shut down, or ended by garbage collection."""
    with suppress(RuntimeError):  # it was shut down
        last = thread.submit(int)
        while not wait([last], _POLL_SECONDS).done:
            if not any(one.is_alive() for one in thread._threads):
                return


def seconds_of_waiting(future: Future[Any] | None, trained: Event) -> float:
    """Wait for a future, if any; return the seconds during which the device had no steps left.

    trained: the end of its steps, which is waited for only if the future is pending.
    """
    if future is None:
        return 0.0
    if not future.done():
        trained.wait()
    begun = time.perf_counter()
    future.exception()
    return time.perf_counter() - begun


def _begin(streams: Streams) -> None:
    streams.enter_thread()
    with suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)


def share_threads() -> None:
    """Make the kernels use as many threads as torch, on the calling thread.

    Both run on one OpenMP. The kernels' first use of it sets torch's number of threads to all cores, so it is restored.
    """
    num_threads = torch.get_num_threads()
    set_threads(min(num_threads, most_threads(), len(os.sched_getaffinity(0))))
    torch.set_num_threads(num_threads)
