"""What a commit holds beside rows."""

from __future__ import annotations

import random

import numpy as np
import torch

from tiercache.backends.cpu import CpuBackend
from tiercache.dist.communicator import communicator_of
from tiercache.training.dense_state import DenseState


def drawn() -> tuple[list[float], list[float], float]:
    """Draw from the generators that a training may use; normal numbers of `random` and numpy come in pairs."""
    mine = [random.gauss(0, 1) for _ in range(3)]
    theirs = [float(np.random.standard_normal()) for _ in range(3)]  # noqa: NPY002 - users' global generator
    return mine, theirs, float(torch.rand(1))


def test_random_generators_go_on_from_a_commit() -> None:
    """Those of `random`, numpy and torch, in the middle of a pair."""
    drawn()
    dense = DenseState(CpuBackend())
    data = dense.capture()()
    wanted = drawn()
    drawn()
    dense.restore(data, communicator_of())
    assert drawn() == wanted
