"""torchrec: its collections become ours with their weights, and its published DLRM trains out of core as it is."""

import copy
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc

pytest.importorskip("torchrec", reason="torchrec is not installed: make test-torchrec")

from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType
from torchrec.models.dlrm import DLRM
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

ROWS, DIM, DENSE, BATCH, BATCHES, PASSES, EPOCHS = 2000, 16, 4, 32, 5, 8, 5
STEPS = BATCHES * PASSES * EPOCHS
TABLES = {"of_user": ["user"], "of_item": ["item", "seen"], "of_place": ["place"]}
POOLED = {"of_user": PoolingType.SUM, "of_item": PoolingType.SUM, "of_place": PoolingType.MEAN}
FEATURES = [name for names in TABLES.values() for name in names]
ROW_OPTIMIZERS = {
    "SGD": tc.optim.SGD(learning_rate=0.2), "Adagrad": tc.optim.Adagrad(learning_rate=0.2, initial_accumulator=0.1)
}  # fmt: skip


def schema_of(optimizer: str = "SGD", weights: str | None = None) -> tc.Schema:
    return tc.Schema(
        features=tuple(
            tc.Feature(name=name, table=table, hotness="ragged", weights=weights and f"{name}_{weights}")
            for table, names in TABLES.items()
            for name in names
        ),
        tables=tuple(
            tc.Table(name=name, dim=DIM, optimizer=ROW_OPTIMIZERS[optimizer], initializer=tc.init.Zeros())
            for name in TABLES
        ),
        label="y", dense=(),
    )  # fmt: skip


def bags(*, weighted: bool = False, device: str = "cpu") -> Any:
    configs = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=DIM,
            num_embeddings=ROWS,
            feature_names=[*features],
            pooling=PoolingType.SUM if weighted else POOLED[name],
        )
        for name, features in TABLES.items()
    ]
    return EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device(device))


def model_of(device: str = "cpu") -> Any:
    torch.manual_seed(1)
    return DLRM(bags(device=device), DENSE, [16, DIM], [16, 1])


def loader_of(p: int) -> list[tuple[torch.Tensor, Any, torch.Tensor]]:
    chance, found = np.random.default_rng(p), []
    for _ in range(BATCHES):
        lengths = chance.integers(0, 4, (len(FEATURES), BATCH))
        keys = (p * ROWS // PASSES + (chance.random(lengths.sum()) ** 2 * ROWS / 6).astype(np.int64)) % ROWS
        kjt = KeyedJaggedTensor(FEATURES, torch.from_numpy(keys), lengths=torch.from_numpy(lengths.reshape(-1)))
        dense = torch.from_numpy(chance.normal(size=(BATCH, DENSE)).astype(np.float32))
        found.append((dense, kjt, (dense.sum(dim=1) > 0).float()))
    return found


def write_keys(path: Path, optimizer: str) -> None:
    sets: list[dict[str, Any]] = []
    for p in range(PASSES):
        of_pass = [kjt.to_dict() for _, kjt, _ in loader_of(p)]
        sets.append(
            {
                table: np.unique(np.concatenate([one[name].values().numpy() for one in of_pass for name in names]))
                for table, names in TABLES.items()
            }
        )
    tc.write_key_sets(path, schema_of(optimizer), sets)


def optimizer_of(name: str, parameters: Any, rate: float) -> torch.optim.Optimizer:
    if name == "Adagrad":
        return torch.optim.Adagrad(parameters, lr=rate, initial_accumulator_value=0.1)
    return torch.optim.SGD(parameters, lr=rate)


def step(logits: torch.Tensor, label: torch.Tensor, *optimizers: torch.optim.Optimizer) -> float:
    loss = nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1), label)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def ours(folder: Path, optimizer: str, *, dies: bool) -> tuple[dict[int, float], Any]:
    """Train the converted model out of core, to the end or until it kills itself inside a pass."""
    data = tc.PassDataset.open(folder / "passes")
    model = tc.convert(model_of("cpu" if dies else "meta"), data)  # the store has the weights, the second time
    dense = optimizer_of(optimizer, [p for name, p in model.named_parameters() if "anchor" not in name], 0.05)
    row_bytes = ROWS * len(TABLES) * (DIM + (DIM if optimizer == "Adagrad" else 0)) * 4
    losses = {}
    with tc.TierCache(
        folder / "model.tc", data, model=model, optimizer=dense, device_budget=row_bytes // 4, host_budget="32MiB",
        progress=False,
    ) as cache:  # fmt: skip
        dense = cache.optimizer
        for p in cache.passes(epochs=EPOCHS):
            for number, (floats, kjt, label) in enumerate(loader_of(p.index % PASSES)):
                at = p.index * BATCHES + number
                losses[at] = step(model(floats, p.batch(kjt)), label, dense, cache.optimizer)
                if dies and at == STEPS // 2 + 2:
                    os.kill(os.getpid(), signal.SIGKILL)
    return losses, model


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_the_published_model_gives_the_numbers_that_it_gave(tmp_path: Path, optimizer: str) -> None:
    write_keys(tmp_path / "passes", optimizer)
    child = multiprocessing.get_context("spawn").Process(target=ours, args=(tmp_path, optimizer), kwargs={"dies": True})
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    losses, model = ours(tmp_path, optimizer, dies=False)
    assert 0 < len(losses) < STEPS
    theirs = model_of()
    tables = [p for name, p in theirs.named_parameters() if "embedding_bags" in name]
    others = [p for name, p in theirs.named_parameters() if "embedding_bags" not in name]
    optimizers = [optimizer_of(optimizer, tables, 0.2), optimizer_of(optimizer, others, 0.05)]
    for at in range(STEPS):
        dense, kjt, label = loader_of(at // BATCHES % PASSES)[at % BATCHES]
        loss = step(theirs(dense, kjt), label, *optimizers)
        assert abs(losses.get(at, loss) - loss) < 1e-5
    with tc.Store.open(tmp_path / "model.tc", mode="r") as store:
        for name, table in zip(TABLES, tables, strict=True):
            rows = torch.from_numpy(store.lookup(name, np.arange(ROWS))["vector"])
            torch.testing.assert_close(rows, table.data, atol=1e-5, rtol=0)
        back = tc.to_torch(model, store)
    dense, kjt, _ = loader_of(3)[0]
    torch.testing.assert_close(back(dense, kjt), theirs(dense, kjt), atol=1e-5, rtol=1e-5)


def test_collections_return_what_they_returned(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[*features])
            for name, features in TABLES.items()
        ]
    )
    pooled = bags(weighted=True)
    for mine, other in zip(pooled.embedding_bags.values(), plain.embeddings.values(), strict=True):
        mine.weight.data = other.weight.data
    theirs = nn.ModuleDict({"rows": plain, "bags": pooled})
    keys, schema = loader_of(0)[0][1], schema_of(weights="w")
    weighted = KeyedJaggedTensor(
        FEATURES, keys.values(), lengths=keys.lengths(), weights=torch.rand(keys.values().numel())
    )
    tc.write_key_sets(tmp_path / "passes", schema, [{name: np.arange(ROWS) for name in TABLES}])
    data = tc.PassDataset.open(tmp_path / "passes")
    made = tc.convert(copy.deepcopy(theirs), data)
    with tc.TierCache(
        tmp_path / "m.tc", data, model=made, device_budget="2MiB", host_budget="64MiB", progress=False
    ) as cache:
        for p in cache.passes(epochs=1):
            batch = p.batch(weighted)
            same(made["bags"](batch), theirs["bags"](weighted), made["rows"](batch), theirs["rows"](keys))
            p.skip()
        back = tc.to_torch(made, cache.store)
    same(back["bags"](weighted), theirs["bags"](weighted), back["rows"](keys), theirs["rows"](keys))


def same(mine: Any, other: Any, rows: dict[str, Any], other_rows: dict[str, Any]) -> None:
    assert isinstance(mine, KeyedTensor)
    assert mine.keys() == other.keys()
    torch.testing.assert_close(mine.values(), other.values())
    assert [*rows] == [*other_rows]
    for name, one in rows.items():
        torch.testing.assert_close(one.values(), other_rows[name].values())
        assert torch.equal(one.offsets(), other_rows[name].offsets())


def test_a_collection_finds_its_features_and_says_what_it_cannot_do() -> None:
    """By their names or as it is told; its plain modules are not converted apart; one on meta has no weights."""
    schema = schema_of()
    made: Any = tc.convert(bags(), schema)
    assert made.features == FEATURES
    assert {name: weight.shape for name, weight in made.weights.items()} == dict.fromkeys(TABLES, (ROWS, DIM))
    assert made.pooling["place"] == "mean"
    assert not tc.convert(bags(device="meta"), schema).weights
    assert (
        tc.convert(nn.ModuleDict({"a": bags()}), schema, {"a": ["user", "seen", "item", "place"]})["a"].features[1]
        == "seen"
    )
    kept = nn.ModuleDict({"a": bags(), "user": nn.Embedding(ROWS, DIM)})
    tc.convert(kept, schema, filter_fn=lambda _, name: name == "user")
    assert isinstance(kept["a"].embedding_bags["of_user"], nn.EmbeddingBag)
    with pytest.raises(ValueError, match=r"has is_weighted=True and feature 'user' has no weights in the schema: make"):
        tc.convert(bags(weighted=True), schema)
    with pytest.raises(
        ValueError, match=r"a looks up user, item, seen, place, but 1 features of the schema replace them"
    ):
        tc.convert(nn.ModuleDict({"a": bags()}), schema, {"a": "user"})
    with pytest.raises(ValueError, match=r"the schema has no feature 'item', which"):
        tc.convert(bags(), tc.Schema(features=schema.features[:1], tables=schema.tables[:1], label="y", dense=()))
