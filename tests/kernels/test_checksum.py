"""CRC32C of runs of bytes: the published vectors, the library that the store uses, and bad bounds."""

from __future__ import annotations

from itertools import pairwise

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.kernels.cpu.checksum import crc32c, has_crc32c
from tiercache.store.blocks import page_checksums

pytestmark = pytest.mark.skipif(not has_crc32c(), reason="this CPU has no instruction for CRC32C")

VECTORS = {
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
}


@pytest.mark.parametrize(("data", "expected"), VECTORS.items())
def test_the_published_vectors(data: bytes, expected: int) -> None:
    """RFC 3720, appendix B.4, and the check value of the polynomial's catalog."""
    assert crc32c([(np.frombuffer(data, np.uint8), np.array([0, len(data)]))]).tolist() == [expected]


@given(
    sizes=st.lists(st.lists(st.integers(0, 70), max_size=9), max_size=4),
    first=st.integers(0, 9),
    seed=st.integers(0, 9),
)
def test_runs_of_any_lengths_in_any_arrays_are_what_the_library_says(
    sizes: list[list[int]], first: int, seed: int
) -> None:
    """Four at a time or one, empty ones too, from any address on; the store's own way gives the same."""
    rng, parts, expected = np.random.default_rng(seed), [], []
    for lengths in sizes:
        bounds = np.cumsum([first, *lengths]).astype(np.int64)
        data = rng.integers(0, 256, int(bounds[-1]) + 3, dtype=np.uint8)
        parts.append((data, bounds))
        expected += [google_crc32c.value(data[a:b].tobytes()) for a, b in pairwise(bounds.tolist())]
    assert crc32c(parts).tolist() == expected
    assert page_checksums(parts).tolist() == expected


@pytest.mark.parametrize("bounds", [[], [-1, 4], [0, 11], [4, 2], [5, 20, 9]])
def test_bounds_outside_the_data_are_refused(bounds: list[int]) -> None:
    """Nothing beyond an array is read."""
    with pytest.raises(ValueError, match="bounds must rise from 0 or more to at most 10"):
        crc32c([(np.zeros(10, np.uint8), np.array(bounds, np.int64))])
