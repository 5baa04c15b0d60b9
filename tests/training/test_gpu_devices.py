"""A training on one GPU of several leaves the others alone: with stand-ins for the runtime, as CUDA 12 has it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.training.cases import SPECS, Case, Kept, open_store, table, tiered, train
from tests.training.shim_gpu import ShimRuntime
from tiercache.backends.cpu import CpuBackend
from tiercache.backends.cuda import CudaBackend
from tiercache.backends.cuda_runtime import CudaRuntime
from tiercache.kernels.cuda.device import CudaDevice
from tiercache.training import dense_state
from tiercache.training.dense_state import DenseState

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Machine:
    """Several GPUs: which have a context, and which is current on each thread, to the runtime and to torch."""

    def __init__(self) -> None:
        self.contexts: set[int] = set()
        self._thread = threading.local()

    @property
    def current(self) -> int:
        """The runtime's; a thread begins on GPU 0, without a context there."""
        return getattr(self._thread, "current", 0)

    @property
    def torchs(self) -> int:
        """Torch's: where it will go back to when it has a context, or is asked for."""
        target: int | None = getattr(self._thread, "target", None)
        return self.current if target is None else target

    def set_device(self, index: int) -> None:
        """Do as ``cudaSetDevice``: it makes a context."""
        self.contexts.add(index)
        self._thread.current, self._thread.target = index, None

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        """Do as ``torch.cuda.device``."""
        before, self._thread.target = self.torchs, None
        if device.index != self.current:
            self.set_device(device.index)
        yield
        if before in self.contexts:
            self.set_device(before)
        elif before != self.current:
            self._thread.target = before

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Do as ``torch.cuda.stream``."""
        before = self.torchs
        if stream.device != before:
            self.set_device(stream.device)
        yield
        if self.torchs != before:
            self.set_device(before)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Put stand-ins for torch's devices and streams in place."""
    machine = Machine()

    def stream(device: torch.device, priority: int = 0) -> Any:
        return SimpleNamespace(device=device.index, wait_stream=lambda _: None)

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "stand-in")
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "device", machine.device)
    monkeypatch.setattr(torch.cuda, "stream", machine.stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: machine.set_device(device.index))
    return machine


def kernels_of(machine: Machine, index: int) -> CudaDevice:
    """Return what launches on a GPU, of a CuPy that has devices, memory to lock and one kernel."""
    runtime = SimpleNamespace(
        CUDARuntimeError=OSError, hostRegister=lambda *_: None, hostUnregister=lambda *_: None,
        pointerGetAttributes=lambda address: SimpleNamespace(devicePointer=address),
    )  # fmt: skip
    kernels = CudaDevice.__new__(CudaDevice)
    kernels._cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    within = partial(machine.device, torch.device("cuda", index))
    kernels._host = SimpleNamespace(within=within, stream=lambda: 0)
    kernels.stream, kernels._streams, kernels.num_sms = kernels._host.stream, {0: None}, 1
    kernels._functions = {"rows.pack": lambda *_, **__: launched.append(machine.current)}
    return kernels


launched: list[int] = []


def use(gpu: CudaRuntime) -> None:
    """Do what a training does on its streams."""
    launched.clear()
    gpu.kernels.launch("rows.pack", 1, ())
    for inside in (gpu.dumping, gpu.loading, gpu.searching, gpu.uploading):
        with inside():
            gpu.kernels.launch("rows.pack", 1, ())
    gpu.kernels.pin(4096, 4096)
    gpu.kernels.unpin(4096)
    assert launched == [1] * 5


def test_a_training_on_gpu_1_makes_no_context_on_gpu_0(machine: Machine) -> None:
    """On the user's thread, which is on GPU 0 to torch before and after."""
    use(CudaRuntime(kernels_of(machine, 1), 1))
    assert machine.contexts == {1}
    assert machine.torchs == 0


def test_who_works_on_gpu_0_beside_it_is_there_again(machine: Machine) -> None:
    """Where GPU 0 has a context of the user's own it is the current one afterward, to CUDA too."""
    machine.set_device(0)
    use(CudaRuntime(kernels_of(machine, 1), 1))
    assert (machine.contexts, machine.current, machine.torchs) == ({0, 1}, 0, 0)


def test_all_threads_of_a_training_enter_its_gpu(tmp_path: Path) -> None:
    """The reader, the writer and those that make batches, before they do anything else."""
    case = Case(tables=(table("a", 8),), specs=SPECS[:1], num_samples=64, pass_rows=32, prefetch=2)
    passes, gpu = case.cut(tmp_path / "passes"), ShimRuntime()
    with open_store(tmp_path / "x", case, "memory") as store, tiered(store, passes, device=CudaBackend(gpu)) as cache:
        train(cache, case)
    assert gpu.threads == {"tiercache-reader", "tiercache-writer", "tiercache-batches"}


class There(torch.Tensor):
    """A tensor that says it is on GPU 2."""

    device = torch.device("cuda", 2)  # type: ignore[assignment]


def test_a_commit_waits_for_the_gpus_that_have_dense_state_and_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these, wherever in the state a tensor is, is read in a stream of its own behind what was done by then."""
    done: list[Any] = []

    def training(device: int) -> Any:
        return SimpleNamespace(record_event=lambda: done.append(("now", device)) or "event")

    @contextmanager
    def using(stream: Any) -> Iterator[None]:
        done.append("in")
        yield
        done.append("out")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_stream", training)
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device: SimpleNamespace(wait_event=lambda event: done.append((event, device)))
    )
    monkeypatch.setattr(torch.cuda, "stream", using)
    kept, dense = Kept(), DenseState(CpuBackend())
    dense.register({"kept": kept})
    monkeypatch.setattr(dense_state, "_save", lambda _: done.append("saved") or b"")
    dense.capture()()
    assert done == ["saved"]
    kept.state = {"here": torch.zeros(1), "there": [{"deep": (torch.zeros(2).as_subclass(There),)}, 1, "two"]}
    save = dense.capture()
    assert done[1:] == [("now", 2)]
    save()
    assert done[2:] == [("event", 2), "in", "saved", "out"]
