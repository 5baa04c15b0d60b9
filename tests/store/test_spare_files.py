"""Dead files that new ones are written over: when they may be, which, and where they go."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from tests.store.big import dump, load, publish
from tiercache.store import StoreFullError, ZarrEngine, zarr_objects
from tiercache.store.direct_file import write_file
from tiercache.store.spare_files import SpareFiles
from tiercache.store.testing.contract import bytes_of, form_of, given_as, segment_blocks, some_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store import Store

pytestmark = pytest.mark.disk

SIZE = 20_000


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ZarrEngine]:
    """An engine with block ``a``."""
    engine = ZarrEngine(tmp_path, create=True)
    write(engine, b"a", 1)
    engine.commit({}, [])
    yield engine
    engine.close()


def write(engine: ZarrEngine, name: bytes, seed: int, size: int = SIZE) -> None:
    """Write a block of made-up bytes, once nothing is being swept."""
    engine._sweep.wait()
    engine.write([(name, some_bytes(size, seed), None)])


def inode(path: Path, name: bytes) -> int:
    """Return the number of the file that has a block."""
    return (path / "blocks" / name.hex()).stat().st_ino


def spares(path: Path) -> list[int]:
    """Return the bytes of all spares."""
    return sorted(file.stat().st_size for file in (path / "spare").glob("*"))


@pytest.mark.parametrize("size", [SIZE, SIZE - 1, SIZE + 400, 20_480, 16_384])
def test_a_dead_file_is_written_over(engine: ZarrEngine, tmp_path: Path, size: int) -> None:
    """By a file that has as many pages or somewhat fewer; it has its bytes and its length then, and after a reopen."""
    dead = inode(tmp_path, b"a")
    engine.commit({}, [b"a"])
    write(engine, b"b", 2, size)
    assert inode(tmp_path, b"b") == dead
    assert (tmp_path / "blocks" / b"b".hex()).stat().st_size == size
    engine.commit({}, [])
    engine.close()
    again = ZarrEngine(tmp_path, create=False)
    assert bytes_of(again, b"b") == some_bytes(size, 2).tobytes()
    again.close()


@pytest.mark.parametrize("size", [SIZE + 481, 12_288, 5000])
def test_a_dead_file_of_another_size_is_not_written_over(engine: ZarrEngine, tmp_path: Path, size: int) -> None:
    """One with fewer pages, or with more than a quarter more."""
    dead = inode(tmp_path, b"a")
    engine.commit({}, [b"a"])
    write(engine, b"b", 2, size)
    assert inode(tmp_path, b"b") != dead
    assert spares(tmp_path) == [SIZE]


def test_what_an_uncommitted_commit_would_free_is_not_written_over(engine: ZarrEngine, tmp_path: Path) -> None:
    """Only a commit that is durable frees."""
    engine.write([(b"a", some_bytes(SIZE, 5), None)])  # replaces what the newest commit names
    write(engine, b"b", 2)
    write(engine, b"c", 3)
    engine.close()
    again = ZarrEngine(tmp_path, create=False)
    assert bytes_of(again, b"a") == some_bytes(SIZE, 1).tobytes()
    assert again.contents().blocks == {b"a": SIZE}
    again.close()


def test_a_file_that_a_read_may_still_look_at_is_not_written_over(engine: ZarrEngine, tmp_path: Path) -> None:
    """A read that began before the commit that freed it keeps it as it is; one that began later does not."""
    dead = inode(tmp_path, b"a")
    with engine._gate.reading(), (tmp_path / "blocks" / b"a".hex()).open("rb") as file:
        engine.commit({}, [b"a"])
        write(engine, b"b", 2)
        assert file.read() == some_bytes(SIZE, 1).tobytes()
    assert inode(tmp_path, b"b") != dead
    with engine._gate.reading():
        write(engine, b"c", 3)
    assert inode(tmp_path, b"c") == dead


def test_a_file_that_a_reader_in_another_process_holds_is_not_written_over(engine: ZarrEngine, tmp_path: Path) -> None:
    """Its mark names a manifest that names the file; when it is gone the file is a spare at the next commit."""
    dead = inode(tmp_path, b"a")
    reader = ZarrEngine(tmp_path, create=False, readonly=True)
    engine.commit({}, [b"a"])
    write(engine, b"b", 2)
    engine.commit({}, [])
    write(engine, b"c", 3)
    assert bytes_of(reader, b"a") == some_bytes(SIZE, 1).tobytes()
    assert dead not in {inode(tmp_path, b"b"), inode(tmp_path, b"c")}
    reader.close()
    engine.commit({}, [])
    write(engine, b"d", 4)
    assert inode(tmp_path, b"d") == dead


def test_a_file_with_another_name_is_not_written_over(engine: ZarrEngine, tmp_path: Path) -> None:
    """A copy of a store by hard links keeps its bytes."""
    os.link(tmp_path / "blocks" / b"a".hex(), tmp_path / "copy")
    engine.commit({}, [b"a"])
    write(engine, b"b", 2)
    assert (tmp_path / "copy").read_bytes() == some_bytes(SIZE, 1).tobytes()
    assert spares(tmp_path) == []


@pytest.mark.parametrize("how", ["shrink", "close", "crash"])
def test_spares_go_back_to_the_disk(engine: ZarrEngine, tmp_path: Path, how: str) -> None:
    """With a commit that shrinks and when the store is closed; what a crash leaves, at the next opening."""
    engine.commit({}, [b"a"])
    engine._sweep.wait()
    assert spares(tmp_path) == [SIZE]
    if how == "shrink":
        engine.commit({}, [], shrink=True)
    elif how == "close":
        engine.close()
    else:
        engine._lock.release()  # as the end of its process does
        (tmp_path / "spare" / "77").write_bytes(bytes(SIZE))
        ZarrEngine(tmp_path, create=False).close()
    assert spares(tmp_path) == []


def test_a_spare_that_is_gone_or_cannot_be_made_is_missed_by_nobody(engine: ZarrEngine, tmp_path: Path) -> None:
    """Whoever tidies up may delete them; where there can be no folder for them dead files are deleted."""
    engine.commit({}, [b"a"])
    engine._sweep.wait()
    (tmp_path / "spare" / "1").unlink()
    write(engine, b"b", 2)
    engine.commit({}, [])
    (tmp_path / "spare").rmdir()
    (tmp_path / "spare").touch()
    engine.commit({}, [b"b"])
    write(engine, b"c", 3)
    engine.commit({}, [])
    assert bytes_of(engine, b"c") == some_bytes(SIZE, 3).tobytes()
    assert [file.name for file in (tmp_path / "blocks").iterdir()] == [b"c".hex()]
    engine.close()
    for readonly in (False, True):
        again = ZarrEngine(tmp_path, create=False, readonly=readonly)
        assert bytes_of(again, b"c") == some_bytes(SIZE, 3).tobytes()
        again.close()
    assert (tmp_path / "spare").is_file(), "what the store did not make it does not delete"


def test_spares_make_room_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below max_bytes, and on a full disk: a block that does not fit into one is written all the same."""
    engine = ZarrEngine(tmp_path, create=True, max_bytes=3 * SIZE)
    for i in range(3):
        write(engine, b"%d" % i, i)
    engine.commit({}, [])
    engine.commit({}, [b"0", b"1", b"2"])
    engine._sweep.wait()
    assert len(spares(tmp_path)) == 3
    write(engine, b"b", 4, 2 * SIZE)
    assert sum(spares(tmp_path)) <= SIZE
    engine.commit({}, [])

    def check_room(size: int) -> None:
        if spares(tmp_path):
            raise StoreFullError(needed_bytes=size, limit="it is full", advice="free some")

    monkeypatch.setattr(engine._writer, "check_room", check_room)
    write(engine, b"c", 5, SIZE // 2)
    assert spares(tmp_path) == []
    engine.close()


@pytest.mark.parametrize("what", ["/blocks/", "/segments/", "zarr.json", "/records/", "/manifests/"])
def test_spares_make_room_for_a_write_that_found_none(
    engine: ZarrEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Several threads may take the last of it after it was looked for: all that a commit writes is written again."""
    engine.commit({}, [b"a"])
    engine._sweep.wait()
    refused = []

    def write_file_if_there_is_room(path: str, buffer: NDArray[np.uint8], size: int, over: str | None = None) -> None:
        if what in path and spares(tmp_path):
            refused.append(path)
            raise OSError(errno.ENOSPC, "it is full")
        write_file(path, buffer, size, over)

    monkeypatch.setattr(zarr_objects, "write_file", write_file_if_there_is_room)
    form = form_of((10, 20))
    blocks = segment_blocks(form, 1)
    engine.write([(b"b", some_bytes(3 * SIZE, 2), None), *given_as(blocks)])
    engine.commit({"r": b"1"}, [])
    assert refused
    assert spares(tmp_path) == []
    engine.close()
    again = ZarrEngine(tmp_path, create=False)
    assert again.contents().records == {"r": b"1"}
    assert bytes_of(again, b"b") == some_bytes(3 * SIZE, 2).tobytes()
    for name, (data, _) in blocks.items():
        assert bytes_of(again, name, form) == data.tobytes()
    again.close()


def test_there_are_spares_for_one_dump(tmp_path: Path) -> None:
    """As many bytes as the largest of the last commits wrote, the youngest dead files."""
    kept = SpareFiles(tmp_path, lambda: 9)
    for size in (100_000, 10_000, 10_000):
        assert kept.take(size) is None
        kept.turn()
    for number in range(30):
        (tmp_path / str(number)).write_bytes(bytes(8192))
        kept.keep(str(tmp_path / str(number)), number)
    assert kept.num_bytes == 12 * 8192
    assert {kept.take(8192) for _ in range(12)} == {None}, "those of commits after the oldest read are left alone"
    kept = SpareFiles(tmp_path, lambda: 99)
    kept.take(8192)
    kept.turn()
    for number in range(2):
        (tmp_path / str(number)).write_bytes(bytes(8192))
        kept.keep(str(tmp_path / str(number)), number)
    assert kept.take(8192) == str(tmp_path / "spare" / "2")
    for _ in range(4):
        kept.turn()
    assert kept.most == 0


def test_dumps_of_the_same_size_make_no_new_file(big_zarr: Store) -> None:
    """In a steady state each chunk is written over a dead one, and loads return what was dumped."""
    assert big_zarr.path is not None
    wanted: dict[int, bytes] = {}
    seen: set[int] = set()
    for pass_index in range(8):
        wanted = dump(big_zarr, pass_index, {pass_index + 1: 128})
        publish(big_zarr, pass_index + 1)
        big_zarr._engine._sweep.wait()
        assert load(big_zarr, pass_index + 1) == {pass_index: wanted[pass_index + 1]}
        chunks = {file.stat().st_ino for file in big_zarr.path.glob("segments/*/*/[vs]*/c.*")}
        if pass_index >= 3:
            assert chunks <= seen
        seen |= chunks
