"""Features that are pooled by the rank that owns their table: what batches then have, and what is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tiercache as tc
from tests.dist.pool import RanksPool
from tests.dist.trainings import OPTIONS
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


def opened(folder: str) -> tc.TierCache:
    sharding = dict.fromkeys([one.name for one in CASE.tables], "table_wise")
    return tc.TierCache(
        Path(folder) / "m.tc", tc.PassDataset.open(Path(folder) / "passes"), sharding=sharding, **OPTIONS
    )


def weigh(ranks: AnyCommunicator, folder: str, *, announced: bool) -> list[Any]:
    with opened(folder) as cache:
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
    with opened(folder) as cache:
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
    with opened(folder) as cache:
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
    with opened(folder) as cache:
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
    with opened(folder) as cache:
        bag = tc.EmbeddingBagCollection(cache.schema, ["more"], mode="sum" if ranks.rank else "mean")
        cache.register(bag=bag)
        for p in cache.passes(epochs=1):
            bag(next(p.batches(8, read_by="owner")))


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
    CASE.cut(tmp_path / "passes")

    told = ranks_pool.run(2, weigh, folder=str(tmp_path), announced=True)
    assert [one[:2] for one in told] == [[["more"], ["title"]]] * 2
    assert all(one[2] > 0 for one in told)

    errors = ranks_pool.errors(2, weigh, folder=str(tmp_path), announced=False)
    assert all(error is not None and "the module with weighted=['title']" in error[1] for error in errors), errors


def test_ids_that_a_batch_does_not_have_are_one_sentence(ranks_pool: RanksPool, tmp_path: Path) -> None:
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
