"""One training on several ranks ends with the rows, the states and the dense weights of one process."""

import gc
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import tiercache as tc
from tests.dist.meeting import meet
from tests.dist.pool import RanksPool
from tests.dist.trainings import (
    CASES,
    KINDS,
    assert_as_alone,
    assert_close,
    assert_same_rows,
    every_table,
    model_of,
    on_ranks,
    open_sharded,
    resident,
    step,
    stored,
    train,
    train_and_stop,
    trained,
)
from tiercache.dist.communicator import AnyCommunicator
from tiercache.dist.shard_writer import ShardWriter
from tiercache.planning.sharding_planner import sharding_of
from tiercache.store.sharding import ShardingPlan, TableSharding, groups_of_rank


def test_one_rank_that_is_given_its_folder_ends_with_the_bits_of_one_process(
    ranks_pool: RanksPool, tmp_path: Path
) -> None:
    """That is the store itself: batches look up rows in place."""
    found = on_ranks(ranks_pool, 1, tmp_path, "bags", shard_dirs=[str(tmp_path / "model.tc")])

    assert_form(tmp_path / "model.tc", 1, "lmdb")
    theirs = resident(CASES["bags"], tc.PassDataset.open(tmp_path / "passes"))
    assert_as_alone(stored(tmp_path), found[0], theirs, tolerance=0)


@pytest.mark.parametrize(
    ("size", "folders", "words"),
    [
        (1, ["a"], "shard_dirs[0] is "),
        (1, ["model.tc", "b"], "shard_dirs= names 2 folders for 1 ranks: pass one for each rank"),
        (1, [], "shard_dirs= names 0 folders for 1 ranks: pass one for each rank"),
        (2, ["a", "b"], "shard_dirs[0] is "),
        (2, ["model.tc"], "shard_dirs= names 1 folders for 2 ranks: pass one for each rank"),
        (2, ["model.tc", "s3://bucket/b"], "the folder of a rank must be a local path"),
    ],
)
def test_folders_of_ranks_that_make_no_sense_are_refused(
    ranks_pool: RanksPool, tmp_path: Path, size: int, folders: list[str], words: str
) -> None:
    CASES["one"].cut(tmp_path / "passes")
    given = [folder if "://" in folder else str(tmp_path / folder) for folder in folders]

    errors = ranks_pool.errors(size, train, case="one", folder=str(tmp_path), shard_dirs=given)

    assert all(error is not None and words in error[1] for error in errors), errors
    assert [entry.name for entry in tmp_path.iterdir()] == ["passes"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("within", [False, True])
def test_a_training_that_was_left_goes_on_to_the_same_bits(ranks_pool: RanksPool, tmp_path: Path, within: bool) -> None:
    whole = on_ranks(ranks_pool, 2, tmp_path / "whole", "bags")

    on_ranks(ranks_pool, 2, tmp_path / "left", "bags", train_and_stop, passes=5, batches=2, within=within)
    ended = on_ranks(ranks_pool, 2, tmp_path / "left", "bags")

    assert_same_rows(stored(tmp_path / "left"), stored(tmp_path / "whole"))
    for name, value in whole[0].items():
        np.testing.assert_array_equal(ended[0][name], value, err_msg=name)


def misuse(ranks: AnyCommunicator, case: str, folder: str, *, what: str) -> None:
    one = CASES[case]
    criterion = nn.BCEWithLogitsLoss()
    with open_sharded(one, folder, **({"seed": ranks.rank} if what == "seeds" else {})) as cache:
        model, _ = model_of(cache, one)
        for p in cache.passes(epochs=1):
            batches = p.batches(one.batch)
            first = next(batches)
            if what == "no step":
                criterion(model(first), first.label).backward()
                continue
            if what == "another batch":
                model([first, next(batches)][ranks.rank])
            if what == "a step of one":
                model.module(first).sum().backward()  # without torch's reduction, which would meet it first
                if ranks.rank == 1:
                    cache.optimizer.step()
                model.module(next(batches))
            if what == "size":
                next(p.batches(0))
            if what == "sizes":
                next(p.batches(one.batch + ranks.rank))
            if what == "one rank's micro-batch":
                if ranks.rank == 1:
                    p._before_batch = _broken
                for batches in p.steps(one.batch, micro_batches=4):
                    list(batches)
            if what == "one rank's samples":
                if ranks.rank == 1:
                    p.source.whole.read = _broken  # type: ignore[method-assign]
                list(batches)


def _broken(*_: Any, **__: Any) -> Any:
    raise OSError("the disk of rank 1 is gone")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("seeds", "ranks differ in seed"),
        ("no step", "ended between backward and step"),
        ("another batch", "looks up a different batch than rank"),
        ("a step of one", "did something else while rank"),
        ("size", "invalid batch size"),
        ("sizes", "makes a different batch than rank"),
        ("one rank's micro-batch", "the disk of rank 1 is gone"),
        ("one rank's samples", "the disk of rank 1 is gone"),
    ],
)
def test_what_goes_wrong_on_one_rank_is_said_on_all(
    ranks_pool: RanksPool, tmp_path: Path, what: str, sentence: str
) -> None:
    """No rank waits for one that failed."""
    CASES["one"].cut(tmp_path / "passes")

    errors = ranks_pool.errors(2, misuse, case="one", folder=str(tmp_path), what=what)

    assert all(error is not None and sentence in error[1] for error in errors), errors


ROW, TABLE, COLUMN, COPIES = KINDS


@pytest.mark.sampled(8)
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(
    ("stages", "engine", "between"),
    [
        pytest.param([(2, ROW), (1, ROW)], "lmdb", "disks", id="2 to 1"),
        pytest.param([(1, ROW), (3, COLUMN)], "lmdb", "disks", id="1 to 3"),
        pytest.param([(3, TABLE), (2, COPIES)], "lmdb", "disks", id="3 to 2"),
        pytest.param([(2, "auto"), (2, "auto")], "lmdb", "compacted", id="compacted"),
        pytest.param([(2, "auto"), (2, "auto")], "zarr", "compacted", id="compacted zarr"),
        pytest.param([(2, "auto"), (1, "auto")], "lmdb", "compacted", id="compacted 2 to 1"),
        pytest.param([(1, "auto"), (2, "auto")], "zarr", "compacted", id="compacted 1 to 2"),
        pytest.param([(3, "auto"), (2, "auto")], "lmdb", "compacted", id="compacted 3 to 2"),
        pytest.param([(1, "auto"), (2, "auto")], "lmdb", "", id="plain to 2"),
        pytest.param([(2, "auto"), (1, "auto")], "zarr", "", id="2 to plain"),
        pytest.param([(size, ROW) for size in (1, 3, 1, 2, 1)], "lmdb", "", id="to and fro"),
        pytest.param([(2, "auto"), (3, "auto"), (1, "auto")], "zarr", "in another order", id="in another order"),
    ],
)
def test_a_training_goes_on_with_other_ranks(
    ranks_pool: RanksPool, tmp_path: Path, stages: list[tuple[int, str]], engine: str, between: str, within: bool
) -> None:
    """From a commit or from inside a pass, with other shardings, from folders on a disk, and after a compaction: rows,
    states and dense weights of one process. Commits are counted on, and no leftovers remain.
    """
    path, disk, id_ = tmp_path / "model.tc", tmp_path / "disk", -1
    order = {"order_seed": 5 if between == "in another order" else None}
    for turn, (size, kind) in enumerate(stages):
        options: dict[str, Any] = {"sharding": kind if kind == "auto" else every_table("bags", kind), **order}
        on_disk = disk if between == "disks" and turn == 0 else None
        if on_disk is not None:
            options["shard_dirs"] = [str(path), *[str(disk)] * (size - 1)]
        if turn < len(stages) - 1:
            stop = {"passes": 2 * turn + 1, "batches": 1, "within": within, "engine": None if turn else engine}
            on_ranks(ranks_pool, size, tmp_path, "bags", train_and_stop, **stop, **options)
        else:
            found = on_ranks(ranks_pool, size, tmp_path, "bags", **options)
        assert_form(path, size, engine, on_disk)
        with tc.Store.open(path) as store:
            assert store.commit.id > id_
            id_, at = store.commit.id, store.commit.cursor
            if between == "compacted" and at.sample:
                with pytest.raises(
                    ValueError, match="stands inside pass 1: train to the end of a pass before its rows"
                ):
                    store.compact()
            elif between == "compacted":
                assert store.compact().cursor == store.compact().cursor == at
    assert not [*disk.glob("*")]
    assert_close(tmp_path, "bags", found[0], **order)
    assert tc.store.verify(path)["problems"] == []


def test_one_process_trains_where_ranks_made_no_commit(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """They were killed before their first one: their folders go."""
    passes = CASES["one"].cut(tmp_path / "passes")

    def body(ranks: Any) -> None:
        sharding = sharding_of(passes, 2, "auto", number_bytes=4)
        ShardWriter.open(tmp_path / "model.tc", passes.tables, sharding, ranks).close()

    assert meet(2, body) == [None, None]
    assert [folder.name for folder in (tmp_path / "model.tc").glob("rank-*")] == ["rank-1"]

    on_ranks(ranks_pool, 1, tmp_path, epochs=1)

    assert_form(tmp_path / "model.tc", 1, "lmdb")


@pytest.mark.parametrize("rank", [0, 1])
def test_groups_have_the_compression_of_their_own_tables(rank: int) -> None:
    """Also in a process that has opened a store of the same tables without compression before."""
    tables = CASES["one"].tables
    for compression in (None, "zstd", "blosc", None):
        given = tuple(replace(table, compression=compression) for table in tables)
        for sharding in (None, ShardingPlan(2, {table.name: TableSharding("row_wise") for table in tables})):
            assert {group.compression for group in groups_of_rank(given, sharding, rank)} == {compression}


@pytest.mark.parametrize("epochs", [0, 1])
def test_ranks_keep_the_compression_of_a_plain_store(ranks_pool: RanksPool, tmp_path: Path, epochs: int) -> None:
    """The store's creator chose it, the dataset does not: with a commit or without."""
    passes, path = CASES["one"].cut(tmp_path / "passes"), tmp_path / "model.tc"
    tc.Store.open(path, tables=[replace(table, compression="zstd") for table in passes.tables]).close()
    if epochs:
        on_ranks(ranks_pool, 1, tmp_path, epochs=epochs)

    for size in (2, 1):
        found = on_ranks(ranks_pool, size, tmp_path)

        assert_form(path, size, "zarr")
        with tc.Store.open(path, mode="r") as store:
            assert {table.compression for table in store.tables} == {"zstd"}
    assert_close(tmp_path, "one", found[0])
    errors = ranks_pool.errors(2, train, case="one", folder=str(tmp_path), engine="lmdb")
    assert all("was created with engine 'zarr', not 'lmdb'" in error[1] for error in errors if error is not None), (
        errors
    )
    assert None not in errors
    with tc.Store.open(path, mode="r") as store:
        assert {table.compression for table in store.tables} == {"zstd"}


FILES = {
    "lmdb": {"blocks.bin", "data.mdb", "HEAD"},
    "zarr": {"commits", "heads", "ranks", "segments", "states", "zarr.json"},
}


def assert_form(path: Path, size: int, engine: str, disk: Path | None = None) -> None:
    """Assert that a store has ``size`` ranks, with folders in it or on a disk, and no leftovers."""
    assert tc.store.info(path).get("ranks", 1) == size
    folders = [path, *((disk or path) / f"rank-{rank}" for rank in range(1, size))]
    for rank, folder in enumerate(folders):
        names = {entry.name for entry in folder.iterdir() if entry not in folders} - {"leases", "schedule"}
        home = {"home.json"} if rank and disk is not None else set()
        assert names == {"store.json", "writer.lock", *FILES[engine], *home} - ({"commits"} if rank else set()), folder
    for rank, folder in enumerate(folders[1:], 1):
        marker = json.loads((folder / "store.json").read_text())
        assert (marker["format"], marker["engine"], marker["rank"]) == ("tiercache rank", engine, rank)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_rows_from_outside_are_trained_by_several_ranks(ranks_pool: RanksPool, tmp_path: Path, engine: str) -> None:
    """An import makes a store of one rank without a schedule: ranks begin with its rows, as one process does."""
    on_ranks(ranks_pool, 1, tmp_path, "bags", epochs=1)
    with tc.Store.open(tmp_path / "model.tc", mode="r") as store:
        tc.export_store(store, tmp_path / "rows", format="numpy")
        tables, theirs = store.tables, {table.name: store.live_rows(table.name) for table in store.tables}
    (tmp_path / "model.tc").rename(tmp_path / "first.tc")
    for name in ("model.tc", "alone/model.tc"):
        with tc.Store.open(tmp_path / name, tables=tables, engine=engine) as store:
            tc.import_store(tmp_path / "rows", store)
    (tmp_path / "alone" / "passes").symlink_to(tmp_path / "passes")

    alone = on_ranks(ranks_pool, 1, tmp_path / "alone", "bags", epochs=1)
    found = on_ranks(ranks_pool, 2, tmp_path, "bags", epochs=1)

    assert_form(tmp_path / "model.tc", 2, engine)
    with tc.Store.open(tmp_path / "model.tc", mode="r") as store:
        assert {table.name: store.live_rows(table.name) for table in store.tables} == theirs
    assert_same_rows(stored(tmp_path), stored(tmp_path / "alone"), 1e-5)
    for name, value in alone[0].items():
        np.testing.assert_allclose(found[0][name], value, atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("sizes", "within"), [((3, 1), True), ((2, 2), True), ((1, 2), False), ((1, 1), True)])
def test_a_training_goes_on_with_smaller_passes_for_fewer_devices(
    ranks_pool: RanksPool, tmp_path: Path, sizes: tuple[int, int], within: bool
) -> None:
    """Split at aligned samples from its position, inside a pass or not: the same batches, and so the same end."""
    whole = CASES["short"].cut(tmp_path / "whole")
    on_ranks(ranks_pool, sizes[0], tmp_path, "short", train_and_stop, passes=5, batches=1, within=within)
    (tmp_path / "passes").rename(tmp_path / "old")
    split = tc.repartition(tmp_path / "old", tmp_path / "passes", rows=60, batch_multiple=13)
    assert len(split) > len(whole)

    found = on_ranks(ranks_pool, sizes[1], tmp_path, "short")

    assert found[0]["commit"] == [2 * len(split), 0]
    (tmp_path / "passes").rename(tmp_path / "split")
    (tmp_path / "old").rename(tmp_path / "passes")
    assert_close(tmp_path, "short", found[0])


def commit_twice(ranks: AnyCommunicator, case: str, folder: str) -> list[Any]:
    one, found = CASES[case], []
    with open_sharded(one, folder) as cache:
        for p, number in trained(cache, one):
            if p.index == 1 and number == 1:
                cache.commit()
                cache.commit()
                break
    with open_sharded(one, folder) as cache:
        model, optimizer = model_of(cache, one)
        for p in cache.passes(epochs=one.epochs):
            if not found:
                cache.commit()
                found.append(list(cache.store.commit.cursor))
            for batch in p.batches(one.batch, shuffle=one.shuffle):
                step([batch], model, optimizer)
    return found


def test_two_commits_at_one_place_lose_nothing(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Twice in a row, and once more before the first batch of a training resumed inside a pass."""
    on_ranks(ranks_pool, 2, tmp_path / "whole")

    told = on_ranks(ranks_pool, 2, tmp_path / "twice", body=commit_twice)

    assert told == [[[1, 32]]] * 2
    assert_same_rows(stored(tmp_path / "twice"), stored(tmp_path / "whole"))


def go_on_after_a_failure(ranks: AnyCommunicator, case: str, folder: str, *, what: str) -> str:
    """Have a rank fail once in one step of a commit; all ranks raise; then train to the end with the same cache."""
    one, said = CASES[case], ""
    with open_sharded(one, folder) as cache:
        tracked = model_of(cache, one)
        shards = cache._parts.training_store._shards
        assert shards is not None
        victim, step, there = {
            "prepare": (1, "publish", cache.store),
            "publish": (0, "publish_prepared", shards.writer),
            "hear": (1, "take", shards.writer),
        }[what]
        plain = getattr(there, step)

        def broken(*given: Any, **options: Any) -> Any:
            prepared = shards.writer.prepared
            at = given[0] if what == "prepare" else None if prepared is None else prepared.commit.cursor
            if at is not None and at[0] == 2:
                setattr(there, step, plain)
                raise OSError("the disk of one rank is gone")
            return plain(*given, **options)

        if ranks.rank == victim:
            setattr(there, step, broken)
        for _ in range(2):
            try:
                for _ in trained(cache, one, tracked):
                    pass
            except (OSError, tc.TierCacheError) as error:
                said = str(error)
            else:
                return said
    raise AssertionError("it failed twice")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["prepare", "publish", "hear"])
def test_a_training_goes_on_in_the_same_process_after_one_rank_failed(
    ranks_pool: RanksPool, tmp_path: Path, what: str
) -> None:
    """The other's prepared commit is dropped; a common one is published; and no step is lost."""
    on_ranks(ranks_pool, 2, tmp_path / "whole")

    told = on_ranks(ranks_pool, 2, tmp_path / "failed", body=go_on_after_a_failure, what=what)

    assert all("the disk of one rank is gone" in sentence for sentence in told)
    assert_same_rows(stored(tmp_path / "failed"), stored(tmp_path / "whole"))


def leave_and_train(ranks: AnyCommunicator, case: str, folder: str, *, engine: str) -> None:
    """Leave a cache unclosed in the middle of a pass, and train to the end with another one."""
    one = CASES[case]

    def leave() -> None:
        cache = open_sharded(one, folder, engine=engine)
        for p, number in trained(cache, one):
            if (p.index, number) == (3, 1):
                break

    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        leave()
        gc.collect()
    ranks.barrier()
    train(ranks, case, folder)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_caches_of_ranks_that_are_garbage_let_others_train(ranks_pool: RanksPool, tmp_path: Path, engine: str) -> None:
    """Their stores close themselves, with the locks of all ranks; uncommitted passes are trained again."""
    on_ranks(ranks_pool, 2, tmp_path / "whole")

    on_ranks(ranks_pool, 2, tmp_path / "left", body=leave_and_train, engine=engine)

    assert_form(tmp_path / "left" / "model.tc", 2, engine)
    assert_same_rows(stored(tmp_path / "left"), stored(tmp_path / "whole"))
