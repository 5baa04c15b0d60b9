"""Compiled models: lookups are operators, so a whole model is one graph, and it trains to the same bits."""

import copy
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tiercache as tc
from tests.train.cases import SPECS, Case, assert_same_bits, result_of_resident, table
from tests.train.devices import DEVICES
from tests.train.loops import descend, first_pass
from tiercache.train import lookup_ops

CASE = Case(tables=(table("a", 4), table("b", 6)), specs=SPECS, num_samples=70, pass_rows=35)  # 16, 16, 3


class Model(nn.Module):
    """Every kind of lookup module, one with weight arguments; one feature of a collection is unused."""

    def __init__(self, schema: tc.Schema) -> None:
        super().__init__()
        self.bags = tc.EmbeddingBagCollection(schema, mode={"g": "max", "h": "mean"}, weighted=["f"])
        self.rows = tc.EmbeddingCollection(schema, ["f", "h", "g"])
        self.bag, self.one = tc.EmbeddingBag(schema, "i"), tc.Embedding(schema, "f")
        self.scale = nn.Parameter(torch.ones(()))
        self.top = nn.Linear(self.bags.out_features + self.bag.out_features + 1, 1)

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        weights = {"f": self.scale * torch.ones(batch.num_samples)}
        rows = self.rows(batch)
        pooled = self.bags(batch, weights)
        found = self.top(torch.cat([pooled, self.bag(batch.features["i"]), batch.dense], dim=1)).squeeze(1)
        found = found + self.one(batch.features["f"]).sum(dim=1) * rows["f"].sum(dim=1)
        return found + rows["h"].sum(dim=(1, 2))


def train(passes: tc.PassDataset, device: str, change: Callable[[Any], Any]) -> Any:
    torch.manual_seed(1)
    torch.compiler.reset()
    with tc.InMemoryCache(passes, device=DEVICES[device]()) as cache:
        model = Model(passes.schema)
        run = change(model)
        cache.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        logits = []
        for p in cache.passes(epochs=2):
            for batch in p.batches(16):
                with torch.no_grad():
                    logits.append(run(batch).clone())
                descend(nn.functional.binary_cross_entropy_with_logits(run(batch), batch.label), cache.optimizer)
        return result_of_resident(cache, model), logits


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_model_is_one_graph_and_trains_to_the_same_bits(passes: tc.PassDataset, device: str) -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        pytest.skip("torch before 2.9 splits the graph at operators whose output shapes depend on data")
    (found, logits), (wanted, others) = (train(passes, device, change) for change in (compiled, lambda model: model))
    assert_same_bits(found, wanted)
    for mine, other in zip(logits, others, strict=True):
        assert torch.equal(mine, other)


def test_a_compiled_step_leaves_rows_and_their_step_to_python(passes: tc.PassDataset) -> None:
    """The compiler breaks its graph at backward and at the step, and compiles nothing of ours."""

    def result(change: Callable[[Any], Any]) -> Any:
        torch.manual_seed(1)
        torch.compiler.reset()
        model = Model(passes.schema)
        with tc.InMemoryCache(passes, model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1)) as cache:

            def step(batch: tc.Batch) -> None:
                cache.optimizer.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
                cache.clip_grad_norm_(0.1)
                cache.optimizer.step()

            run = change(step)
            for p in cache.passes(epochs=1):
                for batch in p.batches(16):
                    run(batch)
            return result_of_resident(cache, model)

    torch._dynamo.utils.counters.clear()
    found = result(lambda step: torch.compile(step, backend="aot_eager"))
    breaks = [*torch._dynamo.utils.counters["graph_break"]]
    assert breaks
    assert not [one for one in breaks if "/tiercache/" in one and "values/compiled.py" not in one]
    assert_same_bits(found, result(lambda step: step))


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.fixture
def batch(passes: tc.PassDataset) -> Iterator[tc.Batch]:
    with tc.InMemoryCache(passes) as cache, first_pass(cache) as p:
        yield next(p.batches(16))


@pytest.mark.parametrize("trained", [True, False])
def test_operators_keep_what_torch_asks_of_them(batch: tc.Batch, *, trained: bool) -> None:
    model, weight = Model(CASE.schema), torch.rand(16, requires_grad=True)
    of_module = model.bags.number, model.bags.out_features, trained
    bags = torch.ops.tiercache.embedding_bags.default
    torch.library.opcheck(bags, (model.bags.anchor, batch.number, [], "", *of_module))
    torch.library.opcheck(bags, (model.bags.anchor, batch.number, [weight], "f", *of_module))
    dims, lengths = model.rows.dims, [model.rows.length_of(name) for name in model.rows.features]
    rows = (model.rows.anchor, batch.number, dims, lengths, model.rows.number, trained)
    torch.library.opcheck(torch.ops.tiercache.embedding_rows.default, rows)


def test_a_batch_is_looked_up_again_after_a_step(passes: tc.PassDataset) -> None:
    """Maxima and weights belong to each lookup, and a backward may come later: after another table's step."""
    assert train_again(passes, compiled) == train_again(passes, lambda model: model)


def train_again(passes: tc.PassDataset, change: Callable[[Any], Any]) -> list[float]:
    torch.compiler.reset()
    with tc.InMemoryCache(passes) as cache, first_pass(cache) as p:
        modules = [
            tc.EmbeddingBagCollection(passes.schema, ["f", "g"], mode={"g": "max"}, weighted=["f"]),
            tc.EmbeddingBag(passes.schema, "h", mode="sum"),
        ]
        first, second = map(change, modules)
        batch = next(p.batches(16))
        weight, losses = nn.Parameter(torch.ones(16)), []
        of_first = torch.optim.SGD([*modules[0].parameters(), weight], lr=0.5)
        of_second = torch.optim.SGD(modules[1].parameters(), lr=0.5)
        cache.register(first=of_first, second=of_second)
        of_first, of_second = map(cache.optimizer.part, (of_first, of_second))
        for _ in range(4):
            loss = first(batch, {"f": weight}).square().sum()
            second(batch).square().sum().backward()
            of_second.step()
            loss.backward()
            of_first.step()
            of_first.zero_grad()
            of_second.zero_grad()
            losses.append(loss.item())
        rows = [float(field.sum()) for table in cache.tables for field in cache.fields(table.name)]
        return [*losses, *weight.tolist(), *rows]


def test_what_backward_needs_is_gone_with_its_graph(batch: tc.Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    bag = compiled(tc.EmbeddingBag(CASE.schema, "f"))
    bag(batch)  # compiles it
    kept, begun = weakref.WeakSet[Any](), lookup_ops.Context.__init__

    def note(self: Any, *arguments: Any) -> None:
        begun(self, *arguments)
        kept.add(self)

    monkeypatch.setattr(lookup_ops.Context, "__init__", note)
    out = bag(batch)
    assert len(kept) == 1
    del out
    assert not kept


def test_a_copied_module_looks_up_by_itself(batch: tc.Batch) -> None:
    bag = tc.EmbeddingBag(CASE.schema, "f")
    other = copy.deepcopy(bag)
    compiled(other)(batch).sum().backward()
    assert bag.anchor.grad is None
    assert other.anchor.grad is not None


def test_importing_everything_leaves_the_compiler_alone() -> None:
    """It takes as long as all other imports; the first optimizer or compiled model of a process imports it."""
    names = ", ".join(f"tc.{name}" for name in tc.__all__)
    code = f"import sys, tiercache as tc; {names}; print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
