"""The shim finds the errors it is meant to find: each is planted, and would go unseen without it."""

import numpy as np
import pytest

from tests.kernels.cases import Bags, same_bits
from tests.kernels.machines import Cuda
from tests.kernels.shim.device import ORDERS, KernelError, ShimDevice
from tests.kernels.test_pooling import pool
from tiercache.kernels.cpu.pooling import SUM

TURN = "__shared__ int64 s[256]; s[i] = a[i]; {wait} b[i] = s[i / 32 * 32 + (i + {step}) % 32];"
BODIES = {
    "write_before": "if (i == 0) b[-1] = 5;",
    "outside_shared": (
        "__shared__ int64 s[256]; __shared__ int64 t[256]; t[i] = 0; s[i + a[1]] = a[i]; __syncthreads(); b[i] = s[i];"
    ),
    "without_first_write": "__shared__ int64 s[256]; b[i] = s[i];",
    "two_barriers": "if (i < 7) __syncthreads(); else __syncwarp();",
    "part_of_a_mask": "if (i < 7) __ballot_sync(ALL_LANES, 1);",
    "not_in_its_mask": "__shfl_sync(1u, i, 0);",
    "xor_5": "b[i] = __shfl_xor_sync(ALL_LANES, a[i], 5);",
    "lane_9_of_8": "b[i] = __shfl_sync(ALL_LANES, a[i], 9, 8);",
    "up_3": "b[i] = __shfl_up_sync(ALL_LANES, a[i], 3);",
    "down_3": "b[i] = __shfl_down_sync(ALL_LANES, a[i], 3);",
    "ballot": "b[i] = __ballot_sync(ALL_LANES, i % 3 == 0);",
    "match": "b[i] = __match_any_sync(ALL_LANES, i % 16);",
    "twice": "b[i] = __float_as_uint(__uint_as_float(a[i]) * 2.0f);",
    "add": "b[i] = atomicAdd((unsigned long long*)a, 1ULL);",
    **{
        f"turn_{step}_{name}": TURN.format(wait=wait, step=step)
        for step in (1, 31)
        for name, wait in (("block", "__syncthreads();"), ("warp", "__syncwarp();"), ("none", ""))
    },
}
KERNELS = "".join(
    f'extern "C" __global__ void {name}(int64* a, int64* b, int64 n) {{ const int i = threadIdx.x; {body} }}\n'
    for name, body in BODIES.items()
)


def planted(old: str, new: str, order: str = "forward") -> ShimDevice:
    def changed(_: str, text: str) -> str:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the source."
        return text.replace(old, new)

    return ShimDevice(order, changed=changed)


def run(kernel: str, order: str, size: int = 256, *, flush: bool = False) -> np.ndarray:
    before = "__device__ __forceinline__ int slot_of_entry("
    device = ShimDevice(order, changed=lambda _, text: text.split(before)[0] + KERNELS, flush=flush)
    a, b = device.place(np.arange(size)), device.empty(size, np.int64)
    b[...] = -1
    device.launch(f"gathering.{kernel}", 1, (a.ctypes.data, b.ctypes.data, size))
    return b.copy()


def test_subnormal_numbers_are_zero_only_where_that_is_asked_for() -> None:
    """Only in kernels: the process computes as before, also after a kernel that raised an error."""
    assert np.array_equal(run("twice", "forward"), 2 * np.arange(256))
    assert not run("twice", "forward", flush=True).any()
    with pytest.raises(KernelError):
        run("two_barriers", "forward", flush=True)
    assert np.float32(1e-40) * np.float32(2) > 0


def gather(device: ShimDevice, dim: int = 8) -> None:
    rng = np.random.default_rng(0)
    vectors, slots = rng.standard_normal((50, dim)).astype(np.float32), rng.integers(0, 50, 40).astype(np.int32)
    slots[[3, 4]] = 0, 49
    out = device.array((40, dim), np.float32)
    Cuda(device).gather(Cuda(device).vectors(vectors), device.place(slots), out)
    assert np.array_equal(out, vectors[slots])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("old", "new", "order"),
    [
        ("if (row < count) store_anywhere", "if (row <= count) store_anywhere", "forward"),
        ("load_packed<VEC>(vectors + from[u] + d)", "load_packed<VEC>(vectors + from[u] + dim + d)", "forward"),
        ("if (lane_id() < count) {", "if (true) {", "forward"),
        ("vectors + from[u] + d)", "vectors + from[u] - dim + d)", "reversed"),
    ],
)
def test_an_index_behind_or_before_an_array_is_caught(old: str, new: str, order: str) -> None:
    """The error names block and thread. In the reversed order arrays are at the beginning of memory."""
    gather(planted(old, old, order))
    with pytest.raises(KernelError, match=r"gathering\.gather: block \d+, thread \d+: address 0x\w+ is outside every"):
        gather(planted(old, new, order))


def test_a_write_beside_an_array_that_hits_no_guard_is_caught() -> None:
    """Before an array that ends at its guard there is a fill pattern, which must not change."""
    with pytest.raises(AssertionError, match="wrote next to an array"):
        run("write_before", "forward")


@pytest.mark.parametrize(
    ("kernel", "order", "said"),
    [
        ("outside_shared", "forward", "thread 255: an index is outside its array in shared or local memory"),
        ("two_barriers", "forward", "threads wait for each other without end"),
        ("part_of_a_mask", "forward", "threads wait for each other without end"),
        ("not_in_its_mask", "random", "whose mask does not name it"),
    ],
)
def test_an_index_outside_shared_memory_and_parted_threads_are_told(kernel: str, order: str, said: str) -> None:
    """Half a block at a barrier, a lane missing from a mask: no test hangs."""
    with pytest.raises(KernelError, match=said):
        run(kernel, order)


@pytest.mark.parametrize("wait", ["block", "warp"])
@pytest.mark.parametrize("step", [1, 31])
def test_a_missing_barrier_changes_results_in_some_order(wait: str, step: int) -> None:
    """Each thread reads its neighbor's word: without the barrier it is not written yet in some order of threads."""
    place = np.arange(256)
    wanted = place // 32 * 32 + (place + step) % 32
    assert all(np.array_equal(run(f"turn_{step}_{wait}", order), wanted) for order in ORDERS)
    assert not all(np.array_equal(run(f"turn_{step}_none", order), wanted) for order in ORDERS)


def test_a_missing_barrier_in_a_kernel_of_ours_is_caught() -> None:
    """Lanes pool slots that other lanes mapped: the parity test of bags fails in some order."""
    case = Bags(
        32, 4, [9], np.array([SUM], np.int8), np.arange(0, 99, 3), np.arange(96, dtype=np.int32) % 9,
        np.empty(0, np.float32), np.arange(9, dtype=np.int32), np.ones((9, 4), np.float32), 0,
    )  # fmt: skip

    def agrees(device: ShimDevice) -> bool:
        try:
            return same_bits(pool(Cuda(device), case)["out"], case.pooled())
        except KernelError:
            return False

    barrier = "__syncwarp();  // from here on"
    assert all(agrees(planted(barrier, barrier, order)) for order in ORDERS)
    assert not all(agrees(planted(barrier, "// from here on", order)) for order in ORDERS)


def test_shared_memory_does_not_keep_what_a_block_before_left() -> None:
    assert (run("without_first_write", "forward") == np.uint64(0xA5A5A5A5A5A5A5A5).view(np.int64)).all()


def test_warp_operations_do_what_cudas_do() -> None:
    i = np.arange(256)
    lane = i % 32
    for order in ORDERS:
        assert np.array_equal(run("xor_5", order), i ^ 5)
        assert np.array_equal(run("lane_9_of_8", order), i // 8 * 8 + 1)
        assert np.array_equal(run("up_3", order), np.where(lane < 3, i, i - 3))
        assert np.array_equal(run("down_3", order), np.where(lane > 28, i, i + 3))
        assert (run("ballot", order)[:32] == 0x49249249).all()
        assert np.array_equal(run("match", order), 0x10001 << lane % 16)
        assert sorted(run("add", order)) == list(range(256))
