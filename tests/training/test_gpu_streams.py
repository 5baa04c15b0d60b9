"""What a GPU is asked for beside kernels, with stand-ins for torch's streams and CuPy's runtime."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tiercache.backends.cuda import CudaBackend
from tiercache.backends.cuda_runtime import CudaRuntime
from tiercache.kernels.cuda.device import CudaDevice, CudaError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stream:
    """Notes what it is asked for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        """Note it."""
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Any) -> None:
        """Note it."""
        self.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put stand-ins for torch's streams and events in place; return what they note."""
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


def gpu_1() -> CudaRuntime:
    """Return GPU 1, without kernels."""
    kernels = SimpleNamespace(prepare=None, pin=None, unpin=None, stream=None)
    return CudaRuntime(kernels, 1)  # type: ignore[arg-type]


def test_moves_stand_between_the_steps_before_and_behind_them(log: list[str]) -> None:
    """By events of the streams alone: the training thread does not wait, also where the work inside fails."""
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
    """That of its steps, not of moves: and the thread takes no core from others."""
    gpu = gpu_1()
    trained = CudaBackend(gpu).streams.trained()
    with gpu.dumping(), gpu.loading():
        pass
    del log[1:]
    trained.wait()
    assert log == ["event on training", "thread sleeps until the event on training"]


def test_searches_wait_for_no_step_and_steps_wait_for_them(log: list[str]) -> None:
    """Also where the work inside fails; what is handed over stays until the steps are done with it."""
    gpu = gpu_1()
    with gpu.searching():
        log.append("kernels")
    assert log == ["current is searches", "kernels", "current is training", "training waits for searches"]
    with pytest.raises(KeyError), gpu.searching():
        raise KeyError
    assert log[-1] == "training waits for searches"
    gpu.hand_over(SimpleNamespace(record_stream=lambda stream: log.append(f"kept for {stream.name}")))  # type: ignore[arg-type]
    assert log[-1] == "kept for training"


def test_what_is_delivered_is_awaited_by_the_stream_that_uses_it_and_by_nobody_else(log: list[str]) -> None:
    """Copies wait for no other stream; memory of a tensor is not used again before the stream that received it."""
    gpu, copy = gpu_1(), "copy"
    with gpu.uploading():
        log.append(copy)
    sent = gpu.uploaded()
    assert log == ["current is uploads", copy, "current is training", "event on uploads"]
    log.clear()
    tensor: Any = SimpleNamespace(record_stream=lambda stream: log.append(f"kept for {stream.name}"))
    gpu.receive(sent, [tensor])
    assert log == ["training waits for event on uploads", "kept for training"]


def test_exchanges_go_beside_the_steps_behind_them_and_not_beside_those_before(log: list[str]) -> None:
    """What a batch brings is awaited where the batch is received, and its memory stays until the steps are done."""
    gpu, exchange, step = gpu_1(), "exchange", "a step"
    with gpu.exchanging():
        log.append(exchange)
    exchanged = gpu.exchanged()
    log.append(step)
    tensor: Any = SimpleNamespace(record_stream=lambda stream: log.append(f"kept for {stream.name}"))
    gpu.receive(exchanged, [tensor])
    assert log == [
        "exchanges waits for training", "current is exchanges", exchange, "current is training", "event on exchanges",
        step, "training waits for event on exchanges", "kept for training",
    ]  # fmt: skip


def device_with(runtime: Any) -> CudaDevice:
    """Return a device of a CuPy that has only a runtime."""
    device = CudaDevice.__new__(CudaDevice)
    device._cupy, device._device = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)), nullcontext()
    device._host = SimpleNamespace(within=nullcontext)  # type: ignore[assignment]
    return device


def test_host_memory_that_cannot_be_pinned_or_reached_is_told() -> None:
    """Registered as mapped and for all threads; a limit of the system and another address are sentences."""
    calls: list[tuple[Any, ...]] = []
    runtime = SimpleNamespace(
        CUDARuntimeError=OSError,
        hostRegister=lambda *arguments: calls.append(("register", *arguments)),
        hostUnregister=lambda *arguments: calls.append(("unregister", *arguments)),
        pointerGetAttributes=lambda address: SimpleNamespace(devicePointer=address),
    )
    device = device_with(runtime)
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
