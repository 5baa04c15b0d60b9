"""make test-gpu: the parity tests on a GPU, then compute-sanitizer; without a GPU their dry form.

A GPU, or a driver, that cannot be used is an error.

python -m tests.gpu [--part kernels|training|recovery|memcheck|racecheck] [pytest options]. The dry form compiles every
kernel for all architectures (where CuPy and NVRTC are installed) and runs kernels and training through the shim.
"""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from tiercache.errors import CudaError, NoGpuError
from tiercache.rows.backends.cuda_runtime import open_runtime

ROOT = Path(__file__).parents[1]
KERNELS = "tests/kernels"
WITH_CUDA = (KERNELS, "-k", "cuda")
TIERS = [f"tests/rows/test_{name}.py" for name in ("cuda_training", "two_ways")]
TRAINING = TIERS + [f"tests/train/test_{name}.py" for name in (
    "parity", "oracle", "evaluation", "raw_keys", "missing_keys", "prefetch", "fetch_ahead", "next_batches",
    "row_gradients", "adoption", "store_given", "single_modules", "closing", "real_gpu", "table_steps",
    "finite", "batch_mapping",
)]  # fmt: skip
# On a GPU alone: the shim guards each array with extra pages, and a process has room for 20,000 of them.
RECOVERY = [f"tests/train/test_{name}.py" for name in (
    "crash", "entering", "reorganize", "store_budget",
)]  # fmt: skip
CPU_ALONE = {
    "checkpoint_rows": "rows that the reader thread reads from files, for any device",
    "bad_input": "what is refused before a device has a part in it, with models on the CPU",
    "misuse": "the same",
    "gradients_as_torch": "torch's autograd and optimizers, with models on the CPU",
    "torch_idioms": "the same",
    "parameters_as_torch": "the same",
    "changed_settings": "settings of torch's optimizers, with models on the CPU",
    "replaceable": "which modules of torch are refused, with models on the CPU",
    "without_store": "loops and messages, with models on the CPU; test_parity trains such a cache on a GPU",
    "plain_keys": "forms of keys of the host, with models on the CPU",
    "large_lookups": "the order in which the CPU's kernels read rows",
    "gpu_streams": "stand-ins for torch and CuPy",
    "host_memory": "what the system gives and moves, and what is pinned, with a stand-in for the GPU's locks",
    "switch": "the order in which threads do their work, on any device",
    "damaged_passes": "what reads files, before a device has a part in it",
    "batch_parts": "orders and arrays of the host",
    "scaled_loss": "what is refused, with models on the CPU",
    "registered": "objects registered with a cache, with models on the CPU",
    "compiled": "operators and graphs, with models on the CPU",
    "convert": "which modules take the place of which, with models on the CPU",
    "dtypes_and_devices": "default dtypes and names of devices, with models on the CPU",
    "forgotten": "models and optimizers that a cache was not given, on the CPU",
    "forks": "processes of the host",
    "ids_of_batches": "operators of ids of the host",
    "pass_ledger": "the loops of a pass, with models on the CPU",
    "paths": "paths of the host",
    "schema_of_modules": "schemas that are compared before a device has a part in it",
    "second_derivatives": "autograd, with models on the CPU",
    "unseen_keys": "rows of keys that are not in a pass, with models on the CPU",
    "convert_alone": "which modules and optimizers of torch are taken over, with models on the CPU",
    "keep": "commits that are kept by a name, with models on the CPU",
    "sized_loop": "lengths and states of loops, with models on the CPU",
    "epoch_loader": "the same",
    "pass_loader": "samples and orders of the host",
    "checked_keys": "keys that are compared on the host",
    "negatives": "keys that are drawn on the host",
    "recorded_key_sets": "a run of a model without rows, on the CPU",
    "row_settings": "numbers that steps take, with models on the CPU; test_oracle steps by them on a GPU",
    "row_writes": "writes by operators of torch, with models on the CPU",
    "loaders": "loaders and forms of keys of the host, whose batches test_raw_keys trains on a GPU",
}
"""The other files of tests/train and tests/rows, and why they are not run on a GPU."""
NOT_ON_GPU = (
    "killed_at_random",  # trains on the CPU in separate processes; test_raw_keys kills one on the GPU
    "rows_from_outside",  # writes into the arrays of a InMemoryCache, which on a GPU are copies
)
SANITIZED = [f"{KERNELS}/test_{name}.py" for name in (
    "pooling", "sorting", "update", "rows", "initial", "key_index", "rounding",
)]  # fmt: skip
SANITIZER = ("--error-exitcode", "9", "--target-processes", "application-only")  # not the compilers that tests call
SANITIZERS = {
    # CUDA's own failed calls are not bad addresses: runtimes ask drivers for functions that older ones lack.
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": (),
}
TOOLKIT = "/usr/local/cuda/bin/compute-sanitizer"
PARTS = ("kernels", "training", "recovery", *SANITIZERS)


def say(words: str) -> None:
    print(f"test-gpu: {words}", flush=True)  # noqa: T201 - a command


def run(command: list[str], **variables: str) -> int:
    say(" ".join([*(f"{name}={value}" for name, value in variables.items()), *command]))
    ended = subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, **variables}).returncode
    return abs(ended)  # a signal is negative


def pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", "not long", *arguments, *sys.argv[1:]]


def without(*names: str) -> tuple[str, str]:
    """Return the option that deselects tests by parts of their names."""
    return "-k", f"not ({' or '.join(names)})"


def sanitize(kind: str, **variables: str) -> int:
    tool = shutil.which("compute-sanitizer") or shutil.which(TOOLKIT)
    if tool is None:
        say(
            f"{kind} needs compute-sanitizer, which is neither on PATH nor at {TOOLKIT}: install it from NVIDIA's CUDA "
            "toolkit, or name another --part."
        )
        return 1
    command = [tool, "--tool", kind, *SANITIZER, *SANITIZERS[kind]]
    variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # an array each: the sanitizer sees where one ends
    return run([*command, *pytest(*SANITIZED, "-k", "cuda")], **variables)


def main() -> int:
    parts = PARTS
    if "--part" in sys.argv:
        at = sys.argv.index("--part")
        parts = tuple(sys.argv[at + 1 : at + 2])
        del sys.argv[at : at + 2]
        if not set(parts) & set(PARTS):
            say(f"--part is {' '.join(parts) or 'nothing'}: it must be one of {', '.join(PARTS)}.")
            return 2
    calls = {"kernels": partial(run, pytest(*WITH_CUDA)), "training": partial(run, pytest(*TRAINING))}
    given = {"TIERCACHE_TEST_GPU": "1", "TIERCACHE_TEST_DEVICE": "cuda"}
    try:
        open_runtime(0)
    except NoGpuError as error:
        say(f"{error} What follows is the dry form: cubins, and the same tests through the shim.")
        given = {"TIERCACHE_TEST_DEVICE": "shim"}
    except CudaError as error:
        say(f"{error} Nothing was run: the dry form is for machines without a GPU, and passes for nothing on others.")
        return 1
    else:
        given["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # products of the dense models have the same bits each time
        calls["recovery"] = partial(run, pytest(*RECOVERY, *without(*NOT_ON_GPU)))
        calls |= {kind: partial(sanitize, kind) for kind in SANITIZERS}
    for part in set(parts) - calls.keys():
        say(f"{part} needs a GPU: it was left out.")
    return max((calls[part](**given) for part in parts if part in calls), default=0)


if __name__ == "__main__":
    sys.exit(main())
