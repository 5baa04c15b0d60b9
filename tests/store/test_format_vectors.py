"""The bytes that docs/format shows as examples are those that the store writes."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.store import independent_files
from tiercache.store import SGD, Cursor, Table, Zeros
from tiercache.store.commit import Commit, Kept, RankList, State, head_of
from tiercache.store.engines.block_file import Extents
from tiercache.store.engines.engine import Head
from tiercache.store.engines.lmdb_records import Slot, entry_of
from tiercache.store.layout import CHANGED, KEYS, ROWS, SegmentLayout
from tiercache.store.live import Live
from tiercache.store.table import group_tables

PAGES = Path(__file__).parents[2] / "docs/format"
TABLE = Table(name="item", dim=2, optimizer=SGD(learning_rate=1.0), initializer=Zeros())


def page(name: str) -> str:
    """Return a page of the format."""
    return (PAGES / name).read_text()


def commit() -> Commit:
    """Return the commit that store.md shows."""
    state = State("states/0.7", 3, 4 << 20, np.array([1], np.uint32))
    own = RankList(
        rank=0, next_segment=4, segments=(), first_commits=(), live=Live.zeros(0, group_tables([TABLE])), state=state
    )
    return Commit(
        id=7,
        cursor=Cursor(8, 0),
        schedule_digest="d" * 64,
        settings={},
        environment={},
        tables=(TABLE,),
        retention=2,
        own=own,
        pins={"best": 6},
        kept=(Kept(6, Head("commits/6", 900, "c" * 64)),),
        abandoned=((4, 5),),
        parent="c" * 64,
        ranks=(Head("ranks/0.7", 500, "b" * 64),),
    )


def test_the_bytes_of_a_commit_are_those_of_the_format() -> None:
    """Magic, size of the header, header, checksum."""
    (shown,) = re.findall(r"```json\n(.*?)```", page("store.md"), re.DOTALL)
    header = shown.replace("\n", "").encode()
    expected = b"TCR1" + bytes.fromhex("a1020000") + header + bytes.fromhex("7bc67594")
    assert commit().to_bytes() == expected
    values, _ = independent_files.read_record("commit", expected)
    assert values == json.loads(header)["values"]
    assert len(header) == 673


def test_the_digest_of_a_commit_is_that_of_its_blob() -> None:
    """In the pages of stores and of shards."""
    data = commit().to_bytes()
    digest = hashlib.sha256(data).hexdigest()
    assert head_of("commits/7", data) == Head("commits/7", 685, digest)
    assert digest in page("store.md")
    assert digest in page("shards.md")


def test_a_slot_of_head_is_that_of_the_format(tmp_path: Path) -> None:
    """Publish 5 is in the second slot; the first one is empty."""
    digest = hashlib.sha256(b"commit 5")
    Slot(5, digest.hexdigest()).create(tmp_path)
    data = (tmp_path / "HEAD").read_bytes()
    slot = b"tc head\n" + (5).to_bytes(8, "little") + digest.digest()
    (checksum,) = re.findall(r"`commit 5` the last four bytes are `([0-9a-f ]+)`", page("lmdb.md"))
    assert len(data) == 8192
    assert data[4096 : 4096 + 52] == slot + bytes.fromhex(checksum)
    assert not any(data[:4096] + data[4096 + 52 :])


def test_an_entry_of_the_map_is_that_of_the_format() -> None:
    """Size, dropped bytes, two extents, and a checksum over the name too."""
    numbers = np.array([10_000, 4096, 81_920, 4096, 204_800, 4096], "<i8")
    (checksum,) = re.findall(r"numbers are followed by `([0-9a-f ]+)`", page("lmdb.md"))
    expected = numbers.tobytes() + bytes.fromhex(checksum)
    name = "segments/0.4/0/keys"
    assert entry_of(name, Extents(10_000, 4096, ((81_920, 4096), (204_800, 4096)))) == expected
    assert independent_files.read_entry(name.encode(), expected) == (10_000, 4096, [(81_920, 4096), (204_800, 4096)])
    with pytest.raises(AssertionError):
        independent_files.read_entry(b"segments/0.5/0/keys", expected)


def test_blocks_in_blobs_begin_where_the_format_says() -> None:
    """The example of store.md: 24 bytes a row, 170 rows a block, and a last block of 10 rows."""
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
