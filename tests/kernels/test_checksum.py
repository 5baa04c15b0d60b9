"""CRC32C: published values, and those of the library that the store uses without a kernel."""

from itertools import pairwise

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.apart import ran
from tiercache.kernels.cpu.checksum import crc32c, has_crc32c
from tiercache.store.records import page_checksums

needs_crc32c = pytest.mark.skipif(not has_crc32c(), reason="this CPU has no instruction for CRC32C")

VECTORS = {
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
}


@needs_crc32c
@pytest.mark.parametrize(("data", "expected"), VECTORS.items())
def test_the_published_vectors(data: bytes, expected: int) -> None:
    """RFC 3720, appendix B.4, and the check value of the polynomial's catalog."""
    assert crc32c([(np.frombuffer(data, np.uint8), np.array([0, len(data)]))]).tolist() == [expected]


@needs_crc32c
@given(
    sizes=st.lists(st.lists(st.integers(0, 70), max_size=9), max_size=4),
    first=st.integers(0, 9),
    seed=st.integers(0, 9),
)
def test_runs_of_any_lengths_in_any_arrays_are_as_in_the_library(sizes: list[list[int]], first: int, seed: int) -> None:
    rng, parts, expected = np.random.default_rng(seed), [], []
    for lengths in sizes:
        bounds = np.cumsum([first, *lengths]).astype(np.int64)
        data = rng.integers(0, 256, int(bounds[-1]) + 3, dtype=np.uint8)
        parts.append((data, bounds))
        expected += [google_crc32c.value(data[a:b].tobytes()) for a, b in pairwise(bounds.tolist())]
    assert crc32c(parts).tolist() == expected
    assert page_checksums(parts).tolist() == expected


@needs_crc32c
@pytest.mark.parametrize(("bounds", "wrong"), [([-1, 4], -1), ([0, 11], 11), ([4, 2], 2), ([5, 20, 9], 20)])
def test_bounds_outside_the_data_are_refused(bounds: list[int], wrong: int) -> None:
    fine = np.zeros(20, np.uint8), np.array([20])
    with pytest.raises(ValueError, match=f"bound {wrong} in part 1, which has 10 bytes: bounds must rise"):
        crc32c([fine, (np.zeros(10, np.uint8), np.array(bounds, np.int64)), fine])


@needs_crc32c
def test_a_part_without_bounds_is_refused() -> None:
    data = np.zeros(10, np.uint8)
    assert crc32c([(data, np.array([3]))]).size == 0
    with pytest.raises(ValueError, match="part 1 has no bounds"):
        crc32c([(data, np.array([0, 10])), (data, np.array([], np.int64))])


def test_a_cpu_without_the_instruction_has_no_such_kernel_to_compile() -> None:
    """LLVM would end the process when ``prepare`` compiles every kernel."""
    code = (
        "from llvmlite import binding; features = binding.get_host_cpu_features(); features['sse4.2'] = False;"
        "binding.get_host_cpu_features = lambda: features;"
        "from tiercache.kernels.cpu import checksum, compile;"
        "print(checksum.has_crc32c(), '_crc32c' in {kernel.name for kernel in compile.KERNELS})"
    )
    assert ran(code).stdout.split() == ["False", "False"]
