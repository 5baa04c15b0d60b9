"""The store compared with the bare disk and with one key per row: python -m benchmarks.store [--quick] [--json FILE].

Dumps and loads are the same as in training: rows of 260 bytes (a vector of 64 and the row-wise Adagrad state), pages
and blocks as the planner cuts them, checksums by the kernel. One difference: a load reads two to four runs at a time,
while staging during a training reads one. The bare disk moves the same bytes and ranges
with plain pread and pwrite, one request at a time, from and to the same memory. Its commit is an fdatasync and
the two small writes of LMDB's, even for Zarr, which needs more of them. Both bypass the page cache (O_DIRECT)
if the engine does; the bare disk always does. Page cache contents are dropped before every read by
posix_fadvise(DONTNEED), but no lower cache of the machine. Each engine alternates with the bare disk, in
alternating order, and the engines run one after another, so that one does not wait for the other's deletions. Ratios
are medians over turns.

ENGINE_dump_ratio = bare disk's seconds / ours: one pass's dump with its commit, in a store that has its final size
ENGINE_load_ratio = bare disk's seconds / ours: one pass's ranges from 24 segments, read and checked; _400: from 400
ENGINE_bytes_read_per_useful_byte = bytes that the process read (/proc/self/io) / bytes of the rows loaded
ENGINE_heap_bytes = peak growth of resident memory while 2 GB are dumped from one buffer
ENGINE_verify_ratio = bare disk's seconds to read the same blocks / seconds of verify, in a separate process
lookup_rows_per_s: a random 5 % of all keys, cold; relative to LMDB's getmulti and rocksdict, a key per row
ENGINE_open_bytes, _one_key_bytes, _layout_bytes_per_gb, _commit_python_ms, _small_over_rows: see `store_cases`
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import store_runs as runs
from benchmarks.machine import Goal, benchmark, console, drop_cache, middle, peak_memory, say
from benchmarks.store_cases import measure_commits, measure_cycle, measure_heap, measure_reads, measure_wide

Rows = NDArray[np.float32]


SHARE = 0.05
TURNS = 3
CHUNK_ROWS = 1 << 16


class Contender:
    """Rows by key, at a place; this class is the store, after the passes of a whole cycle."""

    def __init__(self, run: runs.StoreRun) -> None:
        self.path, self._store, self._name = run.path, run.store, run.case.table.name

    def open(self) -> None:
        """Open it with cold caches; the store itself caches nothing."""

    def rows(self, keys: NDArray[np.int64]) -> Rows:
        return np.concatenate(list(self._store.lookup(self._name, keys).values()), axis=1)

    def close(self) -> None:
        """Close it if it is open."""


class LmdbRows(Contender):
    """LMDB with one key per row, inserted in key order, so that its pages are full; read by ``getmulti``."""

    def __init__(self, path: Path, chunks: Iterator[tuple[NDArray[np.int64], Rows]]) -> None:
        import lmdb

        self.path = path
        env = lmdb.open(str(path), map_size=1 << 40)
        for keys, rows in chunks:
            with env.begin(write=True) as txn, txn.cursor() as cursor:
                items = zip(_key_bytes(keys), map(bytes, rows.view(np.uint8)), strict=True)
                cursor.putmulti(items, append=True)
        env.close()

    def open(self) -> None:
        import lmdb

        self._env: Any = lmdb.open(str(self.path), map_size=1 << 40, readonly=True)

    def rows(self, keys: NDArray[np.int64]) -> Rows:
        with self._env.begin() as txn, txn.cursor() as cursor:
            found = cursor.getmulti(_key_bytes(keys))
        return np.frombuffer(b"".join(value for _, value in found), np.float32).reshape(keys.size, -1)

    def close(self) -> None:
        self._env.close()


class RocksRows(Contender):
    """RocksDB with one key per row, inserted in key order and compacted; read by its batch get."""

    def __init__(self, path: Path, chunks: Iterator[tuple[NDArray[np.int64], Rows]]) -> None:
        import rocksdict

        self.path = path
        db = rocksdict.Rdict(str(path), rocksdict.Options(raw_mode=True))
        for keys, rows in chunks:
            batch = rocksdict.WriteBatch(raw_mode=True)
            for key, row in zip(_key_bytes(keys), map(bytes, rows.view(np.uint8)), strict=True):
                batch.put(key, row)
            db.write(batch)
        db.flush()
        db.compact_range(None, None)
        db.close()

    def open(self) -> None:
        import rocksdict

        access = rocksdict.AccessType.read_only()
        self._db: Any = rocksdict.Rdict(str(self.path), rocksdict.Options(raw_mode=True), access_type=access)

    def rows(self, keys: NDArray[np.int64]) -> Rows:
        return np.frombuffer(b"".join(self._db.get(_key_bytes(keys))), np.float32).reshape(keys.size, -1)

    def close(self) -> None:
        self._db.close()


PEERS = {"getmulti": ("lmdb", LmdbRows), "rocksdict": ("rocksdict", RocksRows)}


def measure_lookup(case: runs.Case, engines: list[str], folder: Path) -> dict[str, Any]:
    """Return rows per second, memory and bytes of all contenders: a random 5 % of all keys, cold, in turns."""
    cycle, source = runs.Cycle(case), runs.source_for(case)
    stores = {engine: runs.StoreRun(engine, case, folder / f"lookup-{engine}.tc") for engine in engines}
    for _ in range(runs.PASSES):
        dump = cycle.next()
        for run in stores.values():
            run.dump(dump, source)
    everything = cycle.keys()
    contenders: dict[str, Contender] = {engine: Contender(run) for engine, run in stores.items()}
    bits = contenders[engines[0]].rows(everything)
    for name, (package, kind) in PEERS.items():
        if importlib.util.find_spec(package) is None:
            console.print(f"{name} is left out: {package} is not installed")
            continue
        contenders[name] = kind(folder / f"lookup-{name}", _chunks(everything, bits))
    del bits
    keys = np.random.default_rng(6).choice(everything, int(SHARE * everything.size), replace=False)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    memory, expected, equal = dict.fromkeys(contenders, 0), contenders[engines[0]].rows(keys), True
    for _ in range(TURNS):
        for name, contender in contenders.items():
            drop_cache(contender.path)
            contender.open()
            with peak_memory() as peak:
                begun = time.perf_counter()
                found = contender.rows(keys)
                seconds[name].append(time.perf_counter() - begun)
            contender.close()
            memory[name] = max(memory[name], peak.growth_bytes)
            equal = equal and np.array_equal(found.view(np.uint8), expected.view(np.uint8))
    for run in stores.values():
        run.store.close()
    rates = {name: keys.size / middle(taken) for name, taken in seconds.items()}
    best = max(rates[engine] for engine in engines)
    return {
        "lookup_keys": keys.size,
        "lookup_rows": everything.size,
        **{f"lookup_rows_per_s_{name}": rate for name, rate in rates.items()},
        **{f"lookup_memory_bytes_{name}": taken for name, taken in memory.items()},
        "lookup_rows_per_s": best,
        "lookup_rows_equal": equal,
        **{f"lookup_over_{name}": best / rates[name] for name in PEERS.keys() & rates.keys()},
    }


def _chunks(keys: NDArray[np.int64], rows: Rows) -> Iterator[tuple[NDArray[np.int64], Rows]]:
    for low in range(0, keys.size, CHUNK_ROWS):
        yield keys[low : low + CHUNK_ROWS], rows[low : low + CHUNK_ROWS]


def _key_bytes(keys: NDArray[np.int64]) -> list[bytes]:
    """Return keys as bytes in numeric order; keys are not negative."""
    return [bytes(key) for key in keys.astype(">i8").view(np.uint8).reshape(-1, 8)]


ENGINES = ("lmdb", "zarr")
DUMPS = {"quick": {"lmdb": 0.75, "zarr": 0.6}, "full": {"lmdb": 0.85, "zarr": 0.8}}
"""Goals of dumps: small passes cannot hide the time of a commit."""
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


def measure(size: runs.Size, engines: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run everything and return its figures."""
    runs.warm_kernels()
    figures: dict[str, Any] = {}
    case = runs.Case.of(260, size.pass_bytes)
    small = runs.Case.of(260, min(size.pass_bytes, size.row_size_pass_bytes))
    for engine in engines:
        say(f"{engine}, rows of 260 bytes: a cycle of passes of {case.pass_bytes:,} bytes")
        figures |= measure_cycle(case, size.turns, engine, folder, verifications=size.verifications)
        say(f"{engine}, rows of 260 bytes: 400 segments")
        figures |= measure_wide(small, size.wide_passes, engine, folder)
        for row_bytes in size.row_sizes:
            say(f"{engine}, rows of {row_bytes:,} bytes")
            other = runs.Case.of(row_bytes, size.row_size_pass_bytes)
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
    figures |= measure_lookup(runs.Case.of(260, size.lookup_pass_bytes), list(engines), folder)
    worst = {e: min(figures[f"{e}_dump_ratio"], figures[f"{e}_load_ratio"]) for e in engines}
    return figures | {"better_engine": max(worst, key=worst.__getitem__), "better_engine_ratio": max(worst.values())}


if __name__ == "__main__":
    with benchmark("store", __doc__, "small passes, rows of 260 bytes only", ()) as run:
        present = [engine for engine in ENGINES if importlib.util.find_spec(engine) is not None]
        run.record |= {f"{engine}_measured": engine in present for engine in ENGINES}
        run.record |= measure(run.size(runs.FULL, runs.QUICK, runs.TINY), present, run.folder)
        dumps = DUMPS.get(run.record["size"], {}).items()
        goals = (*(Goal(key=f"{engine}_dump_ratio", goal=goal) for engine, goal in dumps), *GOALS)
        run.goals = [goal for goal in goals if goal.key in run.record or goal.key == "lookup_over_rocksdict"]
