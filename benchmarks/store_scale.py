"""Growth of a store: python -m benchmarks.store_scale [--quick] [--json FILE].

Three parts, each with the least data that its metadata needs.

* passes: stores of 50, 200 and 800 passes with 26 tables (and 100, in full), each range of each table with one row of 4
bytes. Opening to read, its memory, a lookup of one key, a commit. Half of all ranges are live.
* rows: one segment in hash order, as after compact, of 0.1, 1 and 10 TB: rows of 256 KiB that an engine generates
when they are read, with real keys and checksums. A lookup of one key.
* rewrites: the writes to temporary files while the same rows enter a schedule of 1 and of many passes.

Keys of the report: open_seconds_800, open_mib_800 (traced memory of an opened store), one_key_800_over_50 and
one_key_10tb_over_100gb (a lookup after the first one, which reads the heads of all segments), commit_800_over_50,
rewrite_writes_5000_over_1. There are peers for none of these: no other system trains from such a store.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.drawn_passes import hash_ordered
from benchmarks.machine import Goal, benchmark, middle, say, seconds_of
from benchmarks.store_runs import append, opened_bytes, publish
from tiercache.store import NEVER, SGD, Cursor, MemoryEngine, Range, SegmentLayout, Store, Table, Zeros
from tiercache.store import rewrite as rewriting
from tiercache.store.bits import keys_of
from tiercache.store.commit import STATE_CHUNK_BYTES, Commit, RankList, State, head_of
from tiercache.store.engines.engine import Blob, ReadRequest
from tiercache.store.layout import KEY_PAGE_ROWS
from tiercache.store.records import checksum, digest
from tiercache.store.segment import GroupMeta, Live, Segment, meta_to_bytes

Int64s = NDArray[np.int64]


PASSES = (50, 200, 800)
TERABYTES = (0.1, 1, 10)
GOALS = (
    Goal(key="open_seconds_800", goal=0.1, below=True),
    Goal(key="open_mib_800", goal=64, below=True),
    Goal(key="one_key_800_over_50", goal=3, least=6, below=True),
    Goal(key="one_key_10tb_over_100gb", goal=1.5, least=3, below=True),
    Goal(key="commit_800_over_50", goal=16, below=True),
    Goal(key="rewrite_writes_5000_over_1", goal=2, below=True),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The amount of measurement."""

    tables: tuple[int, ...]
    tries: int
    rewritten_rows: int
    memory_bytes: int
    """Memory of a rewrite."""


FULL = Size(tables=(26, 100), tries=15, rewritten_rows=2_000_000, memory_bytes=64 << 20)
QUICK = Size(tables=(26,), tries=5, rewritten_rows=200_000, memory_bytes=4 << 20)
TINY = Size(tables=(2,), tries=1, rewritten_rows=20_000, memory_bytes=1 << 20)


# -- passes ----------------------------------------------------------------------------------------------


def dump(store: Store, pass_index: int, num_passes: int) -> None:
    """Append a pass whose rows are needed by each of the next ``num_passes``: one row of each table for each."""
    tables = store.groups[0].tables
    uses = range(pass_index + 1, pass_index + 1 + num_passes)
    layout = SegmentLayout.of(
        [Range(use, (1,) * len(tables)) for use in uses], row_bytes=4, page_rows=4096, block_bytes=1 << 20
    )
    keys = np.arange(layout.rows, dtype=np.int64) + pass_index * layout.rows
    append(store, pass_index, layout, keys, np.zeros(layout.block_bytes, np.uint8))


def measure_passes(folder: Path, num_passes: int, num_tables: int, tries: int) -> dict[str, float]:
    """Measure a store with this number of passes."""
    tables = [
        Table(name=f"table {i}", dim=1, optimizer=SGD(learning_rate=0.1), initializer=Zeros())
        for i in range(num_tables)
    ]
    path = folder / f"{num_passes}-{num_tables}.tc"
    say(f"{num_passes} passes, {num_tables} tables")
    with Store.open(path, tables=tables) as store:
        for pass_index in range(num_passes):
            dump(store, pass_index, num_passes)
        publish(store, num_passes)
        commits = []
        for pass_index in range(num_passes, num_passes + tries):
            dump(store, pass_index, num_passes)
            begun = time.perf_counter()
            publish(store, pass_index + 1)
            commits.append(time.perf_counter() - begun)
    opened = middle(seconds_of(lambda _: Store.open(path, mode="r").close(), tries))
    mib = opened_bytes(path) / (1 << 20)
    with Store.open(path, mode="r") as store:
        store.key_memory = None
        rows, newest = num_passes * num_tables, num_passes + tries - 1
        names = [table.name for table in store.groups[0].tables]

        def look(number: int) -> None:
            """Look up a live row, equally often from each segment."""
            age = 37 * number % num_passes
            waits = age + number % (num_passes - age)
            row = (newest - age) * rows + waits * num_tables + number % num_tables
            store.lookup(names[number % num_tables], np.array([row]))

        missing = np.array([-1])
        (first,) = seconds_of(lambda _: store.lookup(names[0], missing, missing="zeros"), 1)
        one_key = middle(seconds_of(look, 4 * tries))
    return {
        "open_seconds": opened, "open_mib": mib, "first_key_seconds": first, "one_key_seconds": one_key,
        "commit_seconds": middle(commits),
    }  # fmt: skip


# -- rows ------------------------------------------------------------------------------------------------

ROW_BYTES = 256 << 10
LARGE = Table(name="large", dim=ROW_BYTES // 4, optimizer=SGD(learning_rate=0.1), initializer=Zeros())


class MadeUpEngine(MemoryEngine):
    """Keeps blobs, and generates the rows and keys of one segment in hash order; rows are zeros."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def hashes(self, low: int, high: int) -> NDArray[np.uint64]:
        """Return the hashes of rows [low, high): evenly spread, as for many keys."""
        return np.arange(low, high, dtype=np.uint64) * np.uint64((1 << 64) // self.rows)

    def keys(self, low: int, high: int) -> Int64s:
        """Return the keys of rows [low, high)."""
        return keys_of(self.hashes(low, high), LARGE.table_id)

    def read(self, *requests: ReadRequest) -> None:
        """Fill with stored bytes, or with generated ones."""
        for request in requests:
            kind = request.blob.name.rsplit("/", 1)[1]
            if kind == "rows":
                request.out[:] = 0
            elif kind == "keys":
                first = request.offset // 8
                request.out[:] = self.keys(first, first + request.out.size // 8).view(np.uint8)
            else:
                super().read(request)


def made_up_store(rows: int) -> Store:
    """Return a store of one segment with this number of rows, open for reading."""
    engine = MadeUpEngine(rows)
    store = Store.open(None, tables=[LARGE], engine=engine)
    group = store.groups[0]
    layout = SegmentLayout.of(
        [Range(NEVER, (rows,))], row_bytes=ROW_BYTES, page_rows=1, block_bytes=ROW_BYTES * KEY_PAGE_ROWS
    )
    bounds = [layout.rows_of_block(block) for block in range(layout.num_blocks)]
    meta = GroupMeta(
        layout=layout,
        checksums=np.full(rows, checksum(np.zeros(ROW_BYTES, np.uint8)), np.uint32),
        key_checksums=np.array([checksum(engine.keys(*rows_of)) for rows_of in bounds], np.uint32),
        first_hashes=engine.hashes(0, rows)[::KEY_PAGE_ROWS],
    )
    segment = Segment(id_=0, name="segments/0.0", pass_index=-1, within=False)
    segment.describe((meta,))
    head, parts = meta_to_bytes([meta], 0, store.groups)
    data = np.concatenate([np.frombuffer(head, np.uint8), *parts])
    segment.meta_bytes, segment.head_bytes, segment.head_digest = data.size, len(head), digest(head)
    own = RankList(
        rank=0, next_segment=1, segments=(segment,), first_commits=(0,), live=Live.of([segment], store.groups),
        state=State("states/0.0", 0, STATE_CHUNK_BYTES, np.empty(0, np.uint32)),
    )  # fmt: skip
    rank_bytes = own.to_bytes()
    rank = head_of("ranks/0.0", rank_bytes)
    commit = Commit(
        id=0, cursor=Cursor(0), schedule_digest="", settings={}, environment={}, tables=store.tables, retention=1,
        own=own, ranks=(rank,),
    )  # fmt: skip
    commit_bytes = commit.to_bytes()
    newest = head_of("commits/0", commit_bytes)
    blobs = {segment.meta_blob: data, Blob("states/0.0", 0): np.empty(0, np.uint8)}
    for one, content in ((rank, rank_bytes), (newest, commit_bytes)):
        blobs[Blob(one.name, one.size)] = np.frombuffer(content, np.uint8)
    engine.put(list(blobs), ((i, 0, content) for i, content in enumerate(blobs.values())))
    before = engine.newest()
    store.close()
    engine.publish(newest, before)
    assert group.row_bytes == ROW_BYTES
    return Store.open(None, engine=engine, mode="r")


def measure_rows(terabytes: float, tries: int) -> dict[str, float]:
    """Measure a lookup of one key among this number of bytes of rows."""
    rows = int(terabytes * 1e12) // ROW_BYTES
    say(f"{rows:,} rows of 256 KiB")
    with made_up_store(rows) as store:
        store.key_memory = None
        keys = keys_of(
            np.random.default_rng(1).integers(0, rows, 4 * tries + 1).astype(np.uint64) * np.uint64((1 << 64) // rows),
            LARGE.table_id,
        )
        first, *others = seconds_of(lambda number: store.lookup("large", keys[number : number + 1]), keys.size)
    return {"first_key_seconds": first, "one_key_seconds": middle(others)}


# -- rewrites --------------------------------------------------------------------------------------------


class Uses:
    """The first use of each key: key k by pass k mod ``num_passes``."""

    def __init__(self, keys: Int64s, num_passes: int) -> None:
        self._keys, self._num_passes = keys, num_passes

    def counts(self, _table_name: str) -> Mapping[int, int]:
        """Return the number of keys that each pass uses first."""
        uses, counts = np.unique(self._keys % self._num_passes, return_counts=True)
        return dict(zip(uses.tolist(), counts.tolist(), strict=True))

    def slices(self, _table_name: str) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield keys in hash order, and the pass of each."""
        step = 1 << 16
        for low in range(0, self._keys.size, step):
            part = self._keys[low : low + step]
            yield part, part % self._num_passes


def rewrite_writes(folder: Path, rows: int, num_passes: int) -> dict[str, float]:
    """Return the writes to temporary files while rows enter a schedule, and their bytes."""
    say(f"{rows:,} rows enter a schedule of {num_passes} passes")
    table = Table(name="rows", dim=64, optimizer=SGD(learning_rate=0.1), initializer=Zeros())
    keys = hash_ordered(rows, table.table_id)
    layout = SegmentLayout.of(
        [Range(NEVER, (rows,))], row_bytes=table.row_bytes, page_rows=64, block_bytes=table.row_bytes << 12
    )
    with Store.open(folder / f"rewrite-{num_passes}.tc", tables=[table]) as store:
        append(store, -1, layout, keys, np.zeros(layout.block_bytes, np.uint8))
        publish(store, 0)
        written = store.counters.spill_writes, store.counters.spill_bytes_written
        store.rewrite(Uses(keys, num_passes), schedule_digest="scale", retain_segments=False)
        writes, num_bytes = store.counters.spill_writes, store.counters.spill_bytes_written
    return {"writes": float(writes - written[0]), "bytes": float(num_bytes - written[1])}


# -- all -------------------------------------------------------------------------------------------------


def measure(folder: Path, size: Size) -> dict[str, float]:
    """Measure all parts."""
    passes, many = ((3, 4, 6), 50) if size is TINY else (PASSES, 5000)
    found: dict[str, float] = {}
    for num_tables in size.tables:
        for num_passes in passes:
            one = measure_passes(folder, num_passes, num_tables, size.tries)
            found |= {f"{name}_{num_passes}x{num_tables}": value for name, value in one.items()}
    for terabytes in TERABYTES:
        one = measure_rows(terabytes, size.tries)
        found |= {f"{name}_{terabytes}tb": value for name, value in one.items()}
    rewriting.REWRITE_BYTES = size.memory_bytes
    for num_passes in (1, many):
        one = rewrite_writes(folder, size.rewritten_rows, num_passes)
        found |= {f"rewrite_{name}_{num_passes}": value for name, value in one.items()}
    fewest, most = (f"{num_passes}x{size.tables[0]}" for num_passes in (passes[0], passes[-1]))
    return found | {
        "open_seconds_800": found[f"open_seconds_{most}"],
        "open_mib_800": found[f"open_mib_{most}"],
        "one_key_800_over_50": found[f"one_key_seconds_{most}"] / found[f"one_key_seconds_{fewest}"],
        "one_key_10tb_over_100gb": found["one_key_seconds_10tb"] / found["one_key_seconds_0.1tb"],
        "commit_800_over_50": found[f"commit_seconds_{most}"] / found[f"commit_seconds_{fewest}"],
        "rewrite_writes_5000_over_1": found[f"rewrite_writes_{many}"] / max(1, found["rewrite_writes_1"]),
    }


if __name__ == "__main__":
    with benchmark("store_scale", __doc__, "26 tables only, and fewer rows rewritten", GOALS) as run:
        amount = run.size(FULL, QUICK, TINY)
        run.is_judged = amount is not TINY
        run.record |= measure(run.folder, amount)
