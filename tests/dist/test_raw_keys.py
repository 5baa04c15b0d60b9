"""Raw keys on several ranks: each brings its own samples, and all end as one process, and as from samples."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.cache_options import gathered
from tests.datasets import raw_batch, write_dataset
from tests.dist import trainings
from tests.dist.pool import RanksPool
from tests.dist.trainings import (
    BAGS,
    OPTIONS,
    assert_as_alone,
    assert_same_rows,
    dense_of,
    model_of,
    step,
    step_by,
    stored,
)
from tests.train.cases import Net, Result, open_store, result_of, table, tiered
from tests.train.devices import shim
from tests.train.oracle import initial_row
from tests.train.raw import batch_arguments, key_sets
from tiercache.data.raw_batch import OOV_KEY
from tiercache.dist.communicator import AnyCommunicator
from tiercache.errors import KeyNotInPassError, RankError

CASE = replace(BAGS, num_samples=81, pass_rows=40, batch=14, shuffle=False)
"""Passes of 40, 40 and 1 samples, in batches of 14, 14 and 12; in the last pass only one rank has a sample."""
Arguments = tuple[dict[str, Any], dict[str, Any]]


def dealt(arguments: Arguments, low: int, high: int) -> Arguments:
    """Return samples [low, high) of a batch as a loader would give them."""
    keys, others = arguments
    found: dict[str, Any] = {}
    weights = dict(others["weights"])
    for name, given in keys.items():
        if isinstance(given, tuple):
            values, offsets = given
            entries = slice(int(offsets[low]), int(offsets[high]))
            found[name] = values[entries], offsets[low : high + 1] - offsets[low]
            if name in weights:
                weights[name] = weights[name][entries]
        else:
            found[name] = given[low:high]
    return found, {"weights": weights, "label": others["label"][low:high], "dense": others["dense"][low:high]}


def cut(number: int, size: int, num_ranks: int, deal: str) -> list[int]:
    if deal == "even":
        return [rank * size // num_ranks for rank in range(num_ranks + 1)]
    if deal == "ended":  # rank 0 has all but the others' samples of the first two batches
        return cut(number, size, num_ranks, "even") if number < 2 else [0, *[size] * num_ranks]
    random = np.random.default_rng([number, size, num_ranks])
    inner = np.sort(random.choice([0, 0, size // 3, size - 1, size], num_ranks - 1))
    return [0, *inner.tolist(), size]


def foreign(arguments: Arguments) -> Arguments:
    """Replace every fifth key: by one of other passes, or by an unknown one."""
    keys, others = arguments
    for name, given in keys.items():
        values = np.array(given[0] if isinstance(given, tuple) else given)
        flat = values.reshape(-1)
        flat[::5] = flat[::5] % 97 + np.where(np.arange(flat[::5].size) % 2, 0, 10_000)
        keys[name] = (values, given[1]) if isinstance(given, tuple) else values
    return keys, others


def reweighed(arguments: Arguments, number: int) -> Arguments:
    """Weight an unweighted feature, and in every other batch leave the weighted one unweighted."""
    keys, others = arguments
    weights = dict(others["weights"]) if number % 2 else {}
    weights["tag"] = np.arange(np.asarray(keys["tag"][0]).size, dtype=np.float32) % 3 - 0.5
    return keys, others | {"weights": weights}


def batches_of(samples: tc.PassDataset, sub_dataset: int, start: int, size: int) -> Iterator[Arguments]:
    for first in range(start, samples.passes[sub_dataset].samples, size):
        keys, others = batch_arguments(samples, sub_dataset, first, size)
        yield (
            {name: tuple(map(np.asarray, k)) if isinstance(k, tuple) else np.asarray(k) for name, k in keys.items()},
            others,
        )


def run(
    cache: Any,
    samples: tc.PassDataset,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rank: int = 0,
    size: int = 1,
    deal: str = "even",
    missing: str = "error",
    stop: list[int] | None = None,
    evaluates: bool = False,
    reweighs: bool = False,
) -> dict[str, Any]:
    """Train on the samples of one rank; until a commit after batch ``stop``, (pass, batch), if given."""
    evaluated, most = [], 0
    single = tc.EmbeddingCollection(cache.schema, ["user", "item"]) if evaluates else None
    if single is not None:
        cache.register(single=single)
    for p in cache.passes(epochs=CASE.epochs):
        every = batches_of(samples, p.sub_dataset, p.start_sample, CASE.batch)
        for number, arguments in enumerate(every, p.start_batch):
            given = arguments if missing == "error" else foreign(arguments)
            given = reweighed(given, number) if reweighs else given
            num_samples = len(given[1]["label"])
            bounds = cut(number, num_samples, size, deal)
            keys, others = dealt(given, *bounds[rank : rank + 2])
            gone = deal == "ended" and rank > 0 and number >= 2
            batch = p.batch(None) if gone else p.batch(keys, **others, missing=missing)
            most = max(most, cache._raw.index_bytes)
            assert batch is not None
            assert len(batch) == max(bounds[rank + 1] - bounds[rank], 1)
            assert batch.weight == size * ((bounds[rank + 1] - bounds[rank]) / num_samples)
            step([batch], model, optimizer)
            if stop == [p.index, number]:
                cache.commit()
                return {}
        if deal == "ended":
            assert p.batch(None) is None
        if single is not None:
            bounds = cut(1, num_samples, size, "uneven")
            keys, others = dealt(foreign(given), *bounds[rank : rank + 2])
            batch = cache.evaluate_batch(keys, **others)
            evaluated.append({name: found.detach().numpy() for name, found in single(batch).items()})
    return dense_of(model) | {"evaluated": evaluated, "index_bytes": most}


def train(ranks: AnyCommunicator, folder: str, *, on_shim: bool = False, **options: Any) -> dict[str, Any]:
    """Train a sharded store by raw keys of this rank's samples; with the CUDA kernels on the shim if ``on_shim``."""
    how = {name: options.pop(name) for name in ("deal", "missing", "stop", "evaluates", "reweighs") if name in options}
    place = Path(folder)
    samples, keys = tc.PassDataset.open(place / "passes"), tc.PassDataset.open(place / "keys")
    options |= {"device": shim()} if on_shim else {}
    with tc.TierCache(place / "raw.tc", keys, **gathered(OPTIONS | options)) as cache:
        model, optimizer = model_of(cache, CASE)
        found = run(cache, samples, model, optimizer, rank=ranks.rank, size=ranks.size, **how)
        assert cache.device_bytes <= 4 << 20
        launches = sorted(set(options["device"]._runtime.kernels.launches)) if on_shim else []
        return found | {"room": cache._rows.device.num_bytes, "launches": launches}


def missing_on_one_rank(ranks: AnyCommunicator, folder: str) -> list[Any]:
    """Give rank 1 a key that the pass lacks; then continue on all ranks with another batch."""
    samples, keys = (tc.PassDataset.open(Path(folder) / name) for name in ("passes", "keys"))
    with tc.TierCache(Path(folder) / "raw.tc", keys, **OPTIONS) as cache:
        model = Net(cache, CASE)
        cache.register(model=model)
        passes = cache.passes(epochs=1)
        p = next(passes)
        for arguments in islice(batches_of(samples, 0, 0, CASE.batch), 2):
            mine, others = dealt(arguments, 0, 3)
            model(p.batch(mine, **others)).sum().backward()
            cache.optimizer.step()
        error = None
        if ranks.rank == 1:
            mine["item"] = np.full((3, 3), 77_777)
        try:
            p.batch(mine, **others)
        except (KeyNotInPassError, RankError) as raised:
            error = [type(raised).__name__, str(raised), getattr(raised, "key", None), getattr(raised, "batch", None)]
        done = p.batches_done, p.samples_done
        mine, others = dealt(arguments, 0, 2)
        p.batch(mine, **others)
        return [error, *done, p.batches_done]


def misuse(ranks: AnyCommunicator, folder: str, *, what: str) -> None:
    """Have rank 1 leave the batches of a pass before rank 0 does, or misuse them in another way."""
    samples, keys = (tc.PassDataset.open(Path(folder) / name) for name in ("passes", "keys"))
    with tc.TierCache(Path(folder) / "raw.tc", keys, **OPTIONS) as cache:
        model, last = Net(cache, CASE), ranks.rank == 1
        cache.register(model=model)
        for p in cache.passes(epochs=1):
            for number, arguments in enumerate(batches_of(samples, p.sub_dataset, 0, CASE.batch)):
                mine, others = dealt(arguments, 0, 3)
                if last and number == 1:
                    if what == "evaluates":
                        cache.evaluate_batch(mine)
                    if what == "leaves":
                        raise OSError("no such file: the loader's of rank 1")
                    if what == "shapes":
                        others["label"] = [1.0]
                model(p.batch(mine, **others)).sum().backward()
                cache.optimizer.step()


def nothing_at_all(ranks: AnyCommunicator, folder: str) -> list[Any]:
    keys = tc.PassDataset.open(Path(folder) / "keys")
    with tc.TierCache(Path(folder) / "raw.tc", keys, **OPTIONS) as cache:
        model = Net(cache, CASE)
        cache.register(model=model)
        passes = cache.passes(epochs=1)
        p = next(passes)
        none = {"user": [], "friend": ([], [0]), "item": np.empty((0, 3), int), "word": ([], [0]),
                "title": np.empty((0, 3), int), "tag": ([], [0])}  # fmt: skip
        made = [p.batch(none, dense=np.empty((0, 1))), p.batch(none if ranks.rank else None, dense=np.empty((0, 1)))]
        found = [[len(one), one.weight, list(model.bag(one).shape)] for one in made]
        out = cache.evaluate_batch(none if ranks.rank else None, dense=np.empty((0, 1)))
        assert out.dense.shape == (0, 1)
        return [*found, len(out), p.batches_done, p.samples_done, p.batch(None) is None, p.batches_done,
                cache.evaluate_batch(None) is None]  # fmt: skip


def train_samples(ranks: AnyCommunicator, folder: str, **options: Any) -> dict[str, Any]:
    trainings.CASES["raw"] = CASE
    found = trainings.train(ranks, "raw", folder, **options)
    return {name: value for name, value in found.items() if name.startswith("dense.")}


def evaluate_unknown(
    ranks: AnyCommunicator, folder: str, *, asked: list[int], dataset: str = "passes"
) -> dict[str, Any]:
    """Train passes that have the out-of-vocabulary row; then look up unknown keys, as many as the rank's number."""
    passes = tc.PassDataset.open(Path(folder) / dataset)
    with tc.TierCache(Path(folder) / "model.tc", passes, sharding={"a": "row_wise"}, **OPTIONS) as cache:
        rows = tc.EmbeddingCollection(cache.schema)
        cache.register(rows=rows)
        for p in cache.passes(epochs=1):
            for batch in p.batches(4):
                (rows(batch)["a"].sum() * batch.weight).backward()
                cache.optimizer.step()
        keys = asked[: ranks.rank + 1]
        return {"found": rows(cache.evaluate_batch({"a": keys}))["a"].detach().numpy()}


# -- tests ---------------------------------------------------------------------------------------------------

NAMES = [table.name for table in CASE.tables]
KINDS = ("column_wise", "row_wise", "table_wise", "data_parallel")


def mixed(turn: int) -> dict[str, str]:
    return dict(zip(sorted(NAMES), KINDS[turn:] + KINDS[:turn], strict=True))


def every(kind: str) -> dict[str, str]:
    return dict.fromkeys(NAMES, kind)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    key_sets(tmp_path / "keys", CASE.cut(tmp_path / "passes"))
    return tmp_path


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Result, dict[str, Any]]]:
    """The result of the case's loop in one process, and its lookups; each variant runs once."""

    @cache
    def trained(**how: Any) -> tuple[Result, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("alone")
        samples = CASE.cut(folder / "passes")
        passes = key_sets(folder / "keys", samples)
        with open_store(folder, CASE, "memory") as store, tiered(store, passes, device="cpu") as opened:
            model, optimizer = model_of(opened, CASE)
            found = run(opened, samples, model, optimizer, **how)
            return result_of(store, passes, model), found

    return trained


def assert_close(folder: Path, dense: dict[str, Any], theirs: Result) -> None:
    assert_as_alone(stored(folder, "raw.tc"), dense, theirs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sharding", [*map(mixed, range(3)), *map(every, KINDS)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_raw_keys_end_with_the_bits_of_samples_and_as_one_process(
    ranks_pool: RanksPool, place: Path, alone: Any, size: int, sharding: dict[str, str]
) -> None:
    """Every sharding; last batches leave ranks without samples; the index is counted, and in the budget."""
    found = ranks_pool.run(size, train, folder=str(place), sharding=sharding)
    samples = ranks_pool.run(size, train_samples, folder=str(place), sharding=sharding)

    assert_same_rows(stored(place, "raw.tc"), stored(place, "model.tc"))
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
        found = ranks_pool.run(3, train, folder=str(place), deal=deal, sharding=mixed(3))
        assert_close(place, found[0], alone()[0])
        (place / "raw.tc").rename(place / f"raw-{turn}.tc")
    if deal == "uneven":
        assert_same_rows(stored(place, "raw-0.tc"), stored(place, "raw-1.tc"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("missing", ["zero", "init", "load"])
def test_missing_keys_are_looked_up_and_not_trained_as_on_one_process(
    ranks_pool: RanksPool, place: Path, alone: Any, missing: str, size: int
) -> None:
    """Keys of other sub-datasets and unknown ones, whichever rank owns them; and read-only batches after each pass."""
    evaluates = missing == "load"

    how = {"missing": missing, "evaluates": evaluates, "deal": "uneven", "sharding": mixed(3)}
    found = ranks_pool.run(size, train, folder=str(place), **how)

    theirs, said = alone(missing=missing, evaluates=evaluates)
    assert_close(place, found[0], theirs)
    if evaluates:
        assert len(said["evaluated"]) == 6
    for ours, other in zip(zip(*(one["evaluated"] for one in found), strict=True), said["evaluated"], strict=True):
        for name, vectors in other.items():
            np.testing.assert_allclose(np.concatenate([one[name] for one in ours]), vectors, atol=1e-5, rtol=1e-5)


def test_a_key_that_the_pass_lacks_is_named_on_its_rank_and_told_to_all(ranks_pool: RanksPool, place: Path) -> None:
    told = ranks_pool.run(3, missing_on_one_rank, folder=str(place))

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
            "rank 0 did something els",
        ),
        ("shapes", "rank 1 failed while making batch 1 of pass 0: ValueError: label", "label has shape (1,): expected"),
        ("leaves", "a rank ended or did not answer while rank 0 was making batch 1 of pass 0", "no such file"),
    ],
)
def test_a_rank_that_makes_other_batches_is_told_of_on_all(
    ranks_pool: RanksPool, place: Path, what: str, first: str, second: str
) -> None:
    errors = ranks_pool.errors(2, misuse, folder=str(place), what=what)

    assert all(errors), errors
    for error, sentence in zip(errors, (first, second), strict=True):
        assert sentence in error[1]


def test_batches_without_a_sample_are_empty_on_all_ranks(ranks_pool: RanksPool, place: Path) -> None:
    told = ranks_pool.run(2, nothing_at_all, folder=str(place))

    assert told == [[[0, 0.0, [0, 66]]] * 2 + [0, 2, 0, True, 2, True]] * 2


def test_weights_that_the_schema_does_not_know_or_that_are_not_given_are_those_of_one_process(
    ranks_pool: RanksPool, place: Path, alone: Any
) -> None:
    """Though the owners of tables that are kept whole would pool their features."""
    found = ranks_pool.run(2, train, folder=str(place), reweighs=True, sharding=every("table_wise"))

    assert_close(place, found[0], alone(reweighs=True)[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, 3])
def test_a_training_by_raw_keys_goes_on_behind_a_commit_inside_a_pass(
    ranks_pool: RanksPool, place: Path, alone: Any, size: int
) -> None:
    """On as many ranks with the same bits, on more of them as one process; loaders start at the pass's position."""
    if size == 2:
        ranks_pool.run(2, train, folder=str(place))
        (place / "raw.tc").rename(place / "whole.tc")

    ranks_pool.run(2, train, folder=str(place), stop=[1, 1])
    found = ranks_pool.run(size, train, folder=str(place))

    assert_close(place, found[0], alone()[0])
    if size == 2:
        assert_same_rows(stored(place, "raw.tc"), stored(place, "whole.tc"))


def test_where_the_budget_has_no_room_for_an_index_keys_are_searched(
    ranks_pool: RanksPool, place: Path, alone: Any
) -> None:
    """The same training, in the bytes of the rows alone."""
    options: dict[str, Any] = {"folder": str(place), "sharding": every("row_wise")}
    told = ranks_pool.run(2, train, **options)
    (place / "raw.tc").rename(place / "before.tc")

    found = ranks_pool.run(2, train, device_budget=max(one["room"] for one in told), **options)

    assert max(one["index_bytes"] for one in found) < min(one["index_bytes"] for one in told) / 10  # of a small pass
    assert_same_rows(stored(place, "raw.tc"), stored(place, "before.tc"))


def test_raw_keys_are_found_by_the_cuda_kernels(ranks_pool: RanksPool, place: Path) -> None:
    """On the shim: a training to a commit inside a pass, with missing keys, ends with the CPU's bits."""
    options: dict[str, Any] = {"stop": [0, 1], "missing": "load", "sharding": mixed(0)}
    ranks_pool.run(2, train, folder=str(place), **options)
    (place / "raw.tc").rename(place / "cpu.tc")

    found = ranks_pool.run(2, train, folder=str(place), on_shim=True, **options)

    assert_same_rows(stored(place, "raw.tc"), stored(place, "cpu.tc"))
    assert all("key_index.find" in one["launches"] for one in found)


def test_keys_of_no_pass_have_the_row_out_of_the_vocabulary_whichever_rank_owns_it(
    ranks_pool: RanksPool, tmp_path: Path
) -> None:
    """In a read-only batch, as in an evaluation of passes, and while a later dataset without the row is trained."""
    schema = tc.Schema(tables=(table("a", 4),), features=(tc.Feature(name="a", table="a"),))
    keys = np.array([1, OOV_KEY, 3, 1, OOV_KEY, 5, 9, OOV_KEY])
    write_dataset(tmp_path / "passes", schema, [raw_batch(schema, {"a": keys})])

    told = ranks_pool.run(2, evaluate_unknown, folder=str(tmp_path), asked=[700, 3])

    known, (vectors, *_) = stored(tmp_path)["a"]
    rows = dict(zip(known.tolist(), vectors, strict=True))
    assert not np.array_equal(rows[OOV_KEY], initial_row(schema.tables[0], OOV_KEY))
    np.testing.assert_array_equal(told[0]["found"], [rows[OOV_KEY]])
    np.testing.assert_array_equal(told[1]["found"], [rows[OOV_KEY], rows[3]])

    write_dataset(tmp_path / "later", schema, [raw_batch(schema, {"a": keys[keys != OOV_KEY]})])
    told = ranks_pool.run(2, evaluate_unknown, folder=str(tmp_path), asked=[700, 900], dataset="later")
    np.testing.assert_array_equal(np.concatenate([one["found"] for one in told]), [rows[OOV_KEY]] * 3)


# -- choices of each rank ------------------------------------------------------------------------------------


CHOICES = {"zero": 0.0, "init": 1.0, "load": 0.5}
"""The vector of a key that was trained in the pass before, by the choice."""
SIZES = {"all": (2, 3, 1), "not the first": (0, 3, 1), "not the second": (2, 0, 1), "only the last": (0, 0, 2)}


def read_by_choice(ranks: AnyCommunicator, folder: str, *, sizes: list[int], ended: bool) -> list[list[Any]]:
    """Look up a key of the pass and the one before, for each combination of choices; return the vectors found."""
    data, found = tc.PassDataset.open(Path(folder) / "keys"), list[list[Any]]()
    with tc.TierCache(Path(folder) / f"{sizes}{ended}.tc", data, **OPTIONS) as cache:
        rows = tc.EmbeddingCollection(cache.schema)
        cache.register(rows=rows)
        for p in cache.passes(epochs=1):
            for choices in itertools.product(CHOICES, repeat=ranks.size) if p.index else [("error",) * ranks.size]:
                size = sizes[ranks.rank] if p.index else 1
                keys = np.full(size, p.index) if choices[0] == "error" else np.arange(size) % 2
                batch = p.batch(None if ended and not size else {"a": keys}, missing=choices[ranks.rank])
                assert batch is not None
                vectors = rows(batch)["a"]
                step_by(cache, vectors.sum() * batch.weight)
                if p.index:
                    found.append([choices, size, float(vectors[0, 0])])
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_each_rank_reads_by_its_own_choice(ranks_pool: RanksPool, tmp_path: Path, sizes: str, ended: bool) -> None:
    """No rank waits for another. A rank without samples gets the first sample of the first rank with some."""
    table = tc.Table(name="a", dim=2, optimizer=tc.optim.SGD(learning_rate=0.5), initializer=tc.init.Constant(value=1))
    tc.write_key_sets(tmp_path / "keys", [table], [{"a": np.array([0])}, {"a": np.array([1])}])
    every = ranks_pool.run(3, read_by_choice, folder=str(tmp_path), sizes=list(SIZES[sizes]), ended=ended)
    lender = next(rank for rank, size in enumerate(SIZES[sizes]) if size)
    for rank, found in enumerate(every):
        assert len(found) == len(CHOICES) ** 3
        for choices, size, vector in found:
            assert vector == CHOICES[choices[rank if size else lender]]
