"""Entries by owner: the numba kernels against NumPy, and the CUDA sources against the numba kernels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.shim.device import ORDERS, ShimDevice, device_for, devices
from tests.kernels.test_cuda_key_index import keys_of_hashes
from tiercache.kernels import bucketing, cuda_bucketing
from tiercache.kernels.bits import hash_keys

NONE = np.empty(0, np.int32)
WAYS = st.sampled_from([1, 2, 3, 7, 8, 255, 256, 257, 1000, 1023, 1024])


def owner_by_definition(hashed: int, num_owners: int) -> int:
    """Return the r with floor(r * 2^64 / W) <= hash < floor((r + 1) * 2^64 / W), by whole numbers."""
    bounds = [r * 2**64 // num_owners for r in range(num_owners + 1)]
    return int(np.searchsorted(np.array(bounds[1:], object), hashed, side="right"))


def rooms(size: int, num_owners: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return room for order, place and starts."""
    return np.full(size, -9, np.int32), np.full(size, -9, np.int32), np.full(num_owners + 1, -9)


def assert_buckets(owners: np.ndarray, num_owners: int, done: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Compare with a stable sort; entries without an owner come last."""
    order, place, starts = done
    wanted = np.argsort(owners, kind="stable")
    assert np.array_equal(order, wanted)
    assert np.array_equal(order[place], np.arange(owners.size))
    assert np.array_equal(np.diff(starts), np.bincount(owners, minlength=num_owners + 1)[:num_owners])
    assert starts[0] == 0


@pytest.mark.parametrize("num_owners", [1, 2, 3, 5, 7, 64, 100, 1000, 1023, 1024])
def test_a_key_belongs_to_the_rank_whose_range_has_its_hash(num_owners: int) -> None:
    """At every bound, one before and one behind, and at both ends of the hashes: as whole numbers of any size say."""
    bounds = [r * 2**64 // num_owners for r in range(1, num_owners)]
    hashes = [
        0,
        1,
        2**64 - 1,
        2**63,
        *(bound + step for bound in bounds[:: max(1, num_owners // 25)] for step in (-1, 0, 1)),
    ]
    keys, table_id = keys_of_hashes(hashes, 99), 99
    wanted = [owner_by_definition(h, num_owners) for h in hashes]
    owners = np.empty(keys.size, np.int16)
    bucketing.key_owners(keys, table_id, num_owners, owners)
    assert owners.tolist() == wanted
    device = device_for("forward")
    there = device.empty(keys.size, np.int16)
    cuda_bucketing.key_owners(device, device.place(keys), table_id, num_owners, there)
    assert device.read(there).tolist() == wanted


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.sampled_from([0, 1, 2, 31, 255, 256, 257, 700]), min_size=1, max_size=4),
    num_owners=WAYS,
    few=st.booleans(),
    order=st.sampled_from(ORDERS),
)
def test_keys_stand_by_owner_in_batch_order(
    seed: int, sizes: list[int], num_owners: int, few: bool, order: str
) -> None:
    """Several tables, uniform keys and one key over and over."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(-(2**63), -(2**63) + 3 if few else 2**63 - 1, sum(sizes))
    starts, table_ids = np.cumsum([0, *sizes]), rng.integers(0, 2**64, len(sizes), np.uint64)
    owners = np.array(
        [
            owner_by_definition(int(h), num_owners) if num_owners < 10 else int(h) * num_owners >> 64
            for table_id, a, b in zip(table_ids.tolist(), starts[:-1], starts[1:], strict=True)
            for h in hash_keys(keys[a:b], table_id)
        ],
        np.int64,
    )
    done = rooms(keys.size, num_owners)
    bucketing.bucket_keys(keys, table_ids, starts, num_owners, *done)
    assert_buckets(owners, num_owners, done)
    device = device_for(order)
    there = tuple(device.place(array) for array in rooms(keys.size, num_owners))
    buffers = cuda_bucketing.BucketBuffers(device)
    cuda_bucketing.bucket_keys(device, device.place(keys), table_ids, starts, num_owners, *there, buffers)
    assert all(np.array_equal(device.read(a), b) for a, b in zip(there, done, strict=True))
    device.close()


@pytest.mark.parametrize("num_owners", [1, 5, 1024])
def test_local_ids_stand_by_owner_and_bad_ones_behind_all(num_owners: int) -> None:
    """Two tables, ids of 4 and 8 bytes, a negative id, one behind its table, and an owner that is none."""
    rng = np.random.default_rng(num_owners)
    owner_of_local = rng.integers(0, num_owners, 90).astype(np.int16)
    owner_of_local[4] = -1
    bases, limits, starts = np.array([0, 40]), np.array([40, 50]), np.array([0, 500, 900])
    ids = np.concatenate([rng.integers(0, 40, 500), rng.integers(0, 50, 400)]).astype(np.int32)
    ids[[3, 600]], ids[7] = -1, 40
    owners = np.concatenate([owner_of_local[ids[:500]], owner_of_local[40 + ids[500:].clip(0)]]).astype(np.int64)
    owners[[3, 600, 7]] = num_owners
    owners[owners < 0] = num_owners
    done = rooms(900, num_owners)
    bucketing.bucket_ids(ids, bases, limits, starts, owner_of_local, num_owners, *done)
    assert_buckets(owners, num_owners, done)
    assert done[2][-1] == (owners < num_owners).sum()
    for device in devices():
        for dtype in (np.int32, np.int64):
            there = tuple(device.place(array) for array in rooms(900, num_owners))
            cuda_bucketing.bucket_ids(
                device, device.place(ids.astype(dtype)), bases, limits, starts, device.place(owner_of_local),
                num_owners, *there, cuda_bucketing.BucketBuffers(device),
            )  # fmt: skip
            assert all(np.array_equal(device.read(a), b) for a, b in zip(there, done, strict=True))


def test_buffers_of_a_large_batch_serve_a_small_one() -> None:
    """No memory is taken for a batch that is smaller than one before."""
    device = device_for("forward")
    buffers = cuda_bucketing.BucketBuffers(device)
    table_ids = np.zeros(1, np.uint64)
    held = 0
    for size in (600, 5, 0):
        there = tuple(device.place(array) for array in rooms(size, 3))
        keys = np.arange(size)
        cuda_bucketing.bucket_keys(device, device.place(keys), table_ids, np.array([0, size]), 3, *there, buffers)
        done = rooms(size, 3)
        bucketing.bucket_keys(keys, table_ids, np.array([0, size]), 3, *done)
        assert all(np.array_equal(device.read(a), b) for a, b in zip(there, done, strict=True))
        held = held or buffers.nbytes
        assert buffers.nbytes == held > 0


def test_batches_that_do_not_fit_are_refused() -> None:
    """Too many owners, stretches that miss entries, rooms of another size: a sentence, and nothing is launched."""
    device, keys, ids = ShimDevice(), np.arange(3), np.zeros(1, np.uint64)
    owners, starts = np.zeros(3, np.int16), np.array([0, 3])
    buffers = cuda_bucketing.BucketBuffers(device)
    for num_owners, cuts, size, said in (
        (0, starts, 3, "0 owners: from 1 to 1024"),
        (1025, starts, 3, "1025 owners"),
        (2, np.array([0, 2]), 3, "do not fit entry starts"),
        (2, starts, 2, "order, place and starts have 2, 2 and 3"),
    ):
        with pytest.raises(ValueError, match=said):
            bucketing.bucket_keys(keys, ids, cuts, num_owners, *rooms(size, max(num_owners, 0)))
        with pytest.raises(ValueError, match=said):
            cuda_bucketing.bucket_keys(device, keys, ids, cuts, num_owners, *rooms(size, num_owners), buffers)
    two = np.array([2])
    with pytest.raises(ValueError, match="ends behind the 3 local positions"):
        bucketing.bucket_ids(NONE, two, two, np.array([0, 0]), owners, 2, *rooms(0, 2))
    with pytest.raises(ValueError, match="ends behind the 3 local positions"):
        cuda_bucketing.bucket_ids(device, NONE, two, two, np.array([0, 0]), owners, 2, *rooms(0, 2), buffers)
    with pytest.raises(ValueError, match="one length"):
        bucketing.key_owners(keys, 0, 2, owners[:2])
    with pytest.raises(ValueError, match="hold those of 3 keys"):
        cuda_bucketing.key_owners(device, keys, 0, 2, owners[:2])
    assert device.launches == []
