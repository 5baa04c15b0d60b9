"""The record of a sharded store: what was written comes back, and anything else is refused in a sentence."""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.ranks.sharded_world import TABLES, placement_on
from tests.store.damage import DEEP, assert_sentence, damaged, generator_of, lie
from tiercache.ranks.part_folder import Mark, delete_part
from tiercache.ranks.record import Record
from tiercache.store import CorruptStoreError, Cursor, FormatVersionError, NotAStoreError, StoreError

if TYPE_CHECKING:
    from pathlib import Path

RECORD = Record(
    id="0123456789abcdef" * 2,
    generation=3,
    engine="zarr",
    retention=2,
    tables=tuple(sorted(TABLES, key=lambda table: table.table_id)),
    placement=placement_on(2).to_record(),
    parts=("part-3-0", "/a disk/ü/part-3-1"),
    cursor=Cursor(7, 40),
    commits=(12, 13),
    obsolete=("part-2-0", "/a disk/part-4-1"),
)
BYTES = RECORD.to_bytes()


def sealed(values: dict[str, Any]) -> bytes:
    """Return a record with a right digest, whatever it says."""
    rest = {name: value for name, value in values.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps(rest | {"digest": hashlib.sha256(text).hexdigest()}).encode()


def changed(**values: Any) -> bytes:
    """Return the record with other values; those that are None are left out."""
    record = json.loads(BYTES) | values
    return sealed({name: value for name, value in record.items() if value is not ...})


def test_a_record_comes_back(tmp_path: Path) -> None:
    """All of it, from bytes and from a file; with a commit and without."""
    for record in (RECORD, Record.from_bytes(changed(cursor=None, commits=[]), "it")):
        assert Record.from_bytes(record.to_bytes(), "it") == record
        record.write(tmp_path)
        assert Record.read(tmp_path) == record
    assert Record.read(tmp_path / "nowhere") is None
    assert RECORD.next_generation == 5
    assert RECORD.at(Cursor(8), [13, 14]).commits == (13, 14)
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (b"", CorruptStoreError, "it is not JSON"),
        (DEEP, CorruptStoreError, "it is not JSON"),
        (b"[]", NotAStoreError, "it is not a sharded store's: give the path"),
        (changed(format="tiercache passes"), NotAStoreError, "it is not a sharded store's"),
        (changed(version=0), FormatVersionError, "it has format version 0 and .* version 1: use the tiercache that"),
        (changed(version=2, parts=7), FormatVersionError, "it has format version 2 and .* version 1: use a newer"),
        (changed(version="new"), FormatVersionError, "it has format version 'new'"),
        (changed(version=True), FormatVersionError, "it has format version True"),
        (changed(other=1), CorruptStoreError, "it has 'other', which this version does not know"),
        (changed(cursor=...), CorruptStoreError, "it lacks 'cursor'"),
        (BYTES.replace(b'"retention": 2', b'"retention": 3'), CorruptStoreError, "does not match its own digest"),
        (changed(id="../x"), CorruptStoreError, r"its id is '\.\./x'"),
        (changed(engine="memory"), CorruptStoreError, "its engine is 'memory'"),
        (changed(retention=0), CorruptStoreError, "it keeps no commit"),
        (changed(parts=[], commits=[]), CorruptStoreError, "it names no part"),
        (changed(parts=["part-3-0", "part-3-0"]), CorruptStoreError, "names 'part-3-0' as part 1 of generation 3"),
        (changed(parts=["part-3-0", "part-2-1"]), CorruptStoreError, "names 'part-2-1' as part 1 of generation 3"),
        (changed(parts=["part-3-0", "../part-3-1"]), CorruptStoreError, "'../part-3-1', which is none of a part"),
        (changed(parts=["part-3-0", "a/part-3-1"]), CorruptStoreError, "'a/part-3-1', which is none of a part"),
        (changed(parts=["part-3-0", "/a/../part-3-1"]), CorruptStoreError, "which is none of a part"),
        (changed(parts=["part-3-0", "/part-3-1\0"]), CorruptStoreError, "it names the folder"),
        (changed(parts=["part-3-0", "/etc"]), CorruptStoreError, "'/etc', which is none of a part"),
        (changed(obsolete=["/home"]), CorruptStoreError, "'/home', which is none of a part"),
        (changed(obsolete=["part-3-5"]), CorruptStoreError, "'part-3-5' both as a part and as what is to be deleted"),
        (changed(commits=[1]), CorruptStoreError, "it names 1 commits of 2 parts"),
        (changed(cursor=None), CorruptStoreError, "it names 2 commits of 2 parts"),
        (changed(cursor=[1]), CorruptStoreError, "it cannot be read"),
        (changed(cursor=[1, -1]), CorruptStoreError, "the sample of a record is -1"),
        (changed(generation=1.0), CorruptStoreError, "the generation of a record is 1.0"),
        (changed(placement=[]), CorruptStoreError, r"its placement is \[\]"),
        (changed(tables=[]), CorruptStoreError, "there are no tables"),
        (changed(tables=[{}]), CorruptStoreError, "a table's record lacks"),
    ],
)
def test_a_record_that_makes_no_sense_is_one_sentence(data: bytes, kind: type[StoreError], words: str) -> None:
    """An older or newer format, unknown fields, folders that lead elsewhere, numbers that cannot be."""
    with pytest.raises(kind, match=words) as error:
        Record.from_bytes(data, "it")
    assert "\n" not in str(error.value)
    assert re.search(": (give|use|restore)", str(error.value))


def test_records_of_any_bytes_are_refused_in_a_sentence() -> None:
    """Random bytes, real ones with damage, and lies under a right digest; what is taken is what it says."""
    refused = 0
    for seed in range(1500):
        generator = generator_of(seed)
        match seed % 3:
            case 0:
                data = generator.bytes(int(generator.integers(0, 300)))
            case 1:
                data = damaged(BYTES, generator)
            case _:
                values = json.loads(BYTES)
                for _ in range(int(generator.integers(1, 3))):
                    lie(values, generator)
                data = sealed(values)
        try:
            record = Record.from_bytes(data, "it")
        except StoreError as error:
            assert_sentence(error)
            refused += 1
        else:
            assert Record.from_bytes(record.to_bytes(), "it") == record
            for part in (*record.parts, *record.obsolete):
                assert re.fullmatch(r"(/.*/|/)?part-\d+-\d+", part)
                assert ".." not in part.split("/")
    assert refused > 1200


def test_marks_of_any_bytes_are_refused_in_a_sentence(tmp_path: Path) -> None:
    """And nothing is deleted that has none, or another store's."""
    folder, mark = tmp_path / "part-0-0", Mark(store="ab" * 16, generation=0, rank=0)
    mark.make(folder)
    folder.mkdir()
    (folder / "rows").touch()
    whole = (tmp_path / "part-0-0.json").read_bytes()
    for seed in range(300):
        data = damaged(whole, generator_of(seed))
        (tmp_path / "part-0-0.json").write_bytes(data)
        try:
            found = Mark.read(folder)
        except StoreError as error:
            assert_sentence(error)
        else:
            assert found is not None
        if json_of(data).get("store") != mark.store:
            try:
                delete_part(folder, mark.store)
            except StoreError as error:
                assert_sentence(error)
            assert (folder / "rows").exists()
    (tmp_path / "part-0-0.json").unlink()
    delete_part(folder, mark.store)
    assert (folder / "rows").exists()
    (tmp_path / "part-0-0.json").write_bytes(whole)
    delete_part(folder, mark.store)
    delete_part(folder, mark.store)
    assert not list(tmp_path.iterdir())


def json_of(data: bytes) -> dict[str, Any]:
    """Return the object that bytes are, an empty one where they are none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
