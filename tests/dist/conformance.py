"""One entry of the conformance list: tables, features and sharding; its training on ranks and in one process."""

import gc
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tiercache as tc
from tests.cache_options import gathered
from tests.datasets import write_dataset
from tests.train.cases import Case, Spec
from tiercache.data.raw_batch import OOV_KEY, FeatureKeys, RawBatch
from tiercache.dist.communicator import AnyCommunicator
from tiercache.planning.sharding_planner import sliced
from tiercache.store.sharding import ShardingPlan, Slice, TableSharding

WAYS = ("row_wise", "data_parallel", "column_wise", "table_wise")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A whole small training on several ranks."""

    tables: tuple[tc.Table, ...]
    rows: tuple[int, ...]
    """Number of keys of each table."""
    specs: tuple[Spec, ...]
    sharding: Callable[[Any, int], ShardingPlan | str]
    """Returns the sharding of an entry's tables for a number of ranks."""
    num_samples: int = 67
    pass_samples: int = 35
    batch: int = 16
    """Five steps; the third is of 3 samples, so one of 4 ranks has none."""
    epochs: int = 1
    longest: int = 4
    empty: float = 0.0
    """The share of ragged lists that are empty, in addition to lists of random length 0."""
    unknown: float = 0.0
    """The share of keys that are the out-of-vocabulary row's."""
    seed: int = 0
    shuffle: bool = True
    accumulate: int = 1
    singles: tuple[str, ...] = ()
    """Features that are looked up unpooled."""
    read_by: str = "rank"
    """The samples that each rank reads, as for ``Pass.batches``. Weights have no factors if it is "owner"."""
    idle: tuple[str, ...] = ()
    """Features that are looked up without a gradient: their rows are not stepped."""
    twice: bool = False
    """True if two modules look up the same features."""
    by_rows: bool = False
    """True if modules announce weights for all features, so that no owner pools them."""
    exact: bool = False
    """True if the loss makes gradients whole numbers, so that no sum is rounded."""
    rates: Mapping[int, tuple[float, tuple[str, ...] | None]] = field(default_factory=dict)
    """By step: the new learning rate, and its tables."""
    discarded: tuple[int, ...] = ()
    """Steps whose gradients are dropped."""
    commits: bool = False
    """True if there is a commit after every step."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the cache. A host_budget of "smallest" is the least that suffices on all ranks."""

    @property
    def schema(self) -> tc.Schema:
        return Case(tables=self.tables, specs=self.specs).schema

    def cut(self, folder: Path, *, times: int = 1, seed: int | None = None) -> tc.PassDataset:
        """Make the samples and cut them into passes. Tables have ``times`` as many keys."""
        rng, n = np.random.default_rng(self.seed if seed is None else seed), self.num_samples
        rows = {one.name: count * times for one, count in zip(self.tables, self.rows, strict=True)}
        features = {}
        for spec in self.specs:
            lengths = {"one_hot": np.ones(n, int), "multi_hot": np.full(n, spec.length)}.get(spec.hotness)
            if lengths is None:
                lengths = rng.integers(0, self.longest + 1, n) * (rng.random(n) >= self.empty)
            total = int(lengths.sum())
            keys = keys_of(np.floor(rows[spec.table] * rng.random(total) ** 2).astype(np.int64))
            keys[rng.random(total) < self.unknown] = OOV_KEY
            weights = rng.random(total).astype(np.float32) + np.float32(0.5) if spec.weighted else None
            offsets = None if spec.hotness == "one_hot" else np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            features[spec.name] = FeatureKeys(keys, offsets, weights)
        label = rng.integers(0, 2, n).astype(np.float32)
        dense = (rng.integers(-4, 5, n) if self.exact else rng.standard_normal(n)).astype(np.float32)[:, None]
        batch = RawBatch(label, dense, features)
        cuts = [batch.slice(low, min(low + self.pass_samples, n)) for low in range(0, n, self.pass_samples)]
        return write_dataset(folder, self.schema, cuts)


def keys_of(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return keys from all over int64; the same in every table."""
    return (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def in_turn(*ways: str) -> Callable[[Entry, int], ShardingPlan]:
    """Return a placer of tables by these kinds in turn; several slices are uneven where they can be."""

    def planned(entry: Entry, size: int) -> ShardingPlan:
        tables = {}
        for i, one in enumerate(entry.tables):
            way = ways[i % len(ways)]
            if way == "table_wise" or (way == "column_wise" and min(size, one.dim) == 1):
                tables[one.name] = TableSharding("table_wise", (Slice((i + 1) % size, 0, one.dim),))
            elif way == "column_wise":
                tables[one.name] = sliced(one.dim, [(i + k) % size for k in range(min(size, one.dim))])
            else:
                tables[one.name] = TableSharding(way)  # type: ignore[arg-type]
        return ShardingPlan(size, tables)

    return planned


class Model(nn.Module):
    """Bags and single vectors, weights with a learned factor each, one dense input, one linear layer."""

    def __init__(self, cache: Any, entry: Entry) -> None:
        super().__init__()
        pooled = [spec for spec in entry.specs if spec.name not in {*entry.singles, *entry.idle}]
        modes = {spec.name: spec.mode for spec in pooled}
        self.weighted = [spec.name for spec in pooled if spec.weighted and entry.read_by == "rank"]
        self.bags = nn.ModuleList(
            tc.EmbeddingBagCollection(
                cache.schema, list(modes), mode=modes, weighted=list(modes) if entry.by_rows else self.weighted
            )
            for _ in range(1 + entry.twice)
        )
        self.single = tc.EmbeddingCollection(cache.schema, list(entry.singles))
        self.idle = tc.EmbeddingBagCollection(cache.schema, list(entry.idle)) if entry.idle else None
        self.factors = nn.Parameter(torch.linspace(0.5, 1.5, len(self.weighted))) if self.weighted else None
        self.top = nn.Linear(self.bags[0].out_features + 1, 1)
        self.exact = entry.exact
        self.looked_up: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        self.weights = [torch.from_numpy(np.array(batch.ids[name].weights)) for name in self.weighted]
        given = {}
        for i, (name, weight) in enumerate(zip(self.weighted, self.weights, strict=True)):
            assert self.factors is not None
            given[name] = weight.requires_grad_() * self.factors[i]
        outs = [bag(batch, given) for bag in self.bags]
        singles, idle = self.single(batch), [] if self.idle is None else [self.idle(batch)]
        self.looked_up = [out.detach().clone() for out in (*outs, *singles.values(), *idle)]
        out = outs[0] if len(outs) == 1 else outs[0] + torch.tanh(outs[1])
        each = self.loss(out, self.top(torch.cat([out, batch.dense], dim=1)).squeeze(1), batch)
        for name, vectors in singles.items():
            of_ids = torch.sin(vectors.reshape(-1, vectors.shape[-1])).sum(dim=1)
            ends = batch.ids[name].offsets
            per_sample = of_ids.numel() // max(1, len(batch))
            lengths = torch.full((len(batch),), per_sample) if ends is None else torch.from_numpy(np.diff(ends))
            each = each.index_add(0, torch.arange(len(batch)).repeat_interleave(lengths), of_ids)
        return each.mean()

    def loss(self, out: torch.Tensor, logits: torch.Tensor, batch: tc.Batch) -> torch.Tensor:
        if self.exact:
            signs = (2 * batch.label - 1)[:, None] * batch.dense
            return (out * signs).sum(dim=1) + 0 * logits
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.label, reduction="none")


def tracked(cache: Any, entry: Entry, size: int) -> tuple[Model, nn.Module, torch.optim.Optimizer]:
    """Return the model of an entry, the callable and its optimizer: registered, with the same initial weights."""
    torch.manual_seed(1)
    model = Model(cache, entry)
    some_idle = bool(entry.idle)  # an output without a loss has no gradient, as in torch
    trained = DistributedDataParallel(model, find_unused_parameters=some_idle) if size > 1 else model
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.5)
    cache.register(model=model, optimizer=optimizer)
    optimizer = cache.optimizer
    return model, trained, optimizer


def run(
    cache: Any,
    entry: Entry,
    size: int = 1,
    *,
    each_step: Callable[[int], None] = lambda step: None,
    ready: tuple[Model, nn.Module, torch.optim.Optimizer] | None = None,
) -> dict[str, Any]:
    """Train an entry, with the result of ``tracked`` if that was called before.

    Returns by batch the looked-up vectors and the gradients of weights, and the dense weights.
    """
    model, trained, optimizer = ready or tracked(cache, entry, size)
    step, outputs, weights, pooled = 0, [], [], set[str]()
    for p in cache.passes(epochs=entry.epochs):
        held = 0
        for batch in p.batches(entry.batch, shuffle=entry.shuffle, read_by=entry.read_by):
            (trained(batch) * batch.weight).backward()
            counted = bool(batch.weight)
            pooled |= {*batch.pooled}
            outputs.append([one.numpy()[: None if counted else 0].copy() for one in model.looked_up])
            weights.append([one.grad.numpy()[: None if counted else 0] / size for one in model.weights])
            held += 1
            if held < entry.accumulate and p.samples_done < p.num_samples:
                continue
            if step in entry.rates:
                rate, tables = entry.rates[step]
                for table in cache.optimizer.rows.param_groups:
                    table["lr"] = rate if tables is None or table["table"] in tables else table["lr"]
            if step in entry.discarded:
                cache.optimizer.zero_grad()
            else:
                optimizer.step()
            optimizer.zero_grad()
            step, held = step + 1, 0
            if entry.commits and isinstance(cache, tc.TierCache):
                cache.commit()
            each_step(step)
    found = {f"dense.{name}": value.numpy().copy() for name, value in model.state_dict().items()}
    return found | {"outputs": outputs, "weights": weights, "pooled": sorted(pooled)}


def known(name: str | dict[str, Any]) -> Entry:
    """Return an entry of the list by its name, or the random one of a record."""
    from tests.dist.conformance_list import ENTRIES, random_entry

    return ENTRIES[name] if isinstance(name, str) else random_entry(name)


def open_cache(ranks: AnyCommunicator, entry: Entry, folder: str, **given: Any) -> tc.TierCache:
    """Open the sharded store of an entry, with the smallest host budget if it needs that."""
    options: dict[str, Any] = {"device_budget": "4MiB", "host_budget": "32MiB", **entry.options, **given}
    options["sharding"] = entry.sharding(entry, ranks.size)
    passes, path = tc.PassDataset.open(Path(folder) / "passes"), Path(folder) / "model.tc"
    if options["host_budget"] == "smallest":
        try:
            tc.TierCache(path, passes, **gathered(options | {"host_budget": 1}))
        except tc.TierCacheError as error:
            found = re.search(r"raise host_budget to (\d+) bytes", str(error))
            options["host_budget"] = max(ranks.all_gather_object(int(found[1]) if found else 0))
    return tc.TierCache(path, passes, **gathered(options))


def train(
    ranks: AnyCommunicator, name: str | dict[str, Any], folder: str, *, until: int | None = None, **given: Any
) -> dict[str, Any]:
    """Train an entry on every rank, up to the end of its last epoch or of epoch ``until``."""
    entry = known(name)
    entry = entry if until is None else replace(entry, epochs=until)
    with open_cache(ranks, entry, folder, **given) as cache:
        found = run(cache, entry, ranks.size)
        found["read"] = sum(report.rows_read for report in cache.reports)
        found["part_groups"] = len(cache.store.groups)
        found["bytes"], found["mirror_bytes"] = cache.bytes_sent, cache._exchange.device_bytes
        found["fits"] = all(report.planned_equals_measured for report in cache.reports)
    return found


def evaluate(ranks: AnyCommunicator, name: str, folder: str, *, at: list[int], schedule: str) -> dict[str, Any]:
    """Train an entry and look up the evaluation set after some steps; return the vectors by step and batch."""
    entry, found = known(name), {}
    tests = tc.PassDataset.open(Path(folder) / "tests")
    with open_cache(ranks, entry, folder) as cache:

        def look(step: int) -> None:
            if step in at:
                found[str(step)] = looked_up(cache, entry, tests, schedule=schedule)

        run(cache, entry, ranks.size, each_step=look)
        if -1 in at:
            found["-1"] = looked_up(cache, entry, tests, schedule=schedule)
    return found


def looked_up(cache: Any, entry: Entry, tests: tc.PassDataset, **options: Any) -> dict[str, Any]:
    """Return the vectors of an evaluation by batch, for this rank's samples, and the number of slices."""
    bag = tc.EmbeddingBagCollection(cache.schema, mode={spec.name: spec.mode for spec in entry.specs})
    slices, found = 0, []
    for piece in cache.evaluate(tests):
        slices += 1
        for batch in piece.batches(7, **options):
            with torch.no_grad():
                found.append(bag(batch).numpy()[: None if batch.weight else 0].copy())
    return {"slices": slices, "vectors": found}


def ask_wrongly(ranks: AnyCommunicator, name: str, folder: str, *, bad_rank: int, number: int) -> dict[str, Any]:
    """Have one rank look up a local id that its pass does not have, then train as usual."""
    entry = known(name)
    with open_cache(ranks, entry, folder) as cache:
        ready = tracked(cache, entry, ranks.size)
        passes = cache.passes(epochs=1)
        p = next(passes)
        read = p.source.read

        def wrong(places: Any, **options: Any) -> Any:
            samples = read(places, **options)
            ids = replace(samples.ids["f0"], ids=np.full_like(samples.ids["f0"].ids, number))
            return replace(samples, ids={**samples.ids, "f0": ids})

        if ranks.rank == bad_rank:
            p.source.read = wrong  # type: ignore[method-assign]
        said = ["", ""]
        try:
            bag = tc.EmbeddingBagCollection(cache.schema).requires_grad_(False)
            bag(next(p.batches(entry.batch)))  # with one rank the lookup raises
        except (IndexError, tc.TierCacheError) as error:
            said = [type(error).__name__, str(error)]
        p.source.read = read  # type: ignore[method-assign]
        return run(cache, entry, ranks.size, ready=ready) | {"said": said}


def leave_a_loop(ranks: AnyCommunicator, name: str, folder: str) -> list[str]:
    """Close a cache within a loop over its passes; return the warnings when the loop is collected."""
    found: list[str] = []
    before, sys.unraisablehook = sys.unraisablehook, lambda unraisable: found.append(str(unraisable.exc_value))
    try:
        with open_cache(ranks, known(name), folder) as cache:
            passes = cache.passes(epochs=1)
            next(passes)
        del passes
        gc.collect()
    finally:
        sys.unraisablehook = before
    return found
