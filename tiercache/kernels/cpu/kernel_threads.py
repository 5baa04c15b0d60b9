"""Threads of kernels: oneTBB's for parallel kernels, and those of `on_all_cores`.

Parallel kernels run on the training thread, and on the thread that exchanges rows of several ranks: oneTBB supports
both at once. Its threads sleep without work, and a running thread takes the work of one without a core. OpenMP's
threads spin, and on shared cores two of them are many times slower than one (docs/design/0024-threads.md).
"""

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, files
from typing import Any

import numba

_MOST_CORES = 16
_config: Any = numba.config  # numba sets its attributes at import


def _load_tbb() -> bool:
    """Load oneTBB from its wheel, whose folder is not on the library path of numba's extension for it."""
    with suppress(PackageNotFoundError, OSError):
        for file in files("tbb") or ():
            if file.name in {"libtbb.so.12", "libtbb.12.dylib"}:
                ctypes.CDLL(str(file.locate()), mode=ctypes.RTLD_GLOBAL)
                return True
    return False


_HAS_TBB = _load_tbb()
# workqueue aborts if two threads run parallel kernels at once; it is only the last resort, without any OpenMP
if "NUMBA_THREADING_LAYER_PRIORITY" not in os.environ:
    _config.THREADING_LAYER_PRIORITY = ["tbb", "omp", "workqueue"]


def threads() -> int:
    """Return the number of threads that parallel kernels started by this thread use."""
    _launch()
    return int(numba.get_num_threads())


def most_threads() -> int:
    """Return the maximum number of threads that parallel kernels may use: the cores that numba found, or
    NUMBA_NUM_THREADS.
    """
    return int(_config.NUMBA_NUM_THREADS)


def set_threads(num_threads: int) -> None:
    """Let parallel kernels started by this thread use `num_threads` threads; results have the same bits.

    Raises ValueError if it is below 1 or above `most_threads`.
    """
    _launch()
    numba.set_num_threads(num_threads)


@functools.cache
def _launch() -> None:
    """Start numba's threads.

    oneTBB is started on this thread, because it assumes that the thread that starts it may fork. Starting OpenMP's
    threads sets the thread count to all cores, and torch shares the same OpenMP: on the training thread this would undo
    `torch.set_num_threads` in the middle of a run, so a temporary thread does it.
    """
    if _HAS_TBB and _config.THREADING_LAYER in {"default", "tbb"}:
        numba.get_num_threads()
        return
    starter = threading.Thread(target=numba.get_num_threads)
    starter.start()
    starter.join()


def on_all_cores(kernel: Callable[..., None], parts: int, calls: Sequence[tuple[Any, ...]]) -> None:
    """Make independent calls of a serial kernel, each on every core of the process, `parts` at most.

    The calls of one kernel with the same arguments divide its work; a thread without work moves to the next kernel.
    Runs on separate threads, which take no part in parallel kernels.
    """
    helpers = min(parts, len(os.sched_getaffinity(0)), _MOST_CORES) - 1

    def work() -> None:
        for arguments in calls:
            kernel(*arguments)

    running: list[Future[None]] = []
    try:
        for _ in range(helpers):
            running.append(_helpers(os.getpid()).submit(work))  # noqa: PERF401 - those before one that fails must be known
        work()
    finally:
        begun = [future for future in running if not future.cancel()]  # others would find no work
        wait(begun)
    for future in begun:
        future.result()


@functools.cache
def _helpers(_process: int) -> ThreadPoolExecutor:
    """Return the threads of this process, started at their first use; a fork does not have its parent's."""
    most = min(os.cpu_count() or 1, _MOST_CORES)
    return ThreadPoolExecutor(max(1, most - 1), thread_name_prefix="tiercache-switch")
