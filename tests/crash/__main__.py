"""Run the harness: ``python -m tests.crash store`` and ``python -m tests.crash training``; ``--help`` has options."""

import importlib
import sys

WORKLOADS = {"store": "tests.crash.store", "training": "tests.crash.trainings"}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in WORKLOADS:
        sys.exit(f"python -m tests.crash {' | '.join(WORKLOADS)} [--help]")
    sys.exit(importlib.import_module(WORKLOADS[sys.argv[1]]).main(sys.argv[2:]))
