"""What a commit holds beside rows."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch

from tiercache.backends.cpu import CpuBackend
from tiercache.training.dense_state import DenseState


def drawn() -> tuple[list[float], list[float], float]:
    """Draw from the generators that a training may use; normal numbers of `random` and numpy come in pairs."""
    mine = [random.gauss(0, 1) for _ in range(3)]
    theirs = [float(np.random.standard_normal()) for _ in range(3)]  # noqa: NPY002 - users' global generator
    return mine, theirs, float(torch.rand(1))


@pytest.mark.parametrize("earlier", [False, True])
def test_random_generators_go_on_from_a_commit(*, earlier: bool) -> None:
    """Those of `random`, numpy and torch, in the middle of a pair; from commits of earlier versions too."""
    drawn()
    dense = DenseState(CpuBackend())
    data = dense.capture()()
    wanted = drawn()
    if earlier:  # they had a tuple of numbers where there is a tensor now
        state = torch.load(io.BytesIO(data), weights_only=True)
        version, words, gauss = state["python"]
        state["python"] = (version, tuple(words.tolist()), gauss)
        torch.save(state, buffer := io.BytesIO())
        data = buffer.getvalue()
    drawn()
    dense.restore(data)
    assert drawn() == wanted
