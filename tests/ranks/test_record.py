"""The record of a sharded store: what was written comes back, and anything else is refused in a sentence."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.ranks.sharded_world import TABLES, sharding_on
from tests.store.damage import DEEP, assert_sentence, damaged, generator_of, lie
from tiercache.ranks.common_commit import CommonCommit
from tiercache.ranks.record import Record
from tiercache.ranks.shard_folder import Mark, delete_part
from tiercache.store import (
    CommitMissingError,
    CorruptStoreError,
    Cursor,
    FormatVersionError,
    NotAStoreError,
    StoreError,
)

if TYPE_CHECKING:
    from pathlib import Path

RECORD = Record(
    id="0123456789abcdef" * 2,
    generation=3,
    engine="zarr",
    retention=2,
    tables=tuple(sorted(TABLES, key=lambda table: table.table_id)),
    sharding=sharding_on(2).to_record(),
    parts=("part-3-0", "/a disk/ü/part-3-1"),
    commits=(
        CommonCommit(id=20, cursor=Cursor(7), parts=(11, 10)),
        CommonCommit(id=22, cursor=Cursor(7, 40), parts=(12, 13)),
    ),
    first_commit=9,
    obsolete=("part-2-0", "/a disk/part-4-1"),
)
BYTES = RECORD.to_bytes()
ONE, OTHER = ({"id": id_, "cursor": [7, 0], "parts": [id_, id_]} for id_ in (20, 22))


def sealed(values: dict[str, Any]) -> bytes:
    """Return a record with a right digest, whatever it says."""
    rest = {name: value for name, value in values.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps(rest | {"digest": hashlib.sha256(text).hexdigest()}).encode()


def changed(**values: Any) -> bytes:
    """Return the record with other values; those that are None are left out."""
    record = json.loads(BYTES) | values
    return sealed({name: value for name, value in record.items() if value is not ...})


def older(**values: Any) -> bytes:
    """Return the record as version 1 had it, with other values."""
    return changed(**{"version": 1, "first_commit": ..., "cursor": [7, 40], "commits": [12, 13]} | values)


def test_a_record_comes_back(tmp_path: Path) -> None:
    """All of it, from bytes and from a file; with commits and without."""
    for record in (RECORD, Record.from_bytes(changed(commits=[]), "it")):
        assert Record.from_bytes(record.to_bytes(), "it") == record
        record.write(tmp_path)
        assert Record.read(tmp_path) == record
    assert Record.read(tmp_path / "nowhere") is None
    assert RECORD.next_generation == 5
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_record_of_version_1_is_read(tmp_path: Path) -> None:
    """It names one commit, whose id is the greatest of its parts'; the next record that is written is a newer one."""
    record = Record.from_bytes(older(), "it")
    assert record.commits == (CommonCommit(id=13, cursor=Cursor(7, 40), parts=(12, 13)),)
    assert (record.first_commit, record.next_commit, record.retention) == (0, 14, 2)
    with pytest.raises(CommitMissingError, match="the store has no commit 5: give one of 13"):
        record.find(5, "the store")
    record.write(tmp_path)
    assert Record.read(tmp_path) == record
    assert b'"version": 2' in (tmp_path / "record.json").read_bytes()
    none = Record.from_bytes(older(cursor=None, commits=[]), "it")
    assert (none.commits, none.next_commit) == ((), 0)


def test_records_count_commits_and_keep_the_newest() -> None:
    """The next one, the same by other commits of parts, and one that goes back; ids are never used again."""
    after = RECORD.at(Cursor(8), [13, 14])
    assert [(one.id, one.cursor, one.parts) for one in after.commits] == [
        (22, (7, 40), (12, 13)), (23, (8, 0), (13, 14))
    ]  # fmt: skip
    assert after.at(Cursor(8), [13, 14]) is after
    assert after.renewed([15, 14]).commits == (RECORD.commits[1], replace(after.commits[1], parts=(15, 14)))
    back = RECORD.back_at(RECORD.commits[0], [13, 14])
    assert back.commits == (RECORD.commits[0], CommonCommit(id=23, cursor=Cursor(7), parts=(13, 14)))
    assert RECORD.of_part(1) == (10, 13)
    with pytest.raises(CommitMissingError, match="the store has no commit 21: give one of 20, 22"):
        RECORD.find(21, "the store")
    with pytest.raises(
        CommitMissingError, match=r"commit 8 of the store went with the parts .* before commit 9: give one of 20, 22"
    ):
        RECORD.find(8, "the store")


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (b"", CorruptStoreError, "it is not JSON"),
        (DEEP, CorruptStoreError, "it is not JSON"),
        (b"[]", NotAStoreError, "it is not a sharded store's: give the path"),
        (changed(format="tiercache passes"), NotAStoreError, "it is not a sharded store's"),
        (
            changed(version=0),
            FormatVersionError,
            "it has format version 0 and .* versions 1 and 2: use the tiercache that",
        ),
        (
            changed(version=3, parts=7),
            FormatVersionError,
            "it has format version 3 and .* versions 1 and 2: use a newer",
        ),
        (changed(version="new"), FormatVersionError, "it has format version 'new'"),
        (changed(version=True), FormatVersionError, "it has format version True"),
        (changed(other=1), CorruptStoreError, "it has 'other', which this version does not know"),
        (changed(commits=...), CorruptStoreError, "it lacks 'commits'"),
        (changed(cursor=[7, 0]), CorruptStoreError, "it has 'cursor', which this version does not know"),
        (older(cursor=...), CorruptStoreError, "it lacks 'cursor'"),
        (older(first_commit=3), CorruptStoreError, "it has 'first_commit', which this version does not know"),
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
        (older(commits=[1]), CorruptStoreError, "it names 1 commits of 2 parts"),
        (older(cursor=None), CorruptStoreError, "it names 2 commits of 2 parts"),
        (older(cursor=[1]), CorruptStoreError, "it cannot be read"),
        (older(cursor=[1, -1]), CorruptStoreError, "the sample of a record is -1"),
        (changed(commits=[12, 13]), CorruptStoreError, "a commit of it is 12"),
        (changed(commits=[ONE | {"more": 1}]), CorruptStoreError, "a commit of it is {'id': 20"),
        (changed(commits=[ONE | {"parts": [1]}]), CorruptStoreError, "it names 1 commits of 2 parts"),
        (changed(commits=[ONE | {"parts": 7}]), CorruptStoreError, "the parts of a commit of it are 7"),
        (changed(commits=[ONE | {"parts": [1, -1]}]), CorruptStoreError, "the commit of a part of a record is -1"),
        (changed(commits=[ONE | {"id": 8}]), CorruptStoreError, "it names commit 8 and begins with commit 9"),
        (changed(commits=[ONE | {"cursor": 7}]), CorruptStoreError, "its cursor is 7"),
        (changed(commits=[ONE | {"cursor": [1, -1]}]), CorruptStoreError, "the sample of a record is -1"),
        (changed(commits=[OTHER, ONE]), CorruptStoreError, "its commits 22 and 20 do not stand in the order in which"),
        (changed(commits=[ONE, OTHER | {"parts": [21, 20]}]), CorruptStoreError, "20 and 22 do not stand in the order"),
        (changed(first_commit=-1), CorruptStoreError, "the first commit of a record is -1"),
        (changed(generation=1.0), CorruptStoreError, "the generation of a record is 1.0"),
        (changed(placement=[]), CorruptStoreError, r"its sharding is \[\]"),
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
