"""Rows of 2 KiB in blocks of many pages: dumps, loads, and the places of their bytes."""

from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiercache.store import Adagrad, Cursor, Range, SegmentLayout, Store, Table, Zeros, hash_keys
from tiercache.store.snapshot import BlobNeed

Int64s = NDArray[np.int64]
BIG = Table(name="big", dim=256, optimizer=Adagrad(learning_rate=0.1), initializer=Zeros())


def append(store: Store, pass_index: int, layout: SegmentLayout, data: NDArray[np.uint8], keys: Int64s) -> None:
    """Append rows of a store of one group, cut into blocks."""
    cuts = [(block, *layout.rows_of_block(block)) for block in range(layout.num_blocks)]
    size = layout.row_bytes
    blocks = ((0, block, data[low * size : high * size], keys[low:high]) for block, low, high in cuts)
    store.append(pass_index, [layout], blocks)


def dump(store: Store, pass_index: int, rows: dict[int, int], *, block_bytes: int = 1 << 17) -> dict[int, bytes]:
    """Append random rows, counted by next use; return the bytes of each range."""
    layout = SegmentLayout.of(
        row_bytes=BIG.row_bytes,
        page_rows=8,
        block_bytes=block_bytes,
        ranges=tuple(Range(next_use=use, table_rows=(n,)) for use, n in sorted(rows.items())),
    )
    data = np.random.default_rng(pass_index).integers(0, 256, layout.rows * BIG.row_bytes, dtype=np.uint8)
    keys = np.arange(layout.rows, dtype=np.int64) + 100_000 * pass_index
    for low, high in pairwise(layout.first_row_R.tolist()):
        keys[low:high] = keys[low:high][np.argsort(hash_keys(keys[low:high], BIG.table_id))]
    append(store, pass_index, layout, data, keys)
    first = layout.first_row_R * BIG.row_bytes
    return {r.next_use: data[first[i] : first[i + 1]].tobytes() for i, r in enumerate(layout.ranges)}


def publish(store: Store, pass_index: int, state: bytes = b"") -> None:
    """Commit before ``pass_index``."""
    store.publish(Cursor(pass_index, 0), state=state, schedule_digest="", settings={}, environment={})


def load(store: Store, pass_index: int) -> dict[int, bytes]:
    """Read every live range with next use ``pass_index``, by segment id."""
    loaded = {}
    for segment in store.segments:
        layout = segment.layouts[0]
        for index in range(store.snapshot.first_range(segment, 0), layout.num_ranges):
            if layout.ranges[index].next_use == pass_index:
                low, high = layout.pages_of_range(index)
                out = np.empty(layout.byte_of_page(high) - layout.byte_of_page(low), np.uint8)
                store.read(segment, 0, low, high, out)
                loaded[segment.pass_index] = out.tobytes()
    return loaded


def needed_blobs(path: Path) -> dict[str, BlobNeed]:
    """Return the bytes of each blob that a store needs, by name."""
    with Store.open(path, mode="r") as store:
        return {need.name: need for need in store.history.needed.blobs()}
