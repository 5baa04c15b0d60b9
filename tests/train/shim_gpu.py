"""A GPU on the CPU: whole trainings run the CUDA sources through the shim.

Its memory is guarded, host memory must be pinned before kernels see it, and work on streams other than the training's
is done as late as a GPU might do it.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.train.shim_streams import Event, LateKernels
from tiercache.rows.backends.base import CompleteEvent
from tiercache.rows.backends.cuda_runtime import TORCH_DTYPES

_NUMPY = {there: here.type for here, there in TORCH_DTYPES.items()}


class ShimRuntime:
    """The runtime for a `CudaBackend`."""

    name = "shim"
    device = torch.device("cpu")

    def __init__(self, order: str = "forward", free_bytes: int = 1 << 30, *, late_loads: bool = False) -> None:
        """``late_loads``: rows are loaded when a kernel needs them; torch, which reads some of them, does not."""
        self.kernels, self.free_bytes = LateKernels(order, self._reaches), free_bytes
        self._late_loads = late_loads
        self.kernels.upload = self._upload
        self.pinned_pages: dict[int, int] = {}
        self._pinned: dict[int, int] = {}
        self._thread = threading.local()
        self._uploads: list[Callable[[], object]] = []
        self._received = self._uploading = 0
        self._lock = threading.Lock()
        self.threads: set[str] = set()
        self.exchanges: list[str] = []

    def prepare(self) -> None:
        """Do nothing: sources are compiled when they are launched."""

    def stream(self) -> int:
        return 0

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        array = self.kernels.memory.empty(tuple(int(n) for n in shape), _NUMPY[dtype])
        self.kernels.need(array)
        return torch.from_numpy(array)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        array = np.empty(tuple(shape), _NUMPY[dtype])
        self._pinned[array.ctypes.data] = array.nbytes
        weakref.finalize(array, self._pinned.pop, array.ctypes.data, None)
        return torch.from_numpy(array)

    def upload(self, pinned: torch.Tensor) -> torch.Tensor:
        there = self.tensor(pinned.shape, pinned.dtype)
        if not self._upload(lambda: there.copy_(pinned)):
            there.copy_(pinned)
        return there

    def copy(self, host: torch.Tensor, there: torch.Tensor, *, lasting: bool = False) -> None:
        """Copy the host's current bytes; for a lasting array, when the copy is done."""
        taken = host if lasting else host.clone()
        if not self._upload(lambda: there.copy_(taken)):
            self.kernels.do(lambda: there.copy_(taken))

    def _upload(self, work: Callable[[], object]) -> bool:
        if not getattr(self._thread, "uploading", False):
            return False
        with self._lock:
            self._uploads.append(work)
        return True

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Run the copies inside only when a thread waits for them."""
        self._thread.uploading = True
        with self._lock:
            self._uploading += 1
        try:
            yield
        finally:
            self._thread.uploading = False
            with self._lock:
                self._uploading -= 1

    def uploaded(self) -> int:
        with self._lock:
            return self._received + len(self._uploads)

    def wait_uploaded(self, sent: int) -> None:
        with self._lock:
            while self._received < sent:
                self._received += 1
                self._uploads.pop(0)()

    def receive(self, sent: int, tensors: Sequence[torch.Tensor]) -> None:
        self.wait_uploaded(sent)
        with self._lock:
            if not self._uploads and not self._uploading:  # else what a thread has made for work that it is yet to give
                self.kernels.uploaded()

    def download(self, tensor: torch.Tensor) -> NDArray[Any]:
        self.kernels.finish()
        return tensor.clone().numpy()

    def address_of(self, array: NDArray[np.float32]) -> int:
        """Refuse an address that a GPU could not reach."""
        begin = array.ctypes.data
        assert self._reaches(begin, array.nbytes), "a kernel is given host memory that is not pinned"
        return begin

    def _reaches(self, begin: int, num_bytes: int = 1) -> bool:
        reach = {**self.pinned_pages, **self._pinned}
        return any(address <= begin and begin + num_bytes <= address + size for address, size in reach.items())

    def memory_info(self) -> tuple[int, int]:
        return self.free_bytes, 1 << 31

    def pin(self, address: int, num_bytes: int) -> None:
        assert not any(a < address + num_bytes and address < a + n for a, n in self.pinned_pages.items())
        self.pinned_pages[address] = num_bytes

    def unpin(self, address: int) -> None:
        """Refuse memory that is not pinned, or still used by moves."""
        last = address + self.pinned_pages.pop(address)
        assert not self.kernels.still_move(address, last), "rows still move through these pages"

    def dumping(self) -> AbstractContextManager[None]:
        return self.kernels.on(self.kernels.dumps, behind_training=True)

    def dumped(self) -> Event:
        return Event(self.kernels, self.kernels.dumps)

    @contextmanager
    def loading(self, *, ahead: bool = False) -> Iterator[None]:
        """Load late, and before dumps unless it must wait for them; loads ahead of time run late, or at once."""
        if ahead:
            with self.kernels.on(self.kernels.loads, behind_training=False):
                yield
            if not self._late_loads:
                self.loaded().wait()
            return
        try:
            with self.kernels.on(self.kernels.loads, behind_training=True):
                yield
        finally:
            self.kernels.hold_training(self.kernels.loads, self.kernels.dumps)

    def wait_event(self, dumped: Event) -> None:
        with self.kernels.on(self.kernels.loads, behind_training=False):
            self.kernels.do(dumped.wait)

    def loaded(self) -> Event:
        if not self._late_loads:
            self.kernels.finish()
        return Event(self.kernels, self.kernels.loads)

    @contextmanager
    def searching(self) -> Iterator[None]:
        try:
            with self.kernels.on(self.kernels.searches, behind_training=False):
                yield
        finally:
            self.kernels.hold_training(self.kernels.searches)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Record it; work inside is done at once, because it passes through the CPU."""
        self.exchanges.append(threading.current_thread().name)
        yield

    def exchanged(self) -> int:
        return 0

    def record_use(self, tensor: torch.Tensor) -> None:
        """Do nothing: memory is freed by its last reference."""

    def trained(self) -> CompleteEvent:
        return CompleteEvent()

    def synchronize(self) -> None:
        self.kernels.catch_up()

    def enter_thread(self) -> None:
        self.threads.add(threading.current_thread().name.split("_")[0])

    def random_state(self) -> torch.Tensor:
        """Return None: the shim has only the CPU's generators."""
        return torch.zeros(1, dtype=torch.uint8)

    def set_random_state(self, state: torch.Tensor) -> None:
        """Do nothing, see ``random_state``."""
