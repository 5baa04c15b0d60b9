"""What all tests share: how threads wait.

OpenMP's threads spin while they wait for each other. Where other processes want the cores, each of the many tiny
kernels of a test then waits for the scheduler, which makes tests ten times slower. It must be said before the first
import of torch.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
