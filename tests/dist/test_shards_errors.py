"""One error message for each mismatch among the ranks of a store."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import error_of
from tests.dist.sharded_world import (
    TABLES,
    ShardWorld,
    check_shards,
    divide_among,
    on_ranks,
    sentences,
    sharding_on,
    take,
    train_on,
    train_shards,
)
from tests.files import files_of
from tiercache.dist.communicator import communicator_of
from tiercache.dist.shard_writer import ShardWriter
from tiercache.errors import RankError, StateError
from tiercache.store import (
    CorruptStoreError,
    Cursor,
    FormatVersionError,
    NotAStoreError,
    Store,
    StoreError,
    StoreInUseError,
    StoreMissingError,
    TableMismatchError,
)
from tiercache.store.opening import newest_record, open_folder
from tiercache.store.sharding import ShardingPlan

ENGINES = pytest.mark.parametrize("engine", ["lmdb", "zarr"])


def replace_in(marker: Path, **values: object) -> None:
    marker.write_text(json.dumps(json.loads(marker.read_text()) | values))


def put_back(backup: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)


def damage(path: Path, what: str, engine: str) -> None:
    """Do something to rank 1 of three."""
    folder, backup = path / "rank-1", path.parent / "backup"
    marker = folder / "store.json"
    match what:
        case "missing":
            shutil.rmtree(folder)
        case "a file":
            shutil.rmtree(folder)
            folder.touch()
        case "empty":
            shutil.rmtree(folder)
            folder.mkdir()
        case "no marker":
            marker.unlink()
        case "another store":
            train_on(backup, 3, 4, engine=engine)
            put_back(backup / "rank-1", folder)
        case "another rank":
            put_back(path / "rank-2", folder)
        case "a whole store":
            train_on(backup, 1, 4, engine=engine)
            put_back(backup, folder)
        case "older":
            shutil.copytree(folder, backup)
            train_on(path, 3, 4)
            put_back(backup, folder)
        case "newer":
            shutil.copytree(path, backup)
            train_on(path, 3, 4)
            folder.rename(path.parent / "kept")
            put_back(backup, path)
            put_back(path.parent / "kept", folder)
        case "newer format":
            replace_in(marker, version=6)
        case "older format":
            replace_in(marker, version=4)
        case "a folder for a marker":
            marker.unlink()
            marker.mkdir()
        case "marker of nothing":
            marker.write_text("[]")
        case "no JSON":
            marker.write_text("{")
        case "another engine":
            replace_in(marker, engine="tape")
        case "another format":
            replace_in(marker, format="tiercache passes")


MISSING = (
    "rank 1 of the store at .* is missing: .*/rank-1 does not exist: restore it from a copy, move it back, or pass its"
)
FOREIGN = "rank-1/store.json does not belong to rank 1 of the store at .*: restore"
NO_MARKER = "rank 1 of the store at .* has no marker: .*/rank-1/store.json "
VERSION = "rank-1 has format version {}, but this tiercache reads version 5: use "
WRONG: dict[str, tuple[type[Exception], str]] = {
    "missing": (StoreMissingError, MISSING),
    "a file": (StoreMissingError, MISSING),
    "empty": (StoreError, "rank 1 of the store at .*rank-1.*: restore"),
    "no marker": (NotAStoreError, NO_MARKER + "cannot be read"),
    "a folder for a marker": (StoreError, r"rank-1/store\.json cannot be read \(.+\): restore"),
    "another store": (NotAStoreError, "rank-1 has rank 1 of another store, not rank 1 of the store at .*: restore"),
    "another rank": (NotAStoreError, "rank-1 has rank 2 of that store, not rank 1 of the store at .*: restore"),
    "a whole store": (NotAStoreError, FOREIGN),
    "older": (CorruptStoreError, r"ranks/1\.7 of the store at .*/rank-1 is missing.*: restore"),
    "newer": (CorruptStoreError, r"ranks/1\.3 of the store at .*/rank-1 is missing.*: restore"),
    "newer format": (FormatVersionError, VERSION.format(6) + "a "),
    "older format": (FormatVersionError, VERSION.format(4) + "the"),
    "marker of nothing": (NotAStoreError, NO_MARKER.replace("/rank-1/store.json ", "json is not the marker of a")),
    "no JSON": (NotAStoreError, NO_MARKER + "is not JSON"),
    "another engine": (FormatVersionError, "rank-1 .* engine 'tape', but this tiercache has lmdb and zarr: use"),
    "another format": (NotAStoreError, FOREIGN),
}


@pytest.mark.sampled(16)
@ENGINES
@pytest.mark.parametrize("what", WRONG)
def test_a_rank_that_does_not_belong_is_one_error_for_all(tmp_path: Path, what: str, engine: str) -> None:
    """For those who train, read, verify or divide the store, and who open it alone; no file is changed."""
    path, (kind, words) = tmp_path / "s", WRONG[what]
    train_on(path, 3, 4, engine=engine)
    damage(path, what, engine)
    held = unlocked(path)
    assert_refused(train_shards(path, 3, 1), kind, words)
    newest = newest_record(path)
    assert newest is not None
    for options in ({"mode": "r"}, {"mode": "r", "commit": newest.id}, {"mode": "a"}):
        with pytest.raises(kind, match=words):
            Store.open(path, **options)
    for command in ("info", "verify"):
        assert re.search(words, error_of(command, path))
    assert unlocked(path) == held
    assert_refused(divide_among(path, 2, 1), kind, words)
    if what not in {"older", "newer"}:
        held = {name: data for name, data in held.items() if name.startswith("rank-1")}
        assert {name: data for name, data in unlocked(path).items() if name.startswith("rank-1")} == held


def unlocked(path: Path) -> dict[str, bytes]:
    """Return the bytes of all files but locks and leases."""
    found = files_of(path).items()
    return {name: data for name, data in found if not name.endswith((".lock", "lock.mdb")) and "leases/" not in name}


def assert_refused(errors: list[Any], kind: type[Exception], words: str) -> None:
    """Assert that all ranks say so, one of them with the error itself."""
    assert re.search(words, sentences(errors))
    assert {type(error) for error in errors if not isinstance(error, kind)} <= {RankError}
    assert any(isinstance(error, kind) for error in errors)


def test_one_training_at_a_time(tmp_path: Path) -> None:
    """The whole store has a lock, and each rank its own: if rank 0 is gone and others still write."""
    path = tmp_path / "s"

    def body(ranks: Any, shards: ShardWriter, world: ShardWorld) -> None:
        take(shards, world)
        ranks.all_gather_object(None)
        if ranks.rank == 0:
            errors = train_shards(path, 2, 0)
            assert isinstance(errors[0], StoreInUseError)
            assert "is being written by process" in sentences(errors)
            with pytest.raises(StoreInUseError, match=r"the store at .*/s is being written by process"):
                Store.open(path)
        ranks.all_gather_object(None)

    assert on_ranks(path, 2, body) == [None, None]
    other = open_folder(path / "rank-1", TABLES, "lmdb", "a", None, create=False)
    errors = train_shards(path, 2, 0)
    assert isinstance(errors[1], StoreInUseError)
    assert "rank-1 is being written by process" in sentences(errors)
    with pytest.raises(StoreInUseError, match="rank-1 is being written by process"):
        Store.open(path)
    for num_ranks in (1, 2, 3):
        errors = divide_among(path, num_ranks, 1)
        assert isinstance(errors[min(1, num_ranks - 1)], StoreInUseError)
        assert "rank-1 is being written by process" in sentences(errors)
    other.close()
    check_shards(path, Cursor(0))
    train_on(path, 2, 1, Cursor(1))


@ENGINES
def test_the_rows_of_a_rank_are_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    path, disk = tmp_path / "s", tmp_path / "disk 1"
    train_on(path, 2, 4, shard_dirs=[path, disk], engine=engine)
    folder = disk / "rank-1"
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    tables, held = sharding_on(2).shard_tables(TABLES, 1), files_of(folder)
    words = "has the rows of one rank of a store: pass the path of the whole store, which all ranks commit together"
    for place in (folder, str(folder), ".", tmp_path / "link", disk / ".." / "disk 1" / "rank-1"):
        for options in ({}, {"tables": tables}, {"mode": "r"}):
            with pytest.raises(NotAStoreError, match=words):
                Store.open(place, **options)
        assert words in sentences(train_shards(Path(place).absolute(), 1, 1))
    assert files_of(folder) == held
    train_on(path, 2, 1, Cursor(3))

    for text in ("", "[]", '{"format": "mine"}', None):  # a damaged marker, or none
        (folder / "store.json").unlink() if text is None else (folder / "store.json").write_text(text)
        held = files_of(folder)
        with pytest.raises(NotAStoreError, match="rank-1" if text is None else r"store\.json"):
            Store.open(folder, tables=tables)
        assert held.items() <= files_of(folder).items()


def test_what_is_asked_wrongly_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "s"
    train_on(path, 2, 2)
    for num_ranks, options, kind, words in (
        (3, {}, StateError, "has the rows of 2 ranks, but 3 were started: start 2, or reshard it for 3 first"),
        (1, {}, StateError, "has the rows of 2 ranks, but 1 were started: start 2, or reshard it for 1 first"),
        (2, {"turn": 1}, StateError, "has a different sharding: pass its own sharding, or reshard it first"),
        (2, {"engine": "tape"}, ValueError, "unknown engine 'tape': expected"),
        (2, {"retention": 0}, ValueError, "retention is 0: at least the newest commit"),
    ):
        for error in train_shards(path, num_ranks, 0, **options):
            assert isinstance(error, kind)
            assert words in str(error)
    errors = train_shards(path, 2, 0, engine="zarr")
    assert isinstance(errors[0], ValueError)
    assert "was created with engine 'lmdb', not 'zarr': omit engine" in sentences(errors)
    errors = divide_among(tmp_path / "new", 2, 1)
    assert "has no commit yet: there is nothing to divide" in sentences(errors)
    with pytest.raises(TableMismatchError, match=r"the store at .* has a table 'item' that was not given: pass"):
        ShardWriter.open(path, TABLES[1:], ShardingPlan.of_one(TABLES[1:]), communicator_of())
    Store.open(tmp_path / "chosen", tables=TABLES[1:]).close()
    for error in train_shards(tmp_path / "chosen", 2, 1):
        assert "has no table 'item': pass" in str(error)
    with Store.open(tmp_path / "chosen", mode="r") as store:
        assert store.tables == tuple(sorted(TABLES[1:], key=lambda one: one.table_id))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    (tmp_path / "file").touch()
    (path / "store.json").rename(tmp_path / "kept.json")
    for place, words in (
        ("full", "without store.json that holds 'notes.txt', not a store: pass"),
        ("file", "is a file, not a store|is a file: no store can"),
        ("s", "holds commits but lost its marker: restore the store from a copy"),
    ):
        for num_ranks in (1, 2):
            with pytest.raises(NotAStoreError, match=words):
                raise train_shards(tmp_path / place, num_ranks, 0)[0]
    assert (path / "rank-1" / "store.json").exists()
    with pytest.raises(StoreMissingError, match="no store at"):
        Store.open(tmp_path / "nowhere", mode="r")
    with pytest.raises(NotAStoreError, match="lost its marker"):
        Store.open(path, tables=TABLES)
    (tmp_path / "kept.json").rename(path / "store.json")
    check_shards(path, Cursor(1))


def test_a_store_of_the_format_before_is_refused(tmp_path: Path) -> None:
    """Its ranks had separate commits: the error says what to do, and nothing is made there."""
    path = tmp_path / "s"
    path.mkdir()
    (path / "shards.json").write_text("{}")
    words = r"has shards.json, of ranks with separate commits, .*: export the store with the tiercache that wrote"
    for mode in ("r", "a"):
        with pytest.raises(FormatVersionError, match=words):
            Store.open(path, mode=mode, tables=TABLES)
    assert re.search(words, sentences(train_shards(path, 2, 1)))
    assert [entry.name for entry in path.iterdir()] == ["shards.json"]
    with pytest.raises(FormatVersionError, match=words):
        newest_record(path)
