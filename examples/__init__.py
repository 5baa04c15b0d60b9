"""Runnable examples; each runs in CI on small data."""

import os

# OpenMP threads must sleep instead of spin while they wait: the reader and the writer need their core, and torch's and
# numba's runtimes would compete for it. Read when torch is loaded, so it is set here.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
