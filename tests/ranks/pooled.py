"""A training whose features are pooled by the ranks that own their tables, on every rank of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tiercache as tc
from tests.ranks.trainings import OPTIONS, dense_of
from tests.training.cases import Case, Spec, table

if TYPE_CHECKING:
    from tiercache.dist.communicator import AnyCommunicator

CASE = Case(
    tables=(
        table("users", 5, tc.optim.SGD(learning_rate=0.1)),
        table("words", 15, tc.optim.RowWiseAdagrad(learning_rate=0.05, decay=0.01)),
        table("tags", 16, tc.optim.Adam(learning_rate=0.01, decay=0.01)),
        table("items", 16, tc.optim.Adagrad(learning_rate=0.05)),
    ),
    specs=(
        Spec(name="user", table="users"),
        Spec(name="friend", table="users", hotness="ragged", mode="mean"),
        Spec(name="word", table="words", hotness="ragged", weighted=True),
        Spec(name="title", table="words", hotness="fixed", length=6, mode="mean"),
        Spec(name="tag", table="tags", hotness="ragged"),
        Spec(name="place", table="tags"),
        Spec(name="item", table="items", hotness="fixed", length=4, mode="max"),
        Spec(name="more", table="items", hotness="fixed", length=4),
    ),
    num_samples=113,
    pass_rows=60,
    num_keys=3000,
    batch=16,
)
"""So many keys that nearly all rows of a batch are unique; the last batch of a pass leaves ranks without samples."""
POOLED = ["friend", "more", "tag", "title", "word"]
"""All but those of one id a sample, and a maximum."""


class Model(nn.Module):
    """Bags in two modules, of which one is looked up twice and the other has a gradient in every second step."""

    def __init__(self, cache: Any, *, by_rows: bool = False) -> None:
        super().__init__()
        modes = {spec.name: spec.mode for spec in CASE.specs}
        left, right = ["user", "word", "friend", "title", "item"], ["more", "tag", "place"]
        left_modes = {name: modes[name] for name in left}
        self.left = tc.EmbeddingBagCollection(cache.schema, left, mode=left_modes, weighted=left if by_rows else ())
        self.right = tc.EmbeddingBagCollection(cache.schema, right, weighted=right if by_rows else ())
        self.top = nn.Linear(self.left.out_features + self.right.out_features + 1, 1)
        self.step = 0

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        """Return one logit a sample."""
        left, right = self.left(batch) + 0.5 * self.left(batch), self.right(batch)
        if self.step % 2:
            right = right.detach()
        return self.top(torch.cat([left, right, batch.dense], dim=1)).squeeze(1)


def opened(folder: str, name: str, kind: str = "table", **options: Any) -> tc.TierCache:
    """Open the store of a test, with all tables divided alike."""
    sharding = dict.fromkeys([one.name for one in CASE.tables], kind)
    passes = tc.PassDataset.open(Path(folder) / "passes")
    return tc.TierCache(Path(folder) / name, passes, sharding=sharding, **OPTIONS | options)


def train(
    ranks: AnyCommunicator,
    folder: str,
    name: str,
    *,
    kind: str,
    input_: str = "data",
    micro_batches: int | None = None,
    accumulate: int = 1,
    by_rows: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train two epochs, then look all samples up; return what was pooled, bytes sent, vectors and dense weights."""
    torch.manual_seed(1)
    given = {} if input_ == "data" else {"input": input_}
    pooled: set[str] = set()
    with opened(folder, name, kind, **options) as cache:
        inner = Model(cache, by_rows=by_rows)
        model = DistributedDataParallel(inner) if ranks.size > 1 else inner
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        cache.register(model=model, optimizer=optimizer)
        held = 0
        for p in cache.passes(epochs=2):
            if micro_batches is None:
                each = ([batch] for batch in p.batches(CASE.batch, shuffle=True, **given))
            else:
                each = p.steps(CASE.batch, micro_batches=micro_batches, shuffle=True, **given)
            for batches in each:
                for batch in batches:
                    pooled.update(batch.pooled)
                    (
                        nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label) * batch.weight
                    ).backward()
                held += 1
                if held == accumulate or p.samples_done == p.num_samples:
                    optimizer.step()
                    optimizer.zero_grad()
                    inner.step, held = inner.step + 1, 0
        sent = cache.bytes_sent
        found = [
            inner.left(batch).detach().numpy().copy()
            for piece in cache.evaluate(cache.dataset)
            for batch in piece.batches(23)
            if batch.weight
        ]
    return {"pooled": sorted(pooled), "bytes": sent, "vectors": found} | dense_of(model)


def weigh(ranks: AnyCommunicator, folder: str, *, announced: bool) -> list[Any]:
    """Give weights to a feature that its owner pools where that was not announced."""
    with opened(folder, "weighed.tc") as cache:
        bag = tc.EmbeddingBagCollection(cache.schema, ["title", "more"], weighted=["title"] if announced else ())
        cache.register(bag=bag)
        for p in cache.passes(epochs=1):
            batch = next(p.batches(8))
            weights = torch.ones(4 * 6, requires_grad=True)
            bag(batch, {"title": weights}).sum().backward()
            cache.optimizer.step()
            return [sorted(batch.pooled), sorted(batch.ids), float(weights.grad.abs().sum())]  # type: ignore[union-attr]
    raise AssertionError("there was no pass")


def ask_for_ids(ranks: AnyCommunicator, folder: str, *, names: list[str]) -> dict[str, Any]:
    """Return what a batch says of ids that it does not have, and what of it is a dict's all the same."""
    with opened(folder, "asked.tc") as cache:
        bag = tc.EmbeddingBagCollection(cache.schema, ["user", "more"])
        cache.register(bag=bag)
        for p in cache.passes(epochs=1):
            batch = next(p.batches(8))
            said = []
            for name in names:
                with pytest.raises(KeyError) as caught:
                    batch.ids[name]
                said.append(caught.value.args[0])
            assert bag(batch).shape == (len(batch), 21)
            return {
                "said": said, "iterated": list(batch.ids), "in": [name in batch.ids for name in names],
                "got": [batch.ids.get(name) for name in names], "ids": batch.ids["user"].num_ids,
            }  # fmt: skip
    raise AssertionError("there was no pass")


def modules_are_registered(ranks: AnyCommunicator, folder: str) -> list[list[list[str]]]:
    """Return the features of batches, with rows and pooled, as modules are registered."""
    found = []
    with opened(folder, "modules.tc") as cache:
        for p in cache.passes(epochs=1):
            batches = p.batches(8)

            def note() -> tc.Batch:
                batch = next(batches)  # noqa: B023 - called here only
                found.append([sorted(batch.ids), sorted(batch.pooled)])
                return batch

            note()
            bag = tc.EmbeddingBagCollection(cache.schema, ["user", "more"])
            cache.register(bag=bag)
            batch = note()
            cache.register(mean=tc.EmbeddingBagCollection(cache.schema, ["more"], mode="mean"))
            note()
            assert torch.equal(bag(batch), bag(batch))
            with pytest.raises(ValueError, match="without the rows of feature 'more'"):
                tc.EmbeddingCollection(cache.schema, ["more"])(batch)
            return found
    raise AssertionError("there was no pass")


def have_a_wrong_id(ranks: AnyCommunicator, folder: str, *, input_: str) -> None:
    """Make a batch in which the last rank reads an id that the table of a pooled feature does not have."""
    with opened(folder, "wrong.tc") as cache:
        bag = tc.EmbeddingBagCollection(cache.schema, ["title"], mode="mean")
        cache.register(bag=bag)
        owner = cache.sharding.tables["words"].slices[0].rank
        for p in cache.passes(epochs=1):
            source = p.source
            if ranks.rank == (owner if input_ == "model" else (owner + 1) % ranks.size):
                source.read = partial(_with_a_wrong_id, source.read)  # type: ignore[method-assign]
            bag(next(p.batches(8, read_by=read_by)))


def _with_a_wrong_id(read: Any, places: Any, **options: Any) -> Any:
    samples = read(places, **options)
    if "title" in samples.ids:
        samples.ids["title"].ids.setflags(write=True)
        samples.ids["title"].ids[1] = 1 << 20
    return samples


def differ(ranks: AnyCommunicator, folder: str, *, what: str) -> None:
    """Have ranks with input by model look different features up, or make batches of different sizes."""
    with opened(folder, "differ.tc") as cache:
        bag = tc.EmbeddingBagCollection(
            cache.schema, ["more"], mode="sum" if ranks.rank and what == "modes" else "mean"
        )
        cache.register(bag=bag)
        for p in cache.passes(epochs=1):
            bag(next(p.batches(8 + ranks.rank * (what == "sizes"), read_by="owner")))
