"""Features pooled by the rank that owns their table train like those whose rows travel."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tiercache as tc
from tests.cache_options import gathered
from tests.dist.pool import RanksPool
from tests.dist.trainings import OPTIONS, assert_same_rows, dense_of, stored
from tests.train.cases import Case, Spec, table
from tiercache.dist.communicator import AnyCommunicator

CASE = Case(
    tables=(
        table("users", 5, tc.optim.SGD(learning_rate=0.1)),
        table("words", 15, tc.optim.RowWiseAdagrad(learning_rate=0.05, decay=0.01)),
        table("tags", 16, tc.optim.Adam(learning_rate=0.01, decay=0.01)),
        table("items", 16, tc.optim.Adagrad(learning_rate=0.05)),
    ),
    specs=(
        Spec(name="user", table="users"),
        Spec(name="friend", table="users", hotness="ragged", mode="mean"),
        Spec(name="word", table="words", hotness="ragged", weighted=True),
        Spec(name="title", table="words", hotness="multi_hot", length=6, mode="mean"),
        Spec(name="tag", table="tags", hotness="ragged"),
        Spec(name="place", table="tags"),
        Spec(name="item", table="items", hotness="multi_hot", length=4, mode="max"),
        Spec(name="more", table="items", hotness="multi_hot", length=4),
    ),
    num_samples=113,
    pass_rows=60,
    num_keys=3000,
    batch=16,
)
"""Enough keys that nearly all rows of a batch are unique; the last batch of a pass leaves ranks without samples."""
POOLED = ["friend", "more", "tag", "title", "word"]
"""All but features with one id a sample, and a maximum."""


class Model(nn.Module):
    """Bags in two modules: one is looked up twice, the other has a gradient in every second step."""

    def __init__(self, cache: Any, *, by_rows: bool = False) -> None:
        super().__init__()
        modes = {spec.name: spec.mode for spec in CASE.specs}
        left, right = ["user", "word", "friend", "title", "item"], ["more", "tag", "place"]
        left_modes = {name: modes[name] for name in left}
        self.left = tc.EmbeddingBagCollection(cache.schema, left, mode=left_modes, weighted=left if by_rows else ())
        self.right = tc.EmbeddingBagCollection(cache.schema, right, weighted=right if by_rows else ())
        self.top = nn.Linear(self.left.out_features + self.right.out_features + 1, 1)
        self.step = 0

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        left, right = self.left(batch) + 0.5 * self.left(batch), self.right(batch)
        if self.step % 2:
            right = right.detach()
        return self.top(torch.cat([left, right, batch.dense], dim=1)).squeeze(1)


def opened(folder: str, name: str, kind: str = "table_wise", **options: Any) -> tc.TierCache:
    sharding = dict.fromkeys([one.name for one in CASE.tables], kind)
    passes = tc.PassDataset.open(Path(folder) / "passes")
    return tc.TierCache(Path(folder) / name, passes, sharding=sharding, **gathered(OPTIONS | options))


def train(
    ranks: AnyCommunicator,
    folder: str,
    name: str,
    *,
    kind: str,
    read_by: str = "rank",
    micro_batches: int | None = None,
    accumulate: int = 1,
    by_rows: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train two epochs, then look up all samples; return pooled features, bytes sent, vectors and dense weights."""
    torch.manual_seed(1)
    given = {} if read_by == "rank" else {"read_by": read_by}
    pooled: set[str] = set()
    with opened(folder, name, kind, **options) as cache:
        inner = Model(cache, by_rows=by_rows)
        model: Any = inner
        if ranks.size > 1:  # some batches give a part of it no gradient
            model = DistributedDataParallel(inner, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        cache.register(model=model, optimizer=optimizer)
        optimizer = cache.optimizer
        held = 0
        for p in cache.passes(epochs=2):
            if micro_batches is None:
                each = ([batch] for batch in p.batches(CASE.batch, shuffle=True, **given))
            else:
                each = p.steps(CASE.batch, micro_batches=micro_batches, shuffle=True, **given)
            for batches in each:
                for batch in batches:
                    pooled.update(batch.pooled)
                    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
                    (loss * batch.weight).backward()
                held += 1
                if held == accumulate or p.samples_done == p.num_samples:
                    optimizer.step()
                    optimizer.zero_grad()
                    inner.step, held = inner.step + 1, 0
        sent = cache.bytes_sent
        found = [
            inner.left(batch).detach().numpy().copy()
            for piece in cache.evaluate(cache.dataset)
            for batch in piece.batches(23)
            if batch.weight
        ]
    return {"pooled": sorted(pooled), "bytes": sent, "vectors": found} | dense_of(model)


def weigh(ranks: AnyCommunicator, folder: str, *, announced: bool) -> list[Any]:
    with opened(folder, "weighed.tc") as cache:
        bag = tc.EmbeddingBagCollection(cache.schema, ["title", "more"], weighted=["title"] if announced else ())
        cache.register(bag=bag)
        for p in cache.passes(epochs=1):
            batch = next(p.batches(8))
            weights = torch.ones(4 * 6, requires_grad=True)
            bag(batch, {"title": weights}).sum().backward()
            cache.optimizer.step()
            return [sorted(batch.pooled), sorted(batch.ids), float(weights.grad.abs().sum())]  # type: ignore[union-attr]
    raise AssertionError("no pass ran")


def ask_for_ids(ranks: AnyCommunicator, folder: str, *, names: list[str]) -> dict[str, Any]:
    """Return the errors of a batch for ids that it lacks, and its dict operations that still work."""
    with opened(folder, "asked.tc") as cache:
        bag = tc.EmbeddingBagCollection(cache.schema, ["user", "more"])
        cache.register(bag=bag)
        for p in cache.passes(epochs=1):
            batch = next(p.batches(8))
            said = []
            for name in names:
                with pytest.raises(KeyError) as caught:
                    batch.ids[name]
                said.append(caught.value.args[0])
            assert bag(batch).shape == (len(batch), 21)
            return {
                "said": said, "iterated": list(batch.ids), "in": [name in batch.ids for name in names],
                "got": [batch.ids.get(name) for name in names], "ids": batch.ids["user"].num_ids,
            }  # fmt: skip
    raise AssertionError("no pass ran")


def modules_are_registered(ranks: AnyCommunicator, folder: str) -> list[list[list[str]]]:
    """Return the features of batches, as rows and pooled, as modules are registered."""
    found = []
    with opened(folder, "modules.tc") as cache:
        for p in cache.passes(epochs=1):
            batches = p.batches(8, prefetch=0)

            def note() -> tc.Batch:
                batch = next(batches)  # noqa: B023 - called here only
                found.append([sorted(batch.ids), sorted(batch.pooled)])
                return batch

            note()
            bag = tc.EmbeddingBagCollection(cache.schema, ["user", "more"])
            cache.register(bag=bag)
            batch = note()
            cache.register(mean=tc.EmbeddingBagCollection(cache.schema, ["more"], mode="mean"))
            note()
            assert torch.equal(bag(batch), bag(batch))
            with pytest.raises(ValueError, match="without the rows of feature 'more'"):
                tc.EmbeddingCollection(cache.schema, ["more"]).requires_grad_(False)(batch)
            return found
    raise AssertionError("no pass ran")


def have_a_wrong_id(ranks: AnyCommunicator, folder: str, *, read_by: str) -> None:
    """Make a batch in which the last rank reads an id that the table of a pooled feature does not have."""
    with opened(folder, "wrong.tc") as cache:
        bag = tc.EmbeddingBagCollection(cache.schema, ["title"], mode="mean")
        cache.register(bag=bag)
        owner = cache.sharding.tables["words"].slices[0].rank
        for p in cache.passes(epochs=1):
            source = p.source
            if ranks.rank == (owner if read_by == "owner" else (owner + 1) % ranks.size):
                source.read = partial(_with_a_wrong_id, source.read)  # type: ignore[method-assign]
            bag(next(p.batches(8, read_by=read_by)))


def _with_a_wrong_id(read: Any, places: Any, **options: Any) -> Any:
    samples = read(places, **options)
    if "title" in samples.ids:
        samples.ids["title"].ids.setflags(write=True)
        samples.ids["title"].ids[1] = 1 << 20
    return samples


def differ(ranks: AnyCommunicator, folder: str) -> None:
    with opened(folder, "differ.tc") as cache:
        bag = tc.EmbeddingBagCollection(cache.schema, ["more"], mode="sum" if ranks.rank else "mean")
        cache.register(bag=bag)
        for p in cache.passes(epochs=1):
            bag(next(p.batches(8, read_by="owner")))


def train_on(pool: RanksPool, size: int, folder: Path, name: str, kind: str, **options: Any) -> list[dict[str, Any]]:
    if not (folder / "passes").exists():
        CASE.cut(folder / "passes")
    return pool.run(size, train, folder=str(folder), name=name, kind=kind, **options)


def vectors_of(told: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    most = max(len(one["vectors"]) for one in told)
    return np.concatenate([one["vectors"][i] for i in range(most) for one in told if i < len(one["vectors"])])


def assert_equal(
    folder: Path, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float = 1e-5
) -> None:
    """Compare rows, states, dense weights and the vectors of an evaluation; stores are "ours" and "theirs"."""
    assert_same_rows(stored(folder, "ours"), stored(folder, "theirs"), tolerance)
    for name in ("dense.top.weight", "dense.top.bias"):
        np.testing.assert_allclose(ours[0][name], theirs[0][name], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(vectors_of(ours), vectors_of(theirs), rtol=tolerance, atol=tolerance)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("size", "kind", "options"),
    [
        (2, "table_wise", {}),
        (3, "column_wise", {}),
        (4, "table_wise", {"micro_batches": 3}),
        (2, "column_wise", {"accumulate": 2}),
    ],
)
def test_features_pooled_by_their_owners_train_as_on_one_rank(
    ranks_pool: RanksPool, tmp_path: Path, size: int, kind: str, options: dict[str, Any]
) -> None:
    """Sum, mean, weights, shared tables, empty bags; two lookups of a batch, and features without a gradient.

    Rows without a gradient keep row and state, in spite of Adam and decay.
    """
    theirs = train_on(ranks_pool, 1, tmp_path, "theirs", "row_wise", **options)
    ours = train_on(ranks_pool, size, tmp_path, "ours", kind, **options)

    assert all(one["pooled"] == POOLED for one in ours)
    assert theirs[0]["pooled"] == []
    assert_equal(tmp_path, ours, theirs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("read_by", ["rank", "owner"])
def test_two_runs_with_pooled_features_end_with_the_same_bits(
    ranks_pool: RanksPool, tmp_path: Path, read_by: str
) -> None:
    """Gradients are added in the order of ranks and features."""
    options = {"read_by": read_by, "comm_dtype": "bfloat16", "micro_batches": 2}
    ours = train_on(ranks_pool, 3, tmp_path, "ours", "column_wise", **options)
    theirs = train_on(ranks_pool, 3, tmp_path, "theirs", "column_wise", **options)

    assert_equal(tmp_path, ours, theirs, tolerance=0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("size", "kind"), [(3, "table_wise"), (2, "column_wise")])
def test_reading_by_owner_ends_the_same_and_sends_fewer_bytes(
    ranks_pool: RanksPool, tmp_path: Path, size: int, kind: str
) -> None:
    """Ids of features whose tables a rank owns do not travel to it; all but maxima are pooled."""
    by_data = train_on(ranks_pool, size, tmp_path, "theirs", kind)
    by_model = train_on(ranks_pool, size, tmp_path, "ours", kind, read_by="owner")

    assert all(one["pooled"] == sorted([*POOLED, "place", "user"]) for one in by_model)
    assert_equal(tmp_path, by_model, by_data)
    assert sum(one["bytes"] for one in by_model) < sum(one["bytes"] for one in by_data)


def test_pooled_vectors_are_fewer_bytes_than_rows(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """The same training whose modules request rows, as with trained weights: the result is the same.

    In batches this small a third of the bytes are counts, which both send.
    """
    pooled = train_on(ranks_pool, 2, tmp_path, "ours", "table_wise")
    rows = train_on(ranks_pool, 2, tmp_path, "theirs", "table_wise", by_rows=True)

    assert all(one["pooled"] == [] for one in rows)
    assert_equal(tmp_path, pooled, rows)
    assert sum(one["bytes"] for one in pooled) < 0.7 * sum(one["bytes"] for one in rows)


@pytest.mark.parametrize("read_by", ["rank", "owner"])
def test_a_wrong_id_of_a_pooled_feature_is_said_on_all_ranks(
    ranks_pool: RanksPool, tmp_path: Path, read_by: str
) -> None:
    CASE.cut(tmp_path / "passes")

    errors = ranks_pool.errors(2, have_a_wrong_id, folder=str(tmp_path), read_by=read_by)

    said = "feature 'title' has local id 1048576 at entry 1 of the batch"
    assert all(error is not None and said in error[1] for error in errors), errors
    assert sorted(error[0] for error in errors if error) == ["IndexError", "RankError"]


def test_ranks_that_read_by_owner_and_differ_are_told_so(ranks_pool: RanksPool, tmp_path: Path) -> None:
    CASE.cut(tmp_path / "passes")

    errors = ranks_pool.errors(2, differ, folder=str(tmp_path))

    assert all(error is not None and "ranks look up different features" in error[1] for error in errors), errors


def test_a_feature_that_gets_weights_keeps_its_rows(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """If it is announced; otherwise the message says how."""
    CASE.cut(tmp_path / "passes")

    told = ranks_pool.run(2, weigh, folder=str(tmp_path), announced=True)
    assert [one[:2] for one in told] == [[["more"], ["title"]]] * 2
    assert all(one[2] > 0 for one in told)

    errors = ranks_pool.errors(2, weigh, folder=str(tmp_path), announced=False)
    assert all(error is not None and "the module with weighted=['title']" in error[1] for error in errors), errors


def test_ids_that_a_batch_does_not_have_are_one_sentence(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """For a feature pooled elsewhere, an unused one and an unknown one; other operations work."""
    CASE.cut(tmp_path / "passes")

    for told in ranks_pool.run(2, ask_for_ids, folder=str(tmp_path), names=["more", "tag", "mor"]):
        assert told["said"] == [
            "feature 'more' is pooled by sum on the rank that owns its table, so the batch has no ids of it: create "
            "the module that looks it up with weighted=['more'] to have them, or use its vectors in batch.pooled",
            "no module of this cache looks up feature 'tag', so the batch was made without its ids: create a module "
            "that does, before the batch is made",
            "unknown feature 'mor': the data has user, friend, word, title, tag, place, item, more",
        ]
        assert (told["iterated"], told["in"], told["got"], told["ids"]) == (["user"], [False] * 3, [None] * 3, 4)


def test_what_no_module_looks_up_is_not_brought(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """A feature that is pooled in two ways is sent as rows; an unused feature is not sent at all."""
    CASE.cut(tmp_path / "passes")

    told = ranks_pool.run(2, modules_are_registered, folder=str(tmp_path))

    every = sorted(spec.name for spec in CASE.specs)
    rows = [["more", "user"], []]
    assert told == [[[every, []], [["user"], ["more"]], rows]] * 2
