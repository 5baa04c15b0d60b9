"""The manifest of a sharded store: what was written comes back, and anything else is refused in a sentence."""

import hashlib
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.dist.sharded_world import TABLES, sharding_on
from tests.store.damage import DEEP, assert_sentence, damaged, generator_of, lie
from tiercache.store import (
    CommitMissingError,
    CorruptStoreError,
    Cursor,
    FormatVersionError,
    NotAStoreError,
    StoreError,
)
from tiercache.store.directory import StoreDirectory
from tiercache.store.locks import Lease
from tiercache.store.shards.shard_manifest import GlobalCommit, ShardCommit, ShardManifest
from tiercache.store.shards.shard_mark import Mark, delete_shard

MANIFEST = ShardManifest(
    id="0123456789abcdef" * 2,
    generation=3,
    engine="zarr",
    retention=2,
    tables=tuple(sorted(TABLES, key=lambda table: table.table_id)),
    sharding=sharding_on(2),
    shards=("shard-3-0", "/a disk/ü/shard-3-1"),
    commits=(
        GlobalCommit(id=20, cursor=Cursor(7), shards=(11, 10), digests=("a" * 64, "b" * 64)),
        GlobalCommit(id=22, cursor=Cursor(7, 40), shards=(12, 13), digests=("c" * 64, "d" * 64)),
    ),
    first_commit=9,
    obsolete=("shard-2-0", "/a disk/shard-4-1"),
)
BYTES = MANIFEST.to_bytes()
ONE, OTHER = ({"id": id_, "cursor": [7, 0], "shards": [id_, id_], "digests": ["a" * 64, "b" * 64]} for id_ in (20, 22))


def sealed(values: dict[str, Any]) -> bytes:
    """Return a manifest with a right digest, whatever it says."""
    rest = {name: value for name, value in values.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps(rest | {"digest": hashlib.sha256(text).hexdigest()}).encode()


def changed(**values: Any) -> bytes:
    """Return the manifest with other values; those that are None are left out."""
    manifest = json.loads(BYTES) | values
    return sealed({name: value for name, value in manifest.items() if value is not ...})


def test_a_record_comes_back(tmp_path: Path) -> None:
    """All of it, from bytes and from a file; with commits and without."""
    for manifest in (MANIFEST, ShardManifest.from_bytes(changed(commits=[]), "it")):
        assert ShardManifest.from_bytes(manifest.to_bytes(), "it") == manifest
        manifest.write(tmp_path)
        assert ShardManifest.read(tmp_path) == manifest
    assert ShardManifest.read(tmp_path / "nowhere") is None
    assert MANIFEST.next_generation == 5
    assert [path.name for path in tmp_path.iterdir()] == ["shards.json"]


def test_records_count_commits_and_keep_the_newest() -> None:
    """The next one, the same by other commits of shards, and one that goes back; ids are never used again."""
    made = [ShardCommit(13, "e" * 64), ShardCommit(14, "f" * 64)]
    after = MANIFEST.at(Cursor(8), made)
    assert [(one.id, one.cursor, one.shards) for one in after.commits] == [
        (22, (7, 40), (12, 13)), (23, (8, 0), (13, 14))
    ]  # fmt: skip
    assert after.newest.digests == ("e" * 64, "f" * 64)
    assert after.at(Cursor(8), made) is after
    assert after.at(Cursor(8), made[::-1]) is not after
    renewed = after.renewed([ShardCommit(15, "0" * 64), made[1]])
    assert renewed.commits == (
        MANIFEST.commits[1], replace(after.commits[1], shards=(15, 14), digests=("0" * 64, "f" * 64))
    )  # fmt: skip
    back = MANIFEST.back_at(MANIFEST.commits[0], made)
    assert back.commits == (MANIFEST.commits[0], GlobalCommit.of(23, Cursor(7), made))
    assert MANIFEST.commits_of(1) == (10, 13)
    with pytest.raises(CommitMissingError, match="the store has no commit 21: give one of 20, 22"):
        MANIFEST.find(21, "the store")
    with pytest.raises(
        CommitMissingError, match=r"commit 8 of the store went with the shards .* before commit 9: give one of 20, 22"
    ):
        MANIFEST.find(8, "the store")


CORRUPT = (
    (b"", "it is not JSON"),
    (DEEP, "it is not JSON"),
    (changed(other=1), "it has 'other', which this version does not know"),
    (changed(commits=...), "it lacks 'commits'"),
    (changed(cursor=[7, 0]), "it has 'cursor', which this version does not know"),
    (changed(first_commit=...), "it lacks 'first_commit'"),
    (BYTES.replace(b'"retention": 2', b'"retention": 3'), "does not match its own digest"),
    (changed(id="../x"), r"its id is '\.\./x'"),
    (changed(engine="memory"), "its engine is 'memory'"),
    (changed(retention=0), "it keeps no commit"),
    (changed(shards=[], commits=[]), "it names no shard"),
    (changed(shards=["shard-3-0", "shard-3-0"]), "names 'shard-3-0' as shard 1 of generation 3"),
    (changed(shards=["shard-3-0", "shard-2-1"]), "names 'shard-2-1' as shard 1 of generation 3"),
    (changed(shards=["shard-3-0", "../shard-3-1"]), "'../shard-3-1', which is none of a shard"),
    (changed(shards=["shard-3-0", "a/shard-3-1"]), "'a/shard-3-1', which is none of a shard"),
    (changed(shards=["shard-3-0", "/a/../shard-3-1"]), "which is none of a shard"),
    (changed(shards=["shard-3-0", "/shard-3-1\0"]), "it names the folder"),
    (changed(shards=["shard-3-0", "/etc"]), "'/etc', which is none of a shard"),
    (changed(obsolete=["/home"]), "'/home', which is none of a shard"),
    (changed(obsolete=["shard-3-5"]), "'shard-3-5' both as a shard and as what is to be deleted"),
    (changed(commits=[ONE | {"cursor": [1]}]), "it cannot be read"),
    (changed(commits=[12, 13]), "a commit of it is 12"),
    (changed(commits=[ONE | {"more": 1}]), "a commit of it is {'id': 20"),
    (changed(commits=[ONE | {"shards": [1]}]), "it names 1 commits of 2 shards"),
    (changed(commits=[ONE | {"shards": 7}]), "the shards of a commit of it are 7"),
    (changed(commits=[ONE | {"shards": [1, -1]}]), "the commit of a shard of a record is -1"),
    (changed(commits=[ONE | {"digests": ["a" * 64]}]), "it names 1 digests of 2 shards"),
    (changed(commits=[ONE | {"digests": ["a" * 64, "b" * 63]}]), "is no digest"),
    (changed(commits=[ONE | {"digests": ["a" * 64, "B" * 64]}]), "is no digest"),
    (changed(commits=[ONE | {"digests": "a" * 64}]), "the digests of a commit of it are 'aaa"),
    (changed(commits=[{name: value for name, value in ONE.items() if name != "digests"}]), "a commit of it is {'id'"),
    (changed(commits=[ONE | {"id": 8}]), "it names commit 8 and begins with commit 9"),
    (changed(commits=[ONE | {"cursor": 7}]), "its cursor is 7"),
    (changed(commits=[ONE | {"cursor": [1, -1]}]), "the sample of a record is -1"),
    (changed(commits=[OTHER, ONE]), "its commits 22 and 20 do not stand in the order in which"),
    (changed(commits=[ONE, OTHER | {"shards": [21, 20]}]), "20 and 22 do not stand in the order"),
    (changed(first_commit=-1), "the first commit of a record is -1"),
    (changed(generation=1.0), "the generation of a record is 1.0"),
    (changed(sharding=[]), r"a sharding plan's record is \[\]"),
    (changed(shards=["."], commits=[]), "over 2 ranks and there are 1 shards"),
    (changed(shards=[".", "shard-3-1"]), "names '.' as shard 0 of generation 3"),
    (changed(obsolete=[".."]), "'..', which is none of a shard"),
    (changed(tables=[]), "there are no tables"),
    (changed(tables=[{}]), "a table's record lacks"),
)
"""Damage, and what is said of it."""
OTHERS = (
    (b"[]", NotAStoreError, "it is not a sharded store's: give the path"),
    (changed(format="tiercache passes"), NotAStoreError, "it is not a sharded store's"),
    (changed(version=0), FormatVersionError, "it has format version 0 and .* reads version 5: use the tiercache that"),
    (changed(version=6, shards=7), FormatVersionError, "it has format version 6 and .* reads version 5: use a newer"),
    (changed(version=4), FormatVersionError, "it has format version 4 and .* reads version 5: use the tiercache that"),
    (changed(version="new"), FormatVersionError, "it has format version 'new'"),
    (changed(version=True), FormatVersionError, "it has format version True"),
)
"""What is none of this version's."""


@pytest.mark.parametrize(
    ("data", "kind", "words"), [*((data, CorruptStoreError, words) for data, words in CORRUPT), *OTHERS]
)
def test_a_record_that_makes_no_sense_is_one_sentence(data: bytes, kind: type[StoreError], words: str) -> None:
    """An older or newer format, unknown fields, folders that lead elsewhere, numbers that cannot be."""
    with pytest.raises(kind, match=words) as error:
        ShardManifest.from_bytes(data, "it")
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
            manifest = ShardManifest.from_bytes(data, "it")
        except StoreError as error:
            assert_sentence(error)
            refused += 1
        else:
            assert ShardManifest.from_bytes(manifest.to_bytes(), "it") == manifest
            for shard in (*manifest.shards, *manifest.obsolete):
                assert re.fullmatch(r"\.|(/.*/|/)?shard-\d+-\d+", shard)
                assert ".." not in shard.split("/")
    assert refused > 1200


def test_marks_of_any_bytes_are_refused_in_a_sentence(tmp_path: Path) -> None:
    """And nothing is deleted that has none, or another store's."""
    folder, mark = tmp_path / "shard-0-0", Mark(store="ab" * 16, generation=0, rank=0)
    mark.make(folder)
    folder.mkdir()
    (folder / "rows").touch()
    whole = (tmp_path / "shard-0-0.json").read_bytes()
    for seed in range(300):
        data = damaged(whole, generator_of(seed))
        (tmp_path / "shard-0-0.json").write_bytes(data)
        try:
            found = Mark.read(folder)
        except StoreError as error:
            assert_sentence(error)
        else:
            assert found is not None
        if json_of(data).get("store") != mark.store:
            try:
                delete_shard(folder, mark.store)
            except StoreError as error:
                assert_sentence(error)
            assert (folder / "rows").exists()
    (tmp_path / "shard-0-0.json").unlink()
    delete_shard(folder, mark.store)
    assert (folder / "rows").exists()
    (tmp_path / "shard-0-0.json").write_bytes(whole)
    delete_shard(folder, mark.store)
    delete_shard(folder, mark.store)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["a folder", "a link to itself", "a link to a folder"])
def test_a_mark_that_is_no_file_is_named(tmp_path: Path, what: str) -> None:
    """It is not an error of Python's."""
    place = tmp_path / "shard-0-0.json"
    if what == "a folder":
        place.mkdir()
    else:
        place.symlink_to(place if "itself" in what else tmp_path)
    with pytest.raises(StoreError, match=r"shard-0-0\.json cannot be read \(.+\): restore") as caught:
        Mark.read(tmp_path / "shard-0-0")
    assert_sentence(caught.value)


def test_readers_that_take_leases_hinder_no_deletion(tmp_path: Path) -> None:
    """Of a shard, nor of a plain store: they come and go meanwhile."""
    mark, ended = Mark(store="ab" * 16, generation=0, rank=0), threading.Event()
    folder, plain = tmp_path / "shard-0-0", tmp_path / "plain"

    def read() -> None:
        while not ended.is_set():
            for place in (folder, plain):
                if (lease := Lease.take(place / "leases", 7)) is not None:
                    lease.release()

    plain.mkdir()
    with ThreadPoolExecutor(1) as readers:
        reading = readers.submit(read)
        try:
            for _ in range(50):
                mark.make(folder)
                folder.mkdir()
                time.sleep(0.001)
                delete_shard(folder, mark.store)
                StoreDirectory(plain).delete()
        finally:
            ended.set()
        reading.result()
    assert not folder.exists()


def test_a_reader_may_make_leases_while_a_plain_store_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just after their folder was looked for."""
    is_dir = Path.is_dir

    def slow(path: Path) -> bool:
        found = is_dir(path)
        if path.name == "leases" and not found:
            assert Lease.take(path, 7) is not None
        return found

    monkeypatch.setattr(Path, "is_dir", slow)
    (tmp_path / "data.mdb").touch()
    StoreDirectory(tmp_path).delete()
    assert not (tmp_path / "data.mdb").exists()


def json_of(data: bytes) -> dict[str, Any]:
    """Return the object that bytes are, an empty one where they are none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
