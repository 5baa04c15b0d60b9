"""What is special about LMDB: places in the file, readers beside the writer, growth."""

from __future__ import annotations

import contextlib
import os
import threading
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np
import pytest

from tests.apart import command, ran
from tests.store.big import dump, load, publish
from tiercache.kernels.cpu.file_io import has_reads, read_checked
from tiercache.store import LmdbEngine, Store, StoreError, verify
from tiercache.store.lmdb_file import LmdbFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tiercache.store.engine import Block

pytestmark = pytest.mark.disk


def test_the_file_tells_where_lmdb_keeps_each_value(tmp_path: Path) -> None:
    """For values of all sizes, in trees of several levels: the same keys, and the same bytes at their places."""
    generator = np.random.default_rng(0)
    values = {f"{i:05d}".encode(): generator.bytes(int(generator.integers(1, 9000))) for i in range(1500)}
    with lmdb.open(str(tmp_path), map_size=1 << 26, sync=False) as environment:
        for _ in range(3):
            with environment.begin(write=True) as txn:
                for key, value in values.items():
                    txn.put(key, value)
            for key in list(values)[::7]:
                with environment.begin(write=True) as txn:
                    txn.delete(key)
                del values[key]
    file = LmdbFile(str(tmp_path / "data.mdb"))
    meta = file.metas()[0]
    file.check(meta)
    found = {value.key: os.pread(file.handle, value.size, value.offset) for value in file.values(meta)}
    assert found == values
    assert list(found) == sorted(values)
    file.close()


READ_ALL = """
import re, sys
import numpy as np
from tiercache.store import Store

store = Store.open(sys.argv[1], mode="r")
stream = store.segments[0].streams[0]
out = np.ones(int(stream.piece_offset_P[-1]), np.uint8)
store.read(store.segments[0], 0, 0, stream.num_pieces, out)
maps = open("/proc/self/smaps").read().split("data.mdb")[1:]
print(sum(int(re.search(r"Rss: +([0-9]+) kB", part)[1]) for part in maps))
"""


def test_no_read_touches_the_map(big: Store) -> None:
    """Opening a store and loading a segment maps in pages of the tree, and none of 16 MB of rows."""
    for pass_index in range(4):
        dump(big, pass_index, {pass_index + 4: 2000})
    publish(big, 4)
    big.close()
    assert int(ran(READ_ALL, big.path).stdout) < 1000


@pytest.mark.parametrize("at_once", [False, True])
def test_a_reader_beside_the_writer_sees_whole_blocks(big: Store, *, at_once: bool) -> None:
    """Ranges read on one thread while another dumps, commits and frees are always what was written."""
    big.read_with(read_checked if at_once and has_reads() else None)
    stored = {v: dump(big, v, {40 + v: 64, v + 1: 64}) for v in range(3)}
    publish(big, 3)
    kept = [segment for segment in big.segments if segment.pass_index < 3]
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                for segment in kept:
                    stream = segment.streams[0]
                    low, high = stream.pieces_of(len(stream.ranges) - 1)
                    out = np.empty(int(stream.piece_offset_P[high] - stream.piece_offset_P[low]), np.uint8)
                    big.read(segment, 0, low, high, out)
                    assert out.tobytes() == stored[segment.pass_index][40 + segment.pass_index]
        except BaseException as error:  # shown in the main thread
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for pass_index in range(3, 30):
        dump(big, pass_index, {pass_index + 1: 64, pass_index + 3: 200})
        publish(big, pass_index + 1)
    done.set()
    reader.join()
    assert not failures, failures


def test_freed_places_beyond_the_end_of_the_file_are_no_damage(tmp_path: Path) -> None:
    """What a failed write gives back to the file system may still be noted as freed: the store opens all the same."""
    engine = LmdbEngine(tmp_path, create=True)
    engine.write([(b"a", np.ones(5000, np.uint8), None), (b"b", np.zeros(900_000, np.uint8), None)])
    engine.commit({}, [])
    engine.commit({}, [b"b"])

    def blocks() -> Iterator[Block]:
        yield b"c", np.zeros(10_000, np.uint8), None
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        engine.write(blocks())
    assert (tmp_path / "blocks.bin").stat().st_size < 100_000
    engine.close()
    for readonly in (True, False, False):
        engine = LmdbEngine(tmp_path, create=False, readonly=readonly)
        out = np.empty(5000, np.uint8)
        engine.read(b"a", 0, out)
        assert out.all()
        if not readonly:
            engine.write([(b"d", np.full(2_000_000, 3, np.uint8), None)])
            engine.commit({}, [])
            assert engine.contents().blocks == {b"a": 5000, b"d": 2_000_000}
        engine.close()


READERS = """
import sys
from pathlib import Path
import lmdb
from tiercache.store import LmdbEngine
engine, held = LmdbEngine(Path(sys.argv[1]), create=False, readonly=True), []
try:
    while len(held) < int(sys.argv[2]):
        held.append(engine._env.begin())
except lmdb.ReadersFullError:
    pass
print(len(held), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def readers(path: Path, count: int) -> Iterator[int]:
    """Let another process begin so many reads, each as a reader of its own, or as many as it can; then kill it."""
    with Popen(command(READERS, path, count), stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def test_a_store_has_room_for_thousands_of_readers(tmp_path: Path) -> None:
    """Those that were killed count no longer; where all places are taken, reader and writer are told so."""
    LmdbEngine(tmp_path, create=True).close()
    with readers(tmp_path, 1000) as kept:
        assert kept == 1000
        with readers(tmp_path, 2000) as more:
            assert more == 2000
            for readonly in (True, False):
                LmdbEngine(tmp_path, create=False, readonly=readonly).close()
        with readers(tmp_path, 3000) as again:
            assert again == 3000, "the places of those that were killed are free again"
            with readers(tmp_path, 4096):
                words = "is open for reading too often, 4,096 times at most: close some"
                for readonly in (True, False):
                    with pytest.raises(StoreError, match=words):
                        LmdbEngine(tmp_path, create=False, readonly=readonly)
    engine = LmdbEngine(tmp_path, create=False)
    engine.commit({"r": b"1"}, [])
    engine.close()


@pytest.mark.parametrize("done", [True, False])
def test_an_interrupt_at_the_end_of_a_commit_leaves_what_is_durable(
    big: Store, monkeypatch: pytest.MonkeyPatch, *, done: bool
) -> None:
    """Whether it came after the transaction or before: the store stands where its file does, and goes on from there."""
    stored = [dump(big, 0, {1: 50, 2: 50})]
    publish(big, 1)
    stored.append(dump(big, 1, {2: 50, 3: 50}))

    def interrupted(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    raised = []

    class Interrupting(LmdbEngine):
        """Raises when its transaction is over."""

        def commit(self, records: Any, dead: Any, *, shrink: bool = False) -> None:
            super().commit(records, dead, shrink=shrink)
            raised.append(1)
            raise KeyboardInterrupt

    if done:
        big._engine.__class__ = Interrupting
    else:
        monkeypatch.setattr(LmdbEngine, "_put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publish(big, 2)
    big._engine.__class__ = LmdbEngine
    monkeypatch.undo()
    assert bool(raised) == done
    big.forget()
    assert big.commit is not None
    assert big.commit.cursor.pass_index == (2 if done else 1)
    assert load(big, 2) == ({0: stored[0][2], 1: stored[1][2]} if done else {0: stored[0][2]})
    pass_index = big.commit.cursor.pass_index
    dump(big, pass_index, {pass_index + 1: 80})
    publish(big, pass_index + 1)
    big.close()
    assert big.path is not None
    assert verify(big.path)["problems"] == []
