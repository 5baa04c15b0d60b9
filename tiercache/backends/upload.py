"""The upload of one batch to the device, on any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from tiercache.data.encoded_batch import SampleBuffers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.backends.cpu import CpuBackend
    from tiercache.backends.runs import Run
    from tiercache.kernels.cuda.sorting import Positions
    from tiercache.values.ids import Array


class BatchUpload(Protocol):
    """Brings what one batch needs. One thread makes it and uploads all, then the training thread receives it."""

    @property
    def buffers(self) -> SampleBuffers:
        """Fresh memory to read samples into: arrays in it are uploaded without another copy on the host."""
        ...

    @property
    def device_bytes(self) -> int:
        """Bytes on the device; on a CPU all bytes of the batch."""
        ...

    @property
    def host_bytes(self) -> int:
        """Pinned memory in use; 0 on a CPU."""
        ...

    def to_device(self, array: NDArray[Any]) -> Array:
        """Like `Backend.to_device`."""
        ...

    def join(self, arrays: Sequence[NDArray[np.int32]]) -> tuple[list[Run], Array]:
        """Like `Backend.join`."""
        ...

    def weights(self, size: int, parts: Sequence[tuple[int, int, Array]]) -> Array:
        """Like `Backend.weights`, with weights of the data."""
        ...

    def sort(self, lookups: Sequence[Positions]) -> Sequence[Any]:
        """Return the order of the ids of each lookup by position, if it is better found here than in the step."""
        ...

    def send(self) -> None:
        """Declare the upload complete. On the thread that made it."""
        ...

    def receive(self) -> None:
        """Let later work on torch's current stream use what was uploaded. On the training thread; does not wait."""
        ...


class HostUpload:
    """The upload to a CPU: arrays are there when they are made."""

    host_bytes = 0

    def __init__(self, backend: CpuBackend) -> None:
        self._backend, self.buffers, self._beside = backend, SampleBuffers(), 0

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffers and of what was joined beside them."""
        return self.buffers.num_bytes + self._beside

    def to_device(self, array: NDArray[Any]) -> Array:
        """Return it as it is."""
        return array

    def join(self, arrays: Sequence[NDArray[np.int32]]) -> tuple[list[Run], Array]:
        """Copy arrays that are not neighbors in memory."""
        runs, joined = self._backend.join(arrays)
        self._beside += joined.nbytes if joined.base is None else 0
        return runs, joined

    def sort(self, lookups: Sequence[Positions]) -> Sequence[Any]:
        """Return none: lookups sort slots, which is as quick, on all threads."""
        return [None] * len(lookups)

    def weights(self, size: int, parts: Sequence[tuple[int, int, Array]]) -> Array:
        """Fill a fresh array."""
        found = self._backend.weights(size, parts)
        self._beside += found.nbytes
        return found

    def send(self) -> None:
        """Do nothing: all is there."""

    def receive(self) -> None:
        """Do nothing: all is there."""
