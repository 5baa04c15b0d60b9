"""The store against the bare disk and against one key per row: python -m benchmarks.store [--quick] [--json FILE].

Dumps and loads are those of training: rows of 260 bytes (a vector of 64 and the row-wise Adagrad state), pages and
blocks as the planner cuts them, checksums by the kernel; but that a load reads two to eight runs at a time, where
staging, beside a training, reads one. The bare disk moves the same bytes and ranges
with plain pread and pwrite, one request at a time, from and to the same memory; its commit is an fdatasync and
the two small writes of LMDB's, also beside Zarr, which needs more of them. Both go past the page cache (O_DIRECT)
where the engine does, which the bare disk does always; what the page cache holds is dropped before every read by
posix_fadvise(DONTNEED), and no cache of the machine below it. Each engine has its turns with the bare disk, in
alternating order, and one engine comes after the other: files that one deletes are not the other's wait. Ratios are
medians over turns.

ENGINE_dump_ratio = bare disk's seconds / ours: one pass's dump with its commit, in a store that has its final size
ENGINE_load_ratio = bare disk's seconds / ours: one pass's ranges from 24 segments, read and checked; _400: from 400
ENGINE_bytes_read_per_useful_byte = bytes that the process read (/proc/self/io) / bytes of the rows loaded
ENGINE_heap_bytes = growth of resident memory at most while 2 GB are dumped from one buffer
ENGINE_verify_ratio = bare disk's seconds to read the same blocks / seconds of verify, in a process of its own
lookup_rows_per_s: a random 5 % of all keys, cold; over the same by LMDB's getmulti and rocksdict, a key per row
ENGINE_open_bytes, _one_key_bytes, _layout_bytes_per_gb, _commit_python_ms, _small_over_rows: see `store_cases`
"""

from __future__ import annotations

import importlib.util
import shutil
from typing import TYPE_CHECKING, Any

from benchmarks.machine import Goal, called, console, options_of, say, table_of
from benchmarks.store_cases import measure_commits, measure_cycle, measure_heap, measure_reads, measure_wide
from benchmarks.store_lookup import measure_lookup
from benchmarks.store_runs import FULL, PASSES, QUICK, TINY, Case, Size, StoreRun, warm_checksums

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.table import Table

ENGINES = ("lmdb", "zarr")
DUMPS = {"quick": {"lmdb": 0.75, "zarr": 0.6}, "full": {"lmdb": 0.85, "zarr": 0.8}}
"""What dumps shall reach: those of small passes cannot hide what a commit takes."""
LOADS = {"lmdb": 0.85, "zarr": 0.8}
GOALS = (
    *(Goal(key=f"{engine}_load_ratio", goal=goal) for engine, goal in LOADS.items()),
    *(Goal(key=f"{engine}_load_ratio_400", goal=0.85, least=0.6) for engine in ENGINES),
    Goal(key="better_engine_ratio", goal=0.8),
    *(
        Goal(key=f"{engine}_{what}", goal=goal, below=True)
        for engine in ENGINES
        for what, goal in (
            ("one_key_bytes", 65_536),
            ("layout_bytes_per_gb", 200_000),
            ("commit_python_ms", 20),
            ("small_over_rows", 3),
        )
    ),
    *(
        Goal(key=f"{engine}_bytes_read_per_useful_byte{suffix}", goal=1.05, below=True)
        for engine in ENGINES
        for suffix in ("", "_400")
    ),
    Goal(key="lookup_over_getmulti", goal=10),
    Goal(key="lookup_over_rocksdict", goal=10),
    Goal(key="lookup_rows_equal", goal=1),
    *(Goal(key=f"{engine}_verify_ratio", goal=0.5) for engine in ENGINES),
    *(Goal(key=f"{engine}_info_seconds", goal=1, below=True) for engine in ENGINES),
)


def present(folder: Path) -> list[str]:
    """Return the engines that a store can be opened with; says which cannot."""
    found = []
    for engine in ENGINES:
        try:
            StoreRun(engine, Case.of(260, 1 << 20), folder / "probe.tc").store.close()
            found.append(engine)
        except ValueError as error:
            say(f"{engine} is left out: {error}")
        shutil.rmtree(folder / "probe.tc", ignore_errors=True)
    return found


def measure(size: Size, engines: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run everything and return its figures."""
    warm_checksums()
    figures: dict[str, Any] = {}
    case = Case.of(260, size.pass_bytes)
    small = Case.of(260, min(size.pass_bytes, size.row_size_pass_bytes))
    for engine in engines:
        say(f"{engine}, rows of 260 bytes: a cycle of passes of {case.pass_bytes:,} bytes")
        figures |= measure_cycle(case, size.turns, engine, folder, verifications=size.verifications)
        say(f"{engine}, rows of 260 bytes: 400 segments")
        figures |= measure_wide(small, size.wide_passes, engine, folder)
        for row_bytes in size.row_sizes:
            say(f"{engine}, rows of {row_bytes:,} bytes")
            other = Case.of(row_bytes, size.row_size_pass_bytes)
            found = measure_cycle(other, size.turns, engine, folder)
            found |= measure_wide(other, size.wide_passes, engine, folder)
            figures |= {f"{key}_{row_bytes}": value for key, value in found.items()}
    for engine in engines:
        say(f"{engine}: a dump of {size.heap_bytes:,} bytes")
        figures |= measure_heap(engine, case, size.heap_bytes, folder)
        say(f"{engine}: one key of {size.one_key_rows:,}, and commits")
        figures |= measure_reads(engine, size.one_key_rows, folder)
        figures |= measure_commits(engine, size.commit_blocks, folder)
    say("lookups")
    figures |= measure_lookup(Case.of(260, size.lookup_pass_bytes), list(engines), folder)
    worst = {e: min(figures[f"{e}_dump_ratio"], figures[f"{e}_load_ratio"]) for e in engines}
    return figures | {"better_engine": max(worst, key=worst.__getitem__), "better_engine_ratio": max(worst.values())}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it from the command line."""
    quick = "small passes, rows of 260 bytes only"
    parser = options_of("store", __doc__, quick, folder="what it makes there it deletes")
    with called(parser, arguments) as run:
        record, size = run.record, run.size(FULL, QUICK, TINY)
        engines = present(run.folder)
        record |= {f"{engine}_measured": engine in engines for engine in ENGINES}
        record |= measure(size, engines, run.folder)
    for table in _tables(record, engines, ("", *(f"_{n}" for n in size.row_sizes))):
        console.print(table)
    for engine in engines:
        dumped, heap, taken = (record[f"{engine}_heap_{name}bytes"] for name in ("dump_", "", "transaction_"))
        console.print(
            f"{engine}: a dump of {dumped / 1e6:,.0f} MB from one buffer took {heap / 1e6:,.1f} MB of memory "
            f"in transactions of {taken / 1e6:,.0f} MB"
        )
    dumps = (Goal(key=f"{engine}_dump_ratio", goal=goal) for engine, goal in DUMPS.get(record["size"], {}).items())
    without_peer = importlib.util.find_spec("rocksdict") is None
    known = {*record, "lookup_over_rocksdict"} if without_peer else record
    run.report([goal for goal in (*dumps, *GOALS) if goal.key in known])


def _tables(record: dict[str, Any], engines: Sequence[str], suffixes: Sequence[str]) -> list[Table]:
    """Return a table of dumps and loads, and one of lookups."""
    moves = table_of(
        f"size {record['size']}, {record['file_system']}, page cache dropped by posix_fadvise(DONTNEED)",
        "engine", "what", "row bytes", "MB", "bare disk GB/s", "GB/s", "ratio", "least", "most", left=2,
    )  # fmt: skip
    for suffix in suffixes:
        for engine in engines:
            for what, segments in (("dump", ""), ("load", ""), ("load", "_400")):
                tail = segments + suffix
                num_bytes = record[f"{what}_bytes{tail}"]
                rates = [num_bytes / record[f"{who}_{what}_seconds{tail}"] / 1e9 for who in (f"{engine}_raw", engine)]
                ratios = [record[f"{engine}_{what}_ratio{part}{tail}"] for part in ("", "_least", "_most")]
                name = what if what == "dump" else f"load from {segments[1:] or PASSES}"
                shown = [f"{rate:.2f}" for rate in rates] + [f"{ratio:.3f}" for ratio in ratios]
                moves.add_row(engine, name, suffix[1:] or "260", f"{num_bytes / 1e6:,.0f}", *shown)
    title = f"{record['lookup_keys']:,} of {record['lookup_rows']:,} keys, cold"
    lookups = table_of(title, "by", "rows/s", "memory")
    for name in (*engines, "getmulti", "rocksdict"):
        if f"lookup_rows_per_s_{name}" in record:
            memory = f"{record[f'lookup_memory_bytes_{name}'] / 1e6:,.0f} MB"
            lookups.add_row(name, f"{record[f'lookup_rows_per_s_{name}']:,.0f}", memory)
    return [moves, lookups]


if __name__ == "__main__":
    main()
