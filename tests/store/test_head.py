"""An LMDB store that lost its newest commit, or shows another, is refused; nothing of it is freed or written."""

import hashlib
import shutil
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.files import flipped
from tests.store.big import values
from tests.store.conftest import small_tables
from tests.store.damage import assert_sentence
from tests.store.world import World
from tiercache.store import CorruptStoreError, Store, StoreError, verify
from tiercache.store.engines.lmdb_engine import LmdbEngine
from tiercache.store.engines.lmdb_records import HEAD, Head
from tiercache.store.records import RecordManifest

Rows = dict[str, tuple[NDArray[np.int64], dict[str, NDArray[np.float32]]]]

PAGE_BYTES, META_BYTES, SLOT_BYTES = 4096, 152, 52
COMMITS = 3


def made(path: Path) -> Rows:
    """Make a store of two tables with three commits, all kept; return its rows, by table."""
    world = World(small_tables()[1:3], num_passes=3)
    with Store.open(path, tables=world.tables, retention=COMMITS) as store:
        for _ in range(COMMITS):
            world.run(store, 1)
        return {
            table.name: (
                every := np.concatenate([keys for keys, _ in store.scan(table.name)]),
                store.lookup(table.name, every),
            )
            for table in store.tables
        }


def check(path: Path, rows: Rows, mode: str = "r") -> None:
    """Assert that the store has all its commits, and every row as it was."""
    with Store.open(path, mode=mode) as store:
        assert [commit.id for commit in store.commits] == list(range(COMMITS))
        for table, (keys, fields) in rows.items():
            found = store.lookup(table, keys)
            assert all(np.array_equal(found[name], field) for name, field in fields.items()), table


def bytes_of(path: Path) -> dict[str, bytes]:
    """Return the files of a store, but that of its lock."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file() and file.name != "writer.lock"}


def put_back(path: Path, files: dict[str, bytes]) -> None:
    """Write files as they were."""
    for name, data in files.items():
        (path / name).write_bytes(data)


def bit_of(at: int) -> tuple[int]:
    """Return a bit of a byte, another than those of the bytes beside it: a checksum knows no bit from another."""
    return (3 * at % 8,)


def flip_bits(path: Path, name: str, places: Iterable[int], bits: Callable[[int], Iterable[int]] = bit_of) -> int:
    """Flip bits of a file one at a time, reading and writing: the right rows or a sentence; what is refused stays.

    Returns how often the store was refused.
    """
    rows, refused = made(path), 0
    whole = bytes_of(path)
    for at in places:
        for bit in bits(at):
            for mode in ("r", "a"):
                with flipped(path / name, at, 1 << bit):
                    try:
                        check(path, rows, mode)
                    except StoreError as error:
                        assert_sentence(error)
                        refused += 1
                        with flipped(path / name, at, 1 << bit):
                            assert bytes_of(path) == whole, (at, bit)
                put_back(path, whole)
    check(path, rows)
    return refused


BITS = [bit_of, pytest.param(lambda _: range(8), marks=pytest.mark.long)]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("name", "num_bytes"), [("data.mdb", META_BYTES), (HEAD, SLOT_BYTES)])
def test_no_flipped_bit_of_the_meta_pages_or_of_head_shows_another_commit(
    tmp_path: Path, name: str, num_bytes: int, bits: Callable[[int], Iterable[int]]
) -> None:
    """Of the root that counts and of the one before; of HEAD, one slot is enough: LMDB may show one commit more."""
    places = [page * PAGE_BYTES + byte for page in (0, 1) for byte in range(num_bytes)]
    refused = flip_bits(tmp_path / "s.tc", name, places, bits)
    assert refused == 0 if name == HEAD else refused > 40


@pytest.mark.parametrize("bits", BITS)
def test_no_flipped_bit_of_a_tree_page_hides_a_record(tmp_path: Path, bits: Callable[[int], Iterable[int]]) -> None:
    """Headers, places of nodes, keys, and some bytes of every value: each that counts is refused."""
    path = tmp_path / "s.tc"
    made(path)
    places = {at for v in values(path) for at in range(v.offset - len(v.key) - 8, v.offset + v.size, 1 + v.size // 40)}
    pages = {v.offset // PAGE_BYTES * PAGE_BYTES for v in values(path)}
    places |= {page + byte for page in pages for byte in range(16 + 2 * len(values(path)))}
    shutil.rmtree(path)
    assert flip_bits(path, "data.mdb", sorted(places), bits) > len(places)


@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_store_whose_newest_root_is_gone_is_refused(tmp_path: Path, mode: str) -> None:
    """LMDB falls back to the root before where the newest is damaged: HEAD tells that it is not the newest."""
    path = tmp_path / "s.tc"
    rows = made(path)
    whole = bytes_of(path)

    def number_at(page: int) -> int:
        return page * PAGE_BYTES + META_BYTES - 8

    newest = max(range(2), key=lambda page: struct.unpack_from("<Q", whole["data.mdb"], number_at(page)))
    (number,) = struct.unpack_from("<Q", whole["data.mdb"], number_at(newest))
    with (path / "data.mdb").open("r+b") as file:
        file.seek(number_at(newest))
        file.write(struct.pack("<Q", number - 2))
    seen = bytes_of(path)
    with pytest.raises(CorruptStoreError, match="HEAD names") as caught:
        Store.open(path, mode=mode)
    assert_sentence(caught.value)
    assert verify(path)["problems"]
    assert bytes_of(path) == seen
    put_back(path, whole)
    check(path, rows)


@pytest.mark.parametrize("mode", ["r", "a"])
def test_an_older_copy_of_the_environment_is_refused(tmp_path: Path, mode: str) -> None:
    """Whole in itself, but not the newest: its blocks may have been written over since."""
    path = tmp_path / "s.tc"
    world = World(small_tables()[1:3], num_passes=3)
    with Store.open(path, tables=world.tables) as store:
        world.run(store, 2)
        shutil.copyfile(path / "data.mdb", tmp_path / "older")
        world.run(store, 2)
    shutil.copyfile(tmp_path / "older", path / "data.mdb")
    with pytest.raises(CorruptStoreError, match="HEAD names"):
        Store.open(path, mode=mode)


def test_a_transaction_that_was_killed_before_head_named_it_stands(tmp_path: Path) -> None:
    """Readers accept one commit ahead of HEAD; the next writer has HEAD name it before anything else."""
    path = tmp_path / "s.tc"
    rows = made(path)
    before = (path / HEAD).read_bytes()
    newest = Head.read(path).number
    slot = newest % 2 * PAGE_BYTES
    (path / HEAD).write_bytes(before[:slot] + bytes(PAGE_BYTES) + before[slot + PAGE_BYTES :])
    check(path, rows)
    assert Head.read(path).number == newest - 1
    check(path, rows, "a")
    assert (path / HEAD).read_bytes() == before


def test_a_commit_of_other_records_one_ahead_of_head_is_refused(tmp_path: Path) -> None:
    """It must come of the one that HEAD names."""
    path = tmp_path / "s.tc"
    made(path)
    head = Head.read(path)
    Head(head.number - 1, hashlib.sha256(b"another").hexdigest()).create(path)
    with pytest.raises(CorruptStoreError, match="HEAD names"):
        Store.open(path)


def test_a_commit_whose_head_cannot_be_written_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises, and is there; no transaction follows it before HEAD has caught up."""

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    engine = LmdbEngine(tmp_path, create=True)
    engine.commit({"r": b"1"})
    with monkeypatch.context() as patched:
        patched.setattr(Head, "write", fail)
        for _ in range(2):
            with pytest.raises(StoreError, match="HEAD cannot be written"):
                engine.commit({"r": b"2"})
            assert engine.records() == {"r": b"2"}
    assert Head.read(tmp_path).number == 1
    engine.commit({"r": b"3"})
    engine.close()
    assert Head.read(tmp_path).number == 3
    reader = LmdbEngine(tmp_path, create=False, readonly=True)
    assert reader.records() == {"r": b"3"}
    reader.close()


def test_a_disk_that_is_full_when_head_is_written_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit raises and the store stands at it, in this process and after."""
    path = tmp_path / "s.tc"
    world = World(small_tables(), num_passes=3)
    with Store.open(path, tables=world.tables) as store:
        world.run(store, 2)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(Head, "write", full)
            with pytest.raises(StoreError, match="commit 2 of the store"):
                world.run(store, 1)
        assert store.commit.id == 2
        world.check(store, after=2)
    with Store.open(path) as store:
        world.check(store, after=2)
        world.run(store, 1)


@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_store_without_head_is_refused(tmp_path: Path, mode: str) -> None:
    """Missing, or no slot whole: nothing else tells whether a commit is missing."""
    path = tmp_path / "s.tc"
    made(path)
    (path / HEAD).write_bytes(bytes(2 * PAGE_BYTES))
    with pytest.raises(CorruptStoreError, match="no part of it is whole"):
        Store.open(path, mode=mode)
    (path / HEAD).unlink()
    with pytest.raises(CorruptStoreError, match=r"HEAD is missing: restore"):
        Store.open(path, mode=mode)
    (path / "store.json").unlink()
    with pytest.raises(CorruptStoreError, match=r"has blocks and no HEAD"):
        Store.open(path, tables=small_tables())


def test_the_bytes_of_head_are_those_of_the_format(tmp_path: Path) -> None:
    """docs/format/lmdb.md has this vector."""
    Head(5, hashlib.sha256(b"manifest 5").hexdigest()).create(tmp_path)
    data = (tmp_path / HEAD).read_bytes()
    slot = b"tc head\n" + (5).to_bytes(8, "little") + hashlib.sha256(b"manifest 5").digest()
    assert len(data) == 8192
    assert data[4096 : 4096 + 52] == slot + google_crc32c.value(slot).to_bytes(4, "little")
    assert not any(data[:4096] + data[4096 + 52 :])
    assert data[4096 + 48 : 4096 + 52].hex() == "69ee5c0f"


def test_a_manifest_names_the_one_before_by_its_digest() -> None:
    """And the records that are left."""
    first = RecordManifest(number=0).after({"a": b"1", "b": b"2"})
    second = first.after({"b": None, "c": b"3"})
    assert (first.number, first.before, second.number) == (1, "", 2)
    assert second.before == hashlib.sha256(first.to_bytes()).hexdigest()
    assert [*second.links] == ["a", "c"]
