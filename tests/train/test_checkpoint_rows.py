"""Rows that begin as rows of a checkpoint train as torch trains them, and are only read when they are first used."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import tiercache as tc
from tests.crash.told import finish, start
from tests.dist.pool import RanksPool
from tests.store.checkpoints import DIM, ROWS, TENSOR, save, weights
from tests.train.cases import tiered
from tests.train.loops import descend
from tiercache.dist.communicator import AnyCommunicator
from tiercache.store import CheckpointError

PASSES, STEPS, BATCH, WIDTH, RATE = 4, 3, 8, 6, 0.1


def keys_of_steps(seed: int = 0) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    return np.floor(ROWS * rng.random((PASSES, STEPS, BATCH, WIDTH)) ** 2).astype(np.int64)


class Net(nn.Module):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.emb, self.top = embedding, nn.Linear(DIM, 1)

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        return self.top(self.emb(keys).float().tanh().mean(1)).square().mean()


def prepared(folder: Path, *, dtype: str = "float32", path: Path | None = None) -> tc.PassDataset:
    path = path or save(folder / "model.safetensors", model__embed__weight=weights())
    start = tc.init.Checkpoint(path=str(path), tensor=TENSOR)
    optimizer = tc.optim.Adagrad(learning_rate=RATE, eps=1e-8, initial_accumulator=0.1)
    table = tc.Table(name="gram", dim=DIM, dtype=dtype, optimizer=optimizer, initializer=start)
    feature = tc.Feature(name="gram", hotness="multi_hot", length=WIDTH)
    schema = tc.Schema(features=(feature,), tables=(table,), label=None, dense=())
    return tc.write_key_sets(folder / "keys", schema, [{"gram": np.unique(of_pass)} for of_pass in keys_of_steps()])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, keys: NDArray[np.int64]) -> float:
    loss = model(torch.from_numpy(keys))
    descend(loss, optimizer)
    return float(loss.item())


def train(data: tc.PassDataset, store: Path, *, epochs: int = 2, stop: int | None = None, **options: Any) -> Any:
    model, losses = Net(tc.Embedding(data.schema, "gram")), list[float]()
    dense = torch.optim.SGD([*model.top.parameters()], lr=0.1)
    with tiered(store, data, model=model, optimizer=dense, **options) as cache:
        for p in cache.passes(epochs=epochs):
            for keys in keys_of_steps()[p.sub_dataset]:
                losses.append(step(model, cache.optimizer, keys))
                if len(losses) == stop:
                    cache.reports[-2].durable.wait(60)
                    os.kill(os.getpid(), signal.SIGKILL)
        cache.drain()
        trained = np.unique(keys_of_steps())
        return losses, cache.reports, dict(cache.store.lookup("gram", trained).items())


def in_torch(epochs: int = 2) -> tuple[list[float], NDArray[np.float32]]:
    model, losses = Net(nn.Embedding.from_pretrained(weights().float(), freeze=False, sparse=True)), []
    optimizers = [
        torch.optim.SGD(model.top.parameters(), lr=0.1),
        torch.optim.Adagrad(model.emb.parameters(), lr=RATE, eps=1e-8, initial_accumulator_value=0.1),
    ]
    for _ in range(epochs):
        for keys in keys_of_steps().reshape(-1, BATCH, WIDTH):
            loss = model(torch.from_numpy(keys))
            loss.backward()
            for one in optimizers:
                one.step()
                one.zero_grad()
            losses.append(loss.item())
    return losses, model.emb.weight.detach().numpy()


def test_losses_and_rows_are_those_of_torch_from_the_same_weights(tmp_path: Path) -> None:
    losses, reports, rows = train(prepared(tmp_path), tmp_path / "store")
    expected, weight = in_torch()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(rows["vector"], weight[np.unique(keys_of_steps())], rtol=1e-4, atol=1e-6)
    seen: set[int] = set()
    for report, keys in zip(reports, [*keys_of_steps()] * 2, strict=True):
        new = {*keys.ravel().tolist()} - seen
        assert report.checkpoint_rows == report.rows_generated == len(new)
        assert bool(new) == (report.checkpoint_bytes > 0)
        assert report.planned_equals_measured
        seen |= new


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_without_a_store_and_ones_with_any_engine_have_the_same_bits(tmp_path: Path, dtype: str) -> None:
    data = prepared(tmp_path, dtype=dtype)
    losses, _, rows = train(data, tmp_path / "store")
    others, _, found = train(data, tmp_path / "zarr", engine="zarr", commit_every=2)
    assert losses == others
    assert {name: one.tobytes() for name, one in rows.items()} == {name: one.tobytes() for name, one in found.items()}
    model, resident = Net(tc.Embedding(data.schema, "gram")), []
    dense = torch.optim.SGD([*model.top.parameters()], lr=0.1)
    cache = tc.InMemoryCache(data, model=model, optimizer=dense)
    for p in cache.passes(epochs=2):
        resident += [step(model, cache.optimizer, keys) for keys in keys_of_steps()[p.sub_dataset]]
    assert resident == losses


def killed(folder: Path) -> None:
    train(tc.PassDataset.open(folder / "keys"), folder / "killed", stop=2 * STEPS + 1)


def test_a_killed_training_resumes_to_the_same_bits(tmp_path: Path) -> None:
    data = prepared(tmp_path)
    _, _, rows = train(data, tmp_path / "whole")
    assert finish(start(killed, tmp_path)) == -signal.SIGKILL
    losses, _, found = train(data, tmp_path / "killed")
    assert len(losses) == 2 * (PASSES - 1) * STEPS
    for name, one in rows.items():
        np.testing.assert_array_equal(found[name], one)


def test_another_file_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    data, path = prepared(tmp_path), tmp_path / "model.safetensors"
    path.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="cannot be read"):
        train(data, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    (tmp_path / "moved").rename(path)
    train(data, tmp_path / "store", epochs=1)
    whole = path.read_bytes()
    for changed, message in (
        (None, "cannot be read .* restore the file, or set its new path"),
        (save(tmp_path / "b.safetensors", model__embed__weight=weights(seed=1)), "has different bytes"),
        (save(tmp_path / "c.safetensors", model__embed__weight=weights(ROWS + 1)), "is not the one"),
    ):
        path.unlink()
        if changed is not None:
            changed.rename(path)
        with pytest.raises(CheckpointError, match=message):
            train(data, tmp_path / "store")
        path.write_bytes(whole)
    assert len(train(data, tmp_path / "store")[0]) == PASSES * STEPS


def test_a_checkpoint_that_moved_trains_on_with_the_same_key_sets(tmp_path: Path) -> None:
    data, new = prepared(tmp_path), tmp_path / "elsewhere" / "renamed.safetensors"
    _, _, rows = train(data, tmp_path / "whole")
    train(data, tmp_path / "store", epochs=1)
    new.parent.mkdir()
    (tmp_path / "model.safetensors").rename(new)
    with pytest.raises(CheckpointError, match="set its new path with `tiercache alter`"):
        train(data, tmp_path / "store")
    (table,) = data.schema.tables
    moved = replace(table, initializer=replace(table.initializer, path=str(new)))
    with tc.Store.open(tmp_path / "store") as store:
        tc.store.alter(store, [moved])
    for name, one in train(data, tmp_path / "store")[2].items():
        np.testing.assert_array_equal(one, rows[name])
    save(tmp_path / "model.safetensors", model__embed__weight=weights(seed=1))  # another model at the old path
    with tc.Store.open(tmp_path / "store", mode="r") as store:
        found = tc.to_torch(Net(tc.Embedding(data.schema, "gram")), store, like=Net(nn.Embedding(ROWS, DIM)))
        np.testing.assert_array_equal(
            found.emb.weight.detach(), store.lookup("gram", np.arange(ROWS), missing="initial")["vector"]
        )
    elsewhere = replace(moved, initializer=replace(moved.initializer, tensor="another"))
    with tc.Store.open(tmp_path / "store") as store, pytest.raises(CheckpointError, match="has no tensor 'another'"):
        tc.store.alter(store, [elsewhere])


def test_a_key_beyond_the_tensor_ends_the_training_with_its_name(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", model__embed__weight=weights(ROWS // 2))
    with pytest.raises(CheckpointError, match=r"has key 1[0-9]{3}, but .* has 1,000 rows: expected keys from 0 to 999"):
        train(prepared(tmp_path, path=path), tmp_path / "store")


def test_a_row_that_keys_share_has_no_beginning(tmp_path: Path) -> None:
    (table,) = prepared(tmp_path).schema.tables
    schema = tc.Schema(features=(tc.Feature(name="gram", null="embed"),), tables=(table,), label=None, dense=())
    pq.write_table(pa.table({"gram": [1, 1, 2, None]}), tmp_path / "data.parquet")
    options = {"device_budget": "1GiB", "batch_multiple": 1, "progress": False}
    for name, more, error, message in (
        ("rare", {"min_count": 2}, tc.errors.DatasetError, "starts from a checkpoint, which has no such row"),
        ("null", {}, CheckpointError, "a row that rare keys or nulls share"),
    ):
        data = tc.extract(tmp_path / "data.parquet", schema, tmp_path / name, **options, **more)
        with pytest.raises(error, match=message), tiered(tmp_path / f"{name}.tc", data) as cache:
            next(cache.passes(epochs=1))


def test_rows_that_were_never_trained_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    data = prepared(tmp_path)
    model = Net(tc.Embedding(data.schema, "gram"))
    unseen = np.setdiff1d(np.arange(ROWS), np.unique(keys_of_steps()))[:50]
    expected = weights()[unseen].float()
    with tiered(tmp_path / "store", data, model=model) as cache:
        for p in cache.passes(epochs=1):
            p.skip()
        cache.drain()
        with torch.no_grad():
            torch.testing.assert_close(model.emb(torch.from_numpy(unseen)), expected, rtol=0, atol=0)
        found = cache.store.lookup("gram", unseen, missing="initial")["vector"]
        np.testing.assert_array_equal(found, expected.numpy())


def test_a_host_budget_counts_the_order_of_keys(tmp_path: Path) -> None:
    with pytest.raises(tc.TierCacheError, match="raise host_budget to"):
        train(prepared(tmp_path), tmp_path / "store", host_budget="20MiB")


def test_the_schema_file_names_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(
        "features.gram = {}\n[tables.gram]\ndim = 20\n"
        'initializer = { name = "checkpoint", path = "model.safetensors", tensor = "model.embed.weight" }\n'
    )
    (table,) = tc.Schema.load(tmp_path / "schema.toml").tables
    assert table.initializer == tc.init.Checkpoint(path=str(Path("model.safetensors").absolute()), tensor=TENSOR)


def test_convert_takes_it_for_modules_on_meta(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", model__embed__weight=weights())
    start = tc.init.Checkpoint(path=str(path), tensor=TENSOR)
    with torch.device("meta"):
        table = nn.Embedding(ROWS, DIM)
    model = tc.convert(Net(table), initializer=start)
    assert next(iter(model.emb.table_specs.values())).initializer == start
    with pytest.raises(ValueError, match="initializer= is given, but emb has weights"):
        tc.convert(Net(nn.Embedding(ROWS, DIM)), initializer=start)


def test_a_padding_row_of_the_checkpoint_that_is_not_zeros_is_refused(tmp_path: Path) -> None:
    """A converted module would return zeros for it. Bags never read it."""
    tensor = weights()
    tensor[3] = 0
    path = save(tmp_path / "m.safetensors", model__embed__weight=tensor)
    start = tc.init.Checkpoint(path=str(path), tensor=TENSOR)

    def on_meta(kind: Any, padding: int) -> nn.Module:
        with torch.device("meta"):
            return Net(kind(ROWS, DIM, padding_idx=padding))

    with pytest.raises(ValueError, match=r"row 1999 of emb is padding and is not zero.*start from a checkpoint whose"):
        tc.convert(on_meta(nn.Embedding, -1), initializer=start)
    for kind, padding in ((nn.Embedding, 3), (nn.EmbeddingBag, -1)):
        assert tc.convert(on_meta(kind, padding), initializer=start).emb.padding_idx == padding % ROWS


def train_on_rank(ranks: AnyCommunicator, folder: str, name: str, **options: Any) -> int:
    """Train this rank's share of each batch: the ranks average the gradients of their sums."""
    data = tc.PassDataset.open(Path(folder) / "keys")
    model = tc.Embedding(data.schema, "gram")
    with tiered(Path(folder) / name, data, model=model, **options) as cache:
        for p in cache.passes(epochs=1):
            for keys in keys_of_steps()[p.sub_dataset]:
                loss = ranks.size * model(torch.from_numpy(keys[ranks.rank :: ranks.size])).tanh().sum()
                descend(loss, cache.optimizer)
        cache.drain()
        return sum(report.checkpoint_rows for report in cache.reports)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sharding", ["row_wise", "column_wise", "table_wise"])
def test_each_rank_reads_the_rows_that_it_has(ranks_pool: RanksPool, tmp_path: Path, sharding: str) -> None:
    prepared(tmp_path)
    read = ranks_pool.run(2, f"{__name__}:train_on_rank", folder=str(tmp_path), name="two", sharding={"gram": sharding})
    alone = ranks_pool.run(1, f"{__name__}:train_on_rank", folder=str(tmp_path), name="one")
    count = np.unique(keys_of_steps()).size
    assert alone == [count]
    assert sum(read) == (2 * count if sharding == "column_wise" else count)
    keys = np.arange(0, ROWS, 3)
    with tc.Store.open(tmp_path / "one", mode="r") as one, tc.Store.open(tmp_path / "two", mode="r") as two:
        expected, found = (store.lookup("gram", keys, missing="initial") for store in (one, two))
    for name, rows in expected.items():
        np.testing.assert_allclose(found[name], rows, rtol=1e-5, atol=1e-6)


def test_new_ranks_keep_what_old_ones_know_of_the_checkpoint(ranks_pool: RanksPool, tmp_path: Path) -> None:
    prepared(tmp_path)
    ranks_pool.run(2, f"{__name__}:train_on_rank", folder=str(tmp_path), name="store")
    with tc.Store.open(tmp_path / "store", mode="r") as store:
        known = np.logical_or.reduce([part.checkpoints["gram"].sums[0].known_C for part in store.parts])
    ranks_pool.run(3, f"{__name__}:train_on_rank", folder=str(tmp_path), name="store")
    with tc.Store.open(tmp_path / "store", mode="r") as store:
        for part in store.parts:
            np.testing.assert_array_equal(part.checkpoints["gram"].sums[0].known_C, known)
