"""A device that runs the kernels' sources on the CPU, with the launches that a GPU gets."""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from tests.kernels.shim.memory import GuardedMemory, reserved
from tiercache.kernels.arrays import View
from tiercache.kernels.cuda.launch import BLOCK_THREADS, Argument, describe, source

ORDERS = ("forward", "reversed", "random")
HEADER = Path(__file__).with_name("shim.h")
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-w")
CHECKED = ("-fsanitize=bounds,alignment", "-fsanitize-undefined-trap-on-error")
COUNTED = ("-fsanitize=thread", "-include", str(HEADER.with_name("traffic.h")))


_RUNNING = threading.Lock()
"""Held while a kernel runs: the linker has one copy of the threads of a block for all sources."""


class KernelError(Exception):
    """A kernel did something that would be wrong on a GPU: the error says which block and thread, and what."""


FOLDER = Path(__file__).with_name("__pycache__")
"""The folder of compiled libraries, named by the hash of all inputs: compiled once for all processes and sessions."""


@functools.cache
def _compiler() -> str:
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    return "\n".join([version, *FLAGS, *CHECKED, *(path.read_text() for path in sorted(HEADER.parent.glob("*.h")))])


@functools.cache
def compiled(text: str, *, counted: bool = False) -> ctypes.CDLL:
    """Return the library of a kernel source, compiled on first use; counted: with memory accesses counted."""
    if shutil.which("g++") is None:
        pytest.skip("g++, which compiles CUDA sources for the CPU, is not installed")
    expanded = subprocess.run(["g++", "-E", "-x", "c++", "-"], input=text, capture_output=True, text=True, check=True)
    pattern = r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\("
    names = re.findall(pattern, re.sub(r"^#.*\n", "", expanded.stdout, flags=re.MULTILINE))
    calls = "".join(
        f'extern "C" const char* run_{name}(void** words, const unsigned* grid, const unsigned* block, int order,'
        f" uint64_t seed, int flush) {{ return shim::run([](void** w) {{ shim::call({name}, w); }}, words, grid, block,"
        " order, seed, flush); }\n"
        for name in names
    )
    whole = f'#include "{HEADER}"\n{text}\n{calls}'
    library = FOLDER / f"shim-{hashlib.sha256((_compiler() + whole + str(counted)).encode()).hexdigest()[:32]}.so"
    if not library.exists():
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            written, part, made = (Path(folder) / f"kernel.{end}" for end in ("cpp", "o", "so"))
            written.write_text(whole)
            kind = COUNTED if counted else CHECKED
            for command in (
                (*FLAGS, *kind, "-c", str(written), "-o", str(part)),
                ("-shared", str(part), "-o", str(made)),
            ):
                done = subprocess.run(["g++", *command], capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr
            made.replace(library)
    return ctypes.CDLL(str(library))


class Traffic(NamedTuple):
    """Bytes of one array that a launch reads and writes."""

    read: int
    written: int
    sectors_read: int  # bytes of the distinct 32-byte sectors that were read: those that an unlimited cache would load
    sectors_written: int


class ShimDevice:
    """A Device whose kernels run in this process; its arrays are NumPy arrays made by `place` and `empty`.

    ``order``: how the threads of a block take turns. ``changed`` edits a source before it is compiled, to plant errors.
    ``flush`` treats subnormal numbers as zero. One SM, so that small launches have more work than warps. ``counted``
    makes ``traffic`` count the bytes that launches read and write, by kernel and address of an array.
    """

    num_sms = 1

    def __init__(
        self,
        order: str = "forward",
        seed: int = 0,
        changed: Callable[[str, str], str] | None = None,
        *,
        flush: bool = False,
        counted: bool = False,
    ) -> None:
        self.memory = GuardedMemory(at_end=order != "reversed")
        self.launches: list[str] = []
        self.traffic: dict[str, dict[int, Traffic]] = {}
        self._counted = counted
        self._order, self._seed, self._changed, self._flush = ORDERS.index(order), seed, changed, flush

    def place(self, array: Any) -> NDArray[Any]:
        return self.memory.place(np.ascontiguousarray(array))

    def empty(self, size: int, dtype: DTypeLike) -> NDArray[Any]:
        return self.memory.empty((size,), dtype)

    def describe(self, array: Any) -> View | None:
        """Return the location of an array of NumPy, or a tensor of torch."""
        return describe(array, "__array_interface__")

    def put(self, table: NDArray[Any]) -> NDArray[Any]:
        return self.place(table.reshape(-1).view(np.uint8))

    def table(self, array: NDArray[Any]) -> NDArray[Any]:
        return self.put(array)

    def read(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.copy()

    def sort(self, keys: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        order = np.argsort(keys, kind="stable")
        return self.place(keys[order]), self.place(order)

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Argument]) -> None:
        """Run a kernel to its end. Raises KernelError."""
        name, function = kernel.split(".")
        self.launches.append(kernel)
        text = source(name)
        library = compiled(self._changed(name, text) if self._changed else text, counted=self._counted)
        tables = [self.put(a) if isinstance(a, np.ndarray) and a.ndim else a for a in arguments]
        held = [_word(a) for a in tables]
        words = (ctypes.c_void_p * len(held))(*(ctypes.addressof(word) for word in held))
        run = getattr(library, f"run_{function}")
        run.restype = ctypes.c_char_p
        run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_int]
        grid, block = (ctypes.c_uint * 3)(blocks, 1, 1), (ctypes.c_uint * 3)(BLOCK_THREADS, 1, 1)
        with _RUNNING:
            arrays = self.memory.ranges if self._counted else np.empty((0, 2), np.uint64)
            if self._counted:
                library.traffic_begin(ctypes.c_void_p(arrays.ctypes.data), ctypes.c_int64(len(arrays)))
            trouble = run(words, grid, block, self._order, self._seed, self._flush)
            if self._counted:
                counts = np.empty((len(arrays), len(Traffic._fields)), np.uint64)
                library.traffic_end(ctypes.c_void_p(counts.ctypes.data))
                found = {int(first): Traffic(*map(int, row)) for (first, _), row in zip(arrays, counts, strict=True)}
                self.traffic[kernel] = {address: one for address, one in found.items() if any(one)}
        if trouble is not None:
            raise KernelError(f"{kernel}: {trouble.decode()}")
        self.memory.check()

    def array(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        return self.memory.empty(shape, dtype)

    def large(self, rows: int, width: int) -> NDArray[np.float32]:
        """Return zeros that take memory only when they are used; not guarded."""
        return reserved(rows, width)

    def close(self) -> None:
        self.memory.close()


def _word(argument: Any) -> Any:
    if isinstance(argument, np.ndarray):
        if not argument.ndim:
            return (ctypes.c_char * argument.nbytes).from_buffer(argument)
        argument = argument.ctypes.data
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int64(argument)


def device_for(order: str) -> Any:
    """Return the device of the parity tests: the shim with an order of threads, or the GPU of `make test-gpu`."""
    if not os.environ.get("TIERCACHE_TEST_GPU"):
        return ShimDevice(order)
    from tests.kernels.gpu import GpuDevice

    return GpuDevice()


def devices() -> Iterator[Any]:
    """Yield a device for each order of threads, one after another; a GPU has its own order."""
    for order in ORDERS[:1] if os.environ.get("TIERCACHE_TEST_GPU") else ORDERS:
        device = device_for(order)
        yield device
        device.close()
