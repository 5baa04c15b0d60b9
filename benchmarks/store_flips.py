"""Single bits of a store's files flipped, one at a time: python -m benchmarks.store_flips [--quick] [--json FILE].

The store is that of the crash harness after six steps, with either engine. In a copy of it one bit is flipped. Then the
store is opened for reading, and every row, the dense state and the cursor are compared with the expected ones. Then it
is opened for writing, two more steps are taken, and all is compared after each. In the full size this is done for each
bit of LMDB's meta pages and of HEAD, for a bit of each used byte of its tree and of its free list, and for random bits
of each kind of blobs, the map of blobs, Zarr metadata and heads.

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
from typing import Any

import numpy as np

from benchmarks.machine import Goal, benchmark, console, python
from tests.crash import store_steps as steps
from tiercache.store import Store, StoreError
from tiercache.store.engines.lmdb_map import HEAD_KEY, LmdbFile, extents_of

Places = dict[str, list[tuple[str, int, int]]]
"""File, first byte and size of extents, by kind of bytes."""
LMDB_PAGE, META_BYTES, SLOT_BYTES = 4096, 152, 52
TRAINED = 6
"""Steps of the crash harness that are taken before bits are flipped; two more are taken after."""


def make(path: Path, engine: str) -> None:
    """Create the store whose bits are flipped."""
    with steps.opened(path, engine=engine) as store:
        for number in range(TRAINED):
            steps.take(store, number, steps.quiet)


def is_right(store: Store, taken: int) -> bool:
    """Return True if a store is exactly in the state after this number of steps."""
    return steps.stands(store) == taken - 1 and not steps.problems(store)


def places(path: Path, engine: str) -> Places:
    """Return the places of a store's used bytes."""
    found: Places = defaultdict(list)
    if engine == "lmdb":
        for page in (0, 1):
            found["meta"].append(("data.mdb", page * LMDB_PAGE, META_BYTES))
            found["head"].append(("HEAD", page * LMDB_PAGE, SLOT_BYTES))
        _tree_places(path, found)
        _blob_places(path, found)
    else:
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path).as_posix()
            if file.is_file() and name != "writer.lock":
                folder = name.partition("/")[0]
                kind = {"segments": "meta_blobs" if file.name == "meta" else "chunks"}.get(folder, folder)
                kind = "metadata" if file.name == "zarr.json" else kind if "/" in name else "description"
                found[kind].append((name, 0, file.stat().st_size))
    found["description"] = [("store.json", 0, (path / "store.json").stat().st_size)]
    return found


def _tree_places(path: Path, found: Places) -> None:
    """Add the bytes of LMDB's trees that its newest root names, and of their values."""
    file = LmdbFile(str(path / "data.mdb"))
    newest, data = file.transaction, (path / "data.mdb").read_bytes()
    found["entries"] = sorted(("data.mdb", value.offset, value.size) for value in file.values())
    file.close()
    entries = {byte for _, first, size in found["entries"] for byte in range(first, first + size)}
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
            found[kind] += [("data.mdb", byte, 1) for byte in used if byte not in entries]
            for node in struct.unpack_from(f"<{(lower - 16) // 2}H", data, at + 16):
                low, high, node_flags, key_bytes = struct.unpack_from("<HHHH", data, at + node)
                if flags & 1:
                    waiting.append(low | high << 16 | node_flags << 32)
                elif node_flags & 1:
                    (large,) = struct.unpack_from("<Q", data, at + node + 8 + key_bytes)
                    found[kind].append(("data.mdb", large * LMDB_PAGE, 16))


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
        pieces = extents_of(entries[need.name]).pieces(need.first_byte, need.size - need.first_byte)
        found[kind] += [("blocks.bin", at, size) for at, size in pieces]


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
QUICK = Size(drawn=20, bits={}, flips=400)
TINY = Size(drawn=3, bits={}, flips=30)

Flip = tuple[str, str, int, int]
"""The kind of a byte, its file, its offset, and one of its bits."""


def draw(found: Places, size: Size) -> list[Flip]:
    """Choose bits, deterministically."""
    generator, chosen = np.random.default_rng(11), list[Flip]()
    for kind, extents in found.items():
        ends = np.cumsum([num_bytes for *_, num_bytes in extents])
        total, each = int(ends[-1]), size.bits.get(kind)
        if each is None:
            bits = generator.choice(8 * total, min(size.drawn, 8 * total), replace=False)
        else:
            bits = np.array([8 * i + (3 * i + bit) % 8 for i in range(total) for bit in range(each)])
        for at, bit in zip((bits // 8).tolist(), (bits % 8).tolist(), strict=True):
            index = int(np.searchsorted(ends, at, side="right"))
            name, first, num_bytes = extents[index]
            chosen.append((kind, name, first + at - int(ends[index]) + num_bytes, bit))
    return chosen


# -- the process that flips ------------------------------------------------------------------------------


def flip(file: Path, at: int, bit: int) -> None:
    """Flip a bit of a file."""
    with file.open("r+b", buffering=0) as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << bit]))


def outcome(whole: Path, copy: Path, one: Flip) -> str:
    """Flip a bit and return the outcome: a key of the figures, with details after a colon."""
    _, name, at, bit = one
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(whole, copy)
    flip(copy / name, at, bit)
    try:
        said = [_read(copy), _write(copy)]
        if said[1] == "not opened":
            flip(copy / name, at, bit)
            if _read(copy) != "right":
                return "silent: a refusal changed the store"
            said[1] = "refused"
    except Exception as error:
        return f"tracebacks: {type(error).__name__}: {error}"
    worst = [*BAD[:2], "refused", "right"]
    return min(said, key=lambda word: worst.index(word.partition(":")[0]))


def _read(path: Path) -> str:
    try:
        with Store.open(path, mode="r") as store:
            return "right" if is_right(store, TRAINED) else "silent: other rows were read"
    except StoreError as error:
        return _sentence(error)


def _write(path: Path) -> str:
    try:
        store = steps.opened(path)
    except StoreError as error:
        return "not opened" if _sentence(error) == "refused" else _sentence(error)
    try:
        with store:
            for number in range(TRAINED, TRAINED + 2):
                steps.take(store, number, steps.quiet)
                if not is_right(store, number + 1):
                    return "silent: other rows were read while the store was written"
        with Store.open(path, mode="r") as store:
            return "right" if is_right(store, TRAINED + 2) else "silent: other rows were written"
    except StoreError as error:
        return _sentence(error)


def _sentence(error: Exception) -> str:
    return "refused" if ": " in str(error) and "\n" not in str(error) else f"tracebacks: no sentence: {error}"


def work(folder: Path, engine: str, copy: str) -> None:
    """Flip the bits of a list whose indices are read, and print the outcomes."""
    flips = json.loads((folder / f"{engine}.json").read_text())
    for index in map(int, sys.stdin):
        print(json.dumps(outcome(folder / engine, folder / copy, flips[index])), flush=True)


# -- the process that counts -----------------------------------------------------------------------------


def outcomes(folder: Path, engine: str, flips: int, step: int, worker: int) -> list[str]:
    """Return the outcome of each of a worker's bits; a worker that ended is replaced at the next bit."""
    command = python("benchmarks.store_flips", "--worker", folder, engine, f"copy-{engine}-{worker}")
    process: subprocess.Popen[str] | None = None
    found = []
    for index in range(worker, flips, step):
        if process is None:
            process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{index}\n")
        process.stdin.flush()
        answered, _, _ = select.select([process.stdout], [], [], PATIENCE_SECONDS)
        line = process.stdout.readline() if answered else ""
        if line:
            found.append(json.loads(line))
            continue
        process.kill()
        _, said = process.communicate()
        found.append(f"crashes: exit status {process.returncode}: {said[-300:]}")
        process = None
    if process is not None:
        process.kill()
        process.communicate()
    return found


def measure(size: Size, folder: Path) -> dict[str, Any]:
    """Flip all bits and return the figures."""
    counted, told = Counter[str](), list[str]()
    figures: dict[str, Any] = {}
    for engine in ENGINES:
        make(folder / engine, engine)
        flips = draw(places(folder / engine, engine), size)
        (folder / f"{engine}.json").write_text(json.dumps(flips))
        figures |= {f"{engine}_{kind}_flips": n for kind, n in Counter(one[0] for one in flips).items()}
        console.print(f"{engine}: {len(flips):,} bits", highlight=False)

        with ThreadPoolExecutor(WORKERS) as threads:
            every = list(threads.map(partial(outcomes, folder, engine, len(flips), WORKERS), range(WORKERS)))
        for worker, all_said in enumerate(every):
            for one, said in zip(flips[worker::WORKERS], all_said, strict=True):
                key, _, more = said.partition(": ")
                counted[key] += 1
                if more:
                    told.append(f"{engine} {one}: {said}")
    for line in told[:40]:
        console.print(line, highlight=False, markup=False)
    return {"flips": counted.total()} | {key: counted[key] for key in ("right", "refused", *BAD)} | figures


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        with benchmark("store_flips", __doc__, "a few hundred bits", GOALS) as run:
            amount = run.size(FULL, QUICK, TINY)
            run.goals = (*GOALS, Goal(key="flips", goal=amount.flips))
            with tempfile.TemporaryDirectory(prefix="tiercache-flips-") as scratch:
                run.record |= measure(amount, Path(scratch))
