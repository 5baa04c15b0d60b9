"""Raw keys on several ranks: each brings its own samples, and all end as one process, and as from samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.dist import raw_trainings
from tests.dist.pool import RanksPool
from tests.dist.raw_trainings import CASE
from tests.dist.trainings import assert_as_alone, assert_same_rows, stored
from tests.train.cases import Net, Result, open_store, result_of, table, tiered
from tests.train.oracle import initial_row
from tests.train.raw import key_sets
from tiercache.data.dataset_writer import write_dataset
from tiercache.data.raw_batch import OOV_KEY, RawBatch

BODIES = "tests.dist.raw_trainings:"
NAMES = [table.name for table in CASE.tables]
KINDS = ("column_wise", "row_wise", "table_wise", "data_parallel")


def mixed(turn: int) -> dict[str, str]:
    """Return a kind for each table, another one for another turn."""
    return dict(zip(sorted(NAMES), KINDS[turn:] + KINDS[:turn], strict=True))


def every(kind: str) -> dict[str, str]:
    """Return one kind for all tables."""
    return dict.fromkeys(NAMES, kind)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the case's passes of samples, and with their key sets alone."""
    key_sets(tmp_path / "keys", CASE.cut(tmp_path / "passes"))
    return tmp_path


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Result, dict[str, Any]]]:
    """The result of the case's loop in one process, and its lookups; each variant runs once."""
    known: dict[tuple[str, bool], tuple[Result, dict[str, Any]]] = {}

    def trained(
        missing: str = "error", *, evaluates: bool = False, reweighs: bool = False
    ) -> tuple[Result, dict[str, Any]]:
        way = missing, reweighs
        if way not in known:
            folder = tmp_path_factory.mktemp("alone")
            samples = CASE.cut(folder / "passes")
            passes = key_sets(folder / "keys", samples)
            with open_store(folder, CASE, "memory") as store, tiered(store, passes, device="cpu") as cache:
                torch.manual_seed(1)
                model = Net(cache, CASE)
                optimizer = torch.optim.SGD(model.parameters(), lr=CASE.dense_lr, momentum=0.5)
                cache.register(model=model, optimizer=optimizer)
                optimizer = cache.optimizer
                how = {"missing": missing, "evaluates": evaluates, "reweighs": reweighs}
                found = raw_trainings.run(cache, samples, model, optimizer, **how)
                known[way] = result_of(store, passes, model), found
        return known[way]

    return trained


def assert_close(folder: Path, dense: dict[str, Any], theirs: Result) -> None:
    """Compare a sharded store and dense weights with one process."""
    assert_as_alone(stored(folder, "raw.tc"), dense, theirs)


def assert_same_bits(folder: Path, ours: str, theirs: str) -> None:
    """Compare all rows of two sharded stores."""
    assert_same_rows(stored(folder, ours), stored(folder, theirs))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sharding", [*map(mixed, range(3)), *map(every, KINDS)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_raw_keys_end_with_the_bits_of_samples_and_as_one_process(
    ranks_pool: RanksPool, place: Path, alone: Any, size: int, sharding: dict[str, str]
) -> None:
    """Every sharding; last batches leave ranks without samples; the index is counted, and in the budget."""
    found = ranks_pool.run(size, BODIES + "train", folder=str(place), sharding=sharding)
    samples = ranks_pool.run(size, BODIES + "train_samples", folder=str(place), sharding=sharding)

    assert_same_bits(place, "raw.tc", "model.tc")
    for name, value in samples[0].items():
        np.testing.assert_array_equal(found[0][name], value, err_msg=name)
    assert_close(place, found[0], alone()[0])
    assert all(one["index_bytes"] >= 20 * 100 for one in found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("deal", ["uneven", "ended"])
def test_ranks_with_other_numbers_of_samples_and_of_batches_end_as_one_process(
    ranks_pool: RanksPool, place: Path, alone: Any, deal: str
) -> None:
    """Some have no samples in a batch, or no more batches: the global batch is the union. Twice the same bits."""
    for turn in range(2 if deal == "uneven" else 1):
        found = ranks_pool.run(3, BODIES + "train", folder=str(place), deal=deal, sharding=mixed(3))
        assert_close(place, found[0], alone()[0])
        (place / "raw.tc").rename(place / f"raw-{turn}.tc")
    if deal == "uneven":
        assert_same_bits(place, "raw-0.tc", "raw-1.tc")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("missing", ["zero", "init", "load"])
def test_missing_keys_are_looked_up_and_not_trained_as_on_one_process(
    ranks_pool: RanksPool, place: Path, alone: Any, missing: str, size: int
) -> None:
    """Keys of other sub-datasets and unknown ones, whichever rank owns them; and read-only batches after each pass."""
    evaluates = missing == "load"

    found = ranks_pool.run(
        size,
        BODIES + "train",
        folder=str(place),
        missing=missing,
        evaluates=evaluates,
        deal="uneven",
        sharding=mixed(3),
    )

    theirs, said = alone(missing, evaluates=evaluates)
    assert_close(place, found[0], theirs)
    if evaluates:
        assert len(said["evaluated"]) == 6
    for ours, other in zip(zip(*(one["evaluated"] for one in found), strict=True), said["evaluated"], strict=True):
        for name, vectors in other.items():
            np.testing.assert_allclose(np.concatenate([one[name] for one in ours]), vectors, atol=1e-5, rtol=1e-5)


def test_a_key_that_the_pass_lacks_is_named_on_its_rank_and_told_to_all(ranks_pool: RanksPool, place: Path) -> None:
    """With table, key and batch; the batch does not count, and all ranks continue with another one."""
    told = ranks_pool.run(3, BODIES + "missing_on_one_rank", folder=str(place))

    sentence = (
        "batch 2 of pass 0 has the key 77777 of table 'items' at entry 0 of feature 'item', but the key set of its "
        "pass lacks it: use samples of this pass, write key sets with all keys, or choose missing='load', 'init' "
        "or 'zero', which train no row for it"
    )
    other = ["RankError", f"rank 1 failed while making batch 2 of pass 0: {sentence}", None, None]
    assert [one[0] for one in told] == [other, ["KeyNotInPassError", sentence, 77_777, 2], other]
    assert all(one[1:] == [2, 18, 3] for one in told)


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        (
            "evaluates",
            "rank 1 did something else while rank 0 was making batch 1 of pass 0",
            "rank 0 did something else",
        ),
        ("shapes", "rank 1 failed while making batch 1 of pass 0: ValueError: label", "label has shape (1,): expected"),
        ("leaves", "a rank ended or did not answer while rank 0 was making batch 1 of pass 0", "no such file"),
    ],
)
def test_a_rank_that_makes_other_batches_is_told_of_on_all(
    ranks_pool: RanksPool, place: Path, what: str, first: str, second: str
) -> None:
    """A rank with another operation, or a foreign error: a message on each rank, and none hangs."""
    errors = ranks_pool.errors(2, BODIES + "misuse", folder=str(place), what=what)

    assert all(errors), errors
    for error, sentence in zip(errors, (first, second), strict=True):
        assert sentence in error[1]


def test_batches_without_a_sample_are_empty_on_all_ranks(ranks_pool: RanksPool, place: Path) -> None:
    """They count as batches; when all ranks have ended there is none."""
    told = ranks_pool.run(2, BODIES + "nothing_at_all", folder=str(place))

    assert told == [[[0, 0.0, [0, 66]]] * 2 + [0, 2, 0, True, 2, True]] * 2


def test_weights_that_the_schema_does_not_know_or_that_are_not_given_are_those_of_one_process(
    ranks_pool: RanksPool, place: Path, alone: Any
) -> None:
    """Though the owners of tables that are kept whole would pool their features."""
    found = ranks_pool.run(2, BODIES + "train", folder=str(place), reweighs=True, sharding=every("table_wise"))

    assert_close(place, found[0], alone(reweighs=True)[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, 3])
def test_a_training_by_raw_keys_goes_on_behind_a_commit_inside_a_pass(
    ranks_pool: RanksPool, place: Path, alone: Any, size: int
) -> None:
    """On as many ranks with the same bits, on more of them as one process; loaders start at the pass's position."""
    if size == 2:
        ranks_pool.run(2, BODIES + "train", folder=str(place))
        (place / "raw.tc").rename(place / "whole.tc")

    ranks_pool.run(2, BODIES + "train", folder=str(place), stop=[1, 1])
    found = ranks_pool.run(size, BODIES + "train", folder=str(place))

    assert_close(place, found[0], alone()[0])
    if size == 2:
        assert_same_bits(place, "raw.tc", "whole.tc")


def test_where_the_budget_has_no_room_for_an_index_keys_are_searched(
    ranks_pool: RanksPool, place: Path, alone: Any
) -> None:
    """The same training, in the bytes of the rows alone."""
    told = ranks_pool.run(2, BODIES + "train", folder=str(place), sharding=every("row_wise"))
    (place / "raw.tc").rename(place / "before.tc")

    found = ranks_pool.run(
        2,
        BODIES + "train",
        folder=str(place),
        sharding=every("row_wise"),
        device_budget=max(one["room"] for one in told),
    )

    assert max(one["index_bytes"] for one in found) < min(one["index_bytes"] for one in told) / 10  # of a small pass
    assert_same_bits(place, "raw.tc", "before.tc")


def test_raw_keys_are_found_by_the_cuda_kernels(ranks_pool: RanksPool, place: Path) -> None:
    """On the shim: a training to a commit inside a pass, with missing keys, ends with the CPU's bits."""
    options: dict[str, Any] = {"stop": [0, 1], "missing": "load", "sharding": mixed(0)}
    ranks_pool.run(2, BODIES + "train", folder=str(place), **options)
    (place / "raw.tc").rename(place / "cpu.tc")

    found = ranks_pool.run(2, BODIES + "train", folder=str(place), on_shim=True, **options)

    assert_same_bits(place, "raw.tc", "cpu.tc")
    assert all("key_index.find" in one["launches"] for one in found)


def test_keys_of_no_pass_have_the_row_out_of_the_vocabulary_whichever_rank_owns_it(
    ranks_pool: RanksPool, tmp_path: Path
) -> None:
    """In a read-only batch, as in an evaluation of passes, and while a later dataset without the row is trained."""
    schema = tc.Schema(tables=(table("a", 4),), features=(tc.Feature(name="a", table="a"),))
    keys = np.array([1, OOV_KEY, 3, 1, OOV_KEY, 5, 9, OOV_KEY])
    write_dataset(tmp_path / "passes", schema, [RawBatch.of(schema, {"a": keys})])

    told = ranks_pool.run(2, BODIES + "evaluate_unknown", folder=str(tmp_path), asked=[700, 3])

    known, (vectors, *_) = stored(tmp_path)["a"]
    rows = dict(zip(known.tolist(), vectors, strict=True))
    assert not np.array_equal(rows[OOV_KEY], initial_row(schema.tables[0], OOV_KEY))
    np.testing.assert_array_equal(told[0]["found"], [rows[OOV_KEY]])
    np.testing.assert_array_equal(told[1]["found"], [rows[OOV_KEY], rows[3]])

    write_dataset(tmp_path / "later", schema, [RawBatch.of(schema, {"a": keys[keys != OOV_KEY]})])
    told = ranks_pool.run(2, BODIES + "evaluate_unknown", folder=str(tmp_path), asked=[700, 900], dataset="later")
    np.testing.assert_array_equal(np.concatenate([one["found"] for one in told]), [rows[OOV_KEY]] * 3)
