"""Lookups by the CUDA sources, run on the CPU, against the numba kernels."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.cases import DIMS
from tests.kernels.shim.device import devices
from tiercache.kernels.cpu import gathering
from tiercache.kernels.cuda import gathering as cuda_gathering


@pytest.mark.parametrize("dim", DIMS)
def test_gather_copies_rows_as_on_the_cpu(dim: int) -> None:
    """One row for each entry, in order; none at all works too."""
    rng = np.random.default_rng(dim)
    vectors = rng.standard_normal((50, dim)).astype(np.float32)
    for size in (0, 1, 31, 300):
        slots = rng.integers(0, 50, size).astype(np.int32)
        wanted = np.empty((size, dim), np.float32)
        gathering.gather(vectors, slots, wanted)
        for device in devices():
            out = device.array((size, dim), np.float32)
            cuda_gathering.gather(device, device.place(vectors), device.place(slots), out)
            assert np.array_equal(device.read(out), wanted)
