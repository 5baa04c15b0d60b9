"""make test-gpu: the parity tests on a GPU, then compute-sanitizer; without a GPU their dry form.

python -m tests.gpu [pytest options]. The dry form compiles every kernel for all architectures (where CuPy and NVRTC are
installed) and runs the same tests through the shim.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tiercache.kernels.cuda import CudaError, open_device

ROOT = Path(__file__).parents[1]
KERNELS = "tests/kernels"
WITH_CUDA = (KERNELS, "-k", "cuda")
TRAINING = (
    "tests/training/test_cuda_training.py", "tests/training/test_parity.py", "tests/training/test_evaluation.py",
    "tests/training/test_dtypes.py",
)  # fmt: skip
SANITIZED = [f"{KERNELS}/test_cuda_{name}.py" for name in (
    "gathering", "pooling", "sorting", "update", "rows", "initial", "bucketing", "key_index",
)]  # fmt: skip


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


def sanitize() -> int:
    """Look for bad addresses and races in the kernels."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        say("compute-sanitizer is not installed (it comes with the CUDA toolkit): memcheck and racecheck were left out")
        return 0
    tests = [name for name in SANITIZED if (ROOT / name).exists()]
    return max(
        run([tool, "--tool", kind, "--error-exitcode", "9", *pytest(*tests)], TIERCACHE_TEST_GPU="1")
        for kind in ("memcheck", "racecheck")
    )


def main() -> int:
    """Return how the worst part ended."""
    try:
        open_device()
    except CudaError as error:
        say(f"{error} What follows is the dry form: cubins, and the same tests through the shim.")
        return max(run(pytest(*WITH_CUDA)), run(pytest(*TRAINING), TIERCACHE_TEST_DEVICE="shim"))
    on_gpu = {"TIERCACHE_TEST_GPU": "1", "TIERCACHE_TEST_DEVICE": "cuda"}
    return max(run(pytest(*WITH_CUDA), **on_gpu), run(pytest(*TRAINING), **on_gpu), sanitize())


if __name__ == "__main__":
    sys.exit(main())
