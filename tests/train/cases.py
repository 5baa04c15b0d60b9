"""Small trainings for tests: data, schema and a model, tiered or resident, in a few lines."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
from tests.cache_options import gathered
from tests.datasets import write_dataset
from tests.train.devices import device_of_tests
from tiercache.data.raw_batch import FeatureKeys, RawBatch
from tiercache.data.sub_dataset import EncodedBatch, SubDataset
from tiercache.errors import DatasetError
from tiercache.planning.row_offsets import RowOffsets
from tiercache.store import MemoryEngine
from tiercache.train.cache import TierCache
from tiercache.train.rank_rows import CurrentRows


@dataclass(frozen=True, kw_only=True)
class Spec:
    name: str
    table: str
    hotness: str = "one_hot"
    length: int = 3
    weighted: bool = False
    mode: str = "sum"


SPECS = (
    Spec(name="f", table="a"),
    Spec(name="g", table="b", hotness="ragged", mode="max"),
    Spec(name="h", table="b", hotness="multi_hot", mode="mean"),
    Spec(name="i", table="a", hotness="ragged", weighted=True),
)
"""Features of two tables, a and b, with every hotness and every pooling."""


@dataclass(frozen=True, kw_only=True)
class Case:
    tables: tuple[tc.Table, ...]
    specs: tuple[Spec, ...]
    num_samples: int = 256
    pass_rows: int = 64
    num_keys: int = 200
    data_seed: int = 0
    batch: int = 16
    epochs: int = 2
    shuffle: bool = True
    accumulate: int = 1
    dense_lr: float = 0.05
    integers: bool = False
    order_seed: int | None = None
    prefetch: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def schema(self) -> tc.Schema:
        features = tuple(
            tc.Feature(
                name=spec.name,
                columns=(spec.name,),
                table=spec.table,
                hotness=spec.hotness,
                length=spec.length if spec.hotness == "multi_hot" else None,
                weights=f"{spec.name}_w" if spec.weighted else None,
            )
            for spec in self.specs
        )
        return tc.Schema(label="label", dense=(tc.DenseFeature(column="x"),), features=features, tables=self.tables)

    def samples(self) -> RawBatch:
        """Return all samples, keys skewed."""
        rng = np.random.default_rng(self.data_seed)
        n = self.num_samples
        features = {}
        label = rng.integers(0, 2, n).astype(np.float32)
        dense = (rng.integers(-4, 5, n) if self.integers else rng.standard_normal(n)).astype(np.float32)[:, None]
        for spec in self.specs:
            lengths = {"one_hot": np.ones(n, int), "multi_hot": np.full(n, spec.length)}.get(
                spec.hotness, rng.integers(0, 5, n)
            )
            total = int(lengths.sum())
            keys = np.floor(self.num_keys * rng.random(total) ** 3).astype(np.int64) - 5
            offsets = None if spec.hotness == "one_hot" else np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            weights = rng.random(total).astype(np.float32) if spec.weighted else None
            features[spec.name] = FeatureKeys(keys, offsets, weights)
        return RawBatch(label, dense, features)

    def write(self, path: Path) -> Path:
        samples = self.samples()
        columns: dict[str, Any] = {"label": samples.label, "x": samples.dense[:, 0]}
        for name, feature in samples.features.items():
            columns[name] = feature.keys
            if feature.offsets is not None:
                offsets = feature.offsets.astype(np.int32)
                columns[name] = pa.ListArray.from_arrays(offsets, feature.keys)
                if feature.weights is not None:
                    columns[f"{name}_w"] = pa.ListArray.from_arrays(offsets, feature.weights)
        pq.write_table(pa.table(columns), path)
        return path

    def cut(self, folder: Path) -> tc.PassDataset:
        """Cut the samples into passes without data files: fast, for many examples."""
        batch, n = self.samples(), self.num_samples
        cuts = [batch.slice(low, min(low + self.pass_rows, n)) for low in range(0, n, self.pass_rows)]
        return write_dataset(folder, self.schema, cuts)

    def extract(self, folder: Path, *, pass_rows: int | None = None, **options: Any) -> tc.PassDataset:
        folder.mkdir(parents=True, exist_ok=True)
        data = self.write(folder / "data.parquet")
        options.setdefault("split_by", f"rows={pass_rows or self.pass_rows}")
        options.setdefault("device_budget", "1GiB")
        return tc.extract(
            data, self.schema, folder / f"passes-{options['split_by']}", batch_multiple=1, progress=False, **options
        )


class Net(nn.Module):
    def __init__(self, cache: Any, case: Case) -> None:
        super().__init__()
        self.bag = tc.EmbeddingBagCollection(cache.schema, mode={spec.name: spec.mode for spec in case.specs})
        self.top = nn.Linear(self.bag.out_features + 1, 1)

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        return self.top(torch.cat([self.bag(batch), batch.dense], dim=1)).squeeze(1)


class Kept:
    """A state that is stored and returned unchanged."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@dataclass
class Result:
    rows: dict[str, tuple[NDArray[np.int64], tuple[NDArray[np.float32], ...]]]
    dense: dict[str, torch.Tensor]


def train(
    cache: Any,
    case: Case,
    *,
    epochs: int | None = None,
    seed: int = 1,
    each_batch: Callable[[int, int], object] = lambda pass_index, batch: None,
    **more: Any,
) -> Net:
    """Train ``case`` on a cache; ``each_batch(pass_index, batch)`` is called after every batch."""
    model, optimizer = registered(cache, case, seed, **more)
    run(cache, case, model, optimizer, epochs=epochs, each_batch=each_batch)
    return model


def registered(cache: Any, case: Case, seed: int = 1, **more: Any) -> tuple[Net, torch.optim.Optimizer]:
    """Return the model of ``case``, registered with a cache together with ``more``, and the loop's optimizer."""
    torch.manual_seed(seed)
    model = Net(cache, case).to(cache.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.dense_lr, momentum=0.5)
    cache.register(model=model, optimizer=optimizer, **more)
    return model, cache.optimizer


def run(
    cache: Any,
    case: Case,
    model: Net,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int | None = None,
    each_batch: Callable[[int, int], object] = lambda p, batch: None,
) -> None:
    loss_of = nn.BCEWithLogitsLoss()
    options = {} if case.prefetch is None else {"prefetch": case.prefetch}
    for p in cache.passes(epochs=case.epochs if epochs is None else epochs):
        held = 0
        for number, batch in enumerate(p.batches(case.batch, shuffle=case.shuffle, **options)):
            loss_of(model(batch), batch.label).backward()
            held += 1
            last = p.samples_done == p.num_samples
            if held == case.accumulate or last:
                optimizer.step()
                optimizer.zero_grad()
                held = 0
                each_batch(p.index, number)


def all_keys(passes: tc.PassDataset, table: str) -> NDArray[np.int64]:
    return np.unique(np.concatenate([np.asarray(p.keys(table)) for p in passes.passes]))


def result_of(store: tc.Store, passes: tc.PassDataset, model: nn.Module | None) -> Result:
    positions = RowOffsets.of(passes, store.groups)
    cursor = store.commit.cursor.pass_index if store.commit else 0
    now = CurrentRows(store=store, positions=positions, keys_of=lambda p, t: np.empty(0, np.int64), after=cursor - 1)
    rows = {}
    for table in positions.tables:
        keys = all_keys(passes, table.name)
        rows[table.name] = keys, now.fields(table.name, keys)
    return Result(rows, {} if model is None else {k: v.clone() for k, v in model.state_dict().items()})


def result_of_resident(cache: tc.InMemoryCache, model: nn.Module) -> Result:
    rows = {}
    for table in cache.tables:
        keys = np.asarray(cache.keys(table.name))
        order = np.argsort(keys)
        rows[table.name] = keys[order], tuple(f[order].copy() for f in cache.fields(table.name))
    return Result(rows, {k: v.clone() for k, v in model.state_dict().items()})


def change_reads(patch: pytest.MonkeyPatch, change: Callable[[int, EncodedBatch], object]) -> None:
    """Apply a function to the first index and the samples of every read of a sub-dataset."""
    read = SubDataset.read

    def changed(self: SubDataset, indices: Any, *others: Any, **named: Any) -> EncodedBatch:
        samples = read(self, indices, *others, **named)
        change(int(indices[0]), samples)
        return samples

    patch.setattr(SubDataset, "read", changed)


def gone_from(index: int) -> Callable[[int, EncodedBatch], None]:
    """Return a change of reads that makes samples disappear from an index on."""

    def refuse(first: int, _: EncodedBatch) -> None:
        if first >= index:
            raise DatasetError("the samples are gone: extract the dataset again")

    return refuse


def assert_same_bits(ours: Result, theirs: Result) -> None:
    """Compare rows, optimizer state and dense weights bit for bit."""
    for mine, other, name in pairs(ours, theirs):
        np.testing.assert_array_equal(mine.view(np.uint32), other.view(np.uint32), err_msg=name)
    for name, weight in ours.dense.items():
        assert torch.equal(weight, theirs.dense[name]), name


def assert_close(ours: Result, theirs: Result) -> None:
    """Compare keys exactly, rows, optimizer state and dense weights within 1e-5."""
    for mine, other, name in pairs(ours, theirs):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5, err_msg=name)
    for name, weight in ours.dense.items():
        torch.testing.assert_close(weight.cpu(), theirs.dense[name].cpu(), rtol=1e-5, atol=1e-5)


def pairs(ours: Result, theirs: Result) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32], str]]:
    """Yield the rows and states of the same tables, which have the same keys."""
    assert ours.rows.keys() == theirs.rows.keys()
    for name, (keys, fields) in ours.rows.items():
        np.testing.assert_array_equal(keys, theirs.rows[name][0])
        for mine, other in zip(fields, theirs.rows[name][1], strict=True):
            yield mine, other, name


def open_store(path: Path, case: Case, engine: str, **options: Any) -> tc.Store:
    if engine == "memory":
        return tc.Store.open(None, tables=case.tables, engine=MemoryEngine(), **options)
    return tc.Store.open(path, tables=case.tables, engine=engine, **options)


def tiered(store: tc.Store | Path, passes: tc.PassDataset, **options: Any) -> TierCache:
    """Open a cache, with a store or a path, and with budgets that hold any small case."""
    options.setdefault("device_budget", "64MiB")
    options.setdefault("host_budget", "64MiB")
    options.setdefault("device", device_of_tests())
    options.setdefault("reorganize", False)
    return tc.TierCache(store, passes, **gathered(options))


def resident(passes: tc.PassDataset, **options: Any) -> tc.InMemoryCache:
    options.setdefault("device", device_of_tests())
    return tc.InMemoryCache(passes, **options)


def resident_result(case: Case, passes: tc.PassDataset, *, device: Any = None, **options: Any) -> Result:
    cache = resident(passes, order_seed=case.order_seed, **({} if device is None else {"device": device}))
    return result_of_resident(cache, train(cache, case, **options))


def assert_bits_of_memory(
    store: tc.Store, passes: tc.PassDataset, model: nn.Module, case: Case, *, device: Any = None
) -> None:
    assert_same_bits(result_of(store, passes, model), resident_result(case, passes, device=device))


def smallest_host_budget(store: tc.Store, passes: tc.PassDataset, **options: Any) -> int:
    """Return the host budget that the error of too small a budget requests."""
    with pytest.raises(tc.TierCacheError) as caught:
        tiered(store, passes, host_budget=1, **options)
    found = re.search(r"raise host_budget to (\d+) bytes", str(caught.value))
    assert found is not None, caught.value
    return int(found[1])


def table(
    name: str, dim: int, optimizer: Any = None, initializer: Any = None, seed: int = 7, dtype: str = "float32"
) -> tc.Table:
    optimizer = optimizer or tc.optim.Adagrad(learning_rate=0.05)
    initializer = initializer or tc.init.Uniform(low=-0.1, high=0.1)
    return tc.Table(name=name, dim=dim, optimizer=optimizer, initializer=initializer, seed=seed, dtype=dtype)
