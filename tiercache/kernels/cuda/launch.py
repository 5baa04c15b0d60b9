"""The inputs of a launch of CUDA kernels: their sources, addresses of arrays, and the division of work.

Nothing here touches a GPU or imports CuPy: `device.CudaDevice` launches on a GPU, and the tests launch the same
sources, with the same division of work, on the CPU.
"""

import functools
import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from struct import Struct
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tiercache.kernels.arrays import View

BLOCK_THREADS = 256
"""Threads of a block, in every launch: as in lanes.cuh."""
_BLOCKS_PER_SM = 32  # four times what an SM holds at once, so that the last ones end together

_PART_BYTES = 4000  # of parts in a launch argument, as in lanes.cuh

Argument = int | float | NDArray[Any]
"""An argument of a kernel: addresses and integers are passed as int64, floats as float32, a table as the address of
its copy. An array without axes is passed by value.
"""
Part = tuple[Any, ...]


class Arrays(Protocol):
    """Arrays on a device, in the order of the calls; only `read` waits."""

    def empty(self, size: int, dtype: DTypeLike) -> Any:
        """Return an uninitialized array of one axis."""
        ...

    def put(self, table: NDArray[Any]) -> Any:
        """Return a copy of a table, which must not be written to."""
        ...

    def read(self, array: Any) -> NDArray[Any]:
        """Wait for all that was launched and return a copy of a small array."""
        ...

    def sort(self, keys: Any) -> tuple[Any, Any]:
        """Return int32 keys in ascending order, and the original index of each (int64); equal keys keep their order."""
        ...


class Device(Arrays, Protocol):
    """A device that runs kernels."""

    num_sms: int
    """Number of SMs: the number of blocks depends on it, but no bit of a result does."""

    def describe(self, array: Any) -> View | None:
        """Return the view of an array on this device; None for anything else."""
        ...

    def table(self, array: NDArray[Any]) -> Any:
        """Like `put`, for tables that the next steps may need again: recent copies are kept."""
        ...

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Argument]) -> None:
        """Start `kernel`, named "source.function", in blocks of `BLOCK_THREADS`."""
        ...


_DTYPES: dict[Any, "np.dtype[Any]"] = {}
"""NumPy's dtypes by torch's, which are not imported here."""


def describe(array: Any, interface: str) -> View | None:
    """Return the view of a torch tensor, or of an array with an array interface of that name; None for anything else.

    Reading a tensor through its methods costs a tenth of its `__cuda_array_interface__`.
    """
    if hasattr(array, "data_ptr"):
        dtype = _DTYPES.get(array.dtype)
        if dtype is None:
            dtype = _DTYPES[array.dtype] = np.dtype(str(array.dtype).removeprefix("torch."))
        return View(array.data_ptr(), array.shape, dtype, array.is_contiguous())
    described = getattr(array, interface, None)
    if described is None:
        return None
    shape, dtype = tuple(int(length) for length in described["shape"]), np.dtype(described["typestr"])
    strides, (address, read_only) = described.get("strides"), described["data"]
    contiguous = strides is None or 0 in shape or _is_c_order(shape, strides, dtype)
    return View(int(address), shape, dtype, contiguous, not read_only)


def _is_c_order(shape: tuple[int, ...], strides: Sequence[int], dtype: "np.dtype[Any]") -> bool:
    expected = dtype.itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def view(device: Device, name: str, array: Any, *dtypes: DTypeLike, ndim: int = 1, written: bool = False) -> View:
    """Return the view of an array on the device. Its owner must live until the launch that uses it is done.

    Raises ValueError as `View.check`.
    """
    found = device.describe(array)
    if found is None:
        raise ValueError(f"{name} is of type {type(array).__name__}: pass an array on the CUDA device.")
    found.check(name, dtypes, ndim, written=written)
    return found


def address_of(
    device: Device, name: str, array: Any, dtype: DTypeLike, shape: tuple[int, ...] = (), *, written: bool = False
) -> int:
    """Return the address of an optional array, 0 if it is None or empty. Raises ValueError as `view`."""
    if not has_elements(array):
        return 0
    seen = view(device, name, array, dtype, ndim=len(shape or array.shape), written=written)
    if shape and seen.shape != shape:
        raise ValueError(f"{name} has shape {tuple(seen.shape)}, but {shape} is needed.")
    return seen.address


def has_elements(array: Any) -> bool:
    """Return True unless an optional array is None or empty."""
    return array is not None and 0 not in array.shape


@functools.cache
def source(name: str) -> str:
    """Return the text of `name`.cu with its headers in place."""
    folder = Path(__file__).parent
    done: set[str] = set()

    def expand(file: str) -> list[str]:
        lines = [f'#line 1 "{file}"']
        for number, line in enumerate((folder / file).read_text(encoding="utf-8").splitlines(), 1):
            header = re.fullmatch(r'#include "(\w+\.cuh)"', line)
            if header is None or header[1] in done:
                lines.append("" if header or line == "#pragma once" else line)
            else:
                done.add(header[1])
                lines += [*expand(header[1]), f'#line {number + 1} "{file}"']
        return lines

    return "\n".join(expand(f"{name}.cu"))


_C_TYPES = {"int64": "i8", "uint64": "u8", "int": "i4", "uint32": "u4", "float": "f4"}


@functools.cache
def struct(name: str, of: str) -> "np.dtype[Any]":
    """Return the dtype of a struct as `of`.cu defines it: a launch passes the kernel a table of them.

    The fields of a nested struct replace it.
    """
    defined = re.search(rf"^struct {name} {{(.*?)^}};", source(of), re.MULTILINE | re.DOTALL)
    assert defined is not None, f"{of}.cu defines no struct {name}"
    fields: list[tuple[str, Any]] = []
    for kind, star, field in re.findall(r"^ +(?:const )?(\w+)(\*?) (\w+);", defined[1], re.MULTILINE):
        if star or kind in _C_TYPES:
            fields.append((field, "u8" if star else _C_TYPES[kind]))
        else:
            inner = struct(kind, of)
            assert inner.names is not None
            fields += [(one, inner[one]) for one in inner.names]
    return np.dtype(fields, align=True)


def blocks_for(device: Device, warps: int, blocks_per_sm: int = _BLOCKS_PER_SM) -> int:
    """Return the number of blocks that share the work of `warps` warps; if there are fewer, kernels loop."""
    return max(1, min(-(-warps * 32 // BLOCK_THREADS), device.num_sms * blocks_per_sm))


def most_parts(dtype: "np.dtype[Any]") -> int:
    """Return the number of parts of a struct that fit in the argument of one launch."""
    return _PART_BYTES // dtype.itemsize


@functools.cache
def _parts_of(dtype: "np.dtype[Any]") -> tuple["np.dtype[Any]", int, Struct]:
    """Return the dtype of `Parts` in lanes.cuh, its bytes, and the packer of a part."""
    fields = [("num_parts", "i8"), ("num_tasks", "i8"), ("parts", dtype, most_parts(dtype))]
    whole = np.dtype(fields, align=True)
    return whole, whole.itemsize, _packer(dtype)


_CODES = {"i8": "q", "u8": "Q", "i4": "i", "u4": "I", "f4": "f"}


@functools.cache
def _packer(dtype: "np.dtype[Any]") -> Struct:
    """Return the packer of a part into its struct, which takes a fifth of the time of NumPy."""
    code, at = "=", 0
    assert dtype.names is not None
    for name in dtype.names:
        field = dtype[name]
        offset = int(dtype.fields[name][1])  # type: ignore[index]
        code += f"{offset - at}x{_CODES[field.str[1:]]}"
        at = offset + field.itemsize
    packer = Struct(f"{code}{dtype.itemsize - at}x")
    assert packer.size == dtype.itemsize
    return packer


_COUNTS = Struct("=qq")


def argument_of(dtype: "np.dtype[Any]", parts: Sequence[Part], num_tasks: int) -> NDArray[Any]:
    """Return parts as `Parts` in lanes.cuh: an argument of a launch."""
    whole, size, packer = _parts_of(dtype)
    packed, at = bytearray(size), _COUNTS.size
    _COUNTS.pack_into(packed, 0, len(parts), num_tasks)
    for part in parts:
        packer.pack_into(packed, at, *part)
        at += packer.size
    return np.ndarray((), whole, packed)


def table_of(dtype: "np.dtype[Any]", rows: Sequence[Part]) -> NDArray[np.uint8]:
    """Return a table of structs."""
    pack = _parts_of(dtype)[2].pack
    return np.frombuffer(bytearray().join([pack(*row) for row in rows]), np.uint8)


Launches = list[tuple[int, Any]]
"""The tasks and the argument of each launch."""


def pack_parts(dtype: "np.dtype[Any]", parts: Sequence[Part], tasks: Sequence[int]) -> Launches:
    """Return the launches that take some parts: one if all fit in an argument.

    dtype: of a part's struct, which begins with its first task; parts are passed without it, it is filled in here.
    """
    launches, most = Launches(), most_parts(dtype)
    for begin in range(0, len(parts), most):
        *firsts, num_tasks = accumulate(tasks[begin : begin + most], initial=0)
        if num_tasks:
            some = [(first, *part) for first, part in zip(firsts, parts[begin : begin + most], strict=True)]
            launches.append((num_tasks, argument_of(dtype, some, num_tasks)))
    return launches


def launch_packed(device: Device, kernel: str, launches: Launches, *more: Argument) -> None:
    """Launch a kernel over the tasks of packed parts."""
    for num_tasks, argument in launches:
        device.launch(kernel, blocks_for(device, num_tasks), (argument, *more))


def launch_parts(
    device: Device, kernel: str, dtype: "np.dtype[Any]", parts: Sequence[Part], tasks: Sequence[int], *more: Argument
) -> None:
    """Launch a kernel over the tasks of a few parts, as of `pack_parts`: nothing is copied to the device first."""
    launch_packed(device, kernel, pack_parts(dtype, parts, tasks), *more)
