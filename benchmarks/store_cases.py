"""What the store's benchmark measures of dumps and loads: a cycle of visits, 400 segments, memory, verification."""

from __future__ import annotations

import shutil
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.disk_raw import BareDisk, slot_bytes
from benchmarks.machine import PeakMemory, files_below
from benchmarks.store_case import PASSES, RAW_SLOTS, SEGMENTS, Cycle, Dump, wide
from benchmarks.store_runs import HostPages, Seconds, StoreRun, drop_store, raw_dump, raw_load, room_for, source_for
from tiercache.store import info, verify
from tiercache.store.life import Life

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.disk_raw import Span
    from benchmarks.store_case import Case

LOADS = 2
"""Loads of each visit: they change nothing."""


def measure_cycle(case: Case, turns: int, engines: Sequence[str], folder: Path, *, verified: bool) -> dict[str, Any]:
    """Fill stores up to a whole cycle, then measure loads from 24 segments and dumps, visit by visit."""
    cycle, source, room = Cycle(case), source_for(case), room_for(case, PASSES)
    runs = [StoreRun(engine, case, folder / f"{engine}.tc") for engine in engines]
    dumps: list[Dump] = []
    for _ in range(PASSES):
        dumps.append(cycle.next())
        for run in runs:
            run.dump(dumps[-1], source)
    loads, writes = Seconds(), Seconds()
    with BareDisk(folder, RAW_SLOTS * slot_bytes([dumps[0].stream])) as disk:
        for _ in range(turns):
            reads = [span for dump in dumps for span in dump.reads(cycle.visit)]
            _loads(disk, runs, cycle.visit, reads, room, loads)
            dump = cycle.next()
            dumps = [*dumps[1:], dump]
            ours = [(run.engine, partial(run.dump, dump, source)) for run in runs]
            fresh = partial(raw_dump, disk, dump, source, fresh=True)
            writes.turn(partial(raw_dump, disk, dump, source), [*ours, ("fresh", fresh)])
        figures = writes.figures("dump") | loads.figures("load")
        figures |= {"dump_bytes": case.pass_bytes + 8 * case.rows, "load_bytes": case.pass_bytes}
        for run in runs:
            figures[f"{run.engine}_dump_ratio_fresh"] = (
                figures["fresh_dump_seconds"] / figures[f"{run.engine}_dump_seconds"]
            )
            figures[f"{run.engine}_bytes_read_per_useful_byte"] = run.bytes_read / run.bytes_useful
            run.close()  # and all that is dead is deleted
            figures[f"{run.engine}_file_bytes"] = sum(f.stat().st_size for f in files_below(run.path))
        if verified:
            figures |= _verification(disk, runs, dumps)
    for run in runs:
        shutil.rmtree(run.path)
    return figures


def _loads(
    disk: BareDisk, runs: Sequence[StoreRun], visit: int, reads: list[Span], room: HostPages, loads: Seconds
) -> None:
    for _ in range(LOADS):
        ours: list[tuple[str, Callable[[], float]]] = [(run.engine, partial(run.load, visit, room)) for run in runs]
        loads.turn(partial(raw_load, disk, reads, room), ours)


def measure_wide(case: Case, visits: int, engines: Sequence[str], folder: Path) -> dict[str, Any]:
    """Measure loads from 400 segments."""
    runs = [StoreRun(engine, case, folder / f"{engine}.tc") for engine in engines]
    source, room = source_for(case), room_for(case, SEGMENTS)
    reads: dict[int, list[Span]] = {SEGMENTS + i: [] for i in range(visits)}
    at = 0
    for dump in wide(case, visits):
        for visit in reads:
            reads[visit] += dump.reads(visit, at)
        at += slot_bytes([dump.stream])
        for run in runs:
            run.append(dump, source)
    for run in runs:
        run.publish(SEGMENTS)
    loads = Seconds()
    with BareDisk(folder, at) as disk:
        for visit, spans in reads.items():
            _loads(disk, runs, visit, spans, room, loads)
    figures = loads.figures("load", "_400") | {"load_bytes_400": sum(span.size for span in reads[SEGMENTS])}
    for run in runs:
        figures[f"{run.engine}_bytes_read_per_useful_byte_400"] = run.bytes_read / run.bytes_useful
        run.close()
        shutil.rmtree(run.path)
    return figures


def measure_heap(engine: str, case: Case, num_bytes: int, folder: Path) -> dict[str, Any]:
    """Return how far memory rises while one dump is appended, all its blocks from the same buffer."""
    rows, source = num_bytes // case.row_bytes, HostPages(case.budget.block)
    keys = np.arange(max(1, case.budget.block // case.row_bytes), dtype=np.int64)
    stream = case.stream([(1, rows)])
    run = StoreRun(engine, case, folder / f"{engine}-heap.tc")
    blocks = (
        (0, block, source.data[: int(size)], keys[: int(size) // case.row_bytes])
        for block, size in enumerate(stream.block_bytes_B)
    )
    with PeakMemory() as peak:
        begun = time.perf_counter()
        run.store.append(0, [stream], blocks, stable=True, transaction_bytes=case.budget.transaction)
        run.publish(1)
        seconds = time.perf_counter() - begun
    run.close()
    shutil.rmtree(run.path)
    return {
        f"{engine}_heap_bytes": peak.growth_bytes,
        f"{engine}_heap_dump_bytes": rows * case.row_bytes,
        f"{engine}_heap_seconds": seconds,
        f"{engine}_heap_transaction_bytes": case.budget.transaction,
    }


def _verification(disk: BareDisk, runs: Sequence[StoreRun], dumps: Sequence[Dump]) -> dict[str, Any]:
    """Return seconds of verify and of info, and of the bare disk for the blocks that verify reads."""
    store = runs[0].store
    assert store.commit is not None
    life = Life.of(store.commit, store.segments)
    spans: list[Span] = []
    for segment, dump in zip(store.segments, dumps, strict=True):
        spans += dump.writes()[2 * life.first_block(segment, 0) :]  # rows and keys of each block
    room, seconds = HostPages(64 << 20), Seconds()
    figures: dict[str, Any] = {"verify_bytes": sum(span.size for span in spans)}
    for _ in range(2):
        seconds.turn(partial(raw_load, disk, spans, room), [(run.engine, partial(_verify, run.path)) for run in runs])
    for run in runs:
        begun = time.perf_counter()
        found = info(run.path)
        figures[f"{run.engine}_info_seconds"] = time.perf_counter() - begun
        assert found["rows"] * run.case.row_bytes == found["row_bytes"], "info counts other bytes than rows"
    return figures | seconds.figures("verify")


def _verify(path: Path) -> float:
    drop_store(path)
    begun = time.perf_counter()
    problems = verify(path)["problems"]
    assert not problems, problems
    return time.perf_counter() - begun
