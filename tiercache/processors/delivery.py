"""Delivery: the arrays of one batch on their way to the device, on any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from tiercache.passes.samples import SampleBuffers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.processors.cpu_processor import CpuProcessor
    from tiercache.processors.entries import Array
    from tiercache.processors.runs import Run


class Delivery(Protocol):
    """Brings what one batch needs. One thread makes it and brings all, then the training thread receives it."""

    @property
    def buffers(self) -> SampleBuffers:
        """Fresh memory to read samples into: from it nothing is copied on the host any more."""
        ...

    @property
    def device_bytes(self) -> int:
        """What was brought; on a CPU all that was made."""
        ...

    @property
    def host_bytes(self) -> int:
        """Pinned memory in use; 0 on a CPU."""
        ...

    def bring(self, array: NDArray[Any]) -> Array:
        """Do what a processor's ``bring`` does."""
        ...

    def join(self, arrays: Sequence[NDArray[np.int32]]) -> tuple[list[Run], Array]:
        """Do what a processor's ``join`` does."""
        ...

    def weights(self, size: int, parts: Sequence[tuple[int, int, Array]]) -> Array:
        """Do what a processor's ``weights`` does with weights of the data."""
        ...

    def send(self) -> None:
        """Say that all was brought. On the thread that brought it."""
        ...

    def receive(self) -> None:
        """Let what comes behind on torch's current stream use what was brought. On the training thread; no wait."""
        ...


class HostDelivery:
    """To a CPU: arrays are there when they are made."""

    host_bytes = 0

    def __init__(self, processor: CpuProcessor) -> None:
        self._processor, self.buffers, self._beside = processor, SampleBuffers(), 0

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffers and of what was joined beside them."""
        return self.buffers.num_bytes + self._beside

    def bring(self, array: NDArray[Any]) -> Array:
        """Return it as it is."""
        return array

    def join(self, arrays: Sequence[NDArray[np.int32]]) -> tuple[list[Run], Array]:
        """Copy what does not lie together."""
        runs, joined = self._processor.join(arrays)
        self._beside += joined.nbytes if joined.base is None else 0
        return runs, joined

    def weights(self, size: int, parts: Sequence[tuple[int, int, Array]]) -> Array:
        """Fill a fresh array."""
        found = self._processor.weights(size, parts)
        self._beside += found.nbytes
        return found

    def send(self) -> None:
        """All is there."""

    def receive(self) -> None:
        """All is there."""
