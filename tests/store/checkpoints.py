"""Checkpoints in safetensors files, for tests."""

from pathlib import Path

import torch
from safetensors.torch import save_file

ROWS, DIM = 2000, 20
TENSOR = "model.embed.weight"


def weights(rows: int = ROWS, dim: int = DIM, *, seed: int = 0) -> torch.Tensor:
    """Return random numbers of bfloat16."""
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)).bfloat16()


def save(path: Path, **tensors: torch.Tensor) -> Path:
    """Write tensors between others to a file; ``__`` in a name is a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({"a": torch.ones(3), **named, "z": torch.zeros(2, 5)}, path)
    return path
