"""What all tests share: how threads wait, that Ctrl-C interrupts, and that no test of Hypothesis asserts a time.

OpenMP's threads spin while they wait for each other. Where other processes want the cores, each of the many tiny
kernels of a test then waits for the scheduler, which makes tests ten times slower. It must be said before the first
import of torch.

A shell that starts a job in the background has it ignore Ctrl-C; tests that press it want it all the same.
"""

import os
import signal

from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
