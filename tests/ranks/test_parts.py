"""Parts of a sharded store: commits of all or none, and one sentence for each thing that does not belong together."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.ranks.meeting import Alone, meet
from tests.ranks.sharded_world import (
    TABLES,
    WHOLE,
    divide_anew,
    expected,
    opened,
    placement_on,
    problems,
    take,
    whole_row,
)
from tiercache.errors import RankError, StateError
from tiercache.ranks import sharded_store
from tiercache.ranks.parts import Parts
from tiercache.ranks.record import Record
from tiercache.ranks.sharded_store import ShardedStore
from tiercache.ranks.shares import part_tables
from tiercache.store import (
    CommitMissingError,
    CorruptStoreError,
    Cursor,
    FormatVersionError,
    KeyMissingError,
    NotAStoreError,
    Store,
    StoreError,
    StoreInUseError,
    StoreMissingError,
    TableMismatchError,
)
from tiercache.store.initial import initial_rows

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks.pool import RanksPool

ENGINES = ("lmdb", "zarr")


def train(path: Path, num_ranks: int, commits: int, **options: Any) -> list[Any]:
    """Make so many commits on so many ranks; returns what each rank raised, or None."""

    def body(ranks: Any) -> None:
        parts, world = opened(path, ranks, **options)
        with parts:
            for _ in range(commits):
                take(parts, world)

    return meet(num_ranks, body)


def check(path: Path, cursor: Cursor) -> None:
    """Assert that the store stands at a cursor, with its rows."""
    with ShardedStore.open(path) as store:
        assert store.cursor == cursor
        assert list(problems(store)) == []


def sentences(errors: list[Any]) -> str:
    """Return the one sentence of all ranks: the first rank's that has it, which the others tell of."""
    assert all(isinstance(error, Exception) for error in errors), errors
    own = [error for error in errors if not isinstance(error, RankError)]
    for error in errors:
        if isinstance(error, RankError):
            assert str(own[0]) in str(error)
        assert ": " in str(error)
        assert "\n" not in str(error)
    return str(own[0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_sharded_store_goes_on_where_its_ranks_stopped(tmp_path: Path, num_ranks: int, engine: str) -> None:
    """Rows of every placement, whole, after every commit; a second opening changes nothing."""
    path, cursor = tmp_path / "s", None
    for _ in range(3):
        assert train(path, num_ranks, 3, engine=engine) == [None] * num_ranks
        with ShardedStore.open(path) as store:
            assert cursor is None or store.cursor > cursor
            cursor = store.cursor
        check(path, cursor)
    assert cursor == Cursor(5, 5)
    before = (path / "record.json").read_bytes()
    assert train(path, num_ranks, 0) == [None] * num_ranks
    assert (path / "record.json").read_bytes() == before


def test_a_part_that_is_ahead_steps_back(tmp_path: Path) -> None:
    """Whichever of them made the next commit: all stand where the record says, with its rows."""
    for ahead in ([0], [1], [0, 1], [2], [0, 1, 2]):
        path = tmp_path / "".join(map(str, ahead))

        def body(ranks: Any, path: Path = path, ahead: list[int] = ahead) -> Any:
            parts, world = opened(path, ranks)
            with parts:
                for _ in range(4):
                    take(parts, world)
                if ranks.rank in ahead:
                    world.visit = 2
                    world.train(part=1)
                    world.append(parts.store)
                    world.visit = 3
                    world.publish(parts.store)
                return parts.store.commit.id

        found = meet(3, body)
        assert found == [3 + (rank in ahead) for rank in range(3)]
        check(path, Cursor(2))  # readers see the record's commit before anybody stepped back
        assert train(path, 3, 0) == [None] * 3
        check(path, Cursor(2))
        assert train(path, 3, 3) == [None] * 3
        check(path, Cursor(4))


def test_parts_that_stepped_back_may_be_left_behind_again(tmp_path: Path) -> None:
    """The record names what was rolled back to before another commit is made, which may not be published either."""
    path = tmp_path / "s"
    assert train(path, 2, 4) == [None] * 2

    def ahead(ranks: Any) -> None:
        parts, world = opened(path, ranks)
        with parts:
            world.visit = 2
            world.train(part=1)
            world.append(parts.store)
            world.visit = 3
            world.publish(parts.store)

    for _ in range(3):
        assert meet(2, ahead) == [None] * 2
        check(path, Cursor(2))
    assert train(path, 2, 3) == [None] * 2
    check(path, Cursor(4))


def test_parts_keep_one_commit_more_than_asked_for(tmp_path: Path) -> None:
    """So that the record's is there while the next is made; a later opening may ask for another number."""
    for retention, kept in ((None, 2), (3, 4), (None, 4), (1, 2)):
        assert train(tmp_path / "s", 2, 5, retention=retention) == [None] * 2
        with Store.open(tmp_path / "s" / "part-0-1", mode="r") as part:
            assert (part.retention, len(part.commits)) == (kept, kept)


def test_nothing_is_published_unless_all_parts_stand_there(tmp_path: Path) -> None:
    """Another cursor on one rank, a commit that was not made, one that was left out: a sentence on every rank."""
    path = tmp_path / "s"

    def other(ranks: Any) -> None:
        parts, world = opened(path, ranks)
        with parts:
            take(parts, world)
            world.visit = 0
            world.train(part=1)
            world.append(parts.store)
            world.visit = 1 + ranks.rank
            world.publish(parts.store)
            parts.publish(Cursor(1 + ranks.rank))

    errors = meet(2, other)
    assert all(isinstance(error, StateError) for error in errors)
    assert "rank 1 commits at visit 2 and rank 0 at visit 1" in str(errors[0])
    check(path, Cursor(0))

    def missing(ranks: Any) -> None:
        parts, world = opened(path, ranks)
        with parts:
            if ranks.rank:
                world.visit = 0
                world.train(part=1)
                world.append(parts.store)
                world.visit = 1
                world.publish(parts.store)
            parts.publish(Cursor(1))

    assert "stands at visit 0 and visit 1 is to be published" in sentences(meet(2, missing))

    def twice(ranks: Any) -> None:
        parts, world = opened(path, ranks)
        with parts:
            for visit in (0, 0):
                world.visit = visit
                world.publish(parts.store)
            parts.publish(Cursor(0))

    errors = meet(2, twice)
    assert all(isinstance(error, StateError) for error in errors)
    assert "made 2 commits since the record was written" in str(errors[0])


def test_a_publication_that_found_no_room_may_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank hears of it, and the record before stands."""
    path, full = tmp_path / "s", [False]
    plain = Record.write

    def write(record: Record, directory: Path) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        plain(record, directory)

    monkeypatch.setattr(Record, "write", write)

    def body(ranks: Any) -> Any:
        parts, world = opened(path, ranks)
        with parts:
            take(parts, world)
            ranks.values(None)
            full[0] = True
            ranks.values(None)
            with pytest.raises(OSError if ranks.rank == 0 else RankError, match="No space left"):
                take(parts, world)
            assert Record.read(path).cursor == Cursor(0)
            ranks.values(None)
            full[0] = False
            ranks.values(None)
            parts.publish(Cursor(1))
            take(parts, world)

    assert meet(2, body) == [None, None]
    check(path, Cursor(1, 5))


def test_what_was_never_committed_is_made_anew(tmp_path: Path) -> None:
    """By as many ranks, or by more; nothing of the first attempt is left, and nothing else is touched."""
    path = tmp_path / "s"
    assert train(path, 2, 0) == [None] * 2
    (path / "part-7-0").mkdir()  # nobody's
    assert train(path, 3, 2) == [None] * 3
    check(path, Cursor(1))
    names = {entry.name for entry in path.iterdir()}
    new = {f"part-1-{rank}" for rank in range(3)}
    assert names == {"record.json", "ranks.lock", "part-7-0", *new, *(f"{name}.json" for name in new)}


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (3, 2), (2, 2)])
def test_parts_of_another_division_take_the_place_of_the_old_ones(tmp_path: Path, before: int, after: int) -> None:
    """Beside them until one record names them; a reader sees the old rows before, the new parts after."""
    path = tmp_path / "s"
    assert train(path, before, 4) == [None] * before
    seen: list[tuple[str, int]] = []

    def note(**what: object) -> None:
        record = Record.read(path)
        assert record is not None
        seen.extend((name, record.generation) for name in what)

    assert meet(after, lambda ranks: divide_anew(path, ranks, placement_on(ranks.size, 1), note)) == [None] * after
    assert set(seen) == {("switching", 0), ("done", 1)}
    check(path, Cursor(2))
    names = {entry.name for entry in path.iterdir()}
    new = {f"part-1-{rank}" for rank in range(after)}
    assert names == {"record.json", "ranks.lock", *new, *(f"{name}.json" for name in new)}

    def go_on(ranks: Any) -> None:
        parts, world = opened(path, ranks, 1)
        with parts:
            for _ in range(3):
                take(parts, world)

    assert meet(after, go_on) == [None] * after
    check(path, Cursor(4))
    assert Record.read(path).obsolete == ()


def test_a_division_that_was_begun_changes_nothing(tmp_path: Path) -> None:
    """Its folders go when the store is opened for writing; readers never see them."""
    path = tmp_path / "s"
    assert train(path, 2, 4) == [None] * 2

    def body(ranks: Any) -> None:
        placement = placement_on(ranks.size, 1)
        tables, record = part_tables(TABLES, placement, ranks.rank), placement.to_record()
        Parts.begin_generation(path, TABLES, tables, record, ranks).close()

    assert meet(3, body) == [None] * 3
    assert (path / "part-1-2" / "store.json").exists()
    check(path, Cursor(2))
    assert meet(1, body) == [None]  # once more, without opening it for training between
    assert not list(path.glob("part-1-*"))
    assert (path / "part-2-0" / "store.json").exists()
    check(path, Cursor(2))
    assert train(path, 2, 0) == [None] * 2
    assert not list(path.glob("part-2-*"))
    check(path, Cursor(2))
    assert Record.read(path).obsolete == ()


def test_parts_may_be_on_other_disks_and_move(tmp_path: Path) -> None:
    """Each in the folder that was given for its rank; moved by hand, with parts= saying where to."""
    path, disks = tmp_path / "s", [tmp_path / "disk 0", tmp_path / "disk ü" / "deep"]
    assert train(path, 2, 3, parts=disks) == [None] * 2
    assert (disks[1] / "part-0-1" / "store.json").exists()
    check(path, Cursor(1, 5))
    assert train(path, 2, 1) == [None] * 2
    (tmp_path / "new").mkdir()
    for name in ("part-0-1", "part-0-1.json"):
        (disks[1] / name).rename(tmp_path / "new" / name)
    assert "is missing: there is no" in sentences(train(path, 2, 0))
    assert train(path, 2, 1, parts=[disks[0], tmp_path / "new"]) == [None] * 2
    check(path, Cursor(3))
    with pytest.raises(ValueError, match="parts= names 1 folders for 2 ranks: give one for each rank"):
        raise train(path, 2, 0, parts=[disks[0]])[0]
    assert "is there already" in sentences(train(tmp_path / "other", 2, 0, parts=disks))


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
            assert train(other, 2, 4) == [None] * 2
            shutil.rmtree(part)
            shutil.copytree(other / "part-0-1", part)
            shutil.copy(other / "part-0-1.json", mark)
        case "another rank":
            shutil.rmtree(part)
            shutil.copytree(path / "part-0-0", part)
            shutil.copy(path / "part-0-0.json", mark)
        case "older":
            shutil.copytree(part, other)
            assert train(path, 2, 4) == [None] * 2
            shutil.rmtree(part)
            shutil.copytree(other, part)
        case "older record":
            record = (path / "record.json").read_bytes()
            assert train(path, 2, 4) == [None] * 2
            (path / "record.json").write_bytes(record)
        case "newer format":
            mark.write_text(mark.read_text().replace('"version": 1', '"version": 2'))
        case "newer store":
            marker = part / "store.json"
            marker.write_text(marker.read_text().replace('"version": 3', '"version": 4'))
        case "mark of nothing":
            mark.write_text("[]")
        case "another cursor":
            record = Record.read(path)
            record.at(Cursor(9), record.commits).write(path)


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
        ("newer store", FormatVersionError, "part-0-1 has format version 4 and this tiercache reads version 3"),
        ("mark of nothing", CorruptStoreError, "part-0-1.json cannot be read"),
        ("another cursor", CorruptStoreError, "commit 3 of part . of .* stands at visit 2 and the record at visit 9"),
    ],
)
def test_a_part_that_does_not_belong_is_one_sentence_on_every_rank(
    tmp_path: Path, what: str, kind: type[Exception], words: str
) -> None:
    """For those who train and for those who read."""
    path = tmp_path / "s"
    assert train(path, 2, 4) == [None] * 2
    damage(path, what)
    errors = train(path, 2, 0)
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
            ranks.values(None)
            if ranks.rank == 0:
                errors = train(path, 2, 0)
                assert isinstance(errors[0], StoreInUseError)
                assert "is being written by process" in sentences(errors)
            ranks.values(None)
        ranks.values(None)

    assert meet(2, body) == [None, None]
    with Store.open(path / "part-0-1"):
        errors = train(path, 2, 0)
        assert isinstance(errors[1], StoreInUseError)
        assert "part-0-1 is being written by process" in sentences(errors)
        placement = placement_on(3, 1)
        errors = meet(3, lambda ranks: divide_anew(path, ranks, placement, lambda **_: None))
        assert isinstance(errors[1], StoreInUseError)
        assert "part-0-1 is being written by process" in sentences(errors)
    assert train(path, 2, 1) == [None] * 2


def test_what_is_asked_wrongly_is_one_sentence(tmp_path: Path) -> None:
    """Another number of ranks, another placement, other tables, another engine, something else at the path."""
    path = tmp_path / "s"
    assert train(path, 2, 2) == [None] * 2
    for num_ranks, options, kind, words in (
        (3, {}, StateError, "has the parts of 2 ranks and 3 were started: start 2, or"),
        (2, {"turn": 1}, StateError, "has another placement than was given: give its own, or"),
        (2, {"engine": "zarr"}, ValueError, "was made with engine 'lmdb', not 'zarr': leave engine out"),
        (2, {"engine": "tape"}, ValueError, "engine 'tape' is unknown: it must be"),
        (2, {"retention": 0}, ValueError, "retention is 0: at least"),
    ):
        for error in train(path, num_ranks, 0, **options):
            assert isinstance(error, kind)
            assert words in str(error)
    with pytest.raises(
        TableMismatchError, match=r"the sharded store at .* has a table 'item' that was not given: give"
    ):
        Parts.open(path, TABLES[1:], TABLES[1:], {}, Alone())
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
            raise train(tmp_path / place, 1, 0)[0]
    assert (path / "part-0-0" / "store.json").exists()
    with pytest.raises(StoreMissingError, match="there is no sharded store at"):
        ShardedStore.open(tmp_path / "nowhere")
    with pytest.raises(NotAStoreError, match="not a store"):
        Store.open(path, tables=TABLES)


def test_lookup_gives_whole_rows_of_any_keys(tmp_path: Path) -> None:
    """Repeated, in any order, of every placement; keys without a row as asked for."""
    path = tmp_path / "s"
    assert train(path, 3, 5) == [None] * 3
    with ShardedStore.open(path) as store:
        for name, wanted in expected(store.cursor).items():
            table = WHOLE[name]
            keys = np.array([*wanted, *wanted][::-1])
            found = store.lookup(name, keys)
            assert list(found) == [field.name for field in table.fields]
            for i, key in enumerate(keys.tolist()):
                for values, other in zip(found.values(), whole_row(table, key, *wanted[key]), strict=True):
                    assert values[i].tobytes() == other[0].tobytes()
            gone = np.array([10**9, 7 * 10**9, 10**10])
            with pytest.raises(
                KeyMissingError, match=f"3 of 4 keys have no row in table '{name}' of the sharded store"
            ):
                store.lookup(name, np.array([*gone, keys[0]]))
            zeros = store.lookup(name, gone, missing="zeros")
            assert not any(np.any(values) for values in zeros.values())
            for values, first in zip(
                store.lookup(name, gone, missing="initial").values(), initial_rows(table, gone), strict=True
            ):
                assert np.array_equal(values, first)
            assert all(values.shape[0] == 0 for values in store.lookup(name, keys[:0]).values())
        with pytest.raises(ValueError, match="has no table 'nobody': it has"):
            store.lookup("nobody", keys)
        with pytest.raises(ValueError, match="keys are 1-dimensional float64"):
            store.lookup("item", np.array([0.5]))
        with pytest.raises(ValueError, match="is beyond int64"):
            store.lookup("item", np.array([2**63, 5], dtype=np.uint64))
    with pytest.raises(ValueError, match="mode 'a' is none of one process"):
        ShardedStore.open(path, mode="a")


@pytest.mark.parametrize("divided", [False, True])
def test_a_reader_begins_anew_where_a_training_goes_on_while_it_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, divided: bool
) -> None:
    """Between reading the record and opening the parts: commits, or another division, took them away."""
    path, times = tmp_path / "s", [0]
    assert train(path, 2, 4) == [None] * 2
    plain = sharded_store._open_parts

    def slow(place: Path, record: Record) -> tuple[Store, ...]:
        times[0] += 1
        if times[0] == 1 and divided:
            assert meet(1, lambda ranks: divide_anew(path, ranks, placement_on(1), lambda **_: None)) == [None]
        elif times[0] <= 2 and not divided:
            assert train(path, 2, 2) == [None] * 2
        return plain(place, record)

    monkeypatch.setattr(sharded_store, "_open_parts", slow)
    check(path, Cursor(2) if divided else Cursor(5))
    assert times[0] == (2 if divided else 3)


def test_a_reader_of_parts_that_went_away_is_told_so(tmp_path: Path) -> None:
    """Another number of ranks made its own: what was open reads no more, and says why."""
    path = tmp_path / "s"
    assert train(path, 2, 4, engine="zarr") == [None] * 2
    with ShardedStore.open(path) as store:
        assert meet(1, lambda ranks: divide_anew(path, ranks, placement_on(1), lambda **_: None)) == [None]
        for read in (lambda: store.lookup("item", np.arange(3)), lambda: list(store.scan("word")), store.state):
            with pytest.raises(
                StoreError, match=r"the sharded store at .* was divided anew while it was read: open it"
            ):
                read()
    check(path, Cursor(2))


def test_ranks_of_torch_make_commits_together(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """As the stand-ins do: train, go on, divide anew, and fail together where one part is missing."""
    path = tmp_path / "s"
    assert ranks_pool.run(3, "tests.ranks.parts_bodies:train", path=str(path), commits=2) == [[1, 0]] * 3
    assert ranks_pool.run(3, "tests.ranks.parts_bodies:train", path=str(path), commits=2) == [[2, 0]] * 3
    check(path, Cursor(2))
    ranks_pool.run(2, "tests.ranks.parts_bodies:divide", path=str(path))
    check(path, Cursor(2))
    assert ranks_pool.run(2, "tests.ranks.parts_bodies:train", path=str(path), commits=3, turn=1) == [[4, 0]] * 2
    check(path, Cursor(4))
    shutil.rmtree(path / "part-1-1")
    other, own = ranks_pool.errors(2, "tests.ranks.parts_bodies:train", path=str(path), commits=0, turn=1)
    assert other is not None
    assert own is not None
    assert own[0] == "StoreMissingError"
    assert other == ("RankError", f"rank 1 failed while opening the parts of the sharded store at {path}: {own[1]}")
    errors = ranks_pool.errors(3, "tests.ranks.parts_bodies:train", path=str(path), commits=0, turn=1)
    assert [error[0] for error in errors if error is not None] == ["StateError"] * 3


def test_a_mark_and_a_record_are_plain_json(tmp_path: Path) -> None:
    """For people who look."""
    path = tmp_path / "s"
    assert train(path, 2, 2) == [None] * 2
    record, mark = (json.loads((path / name).read_text()) for name in ("record.json", "part-0-1.json"))
    assert record["cursor"] == [1, 0]
    assert record["parts"] == ["part-0-0", "part-0-1"]
    assert mark["store"] == record["id"]
