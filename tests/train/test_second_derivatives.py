"""Lookups have first derivatives: differentiating twice through them raises, and all else is as in torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.train.cases import Case, Spec, resident, table

CASE = Case(
    tables=(table("a", 4, tc.optim.SGD(learning_rate=0.1)), table("b", 4, tc.optim.SGD(learning_rate=0.1))),
    specs=(Spec(name="f", table="a", hotness="multi_hot"), Spec(name="g", table="b", hotness="ragged", weighted=True)),
    num_samples=32,
    pass_rows=32,
)


def weights_for(batch: tc.Batch, name: str) -> torch.Tensor:
    return torch.full((batch.ids[name].num_ids,), 0.5, requires_grad=True)


def bag(name: str, **options: Any) -> Callable[[tc.Batch, torch.Tensor], torch.Tensor]:
    return lambda batch, weights: tc.EmbeddingBag(CASE.schema, name, **options)(batch, per_sample_weights=weights)


BY_WEIGHTS: dict[str, tuple[str, Callable[[tc.Batch, torch.Tensor], torch.Tensor]]] = {
    "weights of a sum": ("f", bag("f", mode="sum")),
    "weights of a mean": ("f", bag("f", mode="mean")),
    "weights of ragged bags": ("g", bag("g", mode="sum")),
    "weights of a collection": ("g", lambda batch, given: tc.EmbeddingBagCollection(CASE.schema)(batch, {"g": given})),
    "weights with padding": ("f", bag("f", mode="sum", padding_idx=1)),  # they are multiplied by its mask
}
BY_ROWS: dict[str, Callable[[], nn.Module]] = {
    "rows of a bag": lambda: tc.EmbeddingBag(CASE.schema, "f"),
    "rows of an embedding": lambda: tc.Embedding(CASE.schema, "f"),
    "rows of a collection": lambda: tc.EmbeddingCollection(CASE.schema),
}


@pytest.mark.parametrize("how", ["backward", "autograd.grad"])
@pytest.mark.parametrize("what", [*BY_WEIGHTS, *BY_ROWS])
def test_a_second_derivative_through_a_lookup_raises(passes: tc.PassDataset, what: str, how: str) -> None:
    """It used to be 0 silently; torch.nn.EmbeddingBag raises too."""
    cache = resident(passes)
    loop = cache.passes(epochs=1)
    batch = next(next(loop).batches(8))
    if what in BY_WEIGHTS:
        name, call = BY_WEIGHTS[what]
        leaf = weights_for(batch, name)
        out = call(batch, leaf)
    else:
        module = BY_ROWS[what]()
        found, leaf = module(batch), next(module.parameters())
        out = found["f"] if isinstance(found, dict) else found
    (gradient,) = torch.autograd.grad((out**3).sum(), leaf, create_graph=True)
    assert gradient.requires_grad
    penalty = gradient.square().sum() + 0 * leaf.sum()
    with pytest.raises(RuntimeError, match="lookups have first derivatives only: exclude the gradients of embedding"):
        penalty.backward() if how == "backward" else torch.autograd.grad(penalty, leaf)


def test_first_derivatives_keep_a_graph_where_nothing_is_differentiated_twice(passes: tc.PassDataset) -> None:
    """``create_graph=True`` alone changes no row, and gradients of weights are the same without it."""
    rows, gradients = [], []
    for keeps in (False, True):
        cache = resident(passes)
        bag = tc.EmbeddingBag(CASE.schema, "f", mode="sum")
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
        cache.register(model=bag, optimizer=optimizer)
        optimizer = cache.optimizer
        for p in cache.passes(epochs=2):
            for batch in p.batches(8):
                weights = weights_for(batch, "f")
                (bag(batch, per_sample_weights=weights) ** 3).sum().backward(create_graph=keeps)
                assert weights.grad is not None
                gradients.append(weights.grad.detach())
                optimizer.step()
                optimizer.zero_grad()
        rows.append(cache.fields("a")[0])
    assert np.array_equal(*rows)
    assert all(torch.equal(*pair) for pair in zip(gradients[:8], gradients[8:], strict=True))


def test_a_gradient_penalty_of_a_dense_input_trains_rows_as_in_torch(passes: tc.PassDataset) -> None:
    """The gradient by a dense input depends on the looked up vectors once."""
    cache = resident(passes)
    bag = tc.EmbeddingBag(CASE.schema, "f", mode="sum")
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    cache.register(model=bag, optimizer=optimizer)
    optimizer = cache.optimizer
    keys = cache.keys("a")
    weight = nn.Parameter(torch.from_numpy(cache.fields("a")[0].copy()))
    theirs = torch.optim.SGD([weight], lr=0.1)
    for p in cache.passes(epochs=1):
        for batch in p.batches(8):
            found = p.source.whole.keys("a")[batch.ids["f"].ids].reshape(8, 3)
            rows = torch.from_numpy(np.argsort(keys)[np.searchsorted(keys, found, sorter=np.argsort(keys))])
            for out in (bag(batch), nn.functional.embedding_bag(rows, weight, mode="sum")):
                x = batch.dense.clone().requires_grad_()
                y = (out * x).square().sum()
                (slope,) = torch.autograd.grad(y, x, create_graph=True)
                (y + slope.square().sum()).backward()
            for one in (optimizer, theirs):
                one.step()
                one.zero_grad()
    np.testing.assert_allclose(cache.fields("a")[0], weight.detach().numpy(), rtol=1e-5, atol=1e-6)
