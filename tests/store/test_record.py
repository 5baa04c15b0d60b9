"""Manifest records refuse what was not written."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.damage import sealed
from tiercache.store import Commit, CorruptStoreError, Cursor, Segment
from tiercache.store.records import decode, encode

ARRAYS = {"a": np.arange(5, dtype=np.uint32), "b": np.array([-1, 2**62]), "c": np.zeros(0, np.int64)}
RECORD = encode("test", {"x": [1, "ü", None]}, ARRAYS)


def test_a_record_gives_values_and_arrays_back() -> None:
    """With their types and lengths."""
    values, arrays = decode("test", RECORD, "it")
    assert values == {"x": [1, "ü", None]}
    assert list(arrays) == ["a", "b", "c"]
    for name, array in ARRAYS.items():
        assert np.array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype


@given(st.integers(0, len(RECORD) - 1), st.integers(1, 255))
def test_any_changed_byte_and_any_shorter_length_is_refused(place: int, change: int) -> None:
    """In words that name the record."""
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
    """A record that lies with a right checksum is refused too, and no object is ever made of bytes."""
    with pytest.raises(CorruptStoreError, match=r"^it "):
        decode("test", data, "it")


@pytest.mark.parametrize("values", [{"x": float("nan")}, {"x": float("inf")}])
def test_values_that_json_has_no_word_for_are_refused(values: dict[str, Any]) -> None:
    """Rather than written in a way that others cannot read."""
    with pytest.raises(ValueError, match="JSON compliant"):
        encode("test", values, {})


def test_a_segment_record_of_other_checksums_is_refused() -> None:
    """One checksum for each page and block, not more, not fewer."""
    values = {
        "id": 1,
        "pass": 2,
        "within": False,
        "layouts": [{"row_bytes": 4, "page_rows": 2, "block_bytes": 16, "tables": 1}],
    }
    places = np.zeros(1, np.int64)
    good = {
        "next_use/0": np.array([5]), "table_rows/0": np.array([3]), "pages/0": np.zeros(2, np.uint32),
        "key_pages/0": np.zeros(1, np.uint32), "first_keys/0": np.zeros(1, np.int64),
        "rows_at/0": places, "keys_at/0": places,
    }  # fmt: skip
    assert Segment.from_bytes(encode("segment", values, good), "it").rows == 3
    for bad in (
        {**good, "pages/0": np.zeros(3, np.uint32)},
        {**good, "key_pages/0": np.zeros(2, np.uint32)},
        {**good, "first_keys/0": np.zeros(2, np.int64)},
        {**good, "table_rows/0": np.array([3, 1])},
        {**good, "table_rows/0": np.array([-3])},
        {name: array for name, array in good.items() if name != "key_pages/0"},
        {name: array for name, array in good.items() if name != "next_use/0"},
        {**good, "rows_at/0": np.zeros(2, np.int64)},
        {name: array for name, array in good.items() if name != "keys_at/0"},
    ):
        with pytest.raises(CorruptStoreError, match=r"^it "):
            Segment.from_bytes(encode("segment", values, bad), "it")
    with pytest.raises(CorruptStoreError, match=r"^it "):
        Segment.from_bytes(encode("segment", {**values, "layouts": None}, good), "it")


def test_a_commit_record_of_other_state_is_refused() -> None:
    """One checksum for each block of the state."""
    commit = Commit(
        id=1, cursor=Cursor(2, 3), schedule_digest="d", settings={}, environment={}, segment_ids=(1,),
        first_commits=(0,), next_segment=2, retention=1, abandoned=((3, 4),),
        state_bytes=5, state_chunk_bytes=4, state_checksums=np.zeros(2, np.uint32),
        state_places=np.zeros(2, np.int64),
    )  # fmt: skip
    again = Commit.from_bytes(commit.to_bytes(), "it")
    assert (again.cursor, again.segment_ids, [block.size for block in again.state_blocks()]) == (
        Cursor(2, 3),
        (1,),
        [4, 1],
    )
    values, _ = decode("commit", commit.to_bytes(), "it")
    for change in (
        {"state_bytes": 9},
        {"state_chunk_bytes": 0},
        {"segments": [1]},
        {"abandoned": [[1]]},
        {"cursor": [1]},
        {"settings": 3},
    ):
        with pytest.raises(CorruptStoreError, match=r"^it "):
            Commit.from_bytes(encode("commit", {**values, **change}, {"state": np.zeros(2, np.uint32)}), "it")
