"""What a launch of CUDA kernels needs: their sources, arrays on a device as addresses, the division of work.

Nothing here touches a GPU or knows CuPy: `cuda.CudaDevice` launches on a GPU, and the tests launch the same sources,
with the same division of work, on the CPU.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = [
    "BLOCK_THREADS",
    "Argument",
    "Device",
    "Part",
    "View",
    "blocks_for",
    "given",
    "launch_parts",
    "source",
    "view",
]

BLOCK_THREADS = 256
"""Threads of a block, in every launch: as in lanes.cuh."""
_BLOCKS_PER_PROCESSOR = 32  # four times what a processor holds at once, so that the last ones end together

Argument = int | float
"""Of a kernel: addresses and integers travel as int64, floats as float32."""
Part = tuple[Any, ...]


class Device(Protocol):
    """Where kernels run: everything happens in the order of the calls, and only `read` waits for it."""

    num_processors: int
    """Multiprocessors: how many blocks there are depends on it, and no bit of a result does."""

    def describe(self, array: Any) -> dict[str, Any] | None:
        """Return the array interface of an array on this device; None for anything else."""
        ...

    def empty(self, size: int, dtype: DTypeLike) -> Any:
        """Return an uninitialised array of one axis."""
        ...

    def put(self, array: NDArray[Any]) -> Any:
        """Return a copy of a small array on the device, which nobody may write to."""
        ...

    def read(self, array: Any) -> NDArray[Any]:
        """Wait for all that was launched and return a copy of a small array."""
        ...

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Argument], shared_bytes: int = 0) -> None:
        """Start `kernel`, named "source.function", in blocks of `BLOCK_THREADS` with so much dynamic shared memory."""
        ...


class View(NamedTuple):
    """An array on a device: C-contiguous. Its owner must live until the launch that uses it is done."""

    address: int
    shape: tuple[int, ...]
    owner: Any

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


def view(device: Device, name: str, array: Any, dtype: DTypeLike, ndim: int = 1, *, written: bool = False) -> View:
    """Return where an array lies on the device, without a copy.

    `array` is anything with `__cuda_array_interface__` (CuPy, torch, numba).
    Raises ValueError when its dtype, number of dimensions or memory order is another, or when a kernel would write to a
    read-only array.
    """
    described = _described(device, name, array)
    shape = tuple(int(length) for length in described["shape"])
    found = np.dtype(described["typestr"])
    address, read_only = described["data"]
    contiguous = described.get("strides") is None or 0 in shape or _is_c_order(shape, described["strides"], found)
    aligned = address % found.itemsize == 0
    if found != dtype or len(shape) != ndim or not contiguous or not aligned:
        flaws = "" if contiguous else ", not C-contiguous"
        flaws += "" if aligned else ", not aligned"
        raise ValueError(
            f"{name} is {len(shape)}-dimensional {found}{flaws}: "
            f"give an aligned C-contiguous {ndim}-dimensional array of {np.dtype(dtype)}."
        )
    if written and read_only:
        raise ValueError(f"{name} is read-only, and the kernel writes to it: give a writable array.")
    return View(int(address), shape, array)


def is_wide(device: Device, name: str, array: Any) -> bool:
    """Return whether an array on the device is of int64. Raises ValueError for anything else."""
    return bool(np.dtype(_described(device, name, array)["typestr"]) == np.int64)


def _described(device: Device, name: str, array: Any) -> dict[str, Any]:
    described = device.describe(array)
    if described is None:
        raise ValueError(f"{name} is of type {type(array).__name__}: give an array on the CUDA device.")
    return described


def _is_c_order(shape: tuple[int, ...], strides: Sequence[int], dtype: "np.dtype[Any]") -> bool:
    wanted = dtype.itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != wanted:
            return False
        wanted *= length
    return True


def given(array: Any) -> bool:
    """Tell whether an optional array has elements: `None` and an empty array both mean "not given"."""
    return array is not None and bool(np.prod(array.shape))


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


def blocks_for(device: Device, warps: int, per_processor: int = _BLOCKS_PER_PROCESSOR) -> int:
    """Return how many blocks share out the work of `warps` warps; kernels loop where these are fewer."""
    return max(1, min(-(-warps * 32 // BLOCK_THREADS), device.num_processors * per_processor))


def access(dim: int, *addresses: int, columns: int = 0, narrow: int | None = None) -> tuple[int, int]:
    """Return (vec, team): elements of one access and lanes of one row.

    Four elements where rows of `dim` at all addresses, `columns` elements further on, begin at multiples of 16 bytes.
    Those at address `narrow` have 2 bytes an element, so that 8 are enough.
    """
    aligned = all(address % 16 == 0 for address in addresses) and (narrow is None or narrow % 8 == 0)
    vec = 4 if dim % 4 == 0 and columns % 4 == 0 and aligned else 1
    lanes = max(1, -(-dim // vec))
    return vec, min(32, 1 << (lanes - 1).bit_length())


def launch_parts(
    device: Device, kernel: str, dtype: "np.dtype[Any]", parts: Sequence[Part], tasks: Sequence[int], *more: Argument,
    per_processor: int = _BLOCKS_PER_PROCESSOR,
) -> None:  # fmt: skip
    """Launch a kernel over the tasks of several parts; `dtype` is the parts' struct without its first field.

    Every part begins with its first task, which is filled in here. Of blocks there are at most so many for each
    processor of the device.
    """
    firsts = np.cumsum([0, *tasks])
    if firsts[-1] == 0:
        return
    table = np.array([(first, *part) for first, part in zip(firsts[:-1], parts, strict=True)], dtype)
    held = view(device, "parts", device.put(table.view(np.uint8)), np.uint8)  # until the launch is behind what frees it
    num_tasks = int(firsts[-1])
    device.launch(kernel, blocks_for(device, num_tasks, per_processor), (held.address, len(parts), num_tasks, *more))


def part_struct(*fields: tuple[str, str]) -> "np.dtype[Any]":
    """Return the dtype of a part: "p" is an address, "l" an int64, "i" an int32, "f" a float32."""
    codes = {"p": np.uint64, "l": np.int64, "i": np.int32, "f": np.float32}
    struct = np.dtype([("first_task", np.int64), *((name, codes[code]) for name, code in fields)])
    if struct.itemsize % 8:
        raise AssertionError("a part is a multiple of 8 bytes: give it an `unused` field.")
    return struct
