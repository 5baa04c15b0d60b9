"""An existing model's embeddings become ours with its weights, and modules of torch again; models share tables."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.datasets import raw_batch, write_dataset
from tests.dist.pool import RanksPool
from tests.train.cases import table, tiered
from tests.train.loops import descend
from tests.train.test_bad_input import one_sentence
from tiercache.dist.communicator import AnyCommunicator
from tiercache.errors import StateError

SCHEMA = tc.Schema(
    features=(
        tc.Feature(name="user"), tc.Feature(name="item"), tc.Feature(name="seen", table="item", hotness="ragged"),
    ),
    tables=tuple(table(name, 4, tc.optim.SGD(learning_rate=0.1), tc.init.Zeros()) for name in ("user", "item")),
    label="y",
)  # fmt: skip


class Small(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.user_emb = nn.Embedding(10, 4)
        self.items = nn.EmbeddingBag(20, 4, **options)
        self.same = self.items


def test_modules_find_their_features_by_name_or_as_they_are_told() -> None:
    model = Small(mode="max")
    weight = model.items.weight.data
    made = tc.convert(model, SCHEMA, {"items": ["item", "seen"]})
    assert made is model
    assert isinstance(made.user_emb, tc.Embedding)
    assert made.user_emb.features == ["user"]
    assert made.items is made.same
    assert [*made.items.lookups] == ["item", "seen"]
    assert made.items.lookups["seen"].pooling == {"seen": "max"}
    assert made.items.lookups["item"].weights["item"].data_ptr() == weight.data_ptr()
    assert [name for name, _ in made.named_parameters()] == ["user_emb.anchor", "items.lookups.item.anchor"]
    assert isinstance(tc.convert(nn.Embedding(3, 4), SCHEMA, {"": "user"}), tc.Embedding)
    left = tc.convert(Small(), SCHEMA, {}, filter_fn=lambda module, name: name == "user_emb")
    assert isinstance(left.items, nn.EmbeddingBag)
    frozen = Small()
    frozen.user_emb.weight.requires_grad_(False)
    assert not tc.convert(frozen, SCHEMA, {"items": "item"}).user_emb.anchor.requires_grad
    with torch.device("meta"):
        assert tc.convert(Small(), SCHEMA, {"items": "item"}).user_emb.weights == {}


@pytest.mark.parametrize(
    ("change", "features", "words"),
    [
        (None, {}, "no feature matches the module 'items': pass features={'items': NAME}, where the features"),
        (None, {"items": "thing"}, "the schema has no feature 'thing', which 'items' is to look up"),
        (None, {"nobody": "item"}, "features= names the module 'nobody', which the model does not have"),
        (None, {"items": ["item", "user"]}, "looks up 'item' and 'user', which are of tables 'item' and 'user': use"),
        ({"padding_idx": 0, "mode": "max"}, {"items": "item"}, "'item' is pooled by max and has padding: pool it by"),
        ({"scale_grad_by_freq": True}, {"items": "item"}, "items has scale_grad_by_freq=True: create it without"),
        ({"embedding_dim": 8}, {"items": "item"}, "items has 8 columns, but table 'item' has 4: make them the same"),
    ],
)
def test_what_cannot_be_converted_is_a_sentence(change: Any, features: dict[str, Any], words: str) -> None:
    model = Small()
    if change:
        options = {"num_embeddings": 20, "embedding_dim": 4, **change}
        model.items = model.same = nn.EmbeddingBag(**options)
    with pytest.raises(ValueError, match=words):
        tc.convert(model, SCHEMA, features)
    assert isinstance(model.user_emb, nn.Embedding)


def test_weights_go_to_the_cache_that_makes_the_store(tmp_path: Path) -> None:
    keys = {"user": np.array([1, 2]), "item": np.array([3, 19]), "seen": (np.array([4]), np.array([0, 1, 1]))}
    data = tc.write_key_sets(tmp_path / "passes", SCHEMA, [{"user": [1, 2], "item": [3, 4, 19]}])
    model = Small(mode="sum")
    user, items = model.user_emb.weight.data.clone(), model.items.weight.data.clone()
    tc.convert(model, data, {"items": ["item", "seen"]})
    words = r"a converted model has rows .* pass it to TierCache\(model=...\)"
    with tiered(tmp_path / "other.tc", data) as cache, pytest.raises(StateError, match=words):
        cache.register(model=model)
    with tiered(tmp_path / "model.tc", data, model=model) as cache:
        for p in cache.passes(epochs=1):
            batch = p.batch(keys)
            assert torch.equal(model.user_emb(batch.features["user"]), user[[1, 2]])
            for offsets in ((), (None,)):  # as models call bags of one key each
                assert torch.equal(
                    model.items(batch.features["item"], *offsets, per_sample_weights=None), items[[3, 19]]
                )
            assert torch.equal(model.same(batch.features["seen"]), torch.stack([items[4], torch.zeros(4)]))
            with pytest.raises(TypeError, match="a batch, which has several"):
                model.items(batch)
            assert torch.equal(model.items(torch.tensor([[3, 4]])), items[[3]] + items[[4]])  # of whatever feature
            with pytest.raises(ValueError, match="looks up item, seen but was given 'user'"):
                model.items(batch.features["user"])
            p.skip()
    with tc.Store.open(tmp_path / "model.tc", mode="r") as store:
        assert (store.live_rows("user"), store.live_rows("item")) == (10, 20)
        served = tc.to_torch(model, store, keys={"item": torch.tensor([3, 7])})
    found = served.items(torch.tensor([3, 5, 7]), torch.tensor([0, 2]))
    assert torch.equal(found, items[[3, 7]])  # 5 was left out, and has no row there
    assert torch.equal(served.user_emb(torch.tensor([[9, 0], [1, 99]])),
                       torch.stack([user[[9, 0]], torch.stack([user[1], torch.zeros(4)])]))  # fmt: skip
    assert served.same is served.items
    again = tc.convert(Small(mode="sum"), data, {"items": ["item", "seen"]})
    with tiered(tmp_path / "model.tc", data, model=again) as cache:
        cache.restore()
        assert again.user_emb.weights == {}
        assert np.array_equal(cache.store.lookup("user", np.arange(10))["vector"], user.numpy())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([0, 9], None), ([], None), ([10], "1 other keys, such as 10"), ([3, 1 << 40], "such as 1099511627776"),
        ([-1, 2], "such as -1"), ([10, 11, 12], "3 other keys"), ([9, -(1 << 62)], "1 other keys"),
    ],
)  # fmt: skip
def test_keys_that_a_module_had_no_row_for_are_refused(tmp_path: Path, keys: list[int], said: str | None) -> None:
    sets = [{"user": np.arange(10), "item": np.arange(3)}, {"user": keys}]
    data = tc.write_key_sets(tmp_path / "p", SCHEMA, sets)
    model = tc.convert(Small(mode="sum"), data, {"items": "item"})
    if said is None:
        tiered(tmp_path / "m.tc", data, model=model).close()
        return
    told = f"table 'user' has 10 rows (num_embeddings), and sub-dataset 1 of {data.path} has "
    with one_sentence(tc.errors.DatasetError, told, said, "for which torch would raise IndexError"):
        tiered(tmp_path / "m.tc", data, model=model)
    assert not (tmp_path / "m.tc").exists()
    opened = tc.write_key_sets(tmp_path / "opened", replace(SCHEMA, open_tables=("user",)), sets)
    free = tc.convert(Small(mode="sum"), opened, {"items": "item"})
    with tiered(tmp_path / "m.tc", opened, model=free), torch.no_grad():
        assert free.user_emb(torch.tensor([1 << 50])).shape == (1, 4)
        with pytest.raises(IndexError, match=r"1 of 2 keys of table 'item' are outside \[0, 20\), such as 20"):
            free.items(torch.tensor([[3, 20]]))


class Padded(nn.Module):
    """Lists of one length, and bags, in which id 0 is padding."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.words, self.bag = nn.Embedding(30, 4, padding_idx=0), nn.EmbeddingBag(30, 4, padding_idx=0, mode=mode)

    def forward(self, words: Any, *bag: Any) -> torch.Tensor:
        return self.words(words).square().sum(dim=(1, 2)) + self.bag(*bag).sum(dim=1)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("by", ["samples", "raw keys", "no padding in the pass"])
def test_padding_is_zeros_and_is_not_trained(tmp_path: Path, mode: str, by: str) -> None:
    schema = tc.Schema(
        features=(tc.Feature(name="words", hotness="multi_hot", length=3), tc.Feature(name="bag", hotness="ragged")),
        tables=tuple(table(n, 4, tc.optim.Adagrad(learning_rate=0.1), tc.init.Zeros()) for n in ("words", "bag")),
        label="y",
    )
    chance, low = np.random.default_rng(1), int(by == "no padding in the pass")
    words = chance.integers(low, 30, (12, 3))
    words[3] = low
    offsets = np.concatenate([[0], np.cumsum(chance.integers(0, 4, 12))])
    bag = np.where(chance.random(offsets[-1]) < 0.4, low, chance.integers(low, 30, offsets[-1]))
    bag = bag.astype(np.int64)
    batch = raw_batch(schema, {"words": words, "bag": np.split(bag, offsets[1:-1])}, label=np.zeros(12))
    data = write_dataset(tmp_path / "d", schema, [batch])
    given = tuple(torch.from_numpy(one) for one in (words, bag, offsets[:-1]))
    torch.manual_seed(0)
    theirs = Padded(mode)
    ours = tc.convert(copy.deepcopy(theirs), data)
    optimizer = torch.optim.Adagrad(theirs.parameters(), lr=0.1)
    with tiered(tmp_path / "m.tc", data, model=ours) as cache:
        for p in cache.passes(epochs=4):
            whole = {"words": words, "bag": (bag, offsets)}
            for batch in [p.batch(whole)] if by == "raw keys" else p.batches(12):
                mine, other = ours(batch.features["words"], batch.features["bag"]), theirs(*given)
                torch.testing.assert_close(mine, other)
                descend(mine.square().sum(), cache.optimizer)
                descend(other.square().sum(), optimizer)
        (batch,) = next(iter(cache.evaluate(data))).batches(12)
        torch.testing.assert_close(ours(batch.features["words"], batch.features["bag"]), theirs(*given))
        for name in ("words", "bag"):
            vectors = cache.store.lookup(name, np.arange(30))["vector"]
            torch.testing.assert_close(torch.from_numpy(vectors), getattr(theirs, name).weight.data)
        one = cache.evaluate_batch(whole)
        torch.testing.assert_close(ours(one.features["words"], one.features["bag"]), theirs(*given))
        served = tc.to_torch(ours, cache.store)
    torch.testing.assert_close(served(*given), theirs(*given))
    for batches in ((bag, offsets[:-1]), (np.zeros((5, 2), np.int64),), (np.array([[0, 4], [4, 4], [0, 0]]),)):
        several = [torch.from_numpy(one) for one in batches]
        torch.testing.assert_close(served.bag(*several), theirs.bag(*several))
        torch.testing.assert_close(served.words(several[0]), theirs.words(several[0]))


def opened_on_ranks(ranks: AnyCommunicator, folder: str) -> dict[str, Any]:
    data = tc.PassDataset.open(Path(folder) / "passes")
    torch.manual_seed(7)
    model = Small(mode="sum")
    weights = {"user": model.user_emb.weight.data.clone().numpy(), "item": model.items.weight.data.clone().numpy()}
    tc.convert(model, data, {"items": ["item", "seen"]})
    with tiered(Path(folder) / "model.tc", data, model=model) as cache:
        cache.restore()
        assert cache.sharding is not None
    return weights


def test_ranks_shard_the_weights_of_a_converted_model(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Rank 0 writes them to a plain store, which all ranks then shard; a second open imports nothing."""
    tc.write_key_sets(tmp_path / "passes", SCHEMA, [{"user": np.array([1, 2]), "item": np.array([3, 4, 19])}])
    for _ in range(2):
        weights, _ = ranks_pool.run(2, "tests.train.test_convert:opened_on_ranks", folder=str(tmp_path))
        with tc.Store.open(tmp_path / "model.tc", mode="r") as store:
            assert tc.store.info(tmp_path / "model.tc")["ranks"] == 2
            for name, rows in weights.items():
                assert np.array_equal(store.lookup(name, np.arange(rows.shape[0]))["vector"], rows)
                assert store.live_rows(name) == rows.shape[0]


def test_keys_that_wrapped_to_32_bits_get_a_sentence(tmp_path: Path) -> None:
    data = tc.write_key_sets(tmp_path / "p", SCHEMA, [{"user": np.arange(1, 3), "item": np.arange(3, 6)}])
    model = tc.convert(Small(mode="sum"), SCHEMA, {"items": "item"})
    with tiered(tmp_path / "m.tc", data, model=model) as cache:
        for p in cache.passes(epochs=1):
            wrapped = np.array([3_000_000_000], np.int64).astype(np.int32)
            with pytest.raises(IndexError, match=r"such as -1294967296, .*; ids from 2\*\*31 on become negative as"):
                p.batch({"user": wrapped, "item": np.array([3]), "seen": ([], [0, 0])})
            p.skip()
