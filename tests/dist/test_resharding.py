"""Other ranks, or another sharding, get the rows, the state, the rates and the position of the old ones."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.dist.meeting import meet
from tests.dist.reshardings import made, on_ranks, one_case, sharded, train_to_cursor, ways
from tests.dist.sharded_world import (
    TABLES,
    WHOLE,
    OneStore,
    check_shards,
    divide_among,
    expected,
    old_shards,
    sentences,
    sharding_on,
    train_on,
    train_shards,
    whole_row,
)
from tests.dist.test_shard_view import shardings
from tests.train.cases import table
from tiercache.dist.communicator import communicator_of
from tiercache.dist.resharding import copy_shard
from tiercache.dist.shard_view import ShardView
from tiercache.dist.shard_writer import ShardWriter
from tiercache.errors import BudgetError, DatasetError, RankError, StateError
from tiercache.planning.schedule import Schedule
from tiercache.planning.sharding_planner import sliced
from tiercache.store import Cursor, MemoryEngine, Store, hash_keys
from tiercache.store.opening import newest_record
from tiercache.store.rank_folder import RankFolder
from tiercache.store.sharding import ShardingPlan, TableSharding, hash_bounds


def check_rows(store: Store, sharding: ShardingPlan, rank: int, wanted: dict[str, dict[int, Any]]) -> int:
    """Compare a shard with the rows of the oracle, key by key; returns its number of vector elements."""
    numbers = 0
    for shard in sharding.shard_tables(TABLES, rank):
        whole, hashes = WHOLE[shard.name], sharding.owned_hashes(shard.name, rank)
        keys = np.array(sorted(wanted[shard.name]), dtype=np.int64)
        mine = keys[:0]
        if hashes is not None:
            of = hash_keys(keys, shard.table_id).astype(object)
            mine = keys[(of >= hashes[0]) & (of < hashes[1])]
        found = list(store.scan(shard.name, chunk_rows=7))
        assert sorted(key for ks, _ in found for key in ks.tolist()) == mine.tolist()
        columns = slice(shard.first_column, shard.first_column + shard.dim)
        for ks, fields in found:
            numbers += fields[0].size
            for i, key in enumerate(ks.tolist()):
                for mine_, one in zip(fields, whole_row(whole, key, *wanted[shard.name][key]), strict=True):
                    assert mine_[i].tobytes() == (one[0, columns] if one.shape[1] == whole.dim else one[0]).tobytes()
    return numbers


@settings(max_examples=25, deadline=None)
@given(old=shardings(TABLES), new=shardings(TABLES), commits=st.integers(0, 7))
def test_every_key_and_column_is_in_one_new_part_with_its_state(
    old: ShardingPlan, new: ShardingPlan, commits: int
) -> None:
    shards = old_shards(old, commits)
    whole = OneStore(TABLES, old, shards)  # closes the shards when collected
    cursor = shards[0].commit.cursor
    wanted, numbers = expected(cursor), 0
    for rank in range(new.num_ranks):
        with Store.open(None, tables=new.shard_tables(TABLES, rank), engine=MemoryEngine()) as store:
            commit = copy_shard(whole, store, new, rank)
            assert (commit.id, commit.cursor) == (0, (0, 0))
            assert store.state() == shards[0].state()
            assert commit.settings == shards[0].commit.settings
            numbers += check_rows(store, new, rank, wanted)
    assert numbers == sum(len(keys) * WHOLE[name].dim for name, keys in wanted.items())


def test_only_shards_and_pieces_with_wanted_rows_are_read() -> None:
    """From two ranks by row to three: the first of three reads nothing of the second of two."""
    ways = {one.name: TableSharding("row_wise") for one in TABLES}
    old, new = ShardingPlan(2, ways), ShardingPlan(3, ways)
    shards = old_shards(old, 4)
    with Store.open(None, tables=new.shard_tables(TABLES, 0), engine=MemoryEngine()) as store:
        whole = OneStore(TABLES, old, shards)
        copy_shard(whole, store, new, 0)
        check_rows(store, new, 0, expected(shards[0].commit.cursor))
    assert whole.parts[0].counters.row_bytes_read > 0
    assert whole.parts[1].counters.row_bytes_read == 0


def test_each_rank_has_the_state_it_had_and_a_new_one_that_of_rank_0() -> None:
    """Random generators differ between ranks."""
    old, new = sharding_on(2), sharding_on(3)
    shards = old_shards(old, 2)
    for rank, shard in enumerate(shards):
        shard.publish(shard.commit.cursor, state=b"%d" % rank, schedule_digest="", settings={}, environment={})
    whole = OneStore(TABLES, old, shards)
    for rank, state in enumerate((b"0", b"1", b"0")):
        with Store.open(None, tables=new.shard_tables(TABLES, rank), engine=MemoryEngine()) as store:
            copy_shard(whole, store, new, rank)
            assert store.state() == state


# -- with a training -------------------------------------------------------------------------------------


def test_what_cannot_go_on_is_refused_on_every_rank_and_nothing_has_changed(tmp_path: Path) -> None:
    case = one_case(shuffle=True)
    passes, path = case.cut(tmp_path / "passes"), tmp_path / "sharded"
    sharded(path, case, passes, (3, 16))
    others = one_case(data_seed=5).cut(tmp_path / "others")
    split = tc.repartition(passes, tmp_path / "split", rows=60, batch_multiple=8)

    def refused(kind: type[Exception], words: str, using: tc.PassDataset = passes, **options: Any) -> None:
        def body(ranks: Any) -> Any:
            made(path, using, ways(2, 1), ranks, **options).close()

        for error in meet(2, body):
            assert isinstance(error, (kind, RankError))
            with pytest.raises(type(error), match=words):
                raise error
        with tc.Store.open(path, mode="r") as store:
            assert (len(store.commit.ranks), store.commit.cursor) == (1, (3, 16))

    refused(DatasetError, "is neither the one that the store at .* was trained with nor split from it", others)
    refused(DatasetError, "is neither the one that the store at .* was trained with", order=3)
    refused(DatasetError, "is 16 samples inside pass 3, whose samples are shuffled", split)
    refused(BudgetError, r"store_budget is 100 bytes, but rank \d would have [\d.]+ KiB", store_budget=100)
    with tc.Store.open(path) as store:
        store.pin("best")
    refused(StateError, "has the pinned commits 'best', which resharding would drop: unpin them first")
    with tc.Store.open(path) as store:
        store.unpin("best")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiercache.dist.resharding.shutil.disk_usage", lambda _: type("Disk", (), {"free": 4096}))
        refused(BudgetError, r"the ranks on the disk of .* need [\d.]+ KiB while they are written, .* 4 KiB are free")

    refused(DatasetError, "is inside pass 3: train to the end of a pass", others, reorganized=True)
    with ShardWriter.open(path, case.tables, ways(1, 0), communicator_of()) as shards:
        train_to_cursor(shards.store, ShardView(passes, ways(1, 0), 0), case, (4, 0), shards=shards)

    def begun(ranks: Any) -> Any:
        with made(path, others, ways(2, 1), ranks, reorganized=True) as shards:
            return shards.store.commit.cursor, shards.store.commit.schedule_digest

    for rank, (cursor, digest) in enumerate(on_ranks(2, begun)):
        share = ShardView(others, ways(2, 1), rank)
        assert cursor == (0, 0)
        assert digest == Schedule(num_passes=5, dataset_digest=share.digest).digest


def test_a_rank_that_fails_ends_the_work_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = one_case()
    passes, path = case.cut(tmp_path / "passes"), tmp_path / "sharded"
    sharded(path, case, passes, (3, 0))
    from tiercache.dist import resharding

    copy = resharding.copy_shard

    def failing(*arguments: Any, **options: Any) -> Any:
        if arguments[3] == 1:
            raise OSError("the disk is gone")
        return copy(*arguments, **options)

    monkeypatch.setattr("tiercache.dist.resharding.copy_shard", failing)
    found = meet(3, lambda ranks: made(path, passes, ways(3, 1), ranks))
    assert isinstance(found[1], OSError)
    for error in (found[0], found[2]):
        assert isinstance(error, RankError)
        assert "rank 1 failed while writing rows for other ranks: the disk is gone" in str(error)
    assert len(newest_record(path).ranks) == 1
    monkeypatch.undo()
    on_ranks(2, lambda ranks: made(path, passes, ways(2, 0), ranks).close())
    with tc.Store.open(path, mode="r") as store:
        assert store.commit.cursor == (3, 0)
        assert [folder.name for folder in path.glob("rank-*")] == ["rank-1"]


# -- folders on other disks -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2], ids=["one process", "the old ranks"])
def test_folders_of_a_division_that_ended_early_go_with_the_next_opening(tmp_path: Path, num_ranks: int) -> None:
    """Also those on other disks, which no commit names."""
    path, disk = tmp_path / "s", tmp_path / "disk"
    train_on(path, 2, 2)

    def body(ranks: Any) -> None:
        with ShardWriter.open(path, TABLES, sharding_on(3), ranks, resharded=True, shard_dirs=[path, disk, disk]):
            raise OSError("the machine is gone")

    assert all(isinstance(error, OSError) for error in meet(3, body))
    check_shards(path, Cursor(1))
    assert {folder.name for folder in disk.iterdir()} == {"rank-1", "rank-2"}
    if num_ranks == 1:
        Store.open(path).close()
    else:
        train_on(path, 2, 0)
    assert [*disk.iterdir(), *path.glob("other-ranks*")] == []
    check_shards(path, Cursor(1))


def test_folders_of_old_ranks_that_stay_go_with_the_next_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit of the new ranks is valid, although a disk refused to delete the old ones' data."""
    path, disk = tmp_path / "s", tmp_path / "disk"
    train_on(path, 3, 2, shard_dirs=[path, disk, disk])

    def failing(_: RankFolder) -> None:
        raise PermissionError("the disk is read-only")

    with monkeypatch.context() as patch:
        patch.setattr(RankFolder, "delete", failing)
        assert divide_among(path, 2) == [None] * 2
    assert {folder.name for folder in disk.iterdir()} == {"rank-1", "rank-2"}
    check_shards(path, Cursor(1))
    train_on(path, 2, 0)
    assert [*disk.iterdir(), *path.glob("other-ranks*")] == []
    check_shards(path, Cursor(1))


def test_folders_get_names_that_commits_can_read(tmp_path: Path) -> None:
    path = tmp_path / "s"
    train_on(path, 2, 1, Cursor(0), shard_dirs=[path, tmp_path / "x" / ".." / "disk"])
    assert newest_record(path).folders == (".", str(tmp_path / "disk" / "rank-1"))
    found = train_shards(tmp_path / "t", 2, 1, shard_dirs=[tmp_path / "t", tmp_path / "a\nb"])
    assert "pass a folder with a printable name" in sentences(found)
    assert not (tmp_path / "t").exists()


# -- what other ranks inherit besides rows, and predictions of it ------------------------------------------------


def test_learning_rates_follow_tables_to_their_new_groups() -> None:
    """A table cut into columns was a separate group; if its rate differs, it cannot join the others."""
    alike = tuple(table(name, 4, tc.optim.RowWiseAdagrad(learning_rate=0.1)) for name in ("a", "b"))
    row = TableSharding("row_wise")
    old = ShardingPlan(2, {"a": row, "b": sliced(4, [0, 1])})
    new = ShardingPlan(1, {"a": row, "b": row})
    for rates, joins in (({"a": 0.5, "b": 0.5}, True), ({"a": 0.5, "b": 0.25}, False)):
        shards = [Store.open(None, tables=old.shard_tables(alike, rank), engine=MemoryEngine()) for rank in range(2)]
        for shard in shards:
            kept = {"steps": 7, "learning_rates": rates}
            shard.publish(Cursor(0), state=b"", schedule_digest="", settings=kept, environment={})
        with Store.open(None, tables=alike, engine=MemoryEngine()) as store:
            if not joins:
                with pytest.raises(ValueError, match=r"'b', 'a' of .* share a group, .* but had 0.25 and 0.5: set one"):
                    copy_shard(OneStore(alike, old, shards), store, new, 0)
            else:
                commit = copy_shard(OneStore(alike, old, shards), store, new, 0)
                assert commit.settings == {"steps": 7, "learning_rates": rates}


def test_rows_of_a_rank_are_predicted_from_sizes() -> None:
    """Exactly, or up to four standard deviations more."""
    old, new = sharding_on(3), sharding_on(4, 1)
    shards = old_shards(old, 5)
    known = expected(shards[0].commit.cursor)
    predicted = OneStore(TABLES, old, shards)
    for name, keys in known.items():
        hashes = hash_keys(np.array(list(keys), np.int64), WHOLE[name].table_id).astype(object)
        assert predicted.most_rows(name, (0, 1 << 64)) == len(keys)
        bounds = hash_bounds(new.num_ranks)
        for low, high in pairwise(bounds):
            assert np.count_nonzero((hashes >= low) & (hashes < high)) <= predicted.most_rows(name, (low, high))
