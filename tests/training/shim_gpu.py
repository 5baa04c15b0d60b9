"""A GPU on the CPU: whole trainings run the CUDA sources through the shim.

Its memory is guarded, host memory must be locked before kernels see it, and what is done on the stream of moves is done
as late as a GPU might: when somebody waits for it, or something comes behind it on the training's stream.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.kernels.shim.device import ShimDevice
from tests.kernels.shim.memory import _LIBC, GuardedMemory
from tiercache.processors.cpu_processor import Done

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import DTypeLike, NDArray

_NUMPY = {torch.float32: np.float32, torch.int32: np.int32, torch.int64: np.int64, torch.uint8: np.uint8}


class _LentMemory(GuardedMemory):
    """Arrays that come back when nobody refers to them: a training makes many."""

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


class _Kernels(ShimDevice):
    """Launches as they come, or later."""

    def __init__(self, order: str) -> None:
        super().__init__(order)
        self.memory = _LentMemory(at_end=order != "reversed")
        self.deferred: list[Callable[[], object]] = []
        self.deferring = False
        self._lock = threading.RLock()
        self._tables: OrderedDict[bytes, NDArray[Any]] = OrderedDict()
        self._needed: list[NDArray[Any]] = []  # by launches that were deferred

    def put(self, array: NDArray[Any]) -> NDArray[Any]:
        """Keep the recent ones, as a GPU does."""
        key = array.tobytes()
        if key not in self._tables:
            self._tables[key] = self.place(array)
            if len(self._tables) > 64:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        self.need(self._tables[key])
        return self._tables[key]

    def empty(self, size: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return an array of rubbish; a stream takes memory back in order, so it stays until all is done."""
        array = super().empty(size, dtype)
        self.need(array)
        return array

    def need(self, array: NDArray[Any]) -> None:
        """Keep an array that was made on another stream for what is deferred there."""
        if self.deferring:
            self._needed.append(array)

    def read(self, array: NDArray[Any]) -> NDArray[Any]:
        """Wait for all that was begun."""
        self.catch_up()
        return array.copy()

    def adopt(self, array: Any) -> NDArray[Any]:
        """See a tensor's memory."""
        return array.detach().numpy() if isinstance(array, torch.Tensor) else np.from_dlpack(array)

    def do(self, work: Callable[[], object]) -> None:
        """Do something on the stream that is current."""
        with self._lock:
            if self.deferring and threading.current_thread() is threading.main_thread():
                self.deferred.append(work)
            else:
                self.catch_up()
                work()

    def catch_up(self) -> None:
        """Do what was deferred."""
        with self._lock:
            while self.deferred:
                self.deferred.pop(0)()
            if not self.deferring and threading.current_thread() is threading.main_thread():
                self._needed.clear()  # else what is needed may be of a launch that is yet to be deferred

    def launch(self, kernel: str, blocks: int, arguments: Sequence[float], shared_bytes: int = 0) -> None:
        """Run a kernel, now or later."""
        self.do(lambda: ShimDevice.launch(self, kernel, blocks, arguments, shared_bytes))


class _Mark:
    def __init__(self, kernels: _Kernels) -> None:
        self._kernels = kernels

    def wait(self) -> None:
        """Have everything done."""
        self._kernels.catch_up()


class ShimGpu:
    """Give it to a `CudaProcessor`."""

    name = "shim"
    device = torch.device("cpu")

    def __init__(self, order: str = "forward", free_bytes: int = 1 << 30) -> None:
        self.kernels, self.free_bytes = _Kernels(order), free_bytes
        self.locked: dict[int, int] = {}
        self._pinned: dict[int, int] = {}
        self._moved: list[tuple[int, int]] = []  # host memory that may still be in use
        self._thread = threading.local()
        self._deliveries: list[Callable[[], object]] = []
        self._received = 0
        self._lock = threading.Lock()
        self.threads: set[str] = set()
        self.exchanges: list[str] = []

    def prepare(self) -> None:
        """Sources are compiled when they are launched."""

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of rubbish in guarded memory."""
        array = self.kernels.memory.empty(tuple(int(n) for n in shape), _NUMPY[dtype])
        self.kernels.need(array)
        return torch.from_numpy(array)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Note where it lies."""
        array = np.empty(tuple(shape), _NUMPY[dtype])
        self._pinned[array.ctypes.data] = array.nbytes
        weakref.finalize(array, self._pinned.pop, array.ctypes.data, None)
        return torch.from_numpy(array)

    def upload(self, pinned: torch.Tensor) -> torch.Tensor:
        """Copy it."""
        there = self.tensor(pinned.shape, pinned.dtype)
        if not self._deliver(lambda: there.copy_(pinned)):
            there.copy_(pinned)
        return there

    def copy(self, host: torch.Tensor, there: torch.Tensor, *, lasting: bool = False) -> None:
        """Take what the host has now; what is lasting, when it is done."""
        taken = host if lasting else host.clone()
        if not self._deliver(lambda: there.copy_(taken)):
            self.kernels.do(lambda: there.copy_(taken))

    def _deliver(self, work: Callable[[], object]) -> bool:
        """Do it later where it is a delivery."""
        if not getattr(self._thread, "delivering", False):
            return False
        with self._lock:
            self._deliveries.append(work)
        return True

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """Do copies inside only when somebody waits for them."""
        self._thread.delivering = True
        try:
            yield
        finally:
            self._thread.delivering = False

    def sent(self) -> int:
        """Return how many copies there were."""
        with self._lock:
            return self._received + len(self._deliveries)

    def receive(self, sent: int, tensors: Sequence[torch.Tensor]) -> None:
        """Do them."""
        with self._lock:
            while self._received < sent:
                self._received += 1
                self._deliveries.pop(0)()

    def download(self, tensor: torch.Tensor) -> NDArray[Any]:
        """Wait for all that was begun."""
        self.kernels.catch_up()
        return tensor.clone().numpy()

    def address_of(self, array: NDArray[np.float32]) -> int:
        """Refuse what a GPU could not reach."""
        begin, end = array.ctypes.data, array.ctypes.data + array.nbytes
        reach = {**self.locked, **self._pinned}
        inside = any(address <= begin and end <= address + size for address, size in reach.items())
        assert inside, "a kernel is given host memory that is not locked"
        if not self.kernels.deferred:
            self._moved.clear()
        self._moved.append((begin, end))
        return begin

    def room(self) -> tuple[int, int]:
        """What the test says."""
        return self.free_bytes, 1 << 31

    def lock(self, address: int, num_bytes: int) -> None:
        """Refuse to lock anything twice."""
        assert not any(a < address + num_bytes and address < a + n for a, n in self.locked.items())
        self.locked[address] = num_bytes

    def unlock(self, address: int) -> None:
        """Refuse what is not locked, and what the moves may still use."""
        last = address + self.locked.pop(address)
        moved = self._moved if self.kernels.deferred else []
        assert not any(begin < last and address < end for begin, end in moved), (
            "rows may still move through these pages"
        )

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Defer what is done inside."""
        self.kernels.deferring = True
        try:
            yield
        finally:
            self.kernels.deferring = False

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Defer what is done inside: as on the stream of moves, though a GPU would let searches go before moves."""
        deferring, self.kernels.deferring = self.kernels.deferring, True
        try:
            yield
        finally:
            self.kernels.deferring = deferring

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Note it; what is done inside is done at once, as it travels through the CPU."""
        self.exchanges.append(threading.current_thread().name)
        yield

    def exchanged(self) -> int:
        """Return nothing that is received."""
        return 0

    def fetch(self, tensor: torch.Tensor) -> Callable[[], NDArray[Any]]:
        """Copy it, late."""
        return lambda: self.download(tensor)

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Nothing: memory comes back when nobody refers to it."""

    def mark(self) -> _Mark:
        """Return a moment that `wait` reaches."""
        return _Mark(self.kernels)

    def trained(self) -> Done:
        """Return a moment that is over: steps are done when they are launched."""
        return Done()

    def rest(self) -> None:
        """Do what was deferred."""
        self.kernels.catch_up()

    def enter_thread(self) -> None:
        """Note the thread."""
        self.threads.add(threading.current_thread().name.split("_")[0])

    def random_state(self) -> torch.Tensor:
        """It has no generator of its own."""
        return torch.zeros(1, dtype=torch.uint8)

    def set_random_state(self, state: torch.Tensor) -> None:
        """It has none."""
