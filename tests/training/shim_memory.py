"""Guarded memory of a GPU on the CPU, for trainings, which make many arrays."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.kernels.shim.memory import _LIBC, GuardedMemory

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


class LentMemory(GuardedMemory):
    """Arrays that come back when nobody refers to them."""

    def __init__(self, *, at_end: bool) -> None:
        super().__init__(at_end=at_end)
        self._lock = threading.RLock()  # batches are made on threads of their own

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array full of rubbish."""
        with self._lock:
            flat = super().empty((int(np.prod(shape, dtype=np.int64)),), dtype)
            block = self._blocks[-1]
        if flat.size:
            weakref.finalize(flat.base, self._come_back, block)  # what all its views refer to
        return flat.reshape(shape)

    def _come_back(self, block: tuple[int, int, int, int]) -> None:
        with self._lock:
            if block in self._blocks:
                self._blocks.remove(block)
                _LIBC.munmap(block[0], block[1])
