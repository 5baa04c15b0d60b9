"""Entries of a batch by the rank that owns their row, on a CUDA device: `bucketing`, with the same arguments.

Large arrays lie on the device; those of a feature each (bases, limits, entry_starts, table_ids) are NumPy arrays. Ids
are int32 or int64. Nothing waits for the device. Bytes moved for each key: 44, from 256 owners on 68. Training has no
use for them, for the reason that `bucketing` gives.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercache.kernels.arrays import expect, same_length
from tiercache.kernels.bucketing import MOST_OWNERS, expect_buckets, expect_rooms
from tiercache.kernels.cuda_gathering import IDS, limits_of, view_ids
from tiercache.kernels.cuda_sorting import SortBuffers, sort_slots
from tiercache.kernels.launch import Device, blocks_for, launch_parts, part_struct, view

__all__ = ["MOST_OWNERS", "BucketBuffers", "bucket_ids", "bucket_keys", "key_owners"]

OWNER_PART = part_struct(
    ("keys", "p"), *IDS, ("owner_of_local", "p"), ("owners", "p"), ("short_owners", "p"), ("table_id", "p"),
    ("num_owners", "l"), ("first", "l"), ("last", "l"),
)  # fmt: skip
_TASK = 256  # entries
_NO_IDS = (0,) * len(IDS)


class BucketBuffers:
    """Scratch of the bucketing, kept between batches and grown when a batch is larger than all before."""

    def __init__(self, device: Device) -> None:
        self._device, self._size = device, -1
        self.sort = SortBuffers(device)
        self.owners: Any = None

    def reserve(self, num_entries: int) -> Any:
        """Return room for the owners of `num_entries` entries."""
        if self._size < num_entries:
            self.owners, self._size = self._device.empty(num_entries, np.int32), num_entries
        return self.owners[:num_entries]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.sort.nbytes + max(0, 4 * self._size)


def _find(device: Device, parts: list[tuple[Any, ...]]) -> None:
    launch_parts(
        device, "bucketing.find_owners", OWNER_PART, parts, [-(-(part[-1] - part[-2]) // _TASK) for part in parts]
    )


class _Rooms(NamedTuple):
    """Addresses of what is written."""

    order: int
    place: int
    starts: int


def _rooms(device: Device, size: int, num_owners: int, order: Any, place: Any, starts: Any) -> _Rooms:
    by_owner, found = (view(device, n, a, np.int32, written=True) for n, a in (("order", order), ("place", place)))
    begins = view(device, "starts", starts, np.int64, written=True)
    expect_rooms(size, num_owners, by_owner.size, found.size, begins.size)
    return _Rooms(by_owner.address, found.address, begins.address)


def _bucket(
    device: Device, parts: list[tuple[Any, ...]], owners: Any, num_owners: int, rooms: _Rooms, buffers: BucketBuffers
) -> None:
    _find(device, parts)
    size = view(device, "owners", owners, np.int32).size
    pairs = view(device, "pairs", sort_slots(device, owners, num_owners, buffers.sort), np.uint64)
    blocks = blocks_for(device, -(-(size + 1) // 32))
    device.launch("bucketing.place_entries", blocks, (pairs.address, size, num_owners, *rooms))


def key_owners(device: Device, keys: Any, table_id: int, num_owners: int, owners: Any) -> None:
    """Write the owner of each key (n,) to `owners` (n,) int16: those of a pass are what `bucket_ids` takes."""
    seen = view(device, "keys", keys, np.int64)
    to = view(device, "owners", owners, np.int16, written=True)
    if to.size != seen.size:
        raise ValueError(f"{to.size} owners cannot hold those of {seen.size} keys.")
    expect_buckets(0, 0, np.zeros(1, np.int64), num_owners)
    _find(device, [(seen.address, *_NO_IDS, 0, 0, to.address, int(table_id), num_owners, 0, seen.size)])


def bucket_keys(
    device: Device,
    keys: Any,
    table_ids: NDArray[np.uint64],
    entry_starts: NDArray[np.int64],
    num_owners: int,
    order: Any,
    place: Any,
    starts: Any,
    buffers: BucketBuffers,
) -> None:
    """Order entries by the owner of their key."""
    seen, table_ids = view(device, "keys", keys, np.int64), expect("table_ids", table_ids, np.uint64)
    cuts = expect_buckets(seen.size, table_ids.size, entry_starts, num_owners).tolist()
    rooms = _rooms(device, seen.size, num_owners, order, place, starts)
    owners = buffers.reserve(seen.size)
    to = view(device, "owners", owners, np.int32, written=True).address
    parts = [
        (seen.address, *_NO_IDS, 0, to, 0, table_id, num_owners, first, last)
        for table_id, first, last in zip(table_ids.tolist(), cuts[:-1], cuts[1:], strict=True)
    ]
    _bucket(device, parts, owners, num_owners, rooms, buffers)


def bucket_ids(
    device: Device,
    ids: Any,
    bases: NDArray[np.int64],
    limits: NDArray[np.int64],
    entry_starts: NDArray[np.int64],
    owner_of_local: Any,
    num_owners: int,
    order: Any,
    place: Any,
    starts: Any,
    buffers: BucketBuffers,
) -> None:
    """Order entries by the owner of their local id; an entry whose id is not in its table stands behind `starts[W]`."""
    seen, wide = view_ids(device, ids)
    local = view(device, "owner_of_local", owner_of_local, np.int16)
    same_length(bases=bases, limits=limits)
    bases, limits = limits_of(bases, limits, local.size)
    cuts = expect_buckets(seen.size, bases.size, entry_starts, num_owners).tolist()
    rooms = _rooms(device, seen.size, num_owners, order, place, starts)
    owners = buffers.reserve(seen.size)
    to = view(device, "owners", owners, np.int32, written=True).address
    parts = [
        (0, seen.address, 0, 0, 0, base, limit, int(wide), local.address, to, 0, 0, num_owners, first, last)
        for base, limit, first, last in zip(bases.tolist(), limits.tolist(), cuts[:-1], cuts[1:], strict=True)
    ]
    _bucket(device, parts, owners, num_owners, rooms, buffers)
