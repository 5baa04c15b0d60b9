"""A module, the dataset and the store have one schema: no lookup reads a row with another schema's dim or hotness."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.train.cases import Case, Spec, open_store, table, tiered
from tests.train.test_bad_input import one_sentence
from tiercache.errors import DatasetError

CASE = Case(
    tables=(table("a", 4), table("b", 4)),
    specs=(
        Spec(name="f", table="a"),
        Spec(name="g", table="b", hotness="multi_hot"),
        Spec(name="h", table="b", hotness="ragged", weighted=True),
    ),
)


def edited(what: str, name: str, **change: Any) -> tc.Schema:
    """Return the schema of the case with another field of a feature or a table."""
    parts = getattr(CASE.schema, what)
    return replace(CASE.schema, **{what: tuple(replace(p, **change) if p.name == name else p for p in parts)})


EDITED = {
    "a larger dim": (edited("tables", "a", dim=8), "table 'a'", "dim 8", "dim 4"),
    "a smaller dim": (edited("tables", "a", dim=1), "table 'a'", "dim 1", "dim 4"),
    "a dim far larger": (edited("tables", "b", dim=512), "table 'b'", "dim 512", "dim 4"),
    "a dtype": (edited("tables", "b", dtype="bfloat16"), "table 'b'", "dtype 'bfloat16'", "dtype 'float32'"),
    "an optimizer": (edited("tables", "a", optimizer=tc.optim.Adam()), "table 'a'", "optimizer Adam(", "optimizer "),
    "a learning rate": (
        edited("tables", "a", optimizer=replace(CASE.tables[0].optimizer, learning_rate=7.5)),
        "table 'a'", "learning_rate=7.5", "optimizer ",
    ),
    "an initializer": (
        edited("tables", "b", initializer=tc.init.Constant(value=3)), "table 'b'", "Constant(value=3", "initializer ",
    ),
    "a seed": (edited("tables", "a", seed=99), "table 'a'", "seed 99", "seed 7"),
    "several keys for one": (
        edited("features", "f", hotness="multi_hot", length=3), "feature 'f'", "hotness 'multi_hot'", "'one_hot'",
    ),
    "one key for several": (
        edited("features", "g", hotness="one_hot", length=None), "feature 'g'", "hotness 'one_hot'", "'multi_hot'",
    ),
    "any number of keys for three": (
        edited("features", "g", hotness="ragged", length=None), "feature 'g'", "hotness 'ragged'", "'multi_hot'",
    ),
    "a length": (edited("features", "g", length=2), "feature 'g'", "length 2", "length 3"),
    "no weights": (edited("features", "h", weights=None), "feature 'h'", "weights None", "weights 'h_w'"),
    "another table": (edited("features", "g", table="a"), "feature 'g'", "table 'a'", "table 'b'"),
    "a feature that is not there": (
        replace(CASE.schema, features=(*CASE.schema.features, tc.Feature(name="new", table="a"))),
        "feature 'new'", "f, g, h",
    ),
}  # fmt: skip
"""An edited schema, and the error about it."""
MODULES: dict[str, Callable[[tc.Schema, str], torch.nn.Module]] = {
    "bags": lambda schema, _: tc.EmbeddingBagCollection(schema),
    "rows": lambda schema, _: tc.EmbeddingCollection(schema),
    "one": tc.Embedding,
    "bag": tc.EmbeddingBag,
}


def feature_of(schema: tc.Schema, words: tuple[str, ...]) -> str:
    name = words[0].split("'")[1]
    return next(one.name for one in schema.features if name in {one.name, one.table})


@pytest.mark.sampled(120)
@pytest.mark.parametrize("edit", EDITED)
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("when", ["given", "registered", "in memory", "looked up"])
def test_a_module_of_an_edited_schema_is_refused_before_its_first_lookup(
    tmp_path: Path, passes: tc.PassDataset, when: str, kind: str, edit: str
) -> None:
    schema, *words = EDITED[edit]
    module = MODULES[kind](schema, feature_of(schema, tuple(words)))
    model = torch.nn.Sequential(torch.nn.Identity(), module)
    words += [type(module).__name__, str(passes.path) if when != "looked up" else "pass 0", "create the module with"]
    words += ["an unregistered"] if when == "looked up" else ["1'"]
    if when == "given":
        with one_sentence(DatasetError, *words, "model.1"):
            tc.TierCache(tmp_path / "new.tc", passes, model=model, device_budget="1MiB", host_budget="16MiB")
        assert not (tmp_path / "new.tc").exists()
        return
    if when == "in memory":
        with one_sentence(DatasetError, *words):
            tc.InMemoryCache(passes, model=model)
        return
    with open_store(tmp_path, CASE, "memory") as store, tiered(store, passes) as cache:
        if when == "registered":
            with one_sentence(DatasetError, *words, "net.1"):
                cache.register(net=model)
            assert not cache.dense.objects
            return
        loop = cache.passes(epochs=1)
        batch = next(next(loop).batches(16))
        with one_sentence(DatasetError, *words):
            module(batch)


@pytest.mark.parametrize("edit", ["a larger dim", "a length", "another table"])
@pytest.mark.parametrize("by", ["raw keys", "keys outside the pass", "evaluated keys", "evaluation"])
def test_batches_of_every_origin_know_their_schema(passes: tc.PassDataset, tmp_path: Path, by: str, edit: str) -> None:
    """Batches of keys have their own rows, and batches of an evaluation those of another dataset."""
    schema, *words = EDITED[edit]
    module = tc.EmbeddingBagCollection(schema)
    keys = {
        name: passes.passes[0].keys(t)[:1].repeat(n) for name, t, n in (("f", "a", 1), ("g", "b", 3), ("h", "b", 1))
    }
    keys["g"] = keys["g"].reshape(1, 3)
    with open_store(tmp_path, CASE, "memory") as store, tiered(store, passes) as cache:
        loop = cache.passes(epochs=1)
        p = next(loop)
        if by == "raw keys":
            batch = p.batch(keys)
        elif by == "keys outside the pass":
            batch = p.batch(keys | {"f": np.array([1 << 40])}, missing="init")
        elif by == "evaluated keys":
            batch = cache.evaluate_batch(keys)
        else:
            batch = next(next(cache.evaluate(passes)).batches(16))
        with one_sentence(DatasetError, *words):
            module(batch)
        with torch.no_grad():
            assert torch.isfinite(tc.EmbeddingBagCollection(passes.schema)(batch)).all()


def test_a_module_of_an_equal_schema_is_taken(passes: tc.PassDataset) -> None:
    """For example from reading the file again; compression concerns the store alone, and a label no module."""
    tables = tuple(replace(one, compression="zstd") for one in CASE.tables)
    module = tc.EmbeddingBagCollection(replace(CASE.schema, tables=tables, label=None))
    cache = tc.InMemoryCache(passes, model=module)
    loop = cache.passes(epochs=1)
    batch = next(next(loop).batches(16))
    assert torch.equal(module(batch), tc.EmbeddingBagCollection(passes.schema)(batch))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 8}, ["dim 8", "4"]),
        ({"dtype": "float16"}, ["dtype 'float16'", "'float32'"]),
        ({"optimizer": tc.optim.Adagrad(learning_rate=0.5)}, ["optimizer Adagrad(", "learning_rate=0.5"]),
        ({"initializer": tc.init.Zeros()}, ["initializer Zeros()"]),
        ({"seed": 3}, ["seed 3", "7"]),
    ],
)
def test_a_dataset_of_other_tables_names_both_values(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    """An open store is compared in the same way as the module."""
    other = replace(CASE, tables=(replace(CASE.tables[0], **change), CASE.tables[1])).cut(tmp_path / "others")
    with (
        open_store(tmp_path, CASE, "memory") as store,
        one_sentence(DatasetError, "table 'a'", "extract again", *words),
    ):
        tiered(store, other)
