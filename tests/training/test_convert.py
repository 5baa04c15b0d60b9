"""An existing model's embeddings become ours with its weights, and plain modules of torch again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.training.test_adoption import (
    BATCH,
    DIM,
    DLRM,
    EPOCHS,
    PASSES,
    ROWS,
    TABLES,
    Side,
    compare,
    make_optimizer,
    plain,
    rows_of,
    samples,
    schema_of,
    torch_batch,
)  # fmt: skip
from tiercache.data.from_arrays import write_dataset
from tiercache.data.raw_batch import FeatureKeys, RawBatch
from tiercache.errors import StateError

if TYPE_CHECKING:
    from tests.ranks.pool import RanksPool
    from tiercache.dist.communicator import AnyCommunicator

NAMES = [f"f{t}" for t in range(TABLES)]


def trained_before() -> DLRM:
    """Return a plain model whose tables do not begin as the schema says."""
    torch.manual_seed(3)
    tables = [nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=t == 3) for t in range(TABLES)]
    for table in tables:
        nn.init.uniform_(table.weight, -0.2, 0.2)
    torch.manual_seed(1)
    return DLRM(list(tables))


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_a_converted_model_gives_the_numbers_of_the_model_that_it_was(tmp_path: Path, optimizer: str) -> None:
    """Three lines are changed; out of core, with its weights, given up in the middle and gone on with."""
    data = samples()
    passes = write_dataset(tmp_path / "passes", schema_of(optimizer), data)
    begin = trained_before()
    reference = theirs_from(copy.deepcopy(begin), optimizer, data)
    losses: dict[int, float] = {}
    for stop in (PASSES * EPOCHS // 2, None):
        torch.manual_seed(1)
        model = tc.convert(
            copy.deepcopy(begin)
            if stop
            else DLRM([nn.EmbeddingBag(ROWS, DIM, mode="sum", device="meta") for _ in NAMES]),
            passes,
            {"tables": NAMES},
        )
        assert isinstance(model, DLRM)
        trainer = make_optimizer(optimizer, model.parameters())
        row_bytes = ROWS * TABLES * (DIM + (DIM if optimizer == "Adagrad" else 0)) * 4
        with tc.TierCache(
            tmp_path / "model.tc", passes, model=model, optimizer=trainer, device_budget=row_bytes // 4,
            host_budget="32MiB", progress=False,
        ) as cache:  # fmt: skip
            assert all(not table.weights for table in model.tables)
            side = Side(model, [trainer], cache.clip_grad_norm_, [trainer], cache.register, losses)
            for p in cache.passes(epochs=EPOCHS):
                if p.index == stop:
                    break
                plain(
                    side,
                    {},
                    [
                        (p.index * 5 + b, one.dense, list(one.features.values()), one.label, 1.0)
                        for b, one in enumerate(p.batches(BATCH))
                    ],
                )
    with tc.Store.open(tmp_path / "model.tc", mode="r") as store:
        compare(losses, model.dense_parameters(), rows_of(store), reference)
        back = tc.to_torch(model, store)
    part = data[0].slice(0, 20)
    dense, bags, *_ = torch_batch(part)
    with torch.no_grad():
        torch.testing.assert_close(back(dense, bags), reference.model(dense, bags), atol=1e-5, rtol=1e-5)
    assert isinstance(model.tables[0], tc.EmbeddingBag)


def theirs_from(model: DLRM, optimizer: str, data: list[Any]) -> Side:
    """Train the model as it is, in memory."""
    groups = [
        {"params": model.dense_parameters(), "lr": 0.05},
        {"params": [p for table in model.tables for p in table.parameters()], "lr": 0.2},
    ]
    for table in model.tables:
        table.sparse = False
    side = Side(model, [make_optimizer(optimizer, groups)], lambda _: None, [], lambda **_: None)
    for index in range(PASSES * EPOCHS):
        part, size = data[index % PASSES], data[0].num_samples
        cuts = [part.slice(low, min(size, low + BATCH)) for low in range(0, size, BATCH)]
        plain(side, {}, [(index * 5 + b, *torch_batch(cut)) for b, cut in enumerate(cuts)])
    return side


SCHEMA = tc.Schema(
    features=(
        tc.Feature(name="user", table="user"), tc.Feature(name="item", table="item"),
        tc.Feature(name="seen", table="item", hotness="ragged"),
    ),
    tables=tuple(
        tc.Table(name=name, dim=4, optimizer=tc.optim.SGD(learning_rate=0.1), initializer=tc.init.Zeros())
        for name in ("user", "item")
    ),
    label="y",
    dense=(),
)  # fmt: skip


class Small(nn.Module):
    """Two embeddings, of which one is used twice."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.user_emb = nn.Embedding(10, 4)
        self.items = nn.EmbeddingBag(20, 4, **options)
        self.same = self.items


def test_modules_find_their_features_by_name_or_as_they_are_told() -> None:
    """With words that say what a module is; one that is used for two features takes both."""
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
    assert [name for name, _ in made.named_parameters()] == [
        "user_emb.handle", "items.lookups.item.handle", "items.lookups.seen.handle"
    ]  # fmt: skip
    assert isinstance(tc.convert(nn.Embedding(3, 4), SCHEMA, {"": "user"}), tc.Embedding)
    left = tc.convert(Small(), SCHEMA, {}, filter_fn=lambda module, name: name == "user_emb")
    assert isinstance(left.items, nn.EmbeddingBag)
    frozen = Small()
    frozen.user_emb.weight.requires_grad_(False)
    assert not tc.convert(frozen, SCHEMA, {"items": "item"}).user_emb.handle.requires_grad
    with torch.device("meta"):
        assert tc.convert(Small(), SCHEMA, {"items": "item"}).user_emb.weights == {}


@pytest.mark.parametrize(
    ("change", "features", "words"),
    [
        (None, {}, "no feature is called like the module 'items': give features={'items': NAME}, where the features"),
        (None, {"items": "thing"}, "the schema has no feature 'thing', which 'items' is to look up"),
        (None, {"nobody": "item"}, "features= names the module 'nobody', which the model does not have"),
        (None, {"items": ["item", "user"]}, "looks up 'item' and 'user', which are of tables 'item' and 'user': give"),
        ({"max_norm": 1.0}, {"items": "item"}, r"items has max_norm=1.0: make it without, as rows are not renormal"),
        ({"padding_idx": 0, "mode": "max"}, {"items": "item"}, "'item' is pooled by max and has padding: pool it by"),
        ({"scale_grad_by_freq": True}, {"items": "item"}, "items has scale_grad_by_freq=True: make it without"),
        ({"embedding_dim": 8}, {"items": "item"}, "items has 8 columns and table 'item' 4: make them the same"),
    ],
)
def test_what_cannot_be_converted_is_a_sentence(change: Any, features: dict[str, Any], words: str) -> None:
    """And the model is as it was."""
    model = Small()
    if change:
        options = {"num_embeddings": 20, "embedding_dim": 4, **change}
        model.items = model.same = nn.EmbeddingBag(**options)
    with pytest.raises(ValueError, match=words):
        tc.convert(model, SCHEMA, features)
    assert isinstance(model.user_emb, nn.Embedding)


def test_weights_go_to_the_cache_that_makes_the_store(tmp_path: Path) -> None:
    """Rows of all keys, also of those that no pass has; a store that has commits keeps its own, and others refuse."""
    keys = {"user": np.array([1, 2]), "item": np.array([3, 19]), "seen": (np.array([4]), np.array([0, 1, 1]))}
    tc.write_key_sets(tmp_path / "passes", SCHEMA, [{"user": np.array([1, 2]), "item": np.array([3, 4, 19])}])
    data, model = tc.PassDataset.open(tmp_path / "passes"), Small(mode="sum")
    user, items = model.user_emb.weight.data.clone(), model.items.weight.data.clone()
    tc.convert(model, data, {"items": ["item", "seen"]})
    budgets = {"device_budget": "1MiB", "host_budget": "64MiB", "progress": False}
    words = r"a converted model brings rows .* give it to TierCache\(model=...\)"
    with tc.TierCache(tmp_path / "other.tc", data, **budgets) as cache, pytest.raises(StateError, match=words):
        cache.register(model=model)
    with tc.TierCache(tmp_path / "model.tc", data, model=model, **budgets) as cache:
        for p in cache.passes(epochs=1):
            batch = p.batch(keys)
            assert torch.equal(model.user_emb(batch.features["user"]), user[[1, 2]])
            assert torch.equal(model.items(batch.features["item"]), items[[3, 19]])
            assert torch.equal(model.same(batch.features["seen"]), torch.stack([items[4], torch.zeros(4)]))
            for wrong, words in ((batch, "a batch, which has several"), (torch.tensor([1]), "was given a Tensor")):
                with pytest.raises(TypeError, match=words):
                    model.items(wrong)
            with pytest.raises(ValueError, match="looks up item, seen and was given 'user'"):
                model.items(batch.features["user"])
    with tc.Store.open(tmp_path / "model.tc", mode="r") as store:
        assert (store.live_rows("user"), store.live_rows("item")) == (10, 20)
        served = tc.to_torch(model, store, keys={"item": torch.tensor([3, 7])})
    found = served.items(torch.tensor([3, 5, 7]), torch.tensor([0, 2]))
    assert torch.equal(found, items[[3, 7]])  # 5 was left out, and has no row there
    assert torch.equal(served.user_emb(torch.tensor([[9, 0], [1, 99]])),
                       torch.stack([user[[9, 0]], torch.stack([user[1], torch.zeros(4)])]))  # fmt: skip
    assert served.same is served.items
    again = tc.convert(Small(mode="sum"), data, {"items": ["item", "seen"]})
    with tc.TierCache(tmp_path / "model.tc", data, model=again, **budgets) as cache:
        cache.restore()
        assert again.user_emb.weights == {}
        assert np.array_equal(cache.store.lookup("user", np.arange(10))["vector"], user.numpy())


class Padded(nn.Module):
    """Lists of one length, and bags, in which id 0 stands for nothing."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.words, self.bag = nn.Embedding(30, 4, padding_idx=0), nn.EmbeddingBag(30, 4, padding_idx=0, mode=mode)

    def forward(self, words: Any, *bag: Any) -> torch.Tensor:
        """Return a number for each sample."""
        return self.words(words).square().sum(dim=(1, 2)) + self.bag(*bag).sum(dim=1)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("by", ["samples", "raw keys", "no padding in the pass"])
def test_padding_is_zeros_and_is_not_trained(tmp_path: Path, mode: str, by: str) -> None:
    """As torch has it: in lists and bags, also where a bag has nothing else, and where no key of a pass is padding."""
    schema = tc.Schema(
        features=(
            tc.Feature(name="words", hotness="multi_hot", length=3), tc.Feature(name="bag", hotness="ragged"),
        ),
        tables=tuple(
            tc.Table(name=name, dim=4, optimizer=tc.optim.Adagrad(learning_rate=0.1), initializer=tc.init.Zeros())
            for name in ("words", "bag")
        ),
        label="y", dense=(),
    )  # fmt: skip
    chance, low = np.random.default_rng(1), int(by == "no padding in the pass")
    words = chance.integers(low, 30, (12, 3))
    words[3] = low
    offsets = np.concatenate([[0], np.cumsum(chance.integers(0, 4, 12))])
    bag = np.where(chance.random(offsets[-1]) < 0.4, low, chance.integers(low, 30, offsets[-1]))
    features = {
        "words": FeatureKeys(words.reshape(-1), np.arange(13) * 3), "bag": FeatureKeys(bag.astype(np.int64), offsets)
    }  # fmt: skip
    data = write_dataset(
        tmp_path / "d", schema, [RawBatch(np.zeros(12, np.float32), np.zeros((12, 0), np.float32), features)]
    )
    torch.manual_seed(0)
    theirs = Padded(mode)
    ours = tc.convert(copy.deepcopy(theirs), data)
    optimizer = torch.optim.Adagrad(theirs.parameters(), lr=0.1)
    with tc.TierCache(
        tmp_path / "m.tc", data, model=ours, device_budget="1MiB", host_budget="64MiB", progress=False
    ) as cache:
        for p in cache.passes(epochs=4):
            whole = {"words": words, "bag": (bag, offsets)}
            for batch in [p.batch(whole)] if by == "raw keys" else p.batches(12):
                mine = ours(batch.features["words"], batch.features["bag"])
                other = theirs(torch.from_numpy(words), torch.from_numpy(bag), torch.from_numpy(offsets[:-1]))
                torch.testing.assert_close(mine, other)
                mine.square().sum().backward()
                other.square().sum().backward()
                cache.optimizer.step()
                optimizer.step()
                optimizer.zero_grad()
        for slices in cache.evaluate(data):
            for batch in slices.batches(12):
                found = ours(batch.features["words"], batch.features["bag"])
        torch.testing.assert_close(
            found, theirs(torch.from_numpy(words), torch.from_numpy(bag), torch.from_numpy(offsets[:-1]))
        )
        for name in ("words", "bag"):
            vectors = cache.store.lookup(name, np.arange(30))["vector"]
            torch.testing.assert_close(torch.from_numpy(vectors), getattr(theirs, name).weight.data)
        one = cache.evaluate_batch(whole)
        with pytest.raises(ValueError, match="has rows of single keys, among which padding cannot be found: leave it"):
            ours.words(one.features["words"])


class Published(nn.Module):
    """The layout that facebookresearch/dlrm has: a list of sparse bags, each given its ids and offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True) for _ in NAMES)
        self.bot_l = nn.Sequential(nn.Linear(4, DIM), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(DIM + TABLES * (TABLES + 1) // 2, 1), nn.Sigmoid())

    def apply_emb(self, offsets: Any, ids: Any) -> list[torch.Tensor]:
        """Look every table up."""
        found = []
        for k, of_table in enumerate(ids):
            found.append(self.emb_l[k](of_table, offsets[k], per_sample_weights=None))
        return found

    def forward(self, dense: torch.Tensor, offsets: Any, ids: Any) -> torch.Tensor:
        """Return chances (N, 1)."""
        x = self.bot_l(dense)
        vectors = torch.stack([x, *self.apply_emb(offsets, ids)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = torch.tril_indices(TABLES + 1, TABLES + 1, offset=-1)
        return self.top_l(torch.cat([x, products[:, rows, columns]], dim=1))


def test_the_layout_of_the_published_dlrm_is_converted_as_it_is(tmp_path: Path) -> None:
    """Features take the place of ids; where offsets were there is None. Gradients and rows are those of the bags."""
    data = samples()
    passes = write_dataset(tmp_path / "passes", schema_of("SGD"), data)
    torch.manual_seed(2)
    theirs = Published()
    ours = tc.convert(copy.deepcopy(theirs), passes, {"emb_l": NAMES})
    optimizers = [
        torch.optim.SGD([*one.bot_l.parameters(), *one.top_l.parameters()], lr=0.05) for one in (ours, theirs)
    ]
    rows = torch.optim.SGD(theirs.emb_l.parameters(), lr=0.2)
    with tc.TierCache(
        tmp_path / "m.tc", passes, model=ours, optimizer=optimizers[0], device_budget="1MiB", host_budget="64MiB",
        progress=False,
    ) as cache:  # fmt: skip
        for p in cache.passes(epochs=1):
            for b, batch in enumerate(p.batches(BATCH)):
                part = data[p.index].slice(b * BATCH, min(data[0].num_samples, (b + 1) * BATCH))
                dense, bags, label, _ = torch_batch(part)
                mine = ours(batch.dense, [None] * TABLES, [*batch.features.values()])
                other = theirs(dense, [bag[1] for bag in bags], [bag[0] for bag in bags])
                torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
                nn.functional.binary_cross_entropy(mine.squeeze(1), batch.label).backward()
                nn.functional.binary_cross_entropy(other.squeeze(1), label).backward()
                optimizers[0].step()
                cache.optimizer.step()
                for optimizer in (optimizers[1], rows):
                    optimizer.step()
                for optimizer in (*optimizers, rows):
                    optimizer.zero_grad()
        for name, table in zip(NAMES, theirs.emb_l, strict=True):
            found = torch.from_numpy(cache.store.lookup(name, np.arange(ROWS))["vector"])
            torch.testing.assert_close(found, table.weight.data, atol=1e-5, rtol=0)


def opened_on_ranks(ranks: AnyCommunicator, folder: str) -> dict[str, Any]:
    """Convert a model on each rank, open the store and look all rows up."""
    data = tc.PassDataset.open(Path(folder) / "passes")
    torch.manual_seed(7)
    model = Small(mode="sum")
    weights = {"user": model.user_emb.weight.data.clone().numpy(), "item": model.items.weight.data.clone().numpy()}
    tc.convert(model, data, {"items": ["item", "seen"]})
    with tc.TierCache(
        Path(folder) / "model.tc", data, model=model, device_budget="1MiB", host_budget="64MiB", progress=False
    ) as cache:
        cache.restore()
        assert cache.sharding is not None
    return weights


def test_ranks_shard_the_weights_of_a_converted_model(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Rank 0 makes a plain store of them, which all then shard; opened again nothing is imported."""
    tc.write_key_sets(tmp_path / "passes", SCHEMA, [{"user": np.array([1, 2]), "item": np.array([3, 4, 19])}])
    for _ in range(2):
        weights, _ = ranks_pool.run(2, "tests.training.test_convert:opened_on_ranks", folder=str(tmp_path))
        with tc.Store.open(tmp_path / "model.tc", mode="r") as store:
            assert tc.store.info(tmp_path / "model.tc")["ranks"] == 2
            for name, rows in weights.items():
                assert np.array_equal(store.lookup(name, np.arange(rows.shape[0]))["vector"], rows)
                assert store.live_rows(name) == rows.shape[0]
