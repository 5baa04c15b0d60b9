"""Single bits of a store's files flipped, one at a time: python -m benchmarks.store_flips [--quick] [--json FILE].

Two tables of a few hundred rows, trained for five passes in a cycle of three, by either engine. Of a copy of the store
one bit is flipped; then the store is opened for reading and every row, the dense state and the cursor are compared with
what was trained; then it is opened for writing, two more passes are dumped and committed, and all is compared after
each. In the full size that is done for each bit of LMDB's meta pages and of HEAD, for a bit of each used byte of its
tree and of its free list, and for bits drawn from records, blocks, Zarr chunks, Zarr metadata and manifests.

flips = bits; ENGINE_KIND_flips = those of one kind of bytes; each is one of these:
right = both times everything was as it should be: the bit decides nothing, or is kept twice
refused = one sentence of a StoreError, reading or writing, before anything wrong was given. A store that was refused
when it was opened for writing is whole again when the bit is put back
silent = another row, state or cursor, or a store that a refusal changed
tracebacks = another exception than a StoreError
crashes = a process that a signal ended, or that gave no answer within a minute
"""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.flip_places import TRAINED, Places, Training, places
from benchmarks.machine import Goal, called, console, options_of, table_of
from tiercache.store import Store, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ENGINES = ("lmdb", "zarr")
BAD = ("silent", "tracebacks", "crashes")
GOALS = tuple(Goal(key=key, goal=0, below=True) for key in BAD)
WORKERS, PATIENCE_SECONDS = 4, 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How many bits are flipped."""

    drawn: int
    """Bits of each kind of which not all are flipped."""
    bits: dict[str, int]
    """Bits of each byte, of kinds all of whose bytes are flipped."""
    flips: int


FULL = Size(drawn=2700, bits={"meta": 8, "head": 8, "tree": 1, "free_list": 1}, flips=20_000)
QUICK = Size(drawn=84, bits={}, flips=1000)
TINY = Size(drawn=3, bits={}, flips=30)

Flip = tuple[str, str, int, int]
"""The kind of a byte, its file, its place there, and one of its bits."""


def draw(found: Places, size: Size) -> list[Flip]:
    """Choose bits, always the same ones."""
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
    """Flip a bit and say what became of it: a key of the figures, and what is to be told behind a colon."""
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


def work(folder: Path, engine: str, copy: str, first: int, step: int) -> None:
    """Flip every so-manieth bit of a list from one on, and print what became of each."""
    training, flips = Training(), json.loads((folder / f"{engine}.json").read_text())
    for index in range(first, len(flips), step):
        said = outcome(training, folder / engine, folder / copy, flips[index])
        print(json.dumps([index, said]), flush=True)


# -- the process that counts -----------------------------------------------------------------------------


def outcomes(folder: Path, engine: str, flips: int, worker: int, step: int) -> Iterator[str]:
    """Yield what became of each of a worker's bits; one that ended is followed by another one at the next bit."""
    done = worker
    while done < flips:
        command = [sys.executable, "-m", "benchmarks.store_flips", "--worker", str(folder), engine]
        command += [f"copy-{engine}-{worker}", str(done), str(step)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines: queue.Queue[str] = queue.Queue()

        def read(process: subprocess.Popen[str] = process, lines: queue.Queue[str] = lines) -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        while done < flips:
            try:
                line = lines.get(timeout=PATIENCE_SECONDS)
            except queue.Empty:
                line = ""
                process.kill()
            if not line:
                process.kill()
                _, said = process.communicate()
                yield f"crashes: exit status {process.returncode}: {said[-300:]}"
                done += step
                break
            index, said = json.loads(line)
            assert index == done, f"bit {index} was answered and {done} was asked"
            yield said
            done += step
        process.kill()
        process.communicate()


def measure(size: Size, folder: Path) -> dict[str, Any]:
    """Flip all bits and return the figures."""
    counted, told = Counter[str](), list[str]()
    figures: dict[str, Any] = {}
    training, lock = Training(), threading.Lock()
    for engine in ENGINES:
        training.make(folder / engine, engine)
        flips = draw(places(folder / engine, engine), size)
        (folder / f"{engine}.json").write_text(json.dumps(flips))
        figures |= {f"{engine}_{kind}_flips": n for kind, n in Counter(one[0] for one in flips).items()}
        console.print(f"{engine}: {len(flips):,} bits", highlight=False)

        def count(worker: int, engine: str = engine, flips: list[Flip] = flips) -> None:
            for i, said in enumerate(outcomes(folder, engine, len(flips), worker, WORKERS)):
                key, _, more = said.partition(": ")
                with lock:
                    counted[key] += 1
                    if more:
                        told.append(f"{engine} {flips[worker + i * WORKERS]}: {said}")

        threads = [threading.Thread(target=count, args=(worker,)) for worker in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for line in told[:40]:
        console.print(line, highlight=False, markup=False)
    return {"flips": counted.total()} | {key: counted[key] for key in ("right", "refused", *BAD)} | figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it from the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--worker"]:
        work(Path(given[1]), given[2], given[3], int(given[4]), int(given[5]))
        return
    with called(
        options_of("store_flips", __doc__, "a thousand bits", tiny="a few bits of each kind"), arguments
    ) as run:
        size = run.size(FULL, QUICK, TINY)
        with tempfile.TemporaryDirectory(prefix="tiercache-flips-") as scratch:
            found = measure(size, Path(scratch))
        run.record |= found
    table = table_of("What became of a flipped bit", "", "bits")
    for key, value in found.items():
        table.add_row(key, f"{value:,}")
    console.print(table)
    run.report((*GOALS, Goal(key="flips", goal=size.flips)))


if __name__ == "__main__":
    main()
