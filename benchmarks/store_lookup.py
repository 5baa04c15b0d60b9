"""Random keys looked up in the store and in two stores of one key per row, which hold the same keys and bytes."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from benchmarks.machine import PeakMemory, console, middle
from benchmarks.store_case import PASSES, Cycle
from benchmarks.store_runs import StoreRun, drop_store, source_for
from tiercache.store.lookup import read_found

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from benchmarks.store_case import Case

    Rows = NDArray[np.float32]

SHARE = 0.05
TURNS = 3
CHUNK_ROWS = 1 << 16


class Contender(Protocol):
    """A store of rows by key."""

    def open(self) -> None:
        """Open it, with nothing of it in memory."""

    def rows(self, keys: NDArray[np.int64]) -> Rows:
        """Return the rows of ``keys`` (n,), in any order: (n, numbers of a row)."""

    def close(self) -> None:
        """Close it."""


class Ours:
    """The store, after the passes of a whole cycle."""

    def __init__(self, run: StoreRun) -> None:
        self._run, self._name = run, run.case.table.name

    def open(self) -> None:
        """Drop the page cache: the store itself keeps nothing."""
        drop_store(self._run.path)

    def rows(self, keys: NDArray[np.int64]) -> Rows:
        """Look up; a store without ``lookup`` locates and reads, which is what it does."""
        store = self._run.store
        if hasattr(store, "lookup"):
            return np.concatenate(list(store.lookup(self._name, keys).values()), axis=1)
        assert store.commit is not None
        ids, rows = store.locate(self._name, keys, after=store.commit.cursor.pass_index - 1)
        return np.concatenate(read_found(store, 0, ids, rows), axis=1)

    def close(self) -> None:
        """Do nothing: it goes on."""


class LmdbRows:
    """LMDB with one key per row, put in key order, so that its pages are full; asked by ``getmulti``."""

    def __init__(self, path: Path, chunks: Iterator[tuple[NDArray[np.int64], Rows]]) -> None:
        import lmdb

        self._path = path
        env = lmdb.open(str(path), map_size=1 << 40)
        for keys, rows in chunks:
            with env.begin(write=True) as txn, txn.cursor() as cursor:
                items = zip(_key_bytes(keys), map(bytes, rows.view(np.uint8)), strict=True)
                cursor.putmulti(items, append=True)
        env.close()

    def open(self) -> None:
        """Open it after dropping what the page cache holds; pages that are mapped would stay."""
        import lmdb

        drop_store(self._path)
        self._env: Any = lmdb.open(str(self._path), map_size=1 << 40, readonly=True)

    def rows(self, keys: NDArray[np.int64]) -> Rows:
        """Get all by one call."""
        with self._env.begin() as txn, txn.cursor() as cursor:
            found = cursor.getmulti(_key_bytes(keys))
        return np.frombuffer(b"".join(value for _, value in found), np.float32).reshape(keys.size, -1)

    def close(self) -> None:
        """Close it."""
        self._env.close()


class RocksRows:
    """RocksDB with one key per row, put in key order and compacted; asked by its batch get."""

    def __init__(self, path: Path, chunks: Iterator[tuple[NDArray[np.int64], Rows]]) -> None:
        import rocksdict

        self._path = path
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
        """Open it after dropping what the page cache holds."""
        import rocksdict

        drop_store(self._path)
        self._db: Any = rocksdict.Rdict(
            str(self._path), rocksdict.Options(raw_mode=True), access_type=rocksdict.AccessType.read_only()
        )

    def rows(self, keys: NDArray[np.int64]) -> Rows:
        """Get all by one call."""
        return np.frombuffer(b"".join(self._db.get(_key_bytes(keys))), np.float32).reshape(keys.size, -1)

    def close(self) -> None:
        """Close it."""
        self._db.close()


PEERS: dict[str, tuple[str, type[LmdbRows] | type[RocksRows]]] = {
    "getmulti": ("lmdb", LmdbRows),
    "rocksdict": ("rocksdict", RocksRows),
}


def measure_lookup(case: Case, engines: list[str], folder: Path) -> dict[str, Any]:
    """Return rows a second, memory and bytes of all contenders: a random 5 % of all keys, cold, in turns."""
    cycle, source = Cycle(case), source_for(case)
    runs = {engine: StoreRun(engine, case, folder / f"lookup-{engine}.tc") for engine in engines}
    for _ in range(PASSES):
        dump = cycle.next()
        for run in runs.values():
            run.dump(dump, source)
    everything = cycle.keys()
    contenders: dict[str, Contender] = {engine: Ours(run) for engine, run in runs.items()}
    bits = contenders[engines[0]].rows(everything)
    for name, (package, kind) in PEERS.items():
        if importlib.util.find_spec(package) is None:
            console.print(f"{name} is left out: {package} is not installed")
            continue
        contenders[name] = kind(folder / f"lookup-{name}", _chunks(everything, bits))
    del bits
    keys = np.random.default_rng(6).choice(everything, int(SHARE * everything.size), replace=False)
    figures: dict[str, Any] = {"lookup_keys": keys.size, "lookup_rows": everything.size}
    seconds: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    expected: Rows | None = None
    equal = True
    for _ in range(TURNS):
        for name, contender in contenders.items():
            contender.open()
            with PeakMemory() as peak:
                begun = time.perf_counter()
                found = contender.rows(keys)
                seconds.setdefault(name, []).append(time.perf_counter() - begun)
            contender.close()
            memory[name] = max(memory.get(name, 0), peak.growth_bytes)
            expected = found if expected is None else expected
            equal = equal and np.array_equal(found.view(np.uint8), expected.view(np.uint8))
    for run in runs.values():
        run.close()
    for name, taken in seconds.items():
        figures[f"lookup_rows_per_s_{name}"] = keys.size / middle(taken)
        figures[f"lookup_memory_bytes_{name}"] = memory[name]
    best = max(figures[f"lookup_rows_per_s_{engine}"] for engine in engines)
    figures |= {"lookup_rows_per_s": best, "lookup_rows_equal": equal}
    for name in PEERS.keys() & contenders.keys():
        figures[f"lookup_over_{name}"] = best / figures[f"lookup_rows_per_s_{name}"]
    return figures


def _chunks(keys: NDArray[np.int64], rows: Rows) -> Iterator[tuple[NDArray[np.int64], Rows]]:
    for low in range(0, keys.size, CHUNK_ROWS):
        yield keys[low : low + CHUNK_ROWS], rows[low : low + CHUNK_ROWS]


def _key_bytes(keys: NDArray[np.int64]) -> list[bytes]:
    """Return keys as bytes in the order of the numbers, which are not negative."""
    return [bytes(key) for key in keys.astype(">i8").view(np.uint8).reshape(-1, 8)]
