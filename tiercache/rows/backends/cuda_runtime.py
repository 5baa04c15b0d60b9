"""The CUDA runtime by way of torch: memory from its caching allocator, pinned host memory, streams."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiercache.data.sub_dataset import SampleBuffers
from tiercache.kernels.cuda.cupy_device import CudaError, open_device
from tiercache.kernels.cuda.sorting import sort_positions
from tiercache.rows.backends.host_arrays import runs_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import DTypeLike, NDArray

    from tiercache.kernels.cuda.cupy_device import CudaDevice
    from tiercache.kernels.cuda.sorting import LookupPositions, Runs
    from tiercache.rows.backends.base import Event
    from tiercache.rows.backends.host_arrays import Run
    from tiercache.values.ids import Array


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # blocking: else the thread that waits polls, and takes a core
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        """Wait without the GIL and without a core."""
        self._event.synchronize()  # synchronize!

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Have a stream wait; no thread waits."""
        stream.wait_event(self._event)


class CudaRuntime:
    """Memory, streams and threads of one GPU, and the `Streams` of a `CudaBackend`. Make it with `open_runtime`.

    A thread begins on GPU 0. Going back there would make a context on it, of several hundred megabytes, which a
    training on another GPU does not need. So our own threads enter this GPU when they begin. On the user's threads, all
    calls that would switch GPUs run inside `torch.cuda.device`, which returns only to GPUs that have a context.
    """

    def __init__(self, kernels: CudaDevice, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.kernels = kernels
        self.prepare, self.pin, self.unpin, self.stream = kernels.prepare, kernels.pin, kernels.unpin, kernels.stream
        self.name = torch.cuda.get_device_name(index)
        # two, so that rows leave while others come: a link has a lane each way
        self._dumps = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._loads = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        # its few blocks go before those of a step, so that the thread which waits for them waits for no step
        self._searches = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._uploads = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._exchanges = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of undefined content, from torch's caching allocator."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of undefined content in pinned host memory, from torch's allocator.

        The allocator waits for copies before it hands the memory out again.
        """
        with torch.cuda.device(self.device):  # it has no device by which torch would know where to ask
            return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def upload(self, pinned: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, made on the current stream; nobody waits for it."""
        return pinned.to(self.device, non_blocking=True)

    def copy(self, host: torch.Tensor, there: torch.Tensor, *, lasting: bool = False) -> None:
        """Copy to the device on the current stream, from pinned or other memory.

        ``host`` may change once this returns. If it is ``lasting``, it must not change until the stream has done it.
        """
        there.copy_(host, non_blocking=lasting)

    def download(self, tensor: torch.Tensor) -> NDArray[Any]:
        """Wait for the current stream and return a copy in host memory."""
        copied: NDArray[Any] = tensor.cpu().numpy()  # synchronize!
        return copied

    def address_of(self, array: NDArray[np.float32]) -> int:
        """Return where the device sees an array in pinned host memory: `pin` made sure that it is the same address."""
        return int(array.ctypes.data)

    def room(self) -> tuple[int, int]:
        """Return the bytes of free memory, with what torch holds and does not use, and those of the whole device."""
        free, total = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device), total

    @contextmanager
    def dumping(self) -> Iterator[None]:
        """Run work on the stream of dumps, behind the current stream, which does not wait for it."""
        self._dumps.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self._dumps):
            yield

    def dumped(self) -> _CudaEvent:
        """Record an event."""
        return _CudaEvent(self._dumps)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Run work on the stream of loads, behind the current stream, which then waits for loads and dumps."""
        current = torch.cuda.current_stream(self.device)
        self._loads.wait_stream(current)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._loads):
                yield
        finally:
            current.wait_stream(self._loads)
            current.wait_stream(self._dumps)

    def wait_event(self, dumped: Event) -> None:
        """Have the stream of loads wait."""
        assert isinstance(dumped, _CudaEvent)
        dumped.hold(self._loads)

    def loaded(self) -> _CudaEvent:
        """Record an event."""
        return _CudaEvent(self._loads)

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Run work on the stream of searches, behind nothing but earlier searches; the current stream then waits.

        Tensors made inside belong to searches, except those handed over.
        """
        current = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._searches):
                yield
        finally:
            current.wait_stream(self._searches)

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor made in a search until the current stream is done with it."""
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def trained(self) -> _CudaEvent:
        """Record an event."""
        return _CudaEvent(torch.cuda.current_stream(self.device))

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Run copies on the stream of uploads, behind nothing else. Any thread.

        Memory comes from this stream's pool too: what training streams free is not free on this one yet.
        """
        with torch.cuda.device(self.device), torch.cuda.stream(self._uploads):
            yield

    def uploaded(self) -> torch.cuda.Event:
        """Return the present end of the uploads, for `receive`. Any thread."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._uploads)
        return event

    def receive(self, sent: torch.cuda.Event, tensors: Sequence[torch.Tensor]) -> None:
        """Have the current stream wait for ``sent``, and keep the memory of the tensors until it is behind this."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(sent)
        for tensor in tensors:
            tensor.record_stream(current)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Run work on the stream of exchanges, behind what the current stream has so far and beside the rest of it."""
        self._exchanges.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self._exchanges):
            yield

    def exchanged(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._exchanges)
        return event

    def synchronize(self) -> None:
        """Wait for all streams of this training, and for the current one."""
        self._dumps.synchronize()  # synchronize!
        self._loads.synchronize()  # synchronize!
        self._searches.synchronize()  # synchronize!
        self._uploads.synchronize()  # synchronize!
        self._exchanges.synchronize()  # synchronize!
        torch.cuda.current_stream(self.device).synchronize()  # synchronize!

    def enter_thread(self) -> None:
        """Make it torch's current device on this thread."""
        torch.cuda.set_device(self.device)

    def random_state(self) -> torch.Tensor:
        """Return the state of torch's generator of the device."""
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: torch.Tensor) -> None:
        """Restore torch's generator of the device."""
        torch.cuda.set_rng_state(state, self.device)


_HERE: AbstractContextManager[Any] = nullcontext()


class TorchHost:
    """Torch's memory, streams and sort, for the device that launches kernels on a GPU."""

    def __init__(self, index: int) -> None:
        self._device, self._index = torch.device("cuda", index), index

    def stream(self) -> int:
        """Return the address of torch's current stream: as Inductor asks for it, in a tenth of a `Stream`'s time."""
        return int(torch._C._cuda_getCurrentRawStream(self._index))

    def within(self) -> AbstractContextManager[Any]:
        """Make the GPU torch's current one, if it is not, and return to the one before if it has a context."""
        return _HERE if torch.cuda.current_device() == self._index else torch.cuda.device(self._device)

    def empty(self, size: int, dtype: DTypeLike) -> torch.Tensor:
        """Return a tensor from torch's caching allocator."""
        return torch.empty(size, dtype=TORCH_DTYPES[np.dtype(dtype)], device=self._device)

    def put(self, table: NDArray[Any]) -> torch.Tensor:
        """Return a copy of the bytes of a table, by way of pinned memory: nobody waits for it."""
        data = torch.from_numpy(table.reshape(-1).view(np.uint8))
        with torch.cuda.device(self._device):  # pinned memory has no device by which torch would know where to ask
            return data.pin_memory().to(self._device, non_blocking=True)

    def read(self, array: torch.Tensor) -> NDArray[Any]:
        """Wait for the current stream and return a copy."""
        copied: NDArray[Any] = array.cpu().numpy()  # synchronize!
        return copied

    def sort(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort int32 keys; equal ones keep their order."""
        return torch.sort(keys, stable=True)


class PinnedUpload:
    """The upload to a GPU: samples are read into pinned memory and copied from there on the stream of uploads."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime, self._pinned = runtime, _PinnedArrays(runtime)
        self._there: list[torch.Tensor] = []
        self._sent: Any = None
        self.buffers = SampleBuffers(self._pinned.allocate)

    @property
    def device_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._there)

    @property
    def host_bytes(self) -> int:
        """Bytes of all pinned memory that samples were read into."""
        return self.buffers.num_bytes

    def to_device(self, array: NDArray[Any]) -> Array:
        """Copy it from where it lies in the buffers, or from a pinned copy."""
        return self._upload(self._pinned.tensor_of(array), array.shape)

    def join(self, arrays: Sequence[NDArray[np.int32]]) -> tuple[list[Run], Array]:
        """Join them on the GPU: a copy for each run."""
        runs = runs_of(arrays)
        with self._runtime.uploading():
            there = self._runtime.tensor((sum(array.size for array in arrays),), torch.int32)
            at = 0
            for run in runs:
                self._runtime.copy(self._pinned.tensor_of(run.values), there[at : at + run.values.size], lasting=True)
                at += run.values.size
        self._there.append(there)
        return runs, there

    def weights(self, size: int, parts: Sequence[tuple[int, int, Array]]) -> Array:
        """Fill pinned memory, and copy it."""
        pinned = self._runtime.pinned((size,), torch.float32)
        values = pinned.numpy()
        values.fill(1.0)
        for first, last, some in parts:
            values[first:last] = some
        return self._upload(pinned, (size,))

    def sort(self, lookups: Sequence[LookupPositions]) -> Sequence[Runs]:
        """Sort them all at once, on the stream of uploads, beside the training."""
        with self._runtime.uploading():
            found = sort_positions(self._runtime.kernels, lookups)
        self._there += {id(runs.memory): runs.memory for runs in found}.values()
        return found

    def send(self) -> None:
        """Note the present end of the stream of uploads."""
        self._sent = self._runtime.uploaded()

    def receive(self) -> None:
        """Have the current stream wait, and keep the memory of the tensors until it is done with them."""
        self._runtime.receive(self._sent, self._there)

    def _upload(self, pinned: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        with self._runtime.uploading():
            there = self._runtime.upload(pinned)
        self._there.append(there)
        return there.view(shape)


class _PinnedArrays:
    """Pinned memory of one batch. It refers to nobody: in a cycle it would outlive the batch."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._held: dict[int, tuple[NDArray[np.uint8], torch.Tensor]] = {}  # by the flat array that views have as base

    def allocate(self, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return a flat array of undefined content."""
        pinned = self._runtime.pinned((max(1, size) * np.dtype(dtype).itemsize,), torch.uint8)
        flat: NDArray[np.uint8] = pinned.numpy()
        self._held[id(flat)] = flat, pinned
        return flat.view(dtype)[:size]

    def tensor_of(self, array: NDArray[Any]) -> torch.Tensor:
        """Return a flat tensor over the memory of ``array``, or over a copy: as torch gave it, for it counts uses."""
        flat, pinned = self._held.get(id(array.base), (None, None))
        if flat is None or pinned is None or not array.flags.c_contiguous:
            flat = self.allocate(array.size, array.dtype)
            flat[...] = array.reshape(-1)
            return self.tensor_of(flat)
        first = array.ctypes.data - flat.ctypes.data
        return pinned[first : first + array.nbytes].view(TORCH_DTYPES[array.dtype])


def open_runtime(index: int | None) -> CudaRuntime:
    """Return the runtime of a GPU by its number; None: torch's current one.

    Raises CudaError with what is missing: CuPy, a driver, a GPU, a torch built for CUDA.
    """
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    kernels = open_device(index, TorchHost(index))
    if not torch.cuda.is_available():
        raise CudaError(
            f"torch {torch.__version__} was built without CUDA, or for another driver: install a torch for CUDA as "
            "pytorch.org says, or use device='cpu'."
        )
    return CudaRuntime(kernels, index)


TORCH_DTYPES = {
    np.dtype(np.float32): torch.float32, np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64,
    np.dtype(np.uint8): torch.uint8, np.dtype(np.uint64): torch.uint64,
}  # fmt: skip
