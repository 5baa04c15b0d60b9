"""Full disks, flipped bytes, files cut short: a sentence each, and the last commit stands."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.store.big import BIG, dump, load, places, publish, values
from tiercache.store import (
    CorruptBlockError,
    CorruptStoreError,
    Cursor,
    Store,
    StoreFullError,
    verify,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_a_map_that_is_full_is_a_sentence_and_the_commit_stands(tmp_path: Path) -> None:
    """With the bytes needed and what to raise; the store goes on after forgetting, and after a reopen."""
    store = Store.open(tmp_path / "s", tables=[BIG], max_bytes=8 << 20)
    stored = dump(store, 0, {1: 500})
    publish(store, 1, b"state")
    with pytest.raises(
        StoreFullError, match=r"the dump of visit 1 to the store at .* needs .* raise max_bytes"
    ) as full:
        dump(store, 1, {2: 4000})
    assert 4000 * BIG.row_bytes >= full.value.needed_bytes > 1 << 20
    assert load(store, 1) == {0: stored[1]}
    with pytest.raises(StoreFullError, match=r"commit 1 of the store at .* needs"):
        publish(store, 1, b"x" * (9 << 20))
    store.forget()
    assert store.state() == b"state"
    dump(store, 1, {2: 500})
    publish(store, 2)
    store.close()
    with Store.open(tmp_path / "s") as again:
        assert again.commit is not None
        assert again.commit.cursor == Cursor(2, 0)
        dump(again, 2, {3: 4000})  # with the map of a file system there is room
        publish(again, 3)
    assert verify(tmp_path / "s")["problems"] == []


def test_a_file_that_may_not_grow_is_a_sentence_and_the_commit_stands(big: Store) -> None:
    """The kernel refuses to write on (as it does where a disk is full); what was committed stays."""
    stored = dump(big, 0, {1: 500})
    publish(big, 1)
    assert big.path is not None
    size = (big.path / "blocks.bin").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + (1 << 20), hard))
    try:
        with pytest.raises(StoreFullError, match="the dump of visit 1"):
            dump(big, 1, {2: 4000})
        big.forget()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load(big, 1) == {0: stored[1]}
    dump(big, 1, {2: 4000})
    publish(big, 2)
    big.close()
    assert verify(big.path)["problems"] == []


def test_a_full_disk_is_a_sentence_and_the_commit_stands(tmp_path: Path) -> None:
    """On a file system of 8 MiB, where this machine lets a test make one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting a small file system takes rights that this test does not have")
    try:
        with Store.open(place / "s", tables=[BIG], max_bytes=1 << 30) as store:
            stored = dump(store, 0, {1: 500})
            publish(store, 1, b"state")
            words = (
                r"needs [\d,]+ more bytes, 1,048,576 of them kept free for records, but .* has [\d,]+ free: free some"
            )
            with pytest.raises(StoreFullError, match=words):
                dump(store, 1, {2: 4000})
        with Store.open(place / "s") as again:
            assert load(again, 1) == {0: stored[1]}
            assert again.state() == b"state"
            dump(again, 1, {2: 500})
            publish(again, 2)
        assert verify(place / "s")["problems"] == []
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("kind", [b"r", b"k", b"s"])
def test_a_flipped_byte_is_refused_on_load_and_found_by_verify(big: Store, kind: bytes) -> None:
    """In rows, in keys and in the dense state; the sentence names block, segment and table."""
    dump(big, 0, {1: 500})
    publish(big, 1, bytes(10_000))
    big.close()
    assert big.path is not None
    place = next(place for name, place in sorted(places(big.path).items()) if name[:1] == kind)
    with (big.path / "blocks.bin").open("r+b") as file:
        file.seek(place.offset + 1234 % place.size)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))
    with Store.open(big.path) as store:
        segment = store.segments[0]
        stream = segment.streams[0]
        if kind == b"r":
            out = np.empty(int(stream.piece_offset_P[-1]), np.uint8)
            words = r"block 0 of segment 0 \(visit 0; tables 'big'\) of the store at .* has checksum"
            with pytest.raises(CorruptBlockError, match=words) as caught:
                store.read(segment, 0, 0, stream.num_pieces, out)
            assert (caught.value.segment, caught.value.block, caught.value.tables) == (0, 0, ("big",))
        elif kind == b"k":
            with pytest.raises(CorruptBlockError, match="over its keys where"):
                store.locate("big", np.arange(3), after=0)
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
    for visit in range(3):
        dump(big, visit, {visit + 3: 300})
        publish(big, visit + 1, bytes(10_000))
    big.close()
    assert big.path is not None
    held = places(big.path).values() if name == "blocks.bin" else values(big.path)
    end = max(place.offset + place.size for place in held)
    os.truncate(big.path / name, int((end - 1) * share) if share <= 1 else int(share))
    for mode in ("a", "r"):
        with pytest.raises(CorruptStoreError, match=rf"{name} .*: restore the store from a copy"):
            Store.open(big.path, mode=mode)
    problems = verify(big.path)["problems"]
    assert len(problems) == 1
    assert "restore the store from a copy" in problems[0]


def test_a_file_truncated_while_open_is_refused_on_load(big: Store) -> None:
    """Ranges are read by pread: a short read is an error, not a signal."""
    dump(big, 0, {1: 500})
    publish(big, 1)
    assert big.path is not None
    segment = big.segments[0]
    stream = segment.streams[0]
    size = (big.path / "blocks.bin").stat().st_size
    place = places(big.path)[max(name for name in places(big.path) if name[:1] == b"r")]
    os.truncate(big.path / "blocks.bin", place.offset + 100)
    with pytest.raises(CorruptBlockError, match=r"is cut short, as blocks.bin ends at byte"):
        big.read(segment, 0, 0, stream.num_pieces, np.empty(int(stream.piece_offset_P[-1]), np.uint8))
    os.truncate(big.path / "blocks.bin", size)


def test_verify_names_the_damage_where_no_block_of_keys_is_whole(big: Store) -> None:
    """With nothing left to compare, what was found stands."""
    dump(big, 0, {1: 400})
    publish(big, 1)
    big.close()
    assert big.path is not None
    with (big.path / "blocks.bin").open("r+b") as file:
        for place in [place for name, place in places(big.path).items() if name[:1] == b"k"]:
            file.seek(place.offset)
            file.write(bytes([255]) * place.size)
    assert any("has checksum" in problem for problem in verify(big.path)["problems"])


def test_random_damage_never_kills_the_process_that_verifies(big: Store) -> None:
    """Bytes overwritten anywhere, in trees too: a report or an error in words."""
    for visit in range(4):
        dump(big, visit, {visit + 4: 50, visit + 6: 20})
        publish(big, visit + 1, bytes(3000))
    big.close()
    assert big.path is not None
    generator = np.random.default_rng(0)
    for name in ("data.mdb", "blocks.bin", "data.mdb"):
        data = big.path / name
        whole = data.read_bytes()
        damaged = bytearray(whole)
        for _ in range(20):
            place = int(generator.integers(0, len(whole) // 4096)) * 4096 + int(generator.integers(0, 64))
            damaged[place] ^= int(generator.integers(1, 256))
        data.write_bytes(bytes(damaged))
        assert isinstance(verify(big.path)["problems"], list)
        data.write_bytes(whole)
