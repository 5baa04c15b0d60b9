"""A batch as a mapping of names: features, dense columns, labels and kept columns."""

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
from tests.data.cases import extracted
from tests.dist.pool import RanksPool
from tests.train.cases import resident, table, tiered
from tests.train.devices import DEVICES
from tiercache.dist.communicator import AnyCommunicator

SAMPLES = 96
NAMES = ("user", "item", "price", "age", "click", "seconds", "group", "item_id")


def columns_of() -> dict[str, NDArray[Any]]:
    chance = np.random.default_rng(0)
    return {
        "user": chance.integers(0, 40, SAMPLES), "item": chance.integers(0, 30, SAMPLES),
        "price": chance.random(SAMPLES).astype(np.float32), "age": chance.random(SAMPLES).astype(np.float32),
        "click": chance.random(SAMPLES) < 0.5, "seconds": chance.random(SAMPLES),
        "group": chance.integers(0, 5, SAMPLES, dtype=np.int16),
    }  # fmt: skip


def schema_of(**changes: Any) -> tc.Schema:
    values: dict[str, Any] = {
        "features": (tc.Feature(name="user", table="t"), tc.Feature(name="item", table="t")),
        "tables": (table("t", 4, tc.optim.SGD(learning_rate=0.1)),),
        "dense": (tc.DenseFeature(column="price"), tc.DenseFeature(column="age")),
        "labels": (tc.KeptColumn(column="click"), tc.KeptColumn(column="seconds")),
        "keep": (tc.KeptColumn(column="group"), tc.KeptColumn(column="item", name="item_id")),
    }
    return tc.Schema(**{**values, **changes})


def data_of(folder: Path, **changes: Any) -> tc.PassDataset:
    pq.write_table(pa.table(columns_of()), folder / "x.parquet")
    return extracted(
        folder / "x.parquet", schema_of(**changes), folder / "passes", split_by="rows=32", batch_multiple=1
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_columns_are_those_of_the_samples_in_their_own_dtype(tmp_path: Path, prefetch: int, device: str) -> None:
    data, columns = data_of(tmp_path), columns_of()
    columns["item_id"], seconds = columns["item"], columns["seconds"].tolist()
    cache = resident(data, device=DEVICES[device]())
    for p in cache.passes(epochs=1):
        seen = list[int]()
        for batch in p.batches(10, shuffle=True, prefetch=prefetch):
            assert batch.keys() == tuple(batch) == NAMES
            places = [seconds.index(one) for one in batch["seconds"].tolist()]
            seen += places
            for name in ("price", "age", "click", "seconds", "group", "item_id"):
                assert batch[name].device == cache.device
                torch.testing.assert_close(batch[name].cpu(), torch.from_numpy(columns[name][places]), rtol=0, atol=0)
        assert sorted(seen) == [*range(32 * p.index, 32 * p.index + 32)]
        p.skip()


def test_a_batch_is_given_as_keyword_arguments(tmp_path: Path) -> None:
    data = data_of(tmp_path, labels=(), label="click")
    users, items = tc.Embedding(data.schema, "user"), tc.Embedding(data.schema, "item")

    def forward(user: Any, item: Any, price: Any, click: Any, **others: Any) -> Any:
        assert others.keys() == {"age", "group", "item_id"}
        return (users(user) * items(item)).sum(1) * price + 0 * click

    cache = resident(data, model=nn.ModuleList([users, items]))
    for p in cache.passes(epochs=1):
        for batch in p.batches(16):
            assert "click" in batch
            assert "clicked" not in batch
            assert batch["click"] is batch.label
            assert len(batch) == 16
            assert {*dict(batch)} == {"user", "item", "price", "age", "click", "group", "item_id"}
            forward(**batch).sum().backward()
            cache.optimizer.step()


def test_a_name_that_a_batch_has_not_or_twice_says_so(tmp_path: Path) -> None:
    dense = (tc.DenseFeature(column="price"), tc.DenseFeature(column="user"))
    for p in resident(data_of(tmp_path, dense=dense)).passes(epochs=1):
        batch = next(p.batches(8))
        with pytest.raises(KeyError, match="the batch has no 'prize': it has user, item, price, click, seconds, group"):
            batch["prize"]
        with pytest.raises(KeyError, match=r"a feature and a column 'user': use batch.features"):
            batch["user"]
        p.skip()


def test_raw_and_evaluated_batches_are_mappings_too(tmp_path: Path) -> None:
    data, columns = data_of(tmp_path, labels=(), label="click"), columns_of()
    with tiered(tmp_path / "m.tc", data) as cache:
        for p in cache.passes(epochs=1):
            keys = {"user": p.source.keys("t")[:3], "item": p.source.keys("t")[:3]}
            assert p.batch(keys).keys() == ("user", "item")
            whole = p.batch(keys, label=[0, 1, 0], dense=np.ones((3, 2)))
            assert whole.keys() == ("user", "item", "price", "age", "click")
            assert torch.equal(whole["age"], torch.ones(3))  # type: ignore[arg-type]
            p.skip()
        groups = [batch["group"] for batch in cache.evaluation_batches(data, 20)]
        assert torch.equal(torch.cat(groups), torch.from_numpy(columns["group"]))  # type: ignore[arg-type]


def test_columns_move_with_their_batch(tmp_path: Path) -> None:
    for p in resident(data_of(tmp_path)).passes(epochs=1):
        batch = next(p.batches(8))
        assert batch.to("cpu") is batch
        moved = batch.to("meta")
        assert moved.columns["group"].device.type == moved.dense.device.type == "meta"
        assert moved.columns["group"].dtype == torch.int16
        p.skip()


def columns_on_ranks(ranks: AnyCommunicator, folder: str, read_by: str) -> list[list[int]]:
    data = tc.PassDataset.open(f"{folder}/passes")
    bags = tc.EmbeddingBagCollection(data.schema)
    seen = []
    with tc.TierCache(f"{folder}/m.tc", data, model=bags, device_budget="1MiB", host_budget="32MiB") as cache:
        for p in cache.passes(epochs=1):
            seen += [batch["group"].tolist() for batch in p.batches(16, read_by=read_by) if batch.weight]  # type: ignore[union-attr]
            p.skip()
    return seen


@pytest.mark.parametrize("read_by", ["rank", "owner"])
def test_each_rank_has_the_columns_of_its_samples(tmp_path: Path, ranks_pool: RanksPool, read_by: str) -> None:
    data_of(tmp_path)
    parts = ranks_pool.run(2, f"{__name__}:columns_on_ranks", folder=str(tmp_path), read_by=read_by)
    joined = [group for pair in zip(*parts, strict=True) for part in pair for group in part]
    assert joined == columns_of()["group"].tolist()
