"""Pinning the current state by a name, and resuming from it, or serving it."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.datasets import write_dataset
from tests.train.cases import (
    SPECS,
    Case,
    Result,
    Spec,
    assert_same_bits,
    open_store,
    registered,
    resident,
    result_of,
    result_of_resident,
    run,
    table,
    tiered,
    train,
)
from tests.train.loops import descend, train_store
from tests.train.test_fetch_ahead import ahead
from tiercache.errors import DatasetError, StateError
from tiercache.store import CommitMissingError, StoreMissingError, TableMismatchError

CASE = Case(tables=(table("a", 8), table("b", 3, tc.optim.Adam(learning_rate=0.01))), specs=SPECS, num_samples=128)
"""Two passes of 64 samples, four batches each; two epochs."""
MIDDLE, LAST, END = (2, 1), (1, 3), (3, 3)  # batches: in a pass, the last of one, and the last of all


@pytest.fixture(scope="module")
def expected(passes: tc.PassDataset) -> dict[tuple[int, ...], Result]:
    """The results of a training in memory after each batch."""
    cache, found = resident(passes), {}
    model, optimizer = registered(cache, CASE)

    def copy_after(*now: int) -> None:
        found[now] = result_of_resident(cache, model)

    run(cache, CASE, model, optimizer, each_batch=copy_after)
    return found


def keeping(cache: tc.TierCache, kept: dict[str, int], **moments: tuple[int, int]) -> Callable[[int, int], None]:
    def each_batch(*now: int) -> None:
        for name, moment in moments.items():
            if now == moment:
                kept[name] = cache.keep(name)

    return each_batch


def assert_rows_at(store: tc.Store, theirs: Result) -> None:
    for name, (keys, fields) in theirs.rows.items():
        found = store.lookup(name, keys, missing="zeros")["vector"]
        there = np.any(found != 0, axis=1)  # others were not trained yet
        np.testing.assert_array_equal(found[there], fields[0][there])
        assert there.sum() > 10


@pytest.mark.sampled(3)
@pytest.mark.parametrize("engine", ["memory", "lmdb", "zarr"])
@pytest.mark.parametrize("commit_every", [1, 3])
def test_what_is_kept_is_the_state_of_then_and_training_goes_on_to_the_same_bits(
    tmp_path: Path, passes: tc.PassDataset, expected: Any, engine: str, commit_every: int
) -> None:
    kept: dict[str, int] = {}
    with open_store(tmp_path / "s", CASE, engine) as store:
        with tiered(store, passes, commit_every=commit_every) as cache:
            model = train(cache, CASE, each_batch=keeping(cache, kept, last=LAST, middle=MIDDLE))
        ended = result_of(store, passes, model)
        assert_same_bits(ended, expected[END])
        assert store.commit.pins == kept
        for name, moment in (("last", LAST), ("middle", MIDDLE)):
            with store.at(name) as there:
                assert there.commit.id == kept[name]
                assert there.commit.cursor == (moment[0], 16 * (moment[1] + 1))
                assert_rows_at(there, expected[moment])
        store.pin("end")
        for name in ("last", "middle", "last"):
            with warnings.catch_warnings():  # all that is given up is pinned
                warnings.simplefilter("error")
                cache = tiered(store, passes, commit_every=commit_every, at=name)
            with cache:
                again = train(cache, CASE)
            assert_same_bits(result_of(store, passes, again), ended)
            store.pin("end")


@pytest.mark.parametrize("moment", [MIDDLE, LAST])
def test_a_training_that_fails_after_keep_goes_on(tmp_path: Path, passes: Any, expected: Any, moment: Any) -> None:
    path = tmp_path / "s"

    def each_batch(*now: int) -> None:
        if now == moment:
            cache.keep("best")
            raise InterruptedError

    with pytest.raises(InterruptedError), tiered(path, passes) as cache:
        train(cache, CASE, each_batch=each_batch)
    model = train_store(path, passes, CASE)
    with tc.Store.open(path, mode="r") as store:
        assert_same_bits(result_of(store, passes, model), expected[END])


def test_a_name_keeps_the_last_commit_it_was_given(tmp_path: Path, passes: tc.PassDataset) -> None:
    """The commit that it kept before is freed."""
    path, kept = tmp_path / "s", list[int]()
    with tiered(path, passes) as cache:
        train(cache, CASE, each_batch=lambda _, batch: kept.append(cache.keep("best")) if batch == 3 else None)
    with tc.Store.open(path, mode="r") as store:
        assert [*store.commit.pins.items()] == [("best", kept[-1])]
        assert len({*kept}) == 4
        assert {one.id for one in store.commits} <= {kept[-1], store.commit.id}


def test_going_back_names_the_commits_that_it_gives_up(tmp_path: Path, passes: tc.PassDataset) -> None:
    path, kept = tmp_path / "s", dict[str, int]()
    with tiered(path, passes) as cache:
        train(cache, CASE, each_batch=keeping(cache, kept, best=MIDDLE))
    with tc.Store.open(path, mode="r") as store:
        newest = store.commit.id
    words = rf"resumes from commit {kept['best']}, pinned as 'best', at pass 2, and drops commit {newest}, up to pass 4"
    with pytest.warns(UserWarning, match=words):
        tiered(path, passes, at="best").close()
    with tc.Store.open(path, mode="r") as store:
        assert store.commit.cursor == (2, 32)
        assert [one.id for one in store.commits] == [kept["best"], newest + 1]
        before = store.commit.id
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for at in ("best", kept["best"]):
            tiered(path, passes, at=at).close()
    with tc.Store.open(path, mode="r") as store:
        assert store.commit.id == before


def test_a_commit_with_other_settings_is_not_taken_for_the_kept_one(tmp_path: Path, passes: tc.PassDataset) -> None:
    with tiered(tmp_path / "s", passes) as cache:
        train(cache, CASE)
        cache.keep("end")
    with tc.Store.open(tmp_path / "s") as store:
        altered = [replace(one, optimizer=replace(one.optimizer, decay=0.5)) for one in store.tables]
        tc.store.alter(store, altered)
    with pytest.raises(TableMismatchError):
        tiered(tmp_path / "s", passes)
    with pytest.warns(UserWarning, match="drops commit"):
        tiered(tmp_path / "s", passes, at="end").close()


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"at": "worst"}, CommitMissingError, "has no pinned commit 'worst': it has 'best'"),
        ({"at": 99}, CommitMissingError, "has no commit 99"),
        ({"at": "best", "data": "other"}, DatasetError, "has a table 'a' that the dataset"),
    ],
)
def test_a_commit_to_go_back_to_must_exist(tmp_path: Path, passes: Any, options: Any, kind: Any, words: str) -> None:
    path = tmp_path / "s"
    with tiered(path, passes) as cache:
        train(cache, CASE, each_batch=keeping(cache, {}, best=MIDDLE))
    with tc.Store.open(path, mode="r") as store:
        before = store.commit.id
    data = passes
    if options.pop("data", None):
        data = Case(tables=(table("c", 4),), specs=(Spec(name="f", table="c"),)).cut(tmp_path / "other")
    with pytest.raises(kind, match=words):
        tiered(path, data, **options)
    with tc.Store.open(path, mode="r") as store:
        assert store.commit.id == before
        with pytest.raises(ValueError, match="is open read-only, but at= rolls it back"):
            tiered(store, passes, at="best")
    with pytest.raises(StoreMissingError, match="and at='best' is a commit of one: check the path, or leave out at="):
        tiered(tmp_path / "none", passes, at="best")
    with pytest.raises(ValueError, match="does not use at"):
        tc.TierCache(None, passes, at="best")


# -- the moments at which there is nothing to keep ------------------------------------------------------------


def test_what_no_commit_has_is_not_kept(tmp_path: Path, passes: tc.PassDataset) -> None:
    with tiered(tmp_path / "s", passes, commit_every=2) as cache:
        model, optimizer = registered(cache, CASE)
        with pytest.raises(ValueError, match="cannot be the name of a pinned commit"):
            cache.keep("")
        with pytest.raises(ValueError, match="has no commit yet"):
            cache.keep("best")
        cache.restore()
        assert cache.keep("begin") == 0
        loop = cache.passes(epochs=2)
        p = next(loop)
        assert cache.keep("begin") == 1  # nothing was trained since that commit, which pinned the one before
        for batch in p.batches(16):
            model(batch).sum().backward()
            with pytest.raises(StateError, match="between backward and step"):
                cache.keep("best")
            optimizer.step()
            optimizer.zero_grad()
        for leave in (lambda: next(loop), loop.close):
            leave()
            with pytest.raises(StateError, match=r"keep\(\) was called at pass 1, sample 0, but the newest commit is"):
                cache.keep("best")
        cache.restore()
        cache.keep("begin")
        assert cache.store.commit.pins.keys() == {"begin"}
    with pytest.raises(StateError, match="closed"):
        cache.keep("best")
    with tiered(tmp_path / "s", passes) as cache:
        registered(cache, CASE)
        with pytest.raises(StateError, match=r"dense weights do not match the rows .*: call cache.restore\(\)"):
            cache.keep("best")


def test_a_loop_that_was_left_after_a_whole_pass_is_not_kept(tmp_path: Path, passes: tc.PassDataset) -> None:
    """Its rows were dropped, so the previous commit would be kept instead."""
    with tiered(tmp_path / "s", passes) as cache:
        model, optimizer = registered(cache, CASE)
        for p in cache.passes(epochs=2):
            for batch in p.batches(16):
                descend(model(batch).sum(), optimizer)
            if p.index == 1:
                break
        with pytest.raises(StateError, match=r"at pass 1, sample 64, but the newest commit is at pass 1, sample 0"):
            cache.keep("best")
    with tiered(tmp_path / "s", passes) as cache:
        registered(cache, CASE)
        with pytest.raises(StateError, match="was not restored"):
            cache.keep("best")
    cache = resident(passes)
    with pytest.raises(StateError, match=r"keep\(\) needs a store"):
        cache.keep("best")


def test_a_loop_that_ended_is_kept(tmp_path: Path, passes: tc.PassDataset) -> None:
    with tiered(tmp_path / "s", passes) as cache:
        train(cache, CASE)
        kept = cache.keep("end")
        with cache.store.at("end") as there:
            assert (there.commit.id, there.commit.cursor) == (kept, (4, 0))
    with tiered(tmp_path / "t", passes) as cache:
        model, optimizer = registered(cache, CASE)
        for batch in ahead((batch for p in cache.passes(epochs=1) for batch in p.batches(16)), 1):
            descend(model(batch).sum(), optimizer)
        kept = cache.keep("end")
        with cache.store.at("end") as there:
            assert (there.commit.id, there.commit.cursor) == (kept, (2, 0))


# -- serving what is kept --------------------------------------------------------------------------------------


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.EmbeddingBag(200, 8, mode="sum")
        self.top = nn.Linear(8, 1)

    def forward(self, keys: Any) -> torch.Tensor:
        return self.top(self.f(keys)).squeeze(1)


def served_passes(folder: Path) -> tc.PassDataset:
    case = Case(tables=(table("f", 8),), specs=(Spec(name="f", table="f"),), num_samples=128)
    samples = case.samples()
    samples.features["f"].keys[:] = np.abs(samples.features["f"].keys) % 200
    return write_dataset(folder, case.schema, [samples.slice(0, 64), samples.slice(64, 128)])


def test_a_kept_model_is_served_with_its_rows_and_its_dense_weights(tmp_path: Path) -> None:
    passes = served_passes(tmp_path / "passes")
    torch.manual_seed(0)
    model = tc.convert(Rows(), passes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys = torch.arange(200).reshape(100, 2)
    with tiered(tmp_path / "s", passes, model=model, optimizer=optimizer) as cache:
        for p in cache.passes(epochs=2):
            for batch in p.batches(16):
                descend((model(batch.features["f"]) - batch.label).square().mean(), cache.optimizer)
            if p.index == 1:
                kept = cache.keep("best")
                with torch.no_grad():
                    best = model(keys).clone()
        now = copy.deepcopy(model.top.state_dict())
        for at in ("best", kept):
            served = tc.to_torch(model, cache.store, at=at)
            torch.testing.assert_close(served(keys), best)
        assert not torch.allclose(tc.to_torch(model, cache.store)(keys), best, atol=1e-4)
        assert all(torch.equal(value, now[name]) for name, value in model.top.state_dict().items())
        with pytest.raises(CommitMissingError, match="has no pinned commit 'worst'"):
            tc.to_torch(model, cache.store, at="worst")
        with pytest.raises(StateError, match="has the state of model, optimizer, which do not match a Sequential"):
            tc.to_torch(nn.Sequential(model.f, nn.Linear(8, 2)), cache.store, at="best")
    with tc.Store.open(tmp_path / "s", mode="r") as store:
        for of in (store, tmp_path / "s"):
            torch.testing.assert_close(tc.to_torch(model, of, at="best")(keys), best)
        assert torch.equal(tc.to_torch(model, str(tmp_path / "s"))(keys), tc.to_torch(model, store)(keys))


def test_of_several_models_that_fit_none_is_guessed(tmp_path: Path) -> None:
    passes = served_passes(tmp_path / "passes")
    model = tc.convert(Rows(), passes)
    model.f.weights = {}
    with tiered(tmp_path / "s", passes, model=[model, copy.deepcopy(model)]) as cache:
        cache.restore()
        cache.keep("both")
        with pytest.raises(StateError, match="has the state of model0, model1, which all match a Rows"):
            tc.to_torch(model, cache.store, at="both")
