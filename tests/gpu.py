"""make test-gpu: the parity tests on a GPU, then compute-sanitizer; without a GPU their dry form.

python -m tests.gpu [--part kernels|training|memcheck|racecheck] [pytest options]. The dry form compiles every kernel
for all architectures (where CuPy and NVRTC are installed) and runs the same tests through the shim.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from tiercache.kernels.cuda import CudaError, open_device

ROOT = Path(__file__).parents[1]
KERNELS = "tests/kernels"
WITH_CUDA = (KERNELS, "-k", "cuda")
TRAINING = (
    "tests/training/test_cuda_training.py", "tests/training/test_parity.py", "tests/training/test_evaluation.py",
    "tests/training/test_dtypes.py", "tests/training/test_cuda_raw_keys.py", "tests/training/test_raw_keys.py",
    "tests/training/test_missing_keys.py", "tests/training/test_ahead.py",
)  # fmt: skip
SANITIZED = [f"{KERNELS}/test_cuda_{name}.py" for name in (
    "gathering", "pooling", "sorting", "update", "rows", "initial", "bucketing", "key_index", "vectors", "rounding",
)]  # fmt: skip
SANITIZERS = ("memcheck", "racecheck")
PARTS = ("kernels", "training", *SANITIZERS)


def say(words: str) -> None:
    """Print a line between the reports of pytest."""
    print(f"test-gpu: {words}", flush=True)  # noqa: T201 - a command


def run(command: list[str], **variables: str) -> int:
    """Run a command from the root of the checkout."""
    say(" ".join([*(f"{name}={value}" for name, value in variables.items()), *command]))
    ended = subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, **variables}).returncode
    return abs(ended)  # a signal is negative


def pytest(*arguments: str) -> list[str]:
    """Return the command of some tests."""
    return [sys.executable, "-m", "pytest", "-m", "not long", *arguments, *sys.argv[1:]]


def sanitize(kind: str, **variables: str) -> int:
    """Look for bad addresses, or races, in the kernels."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        say(f"compute-sanitizer is not installed (it comes with the CUDA toolkit): {kind} was left out")
        return 0
    return run([tool, "--tool", kind, "--error-exitcode", "9", *pytest(*SANITIZED)], **variables)


def main() -> int:
    """Return how the worst part ended; ``--part`` names one of them, anything else goes to pytest."""
    parts = PARTS
    if "--part" in sys.argv:
        at = sys.argv.index("--part")
        parts = (sys.argv[at + 1],)
        del sys.argv[at : at + 2]
    calls = {"kernels": partial(run, pytest(*WITH_CUDA)), "training": partial(run, pytest(*TRAINING))}
    given = {"TIERCACHE_TEST_GPU": "1", "TIERCACHE_TEST_DEVICE": "cuda"}
    try:
        open_device()
    except CudaError as error:
        say(f"{error} What follows is the dry form: cubins, and the same tests through the shim.")
        given = {"TIERCACHE_TEST_DEVICE": "shim"}
    else:
        calls |= {kind: partial(sanitize, kind) for kind in SANITIZERS}
    return max((calls[part](**given) for part in parts if part in calls), default=0)


if __name__ == "__main__":
    sys.exit(main())
