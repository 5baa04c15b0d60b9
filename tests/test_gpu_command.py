"""make test-gpu runs everything possible on a GPU, and nothing missing passes silently."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import gpu
from tiercache.errors import CudaError, NoGpuError

Main = Callable[..., int]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Have a GPU and compute-sanitizer, and run nothing: return the commands instead."""
    found: list[list[str]] = []

    def run(command: list[str], **_: str) -> int:
        found.append(command)
        return 0

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu, "open_runtime", lambda _: None)
    monkeypatch.setattr(gpu.shutil, "which", lambda name: f"/bin/{name}")
    return found


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    def call(*arguments: str) -> int:
        monkeypatch.setattr(gpu.sys, "argv", ["gpu", *arguments])
        return gpu.main()

    return call


def failing(error: Exception) -> Callable[[int], Any]:
    def fail(_: int) -> None:
        raise error

    return fail


def test_memcheck_ignores_calls_that_cuda_makes_itself(commands: list[list[str]], main: Main) -> None:
    """Both sanitizers fail for what they find; only memcheck knows the option."""
    assert [main("--part", kind) for kind in ("memcheck", "racecheck")] == [0, 0]
    memcheck, racecheck = (" ".join(command) for command in commands)
    for kind, command in (("memcheck", memcheck), ("racecheck", racecheck)):
        assert f"--tool {kind} --error-exitcode 9 --target-processes application-only " in command
    assert "--report-api-errors no " in memcheck
    assert "report-api-errors" not in racecheck


NO_DRIVER = CudaError("the NVIDIA driver supports CUDA 12.4, but CuPy was built for CUDA 13.2.")


@pytest.mark.parametrize(
    ("absent", "arguments", "code", "sentence"),
    [
        ("sanitizer", ("--part", "memcheck"), 1, "memcheck needs compute-sanitizer"),
        ("sanitizer", ("--part", "racecheck"), 1, "racecheck needs compute-sanitizer"),
        ("driver", (), 1, "CUDA 12.4, but CuPy was built for CUDA 13.2. Nothing was run"),
        ("part", ("--part", "memchek"), 2, "--part is memchek: it must be one of kernels, training"),
        ("part", ("--part",), 2, "--part is nothing: it must be one of"),
    ],
)
def test_what_cannot_run_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, commands: list[list[str]], main: Main, capsys: pytest.CaptureFixture[str],
    absent: str, arguments: tuple[str, ...], code: int, sentence: str,
) -> None:  # fmt: skip
    """An unusable driver is no machine without a GPU: the dry form does not take its place."""
    if absent == "sanitizer":
        monkeypatch.setattr(gpu.shutil, "which", lambda _: None)
    if absent == "driver":
        monkeypatch.setattr(gpu, "open_runtime", failing(NO_DRIVER))
    assert (main(*arguments), commands) == (code, [])
    assert sentence in capsys.readouterr().out


def test_without_a_gpu_the_shim_runs_kernels_and_training(
    monkeypatch: pytest.MonkeyPatch, commands: list[list[str]], main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "open_runtime", failing(NoGpuError("no NVIDIA driver was found.")))
    assert (main(), len(commands)) == (0, 2)
    said = capsys.readouterr().out
    assert all(f"{part} needs a GPU: it was left out" in said for part in ("recovery", "memcheck", "racecheck"))


def test_every_test_of_training_runs_on_a_gpu_or_it_is_said_why_not() -> None:
    listed = {Path(path).name for path in (*gpu.TRAINING, *gpu.RECOVERY)}
    alone = {f"test_{name}.py" for name in gpu.CPU_ALONE}
    assert not listed & alone
    folders = [gpu.ROOT / "tests" / name for name in ("train", "rows")]
    assert listed | alone == {path.name for folder in folders for path in folder.glob("test_*.py")}
    assert all((gpu.ROOT / path).exists() for path in (*gpu.TRAINING, *gpu.RECOVERY))
    assert all((gpu.ROOT / path).exists() for path in gpu.SANITIZED)
