"""The device of the tests' trainings: TIERCACHE_TEST_DEVICE is "cpu" (the default), "shim" or "cuda"."""

import os
from collections.abc import Callable
from typing import Any

from tests.train.shim_gpu import ShimRuntime
from tiercache.rows.backends.cuda import CudaBackend

DEVICE = os.environ.get("TIERCACHE_TEST_DEVICE", "cpu")


def shim(order: str = "forward", **options: Any) -> CudaBackend:
    """Return the CUDA backend on the shim; threads of a block take turns in ``order``."""
    return CudaBackend(ShimRuntime(order, **options))


def device_of_tests() -> Any:
    return shim() if DEVICE == "shim" else DEVICE


def cuda_device(order: str = "forward") -> Any:
    return "cuda" if DEVICE == "cuda" else shim(order)


DEVICES: dict[str, Callable[..., Any]] = {"cpu": lambda _order="forward": "cpu", "cuda": cuda_device}
"""The devices of tests that run on both."""
