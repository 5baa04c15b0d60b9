"""Flipped bytes, and files that were cut short, removed or replaced: a sentence each, or what was written."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.apart import ran
from tests.files import flip
from tests.store.big import blocks_of, dump, file_of, publish, values
from tests.store.conftest import small_tables
from tests.store.damage import assert_sentence
from tests.store.world import World
from tiercache.store import CorruptBlockError, CorruptStoreError, Store, StoreError, verify
from tiercache.store.layout import KEYS, ROWS, STATE


@pytest.mark.parametrize("kind", [ROWS, KEYS, STATE])
def test_a_flipped_byte_is_refused_on_load_and_found_by_verify(big: Store, kind: bytes) -> None:
    """In rows, in keys and in the dense state; the sentence names block, segment and table."""
    dump(big, 0, {1: 500})
    publish(big, 1, bytes(10_000))
    big.close()
    _, at, size = file_of(big.path, min(name for name in blocks_of(big.path) if name[0] == kind))
    flip(big.path / "blocks.bin", at + 1234 % size, 0x10)
    with Store.open(big.path) as store:
        segment = store.segments[0]
        layout = segment.layouts[0]
        if kind == ROWS:
            out = np.empty(layout.byte_of_page(layout.num_pages), np.uint8)
            words = r"block 0 of segment 0 \(pass 0; tables 'big'\) of the store at .* has checksum"
            with pytest.raises(CorruptBlockError, match=words) as caught:
                store.read(segment, 0, 0, layout.num_pages, out)
            assert (caught.value.segment, caught.value.block, caught.value.tables) == (0, 0, ("big",))
        elif kind == KEYS:
            with pytest.raises(CorruptBlockError, match="over its keys where"):
                store.locate("big", np.arange(500), after=0)
        else:
            with pytest.raises(CorruptStoreError, match=r"block 0 of the dense state of commit 0 .* has checksum"):
                store.state()
    problems = verify(big.path)["problems"]
    assert len(problems) == 1
    assert "has checksum" in problems[0]


@pytest.mark.parametrize("name", ["data.mdb", "blocks.bin"])
@pytest.mark.parametrize("share", [0.0, 4096, 5000, 8192, 0.5, 0.9, 1.0])
def test_a_truncated_file_is_a_sentence_before_anything_is_read(big: Store, name: str, share: float) -> None:
    """At any length: an error in words when it is opened, by any mode and by verify; never a signal."""
    for pass_index in range(3):
        dump(big, pass_index, {pass_index + 3: 300})
        publish(big, pass_index + 1, bytes(10_000))
    big.close()
    ends = [value.offset + value.size for value in values(big.path)]
    if name == "blocks.bin":
        ends = [block.place + block.size for block in blocks_of(big.path).values()]
    end = max(ends)
    os.truncate(big.path / name, int((end - 1) * share) if share <= 1 else int(share))
    for mode in ("a", "r"):
        with pytest.raises(CorruptStoreError, match=rf"{name} .*: restore the store from a copy"):
            Store.open(big.path, mode=mode)
    problems = verify(big.path)["problems"]
    assert len(problems) == 1
    assert "restore the store from a copy" in problems[0]


def test_verify_names_the_damage_where_no_block_of_keys_is_whole(big: Store) -> None:
    """With nothing left to compare, what was found stands."""
    dump(big, 0, {1: 400})
    publish(big, 1)
    big.close()
    keys = [block for block in blocks_of(big.path).values() if block.kind == KEYS]
    with (big.path / "blocks.bin").open("r+b") as file:
        for block in keys:
            file.seek(block.place)
            file.write(bytes([255]) * block.size)
    assert any("has checksum" in problem for problem in verify(big.path)["problems"])


# -- files that were removed, cut, replaced by something else or by each other: right, or a sentence -----------


def fifo(file: Path) -> None:
    """Put a pipe in its place, which nobody writes to."""
    file.unlink()
    os.mkfifo(file)


def folder(file: Path) -> None:
    """Put a folder in its place."""
    file.unlink()
    file.mkdir()


def looped(file: Path) -> None:
    """Put a link to itself in its place."""
    file.unlink()
    file.symlink_to(file.name)


def halved(file: Path) -> None:
    """Cut it in two."""
    os.truncate(file, file.stat().st_size // 2)


def emptied(file: Path) -> None:
    """Leave nothing in it."""
    os.truncate(file, 0)


def lengthened(file: Path) -> None:
    """Add a page of other bytes."""
    with file.open("ab") as end:
        end.write(b"\xa5" * 4096)


CHANGES: tuple[Callable[[Path], None], ...] = (Path.unlink, fifo, folder, looped, halved, emptied, lengthened)


def check(path: Path, world: World, mode: str) -> bool:
    """Open the store and compare every row, and go on where it may; return whether it was refused in a sentence."""
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
        if name.startswith("segments/0/") and i % 3:
            continue  # of each kind of file some
        for change in (*CHANGES, None):
            for mode in ("r", "a"):
                shutil.rmtree(path)
                shutil.copytree(whole, path)
                print(name, getattr(change, "__name__", "swapped"), mode, flush=True)  # noqa: T201  a hang is here
                if change is not None:
                    change(path / name)
                else:
                    other = path / names[(i + 1) % len(names)]
                    data = other.read_bytes()
                    other.write_bytes((path / name).read_bytes())
                    (path / name).write_bytes(data)
                refused += check(path, world, mode)
    assert refused > 2 * len(names)


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_a_file_that_is_another_is_refused_or_without_effect(tmp_path: Path, engine: str) -> None:
    """In a process of its own: neither a signal, nor a traceback, nor a wait without end."""
    code = "import sys; from pathlib import Path; from tests.store.test_damage import replace_each; "
    code += "replace_each(Path(sys.argv[1]), sys.argv[2])"
    done = ran(code, tmp_path / "s.tc", engine)
    assert done.returncode == 0, f"at {done.stdout.splitlines()[-1:]}: {done.stderr[-2000:]}"


@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_path_that_no_file_can_have_is_a_sentence(mode: str) -> None:
    """NUL ends a name for the system; what is too long is no name."""
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(StoreError) as caught:
            Store.open(name, tables=small_tables() if mode == "a" else None, mode=mode)
        assert_sentence(caught.value)
