"""A GPU that does nothing, under the real `CudaBackend`: only the host's part of a step remains.

It replaces CuPy's launches, the driver, and torch's CUDA memory, streams, events and sort. Everything else is real:
autograd, torch's Python bindings, and all of tiercache. Device memory is host memory, so torch's computations
there run on the CPU. A replaced call costs almost nothing and a real CUDA call costs more, so calls are counted by
kind:

launch KERNEL, sort; allocate (device memory), allocate pinned; copy (to the device, asynchronous), copy table (a
launch table, through pinned memory), copy waiting (blocking, either way); context (a context manager that switches
the device or the stream); event (record or wait), record stream; pin and unpin (pages of host memory).
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from tiercache.kernels.arrays import View
from tiercache.kernels.cuda.cupy_device import CudaDevice
from tiercache.kernels.cuda.launch import describe
from tiercache.rows.backends.cuda import CudaBackend
from tiercache.rows.backends.cuda_runtime import TORCH_DTYPES

_SMS = 132  # as in an H100
_FREE_BYTES, _BYTES = 8 << 30, 16 << 30


_uses = torch._C._storage_Use_Count  # torch's use count of a storage, by its address


class _Event:
    """An event that is always complete."""

    def wait(self) -> None:
        """Return at once."""


class IdleGpu(CudaDevice):
    """The device, host library and runtime of a GPU whose driver does nothing; ``counts`` has calls by kind."""

    name, device, num_sms = "idle GPU", torch.device("cpu"), _SMS

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.kernels: Any = self
        self._host: Any = self
        self._cupy: Any = SimpleNamespace(cuda=SimpleNamespace(Stream=SimpleNamespace(from_external=lambda at: at)))
        self._tables, self._tables_lock = OrderedDict(), threading.Lock()
        self._streams: dict[int, Any] = {}
        self._memory: defaultdict[Any, list[tuple[torch.Tensor, int, int]]] = defaultdict(list)
        self._memory_lock = threading.Lock()
        self.within = self.dumping = self.loading = self.searching = self.uploading = self.exchanging = self._context
        self.dumped = self.loaded = self.trained = self.uploaded = self.exchanged = self._event

    @contextmanager
    def _context(self, **_: Any) -> Iterator[None]:
        self.counts["context"] += 1
        yield

    def _event(self) -> Any:
        self.counts["event"] += 1
        return _Event()

    # -- called by kernels ------------------------------------------------------------------------------------

    def stream(self) -> int:
        return 7

    def empty(self, size: int, dtype: DTypeLike) -> torch.Tensor:
        return self.tensor((size,), TORCH_DTYPES[np.dtype(dtype)])

    def put(self, table: NDArray[Any]) -> torch.Tensor:
        self.counts["copy table"] += 1
        return torch.from_numpy(table.reshape(-1).view(np.uint8)).clone()

    def read(self, array: torch.Tensor) -> NDArray[Any]:
        return self.download(array)

    def sort(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.counts["sort"] += 1
        return self.empty(keys.shape[0], np.int32), self.empty(keys.shape[0], np.int64)

    def describe(self, array: Any) -> View | None:
        return describe(array, "__array_interface__")

    def prepare(self) -> None:
        """Compile nothing."""

    def pin(self, address: int, num_bytes: int) -> None:
        self.counts["pin"] += 1

    def unpin(self, address: int) -> None:
        self.counts["unpin"] += 1

    def _function(self, kernel: str) -> Callable[..., None]:
        def launch(_grid: Any, _block: Any, words: Sequence[Any], **_: Any) -> None:
            assert all(isinstance(word, (np.int64, np.float32)) or word.shape == () for word in words), kernel
            self.counts.update((f"launch {kernel}",))

        return launch

    # -- memory, copies, streams ----------------------------------------------------------------------------

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in memory that no other tensor uses.

        Memory is reused by shape, as in torch's caching allocator, so that each step gets the addresses, and finds
        the launch tables, of the previous step.
        """
        self.counts["allocate"] += 1
        key = tuple(shape), dtype
        with self._memory_lock:
            for tensor, storage, unused in self._memory[key]:
                if _uses(storage) == unused:
                    return tensor.detach()
            tensor = torch.zeros(key[0], dtype=dtype)  # no kernel fills it, and rows must be finite
            storage = tensor.untyped_storage()._cdata
            self._memory[key].append((tensor, storage, _uses(storage)))
            return tensor.detach()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.counts["allocate pinned"] += 1
        return torch.empty(tuple(shape), dtype=dtype)

    def upload(self, pinned: torch.Tensor) -> torch.Tensor:
        self.counts["copy"] += 1
        return pinned.clone()

    def copy(self, host: torch.Tensor, there: torch.Tensor, *, lasting: bool = False) -> None:
        self.counts["copy" if lasting else "copy waiting"] += 1
        there.copy_(host)

    def download(self, tensor: torch.Tensor) -> NDArray[Any]:
        self.counts["copy waiting"] += 1
        copied: NDArray[Any] = tensor.numpy().copy()
        return copied

    def address_of(self, array: NDArray[np.float32]) -> int:
        return int(array.ctypes.data)

    def memory_info(self) -> tuple[int, int]:
        return _FREE_BYTES, _BYTES

    def wait_event(self, _event: Any) -> None:
        self.counts["event"] += 1

    wait_uploaded = wait_event

    def record_use(self, _tensor: torch.Tensor) -> None:
        self.counts["record stream"] += 1

    def receive(self, _sent: Any, tensors: Sequence[torch.Tensor]) -> None:
        self.counts["event"] += 1
        self.counts["record stream"] += len(tensors)

    def synchronize(self) -> None:
        """Return at once: nothing is queued."""

    def enter_thread(self) -> None:
        self.counts["context"] += 1

    def random_state(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_random_state(self, state: torch.Tensor) -> None:
        """Ignore it."""


def idle_backend(ahead: int | None = None) -> tuple[CudaBackend, IdleGpu]:
    """Return a backend on an idle GPU, and the GPU. ``ahead``: number of threads that make batches."""
    gpu = IdleGpu()
    backend = CudaBackend(cast("Any", gpu))
    if ahead is not None:
        backend.ahead = ahead
    return backend, gpu
