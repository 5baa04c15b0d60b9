"""An independent oracle: torch's own embedding layers and optimizers, from the same initial rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tiercache as tc
from tests.training.cases import Case, Spec, table

if TYPE_CHECKING:
    from pathlib import Path

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
MASK = (1 << 64) - 1


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Compute Philox4x32-10 one word at a time (Salmon et al. 2011), in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def mix(x: int) -> int:
    """Compute splitmix64's finaliser in Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def obvious_uniform_row(spec: tc.Table, key: int) -> np.ndarray:
    """Compute an initial row as docs/format.md says, element by element."""
    stream, unsigned = mix(spec.seed ^ spec.table_id), key & MASK
    low, high = np.float32(spec.initializer.low), np.float32(spec.initializer.high)
    row = []
    for block in range(-(-spec.dim // 4)):
        words = philox([unsigned & 0xFFFFFFFF, unsigned >> 32, block, 0], [stream & 0xFFFFFFFF, stream >> 32])
        row += [low + np.float32(word >> 8) * np.float32(2.0**-24) * (high - low) for word in words]
    return np.array(row[: spec.dim], dtype=np.float32)


@pytest.mark.parametrize("dim", [1, 3, 4, 7, 64, 130])
def test_initial_rows_are_those_of_the_definition(tmp_path: Path, dim: int) -> None:
    """Rows of a resident cache equal the slow obvious generator, bit for bit."""
    case = Case(tables=(table("a", dim),), specs=(Spec(name="f", table="a"),), num_samples=16)
    cache = tc.ResidentCache(case.cut(tmp_path / "passes"))
    expected = np.stack([obvious_uniform_row(case.tables[0], int(key)) for key in cache.keys("a")])
    np.testing.assert_array_equal(cache.fields("a")[0].view(np.uint32), expected.view(np.uint32))


class RowWise(torch.optim.Optimizer):
    """Row-wise Adagrad by hand, over dense gradients of which untouched rows are zero."""

    def __init__(self, params: Any, lr: float, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the rows whose gradient is not zero."""
        for group in self.param_groups:
            for weight in group["params"]:
                grad = weight.grad.to_dense() if weight.grad.is_sparse else weight.grad
                state = self.state.setdefault(weight, {})
                sums = state.setdefault("sum", torch.zeros(weight.shape[0]))
                touched = grad.abs().sum(1) > 0
                sums[touched] += grad[touched].pow(2).mean(1)
                weight[touched] -= group["lr"] * grad[touched] / (sums[touched].sqrt() + group["eps"])[:, None]


OURS_AND_THEIRS = {
    "sgd": (tc.SGD(learning_rate=0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
    "adagrad": (
        tc.Adagrad(learning_rate=0.1, eps=1e-10, initial_accumulator=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-10, initial_accumulator_value=0.1),
    ),
    "adam": (tc.Adam(learning_rate=0.01), lambda p: torch.optim.SparseAdam(p, lr=0.01)),
    "rowwise": (tc.RowWiseAdagrad(learning_rate=0.1), lambda p: RowWise(p, lr=0.1)),
}


class Reference(nn.Module):
    """The same lookups with nn.EmbeddingBag, one for each table, over all keys of the data."""

    def __init__(self, cache: tc.ResidentCache, case: Case, sparse: bool) -> None:
        super().__init__()
        self.case = case
        self.weights = nn.ParameterDict(
            {t.name: nn.Parameter(torch.from_numpy(cache.fields(t.name)[0].copy())) for t in case.tables}
        )
        self.sparse = sparse

    def lookup(self, spec: Spec, rows: torch.Tensor, offsets: Any, weights: Any, mode: str) -> torch.Tensor:
        """Pool the vectors of one feature."""
        starts = torch.arange(len(rows)) if offsets is None else torch.from_numpy(offsets[:-1].copy())
        return nn.functional.embedding_bag(
            rows, self.weights[spec.table], starts, mode=mode, sparse=self.sparse and mode != "max",
            per_sample_weights=weights,
        )  # fmt: skip


def both(case: Case, passes: tc.PassSet, kind: str, *, accumulate: int = 1, change_rate: bool = False) -> None:
    """Train ours and theirs on the same batches and compare outputs, weights and weight gradients."""
    cache = tc.ResidentCache(passes)
    sparse = kind == "adam"
    theirs = Reference(cache, case, sparse)
    order = {t.name: np.argsort(np.asarray(cache.keys(t.name))) for t in case.tables}
    sorted_keys = {t.name: np.asarray(cache.keys(t.name))[order[t.name]] for t in case.tables}
    optimizer = OURS_AND_THEIRS[kind][1](list(theirs.parameters()))
    bag = tc.TieredEmbeddingBag(cache, mode={spec.name: spec.mode for spec in case.specs})
    step = held = 0
    for visit in cache.passes(epochs=case.epochs):
        for batch in visit.batches(case.batch, shuffle=case.shuffle):
            given, outs = {}, []
            for spec in case.specs:
                ids = batch.ids[spec.name]
                keys = np.asarray(passes.passes[visit.pass_index].keys(spec.table))[ids.ids]
                rows = torch.from_numpy(order[spec.table][np.searchsorted(sorted_keys[spec.table], keys)])
                weights = None
                if spec.weighted:
                    given[spec.name] = torch.from_numpy(ids.weights.copy()).requires_grad_()
                    weights = torch.from_numpy(ids.weights.copy()).requires_grad_()
                outs.append((theirs.lookup(spec, rows, ids.offsets, weights, spec.mode), weights, spec.name))
            ours, other = bag(batch, given), torch.cat([out for out, _, _ in outs], dim=1)
            torch.testing.assert_close(ours, other, **TOLERANCE)
            torch.manual_seed(step)
            grad = torch.randint(-2, 3, ours.shape).float()
            ours.backward(grad)
            other.backward(grad)
            for _, weights, name in outs:
                if weights is not None:
                    torch.testing.assert_close(given[name].grad, weights.grad, **TOLERANCE)
            held += 1
            if held == accumulate:
                held = 0
                cache.step()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if change_rate and step == 3:
                    cache.set_learning_rate(0.03)
                    optimizer.param_groups[0]["lr"] = 0.03
        cache.discard()
        optimizer.zero_grad()
        held = 0
    assert step > 3
    for t in case.tables:
        np.testing.assert_allclose(cache.fields(t.name)[0], theirs.weights[t.name].detach().numpy(), **TOLERANCE)


@pytest.mark.parametrize("kind", list(OURS_AND_THEIRS))
@pytest.mark.parametrize("change_rate", [False, True])
def test_training_equals_torch(tmp_path: Path, kind: str, change_rate: bool) -> None:
    """One id a sample, two features on one table: outputs and weights within 1e-5."""
    case = Case(
        tables=(table("a", 16, OURS_AND_THEIRS[kind][0]),),
        specs=(Spec(name="f", table="a"), Spec(name="g", table="a")),
        num_samples=128,
        num_keys=40,
    )
    both(case, case.cut(tmp_path / "passes"), kind, change_rate=change_rate)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(["sgd", "adagrad", "rowwise"]),
    dim=st.one_of(st.integers(1, 20), st.sampled_from([33, 64, 65, 128, 130])),
    specs=st.lists(
        st.tuples(st.sampled_from(["one", "fixed", "ragged"]), st.sampled_from(["sum", "mean", "max"]), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    accumulate=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_pooling_weights_and_accumulation_equal_torch(
    tmp_path_factory: pytest.TempPathFactory, kind: str, dim: int, specs: list[Any], accumulate: int, seed: int
) -> None:
    """Sum, mean, max, per-id weights with their gradient, empty bags, shared tables and several backwards a step."""
    chosen = tuple(
        Spec(name=f"f{i}", table="a", hotness=hot, mode=mode, weighted=hot == "ragged" and mode == "sum" and weighted)
        for i, (hot, mode, weighted) in enumerate(specs)
    )
    case = Case(
        tables=(table("a", dim, OURS_AND_THEIRS[kind][0]),), specs=chosen, num_samples=128, num_keys=30, data_seed=seed
    )
    both(case, case.cut(tmp_path_factory.mktemp("case") / "passes"), kind, accumulate=accumulate)


def test_decay_pulls_the_rows_of_a_batch_only(tmp_path: Path) -> None:
    """SGD with decay d and a zero gradient multiplies touched rows by 1 - rate * d and leaves the others alone."""
    optimizer = tc.SGD(learning_rate=0.5, decay=0.25)
    case = Case(tables=(table("a", 8, optimizer),), specs=(Spec(name="f", table="a"),), num_samples=64, pass_rows=32)
    cache = tc.ResidentCache(case.cut(tmp_path / "passes"))
    before = cache.fields("a")[0].copy()
    bag = tc.TieredEmbeddingBag(cache)
    visits = cache.passes(epochs=1)  # its loop must live as long as its batches
    visit = next(visits)
    batch = next(visit.batches(16))
    (bag(batch) * 0.0).sum().backward()
    cache.step()
    local = np.asarray(cache.pass_set.passes[0].keys("a"))[np.unique(batch.ids["f"].ids)]
    touched = np.isin(cache.keys("a"), local)
    np.testing.assert_allclose(cache.fields("a")[0][touched], before[touched] * np.float32(0.875), rtol=1e-6)
    np.testing.assert_array_equal(cache.fields("a")[0][~touched], before[~touched])
    assert touched.any()
    assert not touched.all()


@pytest.mark.parametrize("hotness", ["one", "fixed", "ragged"])
def test_unpooled_lookups_equal_torch(tmp_path: Path, hotness: str) -> None:
    """TieredEmbedding gives each id its vector, shaped by hotness, and its gradients reach the rows."""
    optimizer = tc.SGD(learning_rate=1.0)
    case = Case(
        tables=(table("a", 5, optimizer),), specs=(Spec(name="f", table="a", hotness=hotness, length=3),), num_keys=9
    )
    cache = tc.ResidentCache(replace(case, pass_rows=256).cut(tmp_path / "passes"))
    before = torch.from_numpy(cache.fields("a")[0].copy()).requires_grad_()
    rows = tc.TieredEmbedding(cache)
    visits = cache.passes(epochs=1)  # its loop must live as long as its batches
    visit = next(visits)
    batch = next(visit.batches(32))
    out = rows(batch)["f"]
    ids = batch.ids["f"].ids
    keys = np.asarray(cache.pass_set.passes[0].keys("a"))[ids]
    place = {int(key): i for i, key in enumerate(cache.keys("a"))}
    expected = before[torch.tensor([place[int(key)] for key in keys])]
    shapes = {"one": (32, 5), "fixed": (32, 3, 5), "ragged": (len(ids), 5)}
    assert out.shape == shapes[hotness]
    torch.testing.assert_close(out.reshape(-1, 5), expected)
    grad = torch.randint(-3, 4, out.shape).float()
    out.backward(grad)
    expected.backward(grad.reshape(-1, 5))
    cache.step()
    torch.testing.assert_close(torch.from_numpy(cache.fields("a")[0]), (before - before.grad).detach(), **TOLERANCE)
