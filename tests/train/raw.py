"""Trainings with raw keys: the samples of a dataset, as a user's own loader would give them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import tiercache as tc
from tests.train.cases import Case, Net, registered, table

LOW, HIGH = -(1 << 63), (1 << 63) - 1
PASS_KEYS = [[1, -2, 3, LOW + 2], [3, 4, HIGH, -1], [5, -6, 1, 0]]
TABLES = (
    table("a", 5, tc.optim.SGD(learning_rate=0.5)),
    table("b", 5, tc.optim.SGD(learning_rate=0.5), seed=1),
    table("c", 3, tc.optim.SGD(learning_rate=0.5), tc.init.Constant(value=0.25), dtype="float16"),
)
SCHEMA = tc.Schema(
    tables=TABLES,
    features=(
        tc.Feature(name="one", table="a"),
        tc.Feature(name="bag", table="a", hotness="ragged"),
        tc.Feature(name="pair", table="b", hotness="multi_hot", length=2),
        tc.Feature(name="c", table="c", hotness="ragged"),
    ),
)
UNIVERSE = sorted({key for keys in PASS_KEYS for key in keys} | {77, -77, LOW + 3, HIGH - 1})
Rows = dict[str, dict[int, NDArray[np.float32]]]


def own_keys(p: int) -> dict[str, Any]:
    keys, n = np.array(PASS_KEYS[p]), len(PASS_KEYS[p])
    ones = keys, np.arange(n + 1)
    return {"one": keys, "bag": ones, "pair": np.stack([keys, keys], 1), "c": ones}


def write_passes(folder: Path) -> tc.PassDataset:
    return tc.write_key_sets(folder, SCHEMA, [dict.fromkeys("abc", keys) for keys in PASS_KEYS])


def key_sets(folder: Path, samples: tc.PassDataset) -> tc.PassDataset:
    """Write only the key sets of passes, each in a different order."""
    rng = np.random.default_rng(0)
    passes = ({t.name: rng.permutation(p.keys(t.name)) for t in samples.tables} for p in samples)
    return tc.write_key_sets(folder, samples.schema, passes)


def batch_arguments(
    samples: tc.PassDataset, sub_dataset: int, first: int, size: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return keys and the other arguments of ``Pass.batch`` for some samples; as tensors if ``first`` is even."""
    source = samples.passes[sub_dataset]
    read = source.read(np.arange(first, min(first + size, source.samples)))
    keys, weights = {}, {}
    for feature in samples.schema.features:
        ids = read.ids[feature.name]
        values = source.keys(feature.table)[ids.ids]
        shape = (-1,) if feature.length is None else (-1, feature.length)
        given: Any = values.reshape(shape)
        if first % 2 == 0:
            given = torch.from_numpy(given)
        keys[feature.name] = (given, ids.offsets) if feature.hotness == "ragged" else given
        if ids.weights is not None:
            weights[feature.name] = ids.weights.reshape(shape)
    return keys, {"weights": weights, "label": read.label, "dense": read.dense}


def run_raw(
    cache: Any,
    case: Case,
    samples: tc.PassDataset,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    each_batch: Callable[[int, int], None] = lambda p, batch: None,
    each_pass: Callable[[tc.Pass], None] = lambda p: None,
    change: Callable[[int, dict[str, Any]], None] = lambda p, keys: None,
    **options: Any,
) -> None:
    """Run the loop of a case, which takes samples in order, from the pass's position."""
    loss_of = nn.BCEWithLogitsLoss()
    for p in cache.passes(epochs=case.epochs):
        each_pass(p)
        source, held = samples.passes[p.sub_dataset], 0
        for first in range(p.start_sample, source.samples, case.batch):
            keys, others = batch_arguments(samples, p.sub_dataset, first, case.batch)
            change(p.index, keys)
            batch = p.batch(keys, **others, **options)
            loss_of(model(batch), batch.label).backward()
            held += 1
            if held == case.accumulate or p.samples_done == source.samples:
                optimizer.step()
                optimizer.zero_grad()
                held = 0
                each_batch(p.index, p.batches_done - 1)


def train_raw(cache: Any, case: Case, samples: tc.PassDataset, *, seed: int = 1, **options: Any) -> Net:
    model, optimizer = registered(cache, case, seed)
    run_raw(cache, case, samples, model, optimizer, **options)
    return model
