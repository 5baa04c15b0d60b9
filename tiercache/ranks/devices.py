"""On which device ranks are, and what can travel between them."""

from __future__ import annotations

import os

import torch


def device_of(device: str | torch.device) -> torch.device:
    """Return the device with its number: "cuda" is the GPU of LOCAL_RANK, or the only one that this process sees."""
    device = torch.device(device)
    if str(device) == "cuda":  # no number said
        only = torch.cuda.device_count() == 1  # as where CUDA_VISIBLE_DEVICES gives each process its own
        return torch.device("cuda", 0 if only else int(os.environ.get("LOCAL_RANK", "0")))
    return device


def check_device(tensor: torch.Tensor, device: torch.device) -> None:
    """Raise ValueError where ranks on ``device`` have no way for a tensor."""
    if tensor.device.type not in {"cpu", device.type}:
        raise ValueError(f"a tensor on {tensor.device} cannot travel between ranks on {device}: join with that device")
