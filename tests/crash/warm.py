"""Imports of a fork server, so that its children start at once; opens nothing and starts no thread."""

import numpy as np
import torch._dynamo  # torch imports it when the first optimizer is created

import tests.crash.training
from tiercache.kernels.cpu.initial import UNIFORM, initial_rows

__all__ = ["tests", "torch"]

# One serial kernel sets numba up. Parallel ones start OpenMP, which does not survive a fork.
initial_rows(np.zeros(1, np.int64), 0, 0, UNIFORM, 0.0, 1.0, np.empty((1, 4), np.float32))
