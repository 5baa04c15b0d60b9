"""What is special about LMDB: places in the file, interrupts, files that are damaged, readers beside the writer."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from tests.apart import ran
from tests.store.big import dump, load, publish
from tests.store.damage import assert_sentence
from tiercache.store import LmdbEngine, Store, verify
from tiercache.store.engines import lmdb_records
from tiercache.store.engines.engine import Block
from tiercache.store.engines.lmdb_records import LmdbFile
from tiercache.store.layout import STATE
from tiercache.store.records import RecordManifest
from tiercache.store.store_errors import CorruptStoreError, StoreError, StoreFullError


@pytest.mark.disk
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
    found = {value.key: os.pread(file.handle, value.size, value.offset) for value in file.values(meta)}
    assert found == values
    assert list(found) == sorted(values)
    file.close()


READ_ALL = """
import re, sys
import numpy as np
from tiercache.store import Store

store = Store.open(sys.argv[1], mode="r")
layout = store.segments[0].layouts[0]
out = np.ones(layout.byte_of_page(layout.num_pages), np.uint8)
store.read(store.segments[0], 0, 0, layout.num_pages, out)
print("data.mdb" in open("/proc/self/maps").read())
"""


@pytest.mark.disk
def test_no_reader_has_a_map(big: Store) -> None:
    """So a file that is cut short beside it is no signal."""
    for pass_index in range(4):
        dump(big, pass_index, {pass_index + 4: 200})
    publish(big, 4)
    big.close()
    assert ran(READ_ALL, big.path).stdout == "False\n"


@pytest.mark.disk
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

        def commit(self, records: Any) -> None:
            super().commit(records)
            raised.append(1)
            raise KeyboardInterrupt

    if done:
        big._opened.engine.__class__ = Interrupting
    else:
        monkeypatch.setattr(RecordManifest, "to_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publish(big, 2)
    big._opened.engine.__class__ = LmdbEngine
    monkeypatch.undo()
    assert bool(raised) == done
    big.discard_uncommitted()
    assert big.commit.cursor.pass_index == (2 if done else 1)
    assert load(big, 2) == ({0: stored[0][2], 1: stored[1][2]} if done else {0: stored[0][2]})
    pass_index = big.commit.cursor.pass_index
    dump(big, pass_index, {pass_index + 1: 80})
    publish(big, pass_index + 1)
    big.close()
    assert verify(big.path)["problems"] == []


# -- files that are damaged, cut short or something else -----------------------------------------------------

PAGE_BYTES = 4096
FILES = ("HEAD", "data.mdb", "blocks.bin")
STEPS, LARGE = 6, 9000


def made(path: Path, *, size: int = 200) -> dict[str, bytes]:
    """Make an engine with a few commits of records of ``size`` bytes and a large one; return its records."""
    engine = LmdbEngine(path, create=True)
    engine.write([(Block(STATE, 0, 0, 0, 5000), np.ones(5000, np.uint8))])
    for step in range(STEPS):
        engine.commit({f"r{i}": bytes([step + i]) * size for i in range(4)} | {"large": bytes([step]) * LARGE})
    found = engine.records()
    engine.close()
    return found


def read(path: Path) -> dict[str, bytes] | None:
    """Return the records; None where they are refused in a sentence."""
    try:
        engine = LmdbEngine(path, create=False, readonly=True)
    except CorruptStoreError as error:
        assert_sentence(error)
        return None
    try:
        return engine.records()
    finally:
        engine.close()


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused(tmp_path: Path, name: str, make: Callable[[Path], None], *, readonly: bool) -> None:
    """A FIFO that nobody writes to would be waited for without end."""
    made(tmp_path)
    (tmp_path / name).unlink()
    make(tmp_path / name)
    with pytest.raises(CorruptStoreError, match=rf"{name} cannot be read .*: restore the store from a copy") as caught:
        LmdbEngine(tmp_path, create=False, readonly=readonly)
    assert_sentence(caught.value)


@pytest.mark.parametrize("readonly", [True, False])
def test_a_file_that_this_user_may_not_open_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, readonly: bool
) -> None:
    """The advice is to give the right to read."""
    made(tmp_path)

    def denied(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(lmdb_records, "open_file", denied)
    with pytest.raises(StoreError, match=r"HEAD cannot be opened .*: give this user the right") as caught:
        LmdbEngine(tmp_path, create=False, readonly=readonly)
    assert not isinstance(caught.value, CorruptStoreError)
    assert_sentence(caught.value)


# -- other bytes -----------------------------------------------------------------------------------------


def test_records_cut_short_at_any_length_are_refused_or_whole(tmp_path: Path) -> None:
    """They are whole where only pages that are free were cut off."""
    records = made(tmp_path)
    whole = (tmp_path / "data.mdb").read_bytes()
    found = []
    for size in range(0, len(whole), 509):
        (tmp_path / "data.mdb").write_bytes(whole[:size])
        found.append(read(tmp_path))
        assert found[-1] in (None, records), size
    assert found[0] is None
    assert found.count(None) > len(found) // 2


@pytest.mark.parametrize("name", ["data.mdb", "HEAD"])
def test_no_flipped_bit_shows_other_records(tmp_path: Path, name: str) -> None:
    """Any bit of headers, nodes and keys; of values, which one digest guards, some."""
    records = made(tmp_path)
    path = tmp_path / name
    whole, skipped = path.read_bytes(), set[int]()
    if name == "data.mdb":
        file = LmdbFile(str(path))
        for value in file.values(file.metas()[0]):
            skipped |= set(range(value.offset, value.offset + value.size)) - {
                value.offset,
                value.offset + value.size - 1,
            }
        file.close()
    used = [at for at in range(len(whole)) if at not in skipped and (whole[at] or at % PAGE_BYTES < 160)]
    refused = 0
    with path.open("r+b", buffering=0) as file_:
        for at in used:
            for bit in range(8) if at % PAGE_BYTES < 160 else (at % 8,):
                os.pwrite(file_.fileno(), bytes([whole[at] ^ 1 << bit]), at)
                found = read(tmp_path)
                assert found in (None, records), (at, bit)
                refused += found is None
            os.pwrite(file_.fileno(), whole[at : at + 1], at)
    assert refused > 40 if name == "data.mdb" else refused == 0
    assert read(tmp_path) == records


def test_needed_blocks_beyond_the_end_are_refused_and_the_file_stays(tmp_path: Path) -> None:
    """It does not grow to where a place that lies points, nor is a file that was cut short made whole with zeros."""
    made(tmp_path)
    size = (tmp_path / "blocks.bin").stat().st_size
    engine = LmdbEngine(tmp_path, create=False)
    for place, words in ((size, "cut short"), (1 << 40, "cut short"), (-PAGE_BYTES, "no page"), (8, "no page")):
        block = Block(STATE, 0, 0, 0, 5000, place=place)
        with pytest.raises(CorruptStoreError, match=f"a block of .*{words}.*: restore the store from a copy"):
            engine.retain([block])
        assert engine.problem(block)
        assert (tmp_path / "blocks.bin").stat().st_size == size
    with pytest.raises(CorruptStoreError, match="overlap"):
        engine.retain([Block(STATE, i, 0, 0, 10, place=0) for i in range(2)])
    engine.close()


# -- a disk without room for a copy of the records -------------------------------------------------------


def test_a_writer_whose_records_have_no_room_opens_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first commit says that the disk is full; once there is room a damaged list of free pages is gone."""
    records = made(tmp_path, size=3000)
    path = tmp_path / "data.mdb"
    whole = path.read_bytes()
    usual = LmdbEngine._environment

    def environment(self: LmdbEngine, folder: Path) -> Any:
        if folder.name == "fresh":
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(self, folder)

    with monkeypatch.context() as patched:
        patched.setattr(LmdbEngine, "_environment", environment)
        engine = LmdbEngine(tmp_path, create=False)
        engine.retain([])
        assert engine.records() == records
        with pytest.raises(StoreFullError):
            engine.commit({"more": b"1"})
        engine.close()
    assert path.read_bytes() == whole
    engine = LmdbEngine(tmp_path, create=False)
    for step in range(STEPS):
        engine.commit({"more": bytes([step]) * LARGE})
    engine.close()
    assert read(tmp_path) == records | {"more": bytes([STEPS - 1]) * LARGE}


# -- a reader beside the writer --------------------------------------------------------------------------

COMMIT_ON = """
import sys
from pathlib import Path
from tiercache.store import LmdbEngine

for opened in range(4):
    engine = LmdbEngine(Path(sys.argv[1]), create=False)
    for i in range(opened * 100, opened * 100 + 100):
        engine.commit({f"r{j}": f"{i} ".encode() * (900 + i % 7 * 300) for j in range(4)})
    engine.close()
"""


def test_a_reader_in_another_process_sees_whole_commits_in_order(tmp_path: Path) -> None:
    """Pages are used again while it walks, and the file is put in place anew: it looks again."""
    made(tmp_path)
    writer = subprocess.Popen([sys.executable, "-c", COMMIT_ON, str(tmp_path)])
    last, running = -1, True
    while running:
        running = writer.poll() is None
        reader = LmdbEngine(tmp_path, create=False, readonly=True)
        for _ in range(20):
            records = reader.records()
            values = {records[f"r{j}"] for j in range(4)}
            if all(len(value) >= 1800 for value in values):
                (value,) = values
                number = int(value.split()[0])
                assert value == f"{number} ".encode() * (900 + number % 7 * 300)
                assert number >= last
                last = number
        reader.close()
    assert writer.returncode == 0
    assert last == 399
