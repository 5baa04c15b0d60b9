"""Compaction returns space: data that no commit or reader needs is removed from the disk."""

import errno
import os
from contextlib import closing
from pathlib import Path
from subprocess import PIPE, Popen

import numpy as np
import pytest

from tests.apart import command, ran
from tests.store.big import BIG, dump, load, needed_blobs, publish
from tests.store.reader import READER
from tests.store.test_block_file import aligned, bytes_of, put
from tiercache.store import Store, StoreFullError, info, verify
from tiercache.store.engines import block_file as module
from tiercache.store.engines.block_file import BlockFile
from tiercache.store.engines.lmdb_map import extents_of, read_map
from tiercache.store.files import PAGE_BYTES, punch_hole

pytestmark = pytest.mark.disk


def taken(path: Path) -> int:
    return path.stat().st_blocks * 512


def trained(path: Path, *, passes: int = 8, engine: str = "lmdb") -> int:
    """Create a store of several segments; return the bytes of its live rows with their keys."""
    with Store.open(path, tables=[BIG], engine=engine) as store:
        for pass_index in range(passes):
            dump(store, pass_index, {pass_index + 1: 300, pass_index + 100: 500})
            publish(store, pass_index + 1)
    return (300 + 500 * passes) * (BIG.row_bytes + 8)


def test_compaction_gives_back_what_it_freed(tmp_path: Path) -> None:
    """Of training, the free space is for the next dump. A compaction makes it holes, and the next one fills these."""
    live, file = trained(tmp_path / "s"), tmp_path / "s/blocks.bin"
    assert taken(file) >= file.stat().st_size > live
    with Store.open(tmp_path / "s") as store:
        store.compact()
        assert taken(file) < 1.05 * live
        assert file.stat().st_size > 1.5 * live
        assert sum(keys.size for keys, _ in store.scan("big")) == 300 + 500 * 8
    assert verify(tmp_path / "s")["problems"] == []
    with Store.open(tmp_path / "s") as store:
        store.compact()
    size = file.stat().st_size
    assert live < size < 1.1 * live
    assert taken(file) <= size + PAGE_BYTES
    assert verify(tmp_path / "s")["problems"] == []


@pytest.mark.parametrize(("engine", "most"), [("lmdb", 1.1), ("zarr", 1.5)])
def test_info_counts_what_the_disk_keeps(tmp_path: Path, engine: str, most: float) -> None:
    """After compaction, a store is barely larger than its rows (Zarr pads the last chunk)."""
    trained(tmp_path / "s", engine=engine)
    with Store.open(tmp_path / "s") as store:
        store.compact()
    found = info(tmp_path / "s")
    files = [file for file in (tmp_path / "s").rglob("*") if file.is_file()]
    assert 0 <= found["file_bytes"] - sum(map(taken, files)) <= PAGE_BYTES  # the mark of a reader during the look
    assert 1 < found["space_amplification"] < most


def test_holes_are_written_again(tmp_path: Path) -> None:
    """Passes after a compaction use the freed places, and the file does not grow."""
    trained(tmp_path / "s")
    file = tmp_path / "s/blocks.bin"
    with Store.open(tmp_path / "s") as store:
        store.compact()
        size, stored = file.stat().st_size, {}
        for pass_index in range(20, 26):
            stored[pass_index] = dump(store, pass_index, {pass_index + 1: 300, pass_index + 2: 200})
            publish(store, pass_index + 1)
            expected = {v: ranges[pass_index + 1] for v, ranges in stored.items() if pass_index + 1 in ranges}
            assert load(store, pass_index + 1) == expected
        assert file.stat().st_size == size
    assert verify(tmp_path / "s")["problems"] == []


def test_what_a_reader_sees_is_given_back_when_it_is_gone(tmp_path: Path) -> None:
    """The commit of the next compaction frees everything."""
    live, file = trained(tmp_path / "s"), tmp_path / "s/blocks.bin"
    with Popen(command(READER, tmp_path / "s"), stdin=PIPE, stdout=PIPE, text=True) as reader:
        first = reader.stdout.readline()
        with Store.open(tmp_path / "s") as store:
            for _ in range(3):  # later commits would reuse the reader's space
                store.compact()
            assert taken(file) > 1.8 * live
            assert reader.communicate("\n")[0] == first
            store.compact()
            assert taken(file) < 1.05 * live
    assert verify(tmp_path / "s")["problems"] == []


DYING = """
import os, sys
from tiercache.store import Store
from tiercache.store.engines import block_file

punch_hole = block_file.punch_hole

def dying(*run):
    if sys.argv[2] == "after":
        punch_hole(*run)
    os._exit(9)

block_file.punch_hole = dying
with Store.open(sys.argv[1]) as store:
    store.compact()
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_that_dies_at_a_hole_leaves_a_compacted_store(tmp_path: Path, moment: str) -> None:
    """The commit was durable before the first hole; the next compaction frees the rest."""
    live = trained(tmp_path / "s")
    assert ran(DYING, tmp_path / "s", moment).returncode == 9
    assert verify(tmp_path / "s")["problems"] == []
    with Store.open(tmp_path / "s") as store:
        (segment,) = store.segments
        assert segment.rows == 300 + 500 * 8
        store.compact()
        assert taken(tmp_path / "s" / "blocks.bin") < 1.05 * live
    assert verify(tmp_path / "s")["problems"] == []


def test_no_hole_is_where_a_commit_has_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the newest root of LMDB's file, which was synced, nor a block of a kept commit."""
    trained(tmp_path / "s")
    holes = []

    def watching(handle: int, offset: int, num_bytes: int) -> bool:
        entries = read_map(tmp_path / "s", "the store")[2]
        for name, need in needed_blobs(tmp_path / "s").items():
            rest, _ = extents_of(entries[name]).drop(need.first_byte)
            assert all(low + count <= offset or offset + num_bytes <= low for low, count in rest.runs)
        holes.append(num_bytes)
        return punch_hole(handle, offset, num_bytes)

    monkeypatch.setattr(module, "punch_hole", watching)
    for retention in (3, 1):
        with Store.open(tmp_path / "s", retention=retention) as store:
            store.compact()
            assert len(store.commits) == min(retention, 2)
    assert sum(holes) > 1 << 20
    assert verify(tmp_path / "s")["problems"] == []


def test_a_file_system_without_holes_keeps_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "punch_hole", lambda *_: False)
    file = BlockFile(tmp_path / "blocks", readonly=False, store_budget=None)
    blobs = put(file, [np.full(100_000, i, np.uint8) for i in range(4)])
    file.flush()
    file.give([*blobs[1].runs, *blobs[3].runs])
    file.shrink()
    assert file.size == blobs[3].runs[0][0]
    assert taken(tmp_path / "blocks") >= file.size
    (again,) = put(file, [np.full(100_000, 9, np.uint8)])
    file.flush()
    for blob, value in ((blobs[0], 0), (blobs[2], 2), (again, 9)):
        assert set(bytes_of(file, blob)) == {value}
    file.close()


@pytest.mark.parametrize("call", ["posix_fallocate", "statvfs"])
def test_a_disk_that_is_full_shows_before_a_hole_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The place is free again, and space is left for records."""
    with closing(BlockFile(tmp_path / "blocks", readonly=False, store_budget=None)) as file:
        first, last = put(file, [aligned(600_000), np.full(10_000, 7, np.uint8)])
        file.flush()
        file.give(first.runs)
        file.shrink()
        assert taken(tmp_path / "blocks") < 100_000

        def full(*_arguments: object) -> object:
            if call == "posix_fallocate":
                raise OSError(errno.ENOSPC, "full")
            return os.statvfs_result((4096, 4096, 100, 10, 10, 0, 0, 0, 0, 255))

        with monkeypatch.context() as patched:
            patched.setattr(os, call, full)
            with pytest.raises(StoreFullError, match=r"needs 1,650,688 more bytes, .* but .* free.*: free some"):
                file.take([600_000])
        assert taken(tmp_path / "blocks") < 100_000
        assert put(file, [aligned(600_000)])[0].runs == first.runs
        file.flush()
        assert set(bytes_of(file, last)) == {7}


def test_a_hole_reads_as_zeros_and_ends_where_it_should(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"\1" * 40_960)
    with file.open("r+b") as opened:
        handle = opened.fileno()
        assert punch_hole(handle, 8192, 16_384)
    assert file.read_bytes() == b"\1" * 8192 + bytes(16_384) + b"\1" * 16_384
    with pytest.raises(OSError, match="Bad file descriptor"):
        punch_hole(handle, 0, 4096)
