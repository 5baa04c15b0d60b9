"""Records with damage, or with values that no store writes, are refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.store.conftest import small_tables
from tests.store.damage import records_of, sealed
from tests.store.rewritten import Change
from tests.store.world import World
from tiercache.store import CorruptStoreError, MemoryEngine, Segment, Store
from tiercache.store.commit import CommitRecord, RankList
from tiercache.store.records import ArrayPlace, ChunkCache, PagedArrays, decode, encode
from tiercache.store.segment import GroupMeta, meta_from_bytes
from tiercache.store.table import group_tables

ARRAYS = {"a": np.arange(5, dtype=np.uint32), "b": np.array([-1, 2**62]), "c": np.zeros(0, np.int64)}
RECORD = encode("test", {"x": [1, "ü", None]}, ARRAYS)


def test_a_record_gives_values_and_arrays_back() -> None:
    values, arrays = decode("test", RECORD, "it")
    assert values == {"x": [1, "ü", None]}
    assert list(arrays) == ["a", "b", "c"]
    for name, array in ARRAYS.items():
        assert np.array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype


@given(st.integers(0, len(RECORD) - 1), st.integers(1, 255))
def test_any_changed_byte_and_any_shorter_length_is_refused(place: int, change: int) -> None:
    """By the record's name."""
    for data in (RECORD[:place] + bytes([RECORD[place] ^ change]) + RECORD[place + 1 :], RECORD[:place]):
        with pytest.raises(CorruptStoreError, match=r"^it "):
            decode("test", data, "it")


@pytest.mark.parametrize(
    "data",
    [
        sealed(b"{}"),
        sealed(b"[1"),
        sealed(b"\xff\xfe"),
        sealed(b"{}", header_bytes=2**31),
        sealed(b'{"kind":"other","values":{},"arrays":[]}'),
        sealed(b'{"kind":"test","values":[],"arrays":[]}'),
        sealed(b'{"kind":"test","values":{},"arrays":{}}'),
        sealed(b'{"kind":"test","values":{},"arrays":[["a","<u4",1]]}'),
        sealed(b'{"kind":"test","values":{},"arrays":[["a","<u4",-1]]}'),
        sealed(b'{"kind":"test","values":{},"arrays":[["a","<u4",99999999999999]]}'),
        sealed(b'{"kind":"test","values":{},"arrays":[["a","|O",1]]}', b"12345678"),
        sealed(b'{"kind":"test","values":{},"arrays":["a"]}'),
        sealed(b'{"kind":"test","values":{},"arrays":[]}', b"more"),
    ],
)
def test_sizes_are_checked_before_they_are_used(data: bytes) -> None:
    """Though the checksum is right; objects are never created from bytes."""
    with pytest.raises(CorruptStoreError, match=r"^it "):
        decode("test", data, "it")


@pytest.mark.parametrize("values", [{"x": float("nan")}, {"x": float("inf")}])
def test_values_that_json_has_no_word_for_are_refused(values: dict[str, Any]) -> None:
    """Rather than written in a form that others cannot read."""
    with pytest.raises(ValueError, match="JSON compliant"):
        encode("test", values, {})


# -- contents of commit records ------------------------------------------------------------------------------------

GROUPS = group_tables(small_tables())


def of_a_store() -> dict[str, bytes]:
    """Return the newest commit of a store, its rank list, and the head of a segment's metadata."""
    world, engine = World(small_tables()), MemoryEngine()
    with Store.open(None, tables=world.tables, engine=engine, retention=2) as store:
        world.run(store, 3)
        records, commit, segment = records_of(engine), store.commit, store.segments[-1]
        description = records[segment.meta_blob.name][: segment.head_bytes]
        return {"commit": records[commit.head.name], "rank": records[commit.ranks[0].name], "segment": description}


WHOLE = of_a_store()


def changed(kind: str, change: Change) -> bytes:
    """Return a record of the store with a change of its values or arrays."""
    values, arrays = decode(kind, WHOLE[kind], "it")
    arrays = {name: array.copy() for name, array in arrays.items()}
    change(values, arrays)
    return encode(kind, values, arrays)


def having(**values: Any) -> Change:
    """Return a change of values."""
    return lambda before, _: before.update(values)


def read_rank(data: bytes) -> RankList:
    return RankList.from_bytes(data, GROUPS, Segment, "it")


def at(place: int, value: Any) -> Change:
    """Return a change of one value in a rank list's first segment."""
    return lambda values, _: values["segments"][0].__setitem__(place, value)


def number(name: str, value: int) -> Change:
    """Return a change of the first number of an array."""

    def change(_: object, arrays: dict[str, NDArray[Any]]) -> None:
        arrays[name] = arrays[name].astype(np.int64)
        arrays[name][0] = value

    return change


def without(name: str) -> Change:
    return lambda _, arrays: arrays.pop(name)


BAD_RANKS: dict[str, Change] = {
    "a state that is shorter than its checksums": lambda values, _: values["state"].__setitem__(1, 0),
    "a state that is longer": lambda values, _: values["state"].__setitem__(1, 5 << 20),
    "parts of the state of no bytes": lambda values, _: values["state"].__setitem__(2, 0),
    "no state": lambda values, _: values.pop("state"),
    "another number of tables": having(tables=4),
    "another number of groups": having(groups=3),
    "no list of segments": having(segments=3),
    "a segment less": lambda values, _: values["segments"].pop(),
    "a segment twice": lambda values, _: values["segments"].__setitem__(1, values["segments"][0]),
    "a segment that is yet to come": having(next_segment=1),
    "an id that is none": at(0, -1),
    "a pass that no schedule has": at(2, 1 << 63),
    "a pass before the first base": at(2, -(1 << 63) - 1),
    "a pass that is not a number": at(2, "0"),
    "a pass that is a truth": at(2, True),
    "half a pass": at(2, 0.5),
    "a first commit that is none": at(4, -1),
    "a size that is none": at(5, -1),
    "a digest that is none": at(-1, "x"),
    "more rows that are live than there are": number("live", 1 << 40),
    "more rows than any segment has": number("rows", 1 << 50),
    "fewer rows than none": number("rows", -1),
    "blocks of no rows": number("block_rows", 0),
    "a segment that is not there": number("live_segments", 99),
    "a table that is not there": number("live_tables", 99),
    "a table before the first": number("live_tables", -99),
    "more stale rows than live ones": lambda _, arrays: arrays.update(
        stale_at=np.array([0]), stale=arrays["live"][:1] + np.uint32(1)
    ),
    "stale rows of nothing": lambda _, arrays: arrays.update(stale_at=np.array([10**6]), stale=np.array([1])),
    "no next uses": without("next_uses"),
    "no live rows": without("live"),
}


def test_the_pass_of_a_base_counts_from_minus_one_down() -> None:
    """It has the same limit as a dump's counting up."""

    def limits(values: dict[str, Any], _: object) -> None:
        values["segments"][0][2], values["segments"][1][2] = -(1 << 63), (1 << 63) - 1

    passes = [segment.pass_index for segment in read_rank(changed("rank", limits)).segments]
    assert passes[:2] == [-(1 << 63), (1 << 63) - 1]


def test_counts_take_four_bytes_as_long_as_they_fit() -> None:
    """And eight after that: both can be read."""
    _, arrays = decode("rank", WHOLE["rank"], "it")
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.uint32)}
    rank = read_rank(WHOLE["rank"])
    assert rank.to_bytes() == WHOLE["rank"]
    rank.live.row_bytes_SG[:] = 1 << 33
    _, arrays = decode("rank", rank.to_bytes(), "it")
    assert arrays["row_bytes"].dtype == np.int64
    assert (read_rank(rank.to_bytes()).live.row_bytes_SG == 1 << 33).all()


BAD_COMMITS = {
    "no ranks": having(ranks=[]),
    "a rank of no digest": having(ranks=[["ranks/0.1", 3, "x"]]),
    "half a rank": having(ranks=[["ranks/0.1", 3]]),
    "half an abandoned range": having(abandoned=[[1]]),
    "half a cursor": having(cursor=[1]),
    "settings that are none": having(settings=3),
    "no retention": having(retention=0),
    "a kept commit that is newer": having(kept=[[9, "commits/9", 3, "0" * 64]]),
    "a kept commit twice": having(kept=[[0, "commits/0", 3, "0" * 64]] * 2),
    "half a kept commit": having(kept=[[1, "commits/1"]]),
    "a pin of a commit that is not kept": having(pins={"best": 0}),
    "pins that are not names": having(pins=[["best", 2]]),
    "a parent that is none": having(parent="x"),
    "tables that are none": having(tables=[]),
    "an id that is none": having(id=-1),
}


BAD_DESCRIPTIONS: dict[str, Change] = {
    "another segment": having(id=7),
    "no layouts": having(layouts=None),
    "a layout less": lambda values, _: values["layouts"].pop(),
    "no maps": having(maps=[]),
    "bits of a map that is not there": lambda values, _: values["maps"].__setitem__(0, [60, 60, 1]),
    "rows of no bytes": lambda values, _: values["layouts"][0].update(row_bytes=0),
    "an array of objects": lambda values, _: values["arrays"][0].__setitem__(1, "|O"),
    "an array of a number more": lambda values, _: values["arrays"][0].__setitem__(2, values["arrays"][0][2] + 1),
    "an array less": lambda values, _: values["arrays"].pop(),
    "ranges that fall": lambda _, arrays: arrays.update({"next_use/0": arrays["next_use/0"][::-1]}),
    "rows of a range more": lambda _, arrays: arrays.update({"table_rows/0": np.append(arrays["table_rows/0"], 3)}),
    "fewer rows than none": lambda _, arrays: arrays.update({"table_rows/0": -arrays["table_rows/0"].astype(np.int64)}),
    "no next uses": without("next_use/0"),
    "a chunk less": lambda _, arrays: arrays.update(chunks=arrays["chunks"][1:]),
}


def read_description(data: bytes) -> tuple[GroupMeta, ...]:
    """Read the head of segment metadata, without the arrays after it."""

    def arrays_of(places: dict[str, ArrayPlace], checksums: NDArray[np.uint32]) -> PagedArrays:
        return PagedArrays("it", places, checksums, lambda *_: None, ChunkCache(), "it")

    return meta_from_bytes(data, 2, "it", arrays_of)


KINDS: dict[str, tuple[Callable[[bytes], object], dict[str, Change]]] = {
    "rank": (read_rank, BAD_RANKS),
    "commit": (lambda data: CommitRecord.from_bytes(data, "it"), BAD_COMMITS),
    "segment": (read_description, BAD_DESCRIPTIONS),
}


@pytest.mark.parametrize(("kind", "what"), [(kind, what) for kind, (_, bad) in KINDS.items() for what in bad])
def test_a_record_that_says_what_cannot_be_is_refused(kind: str, what: str) -> None:
    """When a store is opened, before anything that it describes is read."""
    read, bad = KINDS[kind]
    read(WHOLE[kind])
    with pytest.raises(CorruptStoreError, match=r"^it cannot be read .*: restore the store"):
        read(changed(kind, bad[what]))
