"""The CUDA device without a GPU: code for every architecture, its cache, and clear errors for missing parts."""

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kernels.cubin import end_of, kernels_of
from tiercache.kernels.cpu.rules import KINDS
from tiercache.kernels.cuda import cupy_device as cuda
from tiercache.kernels.cuda import launch

ROOT = Path(__file__).parents[2]
HOST: Any = None  # torch is not used before a device exists
needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")


@needs_cupy
@pytest.mark.parametrize("architecture", cuda.ARCHITECTURES)
def test_every_kernel_compiles_to_machine_code_and_no_step_spills_registers(architecture: str) -> None:
    """NVRTC needs no GPU. Registers are as in docs/design/0034: kernels reach the memory roof only without spills."""
    cubins = cuda.compile_all(architecture)
    assert set(cubins) == {path.stem for path in (ROOT / "kernels" / "cuda").glob("*.cu")}
    assert all(cubin[:4] == b"\x7fELF" for cubin in cubins.values())
    assert {name: end_of(cubin) - len(cubin) for name, cubin in cubins.items()} == dict.fromkeys(cubins, 0)
    found = kernels_of(cubins["update"]) | kernels_of(cubins["sorting"])
    assert len(found) == 4 * (len(KINDS) - 1) + 2 + 3  # all rules but the sum, which is of the CPU
    assert {name: kernel.stack_bytes for name, kernel in found.items() if kernel.stack_bytes} == {}
    if architecture != "sm_100":  # whose compiler takes more, so that half as many blocks are on an SM
        most = {name: 80 if "rowwise" in name else 64 for name in found if not name.endswith("_any")}
        assert {name: found[name] for name, registers in most.items() if found[name].registers > registers} == {}


@needs_cupy
@pytest.mark.parametrize("name", ["pooling", "initial"])
def test_compiled_code_flushes_and_fuses_nothing(name: str) -> None:
    """Seen in PTX, which a GPU newer than NVRTC loads: products and sums of float32 are rounded, and no more."""
    ptx = cuda.compile_source(name, "compute_90").decode()
    assert "mul.rn.f32" in ptx or "mul.f32" in ptx
    assert ".ftz" not in ptx
    assert "fma.rn.f32" not in ptx


@needs_cupy
def test_a_source_that_does_not_compile_is_told_with_the_compilers_log(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = launch.source("gathering").replace("int64 first_task;", "int64 first_task; no_such_type x;", 1)
    monkeypatch.setattr(cuda, "source", lambda _: broken)
    with pytest.raises(cuda.CudaError, match=r"gathering\.cu\(8\).*no_such_type"):
        cuda.compile_source("gathering", "sm_90")


def test_without_cupy_a_device_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(cuda.CudaError, match=r"CuPy cannot be imported .*pip install 'tiercache-embeddings\[cuda13\]'"):
        cuda.open_device(0, HOST)
    with pytest.raises(cuda.CudaError, match="CuPy cannot be imported"):
        cuda.compile_source("gathering", "sm_90")


class CUDARuntimeError(Exception):
    status: int


STATUS = {"cudaErrorInsufficientDriver": 35, "cudaErrorNoDevice": 100, "cudaErrorSystemDriverMismatch": 803}


@pytest.mark.parametrize(
    ("driver", "devices", "index", "kind", "said"),
    [
        (0, "cudaErrorInsufficientDriver", 0, cuda.NoGpuError,
         "no NVIDIA driver was found: install one that supports CUDA 13"),
        (12040, "cudaErrorInsufficientDriver", 0, cuda.CudaError,
         "the NVIDIA driver supports CUDA 12.4, but CuPy was built for CUDA 13.2"),
        (13000, "cudaErrorSystemDriverMismatch", 0, cuda.CudaError,
         r"of CUDA 13.0, could not list GPUs \(cudaErrorSystemDriverMismatch\): see nvidia-smi"),
        (13000, "cudaErrorNoDevice", 0, cuda.NoGpuError, "shows no GPU"),
        (13000, 0, 0, cuda.NoGpuError, "shows no GPU"),
        (13000, 2, 2, cuda.CudaError, "unknown GPU 2: the driver shows 2"),
    ],
)  # fmt: skip
def test_a_machine_that_cannot_run_cuda_is_told_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, driver: int, devices: int | str, index: int, kind: type, said: str
) -> None:
    def count() -> int:
        if isinstance(devices, int):
            return devices
        error = CUDARuntimeError(devices)
        error.status = STATUS[devices]
        raise error

    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError, runtimeGetVersion=lambda: 13020, driverGetVersion=lambda: driver,
        getDeviceCount=count,
    )  # fmt: skip
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(cuda, "_import_cupy", lambda: cupy)
    with pytest.raises(cuda.CudaError, match=said) as caught:
        cuda.open_device(index, HOST)
    assert caught.type is kind


def test_a_source_is_one_text_with_its_headers_in_place() -> None:
    for name in cuda.sources():
        text = launch.source(name)
        assert '#include "' not in text
        assert text.count('#line 1 "lanes.cuh"') == 1
        assert text.startswith(f'#line 1 "{name}.cu"')


Compiler = Callable[[], bytes]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    monkeypatch.setattr(cuda, "_IN_MEMORY", {})
    numbers = itertools.count(1)
    return lambda: b"code %d" % next(numbers)


def in_a_new_process(folder: Path | None, inputs: str, make: Compiler) -> bytes:
    cuda._IN_MEMORY.clear()
    return cuda.cached_code(folder, "sorting.sm_90.cuda", inputs, make)


def test_code_is_made_once_for_all_processes_and_anew_for_other_inputs(tmp_path: Path, compiler: Compiler) -> None:
    """Source, options and compiler are inputs; without a folder it is made once for each process."""
    for inputs, code in (("source", 1), ("source", 1), ("source", 1), ("edited", 2), ("edited", 2), ("source", 3)):
        assert in_a_new_process(tmp_path, inputs, compiler) == b"code %d" % code
        assert [path.name for path in tmp_path.iterdir()] == ["sorting.sm_90.cuda"]
    assert in_a_new_process(None, "source", compiler) == b"code 4"
    assert cuda.cached_code(None, "sorting.sm_90.cuda", "source", compiler) == b"code 4"


def test_a_damaged_file_is_made_anew(tmp_path: Path, compiler: Compiler) -> None:
    in_a_new_process(tmp_path, "source", compiler)
    path = tmp_path / "sorting.sm_90.cuda"
    whole = path.read_bytes()
    flipped = [bytes(b ^ (i == at) for i, b in enumerate(whole)) for at in (0, 40, len(whole) - 1)]
    for number, damaged in enumerate((b"", whole[:1], whole[:64], whole[:-1], *flipped), 2):
        path.write_bytes(damaged)
        for _ in range(2):
            assert in_a_new_process(tmp_path, "source", compiler) == b"code %d" % number


def test_a_folder_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, compiler: Compiler) -> None:
    """The code is returned all the same; an error of the compiler leaves no file either."""
    (tmp_path / "sorting.sm_90.cuda").mkdir()
    assert in_a_new_process(tmp_path, "source", compiler) == b"code 1"
    assert [path.name for path in tmp_path.iterdir()] == ["sorting.sm_90.cuda"]
    assert in_a_new_process(tmp_path / "missing", "source", compiler) == b"code 2"

    def fails() -> bytes:
        raise RuntimeError("does not compile")

    with pytest.raises(RuntimeError, match="does not compile"):
        cuda.cached_code(tmp_path, "rows.sm_90.cuda", "other", fails)
    assert not (tmp_path / "rows.sm_90.cuda").exists()
