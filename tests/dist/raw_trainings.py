"""Trainings by raw keys that run on every rank or in one process: the same loop over the same samples."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import tiercache as tc
from tests.cache_options import gathered
from tests.dist import trainings
from tests.dist.trainings import BAGS, OPTIONS, dense_of, model_of, step
from tests.train.cases import Net
from tests.train.devices import shim
from tests.train.raw import batch_arguments
from tiercache.dist.communicator import AnyCommunicator
from tiercache.errors import KeyNotInPassError, RankError

CASE = replace(BAGS, num_samples=81, pass_rows=40, batch=14, shuffle=False)
"""Passes of 40, 40 and 1 samples, in batches of 14, 14 and 12; in the last pass only one rank has a sample."""
Arguments = tuple[dict[str, Any], dict[str, Any]]


def dealt(arguments: Arguments, low: int, high: int) -> Arguments:
    """Return samples [low, high) of a batch as a loader would give them."""
    keys, others = arguments
    found: dict[str, Any] = {}
    weights = dict(others["weights"])
    for name, given in keys.items():
        if isinstance(given, tuple):
            values, offsets = given
            entries = slice(int(offsets[low]), int(offsets[high]))
            found[name] = values[entries], offsets[low : high + 1] - offsets[low]
            if name in weights:
                weights[name] = weights[name][entries]
        else:
            found[name] = given[low:high]
    return found, {"weights": weights, "label": others["label"][low:high], "dense": others["dense"][low:high]}


def cut(number: int, size: int, num_ranks: int, deal: str) -> list[int]:
    """Return the start of each rank's samples in a batch, and the end."""
    if deal == "even":
        return [rank * size // num_ranks for rank in range(num_ranks + 1)]
    if deal == "ended":  # rank 0 has all but the others' samples of the first two batches
        return cut(number, size, num_ranks, "even") if number < 2 else [0, *[size] * num_ranks]
    random = np.random.default_rng([number, size, num_ranks])
    inner = np.sort(random.choice([0, 0, size // 3, size - 1, size], num_ranks - 1))
    return [0, *inner.tolist(), size]


def foreign(arguments: Arguments) -> Arguments:
    """Replace every fifth key: by one of other passes, or by an unknown one."""
    keys, others = arguments
    for name, given in keys.items():
        values = np.array(given[0] if isinstance(given, tuple) else given)
        flat = values.reshape(-1)
        flat[::5] = flat[::5] % 97 + np.where(np.arange(flat[::5].size) % 2, 0, 10_000)
        keys[name] = (values, given[1]) if isinstance(given, tuple) else values
    return keys, others


def reweighed(arguments: Arguments, number: int) -> Arguments:
    """Weight an unweighted feature, and in every other batch leave the weighted one unweighted."""
    keys, others = arguments
    weights = dict(others["weights"]) if number % 2 else {}
    weights["tag"] = np.arange(np.asarray(keys["tag"][0]).size, dtype=np.float32) % 3 - 0.5
    return keys, others | {"weights": weights}


def batches_of(samples: tc.PassDataset, sub_dataset: int, start: int, size: int) -> Iterator[Arguments]:
    """Yield the global batches of a pass."""
    for first in range(start, samples.passes[sub_dataset].samples, size):
        keys, others = batch_arguments(samples, sub_dataset, first, size)
        yield (
            {name: tuple(map(np.asarray, k)) if isinstance(k, tuple) else np.asarray(k) for name, k in keys.items()},
            others,
        )


def run(
    cache: Any,
    samples: tc.PassDataset,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rank: int = 0,
    size: int = 1,
    deal: str = "even",
    missing: str = "error",
    stop: list[int] | None = None,
    evaluates: bool = False,
    reweighs: bool = False,
) -> dict[str, Any]:
    """Train on the samples of one rank; until a commit after batch ``stop``, (pass, batch), if given."""
    evaluated, most = [], 0
    single = tc.EmbeddingCollection(cache.schema, ["user", "item"]) if evaluates else None
    if single is not None:
        cache.register(single=single)
    for p in cache.passes(epochs=CASE.epochs):
        every = batches_of(samples, p.sub_dataset, p.start_sample, CASE.batch)
        for number, arguments in enumerate(every, p.start_batch):
            given = arguments if missing == "error" else foreign(arguments)
            given = reweighed(given, number) if reweighs else given
            num_samples = len(given[1]["label"])
            bounds = cut(number, num_samples, size, deal)
            keys, others = dealt(given, *bounds[rank : rank + 2])
            gone = deal == "ended" and rank > 0 and number >= 2
            batch = p.batch(None) if gone else p.batch(keys, **others, missing=missing)
            most = max(most, cache._raw.reader.index_bytes)
            assert batch is not None
            assert len(batch) == max(bounds[rank + 1] - bounds[rank], 1)
            assert batch.weight == size * ((bounds[rank + 1] - bounds[rank]) / num_samples)
            step([batch], model, optimizer)
            if stop == [p.index, number]:
                cache.commit()
                return {}
        if deal == "ended":
            assert p.batch(None) is None
        if single is not None:
            bounds = cut(1, num_samples, size, "uneven")
            keys, others = dealt(foreign(given), *bounds[rank : rank + 2])
            batch = cache.evaluate_batch(keys, **others)
            evaluated.append({name: found.detach().numpy() for name, found in single(batch).items()})
    return dense_of(model) | {"evaluated": evaluated, "index_bytes": most}


def train(ranks: AnyCommunicator, folder: str, *, on_shim: bool = False, **options: Any) -> dict[str, Any]:
    """Train a sharded store by raw keys of this rank's samples; with the CUDA kernels on the shim if ``on_shim``."""
    how = {name: options.pop(name) for name in ("deal", "missing", "stop", "evaluates", "reweighs") if name in options}
    place = Path(folder)
    samples, keys = tc.PassDataset.open(place / "passes"), tc.PassDataset.open(place / "keys")
    options |= {"device": shim()} if on_shim else {}
    with tc.TierCache(place / "raw.tc", keys, **gathered(OPTIONS | options)) as cache:
        model, optimizer = model_of(cache, CASE)
        found = run(cache, samples, model, optimizer, rank=ranks.rank, size=ranks.size, **how)
        assert cache.device_bytes <= 4 << 20
        launches = sorted(set(options["device"]._runtime.kernels.launches)) if on_shim else []
        return found | {"room": cache._rows.device.num_bytes, "launches": launches}


def missing_on_one_rank(ranks: AnyCommunicator, folder: str) -> list[Any]:
    """Give rank 1 a key that the pass lacks; then continue on all ranks with another batch."""
    samples, keys = (tc.PassDataset.open(Path(folder) / name) for name in ("passes", "keys"))
    with tc.TierCache(Path(folder) / "raw.tc", keys, **OPTIONS) as cache:
        model = Net(cache, CASE)
        cache.register(model=model)
        passes = cache.passes(epochs=1)
        p = next(passes)
        for number, arguments in enumerate(batches_of(samples, 0, 0, CASE.batch)):
            mine, others = dealt(arguments, 0, 3)
            batch = p.batch(mine, **others)
            model(batch).sum().backward()
            cache.optimizer.step()
            if number == 1:
                break
        error = None
        if ranks.rank == 1:
            mine["item"] = np.full((3, 3), 77_777)
        try:
            p.batch(mine, **others)
        except (KeyNotInPassError, RankError) as raised:
            error = [type(raised).__name__, str(raised), getattr(raised, "key", None), getattr(raised, "batch", None)]
        done = p.batches_done, p.samples_done
        mine, others = dealt(arguments, 0, 2)
        p.batch(mine, **others)
        return [error, *done, p.batches_done]


def misuse(ranks: AnyCommunicator, folder: str, *, what: str) -> None:
    """Have rank 1 leave the batches of a pass before rank 0 does, or misuse them in another way."""
    samples, keys = (tc.PassDataset.open(Path(folder) / name) for name in ("passes", "keys"))
    with tc.TierCache(Path(folder) / "raw.tc", keys, **OPTIONS) as cache:
        model, last = Net(cache, CASE), ranks.rank == 1
        cache.register(model=model)
        for p in cache.passes(epochs=1):
            for number, arguments in enumerate(batches_of(samples, p.sub_dataset, 0, CASE.batch)):
                mine, others = dealt(arguments, 0, 3)
                if last and number == 1:
                    if what == "evaluates":
                        cache.evaluate_batch(mine)
                    if what == "leaves":
                        raise OSError("no such file: the loader's of rank 1")
                    if what == "shapes":
                        others["label"] = [1.0]
                model(p.batch(mine, **others)).sum().backward()
                cache.optimizer.step()


def nothing_at_all(ranks: AnyCommunicator, folder: str) -> list[Any]:
    """Make batches without samples on any rank."""
    keys = tc.PassDataset.open(Path(folder) / "keys")
    with tc.TierCache(Path(folder) / "raw.tc", keys, **OPTIONS) as cache:
        model = Net(cache, CASE)
        cache.register(model=model)
        passes = cache.passes(epochs=1)
        p = next(passes)
        none = {"user": [], "friend": ([], [0]), "item": np.empty((0, 3), int), "word": ([], [0]),
                "title": np.empty((0, 3), int), "tag": ([], [0])}  # fmt: skip
        made = [
            p.batch(none, dense=np.empty((0, 1))),
            p.batch(none if ranks.rank else None, dense=np.empty((0, 1))),
        ]
        found = [[len(one), one.weight, list(model.bag(one).shape)] for one in made]
        out = cache.evaluate_batch(none if ranks.rank else None, dense=np.empty((0, 1)))
        assert out.dense.shape == (0, 1)
        return [*found, len(out), p.batches_done, p.samples_done, p.batch(None) is None, p.batches_done,
                cache.evaluate_batch(None) is None]  # fmt: skip


def train_samples(ranks: AnyCommunicator, folder: str, **options: Any) -> dict[str, Any]:
    """Train the same samples from their passes."""
    trainings.CASES["raw"] = CASE
    return {
        name: value
        for name, value in trainings.train(ranks, "raw", folder, **options).items()
        if name.startswith("dense.")
    }


def evaluate_unknown(
    ranks: AnyCommunicator, folder: str, *, asked: list[int], dataset: str = "passes"
) -> dict[str, Any]:
    """Train passes that have the out-of-vocabulary row; then look up unknown keys, as many as the rank's number."""
    passes = tc.PassDataset.open(Path(folder) / dataset)
    with tc.TierCache(Path(folder) / "model.tc", passes, sharding={"a": "row_wise"}, **OPTIONS) as cache:
        rows = tc.EmbeddingCollection(cache.schema)
        cache.register(rows=rows)
        for p in cache.passes(epochs=1):
            for batch in p.batches(4):
                (rows(batch)["a"].sum() * batch.weight).backward()
                cache.optimizer.step()
        keys = asked[: ranks.rank + 1]
        return {"found": rows(cache.evaluate_batch({"a": keys}))["a"].detach().numpy()}
