"""Threads of kernels beside those of torch."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
torch.set_num_threads(1)
from tiercache.kernels.cpu.jit import set_threads, threads
threads()
set_threads(1)
print(torch.get_num_threads())
"""


def test_starting_the_threads_of_kernels_leaves_the_thread_count_of_torch() -> None:
    """Both share one OpenMP; a count that changes within a run changes the bits of dense layers."""
    for layer in ("omp", "default"):
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True,
            env={**os.environ, "NUMBA_THREADING_LAYER": layer},
        )  # fmt: skip
        assert ended.stdout.strip() == "1"


SHARED = """
import torch
from tiercache.kernels.cpu.jit import threads
from tiercache.training.threads import share_threads
share_threads()
print(torch.get_num_threads(), threads())
"""


def test_kernels_use_the_threads_of_torch_as_far_as_numba_has_them() -> None:
    """The variables of the environment are set for each of them, and need not agree."""
    ended = subprocess.run(
        [sys.executable, "-c", SHARED], check=True, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.stdout.split() == ["2", "1"]


FORKED = """
import os
import numpy as np
from tiercache.kernels.cpu.gathering import map_slots
def use():
    slots = np.empty(100_000, np.int32)
    bounds, local = np.array([0, slots.size]), np.arange(7, dtype=np.int32)
    map_slots(np.full(slots.size, 6, np.int32), np.zeros(1, np.int64), bounds, local, slots)
    return bool((slots == 6).all())
assert use()
if os.fork() == 0:
    os._exit(0 if use() else 1)
assert os.wait()[1] == 0
"""


def test_a_process_that_ran_kernels_may_fork() -> None:
    """The child runs parallel kernels too, and nothing is written to standard error."""
    ended = subprocess.run([sys.executable, "-c", FORKED], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
