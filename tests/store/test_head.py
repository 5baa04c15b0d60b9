"""An LMDB store that lost its newest commit, or shows another, is refused; nothing is freed or written."""

import os
import shutil
import struct
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.files import flipped
from tests.store.blobs import Content, check, commit_of, drop_all, head_of, plain, publish, some_bytes
from tests.store.damage import assert_sentence
from tiercache.store import CorruptStoreError, LmdbEngine, StoreError
from tiercache.store.engines.lmdb_engine import BLOCKS
from tiercache.store.engines.lmdb_map import HEAD, LmdbFile, Slot

PAGE_BYTES, META_BYTES, SLOT_BYTES = 4096, 152, 52
COMMITS = 3


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
    with closing(LmdbEngine(path, create=False, readonly=readonly)) as engine:
        assert engine.newest() == head_of(commits - 1)
        assert engine.list().keys() == {one.blob.name for one in contents}
        check(engine, contents)
        if not readonly:
            drop_all(engine, [])


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
    """Flip bits of a file one at a time, reading and writing: the right blobs, or an error and no change.

    Returns the number of errors.
    """
    contents, refused = made(path), 0
    whole = bytes_of(path)
    flips = [(at, bit, readonly) for at in places for bit in bits(at) for readonly in (True, False)]
    for at, bit, readonly in flips:
        with flipped(path / name, at, 1 << bit):
            seen = bytes_of(path)
            try:
                look(path, contents, readonly=readonly)
            except StoreError as error:
                assert_sentence(error)
                refused += 1
                assert bytes_of(path) == seen, (at, bit)
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
    with closing(LmdbFile(str(path / "data.mdb"))) as file:
        values = list(file.values())
    places = {at for v in values for at in range(v.offset - len(v.key) - 8, v.offset + v.size)}
    pages = {v.offset // PAGE_BYTES * PAGE_BYTES for v in values}
    places |= {page + byte for page in pages for byte in range(16 + 2 * len(values))}
    shutil.rmtree(path)
    assert flip_bits(path, "data.mdb", sorted(places), bits) > len(places)


def lose_newest_root(path: Path) -> None:
    """Make LMDB fall back to the previous root, as if the newest were damaged."""
    whole = bytearray((path / "data.mdb").read_bytes())
    places = [page * PAGE_BYTES + META_BYTES - 8 for page in (0, 1)]  # of the transaction numbers
    number, at = max((*struct.unpack_from("<Q", whole, at), at) for at in places)
    struct.pack_into("<Q", whole, at, number - 2)
    (path / "data.mdb").write_bytes(whole)


def go_on(path: Path, *, dropping: bool = False) -> None:
    engine = LmdbEngine(path, create=False)
    for number in range(COMMITS, COMMITS + 3):
        publish(engine, number)
        if dropping:
            drop_all(engine, [plain(f"commits/{number - 1}", some_bytes(1))])
    engine.close()


def lose_newest_root_and_slot(path: Path, slot: int) -> None:
    """Leave the previous commit as the newest; its data was overwritten after it was dropped."""
    go_on(path, dropping=True)
    lose_newest_root(path)
    head = bytearray((path / HEAD).read_bytes())
    head[slot * PAGE_BYTES : slot * PAGE_BYTES + SLOT_BYTES] = bytes(SLOT_BYTES)
    (path / HEAD).write_bytes(head)


def restore_older_environment(path: Path) -> None:
    """Bring back intact pages whose blobs may have been overwritten since."""
    older = (path / "data.mdb").read_bytes()
    go_on(path)
    (path / "data.mdb").write_bytes(older)


def name_another_head(path: Path) -> None:
    """Let the newest head be one ahead of HEAD, but not follow the one that HEAD names."""
    Slot(Slot.read(path).number - 1, head_of(77).digest).create(path)


def lose_head(path: Path) -> None:
    """Leave nothing that shows if a commit is missing."""
    (path / HEAD).write_bytes(bytes(2 * PAGE_BYTES))


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lose_newest_root, "HEAD names"),
        (partial(lose_newest_root_and_slot, slot=0), "HEAD names"),
        (partial(lose_newest_root_and_slot, slot=1), "HEAD names"),
        (restore_older_environment, "HEAD names"),
        (name_another_head, "HEAD names"),
        (lose_head, "no part of it is intact"),
    ],
)
def test_a_store_that_lost_its_newest_commit_is_refused_and_not_changed(
    tmp_path: Path, damage: Callable[[Path], None], words: str, *, readonly: bool
) -> None:
    made(tmp_path)
    damage(tmp_path)
    seen = bytes_of(tmp_path)
    with pytest.raises(CorruptStoreError, match=words) as caught:
        LmdbEngine(tmp_path, create=False, readonly=readonly)
    assert_sentence(caught.value)
    assert bytes_of(tmp_path) == seen


def test_a_transaction_killed_before_head_named_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    contents.append(commit_of(COMMITS))
    assert Slot.read(tmp_path).number == COMMITS
    for readonly in (True, False):
        look(tmp_path, contents, readonly=readonly, commits=COMMITS + 1)
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


@pytest.mark.parametrize("call", ["drop", "publish"])
def test_a_writer_that_finds_another_head_writes_nothing_more(tmp_path: Path, call: str) -> None:
    contents = made(tmp_path)
    engine = LmdbEngine(tmp_path, create=False)
    Slot(77, head_of(77).digest).create(tmp_path)
    seen = bytes_of(tmp_path)
    with pytest.raises(StoreError, match=r"names publish 77, but this process wrote 3: .*open it again"):
        drop_all(engine, contents) if call == "drop" else engine.publish(head_of(COMMITS - 1), engine.newest())
    assert bytes_of(tmp_path) == seen
    assert Slot.read(tmp_path).number == 77
    engine.close()
