"""One sentence for each thing about parts that does not belong together."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from tests.ranks.meeting import meet
from tests.ranks.sharded_world import (
    TABLES,
    check_parts,
    divide_anew,
    opened,
    sentences,
    sharding_on,
    take,
    train_parts,
)
from tiercache.cli import app
from tiercache.dist.communicator import communicator_of
from tiercache.errors import RankError, StateError
from tiercache.ranks.parts import Parts
from tiercache.ranks.record import Record
from tiercache.ranks.shard_folder import open_part
from tiercache.ranks.sharded_store import ShardedStore
from tiercache.ranks.shares import part_tables
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

if TYPE_CHECKING:
    from pathlib import Path


def damage(path: Path, what: str) -> None:
    """Do something to part 1."""
    part, mark = path / "part-0-1", path / "part-0-1.json"
    other = path.parent / "other"
    match what:
        case "missing":
            shutil.rmtree(part)
        case "empty":
            shutil.rmtree(part)
            part.mkdir()
        case "no mark":
            mark.unlink()
        case "another store":
            assert train_parts(other, 2, 4) == [None] * 2
            shutil.rmtree(part)
            shutil.copytree(other / "part-0-1", part)
            shutil.copy(other / "part-0-1.json", mark)
        case "another rank":
            shutil.rmtree(part)
            shutil.copytree(path / "part-0-0", part)
            shutil.copy(path / "part-0-0.json", mark)
        case "older":
            shutil.copytree(part, other)
            assert train_parts(path, 2, 4) == [None] * 2
            shutil.rmtree(part)
            shutil.copytree(other, part)
        case "older record":
            record = (path / "record.json").read_bytes()
            assert train_parts(path, 2, 4) == [None] * 2
            (path / "record.json").write_bytes(record)
        case "newer format":
            mark.write_text(mark.read_text().replace('"version": 1', '"version": 2'))
        case "newer store":
            marker = part / "store.json"
            marker.write_text(marker.read_text().replace('"version": 4', '"version": 5'))
        case "mark of nothing":
            mark.write_text("[]")
        case "another cursor":
            record = Record.read(path)
            replace(record, commits=(replace(record.newest, cursor=Cursor(9)),)).write(path)


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        (
            "missing",
            StoreMissingError,
            "part 1 of the sharded store at .* is missing: there is no .*/part-0-1: restore",
        ),
        ("empty", StoreMissingError, "part 1 of .* is missing: .*/part-0-1 holds no store: restore"),
        ("no mark", NotAStoreError, r"part 1 of .* at .* has no mark beside it \(part-0-1.json\): restore"),
        ("another store", NotAStoreError, "part-0-1 is a part of another sharded store and not part 1 of"),
        ("another rank", NotAStoreError, "is marked as part 0 of generation 0 and not as part 1 of"),
        ("older", CommitMissingError, "has commits 2, 3 and the record names commit 7: .*/part-0-1 is older than it"),
        ("older record", CommitMissingError, "part . of .* has commits 6, 7 and the record names commit 3: .* newer"),
        ("newer format", FormatVersionError, "part-0-1.json has format version 2 and .* reads version 1: use a newer"),
        ("newer store", FormatVersionError, "part-0-1 has format version 5 and this tiercache reads version 4"),
        ("mark of nothing", CorruptStoreError, "part-0-1.json cannot be read"),
        ("another cursor", CorruptStoreError, "commit 3 of part . of .* stands at pass 2 and the record at pass 9"),
    ],
)
def test_a_part_that_does_not_belong_is_one_sentence_on_every_rank(
    tmp_path: Path, what: str, kind: type[Exception], words: str
) -> None:
    """For those who train and for those who read."""
    path = tmp_path / "s"
    assert train_parts(path, 2, 4) == [None] * 2
    damage(path, what)
    errors = train_parts(path, 2, 0)
    assert any(isinstance(error, kind) for error in errors), errors
    assert all(isinstance(error, (kind, RankError)) for error in errors), errors
    for error in errors:
        assert re.search(words, str(error)), error
        assert "\n" not in str(error)
    with pytest.raises(kind, match=words):
        ShardedStore.open(path)


def test_one_training_at_a_time(tmp_path: Path) -> None:
    """The whole store has a lock, and each part its own: where rank 0 is gone and others still write."""
    path = tmp_path / "s"

    def body(ranks: Any) -> None:
        parts, world = opened(path, ranks)
        with parts:
            take(parts, world)
            ranks.all_gather_object(None)
            if ranks.rank == 0:
                errors = train_parts(path, 2, 0)
                assert isinstance(errors[0], StoreInUseError)
                assert "is being written by process" in sentences(errors)
            ranks.all_gather_object(None)
        ranks.all_gather_object(None)

    assert meet(2, body) == [None, None]
    with open_part(
        path / "part-0-1", part_tables(TABLES, sharding_on(2), 1), engine="lmdb", store_budget=None, retention=2
    ):
        errors = train_parts(path, 2, 0)
        assert isinstance(errors[1], StoreInUseError)
        assert "part-0-1 is being written by process" in sentences(errors)
        sharding = sharding_on(3, 1)
        errors = meet(3, lambda ranks: divide_anew(path, ranks, sharding, lambda **_: None))
        assert isinstance(errors[1], StoreInUseError)
        assert "part-0-1 is being written by process" in sentences(errors)
    assert train_parts(path, 2, 1) == [None] * 2


def test_a_part_is_written_by_its_rank_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever name, wherever it is: two commits by hand would cost the one that the record names. Reading works."""
    path, disks = tmp_path / "s", [tmp_path / "disk 0", tmp_path / "disk 1"]
    assert train_parts(path, 2, 4, parts=disks) == [None] * 2
    part = disks[1] / "part-0-1"
    (tmp_path / "link").symlink_to(part)
    monkeypatch.chdir(part)
    tables = part_tables(TABLES, sharding_on(2), 1)
    words = "part of a sharded store, whose ranks make commits together: open it with mode='r', or train on the sharded"
    for place in (part, str(part), ".", tmp_path / "link", disks[0] / ".." / "disk 1" / "part-0-1"):
        with pytest.raises(ValueError, match=words):
            Store.open(place)
        with pytest.raises(ValueError, match=words):
            Store.open(place, tables=tables)
        with Store.open(place, mode="r") as store:
            assert store.commit.id == 3
            with pytest.raises(ValueError, match="is open for reading"):
                store.compact()
        assert verify(place)["problems"] == []
    assert train_parts(path, 2, 1) == [None] * 2
    check_parts(path, Cursor(3))

    for text in ("", "[]"):  # a mark that was damaged
        (disks[0] / "part-0-0.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            Store.open(disks[0] / "part-0-0")
    shutil.rmtree(part)
    with pytest.raises(ValueError, match=words):
        Store.open(part, tables=tables)
    assert not part.exists()


def test_a_copy_of_a_part_without_its_mark_is_a_store(tmp_path: Path) -> None:
    """And so is one beside which somebody has a file of that name: both may be written to."""
    path = tmp_path / "s"
    assert train_parts(path, 2, 4) == [None] * 2
    shutil.copytree(path / "part-0-1", tmp_path / "copy")
    for beside in (None, "", "[]", '{"format": "mine"}'):
        if beside is not None:
            (tmp_path / "copy.json").write_text(beside)
        with Store.open(tmp_path / "copy") as store:
            rows = {table.name: sum(keys.size for keys, _ in store.scan(table.name)) for table in store.tables}
            store.compact()
            assert rows == {table.name: sum(keys.size for keys, _ in store.scan(table.name)) for table in store.tables}
        assert CliRunner().invoke(app, ["compact", str(tmp_path / "copy")]).exit_code == 0
    check_parts(path, Cursor(2))


def test_what_is_asked_wrongly_is_one_sentence(tmp_path: Path) -> None:
    """Another number of ranks, another sharding, other tables, another engine, something else at the path."""
    path = tmp_path / "s"
    assert train_parts(path, 2, 2) == [None] * 2
    for num_ranks, options, kind, words in (
        (3, {}, StateError, "has the parts of 2 ranks and 3 were started: start 2, or"),
        (2, {"turn": 1}, StateError, "has another sharding than was given: give its own, or"),
        (2, {"engine": "zarr"}, ValueError, "was made with engine 'lmdb', not 'zarr': leave engine out"),
        (2, {"engine": "tape"}, ValueError, "engine 'tape' is unknown: it must be"),
        (2, {"retention": 0}, ValueError, "retention is 0: at least"),
    ):
        for error in train_parts(path, num_ranks, 0, **options):
            assert isinstance(error, kind)
            assert words in str(error)
    with pytest.raises(
        TableMismatchError, match=r"the sharded store at .* has a table 'item' that was not given: give"
    ):
        Parts.open(path, TABLES[1:], TABLES[1:], {}, communicator_of())
    with Store.open(tmp_path / "plain", tables=TABLES):
        pass
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    (tmp_path / "file").touch()
    (path / "record.json").rename(tmp_path / "kept.json")
    for place, words in (
        ("plain", "is the store of one process, not of several: give"),
        ("full", "without record.json that holds 'notes.txt', not a sharded store: give"),
        ("file", "is a file, not a store|is a file: no store can"),
        ("s", "has parts and no record.json: restore the record from a copy"),
    ):
        with pytest.raises(NotAStoreError, match=words):
            raise train_parts(tmp_path / place, 1, 0)[0]
    assert (path / "part-0-0" / "store.json").exists()
    with pytest.raises(StoreMissingError, match="there is no sharded store at"):
        ShardedStore.open(tmp_path / "nowhere")
    with pytest.raises(NotAStoreError, match="not a store"):
        Store.open(path, tables=TABLES)
