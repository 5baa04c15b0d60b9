"""One GPU through torch: memory from its caching allocator, pinned host memory, streams, uploads, key indexes."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiercache.kernels.cpu.key_index import KeySet
from tiercache.kernels.cuda import key_index as cuda_key_index
from tiercache.kernels.cuda.cuda_errors import CudaError
from tiercache.kernels.cuda.cupy_device import open_device
from tiercache.rows.backends.base import Streams
from tiercache.rows.backends.host_arrays import MAX_KEPT
from tiercache.values.torch_internals import current_stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import DTypeLike, NDArray

    from tiercache.kernels.cpu.key_index import Missing
    from tiercache.kernels.cuda.cupy_device import CudaDevice
    from tiercache.kernels.cuda.sorting import Runs, SortPlan
    from tiercache.rows.backends.base import Event
    from tiercache.values.ids import Array


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # blocking: else the waiting thread polls and occupies a core
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        """Wait without the GIL and without a core."""
        self.event.synchronize()  # synchronize!


class CudaRuntime(Streams):
    """Memory and streams of one GPU. Create it with `open_runtime`.

    A thread starts on GPU 0. Returning there would create a context on it, of several hundred megabytes, which a
    training on another GPU does not need. So our own threads enter this GPU when they start. On the user's threads, all
    calls that would switch GPUs run inside `torch.cuda.device`, which returns only to GPUs that have a context.
    """

    def __init__(self, kernels: CudaDevice, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.kernels = kernels
        self.prepare, self.pin, self.unpin, self.stream = kernels.prepare, kernels.pin, kernels.unpin, kernels.stream
        self.name = torch.cuda.get_device_name(index)
        new_stream: Any = torch.cuda.Stream
        self._dumps, self._loads = new_stream(self.device), new_stream(self.device)  # a link has a lane each way
        self._searches = new_stream(self.device, priority=-1)  # its few blocks run before those of a step
        self._uploads, self._exchanges = new_stream(self.device), new_stream(self.device)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor from torch's caching allocator."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in pinned host memory, which torch reuses only after pending copies."""
        with torch.cuda.device(self.device):  # pinned memory belongs to no device
            return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def upload(self, pinned: torch.Tensor) -> torch.Tensor:
        """Copy to the device on the current stream, without waiting."""
        return pinned.to(self.device, non_blocking=True)

    def copy(self, host: torch.Tensor, to: torch.Tensor, *, lasting: bool = False) -> None:
        """Copy to the device on the current stream, from pinned or other memory.

        ``host`` may change once this returns; if it is ``lasting``, only once the stream has copied it.
        """
        to.copy_(host, non_blocking=lasting)

    def download(self, tensor: torch.Tensor) -> NDArray[Any]:
        """Wait for the current stream and return a copy in host memory."""
        copied: NDArray[Any] = tensor.cpu().numpy()  # synchronize!
        return copied

    def address_of(self, array: NDArray[np.float32]) -> int:
        """Return the device's address of an array in pinned host memory, which `pin` has checked to be the host's."""
        return int(array.ctypes.data)

    def memory_info(self) -> tuple[int, int]:
        """Return the bytes of free memory, including torch's unused reserve, and of the whole device."""
        free, total = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device), total

    @contextmanager
    def dumping(self) -> Iterator[None]:
        """Run work on the stream of dumps, after the current stream, which does not wait for it."""
        self._dumps.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self._dumps):
            yield

    def dumped(self) -> _CudaEvent:
        """Record an event."""
        return _CudaEvent(self._dumps)

    @contextmanager
    def loading(self, *, ahead: bool = False) -> Iterator[None]:
        """Run work on the stream of loads, after the current stream, which then waits for loads and dumps.

        ``ahead``: neither waits for the other.
        """
        current = torch.cuda.current_stream(self.device)
        if not ahead:
            self._loads.wait_stream(current)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._loads):
                yield
        finally:
            if not ahead:
                current.wait_stream(self._loads)
                current.wait_stream(self._dumps)

    def wait_event(self, dumped: Event) -> None:
        """Make the stream of loads wait."""
        assert isinstance(dumped, _CudaEvent)
        self._loads.wait_event(dumped.event)

    def loaded(self) -> _CudaEvent:
        """Record an event."""
        return _CudaEvent(self._loads)

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Run work on the stream of searches, after earlier searches only; the current stream then waits for it.

        Tensors made inside belong to searches, except those given to `record_use`.
        """
        current = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._searches):
                yield
        finally:
            current.wait_stream(self._searches)

    def record_use(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor made in a search until the current stream is done with it."""
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def trained(self) -> _CudaEvent:
        """Record an event."""
        return _CudaEvent(torch.cuda.current_stream(self.device))

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Run copies on the stream of uploads, after earlier uploads only. Any thread.

        Memory comes from this stream's pool too: memory freed by other streams may still be in use there.
        """
        with torch.cuda.device(self.device), torch.cuda.stream(self._uploads):
            yield

    def uploaded(self) -> Any:
        """Record an event after all uploads queued so far, for `receive`. Any thread."""
        return _CudaEvent(self._uploads).event

    def wait_uploaded(self, sent: torch.cuda.Event) -> None:
        """Wait until the uploads have reached ``sent``. Any thread."""
        sent.synchronize()  # synchronize!

    def receive(self, sent: torch.cuda.Event, tensors: Sequence[torch.Tensor]) -> None:
        """Make the current stream wait for ``sent``, and keep the tensors' memory until it is done with them."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(sent)
        for tensor in tensors:
            tensor.record_stream(current)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Run work on the stream of exchanges, after the current stream's work so far."""
        self._exchanges.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self._exchanges):
            yield

    def exchanged(self) -> Any:
        """Record an event."""
        return self._exchanges.record_event()

    def synchronize(self) -> None:
        """Wait for all streams of this cache, and for the current one."""
        current = torch.cuda.current_stream(self.device)
        for stream in (self._dumps, self._loads, self._searches, self._uploads, self._exchanges, current):
            stream.synchronize()  # synchronize!

    def enter_thread(self) -> None:
        """Make the GPU torch's current device on this thread."""
        torch.cuda.set_device(self.device)

    def random_state(self) -> torch.Tensor:
        """Return the state of torch's generator of the device."""
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: torch.Tensor) -> None:
        """Restore torch's generator of the device."""
        torch.cuda.set_rng_state(state, self.device)


_NO_SWITCH: AbstractContextManager[Any] = nullcontext()


class TorchHost:
    """Torch's memory, streams and sort, for the device that launches kernels on a GPU."""

    def __init__(self, index: int) -> None:
        self._device, self._index = torch.device("cuda", index), index

    def stream(self) -> int:
        """Return the address of torch's current stream."""
        return current_stream(self._index)

    def within(self) -> AbstractContextManager[Any]:
        """Make the GPU torch's current one; afterwards return to the previous one if it has a context."""
        return _NO_SWITCH if torch.cuda.current_device() == self._index else torch.cuda.device(self._device)

    def empty(self, size: int, dtype: DTypeLike) -> torch.Tensor:
        """Return a tensor from torch's caching allocator."""
        return torch.empty(size, dtype=TORCH_DTYPES[np.dtype(dtype)], device=self._device)

    def put(self, table: NDArray[Any]) -> torch.Tensor:
        """Copy the bytes of a table through pinned memory, without waiting."""
        data = torch.from_numpy(table.reshape(-1).view(np.uint8))
        with torch.cuda.device(self._device):  # pinned memory belongs to no device
            return data.pin_memory().to(self._device, non_blocking=True)

    def read(self, array: torch.Tensor) -> NDArray[Any]:
        """Wait for the current stream and return a copy."""
        copied: NDArray[Any] = array.cpu().numpy()  # synchronize!
        return copied

    def sort(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort int32 keys; equal ones keep their order."""
        return torch.sort(keys, stable=True)


class _Block:
    def __init__(self, pinned: torch.Tensor) -> None:
        self.pinned = pinned
        self.bytes: NDArray[np.uint8] = pinned.numpy()
        self.sent: Any = None  # the end of the last copy from it


class PinnedRing:
    """Pinned blocks of one size that batches are read into in turn. Any thread.

    A block is reused once no array refers to it and it was copied. If a batch is larger, all are replaced.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime, self._free, self._lock = runtime, deque[_Block](), threading.RLock()
        self._size = self.num_bytes = 0
        """Bytes of all blocks, as torch allocates them."""

    def take(self, num_bytes: int) -> tuple[NDArray[np.uint8], _Block]:
        """Return memory of a block, and the block, which stays in use while an array refers to the memory."""
        with self._lock:
            if num_bytes > self._size:
                self.resize(1 << (num_bytes - 1).bit_length())  # torch would round it up to that
            block, size = self._free.popleft() if self._free else None, self._size
            self.num_bytes += size if block is None else 0
        if block is None:
            block = _Block(self._runtime.pinned((size,), torch.uint8))
        elif block.sent is not None:
            self._runtime.wait_uploaded(block.sent)
        memory = np.frombuffer(memoryview(block.bytes.data), np.uint8, num_bytes)  # a separate array object
        weakref.finalize(memory, self._reclaim, block).atexit = False
        return memory, block

    def resize(self, num_bytes: int) -> None:
        """Change the size of blocks, 0 for none: those in use are freed with their batches."""
        with self._lock:
            self._size = num_bytes
            self.num_bytes -= sum(block.bytes.size for block in self._free)
            self._free.clear()

    def _reclaim(self, block: _Block) -> None:
        with self._lock:  # garbage collection may call this on a thread that is in another method
            if block.bytes.size == self._size and len(self._free) < MAX_KEPT:
                self._free.append(block)
            else:
                self.num_bytes -= block.bytes.size


def aligned(num_bytes: int) -> int:
    """Round bytes up to whole cache lines."""
    return -(-num_bytes // 128) * 128


class PinnedUpload:
    """The upload to a GPU: copies of columns and ids from a pinned block, on the stream of uploads."""

    def __init__(self, runtime: CudaRuntime, ring: PinnedRing) -> None:
        self._runtime, self._ring = runtime, ring
        self._block: Any = None
        self._tensors: Any = ()

    @property
    def device_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(one.nbytes for one in self._tensors)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return memory of a block."""
        memory, self._block = self._ring.take(num_bytes)
        return memory

    def send(self, column_bytes: int, num_bytes: int, sort: SortPlan | None) -> Sequence[Runs] | None:
        """Copy the first bytes, and sort on the device."""
        runtime, runs, pinned = self._runtime, None, self._block.pinned
        end = aligned(num_bytes) - column_bytes  # the end of the ids
        with runtime.uploading():
            there = runtime.tensor((end + aligned(0 if sort is None else sort.num_bytes),), torch.uint8)
            columns = runtime.tensor((column_bytes,), torch.uint8) if column_bytes else there[:0]
            self._tensors = columns, there
            for part, to in ((pinned[:column_bytes], columns), (pinned[column_bytes:num_bytes], there)):
                if part.shape[0]:
                    runtime.copy(part, to[: part.shape[0]], lasting=True)
            if sort is not None:
                begin = there.data_ptr()
                runs = sort.launch(runtime.kernels, begin - column_bytes, there, begin + end)
        self._block.sent = runtime.uploaded()
        return runs

    def array(self, begin: int, count: int, dtype: DTypeLike) -> Array:
        """Return a part of a tensor."""
        (columns, there), dtype = self._tensors, np.dtype(dtype)
        first = begin - columns.shape[0]
        memory, first = (there, first) if first >= 0 else (columns, begin)
        return memory[first : first + count * dtype.itemsize].view(TORCH_DTYPES[dtype])

    def receive(self) -> None:
        """Make the current stream wait, and keep the memory of the tensors until it is done with them."""
        self._runtime.receive(self._block.sent, self._tensors)


SLICE_KEYS = 1 << 20
"""Keys that are copied to the device at a time."""


def index_bytes(num_keys: int, num_tables: int) -> int:
    """Return the bytes of an index for ``num_keys`` keys, including the buffer that they are copied through."""
    return cuda_key_index.bytes_for(num_keys, num_tables) + 8 * _slice_of(num_keys)


class CudaFound:
    """Local ids in device memory, and the number of missing keys; both are copied to the host when they are read."""

    def __init__(self, runtime: CudaRuntime, device_ids: torch.Tensor, missing: cuda_key_index.MissingKeys) -> None:
        self._runtime, self.device_ids, self._missing = runtime, device_ids, missing
        self._host: NDArray[np.int32] | None = None

    def missing(self) -> Missing:
        """Wait only for the search, and read 16 bytes."""
        with self._runtime.searching():
            return self._missing.read()

    def host(self) -> NDArray[np.int32]:
        """Wait only for the search, and copy them once."""
        if self._host is None:
            with self._runtime.searching():
                self._host = self._runtime.download(self.device_ids)
            self._host.flags.writeable = False
        return self._host


class CudaKeyIndex:
    """The index in device memory, used only on the stream of searches."""

    def __init__(self, runtime: CudaRuntime, num_keys: int, table_ids: NDArray[np.uint64]) -> None:
        """Raises torch.OutOfMemoryError."""
        self._runtime = runtime
        with runtime.searching():
            self._index = cuda_key_index.KeyIndex(runtime.kernels, num_keys, table_ids)
            self._buffer = runtime.tensor((_slice_of(num_keys),), torch.int64)
        self.capacity = self._index.capacity
        self.num_bytes = self._index.nbytes + 8 * self._buffer.shape[0]

    def build(self, key_sets: Sequence[KeySet]) -> None:
        """Copy keys a slice at a time, through one slice of pinned memory; waits for each copy."""
        step = self._buffer.shape[0]
        pinned = self._runtime.pinned((step,), torch.int64)
        with self._runtime.searching():
            self._index.clear()
            for table, keys, first_position in key_sets:
                for first in range(0, keys.size, step):
                    count = min(step, keys.size - first)
                    pinned.numpy()[:count] = keys[first : first + count]
                    self._runtime.copy(pinned[:count], self._buffer[:count])
                    self._index.extend([KeySet(table, self._buffer[:count], first_position + first)])

    def find(
        self, keys: Sequence[NDArray[np.int64]], starts: NDArray[np.int64], tables: NDArray[np.int64]
    ) -> CudaFound:
        """Copy keys from pinned memory and search, in two launches, without waiting."""
        size = int(starts[-1])
        pinned = self._runtime.pinned((size,), torch.int64)
        np.concatenate(keys, out=pinned.numpy())
        with self._runtime.searching():
            uploaded, missing = self._runtime.upload(pinned), cuda_key_index.MissingKeys(self._runtime.kernels)
            found: Any = self._runtime.tensor((size,), torch.int32)
            self._index.find(uploaded, starts, tables, found, missing)
        self._runtime.record_use(found)
        return CudaFound(self._runtime, found, missing)


def _slice_of(num_keys: int) -> int:
    return min(max(1, num_keys), SLICE_KEYS)


def open_runtime(index: int | None) -> CudaRuntime:
    """Return the runtime of a GPU by its number; None: torch's current one.

    Raises CudaError that names what is missing: CuPy, a driver, a GPU, or a torch built for CUDA.
    """
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    kernels = open_device(index, TorchHost(index))
    if not torch.cuda.is_available():
        raise CudaError(
            f"torch {torch.__version__} was built without CUDA, or for another driver: install a CUDA build of torch "
            "as pytorch.org describes, or use device='cpu'."
        )
    return CudaRuntime(kernels, index)


TORCH_DTYPES = {
    np.dtype(np.float32): torch.float32, np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64,
    np.dtype(np.uint8): torch.uint8, np.dtype(np.uint64): torch.uint64, np.dtype(np.bool_): torch.bool,
    np.dtype(np.int8): torch.int8, np.dtype(np.int16): torch.int16, np.dtype(np.uint16): torch.uint16,
    np.dtype(np.uint32): torch.uint32, np.dtype(np.float16): torch.float16, np.dtype(np.float64): torch.float64,
}  # fmt: skip
