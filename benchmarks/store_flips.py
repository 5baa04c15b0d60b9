"""Single bits of a store's files flipped, one at a time: python -m benchmarks.store_flips [--quick] [--json FILE].

Two tables of a few hundred rows, trained for five passes in a cycle of three, with either engine. In a copy of the
store one bit is flipped. Then the store is opened for reading, and every row, the dense state and the cursor are
compared with the trained ones. Then it is opened for writing, two more passes are dumped and committed, and all is
compared after each. In the full size this is done for each bit of LMDB's meta pages and of HEAD, for a bit of each used
byte of its tree and of its free list, and for random bits of each kind of blobs, the map of blobs, Zarr metadata and
heads.

flips = bits; ENGINE_KIND_flips = bits of one kind of bytes; each has one of these outcomes:
right = both times everything was correct: the bit has no effect, or is stored twice
refused = a StoreError with one message, reading or writing, before anything wrong was returned. If opening for writing
was refused, the store is intact again when the bit is restored
silent = another row, state or cursor, or a store that a refusal changed
tracebacks = an exception other than StoreError
crashes = a process that a signal ended, or that did not answer within a minute
"""

from __future__ import annotations

import json
import select
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.machine import Goal, called, console, options_of
from tiercache.store import Adagrad, Cursor, Range, SegmentLayout, Store, StoreError, Table, Uniform, Zeros, hash_keys
from tiercache.store.engines.lmdb_map import HEAD_KEY, LmdbFile, extents_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.store.row_codec import RowBlock


Places = dict[str, list[tuple[str, int]]]
"""Files and byte offsets, by kind of bytes."""

TABLES = (
    Table(name="items", dim=6, optimizer=Adagrad(learning_rate=0.1), initializer=Zeros()),
    Table(name="users", dim=3, optimizer=Adagrad(learning_rate=0.1), initializer=Uniform(low=-1, high=1)),
)
PASSES, TRAINED, KEYS, DRAWN = 3, 5, 300, 130
PAGE_ROWS, BLOCK_ROWS = 16, 48
LMDB_PAGE, META_BYTES, SLOT_BYTES = 4096, 152, 52


# -- the store whose bits are flipped ----------------------------------------------------------------------


class Training:
    """Artificial passes in a cycle: rows of random bits, determined by the last pass of their key."""

    def __init__(self) -> None:
        draw = np.random.default_rng(7)
        self.keys = [
            {t.name: draw.choice(KEYS, DRAWN, replace=False) - KEYS // 2 for t in TABLES} for _ in range(PASSES)
        ]
        self._rows: dict[str, dict[int, NDArray[np.float32]]] = {t.name: {} for t in TABLES}
        self.known: dict[int, dict[str, tuple[NDArray[np.int64], NDArray[np.float32]]]] = {}
        """By number of trained passes and table: keys (n,) and rows (n, words)."""
        for pass_index in range(TRAINED + 2):
            for table in TABLES:
                keys, rows = self.trained(pass_index, table)
                self._rows[table.name].update(zip(keys.tolist(), rows, strict=True))
            self.known[pass_index + 1] = {
                name: (np.array(sorted(rows)), np.stack([rows[key] for key in sorted(rows)]))
                for name, rows in self._rows.items()
            }

    def trained(self, pass_index: int, table: Table) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the keys of a pass, and its resulting rows."""
        keys = self.keys[pass_index % PASSES][table.name]
        draw = np.random.default_rng([pass_index, TABLES.index(table)])
        return keys, draw.random((keys.size, table.row_bytes // 4), np.float32)

    def run(self, store: Store, pass_index: int) -> None:
        """Dump a pass and commit it."""
        layouts: list[SegmentLayout] = []
        blocks: list[RowBlock] = []
        for group in store.groups:
            (table,) = group.tables
            keys, rows = self.trained(pass_index, table)
            uses = np.full(keys.size, pass_index + PASSES)
            for later in range(pass_index + PASSES - 1, pass_index, -1):
                uses[np.isin(keys, self.keys[later % PASSES][table.name])] = later
            order = np.lexsort((hash_keys(keys, table.table_id), uses))
            keys, rows = keys[order], rows[order]
            ranges = [Range(int(use), (int(n),)) for use, n in zip(*np.unique(uses, return_counts=True), strict=True)]
            layout = SegmentLayout.of(
                ranges, row_bytes=table.row_bytes, page_rows=PAGE_ROWS, block_bytes=BLOCK_ROWS * table.row_bytes
            )
            layouts.append(layout)
            for block in range(layout.num_blocks):
                pages = range(*layout.pages_of_block(block))
                packed = [rows[layout.row_of_page(p) : layout.row_of_page(p + 1)] for p in pages]
                data = b"".join(part[:, cut].tobytes() for part in packed for cut in _cuts(table))
                mine = keys[slice(*layout.rows_of_block(block))]
                blocks.append((group.index, block, np.frombuffer(data, np.uint8), mine))
        store.append(pass_index, layouts, blocks)
        store.publish(
            Cursor(pass_index + 1), state=state(pass_index + 1), schedule_digest="cyclic", settings={}, environment={}
        )

    def make(self, path: Path, engine: str) -> None:
        """Create the store whose bits are flipped."""
        with Store.open(path, tables=TABLES, engine=engine, retention=2) as store:
            for pass_index in range(TRAINED):
                self.run(store, pass_index)

    def is_right(self, store: Store, passes: int) -> bool:
        """Return True if a store is exactly in the state after this number of passes: cursor, dense state and all
        rows.
        """
        if store.commit is None or store.commit.cursor != Cursor(passes) or store.state() != state(passes):
            return False
        for table in TABLES:
            keys, rows = self.known[passes][table.name]
            found = store.lookup(table.name, keys)
            scanned = np.sort(np.concatenate([some for some, _ in store.scan(table.name)]))
            if not np.array_equal(scanned, keys) or not np.array_equal(np.concatenate([*found.values()], 1), rows):
                return False
        return True


def state(passes: int) -> bytes:
    """Return the dense state of a commit."""
    return np.random.default_rng(passes).bytes(3000)


def _cuts(table: Table) -> Iterator[slice]:
    at = 0
    for field in table.fields:
        yield slice(at, at + field.words)
        at += field.words


def places(path: Path, engine: str) -> Places:
    """Return the places of a store's used bytes."""
    found: Places = defaultdict(list)
    if engine == "lmdb":
        for page in (0, 1):
            found["meta"] += [("data.mdb", page * LMDB_PAGE + byte) for byte in range(META_BYTES)]
            found["head"] += [("HEAD", page * LMDB_PAGE + byte) for byte in range(SLOT_BYTES)]
        _tree_places(path, found)
        _blob_places(path, found)
    else:
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path).as_posix()
            if file.is_file() and name != "writer.lock":
                folder = name.partition("/")[0]
                kind = {"segments": "meta_blobs" if file.name == "meta" else "chunks"}.get(folder, folder)
                kind = "metadata" if file.name == "zarr.json" else kind if "/" in name else "description"
                found[kind] += [(name, byte) for byte in range(file.stat().st_size)]
    found["description"] = [("store.json", byte) for byte in range((path / "store.json").stat().st_size)]
    return found


def _tree_places(path: Path, found: Places) -> None:
    """Add the bytes of LMDB's trees that its newest root names, and of their values."""
    file = LmdbFile(str(path / "data.mdb"))
    newest, data = file.transaction, (path / "data.mdb").read_bytes()
    entries = {v.offset + byte for v in file.values() for byte in range(v.size)}
    file.close()
    meta = newest % 2 * LMDB_PAGE
    for kind, root_at in (("free_list", meta + 80), ("tree", meta + 128)):
        waiting = [struct.unpack_from("<Q", data, root_at)[0]]
        while waiting:
            page = waiting.pop()
            if page == (1 << 64) - 1:
                continue
            at = page * LMDB_PAGE
            _, _, flags, lower, upper = struct.unpack_from("<QHHHH", data, at)
            used = [*range(at, at + lower), *range(at + upper, at + LMDB_PAGE)]
            found[kind] += [("data.mdb", byte) for byte in used if byte not in entries]
            for node in struct.unpack_from(f"<{(lower - 16) // 2}H", data, at + 16):
                low, high, node_flags, key_bytes = struct.unpack_from("<HHHH", data, at + node)
                if flags & 1:
                    waiting.append(low | high << 16 | node_flags << 32)
                elif node_flags & 1:
                    (large,) = struct.unpack_from("<Q", data, at + node + 8 + key_bytes)
                    found[kind] += [("data.mdb", large * LMDB_PAGE + byte) for byte in range(16)]
    found["entries"] = [("data.mdb", byte) for byte in sorted(entries)]


def _blob_places(path: Path, found: Places) -> None:
    """Add the bytes of blobs, including padding between blocks."""
    file = LmdbFile(str(path / "data.mdb"))
    entries = {v.key.decode(): file.read(v) for v in file.values() if v.key != HEAD_KEY.encode()}
    file.close()
    with Store.open(path, mode="r") as store:
        needs = [*store.history.needed.blobs()]
    for need in needs:
        kind = {"rows": "rows", "keys": "keys", "meta": "meta_blobs"}.get(need.name.rpartition("/")[2], "")
        kind = kind or need.name.partition("/")[0]
        for at, size in extents_of(entries[need.name]).pieces(need.first_byte, need.size - need.first_byte):
            found[kind] += [("blocks.bin", byte) for byte in range(at, at + size)]


# -- the bits --------------------------------------------------------------------------------------------

ENGINES = ("lmdb", "zarr")
BAD = ("silent", "tracebacks", "crashes")
GOALS = tuple(Goal(key=key, goal=0, below=True) for key in BAD)
WORKERS, PATIENCE_SECONDS = 4, 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The number of flipped bits."""

    drawn: int
    """Random bits of each kind whose bits are not all flipped."""
    bits: dict[str, int]
    """Bits of each byte, for kinds whose bytes are all flipped."""
    flips: int


FULL = Size(drawn=1200, bits={"meta": 8, "head": 8, "tree": 1, "free_list": 1}, flips=20_000)
QUICK = Size(drawn=50, bits={}, flips=1000)
TINY = Size(drawn=3, bits={}, flips=30)

Flip = tuple[str, str, int, int]
"""The kind of a byte, its file, its offset, and one of its bits."""


def draw(found: Places, size: Size) -> list[Flip]:
    """Choose bits, deterministically."""
    generator, chosen = np.random.default_rng(11), list[Flip]()
    for kind, bytes_of_kind in found.items():
        each = size.bits.get(kind)
        if each is not None:
            chosen += [
                (kind, *place, (3 * i + bit) % 8) for i, place in enumerate(bytes_of_kind) for bit in range(each)
            ]
            continue
        for at in generator.choice(
            8 * len(bytes_of_kind), min(size.drawn, 8 * len(bytes_of_kind)), replace=False
        ).tolist():
            chosen.append((kind, *bytes_of_kind[at // 8], at % 8))
    return chosen


# -- the process that flips ------------------------------------------------------------------------------


def flip(file: Path, at: int, bit: int) -> None:
    """Flip a bit of a file."""
    with file.open("r+b", buffering=0) as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << bit]))


def outcome(training: Training, whole: Path, copy: Path, one: Flip) -> str:
    """Flip a bit and return the outcome: a key of the figures, with details after a colon."""
    _, name, at, bit = one
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(whole, copy)
    flip(copy / name, at, bit)
    try:
        said = [_read(training, copy), _write(training, copy)]
        if said[1] == "not opened":
            flip(copy / name, at, bit)
            if _read(training, copy) != "right":
                return "silent: a refusal changed the store"
            said[1] = "refused"
    except Exception as error:
        return f"tracebacks: {type(error).__name__}: {error}"
    worst = [*BAD[:2], "refused", "right"]
    return min(said, key=lambda word: worst.index(word.partition(":")[0]))


def _read(training: Training, path: Path) -> str:
    try:
        with Store.open(path, mode="r") as store:
            return "right" if training.is_right(store, TRAINED) else "silent: other rows were read"
    except StoreError as error:
        return _sentence(error)


def _write(training: Training, path: Path) -> str:
    try:
        store = Store.open(path)
    except StoreError as error:
        return "not opened" if _sentence(error) == "refused" else _sentence(error)
    try:
        with store:
            for passes in range(TRAINED, TRAINED + 2):
                training.run(store, passes)
                if not training.is_right(store, passes + 1):
                    return "silent: other rows were read while the store was written"
        with Store.open(path, mode="r") as store:
            return "right" if training.is_right(store, TRAINED + 2) else "silent: other rows were written"
    except StoreError as error:
        return _sentence(error)


def _sentence(error: Exception) -> str:
    return "refused" if ": " in str(error) and "\n" not in str(error) else f"tracebacks: no sentence: {error}"


def work(folder: Path, engine: str, copy: str) -> None:
    """Flip the bits of a list whose indices are read, and print the outcomes."""
    training, flips = Training(), json.loads((folder / f"{engine}.json").read_text())
    for index in map(int, sys.stdin):
        print(json.dumps(outcome(training, folder / engine, folder / copy, flips[index])), flush=True)


# -- the process that counts -----------------------------------------------------------------------------


def outcomes(folder: Path, engine: str, flips: int, worker: int, step: int) -> Iterator[str]:
    """Yield the outcome of each of a worker's bits; a worker that ended is replaced at the next bit."""
    command = [sys.executable, "-m", "benchmarks.store_flips", "--worker", str(folder), engine]
    process: subprocess.Popen[str] | None = None
    for index in range(worker, flips, step):
        if process is None:
            process = subprocess.Popen(
                [*command, f"copy-{engine}-{worker}"], stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True
            )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{index}\n")
        process.stdin.flush()
        answered, _, _ = select.select([process.stdout], [], [], PATIENCE_SECONDS)
        line = process.stdout.readline() if answered else ""
        if line:
            yield json.loads(line)
            continue
        process.kill()
        _, said = process.communicate()
        yield f"crashes: exit status {process.returncode}: {said[-300:]}"
        process = None
    if process is not None:
        process.kill()
        process.communicate()


def _all_outcomes(folder: Path, engine: str, flips: int, worker: int) -> list[str]:
    return list(outcomes(folder, engine, flips, worker, WORKERS))


def measure(size: Size, folder: Path) -> dict[str, Any]:
    """Flip all bits and return the figures."""
    counted, told = Counter[str](), list[str]()
    figures: dict[str, Any] = {}
    training = Training()
    for engine in ENGINES:
        training.make(folder / engine, engine)
        flips = draw(places(folder / engine, engine), size)
        (folder / f"{engine}.json").write_text(json.dumps(flips))
        figures |= {f"{engine}_{kind}_flips": n for kind, n in Counter(one[0] for one in flips).items()}
        console.print(f"{engine}: {len(flips):,} bits", highlight=False)

        with ThreadPoolExecutor(WORKERS) as threads:
            work_of = partial(_all_outcomes, folder, engine, len(flips))
            every = list(threads.map(work_of, range(WORKERS)))
        for worker, all_said in enumerate(every):
            for one, said in zip(flips[worker::WORKERS], all_said, strict=True):
                key, _, more = said.partition(": ")
                counted[key] += 1
                if more:
                    told.append(f"{engine} {one}: {said}")
    for line in told[:40]:
        console.print(line, highlight=False, markup=False)
    return {"flips": counted.total()} | {key: counted[key] for key in ("right", "refused", *BAD)} | figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--worker"]:
        work(Path(given[1]), given[2], given[3])
        return
    with called(
        options_of("store_flips", __doc__, "a thousand bits", tiny="a few bits of each kind"), arguments
    ) as run:
        size = run.size(FULL, QUICK, TINY)
        with tempfile.TemporaryDirectory(prefix="tiercache-flips-") as scratch:
            run.record |= measure(size, Path(scratch))
    run.show()
    run.report((*GOALS, Goal(key="flips", goal=size.flips)))


if __name__ == "__main__":
    main()
