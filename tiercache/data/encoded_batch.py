"""Samples as training sees them: arrays of labels, dense features and local ids."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike, NDArray

    from tiercache.values.ids import FeatureIds


@dataclass(frozen=True, slots=True, eq=False)
class EncodedBatch:
    """n samples. Arrays may be views of one another and of the buffers that they were read into."""

    label: NDArray[np.float32] | None
    """(n,); None where the schema has no label."""
    dense: NDArray[np.float32]
    """(n, D), D may be 0."""
    singles: NDArray[np.int32]
    """(S, n), contiguous: the features with one id that were read, in the order of ``SampleLayout.singles``, so that
    those of one group of tables are neighbors. ``ids`` has its rows."""
    ids: dict[str, FeatureIds]
    """The ids of every feature that was read, by its name."""

    @property
    def num_samples(self) -> int:
        """N."""
        return int(self.dense.shape[0])


class SampleBuffers:
    """Memory that reads fill again and again, so that a batch costs no fresh pages.

    What was read into it is valid until the next read into it. Not for use by two threads at once.
    """

    def __init__(self, allocate: Callable[[int, Any], NDArray[Any]] = np.empty) -> None:
        """``allocate(size, dtype)`` returns uninitialized memory, flat."""
        self._allocate, self._flat = allocate, dict[str, Any]()

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        return sum(int(flat.nbytes) for flat in self._flat.values())

    def array(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialized C-contiguous array; the last one of this name loses its content."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.size < size or flat.dtype != dtype:
            flat = self._flat[name] = self._allocate(size + (size >> 3), dtype)
        found: NDArray[Any] = flat[:size].reshape(shape)
        return found
