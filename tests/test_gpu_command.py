"""make test-gpu runs everything possible on a GPU, and nothing missing passes silently."""

from pathlib import Path
from typing import Any

import pytest

from tests import gpu
from tiercache.errors import CudaError, NoGpuError


class Commands:
    def __init__(self) -> None:
        self.run: list[list[str]] = []

    def __call__(self, command: list[str], **_: str) -> int:
        self.run.append(command)
        return 0


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Have a GPU and compute-sanitizer, and run nothing."""
    fake = Commands()
    monkeypatch.setattr(gpu, "run", fake)
    monkeypatch.setattr(gpu, "open_runtime", lambda _: None)
    monkeypatch.setattr(gpu.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(gpu.sys, "argv", ["gpu"])
    return fake


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(gpu.sys, "argv", ["gpu", *arguments])
    return gpu.main()


def test_memcheck_ignores_calls_that_cuda_makes_itself(monkeypatch: pytest.MonkeyPatch, commands: Commands) -> None:
    """Both sanitizers fail for what they find; only memcheck knows the option."""
    assert [run(monkeypatch, "--part", kind) for kind in ("memcheck", "racecheck")] == [0, 0]
    memcheck, racecheck = (" ".join(command) for command in commands.run)
    for kind, command in (("memcheck", memcheck), ("racecheck", racecheck)):
        assert f"--tool {kind} --error-exitcode 9 --target-processes application-only " in command
    assert "--report-api-errors no " in memcheck
    assert "report-api-errors" not in racecheck


@pytest.mark.parametrize("kind", ["memcheck", "racecheck"])
def test_a_gpu_without_compute_sanitizer_fails_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, commands: Commands, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.setattr(gpu.shutil, "which", lambda _: None)
    assert run(monkeypatch, "--part", kind) == 1
    assert commands.run == []
    assert f"{kind} needs compute-sanitizer" in capsys.readouterr().out


def test_an_unknown_part_is_an_error(
    monkeypatch: pytest.MonkeyPatch, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--part", "memchek") == run(monkeypatch, "--part") == 2
    assert commands.run == []
    assert "--part is memchek: it must be one of kernels, training" in capsys.readouterr().out


def test_without_a_gpu_kernels_and_training_run_through_the_shim_and_the_rest_is_said(
    monkeypatch: pytest.MonkeyPatch, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_: int) -> Any:
        raise NoGpuError("no NVIDIA driver was found.")

    monkeypatch.setattr(gpu, "open_runtime", missing)
    assert run(monkeypatch) == 0
    assert len(commands.run) == 2
    said = capsys.readouterr().out
    assert all(f"{part} needs a GPU: it was left out" in said for part in ("recovery", "memcheck", "racecheck"))


def test_a_gpu_that_cannot_be_used_is_no_machine_without_one(
    monkeypatch: pytest.MonkeyPatch, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    def unusable(_: int) -> Any:
        raise CudaError("the NVIDIA driver supports CUDA 12.4, but CuPy was built for CUDA 13.2.")

    monkeypatch.setattr(gpu, "open_runtime", unusable)
    assert run(monkeypatch) == 1
    assert commands.run == []
    assert "CUDA 12.4, but CuPy was built for CUDA 13.2. Nothing was run" in capsys.readouterr().out


def test_every_test_of_training_runs_on_a_gpu_or_it_is_said_why_not() -> None:
    listed = {Path(path).name for path in (*gpu.TRAINING, *gpu.RECOVERY)}
    alone = {f"test_{name}.py" for name in gpu.CPU_ALONE}
    assert not listed & alone
    folders = [gpu.ROOT / "tests" / name for name in ("train", "rows")]
    assert listed | alone == {path.name for folder in folders for path in folder.glob("test_*.py")}
    assert all((gpu.ROOT / path).exists() for path in (*gpu.TRAINING, *gpu.RECOVERY))
    assert all((gpu.ROOT / path).exists() for path in gpu.SANITIZED)
