"""A backend by the name of its device."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from tiercache.rows.backends.cpu import CpuBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercache.rows.backends.base import Backend
    from tiercache.store.table import Table


def device_name(device: str | torch.device | Backend) -> str | Backend:
    """Return "cpu", "cuda" or "cuda:1" for a torch.device; a name or a backend is returned as it is.

    Raises TypeError for anything else.
    """
    if isinstance(device, torch.device):
        return "cpu" if device.type == "cpu" else str(device)
    if not isinstance(device, str) and not hasattr(device, "prepare"):
        raise TypeError(f"device is {device!r}: expected 'cpu', 'cuda', 'cuda:1' or a torch.device")
    return device


def open_backend(device: str | torch.device | Backend, tables: Sequence[Table]) -> Backend:
    """Return the backend of ``device``, "cpu", "cuda" or "cuda:1", ready to train ``tables``; or the given backend.

    CUDA is imported only for a GPU. Raises CudaError if a GPU cannot be used, ValueError for another device.
    """
    device = device_name(device)
    backend: Backend
    if not isinstance(device, str):
        backend = device
    elif device == "cpu":
        backend = CpuBackend()
    elif found := re.fullmatch(r"cuda(?::(\d+))?", device):
        from tiercache.rows.backends.cuda import CudaBackend
        from tiercache.rows.backends.cuda_runtime import open_runtime

        backend = CudaBackend(open_runtime(None if found[1] is None else int(found[1])))
    else:
        raise ValueError(f"device is {device!r}: expected 'cpu', 'cuda', or one of several GPUs as in 'cuda:1'")
    backend.prepare(tables)
    return backend
