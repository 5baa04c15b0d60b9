"""The CUDA device: kernels compiled by NVRTC and launched through CuPy. The only module that imports CuPy.

CuPy is imported only when a device is opened or a kernel compiled. Its RawModule is not used to compile: it adds
-ftz=true after the given options, and float32 below 2^-126 would be zero only on GPUs.
"""

import functools
import hashlib
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from struct import unpack_from
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tiercache.distribution import install_command
from tiercache.kernels.arrays import View
from tiercache.kernels.cuda.cuda_errors import CudaError, NoGpuError
from tiercache.kernels.cuda.launch import BLOCK_THREADS, Argument, Arrays, describe, source

_DIGEST = hashlib.sha256().digest_size
_IN_MEMORY: dict[bytes, bytes] = {}


def cached_code(folder: Path | None, name: str, inputs: str, make: Callable[[], bytes]) -> bytes:
    """Return the code of `make`: from memory, else from the file `name` in a folder, else made and then stored.

    inputs: everything that the code depends on. Without a writable folder, it is cached in memory only.
    """
    key = hashlib.sha256(inputs.encode()).digest()
    if key not in _IN_MEMORY:
        path = None if folder is None else folder / name
        code = None if path is None else _read(path, key)
        if code is None:
            code = make()
            if path is not None:
                with suppress(OSError):  # read-only, or full: compile again next time
                    _write(path, key, code)
        _IN_MEMORY[key] = code
    return _IN_MEMORY[key]


def _read(path: Path, key: bytes) -> bytes | None:
    """Return the code in a complete file of the same inputs; None otherwise."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    code = content[2 * _DIGEST :]
    return code if content[: 2 * _DIGEST] == key + hashlib.sha256(code).digest() else None


def _write(path: Path, key: bytes, code: bytes) -> None:
    """Write a file in one step: several processes may write it at once."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        draft.write_bytes(key + hashlib.sha256(code).digest() + code)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""The architectures for which tests compile every kernel; a GPU gets code for its own."""

# The CPU's bits: no fused multiply-add, small numbers are not flushed to zero, quotients and roots are the nearest.
_OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
_OLDEST = (8, 0)
_KEPT_TABLES, _KEPT_BYTES = 256, 64 << 10  # 16 MiB of a GPU at most
_PORTABLE, _MAPPED = 1, 2  # flags of cudaHostRegister
_NO_DEVICE = 100  # cudaErrorNoDevice
_INSTALL = f"run `{install_command('cuda13')}`, or `{install_command('cuda12')}` for a driver of CUDA 12"


def sources() -> tuple[str, ...]:
    """Return the names of all kernel sources."""
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.cu")))


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise CudaError(f"CuPy cannot be imported ({error}): {_INSTALL}.") from error
    return cupy


def _nvrtc() -> Any:
    _import_cupy()
    from cupy_backends.cuda.libs import nvrtc

    try:
        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        said = str(error).strip().splitlines()[0]
        raise CudaError(f"NVRTC, CUDA's compiler, cannot be loaded ({said}): {_INSTALL}.") from error
    return nvrtc


def compile_source(name: str, architecture: str) -> bytes:
    """Compile `name`.cu; needs NVRTC, but no driver or GPU. A device loads the result, and nothing else.

    architecture: such as "sm_90", for machine code, or "compute_90", for PTX, which a driver compiles when it loads it.
    Raises CudaError if NVRTC is missing, or with the compiler's log.
    """
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(source(name), f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*_OPTIONS, f"-arch={architecture}"))
        return (
            _whole(bytes(nvrtc.getCUBIN(program))) if architecture.startswith("sm_") else bytes(nvrtc.getPTX(program))
        )
    except nvrtc.NVRTCError as error:
        said = nvrtc.getProgramLog(program) or error
        raise CudaError(f"{name}.cu does not compile for {architecture}: {said}") from error
    finally:
        nvrtc.destroyProgram(program)


def _whole(cubin: bytes) -> bytes:
    """Return a cubin with its last byte, a zero that CuPy drops: without it, cuobjdump refuses the file."""
    if cubin[:4] != b"\x7fELF":
        return cubin
    (begin,), (size, count) = unpack_from("<Q", cubin, 32), unpack_from("<HH", cubin, 54)
    return cubin + b"\0" if begin + size * count == len(cubin) + 1 else cubin  # program headers are at its end


def compile_all(architecture: str) -> dict[str, bytes]:
    """Compile every kernel source for an architecture; returns the code of each."""
    return {name: compile_source(name, architecture) for name in sources()}


def architecture_of(capability: tuple[int, int]) -> str:
    """Return the target for a GPU: its own architecture, or PTX of the next older one if NVRTC is older.

    Raises CudaError if NVRTC is so new that it compiles only for newer ones.
    """
    nvrtc, (major, minor) = _nvrtc(), capability
    known = sorted(nvrtc.getSupportedArchs())
    if 10 * major + minor in known:
        return f"sm_{major}{minor}"
    older = [one for one in known if one < 10 * major + minor]
    if not older:
        raise CudaError(
            f"NVRTC of CUDA {'.'.join(map(str, nvrtc.getVersion()))} compiles for compute capability {known[0] / 10} "
            f"and newer, but this GPU has {major}.{minor}: run `{install_command('cuda12')}`, or use device='cpu'."
        )
    return f"compute_{older[-1]}"


@functools.cache
def _compiler(nvrtc: Any) -> str:
    """Return the compiler's exact version: the head of the PTX of an empty program."""
    program = nvrtc.createProgram("", "nothing.cu", (), ())
    try:
        nvrtc.compileProgram(program, ())
        lines = bytes(nvrtc.getPTX(program)).decode().splitlines()
    except nvrtc.NVRTCError as error:
        raise CudaError(f"NVRTC, CUDA's compiler, cannot compile an empty program ({error}): {_INSTALL}.") from error
    finally:
        nvrtc.destroyProgram(program)
    return "\n".join((str(nvrtc.getVersion()), *(line for line in lines if line.startswith("//"))))


def _cached_source(name: str, architecture: str) -> bytes:
    """Return the code of `compile_source`, cached next to numba's."""
    from tiercache.kernels.cpu.compile import cache_folder

    inputs = "\0".join((source(name), *_OPTIONS, architecture, _compiler(_nvrtc()), "whole"))
    file = f"{name}.{architecture}.cuda"
    return cached_code(cache_folder(), file, inputs, lambda: compile_source(name, architecture))


class Host(Arrays, Protocol):
    """The functions of the library that owns the arrays, torch, for a device. CuPy allocates nothing."""

    def stream(self) -> int:
        """Return the address of the stream to launch on; called at every launch, so that kernels follow the model's."""
        ...

    def within(self) -> AbstractContextManager[Any]:
        """Make the GPU current on the calling thread.

        CuPy's own method returns to the previous GPU by `cudaSetDevice`, which since CUDA 12 creates a context there.
        """
        ...


def open_device(index: int, host: Host) -> "CudaDevice":
    """Return GPU `index`. Raises NoGpuError if there is none, CudaError with what else is missing."""
    cupy = _import_cupy()
    runtime = cupy.cuda.runtime
    built_for = runtime.runtimeGetVersion()
    try:
        driver = runtime.driverGetVersion()
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        driver, count = _driver_version(runtime), 0
        if driver == 0:
            raise NoGpuError(
                f"no NVIDIA driver was found: install one that supports CUDA {built_for // 1000}, or use device='cpu'."
            ) from error
        if driver // 1000 < built_for // 1000:
            raise CudaError(
                f"the NVIDIA driver supports CUDA {_dotted(driver)}, but CuPy was built for CUDA {_dotted(built_for)}: "
                f"{_INSTALL}, or update the driver."
            ) from error
        if error.status != _NO_DEVICE:
            raise CudaError(
                f"the NVIDIA driver, of CUDA {_dotted(driver)}, could not list GPUs ({error}): see nvidia-smi, "
                "or use device='cpu'."
            ) from error
    if count == 0:
        raise NoGpuError(
            "the NVIDIA driver shows no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES, or use device='cpu'."
        )
    if not 0 <= index < count:
        raise CudaError(f"unknown GPU {index}: the driver shows {count}, counted from 0.")
    _nvrtc()
    return CudaDevice(cupy, index, host)


def _driver_version(runtime: Any) -> int:
    try:
        return int(runtime.driverGetVersion())
    except runtime.CUDARuntimeError:
        return 0


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


_LOADED: dict[tuple[Any, int, bytes], Any] = {}
"""Modules by GPU and code. Never unloaded: unloading needs the GPU's context on the thread that drops the module."""


class _ExternalStream:
    """A stream that is created and destroyed elsewhere."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


class CudaDevice:
    """One GPU; create it with `open_device`. Meant for one thread at a time."""

    def __init__(self, cupy: Any, index: int, host: Host) -> None:
        self._cupy, self._device, self._host = cupy, cupy.cuda.Device(index), host
        self.empty, self.put, self.read, self.sort = host.empty, host.put, host.read, host.sort
        self.stream = host.stream
        self.num_sms = int(self._device.attributes["MultiProcessorCount"])
        capability = divmod(int(self._device.compute_capability), 10)  # such as "90"; the attributes lack it
        if capability < _OLDEST:
            raise CudaError(
                f"GPU {index} has compute capability {capability[0]}.{capability[1]}: at least "
                f"{_OLDEST[0]}.{_OLDEST[1]} is needed, or use device='cpu'."
            )
        self._architecture = architecture_of(capability)
        self._tables: OrderedDict[tuple[int, bytes], Any] = OrderedDict()
        self._tables_lock = threading.Lock()  # an exchange during training has tables too
        self._modules: dict[str, Any] = {}
        self._functions: dict[str, Any] = {}
        self._streams: dict[int, Any] = {}

    def _module(self, name: str) -> Any:
        if name not in self._modules:
            cuda, code = self._cupy.cuda, _cached_source(name, self._architecture)
            key = cuda.Module, int(self._device.id), code
            if key not in _LOADED:
                module = cuda.Module()
                try:
                    module.load(code)
                except cuda.driver.CUDADriverError as error:
                    raise CudaError(
                        f"the NVIDIA driver, of CUDA {_dotted(cuda.runtime.driverGetVersion())}, does not load "
                        f"{name}.cu, compiled for {self._architecture} ({error}): update the driver, or {_INSTALL}."
                    ) from error
                _LOADED[key] = module
            self._modules[name] = _LOADED[key]
        return self._modules[name]

    def _function(self, kernel: str) -> Any:
        if kernel not in self._functions:
            name, function = kernel.split(".")
            self._functions[kernel] = self._module(name).get_function(function)
        return self._functions[kernel]

    def prepare(self) -> None:
        """Compile every kernel, or take it from the cache, and load it, before the first batch needs it.

        Raises CudaError.
        """
        with self._host.within():
            for name in sources():
                self._module(name)

    def describe(self, array: Any) -> View | None:
        """Return the view of a torch tensor, or an array with `__cuda_array_interface__`, on a GPU."""
        return None if getattr(array, "is_cuda", True) is False else describe(array, "__cuda_array_interface__")

    def pin(self, address: int, num_bytes: int) -> None:
        """Register pages of host memory, which kernels then read and write at their host addresses. Any thread.

        Raises CudaError if the system grants no more locked memory, or the device sees the pages elsewhere.
        """
        runtime = self._cupy.cuda.runtime
        with self._host.within():
            try:
                runtime.hostRegister(address, num_bytes, _PORTABLE | _MAPPED)
            except runtime.CUDARuntimeError as error:
                raise CudaError(
                    f"{num_bytes:,} bytes of host memory cannot be pinned for the GPU ({error}): lower host_budget, or "
                    "raise the limit of locked memory (ulimit -l)."
                ) from error
            if runtime.pointerGetAttributes(address).devicePointer != address:
                runtime.hostUnregister(address)
                raise CudaError("this GPU cannot reach host memory at the host's addresses: use device='cpu'.")

    def unpin(self, address: int) -> None:
        """Undo a `pin` that began at this address. Any thread."""
        with self._host.within():
            self._cupy.cuda.runtime.hostUnregister(address)

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Argument]) -> None:
        """Start `kernel`, named "source.function", in blocks of `BLOCK_THREADS`, on the stream."""
        with self._host.within():
            pointer = self._host.stream()
            if pointer not in self._streams:
                self._streams[pointer] = self._cupy.cuda.Stream.from_external(_ExternalStream(pointer))
            words, held = list[Any](), list[Any]()  # tables live until the launch
            argument: Any
            for argument in arguments:
                kind = type(argument)
                if kind is np.ndarray and not argument.ndim:
                    words.append(argument)
                elif kind is float:
                    words.append(np.float32(argument))
                elif isinstance(argument, int | np.integer):
                    words.append(np.int64(argument))
                else:
                    held.append(self.table(argument) if kind is np.ndarray else argument)
                    words.append(np.int64(self._address(held[-1])))
            self._function(kernel)((blocks,), (BLOCK_THREADS,), tuple(words), stream=self._streams[pointer])

    def _address(self, array: Any) -> int:
        found = self.describe(array)
        assert found is not None, f"a kernel got a {type(array).__name__}"
        return found.address

    def table(self, array: NDArray[Any]) -> Any:
        """Return a read-only copy of a table on the device.

        The tables of a step equal the previous step's if its arrays have the same addresses, so recent ones are kept.
        Large ones belong to switches, and no two switches have the same.
        """
        if array.nbytes > _KEPT_BYTES:
            return self.put(array)
        key = self.stream(), array.tobytes()
        with self._tables_lock:
            if key not in self._tables:
                self._tables[key] = self.put(array)
                if len(self._tables) > _KEPT_TABLES:
                    self._tables.popitem(last=False)
            self._tables.move_to_end(key)
            return self._tables[key]
