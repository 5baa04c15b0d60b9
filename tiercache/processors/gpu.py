"""The GPU as torch has it: memory from its caching allocator, pinned host memory, streams."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from tiercache.kernels.cuda import CudaError, open_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from tiercache.kernels.cuda import CudaDevice
    from tiercache.kernels.launch import Device
    from tiercache.processors.processor import Mark


class Gpu(Protocol):
    """What a `CudaProcessor` asks of a GPU beside kernels; the tests have one that runs on the CPU."""

    @property
    def name(self) -> str:
        """The model."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tensors are."""
        ...

    @property
    def kernels(self) -> Device:
        """What launches kernels, on the current stream."""
        ...

    def prepare(self) -> None:
        """Compile all kernels."""
        ...

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor on the device."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in host memory that the device can read and write."""
        ...

    def upload(self, pinned: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device; nobody waits for it."""
        ...

    def copy(self, host: torch.Tensor, there: torch.Tensor, *, lasting: bool = False) -> None:
        """Copy to the device on the current stream.

        ``host`` may change once this returns; where it is ``lasting``, only when the stream has come so far.
        """
        ...

    def download(self, tensor: torch.Tensor) -> NDArray[Any]:
        """Wait for the current stream and return a copy in host memory."""
        ...

    def address_of(self, array: NDArray[np.float32]) -> int:
        """Return where the device sees an array in pinned or locked memory."""
        ...

    def room(self) -> tuple[int, int]:
        """Return the bytes of memory that can be had, and those of the whole device."""
        ...

    def lock(self, address: int, num_bytes: int) -> None:
        """Make pages of host memory such as ``pinned`` gives. Any thread."""
        ...

    def unlock(self, address: int) -> None:
        """Undo a ``lock``. Any thread."""
        ...

    def dumping(self) -> AbstractContextManager[None]:
        """Work inside is done on the stream of dumps: behind the current stream's, which does not wait for it."""
        ...

    def dumped(self) -> Mark:
        """Return the present end of the stream of dumps."""
        ...

    def loading(self) -> AbstractContextManager[None]:
        """Work inside is done on the stream of loads: behind the current stream's, beside that of dumps.

        The current stream then waits for both.
        """
        ...

    def behind(self, dumped: Mark) -> None:
        """Have the stream of loads wait for a mark of that of dumps."""
        ...

    def loaded(self) -> Mark:
        """Return the present end of the stream of loads."""
        ...

    def searching(self) -> AbstractContextManager[None]:
        """Work inside is done on the stream of searches: behind the searches before, and behind nothing else.

        The current stream then waits for it. Tensors made inside are for searches alone, but those handed over.
        """
        ...

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Have the memory of a tensor made in a search stay its own until the current stream is done with it."""
        ...

    def trained(self) -> Mark:
        """Return the present end of the current stream."""
        ...

    def delivering(self) -> AbstractContextManager[None]:
        """Copies inside are done on the stream of deliveries, behind nothing else. Any thread."""
        ...

    def sent(self) -> Any:
        """Return the present end of the stream of deliveries, for `receive`. Any thread."""
        ...

    def receive(self, sent: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Have the current stream wait for ``sent``, and keep memory of the tensors until it has come behind this."""
        ...

    def exchanging(self) -> AbstractContextManager[None]:
        """Work inside is done on the stream of exchanges: behind what the current stream has so far, and beside the
        rest of it.

        Tensors made inside are for exchanges alone, but those that `receive` names.
        """
        ...

    def exchanged(self) -> Any:
        """Return the present end of the stream of exchanges, for `receive`."""
        ...

    def fetch(self, tensor: torch.Tensor) -> Callable[[], NDArray[Any]]:
        """Begin to copy to host memory on the current stream; what is returned waits for the copy and returns it."""
        ...

    def rest(self) -> None:
        """Wait until all streams of this training are done."""
        ...

    def enter_thread(self) -> None:
        """Make the device the calling thread's: one of our own, which then has nothing to do with another."""
        ...

    def random_state(self) -> torch.Tensor:
        """Return the state of torch's generator of the device."""
        ...

    def set_random_state(self, state: torch.Tensor) -> None:
        """Put it back."""
        ...


class _Event:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # blocking: else who waits asks over and over, and has a core for itself
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        """Wait without the GIL and without a core."""
        self._event.synchronize()  # synchronize!

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Have a stream wait; no thread does."""
        stream.wait_event(self._event)


class CudaGpu:
    """A GPU of this machine; make it with `open_gpu`.

    A thread begins on GPU 0, and to go back there makes a context on it, of several hundred megabytes, which a training
    on another one has no use for. So threads of ours are on this GPU from their beginning; on the user's all that CuPy
    or a stream would go back from is done inside `torch.cuda.device`, which goes back to GPUs with a context alone.
    """

    def __init__(self, kernels: CudaDevice, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.kernels = kernels
        self.name = torch.cuda.get_device_name(index)
        # two, so that rows leave while others come: a link has a lane each way
        self._dumps = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._loads = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        # its few blocks go before those of a step, so that the thread which waits for them waits for no step
        self._searches = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._deliveries = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._exchanges = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def prepare(self) -> None:
        """Compile all kernels, or load them from the cache on disk."""
        self.kernels.prepare()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Take it from torch's caching allocator."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Take it from torch's caching allocator of host memory, which waits for copies before it gives it again."""
        with torch.cuda.device(self.device):  # it has no device by which torch would know where to ask
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def upload(self, pinned: torch.Tensor) -> torch.Tensor:
        """Copy on the current stream."""
        return pinned.to(self.device, non_blocking=True)

    def copy(self, host: torch.Tensor, there: torch.Tensor, *, lasting: bool = False) -> None:
        """Copy from memory of any kind; what is not pinned is read before this returns anyway."""
        there.copy_(host, non_blocking=lasting)

    def download(self, tensor: torch.Tensor) -> NDArray[Any]:
        """Copy by way of torch."""
        copied: NDArray[Any] = tensor.cpu().numpy()  # synchronize!
        return copied

    def address_of(self, array: NDArray[np.float32]) -> int:
        """Return its own address, at which `lock` has seen to it that the device finds it."""
        return int(array.ctypes.data)

    def room(self) -> tuple[int, int]:
        """Count what torch holds and does not use as free."""
        free, total = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device), total

    def lock(self, address: int, num_bytes: int) -> None:
        """Register the pages with CUDA. Raises CudaError."""
        self.kernels.lock(address, num_bytes)

    def unlock(self, address: int) -> None:
        """Take the pages from CUDA."""
        self.kernels.unlock(address)

    @contextmanager
    def dumping(self) -> Iterator[None]:
        """Order it behind the current stream by an event; no thread waits."""
        self._dumps.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self._dumps):
            yield

    def dumped(self) -> _Event:
        """Record an event."""
        return _Event(self._dumps)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Order the three streams by events; no thread waits."""
        current = torch.cuda.current_stream(self.device)
        self._loads.wait_stream(current)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._loads):
                yield
        finally:
            current.wait_stream(self._loads)
            current.wait_stream(self._dumps)

    def behind(self, dumped: Mark) -> None:
        """Order the two streams by the event."""
        assert isinstance(dumped, _Event)
        dumped.hold(self._loads)

    def loaded(self) -> _Event:
        """Record an event."""
        return _Event(self._loads)

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Order the current stream behind it by an event; no thread waits."""
        current = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._searches):
                yield
        finally:
            current.wait_stream(self._searches)

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Tell torch's allocator."""
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def trained(self) -> _Event:
        """Record an event."""
        return _Event(torch.cuda.current_stream(self.device))

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """Take memory from this stream's pool too: what training streams free is not free on this one yet."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._deliveries):
            yield

    def sent(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._deliveries)
        return event

    def receive(self, sent: torch.cuda.Event, tensors: Sequence[torch.Tensor]) -> None:
        """Order both streams by the event; no thread waits."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(sent)
        for tensor in tensors:
            tensor.record_stream(current)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Order it behind the current stream by an event; no thread waits."""
        self._exchanges.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self._exchanges):
            yield

    def exchanged(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._exchanges)
        return event

    def fetch(self, tensor: torch.Tensor) -> Callable[[], NDArray[Any]]:
        """Copy to pinned memory, and record an event."""
        pinned = self.pinned(tensor.shape, tensor.dtype)
        pinned.copy_(tensor, non_blocking=True)
        copied = _Event(torch.cuda.current_stream(self.device))

        def wait() -> NDArray[Any]:
            copied.wait()
            there: NDArray[Any] = pinned.numpy().copy()
            return there

        return wait

    def rest(self) -> None:
        """Wait for all streams of ours, and for the current one."""
        self._dumps.synchronize()  # synchronize!
        self._loads.synchronize()  # synchronize!
        self._searches.synchronize()  # synchronize!
        self._deliveries.synchronize()  # synchronize!
        self._exchanges.synchronize()  # synchronize!
        torch.cuda.current_stream(self.device).synchronize()  # synchronize!

    def enter_thread(self) -> None:
        """Make it torch's current device."""
        torch.cuda.set_device(self.device)

    def random_state(self) -> torch.Tensor:
        """Copy it to the host."""
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: torch.Tensor) -> None:
        """Copy it to the device's generator."""
        torch.cuda.set_rng_state(state, self.device)


def open_gpu(index: int | None) -> CudaGpu:
    """Return a GPU by its number, torch's current one where none is said.

    Raises CudaError with what is missing: CuPy, a driver, a GPU, a torch built for CUDA.
    """
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0

    def allocate(num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", index))

    kernels = open_device(
        index,
        stream=lambda: torch.cuda.current_stream(index).cuda_stream,
        allocate=allocate,
        within=lambda: torch.cuda.device(index),
    )
    if not torch.cuda.is_available():
        raise CudaError(
            f"torch {torch.__version__} was built without CUDA, or for another driver: install a torch for CUDA as "
            "pytorch.org says, or use device='cpu'."
        )
    return CudaGpu(kernels, index)


TORCH_DTYPES = {
    np.dtype(np.float32): torch.float32, np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64,
    np.dtype(np.uint8): torch.uint8,
}  # fmt: skip
