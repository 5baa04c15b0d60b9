"""Compilation of kernels: for the types of their annotations, without the GIL, cached on disk.

Any thread may call `serial` kernels; see `kernel_threads` for threads that may call `parallel` ones. Kernels that read
or step rows are compiled again for 16-bit dtypes if a table has such a dtype.
"""

import functools
import hashlib
import importlib
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numba
from llvmlite import binding  # type: ignore[import-untyped]

from tiercache.kernels.arrays import expect, parameters_of
from tiercache.kernels.cpu import kernel_threads  # which chooses the threading layer before numba does

_njit: Any = numba.njit
_config: Any = numba.config  # numba makes its attributes at import
_OPTIONS = {"nogil": True, "error_model": "numpy"}
# Without counting references to arrays: the counts are shared by all threads, and dearer than an inner loop.
_UNCOUNTED = {**_OPTIONS, "_nrt": False}

inlined: Any = _njit(forceinline=True, **_UNCOUNTED)
"""Decorator of a function that is inlined into its callers, so that constant arguments become constants."""
worker: Any = _njit(**_UNCOUNTED)
"""Decorator of the body of a parallel kernel's loop: a separate function that allocates nothing."""

_PACKAGE = Path(__file__).parents[1]
_lock = threading.Lock()

_Function = TypeVar("_Function", bound=Callable[..., Any])

KERNELS: list["Kernel"] = []
"""Every entry point, in the order of definition."""


@functools.cache
def cache_folder() -> Path | None:
    """Return the folder of compiled kernels of these sources, this CPU, numba and Python; None if none can be written.

    It is in NUMBA_CACHE_DIR if that is set, else next to the package, else in the user's cache.
    """
    sources = [path.read_bytes() for path in sorted([*_PACKAGE.glob("*.py"), *_PACKAGE.glob("cpu/*.py")])]
    cpu = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten(), _config.CPU_NAME, _config.CPU_FEATURES
    name = hashlib.sha256(b"\0".join([*sources, repr((cpu, numba.__version__, sys.version)).encode()])).hexdigest()
    package, user = _PACKAGE / "cpu" / "__pycache__", Path("~/.cache/tiercache")
    for parent in [Path(_config.CACHE_DIR)] if _config.CACHE_DIR else [package, user]:
        with suppress(OSError, RuntimeError):  # not writable, or no home folder
            folder = parent.expanduser() / f"kernels-{name[:16]}"
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            return folder
    return None


class Kernel:
    """A function that is compiled for the types of its annotations, at its first call or before."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.name, self.parameters = function.__name__, parameters_of(function)
        self.rows = [i for i, parameter in enumerate(self.parameters) if len(parameter.dtypes) > 1]
        """The parameters that are rows, for which it is compiled twice."""
        self.compiled: dict[bool, Any] = {}
        """The compiled functions, by whether they are for rows of 16-bit dtypes."""
        self._function, self._options = function, {**_OPTIONS, **options}

    def compile(self, *, narrow: bool = False) -> Any:
        """Return the compiled function, loaded from disk if it is cached; `narrow`: for rows of 16-bit dtypes."""
        with _lock:
            if narrow not in self.compiled:
                types = []
                for _, dtypes, ndim, written in self.parameters:
                    item = numba.from_dtype(dtypes[-1 if narrow else 0])
                    types.append(numba.types.Array(item, ndim, "C", readonly=not written) if ndim else item)
                folder, before = cache_folder(), _config.CACHE_DIR
                try:
                    _config.CACHE_DIR = str(folder)  # numba looks it up while it decorates
                    decorate = _njit(tuple(types), cache=folder is not None, **self._options)
                    self.compiled[narrow] = decorate(self._function)
                finally:
                    _config.CACHE_DIR = before
            return self.compiled[narrow]


def serial(function: _Function, **options: Any) -> _Function:
    """Compile an entry point that any thread may call; it raises ValueError for an array of another type."""
    kernel = Kernel(function, **options)
    KERNELS.append(kernel)
    compiled, rows = kernel.compiled, kernel.rows
    arrays = [i for i, parameter in enumerate(kernel.parameters) if parameter.ndim]

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        narrow = False
        try:
            for at in rows:
                narrow = arguments[at].itemsize == 2
            for at in arrays:  # the compiled function checks all but their alignment
                if not arguments[at].flags.aligned:
                    break
            else:
                return compiled[narrow](*arguments)
        except (KeyError, TypeError, AttributeError, IndexError):
            pass  # not compiled, or the wrong arguments
        for (name, dtypes, ndim, written), argument in zip(kernel.parameters, arguments, strict=False):
            if ndim:
                expect(name, argument, *dtypes, ndim=ndim, written=written)
        return kernel.compile(narrow=narrow)(*arguments)

    return call  # type: ignore[return-value] # it takes arguments by their places


def parallel(function: _Function) -> _Function:
    """Compile an entry point that runs on all threads; only the training thread may call it."""
    return serial(function, parallel=True)


def is_cached(*, narrow: bool = False) -> bool:
    """Return True if `prepare` has compiled every kernel on this machine: if not, it takes up to a minute."""
    return (folder := cache_folder()) is not None and folder.joinpath("narrow" if narrow else "wide").exists()


def prepare(notify: Callable[[str, int, int], None] | None = None, *, narrow: bool = False) -> None:
    """Compile every kernel, or load it from disk; `narrow`: also those for 16-bit dtypes.

    `notify` is called with the next kernel, the number done and the total, and once at the end.
    Call it on the training thread: it starts the threads of parallel kernels.
    """
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        importlib.import_module(f"tiercache.kernels.cpu.{path.stem}")
    kernel_threads.threads()
    tell = notify or (lambda *_: None)
    kernels = [(kernel, False) for kernel in KERNELS] + [(kernel, True) for kernel in KERNELS if kernel.rows and narrow]
    for done, (kernel, is_narrow) in enumerate(kernels):
        tell(kernel.name.strip("_").replace("_", " "), done, len(kernels))
        kernel.compile(narrow=is_narrow)
    tell("done", len(kernels), len(kernels))
    if (folder := cache_folder()) is not None:
        with suppress(OSError):  # the disk is full
            for name in ("wide", "narrow")[: 1 + narrow]:
                folder.joinpath(name).touch()
