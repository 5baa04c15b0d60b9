"""The killed training: extraction, training and reading back, as functions of a child process.

Imported by a fork server, so importing it opens nothing and runs no parallel kernel.
"""

import hashlib
import json
import random
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import nn

import tiercache as tc
import tiercache.data.extract
import tiercache.store.engines.lmdb_engine
import tiercache.train.cache
import tiercache.train.embedding
from tests.crash.ledger import Ledger
from tiercache.reporting.progress import prepare_kernels
from tiercache.train.cache import TierCache

DATA, PASSES, STORE, RESULT, ERROR = "data.parquet", "passes", "model.tc", "result.json", "error.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A training to be killed; equal values end with equal bits."""

    name: str
    optimizer: Any  # the row optimizer of the larger table
    host_budget: str  # barely more than the plan needs, so that most rows are read from the store
    commit_every: int = 1
    order_seed: int | None = None
    num_samples: int = 24_576
    pass_samples: int = 4096
    num_keys: int = 60_000
    batch: int = 512
    epochs: int = 3
    inside: float = 0.03
    """The probability of a commit inside the pass after each batch; differs between processes, and changes no bit."""

    @property
    def schema(self) -> tc.Schema:
        """Two tables of two row layouts: one shared by two features, one of bfloat16 looked up by lists."""
        rowwise, normal = tc.optim.RowWiseAdagrad(learning_rate=0.05), tc.init.Normal(mean=0.0, std=0.1)
        item = tc.Table(name="item", dim=32, optimizer=self.optimizer, initializer=tc.init.Uniform(low=-0.1, high=0.1))
        user = tc.Table(name="user", dim=16, optimizer=rowwise, initializer=normal, dtype="bfloat16")
        features = (
            tc.Feature(name="item", columns=("item",), table="item"),
            tc.Feature(name="last", columns=("last",), table="item"),
            tc.Feature(name="user", columns=("user",), table="user"),
            tc.Feature(name="seen", columns=("seen",), table="user", hotness="ragged"),
        )
        return tc.Schema(label="label", dense=(tc.DenseFeature(column="x"),), features=features, tables=(item, user))

    def write_data(self, folder: Path) -> None:
        """Write the samples, with skewed keys, so that some rows are in every pass and most in one or two."""
        rng, n = np.random.default_rng(11), self.num_samples

        def keys(size: int) -> NDArray[np.int64]:
            return np.floor(self.num_keys * rng.random(size) ** 2).astype(np.int64)

        offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, n))]).astype(np.int32)
        columns = {
            "label": rng.integers(0, 2, n).astype(np.float32),
            "x": rng.standard_normal(n).astype(np.float32),
            "item": keys(n),
            "last": keys(n),
            "user": keys(n),
            "seen": pa.ListArray.from_arrays(offsets, keys(int(offsets[-1]))),
        }
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), folder / DATA, row_group_size=4096)


TRAININGS = (
    Training(name="Adagrad, a commit each pass", optimizer=tc.optim.Adagrad(learning_rate=0.05), host_budget="9MiB"),
    Training(name="Adam, a commit each third pass", optimizer=tc.optim.Adam(), host_budget="12MiB", commit_every=3),
    Training(
        name="SGD, a new order each epoch", optimizer=tc.optim.SGD(learning_rate=0.1), host_budget="9MiB", order_seed=5
    ),
)


class Net(nn.Module):
    """Bags, a dense input, dropout (so that a lost generator shows) and two layers."""

    def __init__(self, cache: TierCache) -> None:
        super().__init__()
        self.bag = tc.EmbeddingBagCollection(cache.schema, mode={"seen": "mean"})
        self.top = nn.Sequential(nn.Linear(self.bag.out_features + 1, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        logits: torch.Tensor = self.top(torch.cat([self.bag(batch), batch.dense], dim=1))
        return logits.squeeze(1)


class WatchedStore(tc.Store):
    """A store that records its writer's work in a ledger. Created by ``watched``."""

    ledger: Ledger

    def append(self, *arguments: Any, **options: Any) -> Any:
        with self.ledger.writing("dump"):
            return super().append(*arguments, **options)

    def publish(self, *arguments: Any, **options: Any) -> Any:
        self.ledger.begin_commit(0 if self.commit is None else self.commit.id + 1)
        with self.ledger.writing("publish"):
            commit = super().publish(*arguments, **options)
            self.ledger.finish_commit(commit.id)
        return commit


def prepare() -> None:
    """Run as a child process that compiles kernels, so that they do not affect the timing of trainings."""
    prepare_kernels(TRAININGS[0].schema.tables)


def run(training: Training, data: Path, folder: Path, ledger_path: Path, process: int) -> None:
    """Run as the child process: train, and leave the traceback of an error in the folder."""
    try:
        train(training, data, folder, Ledger(ledger_path), process)
    except BaseException:
        (folder / ERROR).write_text(traceback.format_exc())
        raise


def train(training: Training, data: Path, folder: Path, ledger: Ledger, process: int) -> None:
    """Extract, train to the end and write digests of the result, resuming after the previous kill."""
    ledger.enter("extraction")
    torch.set_num_threads(1)
    passes = tc.extract(
        data / DATA, training.schema, folder / PASSES,
        device_budget="1GiB", split_by=f"rows={training.pass_samples}", batch_multiple=512, progress=False,
    )  # fmt: skip
    ledger.enter("opening")
    chance = random.Random(process)  # not a generator that commits save
    with _open(training, folder, ledger) as store, _cache(training, store, passes) as cache:
        torch.manual_seed(1)
        model, _, scheduler = _tracked(cache)
        loss_of = nn.BCEWithLogitsLoss()
        for p in cache.passes(epochs=training.epochs):
            ledger.enter("training")
            for batch in p.batches(training.batch, shuffle=True):
                loss_of(model(batch), batch.label).backward()
                cache.optimizer.step()
                cache.optimizer.zero_grad()
                if chance.random() < training.inside and p.samples_done < p.num_samples:
                    ledger.enter("commit inside")
                    cache.commit()
                    ledger.enter("training")
            scheduler.step()
            for table in cache.optimizer.rows.param_groups:
                if table["table"] == "user":
                    table["lr"] = 0.05 / (1 + p.index)
            ledger.enter("switch" if p.index + 1 < training.epochs * len(passes) else "end")
    ledger.enter("end")
    result = read_back(training, folder)
    (folder / RESULT).write_text(json.dumps(result))


def read_back(training: Training, folder: Path) -> dict[str, Any]:
    """Open the store again and return digests of every row, optimizer state, dense state and generator."""
    passes = tc.PassDataset.open(folder / PASSES)
    with tc.Store.open(folder / STORE) as store, _cache(training, store, passes) as cache:
        model, optimizer, _ = _tracked(cache)
        for _ in cache.passes(epochs=training.epochs):
            raise AssertionError("the training has not ended")
        found: dict[str, Any] = {"passes": passes.digest, "steps": cache.optimizer.rows.steps, "rows": 0}
        live_rows = cache.live_rows()
        for table in passes.tables:
            keys = np.unique(np.concatenate([p.keys(table.name) for p in passes]))
            found["rows"] += keys.size
            for field, values in zip(table.fields, live_rows.fields(table.name, keys), strict=True):
                found[f"{table.name} {field.name}"] = _digest(values)
        for name, value in model.state_dict().items():
            found[name] = _digest(value.numpy())
        for place, state in optimizer.state_dict()["state"].items():
            found[f"momentum {place}"] = _digest(state["momentum_buffer"].numpy())
        found["generator"] = _digest(torch.get_rng_state().numpy())
        found["learning rates"] = [*cache.optimizer.rows.learning_rates, optimizer.param_groups[0]["lr"]]
        return found


def _digest(values: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:32]


def _open(training: Training, folder: Path, ledger: Ledger) -> WatchedStore:
    store = WatchedStore.open(folder / STORE, tables=training.schema.tables)
    assert isinstance(store, WatchedStore)
    store.ledger = ledger
    return store


def _cache(training: Training, store: tc.Store, passes: tc.PassDataset) -> TierCache:
    return tc.TierCache(
        store, passes, device_budget="64MiB", host_budget=training.host_budget, eval_budget="256KiB",
        commit_every=training.commit_every, order_seed=training.order_seed,
    )  # fmt: skip


def _tracked(cache: TierCache) -> tuple[Net, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = Net(cache)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.9)
    cache.register(model=model, optimizer=optimizer, scheduler=scheduler)
    return model, optimizer, scheduler
