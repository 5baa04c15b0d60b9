"""What is special about LMDB: places in the file, full disks, damage, growth."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np
import pytest

from tiercache.store import (
    Adagrad,
    BlockReadError,
    CorruptBlockError,
    CorruptStoreError,
    Cursor,
    LmdbEngine,
    Range,
    Store,
    StoreFullError,
    Stream,
    Table,
    Zeros,
    hash_keys,
    verify,
)
from tiercache.store.lmdb_file import LmdbFile, Place

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
BIG = Table(name="big", dim=256, optimizer=Adagrad(learning_rate=0.1), initializer=Zeros())


def dump(store: Store, visit: int, rows: dict[int, int], *, block_bytes: int = 1 << 17) -> dict[int, bytes]:
    """Append rows of made-up bits, counted by next use; return the bytes of each range."""
    stream = Stream(
        row_bytes=BIG.row_bytes,
        piece_rows=8,
        block_bytes=block_bytes,
        ranges=tuple(Range(next_use=use, table_rows=(n,)) for use, n in sorted(rows.items())),
    )
    data = np.random.default_rng(visit).integers(0, 256, stream.rows * BIG.row_bytes, dtype=np.uint8)
    keys = np.arange(stream.rows, dtype=np.int64) + 100_000 * visit
    for low, high in pairwise(stream.range_first_row_R.tolist()):
        keys[low:high] = keys[low:high][np.argsort(hash_keys(keys[low:high], BIG.table_id))]
    cuts = [int(n) for n in stream.block_first_row_B]
    store.append(
        visit,
        [stream],
        (
            (0, b, data[cuts[b] * BIG.row_bytes : cuts[b + 1] * BIG.row_bytes], keys[cuts[b] : cuts[b + 1]])
            for b in range(stream.num_blocks)
        ),
        transaction_bytes=1 << 20,
    )
    first = stream.range_first_row_R * BIG.row_bytes
    return {r.next_use: data[first[i] : first[i + 1]].tobytes() for i, r in enumerate(stream.ranges)}


def publish(store: Store, visit: int, state: bytes = b"") -> None:
    """Commit before ``visit``."""
    store.publish(Cursor(visit, 0), state=state, schedule_digest="", settings={}, environment={})


def load(store: Store, visit: int) -> dict[int, bytes]:
    """Read every live range with next use ``visit``, by segment id."""
    loaded = {}
    for segment in store.segments:
        stream = segment.streams[0]
        for index in range(store.first_range(segment, 0), len(stream.ranges)):
            if stream.ranges[index].next_use == visit:
                low, high = stream.pieces_of(index)
                out = np.empty(int(stream.piece_offset_P[high] - stream.piece_offset_P[low]), np.uint8)
                store.read(segment, 0, low, high, out)
                loaded[segment.visit] = out.tobytes()
    return loaded


@pytest.fixture
def big(tmp_path: Path) -> Iterator[Store]:
    """A store of one table with rows of 2 KiB."""
    store = Store.open(tmp_path / "big.tc", tables=[BIG])
    yield store
    store.close()


def test_ranges_come_back_from_their_places_in_the_file(big: Store) -> None:
    """Large values, through several epochs of freeing and reuse, and after a reopen."""
    stored: dict[int, dict[int, bytes]] = {}
    for visit in range(12):
        stored[visit] = dump(big, visit, {visit + 1: 100, visit + 2: 60, visit + 4: 130})
        publish(big, visit + 1)
        expected = {v: ranges[visit + 1] for v, ranges in stored.items() if visit + 1 in ranges}
        assert load(big, visit + 1) == expected
    assert big.path is not None
    big.close()
    with Store.open(big.path) as again:
        assert load(again, 12) == expected
        assert set(load(again, 13)) == {v for v, ranges in stored.items() if 13 in ranges}


def test_the_file_tells_where_lmdb_keeps_each_value(tmp_path: Path) -> None:
    """For values of all sizes, in trees of several levels: the same keys, and the same bytes at their places."""
    generator = np.random.default_rng(0)
    values = {f"{i:05d}".encode(): generator.bytes(int(generator.integers(1, 9000))) for i in range(1500)}
    with lmdb.open(str(tmp_path), map_size=1 << 26, sync=False) as environment:
        for _ in range(3):
            with environment.begin(write=True) as txn:
                for key, value in values.items():
                    txn.put(key, value)
            for key in list(values)[::7]:
                with environment.begin(write=True) as txn:
                    txn.delete(key)
                del values[key]
    file = LmdbFile(str(tmp_path / "data.mdb"))
    meta = file.metas()[0]
    file.check_free_pages(meta)
    found = {key: os.pread(file.handle, place.size, place.offset) for key, place in file.values(meta)}
    assert found == values
    assert list(found) == sorted(values)
    middle = [key for key in values if b"00300" <= key < b"00900"]
    assert [key for key, _ in file.values(meta, b"00300", b"00900")] == sorted(middle)
    file.close()


READ_ALL = """
import re, sys
import numpy as np
from tiercache.store import Store

store = Store.open(sys.argv[1], mode="r")
stream = store.segments[0].streams[0]
out = np.ones(int(stream.piece_offset_P[-1]), np.uint8)
store.read(store.segments[0], 0, 0, stream.num_pieces, out)
maps = open("/proc/self/smaps").read().split("data.mdb")[1:]
print(sum(int(re.search(r"Rss: +([0-9]+) kB", part)[1]) for part in maps))
"""


def test_no_read_touches_the_map(big: Store) -> None:
    """Opening a store and loading a segment maps in pages of the tree, and none of 16 MB of rows."""
    for visit in range(4):
        dump(big, visit, {visit + 4: 2000})
    publish(big, 4)
    big.close()
    command = [sys.executable, "-c", READ_ALL, str(big.path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert int(said) < 1000


def test_a_reader_beside_the_writer_sees_whole_blocks(big: Store) -> None:
    """Ranges read on one thread while another dumps, commits and frees are always what was written."""
    stored = {v: dump(big, v, {40 + v: 64, v + 1: 64}) for v in range(3)}
    publish(big, 3)
    kept = [segment for segment in big.segments if segment.visit < 3]
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                for segment in kept:
                    stream = segment.streams[0]
                    low, high = stream.pieces_of(len(stream.ranges) - 1)
                    out = np.empty(int(stream.piece_offset_P[high] - stream.piece_offset_P[low]), np.uint8)
                    big.read(segment, 0, low, high, out)
                    assert out.tobytes() == stored[segment.visit][40 + segment.visit]
        except BaseException as error:  # shown in the main thread
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for visit in range(3, 30):
        dump(big, visit, {visit + 1: 64, visit + 3: 200})
        publish(big, visit + 1)
    done.set()
    reader.join()
    assert not failures, failures


def test_a_reading_store_stays_at_its_commit(big: Store, tmp_path: Path) -> None:
    """Another process sees the commit that was newest when it opened, whole, however far the writer goes."""
    stored = dump(big, 0, {1: 100, 2: 100})
    publish(big, 1, b"one")
    code = (
        "import sys, numpy as np\n"
        "from tiercache.store import Store\n"
        "s = Store.open(sys.argv[1], mode='r')\n"
        "print('open', flush=True)\n"
        "sys.stdin.readline()\n"
        "g = s.segments[0].streams[0]\n"
        "out = np.ones(int(g.piece_offset_P[-1]), np.uint8)\n"
        "s.read(s.segments[0], 0, 0, g.num_pieces, out)\n"
        "sys.stdout.write(s.state().decode() + ' ' + str(s.commit.id) + ' ' + str(int(out.astype(np.int64).sum())))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(big.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "open\n"
        for visit in range(1, 12):
            dump(big, visit, {visit + 1: 100, visit + 2: 100})
            publish(big, visit + 1, b"later")
        said, _ = reader.communicate("go\n")
    total = sum(sum(data) for data in stored.values())
    assert said == f"one 0 {total}"


def test_a_map_that_is_full_is_a_sentence_and_the_commit_stands(tmp_path: Path) -> None:
    """With the bytes needed and what to raise; the store goes on after forgetting, and after a reopen."""
    store = Store.open(tmp_path / "s", tables=[BIG], map_bytes=8 << 20)
    stored = dump(store, 0, {1: 500})
    publish(store, 1, b"state")
    with pytest.raises(
        StoreFullError, match=r"the dump of visit 1 to the store at .* needs .* raise map_bytes"
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
    size = (big.path / "data.mdb").stat().st_size
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
        with Store.open(place / "s", tables=[BIG], map_bytes=1 << 30) as store:
            stored = dump(store, 0, {1: 500})
            publish(store, 1, b"state")
            words = r"needs [\d,]+ more bytes but the file system of .* has [\d,]+ free: free some"
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


def places(path: Path) -> dict[bytes, Place]:
    """Return the places of blocks in the file."""
    file = LmdbFile(str(path / "data.mdb"))
    found = {key[1:]: place for key, place in file.values(file.metas()[0], b"b", b"c")}
    file.close()
    return found


@pytest.mark.parametrize("kind", [b"r", b"k", b"s"])
def test_a_flipped_byte_is_refused_on_load_and_found_by_verify(big: Store, kind: bytes) -> None:
    """In rows, in keys and in the dense state; the sentence names block, segment and table."""
    dump(big, 0, {1: 500})
    publish(big, 1, bytes(10_000))
    big.close()
    assert big.path is not None
    place = next(place for name, place in sorted(places(big.path).items()) if name[:1] == kind)
    with (big.path / "data.mdb").open("r+b") as file:
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


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.9, 1.0])
def test_a_truncated_file_is_a_sentence_before_anything_is_read(big: Store, share: float) -> None:
    """At any length: an error in words when it is opened, by any mode and by verify; never a signal."""
    for visit in range(3):
        dump(big, visit, {visit + 3: 300})
        publish(big, visit + 1, bytes(10_000))
    big.close()
    assert big.path is not None
    end = max(place.offset + place.size for place in places(big.path).values())
    os.truncate(big.path / "data.mdb", int((end - 1) * share))
    for mode in ("a", "r"):
        with pytest.raises(CorruptStoreError, match=r"data.mdb .*: restore the store from a copy"):
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
    size = (big.path / "data.mdb").stat().st_size
    place = places(big.path)[max(name for name in places(big.path) if name[:1] == b"r")]
    os.truncate(big.path / "data.mdb", place.offset + 100)
    with pytest.raises(CorruptBlockError, match=r"is cut short, as data.mdb ends at byte"):
        big.read(segment, 0, 0, stream.num_pieces, np.empty(int(stream.piece_offset_P[-1]), np.uint8))
    os.truncate(big.path / "data.mdb", size)


def test_random_damage_never_kills_the_process_that_verifies(big: Store) -> None:
    """Bytes overwritten anywhere, in trees too: a report or an error in words."""
    for visit in range(4):
        dump(big, visit, {visit + 4: 50, visit + 6: 20})
        publish(big, visit + 1, bytes(3000))
    big.close()
    assert big.path is not None
    data = big.path / "data.mdb"
    whole = data.read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(3):
        damaged = bytearray(whole)
        for _ in range(20):
            place = int(generator.integers(0, len(whole) // 4096)) * 4096 + int(generator.integers(0, 64))
            damaged[place] ^= int(generator.integers(1, 256))
        data.write_bytes(bytes(damaged))
        assert isinstance(verify(big.path)["problems"], list)


def test_a_block_that_is_not_there_is_an_error_in_words(tmp_path: Path) -> None:
    """So are bytes beyond its end."""
    engine = LmdbEngine(tmp_path, create=True)
    engine.write([(b"a", np.zeros(10_000, np.uint8)), (b"b", np.zeros(10, np.uint8))])
    for name, size, words in ((b"c", 1, "is missing"), (b"a", 10_001, "ends at byte 10,000"), (b"b", 11, "ends at")):
        with pytest.raises(BlockReadError, match=words):
            engine.read(name, 0, np.empty(size, np.uint8))
    engine.close()


def test_a_write_that_fails_half_way_writes_nothing(tmp_path: Path) -> None:
    """All blocks of a transaction or none."""
    engine = LmdbEngine(tmp_path, create=True)

    def blocks() -> Iterator[tuple[bytes, Any]]:
        yield b"a", np.zeros(10_000, np.uint8)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        engine.write(blocks())
    assert engine.contents().blocks == {}
    engine.write([(b"a", np.ones(10_000, np.uint8))])
    assert engine.contents().blocks == {b"a": 10_000}
    engine.close()


def test_the_file_stops_growing(big: Store) -> None:
    """A cycle of visits with mixed next uses, 22 epochs of it: from the third on, the file has the same length."""
    generator = np.random.default_rng(0)
    passes = 4
    rows = [{gap: int(generator.integers(20, 120)) for gap in range(1, passes + 1)} for _ in range(passes)]
    sizes = []
    assert big.path is not None
    for visit in range(22 * passes):
        dump(big, visit, {visit + gap: n for gap, n in rows[visit % passes].items()})
        publish(big, visit + 1, bytes(50_000))
        if (visit + 1) % passes == 0:
            sizes.append((big.path / "data.mdb").stat().st_size)
    assert set(sizes[2:]) == {sizes[2]}
    live = sum(big._engine.contents().blocks.values())
    assert sizes[-1] < 2.5 * live + (4 << 20)
