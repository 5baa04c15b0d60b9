"""One number of threads for torch and for the kernels."""

from __future__ import annotations

import os

import torch

from tiercache.kernels.cpu.jit import most_threads, set_threads


def share_threads() -> None:
    """Let the kernels use as many threads as torch does, on the calling thread.

    Both run on one OpenMP, and the kernels' first use of it sets torch's number to that of the cores: it is put back.
    """
    num_threads = torch.get_num_threads()
    set_threads(min(num_threads, most_threads(), len(os.sched_getaffinity(0))))
    torch.set_num_threads(num_threads)
