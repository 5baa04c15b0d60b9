"""Random keys looked up in the store and in two stores of one key per row, which hold the same keys and bytes."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.machine import PeakMemory, console, middle
from benchmarks.store_runs import PASSES, Cycle, StoreRun, drop_store, source_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from benchmarks.store_runs import Case

    Rows = NDArray[np.float32]

SHARE = 0.05
TURNS = 3
CHUNK_ROWS = 1 << 16


class Contender:
    """Rows by key, at a place; this one is the store, after the passes of a whole cycle."""

    def __init__(self, run: StoreRun) -> None:
        self.path, self._store, self._name = run.path, run.store, run.case.table.name

    def open(self) -> None:
        """Open it, with nothing of it in memory; the store itself keeps nothing and goes on."""

    def rows(self, keys: NDArray[np.int64]) -> Rows:
        """Return the rows of ``keys`` (n,), in their order: (n, numbers of a row)."""
        return np.concatenate(list(self._store.lookup(self._name, keys).values()), axis=1)

    def close(self) -> None:
        """Close it, where it was opened."""


class LmdbRows(Contender):
    """LMDB with one key per row, put in key order, so that its pages are full; asked by ``getmulti``."""

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
        """Open it: pages that stayed mapped would stay in the page cache."""
        import lmdb

        self._env: Any = lmdb.open(str(self.path), map_size=1 << 40, readonly=True)

    def rows(self, keys: NDArray[np.int64]) -> Rows:
        """Get all by one call."""
        with self._env.begin() as txn, txn.cursor() as cursor:
            found = cursor.getmulti(_key_bytes(keys))
        return np.frombuffer(b"".join(value for _, value in found), np.float32).reshape(keys.size, -1)

    def close(self) -> None:
        """Close it."""
        self._env.close()


class RocksRows(Contender):
    """RocksDB with one key per row, put in key order and compacted; asked by its batch get."""

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
        """Open it."""
        import rocksdict

        access = rocksdict.AccessType.read_only()
        self._db: Any = rocksdict.Rdict(str(self.path), rocksdict.Options(raw_mode=True), access_type=access)

    def rows(self, keys: NDArray[np.int64]) -> Rows:
        """Get all by one call."""
        return np.frombuffer(b"".join(self._db.get(_key_bytes(keys))), np.float32).reshape(keys.size, -1)

    def close(self) -> None:
        """Close it."""
        self._db.close()


PEERS = {"getmulti": ("lmdb", LmdbRows), "rocksdict": ("rocksdict", RocksRows)}


def measure_lookup(case: Case, engines: list[str], folder: Path) -> dict[str, Any]:
    """Return rows a second, memory and bytes of all contenders: a random 5 % of all keys, cold, in turns."""
    cycle, source = Cycle(case), source_for(case)
    runs = {engine: StoreRun(engine, case, folder / f"lookup-{engine}.tc") for engine in engines}
    for _ in range(PASSES):
        dump = cycle.next()
        for run in runs.values():
            run.dump(dump, source)
    everything = cycle.keys()
    contenders: dict[str, Contender] = {engine: Contender(run) for engine, run in runs.items()}
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
            drop_store(contender.path)
            contender.open()
            with PeakMemory() as peak:
                begun = time.perf_counter()
                found = contender.rows(keys)
                seconds[name].append(time.perf_counter() - begun)
            contender.close()
            memory[name] = max(memory[name], peak.growth_bytes)
            equal = equal and np.array_equal(found.view(np.uint8), expected.view(np.uint8))
    for run in runs.values():
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
    """Return keys as bytes in the order of the numbers, which are not negative."""
    return [bytes(key) for key in keys.astype(">i8").view(np.uint8).reshape(-1, 8)]
