"""A small training whose rows are exchanged, with all rows in memory, and the same training in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import tiercache as tc
from tests.training.cases import Case, Spec, table
from tests.training.devices import shim
from tiercache.ranks.exchange import RowExchange
from tiercache.ranks.placement import Placement, Slice, TablePlacement
from tiercache.ranks.pooling import Pooling
from tiercache.ranks.shares import Share
from tiercache.store.table import group_tables
from tiercache.tiers.rows import RowView
from tiercache.training.batch import Batch
from tiercache.training.embedding import EmbeddingBagCollection, EmbeddingCollection
from tiercache.training.row_optimizer import RowGradients

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.passes.samples import FeatureIds, Samples

SPECS = (
    Spec(name="one", table="adagrad"),
    Spec(name="fixed", table="adagrad", hotness="fixed", mode="mean"),
    Spec(name="ragged", table="adam", hotness="ragged", weighted=True),
    Spec(name="mean", table="adam", hotness="ragged", mode="mean"),
    Spec(name="max", table="rowwise", hotness="ragged", mode="max"),
    Spec(name="wide", table="rowwise", hotness="ragged"),
    Spec(name="plain", table="sgd", hotness="fixed"),
)
MIXED = Case(
    tables=(
        table("adagrad", 8, tc.Adagrad(learning_rate=0.05, decay=0.01)),
        table("adam", 8, tc.Adam(learning_rate=0.05, decay=0.01)),
        table("rowwise", 15, tc.RowWiseAdagrad(learning_rate=0.05, decay=0.01)),
        table("sgd", 5, tc.SGD(learning_rate=0.5, decay=0.01)),
    ),
    specs=SPECS,
    num_samples=150,
    pass_rows=75,
)
"""Every optimizer and every kind of feature; the last batch of a pass is short."""
ONE_GROUP = Case(
    tables=tuple(table(name, 16, tc.SGD(learning_rate=0.25), tc.Constant(value=0.5)) for name in "abc"),
    specs=(
        Spec(name="f", table="a"),
        Spec(name="g", table="b", hotness="ragged"),
        Spec(name="h", table="a"),
        Spec(name="i", table="c", hotness="fixed"),
    ),
    num_samples=128,
    pass_rows=64,
    integers=True,
)
"""One group, whose rows and gradients are all multiples of 2^-12: sums have the same bits in any order."""
NARROW = replace(
    MIXED,
    tables=tuple(
        replace(one, optimizer=tc.SGD(learning_rate=0.0), dtype=dtype)
        for one, dtype in zip(MIXED.tables, ("bfloat16", "float16", "bfloat16", "float16"), strict=True)
    ),
)
"""Rows of 16 bits, which stay as they are: how they are rounded depends on the last bit of a gradient."""
CASES = {"mixed": MIXED, "one group": ONE_GROUP, "narrow": NARROW}


def placement_of(kind: str, case: Case, size: int) -> Placement:
    """Place all tables in one way, or ("all") each in another."""
    tables = {}
    for i, one in enumerate(case.tables):
        way = ("row", "replicate", "column", "table")[i % 4] if kind == "all" else kind
        if way == "column" and size == 1:
            way = "row"
        if way == "table":
            tables[one.name] = TablePlacement("table", (Slice((i + 1) % size, 0, one.dim),))
        elif way == "column":
            bounds = [one.dim * k // min(size, 3) for k in range(min(size, 3) + 1)]
            slices = tuple(Slice((i + k) % size, bounds[k], bounds[k + 1]) for k in range(len(bounds) - 1))
            tables[one.name] = TablePlacement("column", slices)
        else:
            tables[one.name] = TablePlacement(way)
    return Placement(size, tables)


@dataclass(frozen=True)
class Options:
    """How a training goes, as JSON values."""

    batch: int = 16
    accumulate: int = 1
    only: tuple[str, ...] = ()
    """The features whose output takes part in the loss; all where empty."""
    wire_dtype: str = "float32"
    epochs: int = 1
    single: bool = False
    """Whether vectors are looked up unpooled, too."""
    mirrored: bool = True
    shim: bool = False
    """Whether the rows are a GPU's, whose kernels run on the shim."""
    pooled: bool = False
    """Whether owners pool features where that is fewer bytes; weights are the data's then."""


class Model:
    """Bags and single vectors with a fixed linear loss: nothing dense to average."""

    def __init__(self, case: Case, options: Options, groups: Any) -> None:
        self.schema, self.groups = case.schema, groups
        specs = [spec for spec in case.specs if not options.only or spec.name in options.only]
        modes, fixed = {s.name: s.mode for s in specs}, [s.name for s in specs if s.hotness == "fixed"]
        self._bag = EmbeddingBagCollection(self.schema, list(modes), mode=modes)
        self._single = EmbeddingCollection(self.schema, fixed) if options.single else None
        self._integers = case.integers
        self._weighted = [spec.name for spec in specs if spec.weighted and not options.pooled]

    def loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean loss, the pooled output and the weights, whose gradients are wanted."""
        weights = {
            name: torch.from_numpy(np.array(batch.ids[name].weights)).requires_grad_() for name in self._weighted
        }
        out = self._bag(batch, weights)
        factors = torch.arange(1, out.shape[1] + 1, dtype=torch.float32)
        if self._integers:
            each = (out * (factors % 5 - 2) * batch.dense).sum(dim=1)
        else:
            each = torch.tanh(out @ torch.cos(factors) - batch.label) ** 2 + (out**2).sum(dim=1) / 64
        if self._single is not None:
            each = each + sum((v**2).reshape(v.shape[0], -1).sum(dim=1) for v in self._single(batch).values())
        return each.mean(), out, weights


class Training:
    """One rank's rows in memory, exchanged for batches of all ranks' samples."""

    def __init__(self, ranks: AnyCommunicator, passes: tc.PassSet, placement: Placement, options: Options) -> None:
        self.ranks, self.share, self.options = ranks, Share(passes, placement, ranks.rank), options
        self.cache = tc.ResidentCache(self.share, device=shim() if options.shim else "cpu")
        self.groups = group_tables(passes.tables)
        self.exchange = RowExchange(
            ranks, self.cache._backend, self.groups, self.cache.groups,
            wire_dtype=getattr(torch, options.wire_dtype),
        )  # fmt: skip
        self.pooling = Pooling(self.exchange, self.cache._backend, passes.schema.features)
        self.tables = {feature.name: feature.table for feature in passes.schema.features}
        self.pooled: set[str] = set()

    def visits(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield the number of a pass, opened, and this rank's rows."""
        for visit in self.cache.passes(self.options.epochs):
            rows = visit.rows.groups
            owners = self.share.owners(visit.pass_index)
            self.exchange.open_pass(owners, rows, mirrored=self.options.mirrored)
            self.pooling.open(owners, rows)
            yield visit.pass_index, rows

    def batch(
        self,
        samples: Samples,
        ids: dict[str, FeatureIds],
        weight: float,
        where: str,
        modes: dict[str, str] | None = None,
    ) -> tuple[Batch, Any]:
        """Exchange the rows of a batch. modes: of features that may be pooled."""
        bags, error = self.pooling.ask(ids, modes, samples.num_samples, where) if modes else (None, None)
        left = {name: some for name, some in ids.items() if bags is None or name not in bags.modes}
        asked = self.exchange.ask(left, self.tables, where, error)
        pooled = self.pooling.answer(bags) if bags else None
        ready = pooled.features if pooled else {}
        self.pooled.update(ready)
        rows, exchanged = self.exchange.answer(asked)
        view = RowView(rows, RowGradients(len(self.groups)), where, self.cache._backend)
        label = torch.from_numpy(np.array(samples.label))
        made = Batch(label, torch.from_numpy(np.array(samples.dense)), asked.ids, view, label.numel(), weight, ready)
        return made, (exchanged, pooled)

    def step(self, waiting: list[tuple[Any, RowView]], rows: list[Any]) -> None:
        """Apply what the batches left."""
        for (exchanged, pooled), view in waiting:
            self.exchange.gradients_of(exchanged, view.gradients, self.cache.optimizer.gradients)
            if pooled is not None:
                self.pooling.gradients_of(pooled, self.cache.optimizer.gradients)
        self.exchange.step(self.cache.optimizer, rows)
        waiting.clear()

    def rows(self) -> dict[str, Any]:
        """Return keys, first column and fields of each table here."""
        found = {}
        for one in self.cache.tables:
            found[one.name] = (
                np.array(self.cache.keys(one.name)), one.first_column if one.whole_dim else 0,
                [np.array(f) for f in self.cache.fields(one.name)],
            )  # fmt: skip
        return found


def share_of(samples: NDArray[np.int64], rank: int, size: int) -> tuple[NDArray[np.int64], float]:
    """Return a rank's places of a batch and the batch's weight; a rank without any gets the first, which weighs 0."""
    mine = samples[rank * samples.size // size : (rank + 1) * samples.size // size]
    return (mine, size * mine.size / samples.size) if mine.size else (samples[:1], 0.0)


def train(ranks: AnyCommunicator, folder: str, case: str, kind: str, **given: Any) -> dict[str, Any]:
    """Train a case on every rank; return rows, outputs and gradients of weights."""
    options = Options(**given)
    passes = tc.PassSet.open(Path(folder))
    training = Training(ranks, passes, placement_of(kind, CASES[case], ranks.size), options)
    model = Model(CASES[case], options, training.groups)
    modes = {spec.name: spec.mode for spec in CASES[case].specs} if options.pooled else None
    outputs, gradients = [], []
    for index, rows in training.visits():
        source, waiting = passes.passes[index], []
        for first in range(0, source.samples, options.batch):
            places = np.arange(first, min(first + options.batch, source.samples))
            mine, weight = share_of(places, ranks.rank, ranks.size)
            samples = source.read(mine)
            batch, exchanged = training.batch(samples, samples.ids, weight, f"batch {first} of visit {index}", modes)
            loss, out, weights = model.loss(batch)
            (loss * batch.weight).backward()
            waiting.append((exchanged, batch.rows))
            if weight:
                outputs.append(out.detach().numpy().copy())
                gradients.append({name: one.grad.numpy() / ranks.size for name, one in weights.items()})
            last = first + options.batch >= source.samples
            if len(waiting) == options.accumulate or last:
                training.step(waiting, rows)
    return {
        "rows": training.rows(), "outputs": outputs, "weights": gradients,
        "pooled": sorted(training.pooled), "bytes": training.exchange.bytes_sent,
        "mirror_bytes": training.exchange.mirror_bytes,
    }  # fmt: skip


def train_alone(passes: tc.PassSet, case: str, **given: Any) -> dict[str, Any]:
    """Train a case in one process that exchanges nothing."""
    options = Options(**given)
    cache = tc.ResidentCache(passes)
    cache.optimizer.gradients.is_stepped = True  # by hand, and not after each backward
    model = Model(CASES[case], options, cache.groups)
    outputs, gradients = [], []
    for visit in cache.passes(options.epochs):
        for held, batch in enumerate(visit.batches(options.batch)):
            loss, out, weights = model.loss(replace(batch))
            loss.backward()
            outputs.append(out.detach().numpy().copy())
            gradients.append({name: one.grad.numpy() for name, one in weights.items()})
            if (held + 1) % options.accumulate == 0 or visit.samples_done == visit.num_samples:
                cache.step()
    rows = {}
    for one in cache.tables:
        keys = np.array(cache.keys(one.name))
        order = np.argsort(keys)
        rows[one.name] = keys[order], [np.array(f)[order] for f in cache.fields(one.name)]
    return {"rows": rows, "outputs": outputs, "weights": gradients}


def whole_rows(parts: list[dict[str, Any]]) -> dict[str, tuple[NDArray[np.int64], list[NDArray[np.float32]]]]:
    """Put the rows of all ranks together, keys ascending; slices of a row-wise state must be alike."""
    found = {}
    for name in parts[0]["rows"]:
        pieces = [part["rows"][name] for part in parts if part["rows"][name][0].size]
        if len({tuple(sorted(keys.tolist())) for keys, _, _ in pieces}) == 1 and len(pieces) > 1:
            pieces.sort(key=lambda piece: piece[1])
            orders = [np.argsort(keys) for keys, _, _ in pieces]
            fields = []
            for f, field in enumerate(pieces[0][2]):
                sorted_ = [piece[2][f][order] for piece, order in zip(pieces, orders, strict=True)]
                if f and field.shape[1] == 1:
                    for other in sorted_[1:]:
                        np.testing.assert_array_equal(sorted_[0], other)
                    fields.append(sorted_[0])
                else:
                    fields.append(np.concatenate(sorted_, axis=1))
            found[name] = pieces[0][0][orders[0]], fields
        else:
            keys = np.concatenate([keys for keys, _, _ in pieces])
            order = np.argsort(keys)
            fields = [np.concatenate(some)[order] for some in zip(*(piece[2] for piece in pieces), strict=True)]
            found[name] = keys[order], fields
    return found


def whole_outputs(parts: list[dict[str, Any]]) -> list[NDArray[np.float32]]:
    """Put the outputs of all samples together, in the order of training."""
    return [np.concatenate([part["outputs"][i] for part in parts]) for i in range(len(parts[0]["outputs"]))]


def ask_for(ranks: AnyCommunicator, folder: str, bad_rank: int, id_: int, kind: str) -> None:
    """Make a batch in which one rank has an id that no table has."""
    passes = tc.PassSet.open(Path(folder))
    training = Training(ranks, passes, placement_of(kind, MIXED, ranks.size), Options())
    _, _ = next(training.visits())
    samples = passes.passes[0].read(np.arange(8))
    ids = dict(samples.ids)
    if ranks.rank == bad_rank:
        changed = ids["fixed"].ids.copy()
        changed[5] = id_
        ids["fixed"] = replace(ids["fixed"], ids=changed)
    training.batch(samples, ids, 1.0, "batch 7 of visit 0")


def fail_before(ranks: AnyCommunicator, folder: str, bad_rank: int) -> None:
    """Make a batch for which one rank could not read its samples."""
    passes = tc.PassSet.open(Path(folder))
    training = Training(ranks, passes, placement_of("row", MIXED, ranks.size), Options())
    _, _ = next(training.visits())
    error = OSError("the disk is gone") if ranks.rank == bad_rank else None
    ids = {} if error else passes.passes[0].read(np.arange(8)).ids
    training.exchange.ask(ids, training.tables, "batch 0 of visit 0", error)


def ask_for_nothing(ranks: AnyCommunicator, folder: str) -> list[int]:
    """Make a batch in which odd ranks have no ids at all, and a step of it."""
    passes = tc.PassSet.open(Path(folder))
    training = Training(ranks, passes, placement_of("all", MIXED, ranks.size), Options())
    _, rows = next(training.visits())
    samples = passes.passes[0].read(np.arange(0 if ranks.rank % 2 else 8))
    batch, exchanged = training.batch(samples, samples.ids, 1.0, "batch 0 of visit 0")
    out = EmbeddingBagCollection(Model(MIXED, Options(), training.groups).schema, ["one", "plain", "mean"])(batch)
    out.sum().backward()
    training.step([(exchanged, batch.rows)], rows)
    return list(out.shape)
