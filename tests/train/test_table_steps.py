"""Adam counts the steps of each table as SparseAdam counts a parameter's, also for tables that share a group."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.train.cases import Case, Spec, open_store, resident, table, tiered
from tests.train.oracle import Oracle
from tiercache.values.lookups import Span, feature_spans, position_spans

RATE = 0.1
NAMES = ("a", "b", "c")
CASE = Case(
    tables=tuple(table(name, 4, tc.optim.Adam(learning_rate=RATE)) for name in NAMES),
    specs=(
        Spec(name="f", table="a"),
        Spec(name="g", table="b", hotness="multi_hot", mode="mean"),
        Spec(name="h", table="c", hotness="ragged", mode="max"),
        Spec(name="i", table="a", hotness="ragged", weighted=True),
        Spec(name="j", table="c"),
    ),
    num_samples=256,
    pass_rows=128,
    num_keys=30,
)
"""Three tables of one layout, hence one group, with rows looked up in every way."""


MODES = {spec.name: spec.mode for spec in CASE.specs}
FEATURES = {name: [spec.name for spec in CASE.specs if spec.table == name] for name in NAMES}


def bags_of(schema: tc.Schema, features: list[str]) -> tc.EmbeddingBagCollection:
    return tc.EmbeddingBagCollection(schema, features, mode={name: MODES[name] for name in features})


@pytest.mark.sampled(6)
@pytest.mark.parametrize("how", ["dropped", "frozen", "left out"])
@pytest.mark.parametrize("seed", range(4))
def test_a_table_counts_the_steps_that_it_took(passes: tc.PassDataset, seed: int, how: str) -> None:
    """Not by dropped gradients, a frozen module or a missing lookup. Tables step at random, each from a batch on."""
    cache = resident(passes)
    model = nn.ModuleList(bags_of(cache.schema, FEATURES[name]) for name in NAMES)
    reference, chance = Oracle(CASE, passes, cache.device), np.random.default_rng(seed)
    optimizers = [torch.optim.SGD(bag.parameters(), lr=0.1) for bag in model]
    if how == "frozen":
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)] * len(NAMES)
    cache.register(model=model, **{f"o{i}": one for i, one in enumerate(dict.fromkeys(optimizers))})
    stepped = [cache.optimizer.part(one) for one in optimizers]
    begins, steps = chance.permutation([0, 3, 9]), dict.fromkeys(NAMES, 0)
    batches = ((p.sub_dataset, batch) for p in cache.passes(epochs=1) for batch in p.batches(16))
    for i, (sub_dataset, batch) in enumerate(batches):
        ready = [name for name, first in zip(NAMES, begins, strict=True) if i >= first]
        due = {name for name in ready if chance.random() < 0.6} or {ready[0]}
        loss, other = torch.zeros(()), torch.zeros(())
        for t, (name, bag) in enumerate(zip(NAMES, model, strict=True)):
            if how == "frozen":
                bag.requires_grad_(name in due)
            if how == "left out" and name not in due:
                continue
            loss = loss + (t + 1) * bag(batch).square().mean().cpu()
            other = other + (t + 1) * reference.bags(batch, sub_dataset, features=FEATURES[name]).square().mean()
        loss.backward()
        other.backward()
        reference.step(due)
        for name, optimizer in zip(NAMES, stepped, strict=True):
            if how != "dropped" or name in due:
                optimizer.step()
            optimizer.zero_grad()
            steps[name] += name in due
    assert {g["table"]: g["step"] for g in cache.optimizer.rows.param_groups} == steps
    assert len({*steps.values()}) > 1
    assert reference.difference(cache) < 2e-6


@pytest.mark.parametrize("seed", range(6))
def test_tables_of_one_module_step_by_their_own_numbers(passes: tc.PassDataset, seed: int) -> None:
    """If a module of one table, or an output of one feature, stepped in between, in any order of both."""
    cache = resident(passes)
    every, own = bags_of(cache.schema, [*MODES]), bags_of(cache.schema, FEATURES["c"])
    rows = tc.EmbeddingCollection(cache.schema, ["f", "j", "g"])
    optimizer = torch.optim.SGD([*every.parameters(), *own.parameters(), *rows.parameters()], lr=0.1)
    cache.register(model=nn.ModuleList([every, own, rows]), optimizer=optimizer)
    optimizer = cache.optimizer
    reference, chance, steps = Oracle(CASE, passes, cache.device), np.random.default_rng(seed), dict.fromkeys(NAMES, 0)
    for p in cache.passes(epochs=2):
        for batch in p.batches(16):
            uses = chance.permutation(3)[: chance.integers(1, 4)]
            loss, other = torch.zeros(()), torch.zeros(())
            for use in uses:
                if use == 2:  # the vectors of one feature, of which there are others in the output
                    loss = loss + rows(batch)["j"].square().mean().cpu()
                    other = other + reference.bags(batch, p.sub_dataset, features=["j"]).square().mean()
                else:
                    names = [*MODES] if use == 0 else FEATURES["c"]
                    loss = loss + (every if use == 0 else own)(batch).square().mean().cpu()
                    other = other + reference.bags(batch, p.sub_dataset, features=names).square().mean()
            due = {*NAMES} if 0 in uses else {"c"}
            loss.backward()
            other.backward()
            reference.step(due)
            optimizer.step()
            optimizer.zero_grad()
            for name in due:
                steps[name] += 1
    assert {g["table"]: g["step"] for g in cache.optimizer.rows.param_groups} == steps
    assert len({*steps.values()}) > 1
    assert reference.difference(cache) < 5e-6


def test_an_embedding_without_any_id_in_the_batch_counts_as_it_does_in_torch(tmp_path: Path) -> None:
    """SparseAdam counts a gradient without rows; so do rows, on one rank and on several, if another has some."""
    schema = tc.Schema(
        features=(tc.Feature(name="f", table="a"), tc.Feature(name="g", table="b", hotness="ragged")),
        tables=CASE.tables[:2],
    )
    keys = np.arange(4)
    passes = tc.write_key_sets(tmp_path / "keys", schema, [{"a": keys, "b": keys}])
    cache = resident(passes)
    bag = tc.EmbeddingBagCollection(schema)
    cache.register(model=bag, optimizer=torch.optim.SGD(bag.parameters(), lr=0.1))
    weight = nn.Parameter(torch.zeros(4, 4))
    optimizer = torch.optim.SparseAdam([weight], lr=RATE)
    for p in cache.passes(epochs=1):
        for number in (4, 0, 0, 4):
            offsets = np.minimum(np.arange(5), number)
            bag(p.batch({"f": keys, "g": (keys[:number], offsets)})).sum().backward()
            cache.optimizer.step()
            ends = torch.from_numpy(offsets[:-1].copy())
            nn.functional.embedding_bag(
                torch.from_numpy(keys[:number]), weight, ends, mode="sum", sparse=True
            ).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [g["step"] for g in cache.optimizer.rows.param_groups] == [4, 4]
    assert optimizer.state[weight]["step"] == 4


@pytest.mark.parametrize("missing", ["init", "zero"])
def test_gradients_beside_missing_keys_step_by_their_tables_numbers(tmp_path: Path, missing: Any) -> None:
    """Entries of missing keys are left out, which shifts those of the following tables."""
    held, few = np.arange(20), np.arange(14)
    rows = {}
    for lacking in (False, True):
        passes = tc.write_key_sets(
            tmp_path / f"{lacking}", CASE.schema, [dict.fromkeys(NAMES, few if lacking else held)]
        )
        cache = resident(passes)
        every, own = bags_of(cache.schema, [*MODES]), bags_of(cache.schema, FEATURES["b"])
        cache.register(model=nn.ModuleList([every, own]), optimizer=torch.optim.SGD(every.parameters(), lr=0.1))
        chance = np.random.default_rng(3)
        for p in cache.passes(epochs=1):
            for i in range(6):
                drawn = chance.integers(0, 20, (5, 8))
                keys = {
                    "f": drawn[0], "j": drawn[1], "g": np.stack([drawn[2]] * 3, axis=1),
                    "h": (drawn[3], np.arange(9)), "i": (drawn[4], np.arange(9)),
                }  # fmt: skip
                weights = {"i": np.ones(8, np.float32)}
                batch = p.batch(keys, weights=weights, missing=missing)
                out = (own if i % 2 else every)(batch)
                out.backward(torch.ones_like(out))
                cache.optimizer.step()
        for name in NAMES:
            order = np.argsort(cache.keys(name))
            rows[lacking, name] = cache.fields(name)[0][order][: few.size]
    for name in NAMES:
        assert np.array_equal(rows[False, name], rows[True, name])


@pytest.mark.parametrize("optimizer", [tc.optim.SGD(learning_rate=RATE), tc.optim.Adam(learning_rate=RATE)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_goes_by_the_steps_of_the_table(tmp_path: Path, dtype: str, optimizer: Any) -> None:
    """16-bit rows end with the bits that they have alone, whatever another table of their layout does."""
    tables = tuple(table(name, 8, optimizer, dtype=dtype) for name in ("a", "b"))
    specs = tuple(Spec(name=f"of_{one.name}", table=one.name) for one in tables)
    ends = []
    for others in (True, False):
        case = Case(tables=tables, specs=specs, num_keys=20)
        passes = case.cut(tmp_path / str(others))
        cache = resident(passes)
        bag, other = (tc.EmbeddingBag(cache.schema, spec.name) for spec in specs)
        cache.register(model=nn.ModuleList([bag, other]), optimizer=torch.optim.SGD(bag.parameters(), lr=1.0))
        for p in cache.passes(epochs=1):
            for i, batch in enumerate(p.batches(16)):
                bag(batch).square().mean().backward()
                if others and i % 3:
                    other(batch).square().mean().backward()
                cache.optimizer.step()
        ends.append(cache.fields("a")[0])
    assert np.array_equal(*ends)


def test_a_resumed_training_goes_on_with_the_steps_of_each_table(tmp_path: Path, passes: tc.PassDataset) -> None:
    """Killed between two passes or in the middle of one, by a store whose commits keep the steps of tables."""

    def train(path: Path, stops: tuple[int, ...]) -> tuple[dict[str, int], list[Any]]:
        done = 0
        for stop in (*stops, 1000):
            with open_store(path, CASE, "lmdb") as store, tiered(store, passes) as cache:
                modules = [bags_of(cache.schema, FEATURES[name]) for name in NAMES]
                model = nn.ModuleList(modules)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                cache.register(model=model, optimizer=optimizer)
                optimizer = cache.optimizer
                for p in cache.passes(epochs=1):
                    for batch in p.batches(16):
                        for t in {0, done % 3}:
                            modules[t](batch).square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        done += 1
                        if done == stop:
                            break
                    if done == stop:
                        cache.commit()
                        break
                steps = {g["table"]: g["step"] for g in cache.optimizer.rows.param_groups}
        with tc.Store.open(path, mode="r") as store:
            return steps, [np.sort(fields["vector"], axis=0) for _, fields in sorted_rows(store)]

    def sorted_rows(store: tc.Store) -> list[tuple[str, Any]]:
        return [(name, store.lookup(name, np.sort(np.concatenate([k for k, _ in store.scan(name)])))) for name in NAMES]

    once, often = train(tmp_path / "once.tc", ()), train(tmp_path / "often.tc", (3, 8, 13))
    assert once[0] == often[0] == {"a": 16, "b": 5, "c": 5}
    assert all(np.array_equal(*pair) for pair in zip(once[1], often[1], strict=True))


def test_spans_are_those_of_features_and_of_positions() -> None:
    assert feature_spans(["a", "b"], np.array([0, 2, 2])) == [Span("a", 0, 2), Span("b", 2, 2)]
    positions = np.array([0, 3, 4, 9, 2, 5], np.int32)
    found = position_spans({"a": 0, "none": 4, "b": 4, "c": 9, "last": 10}, positions)
    assert found == [Span("a", 0, 2), Span("b", 2, 3), Span("c", 3, 4), Span("a", 4, 5), Span("b", 5, 6)]
    assert position_spans({"a": 0}, np.empty(0, np.int32)) == []
