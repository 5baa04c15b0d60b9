"""What the store's benchmark measures of dumps and loads: a cycle of passes, 400 segments, memory, verification."""

from __future__ import annotations

import shutil
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.disk_raw import BareDisk, slot_bytes
from benchmarks.machine import PeakMemory, files_below
from benchmarks.store_case import PASSES, RAW_SLOTS, SEGMENTS, Cycle, Dump, wide
from benchmarks.store_reads import layout_bytes
from benchmarks.store_runs import (
    HostPages,
    Seconds,
    StoreRun,
    drop_store,
    raw_dump,
    raw_load,
    room_for,
    source_for,
)
from tiercache.store import info, verify

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.disk_raw import Span
    from benchmarks.store_case import Case

LOADS = 2
"""Of each pass: they change nothing."""


def measure_cycle(case: Case, turns: int, engine: str, folder: Path, *, verifications: int = 0) -> dict[str, Any]:
    """Fill a store up to a whole cycle, then measure loads from 24 segments and dumps, pass by pass."""
    cycle, source, room = Cycle(case), source_for(case), room_for(case, PASSES)
    run = StoreRun(engine, case, folder / f"{engine}.tc")
    dumps: list[Dump] = []
    for _ in range(PASSES):
        dumps.append(cycle.next())
        run.dump(dumps[-1], source)
    loads, writes = Seconds(), Seconds()
    with BareDisk(folder, RAW_SLOTS * slot_bytes([dumps[0].layout])) as disk:
        for _ in range(turns):
            reads = [span for dump in dumps for span in dump.reads(cycle.pass_index)]
            _loads(disk, run, cycle.pass_index, reads, room, loads)
            dump = cycle.next()
            dumps = [*dumps[1:], dump]
            writes.turn(partial(raw_dump, disk, dump, source), partial(run.dump, dump, source))
        figures = writes.figures(engine, "dump") | loads.figures(engine, "load")
        figures |= {"dump_bytes": case.pass_bytes + 8 * case.rows, "load_bytes": case.pass_bytes}
        figures[f"{engine}_bytes_read_per_useful_byte"] = run.bytes_read / run.bytes_useful
        run.close()  # and all that is dead is deleted
        figures[f"{engine}_file_bytes"] = sum(f.stat().st_size for f in files_below(run.path))
        figures[f"{engine}_layout_bytes_per_gb"] = layout_bytes(run.path) / (PASSES * case.pass_bytes / 1e9)
        if verifications:
            figures |= _verification(disk, run, dumps, verifications)
    shutil.rmtree(run.path)
    return figures


def _loads(disk: BareDisk, run: StoreRun, pass_index: int, reads: list[Span], room: HostPages, loads: Seconds) -> None:
    for _ in range(LOADS):
        loads.turn(partial(raw_load, disk, reads, room), partial(run.load, pass_index, room))


def measure_wide(case: Case, passes: int, engine: str, folder: Path) -> dict[str, Any]:
    """Measure loads from 400 segments."""
    run = StoreRun(engine, case, folder / f"{engine}.tc")
    source, room = source_for(case), room_for(case, SEGMENTS)
    reads: dict[int, list[Span]] = {SEGMENTS + i: [] for i in range(passes)}
    at = 0
    for dump in wide(case, passes):
        for pass_index in reads:
            reads[pass_index] += dump.reads(pass_index, at)
        at += slot_bytes([dump.layout])
        run.append(dump, source)
    run.publish(SEGMENTS)
    loads = Seconds()
    with BareDisk(folder, at) as disk:
        for pass_index, spans in reads.items():
            _loads(disk, run, pass_index, spans, room, loads)
    figures: dict[str, Any] = loads.figures(engine, "load", "_400")
    figures["load_bytes_400"] = sum(span.size for span in reads[SEGMENTS])
    figures[f"{engine}_bytes_read_per_useful_byte_400"] = run.bytes_read / run.bytes_useful
    run.close()
    shutil.rmtree(run.path)
    return figures


def measure_heap(engine: str, case: Case, num_bytes: int, folder: Path) -> dict[str, Any]:
    """Return how far memory rises while one dump is appended, all its blocks from the same buffer."""
    rows, source = num_bytes // case.row_bytes, HostPages(case.budget.block)
    keys = np.arange(max(1, case.budget.block // case.row_bytes), dtype=np.int64)
    layout = case.layout([(1, rows)])
    run = StoreRun(engine, case, folder / f"{engine}-heap.tc")
    blocks = (
        (0, block, source.data[: int(size)], keys[: int(size) // case.row_bytes])
        for block, size in ((b, layout.bytes_of_block(b)) for b in range(layout.num_blocks))
    )
    with PeakMemory() as peak:
        run.store.append(0, [layout], blocks, stable=True)
        run.publish(1)
    run.close()
    shutil.rmtree(run.path)
    return {
        f"{engine}_heap_bytes": peak.growth_bytes,
        f"{engine}_heap_dump_bytes": rows * case.row_bytes,
        f"{engine}_heap_transaction_bytes": case.budget.transaction,
    }


def _verification(disk: BareDisk, run: StoreRun, dumps: Sequence[Dump], turns: int) -> dict[str, Any]:
    """Return seconds of verify and of info, and of the bare disk for the blocks that verify reads."""
    store = run.store
    assert store.commit is not None
    spans: list[Span] = []
    for segment, dump in zip(store.segments, dumps, strict=True):
        spans += dump.writes()[2 * store.snapshot.first_blocks[segment.id][0] :]  # rows and keys of each block
    room, seconds = HostPages(64 << 20), Seconds()
    figures: dict[str, Any] = {"verify_bytes": sum(span.size for span in spans)}
    for _ in range(turns):
        seconds.turn(partial(raw_load, disk, spans, room), partial(_verify, run.path))
    begun = time.perf_counter()
    found = info(run.path)
    figures[f"{run.engine}_info_seconds"] = time.perf_counter() - begun
    assert found["rows"] * run.case.row_bytes == found["row_bytes"], "info counts other bytes than rows"
    return figures | seconds.figures(run.engine, "verify")


def _verify(path: Path) -> float:
    drop_store(path)
    begun = time.perf_counter()
    problems = verify(path)["problems"]
    assert not problems, problems
    return time.perf_counter() - begun
