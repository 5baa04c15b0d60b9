"""Threads of kernels beside those of torch."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
torch.set_num_threads(1)
from tiercache.kernels.jit import set_threads, threads
threads()
set_threads(1)
print(torch.get_num_threads())
"""


def test_starting_the_threads_of_kernels_leaves_the_thread_count_of_torch() -> None:
    """Both share one OpenMP; a count that changes within a run changes the bits of dense layers."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    assert ended.stdout.strip() == "1"
