"""An LMDB store that lost its newest transaction, or shows another, is refused; nothing of it is freed or written."""

from __future__ import annotations

import shutil
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.apart import ran
from tests.files import flipped
from tests.store.big import values
from tests.store.conftest import small_tables
from tests.store.damage import assert_sentence
from tests.store.world import World
from tiercache.store import CorruptStoreError, Store, StoreError, lmdb_engine, verify
from tiercache.store.lmdb_engine import LmdbEngine
from tiercache.store.lmdb_head import HEAD, read_head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    Rows = dict[str, tuple[NDArray[np.int64], dict[str, NDArray[np.float32]]]]

PAGE_BYTES, META_BYTES = 4096, 152
COMMITS = 3
LOCKS = {"lock.mdb", "writer.lock"}


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
    """Return the files of a store, but those of locks."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name not in LOCKS}


def bits_of(at: int) -> tuple[int]:
    """Return a bit of a byte, another than those of the bytes beside it: a checksum knows no bit from another."""
    return (3 * at % 8,)


def flip_bits(path: Path, name: str, places: Iterable[int], bits: Callable[[int], Iterable[int]] = bits_of) -> int:
    """Flip bits of a file one at a time, reading and writing: the right rows or a sentence, and no byte changes.

    Returns how often the store was refused.
    """
    rows, refused = made(path), 0
    whole = bytes_of(path)
    for at in places:
        for bit in bits(at):
            with flipped(path / name, at, 1 << bit):
                for mode in ("r", "a"):
                    print(name, at, bit, mode, flush=True)  # noqa: T201  the last one is what a signal leaves to say
                    try:
                        check(path, rows, mode)
                    except StoreError as error:
                        assert_sentence(error)
                        refused += 1
            assert bytes_of(path) == whole, (at, bit)
    check(path, rows)
    return refused


def flip_metas(path: Path, bits: Callable[[int], Iterable[int]]) -> None:
    """Flip bits of each byte that LMDB uses of both meta pages: those of the newest are all refused."""
    places = [page * PAGE_BYTES + byte for page in (0, 1) for byte in range(META_BYTES)]
    refused = flip_bits(path, "data.mdb", places, bits)
    assert refused >= 2 * len([*bits(0)]) * (META_BYTES - 16), refused


@pytest.mark.parametrize("bits", ["bits_of", pytest.param("lambda _: range(8)", marks=pytest.mark.long)])
def test_no_flipped_bit_of_the_meta_pages_shows_another_commit(tmp_path: Path, bits: str) -> None:
    """In a process of its own, since a signal must not come either."""
    code = "import sys; from pathlib import Path; from tests.store.test_head import bits_of, flip_metas; "
    code += f"flip_metas(Path(sys.argv[1]), {bits})"
    done = ran(code, tmp_path / "s.tc")
    assert done.returncode == 0, f"at {done.stdout.splitlines()[-1:]}: {done.stderr[-2000:]}"


def test_no_flipped_bit_of_head_refuses_more_than_the_store(tmp_path: Path) -> None:
    """Its two slots: the one before is enough to open the store, so all rows are there, or a sentence."""
    flip_bits(tmp_path / "s.tc", HEAD, [*range(0, 24, 3), *range(PAGE_BYTES, PAGE_BYTES + 24, 3)])


def test_no_flipped_bit_of_a_record_s_name_hides_it(tmp_path: Path) -> None:
    """A record under another name is damage, not one that nobody names: the store is refused in both modes."""
    path = tmp_path / "s.tc"
    rows = made(path)
    whole = bytes_of(path)
    names = [value for value in values(path) if value.key[:1] in {b"r", b"t"}]
    assert len(names) == 1 + COMMITS + COMMITS + 1, names  # tables, commits, segments, and the transaction's number
    for value in names:
        first = value.offset - len(value.key)
        assert whole["data.mdb"][first : value.offset] == value.key
        for at in range(first, first + len(value.key)):
            for bit in bits_of(at):
                with flipped(path / "data.mdb", at, 1 << bit):
                    for mode in ("r", "a"):
                        with pytest.raises(StoreError) as caught:
                            check(path, rows, mode)
                        assert_sentence(caught.value)
                assert bytes_of(path) == whole, (value.key, at, bit)
    check(path, rows)


@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_store_whose_newest_transaction_is_gone_is_refused(tmp_path: Path, mode: str) -> None:
    """LMDB falls back to the root before where the newest is damaged: HEAD tells that it is not the newest."""
    path = tmp_path / "s.tc"
    rows = made(path)
    with (path / "data.mdb").open("r+b") as file:
        newest = max(range(2), key=lambda page: struct.unpack_from("<Q", (path / "data.mdb").read_bytes(), _at(page)))
        file.seek(_at(newest))
        number = file.read(8)
        file.seek(_at(newest))
        file.write(struct.pack("<Q", struct.unpack("<Q", number)[0] - 2))
    with pytest.raises(CorruptStoreError, match="HEAD names") as caught:
        Store.open(path, mode=mode)
    assert_sentence(caught.value)
    assert verify(path)["problems"]
    with (path / "data.mdb").open("r+b") as file:
        file.seek(_at(newest))
        file.write(number)
    check(path, rows)


def _at(page: int) -> int:
    """Return where a meta page has the number of its transaction."""
    return page * PAGE_BYTES + META_BYTES - 8


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
    """Readers accept one transaction ahead of HEAD; the next writer has HEAD name it before anything else."""
    path = tmp_path / "s.tc"
    rows = made(path)
    before = (path / HEAD).read_bytes()
    newest = max(read_head(path) or {})
    slot = newest % 2 * PAGE_BYTES
    (path / HEAD).write_bytes(before[:slot] + bytes(PAGE_BYTES) + before[slot + PAGE_BYTES :])
    check(path, rows)
    assert max(read_head(path) or {}) == newest - 1
    check(path, rows, "a")
    assert (path / HEAD).read_bytes() == before


def test_a_commit_whose_head_cannot_be_written_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises, and is there; no transaction follows it before HEAD has caught up."""

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    engine = LmdbEngine(tmp_path, create=True)
    engine.commit({"r": b"1"}, ())
    with monkeypatch.context() as patched:
        patched.setattr(lmdb_engine, "write_head", fail)
        for _ in range(2):
            with pytest.raises(StoreError, match="HEAD cannot be written"):
                engine.commit({"r": b"2"}, ())
    named = max(read_head(tmp_path) or {})
    engine.commit({"r": b"3"}, ())
    engine.close()
    assert max(read_head(tmp_path) or {}) == named + 2
    reader = LmdbEngine(tmp_path, create=False, readonly=True)
    assert reader.contents().records == {"r": b"3"}
    reader.close()


def test_a_store_without_head_is_refused_where_it_has_blocks_and_no_commit(tmp_path: Path) -> None:
    """One of an older version opens, and has HEAD from its next writer on."""
    path = tmp_path / "s.tc"
    rows = made(path)
    (path / HEAD).unlink()
    check(path, rows)
    assert not (path / HEAD).exists()
    check(path, rows, "a")
    assert read_head(path)
    check(path, rows)
    empty = tmp_path / "empty.tc"
    Store.open(empty, tables=small_tables()).close()
    (empty / "blocks.bin").write_bytes(bytes(PAGE_BYTES))
    Store.open(empty).close()  # as a first dump that was killed leaves it: HEAD tells that there was no commit
    (empty / "blocks.bin").write_bytes(bytes(PAGE_BYTES))
    (empty / HEAD).unlink()
    for mode in ("r", "a"):
        with pytest.raises(CorruptStoreError, match=r"has blocks, no commit and no HEAD"):
            Store.open(empty, mode=mode)


def test_head_is_damaged_where_none_of_its_slots_is_whole(tmp_path: Path) -> None:
    """The store is refused rather than opened without it."""
    path = tmp_path / "s.tc"
    made(path)
    (path / HEAD).write_bytes(bytes(2 * PAGE_BYTES))
    with pytest.raises(CorruptStoreError, match="no part of it is whole"):
        Store.open(path)
