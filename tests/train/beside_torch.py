"""A small model over a cache in the middle of a pass, and the same model in torch, to compare loops with."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

import tiercache as tc
from tests.train.cases import Case, Spec, table

RATE, DENSE_RATE, DIM = 0.5, 0.1, 4
CASE = Case(
    tables=(table("a", DIM, tc.optim.SGD(learning_rate=RATE)), table("b", DIM, tc.optim.Adam(learning_rate=0.1))),
    specs=(Spec(name="f", table="a", hotness="multi_hot"), Spec(name="g", table="b"), Spec(name="h", table="b")),
    num_samples=64, pass_rows=64, num_keys=20,
)  # fmt: skip


class Ours(nn.Module):
    """A bag, single vectors and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.rows = tc.EmbeddingBag(CASE.schema, "f", mode="sum"), tc.Embedding(CASE.schema, "g")
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.top(torch.cat([self.bag(batch), self.rows(batch)], dim=1)).squeeze(1)


class Theirs(nn.Module):
    """The same model in torch, over positions in the tables."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, top: nn.Module) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag.from_pretrained(a.clone(), freeze=False, mode="sum", sparse=True)
        self.rows = nn.Embedding.from_pretrained(b.clone(), freeze=False, sparse=True)
        self.top = copy.deepcopy(top)

    def forward(self, places: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.top(torch.cat([self.bag(places[0]), self.rows(places[1])], dim=1)).squeeze(1)


class TheirOptimizer:
    """SGD of dense parameters and of one table, SparseAdam of the other."""

    def __init__(self, model: Theirs) -> None:
        self.parts: list[Any] = [
            torch.optim.SGD(model.top.parameters(), lr=DENSE_RATE),
            torch.optim.SGD(model.bag.parameters(), lr=RATE),
            torch.optim.SparseAdam([*model.rows.parameters()], lr=0.1),
        ]

    def step(self) -> None:
        for one in self.parts:
            one.step()

    def zero_grad(self) -> None:
        for one in self.parts:
            one.zero_grad()


class World:
    """A cache in the middle of a pass, and the same model in torch."""

    def __init__(self, passes: tc.PassDataset, dense: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> None:
        torch.manual_seed(0)
        self.model = Ours()
        self.dense = dense(self.model.parameters(), lr=DENSE_RATE)
        self.cache = tc.InMemoryCache(passes, model=self.model, optimizer=self.dense)
        self.optimizer = self.cache.optimizer
        self.order = {name: np.argsort(self.cache.keys(name)) for name in "ab"}
        self.theirs = Theirs(self.rows("a"), self.rows("b"), self.model.top)
        self.their_optimizer = TheirOptimizer(self.theirs)
        self.loop = self.cache.passes(epochs=1)
        self.current = next(self.loop)
        self.batches = list(self.current.batches(16))

    def rows(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.cache.fields(name)[0][self.order[name]].copy())

    def places(self, batch: tc.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for feature, name in (("f", "a"), ("g", "b")):
            keys = self.current.source.whole.keys(name)[batch.ids[feature].ids]
            found.append(torch.from_numpy(np.searchsorted(self.cache.keys(name)[self.order[name]], keys)))
        return found[0].view(len(batch), -1), found[1]

    def sides(self, number: int) -> list[tuple[nn.Module, Any, Any]]:
        batch = self.batches[number]
        return [
            (self.model, self.optimizer, batch),
            (self.theirs, self.their_optimizer, self.places(batch)),
        ]

    def assert_same(self, tolerance: float = 2e-6) -> None:
        for name, weight in (("a", self.theirs.bag.weight), ("b", self.theirs.rows.weight)):
            torch.testing.assert_close(self.rows(name), weight.detach(), atol=tolerance, rtol=1e-5)
        torch.testing.assert_close(self.model.top.weight, self.theirs.top.weight, atol=tolerance, rtol=1e-5)

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Expect that no row moves inside."""
        before = self.rows("a"), self.rows("b")
        yield
        assert all(torch.equal(old, self.rows(name)) for old, name in zip(before, "ab", strict=True))

    def close(self) -> None:
        """End the pass in the middle."""
        self.loop.close()
        self.cache._close(failed=True)

    @property
    def waiting(self) -> int:
        """The number of gradients that wait for a step."""
        return sum(len(anchor.pending) for anchor in self.optimizer.rows.anchors)


def plain(model: nn.Module, optimizer: Any, given: Any) -> None:
    optimizer.zero_grad()
    model(given).square().mean().backward()
    optimizer.step()
