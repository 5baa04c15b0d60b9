"""What all tests share: how threads wait, and that Ctrl-C interrupts.

OpenMP's threads spin while they wait for each other. Where other processes want the cores, each of the many tiny
kernels of a test then waits for the scheduler, which makes tests ten times slower. It must be said before the first
import of torch.

A shell that starts a job in the background has it ignore Ctrl-C; tests that press it want it all the same.
"""

import os
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
signal.signal(signal.SIGINT, signal.default_int_handler)
