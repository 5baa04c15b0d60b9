"""tc.convert without a dataset: the model determines the tables, and its optimizer how their rows step."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import tiercache as tc
from tests.train.cases import tiered
from tests.train.loops import descend
from tiercache.errors import StateError
from tiercache.train.table_module import table_modules

ROWS, DIM, N = 30, 4, 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.bags = nn.ModuleDict({"seen": nn.EmbeddingBag(ROWS, DIM, mode="sum")})
        self.entity_embedding = nn.Parameter(torch.randn(ROWS, DIM))
        self.top = nn.Linear(DIM, 1)

    def forward(self, words: torch.Tensor, seen: torch.Tensor, entities: torch.Tensor) -> torch.Tensor:
        x = self.words(words).sum(dim=1) + self.bags["seen"](seen) + self.words(words[:, 0])
        x = x + torch.index_select(self.entity_embedding, dim=0, index=entities)
        x = x + functional.embedding(entities, self.entity_embedding) * self.entity_embedding[entities]
        return self.top(x)  # type: ignore[no-any-return]


def batches() -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(7)
    lows_and_shapes = (0, (N, 3)), (1, (N, 2)), (0, (N,))
    return [tuple(torch.randint(low, ROWS, shape) for low, shape in lows_and_shapes) for _ in range(8)]


def keys_of(model: nn.Module, out: Path) -> tc.PassDataset:
    schema, names = next(iter(table_modules([model]))).schema, ("words", "bags.seen", "entity_embedding")
    sets = [
        {name: [one[i].numpy().ravel() for one in batches()[p::2]] for i, name in enumerate(names)} for p in range(2)
    ]
    return tc.write_key_sets(out, schema, sets)


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Any]] = {
    "sgd": (partial(torch.optim.SGD, lr=0.02), tc.optim.SGD(learning_rate=0.02)),
    "adagrad": (
        partial(torch.optim.Adagrad, lr=0.1, eps=1e-8, initial_accumulator_value=0.1),
        tc.optim.Adagrad(learning_rate=0.1, eps=1e-8, initial_accumulator=0.1),
    ),
}


@pytest.mark.parametrize("part", ["", "0", "1"])
@pytest.mark.parametrize("how", ["like", "at and like", "keyed"])
def test_a_compiled_model_or_part_is_converted_back(tmp_path: Path, part: str, how: str) -> None:
    def net() -> Any:
        return nn.Sequential(nn.Embedding(ROWS, 4), nn.Linear(4, 1))

    torch.manual_seed(1)
    model = net()
    tc.convert(model, optimizer=tc.optim.SGD(learning_rate=0.02))
    data = tc.write_key_sets(tmp_path / "keys", model[0].schema, [{"0": np.arange(ROWS)}])
    compiled = torch.compile(model, backend="eager") if not part else model
    with tiered(tmp_path / "m.tc", data, model=model) as cache:
        for _ in cache.passes(epochs=1):
            model(torch.arange(ROWS)).sum().backward()
            cache.optimizer.step()
        with torch.no_grad():
            expected = model(torch.arange(ROWS))
        options = {"at": cache.store.commit.id} if how == "at and like" else {}
        if part:
            setattr(model, part, torch.compile(getattr(model, part), backend="eager"))
        made = tc.to_torch(compiled, cache.store, like=None if how == "keyed" else net(), **options)
        torch.testing.assert_close(made(torch.arange(ROWS)), expected)
    torch.testing.assert_close(made(torch.arange(ROWS)), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_without_schema_trains_as_torch_trains_it(tmp_path: Path, name: str, when: str) -> None:
    torch.manual_seed(1)
    theirs = Net()
    model = copy.deepcopy(theirs)
    make, rows = OPTIMIZERS[name]
    reference = make(theirs.parameters())
    if when == "before":
        optimizer = make(model.parameters())
        tc.convert(model, optimizer=optimizer, parameters=["entity_embedding"])
    else:
        tc.convert(model, optimizer=rows, parameters=["entity_embedding"])
        optimizer = make(model.parameters())
    data = keys_of(model, tmp_path / "keys")
    with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
        for p in cache.passes(epochs=3):
            for batch in batches()[p.sub_dataset :: 2]:
                expected, out = theirs(*batch), model(*batch)
                torch.testing.assert_close(out, expected)
                descend(expected.square().mean(), reference)
                descend(out.square().mean(), cache.optimizer)
            if p.index == 1:
                cache.keep("second")
                second = copy.deepcopy(theirs.state_dict())
        like = Net()  # whose parameters are views of one vector
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(like.parameters()).detach(), like.parameters())
        made = tc.to_torch(model, cache.store, like=like)
        kept = tc.to_torch(model, cache.store, at="second", like=Net()).state_dict()
    torch.testing.assert_close(dict(kept), dict(second))
    torch.testing.assert_close(dict(made.state_dict()), dict(theirs.state_dict()))
    Net().load_state_dict(made.state_dict())


def test_a_second_conversion_says_that_nothing_is_left() -> None:
    """Not that the anchors, which the first one made, may be tables."""
    model = tc.convert(
        nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1)), optimizer=tc.optim.SGD(learning_rate=1)
    )
    with pytest.raises(ValueError, match=r"its embeddings are tiercache's already \(0\): remove this call"):
        tc.convert(model)
    with pytest.raises(ValueError, match=r"'0.anchor', which is not a parameter of the model: it has none"):
        tc.convert(model, parameters=["0.anchor"])


def test_tables_are_named_for_their_modules_and_shared_by_a_tied_weight() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Embedding(10, 4), nn.Embedding(10, 4)
            self.decoder.weight = self.encoder.weight
            self.short = nn.EmbeddingBag(5, 8, dtype=torch.bfloat16)

    model: Any = tc.convert(Tied(), optimizer={"short": tc.optim.SGD(learning_rate=1.0)})
    schema = model.encoder.schema
    assert [(one.name, one.table, one.hotness) for one in schema.features] == [
        ("encoder", "encoder", "ragged"), ("decoder", "encoder", "ragged"), ("short", "short", "ragged"),
    ]  # fmt: skip
    assert [(one.name, one.dim, one.dtype) for one in schema.tables] == [
        ("encoder", 4, "float32"), ("short", 8, "bfloat16")
    ]  # fmt: skip
    assert schema.tables[1].optimizer == tc.optim.SGD(learning_rate=1.0)
    assert model.short.weight.dtype == torch.bfloat16
    assert isinstance(tc.convert(nn.Embedding(3, 2)), tc.Embedding)


def test_a_default_that_trains_otherwise_than_the_optimizer_is_refused(tmp_path: Path) -> None:
    model = tc.convert(Net(), parameters=["entity_embedding"])
    data = keys_of(model, tmp_path / "keys")
    same = torch.optim.Adagrad(model.parameters(), lr=0.01)
    tiered(tmp_path / "a.tc", data, model=model, optimizer=same).close()
    words = r"rows of \S+ step with Adagrad\(learning_rate=0.01.*, the default of .*SGD\(lr=0.5\): choose the"
    for optimizer in (None, {}):
        other = tc.convert(Net(), parameters=["entity_embedding"], optimizer=optimizer)
        with pytest.raises(StateError, match=words):
            tiered(tmp_path / "b.tc", data, model=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.5))
    later = tc.convert(Net(), parameters=["entity_embedding"])
    with tiered(tmp_path / "c.tc", data, model=later) as cache, pytest.raises(StateError, match=words):
        cache.register(optimizer=torch.optim.SGD(later.parameters(), lr=0.5))


@pytest.mark.parametrize(
    ("kind", "options", "rows"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, tc.optim.SGD(learning_rate=0.5, momentum=0.9)),
        (torch.optim.SGD, {"momentum": 0.75, "nesterov": True, "weight_decay": 0.1},
         tc.optim.SGD(learning_rate=0.5, momentum=0.75, nesterov=True, decay=0.1)),
        (torch.optim.Adam, {"weight_decay": 0.1}, tc.optim.Adam(learning_rate=0.5, decay=0.1, corrected_eps=True)),
        (torch.optim.AdamW, {}, tc.optim.Adam(learning_rate=0.5, decay=0.01, decoupled=True, corrected_eps=True)),
        (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True},
         tc.optim.Adam(learning_rate=0.5, decay=0.1, decoupled=True, corrected_eps=True)),
    ],
)  # fmt: skip
def test_rows_step_as_the_optimizer_of_torch_on_the_rows_of_a_batch(kind: Any, options: Any, rows: Any) -> None:
    model: Any = Net()
    with pytest.warns(UserWarning, match=r"is trained by \w+.* which moves every row in every step"):
        model = tc.convert(model, optimizer=kind(model.parameters(), lr=0.5, **options))
    assert model.words.schema.tables[0].optimizer == rows


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    model(*batches()[0]).sum().backward()
    optimizer.step()
    return optimizer


REFUSED: dict[str, tuple[Callable[[Net], dict[str, Any]], str]] = {
    "a stepped optimizer": (
        lambda model: {"optimizer": trained(model)}, "Adagrad has trained .* already, and its state would be lost",
    ),
    "an unknown optimizer": (
        lambda model: {"optimizer": torch.optim.NAdam(model.parameters())},
        r"words is trained by NAdam, but no row optimizer does the same: choose one, as in tc.convert\(model, optim",
    ),
    "a setting that rows do not have": (
        lambda model: {"optimizer": torch.optim.Adagrad(model.parameters(), lr_decay=0.5)},
        r"words is trained by Adagrad\(lr_decay=0.5\), but no row optimizer does the same",
    ),
    "dampening": (
        lambda model: {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)},
        r"words is trained by SGD\(dampening=0.5\), but no row optimizer does the same",
    ),
    "an optimizer of something else": (
        lambda model: {"optimizer": torch.optim.SGD(model.top.parameters(), lr=0.1)},
        "words is in none of the given optimizers",
    ),
    "an unknown module": (
        lambda _: {"optimizer": {"user": tc.optim.SGD()}}, "optimizer= names 'user', but tc.convert replaces words, ba",
    ),
    "an unknown parameter": (
        lambda _: {"parameters": ["entity"]}, "parameters= names 'entity', which is not a parameter of the model: it",
    ),
    "a parameter that is no table": (
        lambda _: {"parameters": ["top.bias"]}, r"the parameter top.bias has shape \(1,\): expected a table",
    ),
    "features without data": (lambda _: {"features": {"words": "words"}}, "features= maps modules to features of a d"),
    "float64": (lambda model: model.double() and {}, "the weight of words is torch.float64, but vectors of rows are f"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:the weight of")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_done_exactly_is_refused(what: str) -> None:
    model = Net()
    change, words = REFUSED[what]
    options = change(model)
    kinds, groups = [type(one) for one in model.modules()], options.get("optimizer")
    before = [*map(id, groups.param_groups[0]["params"])] if hasattr(groups, "param_groups") else []
    with pytest.raises(ValueError, match=words):
        tc.convert(model, **options)
    assert [type(one) for one in model.modules()] == kinds
    assert before == ([*map(id, groups.param_groups[0]["params"])] if before else [])


class Slotted:
    __slots__ = ("kept",)

    def __init__(self, weight: Any) -> None:
        self.kept = weight


def nested(value: Any, depth: int) -> Any:
    return [nested(value, depth - 1)] if depth else value


def near(model: Any) -> None:
    """Keep a nest of lists far away first, then near; it also refers to itself."""
    inner = nested(model.words.weight, 3)
    inner.append(inner)
    model.far, model.near = nested(inner, 9), inner


CAPTURED: dict[str, tuple[Callable[[Any], object], str]] = {
    "an object": (lambda m: setattr(m, "holder", SimpleNamespace(weight=m.words.weight)), "holder.weight"),
    "a partial": (lambda m: setattr(m, "penalty", partial(torch.sum, m.words.weight)), r"an argument of penalty\[0\]"),
    "a default": (
        lambda m: setattr(m, "penalty", lambda weight=m.words.weight: weight.sum()), r"a default of penalty\[0\]",
    ),
    "the module in a list": (lambda m: setattr(m, "regularized", [m.words]), r"regularized\[0\].weight"),
    "an optimizer": (
        lambda m: setattr(m, "own", torch.optim.SGD(m.parameters(), lr=0.1)), r"own.param_groups\[0\]\['params'\]",
    ),
    "its class": (
        lambda m: setattr(m, "__class__", type("Own", (Net,), {"regularized": [m.words.weight]})), r"regularized\[0\]",
    ),
    "a deep nest": (lambda m: setattr(m, "nest", nested(m.words.weight, 30)), r"nest(\[0\]){30}"),
    "a nest that is also near": (near, r"near(\[0\])+"),
    "slots": (lambda m: setattr(m, "slotted", Slotted(m.words.weight)), "slotted.kept"),
    "a bound forward": (lambda m: setattr(m, "lookup", m.words.forward), "lookup.__self__.weight"),
    "a module in a dict": (
        lambda m: setattr(m, "others", {"tied": nn.ParameterList([m.words.weight])}),
        r"others\['tied'\]._parameters\['0'\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CAPTURED)
def test_a_weight_that_the_model_reaches_elsewhere_is_refused(what: str) -> None:
    model = Net()
    change, words = CAPTURED[what]
    change(model)
    with pytest.raises(ValueError, match=rf"the weight of \w+ is also {words}"):
        tc.convert(model)


def test_references_from_outside_the_model_warn() -> None:
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tc.convert(Net(), parameters=["entity_embedding"])
    saved = {"words": model.words.weight}
    with pytest.warns(UserWarning, match="the weight of words is also in a dict of 1 outside the model"):
        tc.convert(model, parameters=["entity_embedding"])
    assert saved


def test_parameters_that_are_looked_up_are_found_and_named() -> None:
    class Triples(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.entity_embedding = nn.Parameter(torch.zeros(9, 4))
            self.relation_embedding = nn.Parameter(torch.zeros(3, 4))
            self.modulus = nn.Parameter(torch.zeros(1, 1))

        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            head = torch.index_select(self.entity_embedding, dim=0, index=sample[:, 0])
            return head + self.relation_embedding[sample[:, 1]] * self.modulus

    with pytest.raises(
        ValueError, match=r"tc.convert\(model, parameters=\['entity_embedding', 'relation_embedding'\]\)"
    ):
        tc.convert(Triples())
    with pytest.warns(UserWarning, match="looks up rows in its parameters entity_embedding, which stay"):
        tc.convert(Net())


def test_a_parameter_table_answers_as_the_parameter_did(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = Net()
    weight = model.entity_embedding.detach().clone()
    tc.convert(model, parameters=["entity_embedding"], filter_fn=lambda *_: False)
    data = tc.write_key_sets(tmp_path / "k", model.entity_embedding.schema, [{"entity_embedding": np.arange(ROWS)}])  # type: ignore[arg-type]
    table: Any = model.entity_embedding
    keys, mask = torch.tensor([[3, 5], [29, 0]]), torch.arange(ROWS) % 7 == 1
    with tiered(tmp_path / "m.tc", data, model=model), torch.no_grad():
        for index in (
            keys, keys[0], 4, -1, slice(2, 9, 3), [1, 2], mask, keys - 5, keys.numpy(), (keys, slice(1, 3)), (keys, 2),
            (keys, None), (keys, Ellipsis, 2), (keys, None, torch.tensor(2)), (keys, slice(1, 3), None),
            (3, keys[0] % DIM), (torch.tensor(3), [0, 2]), (slice(2, 9, 3), np.array([0, 2])),
            (slice(2, 9, 3), torch.tensor([True, False, True, False])),
        ):  # fmt: skip
            torch.testing.assert_close(table[index], weight[index], rtol=0, atol=0)
        torch.testing.assert_close(functional.embedding(keys, table), weight[keys], rtol=0, atol=0)
        torch.testing.assert_close(table.index_select(0, keys[0]), weight[keys[0]], rtol=0, atol=0)
        assert (table.shape, table.size(0), table.ndim, len(table)) == ((ROWS, DIM), ROWS, 2, ROWS)
        for use in ("norm", "data", "t"):
            with pytest.raises(AttributeError, match="is not defined for the table 'entity_embedding', whose rows are"):
                getattr(table, use)
        for call in (
            lambda: torch.nn.functional.linear(torch.zeros(1, DIM), table),
            lambda: functional.embedding(keys, table, max_norm=1.0),
            lambda: torch.index_select(table, 1, torch.tensor([0])),
            lambda: torch.norm(table),
            lambda: table[True],
            lambda: table[keys[0], keys[0] % DIM],
            lambda: table[keys[0], [0, 2]],
            lambda: table[[1, 2], np.array([0, 2])],
            lambda: table[mask, torch.tensor([True, False, True, False])],
            lambda: table[keys, True],
        ):
            with pytest.raises(TypeError, match="is not defined for the table 'entity_embedding'"):
                call()
        for bad in (keys + ROWS, keys - ROWS):
            with pytest.raises(IndexError, match=r"outside \[0, 30\)"):
                functional.embedding(bad, table)


def test_original_models_of_another_shape_are_refused(tmp_path: Path) -> None:
    model = tc.convert(Net(), parameters=["entity_embedding"])
    data = keys_of(model, tmp_path / "keys")
    with tiered(tmp_path / "m.tc", data, model=model) as cache:
        cache.restore()
    narrow, short, more = Net(), Net(), Net()
    narrow.words, short.words = nn.Embedding(ROWS, DIM + 1), nn.Embedding(ROWS - 5, DIM)
    more.other = nn.Linear(1, 1)
    with tc.Store.open(tmp_path / "m.tc", mode="r") as store:
        for like, words in (
            (narrow, "words.weight has 5 columns in like=, but table 'words' has 4"),
            (short, r"table 'words' has the key \d+, but the embedding of like= has 25 rows"),
            (more, "like= has other.weight, which the model does not have"),
            (nn.Linear(1, 1), "like= has no embedding 'words', which the model has"),
        ):
            with pytest.raises(ValueError, match=words):
                tc.to_torch(model, store, like=like)


PENALTIES: dict[str, Callable[[Any], Any]] = {
    "squares of a module": lambda model: sum(one.square().sum() for one in model.words.parameters()),
    "norms of all": lambda model: sum(torch.norm(one) for one in model.parameters()),
    "absolute values": lambda model: torch.cat([one.flatten() for one in model.parameters()]).abs().sum(),
}


@pytest.mark.parametrize(
    ("what", "weight"), [*((what, 1e-7) for what in PENALTIES), ("norms of all", 0.0), ("norms of all", 0.1)]
)
def test_a_penalty_on_parameters_is_refused_at_its_first_step(tmp_path: Path, what: str, weight: float) -> None:
    """It contains no rows; torch's did. One with weight 0 does nothing in either."""
    model = tc.convert(Net(), parameters=["entity_embedding"])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    data = keys_of(model, tmp_path / "keys")
    with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
        for p in cache.passes(epochs=1):
            (model(*batches()[p.sub_dataset]).mean() + weight * PENALTIES[what](model)).backward()
            words = r"as with a penalty on model.parameters.*on the outputs of lookups"
            with pytest.raises(StateError, match=words) if weight else nullcontext():
                cache.optimizer.step()
            cache.optimizer.zero_grad()
            p.skip()
