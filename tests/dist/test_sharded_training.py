"""One training on several ranks ends with the rows, the states and the dense weights of one process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiercache as tc
from tests.dist.meeting import meet
from tests.dist.pool import RanksPool
from tests.dist.trainings import CASES, assert_as_alone, assert_same_rows, on_ranks, resident, stored
from tiercache.dist.shard_writer import ShardWriter
from tiercache.planning.sharding_planner import sharding_of
from tiercache.store.sharding import ShardingPlan, TableSharding, groups_of_rank

KINDS = ("row_wise", "table_wise", "column_wise", "data_parallel")


def assert_close(folder: Path, case: str, dense: dict[str, np.ndarray], *, steps: int | None = None) -> None:
    """Compare a sharded store and dense weights with one process."""
    theirs = resident(CASES[case], tc.PassDataset.open(folder / "passes"), steps=steps)
    assert_as_alone(stored(folder), dense, theirs)


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
    """Too few, too many, or another one than the store's for rank 0: nothing is made."""
    CASES["one"].cut(tmp_path / "passes")
    given = [folder if "://" in folder else str(tmp_path / folder) for folder in folders]

    errors = ranks_pool.errors(size, "tests.dist.trainings:train", case="one", folder=str(tmp_path), shard_dirs=given)

    assert all(error is not None and words in error[1] for error in errors), errors
    assert [entry.name for entry in tmp_path.iterdir()] == ["passes"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro_batches", [2, 5])
def test_micro_batches_end_as_one_batch(ranks_pool: RanksPool, tmp_path: Path, micro_batches: int) -> None:
    """All see the rows before the step; micro-batches without samples on a rank are among them."""
    found = on_ranks(ranks_pool, 3, tmp_path, "bags", micro_batches=micro_batches)

    assert_close(tmp_path, "bags", found[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_whose_rows_are_a_gpus_ends_as_on_one_process(
    ranks_pool: RanksPool, tmp_path: Path, kind: str
) -> None:
    """On the shim: the training thread queues transfers of rows and pooled vectors, one micro-batch after another."""
    options = {"queued": True, "micro_batches": 3, "steps": 4, "sharding": sharded("bags", kind)}
    found = on_ranks(ranks_pool, 2, tmp_path, "bags", **options)

    assert_close(tmp_path, "bags", found[0], steps=4)


@pytest.mark.parametrize("queued", [False, True])
def test_ids_and_counts_of_the_next_batch_travel_while_one_is_trained(
    ranks_pool: RanksPool, tmp_path: Path, queued: bool
) -> None:
    """By default: on a separate thread and communicator. The training thread transfers rows, by another one."""
    for told in on_ranks(ranks_pool, 2, tmp_path, body="asked_ahead", queued=queued):
        assert {event for event in told if event.startswith("input")} == {
            "input exchange_splits tiercache-input", "input all_to_all tiercache-input"
        }  # fmt: skip
        assert {event.split()[-1] for event in told if event.startswith("exchange ")} == {"MainThread"}
        before = told[: told.index("step")]
        assert sum(event.startswith("input all_to_all") for event in before) >= 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_a_gpu_has_the_host_wait_for_nothing(ranks_pool: RanksPool, tmp_path: Path, kind: str) -> None:
    """Forward, backward and step: the exchange must not read from the device, which would wait."""
    assert on_ranks(ranks_pool, 2, tmp_path, "bags", "waits", sharding=sharded("bags", kind)) == [[], []]


OVERLAPPED = ["rows 0", "rows 1", "dense 0", "rows 2", "dense 1", "rows 3", "dense 2", "dense 3"]
ONE_BY_ONE = [f"{what} {number}" for number in range(4) for what in ("rows", "dense")]


@pytest.mark.parametrize(
    ("schedule", "queued", "order"),
    [("interleaved", False, OVERLAPPED), ("interleaved", True, OVERLAPPED), ("simple", False, ONE_BY_ONE)],
)
def test_the_rows_of_the_next_micro_batch_come_while_one_is_in_the_dense_part(
    ranks_pool: RanksPool, tmp_path: Path, schedule: str, queued: bool, order: list[str]
) -> None:
    """On a CPU from another thread; queued for a GPU by the training thread, in the same order on all ranks.

    The simple schedule does one thing after the other.

    From another thread they might precede the model's collectives on one rank and follow them on the next: a deadlock.
    """
    told = on_ranks(ranks_pool, 2, tmp_path, body="overlapped", schedule=schedule, queued=queued)

    assert told[0] == told[1] == [*order, "step"]


@pytest.mark.parametrize(("schedule", "order"), [("interleaved", OVERLAPPED), ("simple", ONE_BY_ONE)])
def test_rows_of_an_evaluation_come_while_the_batch_before_is_looked_at(
    ranks_pool: RanksPool, tmp_path: Path, schedule: str, order: list[str]
) -> None:
    """Or after it, by the order of events."""
    told = on_ranks(ranks_pool, 2, tmp_path, body="overlapped_evaluation", schedule=schedule)

    assert told[0] == told[1] == order


@pytest.mark.parametrize("queued", [False, True])
def test_micro_batches_that_are_resumed_in_the_next_pass_are_refused(
    ranks_pool: RanksPool, tmp_path: Path, queued: bool
) -> None:
    """Also one that was requested in its pass and delivered later: its numbers mean other rows now."""
    told = on_ranks(ranks_pool, 2, tmp_path, body="resumed_late", queued=queued)

    assert all("which has ended: use batches inside their own loop" in one for one in told)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("within", [False, True])
def test_a_training_that_was_left_goes_on_to_the_same_bits(ranks_pool: RanksPool, tmp_path: Path, within: bool) -> None:
    """Left in the middle of a pass, after a commit there or not."""
    whole = on_ranks(ranks_pool, 2, tmp_path / "whole", "bags")

    on_ranks(ranks_pool, 2, tmp_path / "left", "bags", "train_and_stop", passes=5, batches=2, within=within)
    ended = on_ranks(ranks_pool, 2, tmp_path / "left", "bags")

    assert_same_rows(stored(tmp_path / "left"), stored(tmp_path / "whole"))
    for name, value in whole[0].items():
        np.testing.assert_array_equal(ended[0][name], value, err_msg=name)


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

    errors = ranks_pool.errors(2, "tests.dist.trainings:misuse", case="one", folder=str(tmp_path), what=what)

    assert all(error is not None and sentence in error[1] for error in errors), errors


def sharded(case: str, kind: str) -> dict[str, str]:
    """Return one kind for all tables."""
    return dict.fromkeys([table.name for table in CASES[case].tables], kind)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "row_wise"), (1, "row_wise")),
        ((1, "row_wise"), (3, "column_wise")),
        ((3, "table_wise"), (2, "data_parallel")),
    ],
)
def test_a_training_goes_on_with_another_number_of_ranks(
    ranks_pool: RanksPool, tmp_path: Path, before: tuple[int, str], after: tuple[int, str], within: bool
) -> None:
    """And another sharding: rows, states and dense weights of one process, from a commit or from inside a pass."""
    (size, kind), (new_size, new_kind) = before, after
    path, disk = tmp_path / "model.tc", tmp_path / "disk"
    options = {"sharding": sharded("bags", kind), "shard_dirs": [str(path), *[str(disk)] * (size - 1)]}
    on_ranks(ranks_pool, size, tmp_path, "bags", "train_and_stop", passes=3, batches=1, within=within, **options)
    assert_form(path, size, "lmdb", disk)

    found = on_ranks(ranks_pool, new_size, tmp_path, "bags", sharding=sharded("bags", new_kind))

    assert_form(path, new_size, "lmdb")
    assert not [*disk.glob("*")]
    assert_close(tmp_path, "bags", found[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("before", "after", "engine"), [(2, 2, "lmdb"), (2, 2, "zarr"), (2, 1, "lmdb"), (1, 2, "zarr"), (3, 2, "lmdb")]
)
def test_a_compacted_store_goes_on_where_it_stood(
    ranks_pool: RanksPool, tmp_path: Path, before: int, after: int, engine: str
) -> None:
    """Also with another number of ranks: passes that are trained are not trained again."""
    path = tmp_path / "model.tc"
    on_ranks(ranks_pool, before, tmp_path, "bags", "train_and_stop", passes=3, batches=1, within=False, engine=engine)
    with tc.Store.open(path) as store:
        at = store.commit.cursor
        assert at.pass_index
        assert store.compact().cursor == store.compact().cursor == at

    found = on_ranks(ranks_pool, after, tmp_path, "bags")

    assert_close(tmp_path, "bags", found[0])
    assert tc.store.verify(path)["problems"] == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(("sizes", "engine"), [((1, 2), "lmdb"), ((2, 1), "zarr"), ((1, 3, 1, 2, 1), "lmdb")])
def test_a_plain_store_is_sharded_and_made_plain_again(
    ranks_pool: RanksPool, tmp_path: Path, sizes: tuple[int, ...], engine: str, within: bool
) -> None:
    """On resuming; commits are counted on, and no leftovers of either form remain."""
    path, ids = tmp_path / "model.tc", [-1]
    for turn, size in enumerate(sizes[:-1]):
        on_ranks(
            ranks_pool, size, tmp_path, "bags", "train_and_stop",
            passes=2 * turn + 1, batches=1, within=within, engine=None if turn else engine,
        )  # fmt: skip
        assert_form(path, size, engine)
        with tc.Store.open(path, mode="r") as store:
            assert store.commit.id > ids[-1]
            ids.append(store.commit.id)

    found = on_ranks(ranks_pool, sizes[-1], tmp_path, "bags")

    assert_form(path, sizes[-1], engine)
    assert_close(tmp_path, "bags", found[0])
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
    errors = ranks_pool.errors(2, "tests.dist.trainings:train", case="one", folder=str(tmp_path), engine="lmdb")
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
    on_ranks(ranks_pool, sizes[0], tmp_path, "short", "train_and_stop", passes=5, batches=1, within=within)
    (tmp_path / "passes").rename(tmp_path / "old")
    split = tc.repartition(tmp_path / "old", tmp_path / "passes", rows=60, batch_multiple=13)
    assert len(split) > len(whole)

    found = on_ranks(ranks_pool, sizes[1], tmp_path, "short")

    assert found[0]["commit"] == [2 * len(split), 0]
    (tmp_path / "passes").rename(tmp_path / "split")
    (tmp_path / "old").rename(tmp_path / "passes")
    assert_close(tmp_path, "short", found[0])


def test_two_commits_at_one_place_lose_nothing(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Twice in a row, and once more before the first batch of a training resumed inside a pass."""
    on_ranks(ranks_pool, 2, tmp_path / "whole")

    told = on_ranks(ranks_pool, 2, tmp_path / "twice", body="commit_twice")

    assert told == [[[1, 32]]] * 2
    assert_same_rows(stored(tmp_path / "twice"), stored(tmp_path / "whole"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["prepare", "publish", "hear"])
def test_a_training_goes_on_in_the_same_process_after_one_rank_failed(
    ranks_pool: RanksPool, tmp_path: Path, what: str
) -> None:
    """The other's prepared commit is dropped; a common one is published; and no step is lost."""
    on_ranks(ranks_pool, 2, tmp_path / "whole")

    told = on_ranks(ranks_pool, 2, tmp_path / "failed", body="go_on_after_a_failure", what=what)

    assert all("the disk of one rank is gone" in sentence for sentence in told)
    assert_same_rows(stored(tmp_path / "failed"), stored(tmp_path / "whole"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_caches_of_ranks_that_are_garbage_let_others_train(ranks_pool: RanksPool, tmp_path: Path, engine: str) -> None:
    """Their stores close themselves, with the locks of all ranks; uncommitted passes are trained again."""
    on_ranks(ranks_pool, 2, tmp_path / "whole")

    on_ranks(ranks_pool, 2, tmp_path / "left", body="leave_and_train", engine=engine)

    assert_form(tmp_path / "left" / "model.tc", 2, engine)
    assert_same_rows(stored(tmp_path / "left"), stored(tmp_path / "whole"))
