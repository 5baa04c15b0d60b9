"""Compilation of kernels: cached on disk, without the GIL, on threads of oneTBB.

`serial` kernels may run on any thread. `parallel` kernels run on the training thread, and on the one that exchanges
rows of several ranks: oneTBB supports both at once. Its threads sleep without work, and a running thread takes the
work of one without a core. OpenMP's threads spin, and on shared cores two of them are many times slower than one
(docs/design/0024-threads.md).
"""

import ctypes
import functools
import hashlib
import os
import re
import threading
import types
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Annotated, Any, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numba
import numpy as np
from numba import extending
from numba.core import config
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target
from numba.core.types import Array
from numba.np.numpy_support import from_dtype

from tiercache.kernels.arrays import Matrix, Written, expect

_TWO_AXES, _WRITTEN = (get_args(mark[Any])[1] for mark in (Matrix, Written))


class Parameter(NamedTuple):
    """One parameter of a kernel."""

    name: str
    dtypes: Sequence["np.dtype[Any]"]
    """One; of rows two, float32 and that of the bits of 16-bit numbers: the kernel is compiled for each."""
    ndim: int
    """0: a number."""
    written: bool

    def type(self, *, narrow: bool) -> Any:
        """Return numba's type: an array that is only read may be read-only."""
        item = from_dtype(self.dtypes[-1 if narrow else 0])
        return Array(item, self.ndim, "C", readonly=not self.written) if self.ndim else item

    def check(self, argument: Any) -> None:
        """Raise ValueError where an argument is another array than the kernel wants."""
        if self.ndim:
            expect(self.name, argument, *self.dtypes, ndim=self.ndim, written=self.written)


def parameters_of(function: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters of a function that is annotated as `kernels.arrays` says."""
    hints = get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    return [_parameter(name, hint) for name, hint in hints.items()]


def _parameter(name: str, hint: Any) -> Parameter:
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if isinstance(kind, type):
        return Parameter(name, [np.dtype(marks[0] if marks else kind)], 0, written=False)
    kinds = get_args(kind) if get_origin(kind) in {types.UnionType, Union} else (kind,)
    return Parameter(name, [_dtype_of(one) for one in kinds], 2 if _TWO_AXES in marks else 1, written=_WRITTEN in marks)


def _dtype_of(array: Any) -> "np.dtype[Any]":
    """Return T of NDArray[T], which is ndarray[..., dtype[T]] before NumPy 2.5 and an alias with one argument since."""
    while arguments := get_args(array):
        array = arguments[-1]
    dtype: np.dtype[Any] = np.dtype(array)
    return dtype


def _load_tbb() -> bool:
    """Load oneTBB from its wheel, whose folder is not among those that numba's own part of it is linked with."""
    with suppress(PackageNotFoundError, OSError):
        for file in files("tbb") or ():
            if file.name in {"libtbb.so.12", "libtbb.12.dylib"}:
                ctypes.CDLL(str(file.locate()), mode=ctypes.RTLD_GLOBAL)
                return True
    return False


_HAS_TBB = _load_tbb()
# workqueue aborts when two threads run parallel kernels at once; it is only the last resort, where no OpenMP exists.
if "NUMBA_THREADING_LAYER_PRIORITY" not in os.environ:
    setattr(config, "THREADING_LAYER_PRIORITY", ["tbb", "omp", "workqueue"])  # noqa: B010 - numba makes its attributes

_njit: Any = numba.njit
_COMMON = {"nogil": True, "error_model": "numpy"}
_UNCOUNTED = {**_COMMON, "_nrt": False}
"""Without counting references to arrays: the counts are shared by all threads, and dearer than an inner loop."""

_MOST_CORES = 16

_P = ParamSpec("_P")
_R = TypeVar("_R")

KERNELS: list["Kernel"] = []
"""Every entry point, in the order of definition."""


@functools.cache
def _source_stamp(module: str) -> bytes:
    """Return a digest of a kernel module and of all kernel modules that it imports."""
    seen, waiting = {}, [module]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen[name] = Path(__file__).parents[1].joinpath(*name.split(".")).with_suffix(".py").read_bytes()
            waiting += re.findall(r"^from tiercache\.kernels\.([\w.]+) import", seen[name].decode(), re.MULTILINE)
    return hashlib.sha256(b"".join(seen[name] for name in sorted(seen))).digest()


@functools.cache
def cache_folder() -> Path | None:
    """Return the folder in which numba keeps compiled kernels; None where there is none that can be written."""
    locate: Any = FunctionCache
    try:
        return Path(locate(cache_folder.__wrapped__).cache_path)
    except (RuntimeError, OSError):
        return None


class Kernel:
    """A function that is compiled for the types of its annotations, when it is first called or before."""

    def __init__(self, function: Callable[..., Any], is_available: Callable[[], bool], **options: Any) -> None:
        self.name, self.parameters, self.is_available = function.__name__, parameters_of(function), is_available
        self.has_narrow = any(len(parameter.dtypes) > 1 for parameter in self.parameters)
        """True if it is also compiled for rows of 16-bit dtypes."""
        self.entry = _njit(**_COMMON, **options)(function)
        """The compiled function. It never compiles by itself; numbers are converted."""
        self.entry._can_compile = False
        try:
            self.compiler = _njit(cache=True, **_COMMON, **options)(function)
            # numba compares the stamp of the caller's file only, so an edited callee in another one would stay stale.
            stamp = _source_stamp(function.__module__.removeprefix("tiercache.kernels."))
            self.compiler._cache._cache_file._source_stamp = stamp
        except (RuntimeError, OSError):  # neither the package's folder nor the user's cache folder can be written
            self.compiler = _njit(**_COMMON, **options)(function)
        self._lock = threading.Lock()

    def _types(self, *, narrow: bool) -> tuple[Any, ...]:
        return tuple(parameter.type(narrow=narrow) for parameter in self.parameters)

    def compile(self, *, narrow: bool = False) -> None:
        """Compile it, or load it from disk; for 16-bit dtypes where `narrow` says so."""
        signature = self._types(narrow=narrow)
        with self._lock:
            if signature not in self.entry.overloads:
                self._forget_unreadable()
                self.compiler.compile(signature)
                self.entry.add_overload(self.compiler.overloads[signature])

    def _forget_unreadable(self) -> None:
        """Delete what another version left on disk if it names types that are gone: numba raises on reading it."""
        file = getattr(self.compiler._cache, "_cache_file", None)
        if file is not None:
            try:
                file._load_index()
            except Exception:
                Path(file._index_path).unlink(missing_ok=True)

    def compile_for(self, arguments: Sequence[Any]) -> None:
        """Compile it for some arguments. Raises ValueError, with what is wrong, where they are not of its types."""
        for parameter, argument in zip(self.parameters, arguments, strict=False):
            parameter.check(argument)
        self.compile(narrow=any(getattr(argument, "dtype", None) == np.uint16 for argument in arguments))

    def is_compiled(self, *, narrow: bool = False) -> bool:
        """Tell whether it is compiled, or lies compiled on disk, as its source is now, for this CPU."""
        signature = self._types(narrow=narrow)
        if signature in self.entry.overloads:
            return True
        try:
            index = self.compiler._cache._cache_file._load_index()
            cpu = cpu_target.target_context.codegen().magic_tuple()
        except Exception:
            return False
        return any(key[:2] == (signature, cpu) for key in index)


def _entry(
    function: Callable[_P, _R], is_available: Callable[[], bool] = lambda: True, **options: Any
) -> Callable[_P, _R]:
    """Make an entry point. Compiled code is tried first: numba refuses arguments that are not of its types.

    Whether arrays are aligned is all that it does not look at.
    """
    kernel = Kernel(function, is_available, **options)
    KERNELS.append(kernel)
    entry, arrays = kernel.entry, [i for i, parameter in enumerate(kernel.parameters) if parameter.ndim]

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            for at in arrays:
                if not arguments[at].flags.aligned:
                    break
            else:
                return entry(*arguments)
        except (TypeError, AttributeError, IndexError):
            pass
        kernel.compile_for(arguments)
        return entry(*arguments)

    return call  # type: ignore[return-value] # numba's kernels take arguments by their places


def serial(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile an entry point that any thread may call."""
    return _entry(function)


def serial_where(is_available: Callable[[], bool]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Compile an entry point, as `serial`, that some CPUs or systems do not have: then nobody may call it."""
    return functools.partial(_entry, is_available=is_available)


def parallel(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile an entry point that runs on all threads; only the training thread may call it."""
    return _entry(function, parallel=True)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a piece that is merged into its callers, so that constant arguments become constants."""
    return _njit(forceinline=True, **_UNCOUNTED)(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Make a function that emits LLVM instructions itself."""
    return extending.intrinsic(function)


def worker(function: Callable[..., Any]) -> Any:
    """Compile the body of a parallel kernel's loop: a separate function that allocates nothing."""
    return _njit(**_UNCOUNTED)(function)


def threads() -> int:
    """Return the number of threads that parallel kernels started by this thread use."""
    _launch()
    return int(numba.get_num_threads())


def most_threads() -> int:
    """Return the most threads that parallel kernels may use: the cores that numba found, or NUMBA_NUM_THREADS."""
    return int(getattr(config, "NUMBA_NUM_THREADS"))  # noqa: B009 - numba makes its attributes


def set_threads(num_threads: int) -> None:
    """Let parallel kernels started by this thread use `num_threads` threads: results keep their bits.

    Raises ValueError when it is below 1 or above `most_threads`.
    """
    _launch()
    numba.set_num_threads(num_threads)


def on_all_cores(kernel: Callable[..., None], parts: int, calls: Sequence[tuple[Any, ...]]) -> None:
    """Make independent calls of a serial kernel, each on every core of the process, `parts` at most.

    The calls of one kernel with the same arguments divide its work; a thread without work goes on to the next kernel.
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
        begun = [future for future in running if not future.cancel()]  # who has not begun by now finds nothing left
        wait(begun)
    for future in begun:
        future.result()


@functools.cache
def _helpers(_process: int) -> ThreadPoolExecutor:
    """Return the threads of this process, started at their first use; a fork has none of its parent's."""
    most = min(os.cpu_count() or 1, _MOST_CORES)
    return ThreadPoolExecutor(max(1, most - 1), thread_name_prefix="tiercache-switch")


@functools.cache
def _launch() -> None:
    """Start numba's threads.

    For oneTBB on this thread: it takes whoever starts it for the one that may fork. Who starts OpenMP's has its thread
    count set to all cores, and torch has the same OpenMP: on the training thread this would undo
    `torch.set_num_threads` in the middle of a run, so there a thread does it that ends.
    """
    layer = getattr(config, "THREADING_LAYER")  # noqa: B009 - numba makes its attributes
    if _HAS_TBB and layer in {"default", "tbb"}:
        numba.get_num_threads()
        return
    starter = threading.Thread(target=numba.get_num_threads)
    starter.start()
    starter.join()
