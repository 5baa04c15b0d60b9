"""What a store costs that was just opened, and what its commits cost beside their bytes.

ENGINE_open_bytes, ENGINE_one_key_bytes: the larger of what /proc/self/io counts as `rchar` and as `read_bytes` while a
fresh process opens a store whose rows stand in one run, as compaction leaves them, and then looks one key up; cold,
behind a lookup in another store, which imports and compiles.
ENGINE_layout_bytes_per_gb: memory that an open store of a cycle of passes takes, by tracemalloc, for each 10^9 bytes.
ENGINE_commit_python_ms: processor time of the thread that commits, at ENGINE_commit_blocks blocks; the median.
ENGINE_small_over_rows: bytes on disk of a store of 400 KiB of rows over those.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.machine import files_below, middle
from benchmarks.store_runs import drop_store
from tiercache.store import NEVER, SGD, Cursor, Range, SegmentLayout, Store, Table, Zeros, hash_keys
from tiercache.store.base_segment import base_layout, blocks_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["layout_bytes", "measure_commits", "measure_reads"]

TABLE = Table(name="items", dim=8, optimizer=SGD(learning_rate=0.1), initializer=Zeros())
SMALL_BYTES = 400 << 10
CHUNK_ROWS, SEGMENTS, BLOCK_ROWS, COMMITS = 1 << 18, 24, 8, 5
COUNTED = ("rchar", "read_bytes")


def measure_reads(engine: str, rows: int, folder: Path) -> dict[str, Any]:
    """Write a store of so many rows and a small one, and have a process of its own look up a key of each."""
    large, small = folder / f"reads-{engine}.tc", folder / f"small-{engine}.tc"
    key = _write(large, engine, rows)
    _write(small, engine, SMALL_BYTES // TABLE.row_bytes)
    drop_store(large)
    command = [sys.executable, "-m", "benchmarks.store_reads", str(small), str(large), str(key)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    small_bytes = sum(file.stat().st_blocks * 512 for file in files_below(small))
    for path in (large, small):
        shutil.rmtree(path)
    figures = found | {"rows_of_one_key": rows, "small_over_rows": small_bytes / SMALL_BYTES}
    return {f"{engine}_{name}": value for name, value in figures.items()}


def _write(path: Path, engine: str, rows: int) -> int:
    """Write rows that no pass waits for, in one run, and return a key of their middle."""
    keys = np.arange(rows, dtype=np.int64)
    keys = keys[np.argsort(hash_keys(keys, TABLE.table_id))]

    def chunks() -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        for first in range(0, rows, CHUNK_ROWS):
            some = keys[first : first + CHUNK_ROWS]
            yield some, np.repeat(some[:, None], TABLE.dim, axis=1).astype(np.float32)

    with Store.open(path, tables=[TABLE], engine=engine) as store:
        (group,) = store.groups
        layout = base_layout(group, [Range(NEVER, (rows,))])
        store.append(0, [layout], blocks_of(group, layout, chunks()), stable=False)
        _publish(store, 1)
    return int(keys[rows // 2])


def measure_commits(engine: str, blocks: int, folder: Path) -> dict[str, Any]:
    """Commit passes whose dumps have so many blocks of a few rows, when a whole cycle of them is held."""
    path, taken = folder / f"commits-{engine}.tc", list[float]()
    with Store.open(path, tables=[TABLE], engine=engine) as store:
        for pass_index in range(SEGMENTS + COMMITS):
            _dump(store, pass_index, blocks)
            begun = time.thread_time()
            _publish(store, pass_index + 1)
            if pass_index >= SEGMENTS:
                taken.append(time.thread_time() - begun)
        held = sum(segment.layouts[0].num_blocks for segment in store.segments)
    shutil.rmtree(path)
    return {f"{engine}_commit_python_ms": 1e3 * middle(taken), f"{engine}_commit_blocks": held}


def _dump(store: Store, pass_index: int, blocks: int) -> None:
    rows = blocks * BLOCK_ROWS // SEGMENTS
    layout = SegmentLayout.of(
        [Range(pass_index + 1 + i, (rows,)) for i in range(SEGMENTS)],
        row_bytes=TABLE.row_bytes, page_rows=BLOCK_ROWS // 2, block_bytes=BLOCK_ROWS * TABLE.row_bytes,
    )  # fmt: skip
    keys, zeros = np.arange(layout.rows) + pass_index * layout.rows, np.zeros(layout.block_bytes, np.uint8)
    store.append(
        pass_index,
        [layout],
        (
            (0, block, zeros[: layout.bytes_of_block(block)], keys[slice(*layout.rows_of_block(block))])
            for block in range(layout.num_blocks)
        ),
    )


def layout_bytes(path: Path) -> int:
    """Return the bytes that an open store takes in memory."""
    tracemalloc.start()
    try:
        with Store.open(path, mode="r"):
            return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def _publish(store: Store, pass_index: int) -> None:
    store.publish(Cursor(pass_index, 0), state=b"", schedule_digest="", settings={}, environment={})


def _counted() -> np.ndarray[Any, Any]:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return np.array([int(lines[name]) for name in COUNTED])


def _look_up(path: Path, key: int) -> tuple[int, int]:
    """Return the bytes that opening a store read, and those of a lookup of one key in it."""
    begun = _counted()
    with Store.open(path, mode="r") as store:
        opened = _counted()
        found = store.lookup(TABLE.name, np.array([key]))["vector"]
        done = _counted()
    assert (found == np.float32(key)).all()
    return int((opened - begun).max()), int((done - opened).max())


if __name__ == "__main__":
    _look_up(Path(sys.argv[1]), 0)
    of_opening, of_key = _look_up(Path(sys.argv[2]), int(sys.argv[3]))
    json.dump({"open_bytes": of_opening, "one_key_bytes": of_key}, sys.stdout)
