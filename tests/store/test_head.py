"""An LMDB store that lost its newest commit, or shows another, is refused; nothing is freed or written."""

import os
import shutil
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from tests.files import flipped
from tests.store.blobs import Content, check, drop_all, head_of, plain, publish, some_bytes
from tests.store.damage import assert_sentence
from tiercache.store import CorruptStoreError, LmdbEngine, StoreError
from tiercache.store.engines.lmdb_engine import BLOCKS
from tiercache.store.engines.lmdb_map import HEAD, LmdbFile, Slot

PAGE_BYTES, META_BYTES, SLOT_BYTES = 4096, 152, 52
COMMITS = 3
MODES = pytest.mark.parametrize("readonly", [True, False])


def made(path: Path, commits: int = COMMITS) -> list[Content]:
    """Create an engine with a few publishes and dropped early blobs; return its content."""
    path.mkdir(exist_ok=True)
    engine, contents = LmdbEngine(path, create=True), list[Content]()
    for number in range(commits):
        contents += publish(engine, number, [plain(f"states/0.{number}", some_bytes(9000, number))])
        if number == 1:
            drop_all(engine, contents[:2])
            contents = contents[2:]
    engine.close()
    return contents


def look(path: Path, contents: list[Content], *, readonly: bool = True, commits: int = COMMITS) -> None:
    """Assert that an engine has all its blobs, and is at its newest head."""
    engine = LmdbEngine(path, create=False, readonly=readonly)
    try:
        assert engine.newest() == head_of(commits - 1)
        assert engine.list().keys() == {one.blob.name for one in contents}
        check(engine, contents)
        if not readonly:
            drop_all(engine, [])
    finally:
        engine.close()


def bytes_of(path: Path) -> dict[str, bytes]:
    """Return the files of a store, except its lock."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file() and file.name != "writer.lock"}


def put_back(path: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (path / name).write_bytes(data)


def bit_of(at: int) -> tuple[int]:
    """Return a bit of a byte, different from those of adjacent bytes, so that checksums are tested on all bits."""
    return (3 * at % 8,)


def flip_bits(path: Path, name: str, places: Iterable[int], bits: Callable[[int], Iterable[int]] = bit_of) -> int:
    """Flip bits of a file one at a time, reading and writing: the right blobs or an error; refused files do not change.

    Returns the number of refusals.
    """
    contents, refused = made(path), 0
    whole = bytes_of(path)
    for at in places:
        for bit in bits(at):
            for readonly in (True, False):
                with flipped(path / name, at, 1 << bit):
                    try:
                        look(path, contents, readonly=readonly)
                    except StoreError as error:
                        assert_sentence(error)
                        refused += 1
                        with flipped(path / name, at, 1 << bit):
                            assert bytes_of(path) == whole, (at, bit)
                put_back(path, whole)
    look(path, contents)
    return refused


BITS = [bit_of, pytest.param(lambda _: range(8), marks=pytest.mark.long)]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("name", "num_bytes"), [("data.mdb", META_BYTES), (HEAD, SLOT_BYTES)])
def test_no_flipped_bit_of_the_meta_pages_or_of_head_shows_another_commit(
    tmp_path: Path, name: str, num_bytes: int, bits: Callable[[int], Iterable[int]]
) -> None:
    """In the valid root and in the previous one; for HEAD, one slot is enough."""
    places = [page * PAGE_BYTES + byte for page in (0, 1) for byte in range(num_bytes)]
    refused = flip_bits(tmp_path / "s.tc", name, places, bits)
    assert refused == 0 if name == HEAD else refused > 40


@pytest.mark.parametrize("bits", BITS)
def test_no_flipped_bit_of_a_tree_page_hides_a_blob(tmp_path: Path, bits: Callable[[int], Iterable[int]]) -> None:
    """Headers, offsets of nodes, keys, and every byte of an entry and of the head: each relevant one is refused."""
    path = tmp_path / "s.tc"
    made(path)
    file = LmdbFile(str(path / "data.mdb"))
    values = list(file.values())
    file.close()
    places = {at for v in values for at in range(v.offset - len(v.key) - 8, v.offset + v.size)}
    pages = {v.offset // PAGE_BYTES * PAGE_BYTES for v in values}
    places |= {page + byte for page in pages for byte in range(16 + 2 * len(values))}
    shutil.rmtree(path)
    assert flip_bits(path, "data.mdb", sorted(places), bits) > len(places)


def number_at(page: int) -> int:
    """Return the offset of the transaction number in a root."""
    return page * PAGE_BYTES + META_BYTES - 8


def lose_newest_root(path: Path) -> None:
    """Make LMDB fall back to the previous root, as if the newest were damaged."""
    whole = (path / "data.mdb").read_bytes()
    newest = max(range(2), key=lambda page: struct.unpack_from("<Q", whole, number_at(page)))
    (number,) = struct.unpack_from("<Q", whole, number_at(newest))
    with (path / "data.mdb").open("r+b") as file:
        file.seek(number_at(newest))
        file.write(struct.pack("<Q", number - 2))


@MODES
def test_a_store_whose_newest_root_is_gone_is_refused(tmp_path: Path, *, readonly: bool) -> None:
    """HEAD shows that the previous root is not the newest."""
    contents = made(tmp_path)
    whole = bytes_of(tmp_path)
    lose_newest_root(tmp_path)
    seen = bytes_of(tmp_path)
    with pytest.raises(CorruptStoreError, match="HEAD names") as caught:
        LmdbEngine(tmp_path, create=False, readonly=readonly)
    assert_sentence(caught.value)
    assert bytes_of(tmp_path) == seen
    put_back(tmp_path, whole)
    look(tmp_path, contents)


@MODES
@pytest.mark.parametrize("slot", [0, 1])
def test_no_older_commit_counts_once_something_was_dropped(tmp_path: Path, slot: int, *, readonly: bool) -> None:
    """Even if the newest root and a slot of HEAD are gone: data of the previous commit was overwritten."""
    path = tmp_path / "s"
    made(path)
    engine = LmdbEngine(path, create=False)
    for number in range(COMMITS, COMMITS + 3):
        publish(engine, number)
        drop_all(engine, [plain(f"commits/{number - 1}", some_bytes(1))])
    engine.close()
    lose_newest_root(path)
    with (path / HEAD).open("r+b") as file:
        os.pwrite(file.fileno(), bytes(SLOT_BYTES), slot * PAGE_BYTES)
    with pytest.raises(CorruptStoreError, match="HEAD names"):
        LmdbEngine(path, create=False, readonly=readonly)


@MODES
def test_an_older_copy_of_the_environment_is_refused(tmp_path: Path, *, readonly: bool) -> None:
    """Intact, but not the newest: its blobs may have been overwritten since."""
    path = tmp_path / "s"
    made(path)
    shutil.copyfile(path / "data.mdb", tmp_path / "older")
    engine = LmdbEngine(path, create=False)
    for number in range(2):
        publish(engine, COMMITS + number)
    engine.close()
    shutil.copyfile(tmp_path / "older", path / "data.mdb")
    with pytest.raises(CorruptStoreError, match="HEAD names"):
        LmdbEngine(path, create=False, readonly=readonly)


def test_a_transaction_that_was_killed_before_head_named_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers accept one publish ahead of HEAD; the next writer first updates HEAD."""
    contents = made(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    engine = LmdbEngine(tmp_path, create=False)
    with monkeypatch.context() as patched:
        patched.setattr(Slot, "write", fail)
        for _ in range(2):
            with pytest.raises(StoreError, match="HEAD cannot be written"):
                publish(engine, COMMITS)
            assert engine.newest() == head_of(COMMITS)  # nothing else happens before HEAD names it
            with pytest.raises(StoreError, match="HEAD cannot be written"):
                drop_all(engine, contents)
    check(engine, contents)
    engine.close()
    contents.append(plain(f"commits/{COMMITS}", np.frombuffer(f"commit {COMMITS}".encode() * 9, np.uint8)))
    assert Slot.read(tmp_path).number == COMMITS
    look(tmp_path, contents, commits=COMMITS + 1)
    look(tmp_path, contents, readonly=False, commits=COMMITS + 1)
    assert Slot.read(tmp_path) == Slot(COMMITS + 1, head_of(COMMITS).digest)


def test_a_publish_syncs_its_blobs_then_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each before the next step: HEAD names nothing that lost power could undo, and is durable on return."""
    engine, sync, synced = LmdbEngine(tmp_path, create=True), os.fdatasync, list[tuple[str, int]]()
    publish(engine, 0)
    names = {(tmp_path / name).stat().st_ino: name for name in (BLOCKS, HEAD)}

    def recorded(handle: int) -> None:
        sync(handle)
        synced.append((names.get(os.fstat(handle).st_ino, "another"), Slot.read(tmp_path).number))

    monkeypatch.setattr(os, "fdatasync", recorded)
    publish(engine, 1)
    assert synced == [(BLOCKS, 1), (HEAD, 2)]
    engine.close()


def test_another_head_one_ahead_of_head_is_refused(tmp_path: Path) -> None:
    """It must follow the one that HEAD names."""
    made(tmp_path)
    slot = Slot.read(tmp_path)
    Slot(slot.number - 1, head_of(77).digest).create(tmp_path)
    with pytest.raises(CorruptStoreError, match="HEAD names"):
        LmdbEngine(tmp_path, create=False)


@MODES
def test_a_store_whose_head_is_not_whole_is_refused(tmp_path: Path, *, readonly: bool) -> None:
    """Nothing else shows if a commit is missing."""
    made(tmp_path)
    (tmp_path / HEAD).write_bytes(bytes(2 * PAGE_BYTES))
    with pytest.raises(CorruptStoreError, match="no part of it is intact"):
        LmdbEngine(tmp_path, create=False, readonly=readonly)


@pytest.mark.parametrize("call", ["drop", "publish"])
def test_a_writer_that_finds_another_head_writes_nothing_more(tmp_path: Path, call: str) -> None:
    """Another writer has written, or an older copy was restored."""
    contents = made(tmp_path)
    engine = LmdbEngine(tmp_path, create=False)
    Slot(77, head_of(77).digest).create(tmp_path)
    seen = bytes_of(tmp_path)
    with pytest.raises(StoreError, match=r"names publish 77, but this process wrote 3: .*open it again"):
        drop_all(engine, contents) if call == "drop" else engine.publish(head_of(COMMITS - 1), engine.newest())
    assert bytes_of(tmp_path) == seen
    assert Slot.read(tmp_path).number == 77
    engine.close()


def test_the_bytes_of_head_are_those_of_the_format(tmp_path: Path) -> None:
    """A new file has one slot, and a drop makes both the same."""
    slot = Slot(5, head_of(5).digest)
    slot.create(tmp_path)
    data = (tmp_path / HEAD).read_bytes()
    expected = b"tc head\n" + (5).to_bytes(8, "little") + bytes.fromhex(head_of(5).digest)
    expected += google_crc32c.value(expected).to_bytes(4, "little")
    assert data == bytes(PAGE_BYTES) + expected + bytes(PAGE_BYTES - SLOT_BYTES)
    slot.write(tmp_path, other=True)
    assert (tmp_path / HEAD).read_bytes() == (expected + bytes(PAGE_BYTES - SLOT_BYTES)) * 2
