"""Cases of the store's benchmark: a cycle of passes, 400 segments, memory, verification, opening, commits.

ENGINE_open_bytes, ENGINE_one_key_bytes: the larger of `rchar` and `read_bytes` in /proc/self/io while a
fresh process opens a store whose rows are in one run, as after compaction, and then looks up one key; cold,
after a lookup in another store, which imports and compiles.
ENGINE_layout_bytes_per_gb: memory of an open store of a cycle of passes, by tracemalloc, per 10^9 bytes.
ENGINE_commit_python_ms: processor time of the committing thread, at ENGINE_commit_blocks blocks; the median.
ENGINE_small_over_rows: bytes on disk of a store with 400 KiB of rows, over the bytes of the rows.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import store_runs as runs
from benchmarks.disk_raw import BareDisk, Span, slot_bytes
from benchmarks.drawn_passes import hash_ordered
from benchmarks.machine import drop_cache, files_below, in_child, middle, of_process, peak_memory
from benchmarks.store_runs import PASSES, RAW_SLOTS, SEGMENTS, Case, Cycle, Dump, wide
from tiercache.store import NEVER, SGD, Range, SegmentLayout, Store, Table, Zeros, info, verify
from tiercache.store.row_codec import blocks_of
from tiercache.store.segment import base_layout

TABLE = Table(name="items", dim=8, optimizer=SGD(learning_rate=0.1), initializer=Zeros())
SMALL_BYTES = 400 << 10
CHUNK_ROWS, BLOCK_ROWS, COMMITS = 1 << 18, 8, 5
LOADS = 2
"""Loads of each pass: they change nothing."""


def measure_cycle(case: Case, turns: int, engine: str, folder: Path, *, verifications: int = 0) -> dict[str, Any]:
    """Fill a store up to a whole cycle, then measure loads from 24 segments and dumps, pass by pass."""
    cycle, source, room = Cycle(case), runs.source_for(case), runs.room_for(case, PASSES)
    run = runs.StoreRun(engine, case, folder / f"{engine}.tc")
    dumps: list[Dump] = []
    for _ in range(PASSES):
        dumps.append(cycle.next())
        run.dump(dumps[-1], source)
    loads, writes = runs.Seconds(), runs.Seconds()
    with BareDisk(folder, RAW_SLOTS * slot_bytes([dumps[0].layout])) as disk:
        for _ in range(turns):
            reads = [span for dump in dumps for span in dump.reads(cycle.pass_index)]
            _loads(disk, run, cycle.pass_index, reads, room, loads)
            dump = cycle.next()
            dumps = [*dumps[1:], dump]
            writes.turn(
                partial(disk.seconds, commits=[dump.writes()], memory=source.view),
                partial(run.dump, dump, source),
            )
        figures = writes.figures(engine, "dump") | loads.figures(engine, "load")
        figures |= {"dump_bytes": case.pass_bytes + 8 * case.rows, "load_bytes": case.pass_bytes}
        figures[f"{engine}_bytes_read_per_useful_byte"] = run.bytes_read / run.bytes_useful
        run.store.close()  # and delete all dead blobs
        figures[f"{engine}_file_bytes"] = sum(f.stat().st_size for f in files_below(run.path))
        figures[f"{engine}_layout_bytes_per_gb"] = runs.opened_bytes(run.path) / (PASSES * case.pass_bytes / 1e9)
        if verifications:
            figures |= _verification(disk, run, dumps, verifications)
    shutil.rmtree(run.path)
    return figures


def _loads(
    disk: BareDisk, run: runs.StoreRun, pass_index: int, reads: list[Span], room: runs.HostPages, loads: runs.Seconds
) -> None:
    for _ in range(LOADS):
        loads.turn(partial(disk.seconds, reads, memory=room.view), partial(run.load, pass_index, room))


def measure_wide(case: Case, passes: int, engine: str, folder: Path) -> dict[str, Any]:
    """Measure loads from 400 segments."""
    run = runs.StoreRun(engine, case, folder / f"{engine}.tc")
    source, room = runs.source_for(case), runs.room_for(case, SEGMENTS)
    reads: dict[int, list[Span]] = {SEGMENTS + i: [] for i in range(passes)}
    at = 0
    for dump in wide(case, passes):
        for pass_index in reads:
            reads[pass_index] += dump.reads(pass_index, at)
        at += slot_bytes([dump.layout])
        run.append(dump, source)
    runs.publish(run.store, SEGMENTS)
    loads = runs.Seconds()
    with BareDisk(folder, at) as disk:
        for pass_index, spans in reads.items():
            _loads(disk, run, pass_index, spans, room, loads)
    figures: dict[str, Any] = loads.figures(engine, "load", "_400")
    figures["load_bytes_400"] = sum(span.size for span in reads[SEGMENTS])
    figures[f"{engine}_bytes_read_per_useful_byte_400"] = run.bytes_read / run.bytes_useful
    run.store.close()
    shutil.rmtree(run.path)
    return figures


def measure_heap(engine: str, case: Case, num_bytes: int, folder: Path) -> dict[str, Any]:
    """Return the peak growth of memory while one dump is appended, with all its blocks from the same buffer."""
    rows, source = num_bytes // case.row_bytes, runs.HostPages(case.budget.block)
    keys, layout = np.arange(rows, dtype=np.int64), case.layout([(1, rows)])
    run = runs.StoreRun(engine, case, folder / f"{engine}-heap.tc")
    with peak_memory() as peak:
        runs.append(run.store, 0, layout, keys, source.data, stable=True)
        runs.publish(run.store, 1)
    run.store.close()
    shutil.rmtree(run.path)
    return {
        f"{engine}_heap_bytes": peak.growth_bytes,
        f"{engine}_heap_dump_bytes": rows * case.row_bytes,
        f"{engine}_heap_transaction_bytes": case.budget.transaction,
    }


def _verification(disk: BareDisk, run: runs.StoreRun, dumps: Sequence[Dump], turns: int) -> dict[str, Any]:
    """Return seconds of verify and of info, and of the bare disk for the blocks that verify reads."""
    store = run.store
    assert store.commit is not None
    spans: list[Span] = []
    for segment, dump in zip(store.segments, dumps, strict=True):
        spans += dump.writes()[2 * store.snapshot.first_block(segment, 0) :]  # rows and keys of each block
    room, seconds = runs.HostPages(64 << 20), runs.Seconds()
    figures: dict[str, Any] = {"verify_bytes": sum(span.size for span in spans)}
    for _ in range(turns):
        seconds.turn(partial(disk.seconds, spans, memory=room.view), partial(_verify, run.path))
    begun = time.perf_counter()
    found = info(run.path)
    figures[f"{run.engine}_info_seconds"] = time.perf_counter() - begun
    assert found["rows"] * run.case.row_bytes == found["row_bytes"], "info counts other bytes than rows"
    return figures | seconds.figures(run.engine, "verify")


def _verify(path: Path) -> float:
    drop_cache(path)
    begun = time.perf_counter()
    problems = verify(path)["problems"]
    assert not problems, problems
    return time.perf_counter() - begun


def measure_reads(engine: str, rows: int, folder: Path) -> dict[str, Any]:
    """Write a store of many rows and a small one, and look up a key of each in a separate process."""
    large, small = folder / f"reads-{engine}.tc", folder / f"small-{engine}.tc"
    key = _write(large, engine, rows)
    _write(small, engine, SMALL_BYTES // TABLE.row_bytes)
    drop_cache(large)
    found = in_child(_look_ups, small, large, key)
    small_bytes = sum(file.stat().st_blocks * 512 for file in files_below(small))
    for path in (large, small):
        shutil.rmtree(path)
    figures = found | {"rows_of_one_key": rows, "small_over_rows": small_bytes / SMALL_BYTES}
    return {f"{engine}_{name}": value for name, value in figures.items()}


def _write(path: Path, engine: str, rows: int) -> int:
    """Write rows that no pass needs, in one run, and return a key from their middle."""
    keys = hash_ordered(rows, TABLE.table_id)

    def chunks() -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        for first in range(0, rows, CHUNK_ROWS):
            some = keys[first : first + CHUNK_ROWS]
            yield some, np.repeat(some[:, None], TABLE.dim, axis=1).astype(np.float32)

    with Store.open(path, tables=[TABLE], engine=engine) as store:
        (group,) = store.groups
        layout = base_layout(group, [Range(NEVER, (rows,))])
        store.append(0, [layout], blocks_of([group], [layout], lambda *_: chunks()), stable=False)
        runs.publish(store, 1)
    return int(keys[rows // 2])


def measure_commits(engine: str, blocks: int, folder: Path) -> dict[str, Any]:
    """Commit passes whose dumps have many blocks of a few rows, after a whole cycle."""
    path, taken = folder / f"commits-{engine}.tc", list[float]()
    with Store.open(path, tables=[TABLE], engine=engine) as store:
        for pass_index in range(PASSES + COMMITS):
            _dump(store, pass_index, blocks)
            begun = time.thread_time()
            runs.publish(store, pass_index + 1)
            if pass_index >= PASSES:
                taken.append(time.thread_time() - begun)
        held = sum(segment.layouts[0].num_blocks for segment in store.segments)
    shutil.rmtree(path)
    return {f"{engine}_commit_python_ms": 1e3 * middle(taken), f"{engine}_commit_blocks": held}


def _dump(store: Store, pass_index: int, blocks: int) -> None:
    rows = blocks * BLOCK_ROWS // PASSES
    layout = SegmentLayout.of(
        [Range(pass_index + 1 + i, (rows,)) for i in range(PASSES)],
        row_bytes=TABLE.row_bytes, page_rows=BLOCK_ROWS // 2, block_bytes=BLOCK_ROWS * TABLE.row_bytes,
    )  # fmt: skip
    keys, zeros = np.arange(layout.rows) + pass_index * layout.rows, np.zeros(layout.block_bytes, np.uint8)
    runs.append(store, pass_index, layout, keys, zeros)


def _look_up(path: Path, key: int) -> tuple[int, int]:
    """Return the bytes read to open a store, and to look up one key in it."""
    begun = of_process("io")
    with Store.open(path, mode="r") as store:
        opened = of_process("io")
        found = store.lookup(TABLE.name, np.array([key]))["vector"]
        done = of_process("io")
    assert (found == np.float32(key)).all()
    kinds = ("rchar", "read_bytes")
    return max(opened[kind] - begun[kind] for kind in kinds), max(done[kind] - opened[kind] for kind in kinds)


def _look_ups(small: Path, large: Path, key: int) -> dict[str, int]:
    _look_up(small, 0)
    opened, looked_up = _look_up(large, key)
    return {"open_bytes": opened, "one_key_bytes": looked_up}
