"""One sentence for each thing about shards that does not belong together."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.dist.meeting import meet
from tests.dist.sharded_world import (
    TABLES,
    check_shards,
    divide_anew,
    opened,
    sentences,
    sharding_on,
    take,
    train_shards,
)
from tiercache.cli import app
from tiercache.dist.communicator import communicator_of
from tiercache.dist.shard_writer import ShardWriter
from tiercache.errors import RankError, StateError
from tiercache.store import (
    CommitMissingError,
    CorruptStoreError,
    Cursor,
    FormatVersionError,
    NotAStoreError,
    Store,
    StoreInUseError,
    StoreMissingError,
    TableMismatchError,
    verify,
)
from tiercache.store.shards.open_shards import open_shard
from tiercache.store.shards.shard_manifest import ShardManifest
from tiercache.store.shards.sharding import ShardingPlan


def damage(path: Path, what: str) -> None:
    """Do something to shard 1."""
    shard, mark = path / "shard-0-1", path / "shard-0-1.json"
    other = path.parent / "other"
    match what:
        case "missing":
            shutil.rmtree(shard)
        case "empty":
            shutil.rmtree(shard)
            shard.mkdir()
        case "no mark":
            mark.unlink()
        case "another store":
            assert train_shards(other, 2, 4) == [None] * 2
            shutil.rmtree(shard)
            shutil.copytree(other / "shard-0-1", shard)
            shutil.copy(other / "shard-0-1.json", mark)
        case "another rank":
            shutil.rmtree(shard)
            shutil.copytree(path / "shard-0-0", shard)
            shutil.copy(path / "shard-0-0.json", mark)
        case "older":
            shutil.copytree(shard, other)
            assert train_shards(path, 2, 4) == [None] * 2
            shutil.rmtree(shard)
            shutil.copytree(other, shard)
        case "older manifest":
            manifest = (path / "shards.json").read_bytes()
            assert train_shards(path, 2, 4) == [None] * 2
            (path / "shards.json").write_bytes(manifest)
        case "newer format":
            mark.write_text(mark.read_text().replace('"version": 5', '"version": 6'))
        case "newer store":
            marker = shard / "store.json"
            marker.write_text(marker.read_text().replace('"version": 5', '"version": 6'))
        case "mark of nothing":
            mark.write_text("[]")
        case "another cursor":
            manifest = ShardManifest.read(path)
            replace(manifest, commits=(replace(manifest.newest, cursor=Cursor(9)),)).write(path)


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        (
            "missing",
            StoreMissingError,
            "shard 1 of the store at .* is missing: there is no .*/shard-0-1: restore",
        ),
        ("empty", StoreMissingError, "shard 1 of .* is missing: .*/shard-0-1 holds no store: restore"),
        ("no mark", NotAStoreError, r"shard 1 of .* at .* has no mark beside it \(shard-0-1.json\): restore"),
        ("another store", NotAStoreError, "shard-0-1 is a shard of another store and not shard 1 of"),
        ("another rank", NotAStoreError, "is marked as shard 0 of generation 0 and not as shard 1 of"),
        (
            "older",
            CommitMissingError,
            "has commits 2, 3 and the manifest names commit 7: .*/shard-0-1 is older than it",
        ),
        (
            "older manifest",
            CommitMissingError,
            "shard . of .* has commits 6, 7 and the manifest names commit 3: .* newer",
        ),
        ("newer format", FormatVersionError, "shard-0-1.json has format version 6 and .* reads version 5: use a newer"),
        ("newer store", FormatVersionError, "shard-0-1 has format version 6 and this tiercache reads version 5"),
        ("mark of nothing", CorruptStoreError, "shard-0-1.json cannot be read"),
        ("another cursor", CorruptStoreError, "commit 3 of shard . of .* stands at pass 2 and the manifest at pass 9"),
    ],
)
def test_a_part_that_does_not_belong_is_one_sentence_on_every_rank(
    tmp_path: Path, what: str, kind: type[Exception], words: str
) -> None:
    """For those who train and for those who read."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 4) == [None] * 2
    damage(path, what)
    errors = train_shards(path, 2, 0)
    assert any(isinstance(error, kind) for error in errors), errors
    assert all(isinstance(error, (kind, RankError)) for error in errors), errors
    for error in errors:
        assert re.search(words, str(error)), error
        assert "\n" not in str(error)
    with pytest.raises(kind, match=words):
        Store.open(path, mode="r")


def test_one_training_at_a_time(tmp_path: Path) -> None:
    """The whole store has a lock, and each shard its own: where rank 0 is gone and others still write."""
    path = tmp_path / "s"

    def body(ranks: Any) -> None:
        shards, world = opened(path, ranks)
        with shards:
            take(shards, world)
            ranks.all_gather_object(None)
            if ranks.rank == 0:
                errors = train_shards(path, 2, 0)
                assert isinstance(errors[0], StoreInUseError)
                assert "is being written by process" in sentences(errors)
            ranks.all_gather_object(None)
        ranks.all_gather_object(None)

    assert meet(2, body) == [None, None]
    with open_shard(path, ShardManifest.read(path), 1):
        errors = train_shards(path, 2, 0)
        assert isinstance(errors[1], StoreInUseError)
        assert "shard-0-1 is being written by process" in sentences(errors)
        sharding = sharding_on(3, 1)
        errors = meet(3, lambda ranks: divide_anew(path, ranks, sharding))
        assert isinstance(errors[1], StoreInUseError)
        assert "shard-0-1 is being written by process" in sentences(errors)
    assert train_shards(path, 2, 1) == [None] * 2


def test_a_part_is_written_by_its_rank_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever name, wherever it is: two commits by hand would cost the one that counts. Reading works."""
    path, disks = tmp_path / "s", [tmp_path / "disk 0", tmp_path / "disk 1"]
    assert train_shards(path, 2, 4, shard_dirs=disks) == [None] * 2
    shard = disks[1] / "shard-0-1"
    (tmp_path / "link").symlink_to(shard)
    monkeypatch.chdir(shard)
    tables = sharding_on(2).shard_tables(TABLES, 1)
    words = r"is one shard of a store, and all shards make commits together: give the path of the whole store, or open"
    for place in (shard, str(shard), ".", tmp_path / "link", disks[0] / ".." / "disk 1" / "shard-0-1"):
        with pytest.raises(ValueError, match=words):
            Store.open(place)
        with pytest.raises(ValueError, match=words):
            Store.open(place, tables=tables)
        with Store.open(place, mode="r") as store:
            assert store.commit.id == 3
            with pytest.raises(ValueError, match="is open for reading"):
                store.compact()
        assert verify(place)["problems"] == []
    assert train_shards(path, 2, 1) == [None] * 2
    check_shards(path, Cursor(3))

    for text in ("", "[]"):  # a mark that was damaged
        (disks[0] / "shard-0-0.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            Store.open(disks[0] / "shard-0-0")
    shutil.rmtree(shard)
    with pytest.raises(ValueError, match=words):
        Store.open(shard, tables=tables)
    assert not shard.exists()


def test_a_copy_of_a_part_without_its_mark_is_a_store(tmp_path: Path) -> None:
    """And so is one beside which somebody has a file of that name: both may be written to."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 4) == [None] * 2
    shutil.copytree(path / "shard-0-1", tmp_path / "copy")
    for beside in (None, "", "[]", '{"format": "mine"}'):
        if beside is not None:
            (tmp_path / "copy.json").write_text(beside)
        with Store.open(tmp_path / "copy") as store:
            rows = {table.name: sum(keys.size for keys, _ in store.scan(table.name)) for table in store.tables}
            store.compact()
            assert rows == {table.name: sum(keys.size for keys, _ in store.scan(table.name)) for table in store.tables}
        assert CliRunner().invoke(app, ["compact", str(tmp_path / "copy")]).exit_code == 0
    check_shards(path, Cursor(2))


def test_a_plain_store_is_made_plain_by_one_alone(tmp_path: Path) -> None:
    """Who comes second finds it so, and leaves it as it is."""
    path, one = tmp_path / "s", ShardingPlan.of_one(TABLES)
    assert train_shards(path, 2, 4) == [None] * 2
    assert meet(1, lambda ranks: divide_anew(path, ranks, one, plain=True)) == [None]
    errors = meet(1, lambda ranks: divide_anew(path, ranks, one, plain=True))
    assert isinstance(errors[0], StateError)
    assert "is a plain one already: open it again" in sentences(errors)
    assert not (path / "shards.json").exists()
    with Store.open(path) as store:
        assert (type(store), store.commit.cursor) == (Store, Cursor(2))


def test_what_is_asked_wrongly_is_one_sentence(tmp_path: Path) -> None:
    """Another number of ranks, another sharding, other tables, another engine, something else at the path."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 2) == [None] * 2
    for num_ranks, options, kind, words in (
        (3, {}, StateError, "has the shards of 2 ranks and 3 were started: start 2, or"),
        (2, {"turn": 1}, StateError, "has another sharding than was given: give its own, or"),
        (2, {"engine": "zarr"}, ValueError, "was made with engine 'lmdb', not 'zarr': leave engine out"),
        (2, {"engine": "tape"}, ValueError, "engine 'tape' is unknown: it must be"),
        (2, {"retention": 0}, ValueError, "retention is 0: at least"),
    ):
        for error in train_shards(path, num_ranks, 0, **options):
            assert isinstance(error, kind)
            assert words in str(error)
    with pytest.raises(TableMismatchError, match=r"the store at .* has a table 'item' that was not given: give"):
        ShardWriter.open(path, TABLES[1:], ShardingPlan.of_one(TABLES[1:]), communicator_of())
    Store.open(tmp_path / "chosen", tables=TABLES[1:]).close()
    for error in train_shards(tmp_path / "chosen", 2, 1):
        assert "has no table 'item': give" in str(error)
    assert Store.open(tmp_path / "chosen", mode="r").tables == tuple(sorted(TABLES[1:], key=lambda one: one.table_id))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    (tmp_path / "file").touch()
    (path / "shards.json").rename(tmp_path / "kept.json")
    for place, words in (
        ("full", "without store.json that holds 'notes.txt', not a store: give"),
        ("file", "is a file, not a store|is a file: no store can"),
        ("s", "has shards and no shards.json: restore it from a copy"),
    ):
        with pytest.raises(NotAStoreError, match=words):
            raise train_shards(tmp_path / place, 1, 0)[0]
    assert (path / "shard-0-0" / "store.json").exists()
    with pytest.raises(StoreMissingError, match="there is no store at"):
        Store.open(tmp_path / "nowhere", mode="r")
    with pytest.raises(NotAStoreError, match=r"has shards and no shards.json"):
        Store.open(path, tables=TABLES)
