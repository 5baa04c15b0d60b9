"""Where whole trainings are measured: the CPU, a GPU, or the CUDA sources run on the CPU by the tests' shim."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from benchmarks.machine import middle
from tiercache.backends.cuda_runtime import open_runtime
from tiercache.kernels.cuda.device import CudaError

_LINK_BYTES, _LINK_COPIES = 256 << 20, 7


class TrainingMachine:
    """A device and what surrounds it; this one is the CPU, with rows in host memory and no link to them."""

    name, is_gpu = "cpu", False

    def device(self) -> Any:
        """Return what a cache takes as its device."""
        return "cpu"

    def rest(self) -> None:
        """Wait until the device has done what it was given."""

    def link_bytes_per_second(self) -> tuple[float, float] | None:
        """Return the rates of copies to pinned host memory and from it; None where there is no link."""
        return None


class CudaTraining(TrainingMachine):
    """The GPU that torch takes."""

    is_gpu = True

    def __init__(self) -> None:
        open_runtime(None)
        self.name = torch.cuda.get_device_name()

    def device(self) -> Any:
        """Say it."""
        return "cuda"

    def rest(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize()

    def link_bytes_per_second(self) -> tuple[float, float] | None:
        """Copy 256 MiB each way, by events."""
        host = torch.zeros(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.zeros(_LINK_BYTES, dtype=torch.uint8, device="cuda")
        return _rate(there, host), _rate(host, there)


class ShimTraining(TrainingMachine):
    """The CUDA sources by the tests' shim: what runs is what a GPU runs, and times mean nothing."""

    name = "shim"

    def device(self) -> Any:
        """Return a new one: each cache has its own."""
        return importlib.import_module("tests.training.devices").shim("random", free_bytes=8 << 30)


def open_training(wanted: str | None, *, dry: bool) -> TrainingMachine:
    """Return the machine that was asked for; without a wish, the GPU where one is."""
    if dry:
        return ShimTraining()
    if wanted != "cpu":
        try:
            return CudaTraining()
        except CudaError as error:
            if wanted == "cuda":
                raise SystemExit(f"{error} Or take --dry.") from error
    return TrainingMachine()


def _rate(source: torch.Tensor, target: torch.Tensor) -> float:
    taken = []
    for _ in range(_LINK_COPIES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return source.numel() / middle(taken)
