"""The kernel benchmark's times on a simulated GPU: a queue of work, and a clock that only work advances."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import kernel_machines
from benchmarks.kernel_machines import GpuClock

COPY, LAUNCH_OF_COPY = 120e-6, 5e-6


class Gpu:
    """Python's clock, the time when the GPU has finished all launches, and events of CUDA."""

    def __init__(self) -> None:
        self.now = self.free_at = 0.0

    def launch(self, host_seconds: float, seconds: float) -> None:
        """Python takes some time, then the GPU when it is free."""
        self.now += host_seconds
        self.free_at = max(self.free_at, self.now) + seconds

    def wait(self, until: float | None = None) -> None:
        self.now = max(self.now, self.free_at if until is None else until)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self) -> None:
        self.at = max(self.gpu.now, self.gpu.free_at)

    @property
    def done(self) -> bool:
        return self.gpu.now >= self.at

    def synchronize(self) -> None:
        self.gpu.wait(self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    fake = Gpu()
    monkeypatch.setattr(kernel_machines, "time", SimpleNamespace(perf_counter=lambda: fake.now))
    return fake


def clock_of(gpu: Gpu) -> GpuClock:
    cuda = SimpleNamespace(
        Event=lambda: Event(gpu), Device=lambda: SimpleNamespace(synchronize=gpu.wait),
        get_elapsed_time=lambda begin, end: 1e3 * (end.at - begin.at),
    )  # fmt: skip
    cupy: Any = SimpleNamespace(asarray=lambda _: None, copyto=lambda *_: gpu.launch(LAUNCH_OF_COPY, COPY), cuda=cuda)
    return GpuClock(cupy)


@pytest.mark.parametrize("host_seconds", [1e-6, 36e-6, 151e-6, 900e-6])
def test_a_kernel_has_the_gpus_time_however_slow_python_is(gpu: Gpu, host_seconds: float) -> None:
    """And Python's extra time: neither includes the other."""
    found = clock_of(gpu).times(lambda: gpu.launch(host_seconds, 60e-6), 5)
    assert found.seconds == pytest.approx(60e-6)
    assert found.host_seconds == pytest.approx(host_seconds)


def test_a_call_that_is_slower_behind_work_than_alone_is_hidden_too(gpu: Gpu) -> None:
    """The first calls do not show it: more copies are queued until they outlast the last launch."""
    calls = iter([1e-6] * 2 + [400e-6] * 1000)
    found = clock_of(gpu).times(lambda: gpu.launch(next(calls), 60e-6), 3)
    assert found.seconds == pytest.approx(60e-6)
    assert found.host_seconds == pytest.approx(400e-6)


def test_a_call_that_waits_for_the_gpu_ends_and_says_so_by_its_host_time(gpu: Gpu) -> None:
    def call() -> None:
        gpu.launch(20e-6, 60e-6)
        gpu.wait()

    found = clock_of(gpu).times(call, 3)
    assert found.seconds == pytest.approx(80e-6, rel=0.5)
    assert found.host_seconds == pytest.approx(80e-6, rel=0.1)
