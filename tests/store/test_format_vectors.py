"""The example bytes in docs/format equal the bytes that the store writes."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.store.independent_files import read_entry
from tests.store.independent_format import key_hash, ranges_of, read_arrays, read_record
from tests.store.independent_format import xxh64 as independent_xxh64
from tiercache.store import SGD, Cursor, Table, Zeros
from tiercache.store.bits import hash_keys, xxh64
from tiercache.store.commit import Commit, Kept, RankList, State, head_of
from tiercache.store.engines.block_file import Extents
from tiercache.store.engines.engine import Head
from tiercache.store.engines.lmdb_map import Slot, entry_of
from tiercache.store.key_map import KeyMap, map_entries
from tiercache.store.layout import CHANGED, KEYS, ROWS, SegmentLayout
from tiercache.store.records import describe
from tiercache.store.segment import Live
from tiercache.store.table import group_tables

PAGES = Path(__file__).parents[2] / "docs/format"
TABLE = Table(name="item", dim=2, optimizer=SGD(learning_rate=1.0), initializer=Zeros())


def page(name: str) -> str:
    return (PAGES / name).read_text()


def commit() -> Commit:
    """Return the commit in store.md."""
    state = State("states/0.7", 3, 4 << 20, np.array([1], np.uint32))
    live = Live.zeros(0, group_tables([TABLE]))
    return Commit(
        id=7, cursor=Cursor(8, 0), schedule_digest="d" * 64, settings={}, environment={}, tables=(TABLE,), retention=2,
        own=RankList(rank=0, next_segment=4, segments=(), first_commits=(), live=live, state=state),
        pins={"best": 6}, kept=(Kept(6, Head("commits/6", 900, "c" * 64)),), abandoned=((4, 5),), parent="c" * 64,
        ranks=(Head("ranks/0.7", 500, "b" * 64),),
    )  # fmt: skip


def test_the_bytes_of_a_commit_are_those_of_the_format() -> None:
    """Magic, size of the header, header, checksum; and their digest."""
    (shown,) = re.findall(r"```json\n(.*?)```", page("store.md"), re.DOTALL)
    header = shown.replace("\n", "").encode()
    expected = b"TCR1" + bytes.fromhex("c4020000") + header + bytes.fromhex("a14d559e")
    assert commit().to_bytes() == expected
    values, _ = read_record("commit", expected)
    assert values == json.loads(header)["values"]
    assert len(header) == 708
    digest = hashlib.sha256(expected).hexdigest()
    assert head_of("commits/7", expected) == Head("commits/7", 720, digest)
    assert digest in page("store.md")


def test_a_slot_of_head_is_that_of_the_format(tmp_path: Path) -> None:
    """A new file has publish 5 in its second slot; a drop makes both slots the same."""
    digest = hashlib.sha256(b"commit 5")
    made = Slot(5, digest.hexdigest())
    made.create(tmp_path)
    (checksum,) = re.findall(r"`commit 5` the last four bytes are `([0-9a-f ]+)`", page("lmdb.md"))
    slot = b"tc head\n" + (5).to_bytes(8, "little") + digest.digest() + bytes.fromhex(checksum)
    assert (tmp_path / "HEAD").read_bytes() == bytes(4096) + slot.ljust(4096, b"\0")
    made.write(tmp_path, other=True)
    assert (tmp_path / "HEAD").read_bytes() == slot.ljust(4096, b"\0") * 2


def test_an_entry_of_the_map_is_that_of_the_format() -> None:
    """Size, dropped bytes, two extents, and a checksum over the name too."""
    numbers = np.array([10_000, 4096, 81_920, 4096, 204_800, 4096], "<i8")
    (checksum,) = re.findall(r"numbers are followed by `([0-9a-f ]+)`", page("lmdb.md"))
    expected = numbers.tobytes() + bytes.fromhex(checksum)
    name = "segments/0.4/0/keys"
    assert entry_of(name, Extents(10_000, 4096, ((81_920, 4096), (204_800, 4096)))) == expected
    assert read_entry(name.encode(), expected) == (10_000, 4096, [(81_920, 4096), (204_800, 4096)])
    with pytest.raises(AssertionError):
        read_entry(b"segments/0.5/0/keys", expected)


def test_blocks_in_blobs_begin_where_the_format_says() -> None:
    """The example in store.md: 24 bytes per row, 170 rows per block, and a last block of 10 rows."""
    layout = SegmentLayout(
        row_bytes=24, page_rows=10, block_bytes=24 * 170, next_use_R=np.array([1]), table_rows_RT=np.array([[350]])
    )
    strides = {ROWS: 4080 + 16, KEYS: 1360 + 2736, CHANGED: 680 + 3416}
    for kind, stride in strides.items():
        assert [layout.byte_in_blob(kind, block) for block in range(3)] == [0, stride, 2 * stride]
    assert {kind: layout.blob_bytes(kind) for kind in strides} == {
        ROWS: 2 * 4096 + 240, KEYS: 2 * 4096 + 80, CHANGED: 2 * 4096 + 40
    }  # fmt: skip
    for number in ("4,080", "16 zeros", "1,360", "2,736"):
        assert number in page("store.md")


def test_a_key_map_is_that_of_the_format() -> None:
    """Five keys in one range and three in another, each in hash order; every key is found in its range."""
    keys = {0: [0, 4, 2, 1, 3], 1: [7, 5, 6]}
    layout = SegmentLayout(
        row_bytes=8, page_rows=4, block_bytes=80, next_use_R=np.array([3, 4]), table_rows_RT=np.array([[5], [3]])
    )
    hashes = hash_keys(np.array([*keys[0], *keys[1]], np.int64), TABLE.table_id)
    made = KeyMap.of(layout, hashes.astype(np.uint32), map_entries)
    assert made is not None
    (shown,) = re.findall(r"and `map` is\n`([0-9a-f ]+)`", page("store.md"))
    arrays = {f"{name}/0": array for name, array in made.arrays().items()}
    assert made.to_record() == [1, 1, 2]
    assert (arrays["map_starts/0"].tolist(), arrays["map_counts/0"].tolist()) == ([0], [6, 2])
    assert arrays["map/0"].tobytes() == bytes.fromhex(shown)
    for range_, members in keys.items():
        assert all(ranges_of(key_hash(key, "item"), [1, 1, 2], arrays, 0) == [range_] for key in members)
    assert not any(ranges_of(key_hash(key, "item"), [1, 1, 2], arrays, 0) for key in range(8, 100))


@pytest.mark.parametrize("name", ["", "item", "user", "größe", "JFK", "a name of more than sixteen"])
def test_the_hashes_of_the_independent_reader_are_those_of_the_store(name: str) -> None:
    assert independent_xxh64(name.encode()) == xxh64(name.encode())


def test_arrays_after_a_head_are_cut_into_chunks_and_checked() -> None:
    """Each has its own chunks, and zeros up to a multiple of 8 bytes follow it."""
    arrays = {"a": np.arange(5000, dtype=np.uint32), "b": np.arange(3, dtype=np.uint8), "c": np.arange(2, dtype="<u8")}
    described, parts, sums = describe(arrays)
    data = np.concatenate(parts)
    assert (data.size, sums.size) == (20_000 + 8 + 16, 2 + 1 + 1)
    found = read_arrays(described, sums, data.tobytes())
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())
    for at in (0, 16_384, 20_002, 20_010):
        data[at] ^= 1
        with pytest.raises(AssertionError):
            read_arrays(described, sums, data.tobytes())
        data[at] ^= 1
