"""Runnable examples; each runs in CI on small data."""

import os

# Threads of OpenMP that wait for work sleep instead of spinning: the reader and the writer need their core. Two OpenMP
# runtimes (torch's and numba's) that spin take it from each other too. Read when torch is loaded, so it stands here.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
