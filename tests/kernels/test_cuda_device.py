"""What the device asks of CuPy: a stand-in for CuPy runs the launches on the shim."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.kernels.cases import same_bits
from tests.kernels.shim.device import ShimDevice
from tests.kernels.test_update import update as update_on_cpu
from tiercache.kernels import cuda, cuda_gathering, cuda_sorting, cuda_update, launch, update

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

STREAM = 0x5EA


class OnDevice(np.ndarray):
    """An array that tells its address as CuPy's and torch's do."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.__array_interface__


class Cupy:
    """The part of CuPy that a device uses."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.shim, self.streams, self.uploads, self.compiled = ShimDevice("random"), [0], 0, 0
        attributes = {
            "MultiProcessorCount": 1, "ComputeCapabilityMajor": capability[0], "ComputeCapabilityMinor": capability[1],
        }  # fmt: skip
        runtime = SimpleNamespace(
            runtimeGetVersion=lambda: 13020, driverGetVersion=lambda: 13000, getDeviceCount=lambda: 1,
            CUDARuntimeError=RuntimeError,
        )  # fmt: skip
        self.cuda = SimpleNamespace(
            runtime=runtime, Device=lambda index: self._device(index, attributes),
            Stream=SimpleNamespace(null=self._stream(0), from_external=lambda s: self._stream(s.__cuda_stream__()[1])),
            UnownedMemory=lambda address, nbytes, owner, _: (address, nbytes, owner),
            MemoryPointer=lambda memory, offset: memory[0] + offset,
        )  # fmt: skip

    def _device(self, index: int, attributes: dict[str, int]) -> Any:
        class Device:
            id = index

            def __enter__(self) -> None: ...

            def __exit__(self, *_: object) -> None: ...

        Device.attributes = attributes  # type: ignore[attr-defined]
        return Device()

    def _stream(self, pointer: int) -> Any:
        cupy = self

        class Stream:
            def __enter__(self) -> None:
                cupy.streams.append(pointer)

            def __exit__(self, *_: object) -> None:
                cupy.streams.pop()

        return Stream()

    def RawModule(self, code: str, options: tuple[str, ...]) -> Any:  # noqa: N802 - CuPy's name
        """Compile on the shim."""
        assert "-fmad=false" in options
        self.compiled += 1
        name = next(name for name in cuda.sources() if launch.source(name) == code)

        def function(kernel: str) -> Any:
            def start(grid: tuple[int], block: tuple[int], words: tuple[Any, ...], *, shared_mem: int) -> None:
                assert self.streams[-1] == STREAM
                assert block == (launch.BLOCK_THREADS,)
                assert {type(word) for word in words} <= {np.int64, np.float32}
                self.shim.launch(f"{name}.{kernel}", grid[0], [word.item() for word in words], shared_mem)

            return start

        return SimpleNamespace(get_function=function, compile=lambda: None)

    def asarray(self, array: NDArray[Any]) -> NDArray[Any]:
        """Copy to the device, as CuPy does with what is not there."""
        if isinstance(array, OnDevice):
            return array
        assert self.streams[-1] == STREAM
        self.uploads += 1
        return self.shim.place(array).view(OnDevice)

    def asnumpy(self, array: NDArray[Any]) -> NDArray[Any]:
        """Copy from the device."""
        assert self.streams[-1] == STREAM
        return np.array(array)

    def ndarray(self, size: int, dtype: Any, address: int) -> NDArray[Any]:
        """Return an array over memory that someone else gave."""
        memory = (ctypes.c_char * (size * np.dtype(dtype).itemsize)).from_address(address)
        return np.frombuffer(memory, dtype).view(OnDevice)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cupy]:
    """Stand in for CuPy and NVRTC."""
    standing_in = Cupy()
    monkeypatch.setattr(cuda, "_import_cupy", lambda: standing_in)
    monkeypatch.setattr(cuda, "_nvrtc", lambda: None)
    yield standing_in
    standing_in.shim.close()


@contextmanager
def opened(cupy: Cupy) -> Iterator[tuple[cuda.CudaDevice, list[int]]]:
    """Open a device that launches on a stream of ours and takes scratch from us."""
    asked: list[int] = []

    def allocate(nbytes: int) -> Any:
        asked.append(nbytes)
        return cupy.shim.empty(nbytes, np.uint8).view(OnDevice)

    yield cuda.open_device(stream=lambda: STREAM, allocate=allocate), asked


def test_a_step_runs_on_the_given_stream_with_memory_of_the_given_allocator(cupy: Cupy) -> None:
    """Sort and update through the device's own code: the CPU's bits; scratch is all that is taken."""
    rng, cols = np.random.default_rng(0), np.zeros(1, np.int64)
    vectors, sums = rng.standard_normal((30, 8)).astype(np.float32), rng.random((30, 8)).astype(np.float32)
    slots, gradient = rng.integers(0, 30, 100).astype(np.int32), rng.standard_normal((100, 8)).astype(np.float32)
    wanted = update_on_cpu("adagrad", vectors, [sums], slots, update.one_id_gradients(gradient, cols))
    place = cupy.shim.place
    fields = [place(field).view(OnDevice) for field in (vectors, sums)]
    with opened(cupy) as (device, asked):
        buffers, scratch = cuda_sorting.SortBuffers(device), cuda_update.UpdateBuffers(device)
        pairs = cuda_sorting.sort_slots(device, place(slots).view(OnDevice), 30, buffers)
        described = cuda_update.one_id_gradients(device, place(gradient).view(OnDevice), cols)
        cuda_update.update_adagrad(device, *fields, pairs, described, scratch, learning_rate=0.1)
        assert all(same_bits(np.array(field), right) for field, right in zip(fields, wanted, strict=True))
        assert sum(asked) == buffers.nbytes + scratch.nbytes
        assert np.array_equal(device.read(pairs), np.array(pairs))


def test_tables_of_parts_go_to_the_device_once(cupy: Cupy) -> None:
    """A step with the buffers of the one before uploads nothing and compiles nothing."""
    place = cupy.shim.place
    arrays = [place(np.ones((5, 4), np.float32)), place(np.zeros(3, np.int32)), place(np.zeros((3, 4), np.float32))]
    with opened(cupy) as (device, _):
        for _ in range(3):
            cuda_gathering.gather(device, *(array.view(OnDevice) for array in arrays))
        assert (cupy.uploads, cupy.compiled) == (1, 1)
        assert (arrays[2] == 1).all()
        device.prepare()
        assert cupy.compiled == len(cuda.sources())


def test_large_tables_are_not_kept(cupy: Cupy) -> None:
    """Those of a switch's pieces differ each time, and would fill the GPU."""
    with opened(cupy) as (device, _):
        for size, uploads in ((64 << 10, 1), ((64 << 10) + 1, 3)):
            tables = [device.put(np.zeros(size, np.uint8)) for _ in range(2)]
            assert cupy.uploads == uploads
            assert all(table.size == size for table in tables)


def test_an_array_that_is_not_on_the_device_is_refused(cupy: Cupy) -> None:
    """A list has no address."""
    with opened(cupy) as (device, _), pytest.raises(ValueError, match="of type list: give an array on the CUDA device"):
        cuda_sorting.sort_slots(device, [1, 2], 3, cuda_sorting.SortBuffers(device))


def test_an_array_in_host_memory_is_refused(cupy: Cupy) -> None:
    """CuPy would copy it, and what a kernel writes would be lost."""
    out = np.zeros((3, 4), np.float32)
    arrays = [cupy.shim.place(a).view(OnDevice) for a in (np.ones((5, 4), np.float32), np.zeros(3, np.int32))]
    with opened(cupy) as (device, _), pytest.raises(ValueError, match="ndarray lies in host memory"):
        cuda_gathering.gather(device, *arrays, out)


def test_an_array_that_has_only_dlpack_is_taken_without_a_copy() -> None:
    """The kernel writes to the memory of its owner."""

    class Exported:
        def __init__(self, array: NDArray[Any]) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    device = ShimDevice()
    vectors, slots = device.place(np.ones((5, 4), np.float32)), device.place(np.zeros(3, np.int32))
    out = device.place(np.zeros((3, 4), np.float32))
    cuda_gathering.gather(device, *(Exported(array) for array in (vectors, slots, out)))
    assert (out == 1).all()
    ids = Exported(device.place(np.array([1, 2**32 + 1], np.int64)))
    assert cuda_gathering.check_ids(device, ids, np.array([0, 2]), np.array([7])) == 1


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled for 8.0 and newer."""
    monkeypatch.setattr(cuda, "_import_cupy", lambda: Cupy((7, 5)))
    monkeypatch.setattr(cuda, "_nvrtc", lambda: None)
    with pytest.raises(cuda.CudaError, match=r"GPU 0 has compute capability 7\.5: at least 8\.0 is needed"):
        cuda.open_device()
