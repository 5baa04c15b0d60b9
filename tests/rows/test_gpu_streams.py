"""A training's use of a GPU besides kernels, with stand-ins for the streams and devices of torch and of CuPy."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.train.cases import SPECS, Case, Kept, open_store, table, tiered, train
from tests.train.shim_gpu import ShimRuntime
from tiercache.errors import CudaError
from tiercache.kernels.cuda.cupy_device import CudaDevice
from tiercache.rows.backends.cpu import CpuBackend
from tiercache.rows.backends.cuda import CudaBackend
from tiercache.rows.backends.cuda_runtime import CudaRuntime
from tiercache.train import dense_state
from tiercache.train.dense_state import DenseState


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> Any:
        event: Any = torch.cuda.Event()
        event.record(self)
        return event


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    training, names = Stream("training", log), iter(("dumps", "loads", "uploads", "exchanges"))

    class Event:
        def __init__(self, *, blocking: bool = False) -> None:
            self.name, self.wait = "", "sleeps until" if blocking else "asks over and over for"

        def record(self, stream: Stream) -> None:
            self.name = f"event on {stream.name}"
            log.append(self.name)

        def __str__(self) -> str:
            return self.name

        def synchronize(self) -> None:
            log.append(f"thread {self.wait} the {self.name}")

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        log.append(f"current is {chosen.name}")
        yield
        log.append("current is training")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "stand-in")

    def named(_: Any, priority: int = 0) -> Stream:
        return Stream("searches" if priority else next(names), log)

    monkeypatch.setattr(torch.cuda, "Stream", named)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: training)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    return log


def kept_in(log: list[str]) -> Any:
    return SimpleNamespace(record_stream=lambda stream: log.append(f"kept for {stream.name}"))


def gpu_1() -> CudaRuntime:
    kernels = SimpleNamespace(prepare=None, pin=None, unpin=None, stream=None)
    return CudaRuntime(kernels, 1)  # type: ignore[arg-type]


def test_moves_stand_between_the_steps_before_and_behind_them(log: list[str]) -> None:
    """By events of the streams alone: the training thread does not wait, also if the work inside fails."""
    gpu = gpu_1()
    with gpu.dumping():
        log.append("pack")
    dumped = gpu.dumped()
    with gpu.loading():
        log.append("unpack to spare slots")
        gpu.wait_event(dumped)
        log.append("unpack to slots of rows that were dumped")
    assert log == [
        "dumps waits for training", "current is dumps", "pack", "current is training", "event on dumps",
        "loads waits for training", "current is loads", "unpack to spare slots", "loads waits for event on dumps",
        "unpack to slots of rows that were dumped", "current is training",
        "training waits for loads", "training waits for dumps",
    ]  # fmt: skip
    log.clear()
    dumped.wait()
    gpu.loaded().wait()
    awaited = "thread sleeps until the event on"
    assert log == [f"{awaited} dumps", "event on loads", f"{awaited} loads"]
    with pytest.raises(KeyError), gpu.loading():
        raise KeyError
    assert log[-2:] == ["training waits for loads", "training waits for dumps"]


def test_who_asks_for_the_end_of_the_training_sleeps_until_its_stream_is_there(log: list[str]) -> None:
    """It waits for the steps, not for moves, and occupies no core."""
    gpu = gpu_1()
    trained = CudaBackend(gpu).streams.trained()
    with gpu.dumping(), gpu.loading():
        pass
    del log[1:]
    trained.wait()
    assert log == ["event on training", "thread sleeps until the event on training"]


def test_searches_wait_for_no_step_and_steps_wait_for_them(log: list[str]) -> None:
    """Also if the work inside fails; results stay until the steps are done with them."""
    gpu = gpu_1()
    with gpu.searching():
        log.append("kernels")
    assert log == ["current is searches", "kernels", "current is training", "training waits for searches"]
    with pytest.raises(KeyError), gpu.searching():
        raise KeyError
    assert log[-1] == "training waits for searches"
    gpu.record_use(kept_in(log))
    assert log[-1] == "kept for training"


def test_what_is_delivered_is_awaited_by_the_stream_that_uses_it_and_by_nobody_else(log: list[str]) -> None:
    """Copies wait for no other stream; memory of a tensor is not used again before the stream that received it."""
    gpu, copy = gpu_1(), "copy"
    with gpu.uploading():
        log.append(copy)
    sent = gpu.uploaded()
    assert log == ["current is uploads", copy, "current is training", "event on uploads"]
    log.clear()
    gpu.receive(sent, [kept_in(log)])
    assert log == ["training waits for event on uploads", "kept for training"]


def test_the_shim_keeps_what_a_thread_made_for_work_that_it_is_yet_to_upload() -> None:
    """Also if another batch is received in between: a stream reuses memory only after its earlier work."""
    gpu = ShimRuntime()

    def made() -> tuple[int, int]:
        array = gpu.tensor((4,), torch.int32)
        return len(gpu.kernels._to_upload), array.data_ptr()

    with gpu.uploading():
        kept, address = made()
        other = threading.Thread(target=partial(gpu.receive, gpu.uploaded(), []))
        other.start()
        other.join()
        assert [array.ctypes.data for array in gpu.kernels._to_upload] == [address]
    assert kept == 1
    gpu.receive(gpu.uploaded(), [])
    assert not gpu.kernels._to_upload


def test_exchanges_go_beside_the_steps_behind_them_and_not_beside_those_before(log: list[str]) -> None:
    """The batch's data is awaited when the batch is received, and its memory stays until the steps are done."""
    gpu, exchange, step = gpu_1(), "exchange", "a step"
    with gpu.exchanging():
        log.append(exchange)
    exchanged = gpu.exchanged()
    log.append(step)
    gpu.receive(exchanged, [kept_in(log)])
    assert log == [
        "exchanges waits for training", "current is exchanges", exchange, "current is training", "event on exchanges",
        step, "training waits for event on exchanges", "kept for training",
    ]  # fmt: skip


def runtime_of(calls: list[Any]) -> Any:
    """Return a runtime of CuPy that has only memory to lock."""
    return SimpleNamespace(
        CUDARuntimeError=OSError,
        hostRegister=lambda *arguments: calls.append(("register", *arguments)),
        hostUnregister=lambda *arguments: calls.append(("unregister", *arguments)),
        pointerGetAttributes=lambda address: SimpleNamespace(devicePointer=address),
    )


def device_with(runtime: Any, within: Any = nullcontext) -> CudaDevice:
    """Return a device over a CuPy that has only a runtime."""
    device = CudaDevice.__new__(CudaDevice)
    device._cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    device._host = SimpleNamespace(within=within, stream=lambda: 0)  # type: ignore[assignment]
    return device


def test_host_memory_that_cannot_be_pinned_or_reached_is_told() -> None:
    calls: list[tuple[Any, ...]] = []
    device = device_with(runtime := runtime_of(calls))
    device.pin(4096, 8192)
    device.unpin(4096)
    assert calls == [("register", 4096, 8192, 3), ("unregister", 4096)]
    runtime.pointerGetAttributes = lambda address: SimpleNamespace(devicePointer=address + 1)
    with pytest.raises(CudaError, match="cannot reach host memory at the host's addresses"):
        device.pin(4096, 8192)
    assert calls[-1] == ("unregister", 4096)

    def refuse(*_: Any) -> None:
        raise OSError("out of memory")

    runtime.hostRegister = refuse
    with pytest.raises(CudaError, match=r"8,192 bytes of host memory cannot be pinned .*lower host_budget"):
        device.pin(4096, 8192)


class Machine:
    """Several GPUs: those with a context, and the current one of each thread, for the runtime and for torch."""

    def __init__(self) -> None:
        self.contexts: set[int] = set()
        self._thread = threading.local()

    @property
    def current(self) -> int:
        """The runtime's GPU; a thread begins on GPU 0, without a context there."""
        return getattr(self._thread, "current", 0)

    @property
    def torchs(self) -> int:
        """Torch's GPU: the one it returns to, if it has a context or is requested."""
        target: int | None = getattr(self._thread, "target", None)
        return self.current if target is None else target

    def set_device(self, index: int) -> None:
        self.contexts.add(index)
        self._thread.current, self._thread.target = index, None

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
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
        before = self.torchs
        if stream.device != before:
            self.set_device(stream.device)
        yield
        if self.torchs != before:
            self.set_device(before)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
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


def kernels_of(machine: Machine, index: int, launched: list[int]) -> CudaDevice:
    """Return a launcher for a GPU, of one kernel, which records the current GPU."""
    kernels = device_with(runtime_of([]), partial(machine.device, torch.device("cuda", index)))
    kernels.stream, kernels._streams, kernels.num_sms = kernels._host.stream, {0: None}, 1
    kernels._functions = {"rows.pack": lambda *_, **__: launched.append(machine.current)}
    return kernels


@pytest.mark.parametrize("others", [set(), {0}])
def test_a_training_on_gpu_1_makes_no_context_on_gpu_0(machine: Machine, others: set[int]) -> None:
    """The user's thread is on GPU 0 before and after, for CUDA too if the user has a context there."""
    for index in others:
        machine.set_device(index)
    launched = list[int]()
    gpu = CudaRuntime(kernels_of(machine, 1, launched), 1)
    gpu.kernels.launch("rows.pack", 1, ())
    for inside in (gpu.dumping, gpu.loading, gpu.searching, gpu.uploading):
        with inside():
            gpu.kernels.launch("rows.pack", 1, ())
    gpu.kernels.pin(4096, 4096)
    gpu.kernels.unpin(4096)
    assert launched == [1] * 5
    assert (machine.contexts, machine.torchs) == (others | {1}, 0)
    assert machine.current == (0 if others else 1)


def test_all_threads_of_a_training_enter_its_gpu(tmp_path: Path) -> None:
    """The reader, the writer, the pinning thread and those that make batches, before they do anything else."""
    case = Case(tables=(table("a", 8),), specs=SPECS[:1], num_samples=64, pass_rows=32, prefetch=2)
    passes, gpu = case.cut(tmp_path / "passes"), ShimRuntime()
    with open_store(tmp_path / "x", case, "memory") as store, tiered(store, passes, device=CudaBackend(gpu)) as cache:
        train(cache, case)
    assert gpu.threads == {"tiercache-reader", "tiercache-writer", "tiercache-pinner", "tiercache-batches"}


class There(torch.Tensor):
    """A tensor that claims to be on GPU 2."""

    device = torch.device("cuda", 2)  # type: ignore[assignment]


def test_a_commit_waits_for_the_gpus_that_have_dense_state_and_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each of them, a tensor anywhere in the state is read on a separate stream after the work so far."""
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
