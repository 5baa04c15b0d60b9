"""What a full disk says: a need that is more than what is free, and whatever else is the cause."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.store.big import BIG, dump, publish
from tests.store.conftest import small_tables
from tests.store.world import World, WorldUses
from tiercache.store import MemoryEngine, Store, StoreFullError
from tiercache.store.counters import Counters
from tiercache.store.external_sort import ExternalSorter
from tiercache.store.full_disk import ROOM_FOR_RECORDS, full_disk, room_for
from tiercache.store.hashing import hash_keys
from tiercache.store.scratch_file import ScratchFile

Leave = Callable[..., None]

pytestmark = pytest.mark.disk


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Leave:
    """What leaves so many bytes free, on every file system."""

    def only(free: int, *, files: tuple[int, int] = (0, 0)) -> None:
        told = os.statvfs_result((4096, 1, 1 << 40, free, free, *files, files[1], 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _: told)

    return only


def numbers(error: StoreFullError) -> list[int]:
    """Return the numbers of a sentence before its advice: bytes needed, those of them that stay free, bytes free."""
    found = re.search(r" needs (.*) more bytes, (.*) of them kept free for records, but .* has (.*) free: ", str(error))
    assert found, error
    return [int(number.replace(",", "")) for number in found.groups()]


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
@pytest.mark.parametrize("free", [0, 921_600, ROOM_FOR_RECORDS + 4095])
def test_a_dump_needs_more_than_what_is_free(tmp_path: Path, leave: Leave, engine: str, free: int) -> None:
    """Its own bytes may be less: those that stay free for records are counted, and named."""
    with Store.open(tmp_path / "s", tables=[BIG], engine=engine) as store:
        dump(store, 0, {1: 10})
        publish(store, 1)
        leave(free)
        with pytest.raises(StoreFullError, match="the dump of pass 1 to the store at") as full:
            dump(store, 1, {2: 10})
        needed, kept, said = numbers(full.value)
        assert (kept, said) == (ROOM_FOR_RECORDS, free)
        assert needed == full.value.needed_bytes > free
        with pytest.raises(StoreFullError, match="commit 1 of the store at") as full:
            publish(store, 1, bytes(5000))
        assert numbers(full.value)[0] == full.value.needed_bytes > free


def test_other_causes_than_bytes_are_named(tmp_path: Path, leave: Leave) -> None:
    """Files, a quota, and bytes that were freed since, which none of them contradicts."""
    for code, free, files, words in (
        (errno.ENOSPC, 99, (0, 0), r"needs 100 more bytes but the file system of .* has 99 free: free some"),
        (errno.ENOSPC, 500, (0, 0), r"but the file system of .* was full, and has 500 free by now: free some"),
        (errno.ENOSPC, 500, (9, 0), r"but the file system of .* has no room for another file: free some"),
        (errno.EDQUOT, 500, (9, 5), r"but the disk quota of .* is used up: free some"),
    ):
        leave(free, files=files)
        assert re.search(words, str(full_disk(tmp_path, OSError(code, "full"), 100)))
    with (
        pytest.raises(StoreFullError, match=r"^it needs at least 7 more bytes but"),
        room_for(7, tmp_path / "a", "it", at_least=True),
    ):
        raise OSError(errno.ENOSPC, "full")
    error = full_disk(tmp_path, OSError(errno.ENOSPC, "full"), 1000, kept_bytes=50)
    assert error.needed_bytes == 1050
    assert error.during("a step", 2000).needed_bytes == 2050
    assert error.during("a step", 10).needed_bytes == 1050


@pytest.mark.parametrize("how", ["compact", "reorganize"])
def test_a_rewrite_names_its_whole_temporary_files_before_it_reads_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave: Leave, how: str
) -> None:
    """As many bytes as it writes there where it has the room."""
    world = World(small_tables(), keys_per_pass=60, universe=150)
    written: list[int] = []
    write = ScratchFile.write

    def counted(file: ScratchFile, data: NDArray[np.generic], offset: int) -> None:
        written.append(data.nbytes if "new order" in file._what else 0)
        write(file, data, offset)

    monkeypatch.setattr(ScratchFile, "write", counted)
    with Store.open(tmp_path / "s", tables=world.tables) as store:
        world.run(store, 6)
        keys = [(table.name, key) for table in world.tables for key in range(40)]
        uses = WorldUses(store.tables, dict.fromkeys(keys, 1), slice_keys=7)
        said: list[str] = []

        def rewrite() -> None:
            if how == "compact":
                store.compact(progress=lambda stage, _: said.append(stage))
            else:
                store.rewrite(uses, schedule_digest="x", progress=lambda stage, _: said.append(stage))

        with monkeypatch.context() as patched:
            told = os.statvfs_result((4096, 1, 1 << 40, 300, 300, 0, 0, 0, 0, 255))
            patched.setattr(os, "statvfs", lambda _: told)
            words = r"^a new order of the store's rows needs [\d,]+ more bytes but the file system of .* has 300 free"
            with pytest.raises(StoreFullError, match=words) as full:
                rewrite()
        assert not any(written)
        assert "read" not in said
        rewrite()
        assert sum(written) == full.value.needed_bytes > 300


def test_a_file_of_unknown_size_needs_at_least_what_is_written_next(tmp_path: Path, leave: Leave) -> None:
    """One of a known size is refused when it is made."""
    keys = np.arange(1000, dtype=np.int64)
    rows = np.zeros((1000, BIG.row_bytes // 4), np.float32)
    leave(1000)
    whole = 5000 * (8 + BIG.row_bytes)
    with (
        ExternalSorter(
            [("<f4", (BIG.row_bytes // 4,))], tmp_path, "sorting a test", 1 << 16, Counters(), total_rows=5000
        ) as sorter,
        pytest.raises(StoreFullError, match=rf"sorting .* needs {whole:,} more bytes but .* has 1,000 free"),
    ):
        sorter.add(hash_keys(keys, BIG.table_id), rows)
    with ScratchFile(tmp_path, "a test") as file:
        file._file.close()
        file._file = Path("/dev/full").open("r+b", buffering=0)  # noqa: SIM115 - the file closes it
        with pytest.raises(StoreFullError, match=r"a test needs at least 8,000 more bytes but .* has 1,000 free"):
            file.write(keys, 0)


def test_a_scan_that_sorts_names_all_it_sorts(leave: Leave) -> None:
    """Not the batch that comes next."""
    world = World(small_tables(), keys_per_pass=60)
    with Store.open(None, tables=world.tables, engine=MemoryEngine()) as store:
        world.run(store, 5)
        name = world.tables[0].name
        rows = sum(1 for table, _ in world.rows if table == name)
        whole = rows * (8 + world.tables[0].row_bytes)
        leave(whole - 1)
        with pytest.raises(StoreFullError, match=rf"needs {whole:,} more bytes but .* has {whole - 1:,} free"):
            list(store.scan(name, memory_bytes=2000))
