"""A store whose files were removed, cut, replaced by something else or by each other: right, or a sentence."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.apart import ran
from tests.store.conftest import small_tables
from tests.store.damage import assert_sentence
from tests.store.world import World
from tiercache.store import Store, StoreError


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
            assert store.commit is not None
            assert store.commit.cursor.pass_index == world.pass_index
            world.check(store, after=world.pass_index - 1)
            assert store.state() == world.state
            if mode == "a":
                store.publish(store.commit.cursor, state=b"", schedule_digest="", settings={}, environment={})
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
    code = "import sys; from pathlib import Path; from tests.store.test_replaced_files import replace_each; "
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


if __name__ == "__main__":
    replace_each(Path(sys.argv[1]), sys.argv[2])
