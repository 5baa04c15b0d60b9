"""The calls of the device to CuPy: a stand-in for CuPy runs the launches on the shim."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.kernels.cases import same_bits
from tests.kernels.machines import Cpu
from tests.kernels.shim.device import ShimDevice
from tests.kernels.test_update import rule_of, stepped
from tiercache.kernels.cpu import compile as compiling
from tiercache.kernels.cuda import cupy_device as cuda
from tiercache.kernels.cuda import launch
from tiercache.kernels.cuda.gathering import Gathered, gather
from tiercache.kernels.cuda.pooling import Features, Ids, PoolPlan
from tiercache.kernels.cuda.sorting import sort_groups
from tiercache.kernels.cuda.update import update_many
from tiercache.kernels.step import Gradients, Step, Vectors

STREAM = 0x5EA


class OnDevice(np.ndarray):
    """An array that exposes its address as CuPy's and torch's do."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.__array_interface__


class Nvrtc:
    """The part of NVRTC that is used: a compiled program is its options and its text."""

    class NVRTCError(RuntimeError):
        """A stand-in for CuPy's error."""

    def __init__(self) -> None:
        self.known: tuple[int, ...] = (80, 90, 100)
        self.programs: dict[int, tuple[str, tuple[str, ...]]] = {}
        self.destroyed, self.fails = 0, ""

    def getVersion(self) -> tuple[int, int]:  # noqa: N802 - CuPy's names, here and below
        return 99, 1

    def getSupportedArchs(self) -> tuple[int, ...]:  # noqa: N802
        return self.known

    def createProgram(self, text: str, name: str, *_headers: object) -> int:  # noqa: N802
        self.programs[len(self.programs)] = text, (name,)
        return len(self.programs) - 1

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:  # noqa: N802
        text, (name,) = self.programs[program]
        self.programs[program] = text, options
        if name == self.fails:
            raise self.NVRTCError("of no use")

    def getProgramLog(self, _program: int) -> str:  # noqa: N802
        return "no such word"

    def getCUBIN(self, program: int) -> bytes:  # noqa: N802
        text, options = self.programs[program]
        return "\0".join(("cubin", *options, text)).encode()

    def getPTX(self, program: int) -> bytes:  # noqa: N802
        text, options = self.programs[program]
        return "\0".join(("// ptx", *options, text)).encode()

    def destroyProgram(self, _program: int) -> None:  # noqa: N802
        self.destroyed += 1


class DriverError(RuntimeError):
    """A stand-in for CuPy's CUDADriverError."""


class Cupy:
    """The part of CuPy that a device uses."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.shim, self.nvrtc = ShimDevice("random"), Nvrtc()
        self.loaded, self.refuses = list[bytes](), False
        shown = {"attributes": {"MultiProcessorCount": 1}, "compute_capability": f"{capability[0]}{capability[1]}"}
        runtime = SimpleNamespace(
            runtimeGetVersion=lambda: 13020, driverGetVersion=lambda: 13000, getDeviceCount=lambda: 1,
            CUDARuntimeError=RuntimeError,
        )  # fmt: skip
        self.cuda = SimpleNamespace(
            runtime=runtime, Device=lambda index: SimpleNamespace(id=index, **shown),
            Stream=SimpleNamespace(from_external=lambda stream: stream.__cuda_stream__()),
            Module=lambda: Module(self), driver=SimpleNamespace(CUDADriverError=DriverError),
        )  # fmt: skip

    def place(self, array: NDArray[Any]) -> NDArray[Any]:
        return self.shim.place(array).view(OnDevice)


class Torch:
    def __init__(self, shim: ShimDevice) -> None:
        self._shim, self.taken, self.uploads, self.inside = shim, 0, 0, 0

    def stream(self) -> int:
        return STREAM

    @contextmanager
    def within(self) -> Iterator[None]:
        self.inside += 1
        yield
        self.inside -= 1

    def empty(self, size: int, dtype: Any) -> NDArray[Any]:
        array = self._shim.empty(size, dtype)
        self.taken += array.nbytes
        return array.view(OnDevice)

    def put(self, table: NDArray[Any]) -> NDArray[Any]:
        self.uploads += 1
        return self._shim.put(table).view(OnDevice)

    def read(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.array(array)

    def sort(self, keys: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        ordered, order = self._shim.sort(np.asarray(keys))
        return ordered.view(OnDevice), order.view(OnDevice)


class Module:
    def __init__(self, cupy: Cupy) -> None:
        self.cupy, self.name = cupy, ""

    def load(self, code: bytes) -> None:
        assert type(code) is bytes
        if self.cupy.refuses:
            raise DriverError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
        self.cupy.loaded.append(code)
        self.name = next(name for name in cuda.sources() if code.endswith(b"\0" + launch.source(name).encode()))

    def get_function(self, kernel: str) -> Any:
        def start(grid: tuple[int], block: tuple[int], words: tuple[Any, ...], *, stream: tuple[int, int]) -> None:
            assert stream == (0, STREAM)
            assert block == (launch.BLOCK_THREADS,)
            assert {type(word) for word in words} <= {np.int64, np.float32, np.ndarray}
            assert all(word.size == 1 for word in words), "CuPy passes no array by value that has several elements"
            arguments = [word if isinstance(word, np.ndarray) else word.item() for word in words]
            self.cupy.shim.launch(f"{self.name}.{kernel}", grid[0], arguments)

        return start


def stand_in(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> Cupy:
    """Replace CuPy and NVRTC by stand-ins, and keep no compiled code on disk."""
    fake = Cupy(capability)
    monkeypatch.setattr(cuda, "_import_cupy", lambda: fake)
    monkeypatch.setattr(cuda, "_nvrtc", lambda: fake.nvrtc)
    monkeypatch.setattr(compiling, "cache_folder", lambda: None)
    monkeypatch.setattr(cuda, "_IN_MEMORY", {})
    return fake


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cupy]:
    fake = stand_in(monkeypatch)
    yield fake
    fake.shim.close()


def opened(cupy: Cupy) -> tuple[cuda.CudaDevice, Torch]:
    host = Torch(cupy.shim)
    return cuda.open_device(0, host), host


def test_a_step_runs_on_the_given_stream_with_memory_of_torch(cupy: Cupy) -> None:
    rng, cols = np.random.default_rng(0), np.zeros(1, np.int64)
    vectors, sums = rng.standard_normal((30, 8)).astype(np.float32), rng.random((30, 8)).astype(np.float32)
    slots, gradient = rng.integers(0, 30, 100).astype(np.int32), rng.standard_normal((100, 8)).astype(np.float32)
    wanted = stepped(Cpu(), "adagrad", [vectors, sums], slots, Cpu().one_id(gradient))
    fields = [cupy.place(field) for field in (vectors, sums)]
    device, host = opened(cupy)
    (runs,) = sort_groups(device, [([cupy.place(slots)], 30)])
    described = Gradients(cupy.place(gradient.reshape(-1)), 100, 8, cols)
    update_many(device, [Step(Vectors(fields[0], 8), fields[1:], runs, described, rule_of("adagrad", 8))])
    assert all(same_bits(np.array(field), right) for field, right in zip(fields, wanted, strict=True))
    assert host.taken
    assert host.inside == 0
    assert np.array_equal(device.read(runs.memory), np.array(runs.memory))


def test_parts_travel_with_their_launch(cupy: Cupy) -> None:
    device, host = opened(cupy)
    vectors, slots = cupy.place(np.ones((5, 4), np.float32)), cupy.place(np.zeros(3, np.int32))
    out = cupy.place(np.zeros((3, 4), np.float32))
    for _ in range(3):
        gather(device, [Gathered(Vectors(vectors, 4), slots, out)])
    assert (host.uploads, len(cupy.loaded)) == (0, 1)
    assert (out == 1).all()
    device.prepare()
    assert len(cupy.loaded) == len(cuda.sources())


def test_an_array_on_the_device_travels_as_its_address(cupy: Cupy) -> None:
    """It is never converted to a number: torch refuses that for a tensor on a GPU."""

    class Away:
        def __init__(self, array: NDArray[Any]) -> None:
            self.__cuda_array_interface__ = array.__array_interface__

        def __array__(self, *_: Any) -> Any:
            raise TypeError("it is not in host memory")

    class There(Torch):
        def put(self, table: NDArray[Any]) -> Any:
            held.append(super().put(table))
            return Away(held[-1])

    held: list[Any] = []
    device = cuda.open_device(0, There(cupy.shim))
    vectors, local = cupy.place(np.ones((5, 4), np.float32)), cupy.place(np.arange(5, dtype=np.int32))
    ids, slots = cupy.place(np.zeros(3, np.int32)), cupy.place(np.zeros(3, np.int32))
    out, one = cupy.place(np.zeros((3, 4), np.float32)), np.zeros(1, np.int64)
    plan = PoolPlan(device, [Features(Vectors(vectors, 4), local, one, one, np.zeros(1, np.int8))], 4)
    plan.pool([Ids(ids, slots)], out)
    assert (out == 1).all()
    assert held


def test_a_gpu_loads_what_is_compiled_without_one(cupy: Cupy) -> None:
    """The same options for both, and no others: the bits of the CPU's kernels, also for numbers below 2^-126."""
    cuda.open_device(0, Torch(cupy.shim)).prepare()
    assert cupy.loaded == list(cuda.compile_all("sm_90").values())
    assert all(code.startswith(b"cubin") for code in cupy.loaded)
    options = cupy.loaded[0].decode().split("\0")[1:-1]
    assert {"-fmad=false", "-ftz=false", "-arch=sm_90"} <= set(options)
    assert cupy.nvrtc.destroyed == len(cupy.nvrtc.programs)
    compiled, loaded = len(cupy.nvrtc.programs), len(cupy.loaded)
    cuda.open_device(0, Torch(cupy.shim)).prepare()
    assert len(cupy.nvrtc.programs) == compiled, "a second device of the process compiles again"
    assert len(cupy.loaded) == loaded, "a second device of the same GPU loads again"


@pytest.mark.parametrize(("capability", "wanted"), [((9, 5), "compute_90"), ((12, 0), "compute_100")])
def test_a_gpu_that_the_compiler_does_not_know_gets_code_for_its_driver(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], wanted: str
) -> None:
    """PTX of the next older architecture."""
    cupy = stand_in(monkeypatch, capability)
    cuda.open_device(0, Torch(cupy.shim)).prepare()
    assert cupy.loaded == list(cuda.compile_all(wanted).values())
    assert all(code.startswith(b"// ptx") for code in cupy.loaded)


@pytest.mark.parametrize(
    ("capability", "known", "said"),
    [
        ((9, 0), (100, 120), r"NVRTC of CUDA 99\.1 compiles for .* 10\.0 and newer, .* has 9\.0: run `pip install"),
        ((7, 5), (80, 90, 100), r"GPU 0 has compute capability 7\.5: at least 8\.0 is needed"),
    ],
)
def test_a_gpu_that_kernels_are_not_compiled_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], known: tuple[int, ...], said: str
) -> None:
    cupy = stand_in(monkeypatch, capability)
    cupy.nvrtc.known = known
    with pytest.raises(cuda.CudaError, match=said):
        cuda.open_device(0, Torch(cupy.shim))


def test_what_fails_while_kernels_are_prepared_is_a_sentence(cupy: Cupy) -> None:
    device = cuda.open_device(0, Torch(cupy.shim))
    cupy.nvrtc.fails = "nothing.cu"
    said = r"NVRTC, CUDA's compiler, cannot compile .* \(of no use\): run `pip install"
    with pytest.raises(cuda.CudaError, match=said):
        device.prepare()
    cupy.nvrtc.fails = "sorting.cu"
    with pytest.raises(cuda.CudaError, match=r"sorting\.cu does not compile for sm_90: no such word"):
        device.prepare()
    cupy.nvrtc.fails, cupy.refuses = "", True
    said = r"driver, of CUDA 13\.0, does not load .*\.cu, compiled for sm_90 \(CUDA_ERROR_UNS.*\): update the driver"
    with pytest.raises(cuda.CudaError, match=said):
        cuda.open_device(0, Torch(cupy.shim)).prepare()


def test_large_tables_are_not_kept(cupy: Cupy) -> None:
    """Tables of a switch's pieces differ each time, and would fill the GPU."""
    device, host = opened(cupy)
    for size, uploads in ((64 << 10, 1), ((64 << 10) + 1, 3)):
        for _ in range(2):
            device.table(np.zeros(size, np.uint8))
        assert host.uploads == uploads


def test_an_array_that_is_not_on_the_device_is_refused(cupy: Cupy) -> None:
    """A list has no address, and a kernel cannot reach an array in host memory."""
    device, _ = opened(cupy)
    with pytest.raises(ValueError, match="of type list: pass an array on the CUDA device"):
        sort_groups(device, [([[1, 2]], 3)])
    vectors, slots = cupy.place(np.ones((5, 4), np.float32)), cupy.place(np.zeros(3, np.int32))
    out = np.zeros((3, 4), np.float32)
    for host in (out, torch.from_numpy(out)):
        with pytest.raises(ValueError, match=r"out is of type (ndarray|Tensor): pass an array on the CUDA device"):
            gather(device, [Gathered(Vectors(vectors, 4), slots, host)])
