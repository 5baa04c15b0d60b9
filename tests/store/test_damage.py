"""Flipped bytes, and files that were truncated, removed or replaced: an error each, or the written data."""

import itertools
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.apart import ran
from tests.files import files_of, flipped
from tests.store.big import BIG, dump, publish
from tests.store.conftest import small_tables
from tests.store.damage import assert_sentence
from tests.store.places import byte_of, places
from tests.store.world import World
from tiercache.store import CorruptBlockError, CorruptStoreError, Store, StoreError, verify
from tiercache.store.engines.lmdb_map import LmdbFile


@pytest.fixture(params=["lmdb", "zarr"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A closed store with one commit."""
    with Store.open(tmp_path / "s.tc", tables=[BIG], engine=request.param) as store:
        dump(store, 0, {1: 500})
        publish(store, 1, bytes(10_000))
    return tmp_path / "s.tc"


def read_all(path: Path, mode: str = "r") -> None:
    """Open the store, and read its dense state and its rows."""
    with Store.open(path, mode=mode) as store:
        store.state()
        list(store.scan("big"))


@pytest.mark.sampled(1)
def test_a_flipped_byte_is_refused_on_load_and_found_by_verify(path: Path) -> None:
    """The message names block, segment and table."""
    for kind, words in (
        ("/rows", r"block 0 of segment 0 \(pass 0; tables 'big'\) of the store at .* has checksum"),
        ("/keys", "over its keys, but"),
        ("states/0.0", r"part 0 of the dense state of commit 0 .* has checksum"),
    ):
        (name,) = [one for one in places(path) if one.endswith(kind)]
        with flipped(*byte_of(path, name)):
            with pytest.raises(CorruptStoreError, match=words) as caught:
                read_all(path)
            (problem,) = verify(path)["problems"]
        assert "has checksum" in problem
        if isinstance(caught.value, CorruptBlockError):
            assert (caught.value.segment, caught.value.block, caught.value.tables) == (0, 0, ("big",))
        assert isinstance(caught.value, CorruptBlockError) == (kind != "states/0.0")
    assert verify(path)["problems"] == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["commits/0", "ranks/0.0", "segments/0.0/meta"])
def test_a_flipped_byte_of_a_record_is_refused_wherever_it_is(path: Path, name: str) -> None:
    """A commit and its lists when the store is opened, metadata of a segment when its rows are read."""
    for share in (0.0, 0.3, 1.0):
        with flipped(*byte_of(path, name, share)):
            held = files_of(path)
            for mode in ("r", "a"):
                with pytest.raises(CorruptStoreError, match="restore the store from a copy") as caught:
                    read_all(path, mode)
                assert_sentence(caught.value)
            (problem,) = verify(path)["problems"]
            assert "restore the store from a copy" in problem
            if not name.endswith("/meta"):  # a writer detects damage there when it reads rows
                assert held.items() <= files_of(path).items()
    assert verify(path)["problems"] == []


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", ["data.mdb", "blocks.bin"])
@pytest.mark.parametrize("share", [0.0, 4096, 5000, 8192, 0.5, 0.9, 1.0])
def test_a_truncated_file_is_a_sentence_before_anything_is_read(big: Store, name: str, share: float) -> None:
    """On opening in any mode, and by verify; never a signal."""
    for pass_index in range(3):
        dump(big, pass_index, {pass_index + 3: 300})
        publish(big, pass_index + 1, bytes(10_000))
    big.close()
    if name == "blocks.bin":
        end = max(place.at + place.size for of_blob in places(big.path).values() for place in of_blob)
    else:
        with closing(LmdbFile(str(big.path / name))) as file:
            end = max(value.offset + value.size for value in file.values())
    os.truncate(big.path / name, int((end - 1) * share) if share <= 1 else int(share))
    words = "restore the store from a copy"
    for mode in ("r", "a"):
        with pytest.raises(CorruptStoreError, match=words):
            Store.open(big.path, mode=mode)
    problems = verify(big.path)["problems"]
    assert problems
    assert all(words in problem for problem in problems)


def test_verify_names_the_damage_where_no_block_of_keys_is_whole(path: Path) -> None:
    """The damage found is reported even if nothing is left to compare."""
    for file, at, size in places(path)["segments/0.0/0/keys"]:
        with file.open("r+b") as opened:
            opened.seek(at)
            opened.write(bytes([255]) * size)
    assert any("has checksum" in problem for problem in verify(path)["problems"])


# -- files that were removed, cut, replaced or swapped: correct data, or an error -----------------------------------


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)  # has no writer


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def looped(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def halved(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def lengthened(file: Path) -> None:
    """Add a page of other bytes."""
    with file.open("ab") as end:
        end.write(b"\xa5" * 4096)


CHANGES: tuple[Callable[[Path], None], ...] = (Path.unlink, fifo, folder, looped, halved, emptied, lengthened)


def check(path: Path, world: World, mode: str) -> bool:
    """Open the store, compare every row, and continue if possible; return True if it was refused with an error."""
    try:
        with Store.open(path, mode=mode) as store:
            assert store.commit.cursor.pass_index == world.pass_index
            world.check(store, after=world.pass_index - 1)
            assert store.state() == world.state
            if mode == "a":
                for _ in range(2):
                    store.publish(store.commit.cursor, state=b"", schedule_digest="", settings={}, environment={})
                world.check(store, after=world.pass_index - 1)
    except StoreError as error:
        assert_sentence(error)
        return True
    return False


def replace_each(path: Path, engine: str) -> None:
    """Change each file in each way, and swap it with the next one."""
    world = World(small_tables()[1:3], num_passes=3)
    with Store.open(path, tables=world.tables, engine=engine) as store:
        world.run(store, 2)
    whole = path.with_name("whole")
    shutil.copytree(path, whole)
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    refused = 0
    for i, name in enumerate(names):
        if name.startswith("segments/0.0/") and i % 3:
            continue  # some of each kind of file
        for change, mode in itertools.product((*CHANGES, None), ("r", "a")):
            shutil.rmtree(path)
            shutil.copytree(whole, path)
            print(name, getattr(change, "__name__", "swapped"), mode, flush=True)  # noqa: T201  a hang is here
            if change is not None:
                change(path / name)
            else:
                other = names[(i + 1) % len(names)]
                shutil.copyfile(whole / name, path / other)
                shutil.copyfile(whole / other, path / name)
            refused += check(path, world, mode)
    assert refused > 2 * len(names)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_a_file_that_is_another_is_refused_or_without_effect(tmp_path: Path, engine: str) -> None:
    """In a separate process: no signal, no traceback, and no endless wait."""
    code = "import sys; from pathlib import Path; from tests.store.test_damage import replace_each; "
    code += "replace_each(Path(sys.argv[1]), sys.argv[2])"
    done = ran(code, tmp_path / "s.tc", engine)
    assert done.returncode == 0, f"at {done.stdout.splitlines()[-1:]}: {done.stderr[-2000:]}"


@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_path_that_no_file_can_have_is_a_sentence(mode: str) -> None:
    """NUL ends a name for the system; a name that is too long is invalid."""
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(StoreError) as caught:
            Store.open(name, tables=small_tables() if mode == "a" else None, mode=mode)
        assert_sentence(caught.value)
