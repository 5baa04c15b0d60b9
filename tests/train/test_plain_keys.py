"""Plain tensors of keys in forward: models do not change, and train to torch's losses."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import tiercache as tc
from tests.train.cases import tiered
from tests.train.test_bad_input import one_sentence
from tiercache.errors import KeyNotInPassError, StateError

ITEMS, USERS, DIM, LENGTH, BATCH = 120, 60, 8, 6, 16
RATE, DENSE_RATE, PASSES, STEPS = 0.1, 0.05, 4, 50


TRANSFORMS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], tuple[str, ...]]] = {
    "grad": (
        lambda model, keys: torch.func.grad(
            lambda parameters: torch.func.functional_call(model, parameters, (keys,)).square().mean()
        )({name: one.detach() for name, one in model.named_parameters()}),
        ("keys of 'emb' were looked up inside a transform of torch.func", "outside of it"),
    ),
    "vmap": (
        lambda model, keys: torch.vmap(model)(keys),
        ("keys of 'emb' were looked up inside a transform of torch.func", "pass it the vectors"),
    ),
    "trace": (
        lambda model, keys: torch.jit.trace(model, (keys,), check_trace=False),
        ("keys of 'emb' were looked up while the model was traced or exported", "tc.to_torch"),
    ),
    "export": (
        lambda model, keys: torch.export.export(model, (keys,)),
        ("keys of 'emb' were looked up while the model was traced or exported", "tc.to_torch"),
    ),
    "updated parameters": (
        lambda model, keys: torch.func.functional_call(
            model, {name: one - 0.5 for name, one in model.named_parameters()}, (keys,)
        ),
        ("that looks up 'emb' was replaced by a computed tensor", "dense modules only"),
    ),
    "batched gradients": (
        lambda model, keys: torch.autograd.grad(
            model(keys).flatten(), [*model.parameters()], torch.eye(keys.numel()), is_grads_batched=True
        ),
        ("gradients of the rows of 'emb' came in batches", "for each output"),
    ),
}


@pytest.mark.parametrize("what", TRANSFORMS)
def test_transforms_of_functions_are_refused(tmp_path: Path, what: str) -> None:
    model: Any = nn.Sequential(OrderedDict(emb=nn.Embedding(USERS, DIM), top=nn.Linear(DIM, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    tc.convert(model, optimizer=optimizer)
    data = tc.write_key_sets(tmp_path / "keys", model.emb.schema, [{"emb": np.arange(USERS)}])
    call, words = TRANSFORMS[what]
    keys = torch.tensor([[1, 2, 3], [3, 4, 5]])
    with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
        for _ in cache.passes(epochs=1):
            with one_sentence(StateError, *words):
                call(model, keys)
            cache.optimizer.zero_grad()
            model(keys).square().mean().backward()
            cache.optimizer.step()


@pytest.mark.parametrize("when", ["before the cache", "in the pass"])
def test_copies_that_are_not_registered_look_up_the_current_rows(tmp_path: Path, when: str) -> None:
    """An average, a frozen copy and a copy of one; another process's model, or a copy of a lost one, does not."""
    model: Any = nn.ModuleDict({"emb": nn.Embedding(USERS, DIM)})
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    tc.convert(model, optimizer=optimizer)
    data = tc.write_key_sets(tmp_path / "keys", model["emb"].schema, [{"emb": np.arange(USERS)}])
    keys = torch.arange(USERS)

    def copies() -> list[Any]:
        frozen = copy.deepcopy(model).requires_grad_(False)
        return [AveragedModel(model).module["emb"], frozen["emb"], copy.deepcopy(frozen)["emb"]]

    made = copies() if when == "before the cache" else []
    with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
        for _ in cache.passes(epochs=1):
            made = made or copies()
            for _ in range(2):
                with torch.no_grad():
                    rows = model["emb"](keys)
                    assert all(torch.equal(one(keys), rows) for one in made)
                assert not made[1](keys).requires_grad
                model["emb"](keys).square().mean().backward()
                cache.optimizer.step()
                cache.optimizer.zero_grad()
        state = made[1].__getstate__() | {"_process": "another"}
        made[1].__setstate__(state)
        with torch.no_grad(), one_sentence(StateError, "belongs to no cache", "pass its model to the cache"):
            made[1](keys)


class Sequences(nn.Module):
    """A small SASRec: embeddings are scaled in place, masked and sliced; candidates are scored."""

    def __init__(self) -> None:
        super().__init__()
        self.item_emb = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.position = nn.Parameter(torch.randn(LENGTH, DIM) * 0.1)
        self.mix = nn.Linear(DIM, DIM)

    def states(self, seq: torch.Tensor) -> torch.Tensor:
        seqs = self.item_emb(seq)
        seqs *= self.item_emb.embedding_dim**0.5
        seqs = seqs + self.position[None, : seq.shape[1]]
        mask = seq == 0
        seqs = seqs * ~mask.unsqueeze(-1)
        return torch.tanh(self.mix(seqs))

    def forward(self, seq: torch.Tensor, pos: torch.Tensor, neg: torch.Tensor) -> torch.Tensor:
        states = self.states(seq)
        pos_logits = (states * self.item_emb(pos)).sum(dim=-1)
        neg_logits = (states * self.item_emb(neg)).sum(dim=-1)
        kept = torch.where(pos != 0)
        loss = nn.BCEWithLogitsLoss()
        return loss(pos_logits[kept], torch.ones_like(pos_logits[kept])) + loss(
            neg_logits[kept], torch.zeros_like(neg_logits[kept])
        )

    @torch.no_grad()
    def predict(self, seq: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        return self.item_emb(candidates) @ self.states(seq)[:, -1, :].unsqueeze(-1)


class Crosses(nn.Module):
    """A small DLRM: a list of bags with offsets, and weights of samples in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(
            [nn.EmbeddingBag(USERS, DIM, mode="sum", sparse=True), nn.EmbeddingBag(ITEMS, DIM, mode="sum", sparse=True)]
        )
        self.scale = nn.Parameter(torch.ones(()))
        self.bot, self.top = nn.Linear(3, DIM), nn.Linear(DIM + 3, 1)

    def forward(self, dense: torch.Tensor, offsets: Any, keys: Any, label: torch.Tensor) -> torch.Tensor:
        weights = [None, self.scale * torch.ones(keys[1].shape[0])]
        x = torch.relu(self.bot(dense))
        parts = [one(k, o, per_sample_weights=w) for one, k, o, w in zip(self.emb_l, keys, offsets, weights)]  # noqa: B905
        vectors = torch.stack([x, *parts], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = torch.tril_indices(3, 3, offset=-1)
        logits = self.top(torch.cat([x, products[:, rows, columns]], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, label)


class SkipGram(nn.Module):
    """Word vectors: two tables, and negatives of any number."""

    def __init__(self) -> None:
        super().__init__()
        self.u_emb, self.v_emb = nn.Embedding(ITEMS, DIM, sparse=True), nn.Embedding(ITEMS, DIM, sparse=True)

    def forward(self, center: torch.Tensor, around: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        u, v, n = self.u_emb(center), self.v_emb(around), self.v_emb(negative)
        score = nn.functional.logsigmoid((u * v).sum(1))
        others = nn.functional.logsigmoid(-torch.bmm(n, u.unsqueeze(2)).squeeze(2)).sum(1)
        return -(score + others).mean()


def sequences(chance: np.random.Generator) -> tuple[Any, dict[str, Any]]:
    seq = chance.integers(1, ITEMS, (BATCH, LENGTH)) * (chance.random((BATCH, LENGTH)) < 0.8)
    pos = chance.integers(1, ITEMS, (BATCH, LENGTH)) * (seq != 0)
    neg = chance.integers(1, ITEMS, (BATCH, LENGTH)) * (seq != 0)
    return tuple(map(torch.from_numpy, (seq, pos, neg))), {"item_emb": np.stack([seq, pos, neg])}


def crosses(chance: np.random.Generator) -> tuple[Any, dict[str, Any]]:
    counts = chance.integers(0, 4, (2, BATCH))
    counts[:, 0] = 1
    keys = [chance.integers(0, n, int(count.sum())) for n, count in zip((USERS, ITEMS), counts, strict=True)]
    offsets = [torch.from_numpy(np.cumsum(count) - count) for count in counts]
    dense, label = torch.from_numpy(chance.random((BATCH, 3), np.float32)), chance.integers(0, 2, BATCH)
    given = (dense, offsets, [*map(torch.from_numpy, keys)], torch.from_numpy(label).float())
    return given, {"emb_l.0": keys[0], "emb_l.1": keys[1]}


def words(chance: np.random.Generator) -> tuple[Any, dict[str, Any]]:
    center, around = chance.integers(0, ITEMS, (2, BATCH))
    negative = chance.integers(0, ITEMS, (BATCH, 5)).astype(np.int32)
    keys = {"u_emb": center, "v_emb": np.concatenate([around, negative.reshape(-1)])}
    return tuple(map(torch.from_numpy, (center, around, negative))), keys


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[np.random.Generator], Any]]] = {
    "sequences": (Sequences, sequences), "crosses": (Crosses, crosses), "words": (SkipGram, words),
}  # fmt: skip


class World:
    def __init__(self, name: str, folder: Path, *, ranks: int = 1) -> None:
        """ranks: number of batches in a step, one for each rank."""
        make, draw = MODELS[name]
        torch.manual_seed(0)
        self.theirs = make()
        tables = {
            path: one for path, one in self.theirs.named_modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)
        }
        specs = tuple(
            tc.Table(name=path, dim=DIM, optimizer=tc.optim.Adagrad(learning_rate=RATE), initializer=tc.init.Zeros())
            for path in tables
        )
        chance = np.random.default_rng(0)
        self.batches = [[draw(chance) for _ in range(STEPS * ranks)] for _ in range(PASSES)]
        sets = [
            {path: np.concatenate([keys[path].reshape(-1) for _, keys in some]).astype(np.int64) for path in tables}
            for some in self.batches
        ]
        self.data = tc.write_key_sets(folder / "keys", specs, sets)
        self.ours = tc.convert(copy.deepcopy(self.theirs), self.data, {path: path for path in tables})
        of_tables = {id(one.weight) for one in tables.values()}
        dense = [one for one in self.theirs.parameters() if id(one) not in of_tables]
        self.their_optimizers = [torch.optim.Adagrad([one.weight for one in tables.values()], lr=RATE)]
        self.their_optimizers += [torch.optim.SGD(dense, lr=DENSE_RATE)] if dense else []
        mine = [one for path, one in self.ours.named_parameters() if not path.endswith("anchor")]
        self.dense = torch.optim.SGD(mine, lr=DENSE_RATE) if mine else None

    def step_theirs(self, *given: Any) -> float:
        """Train a batch with torch; with several ranks, one each, averaged as DistributedDataParallel does."""
        loss = torch.stack([self.theirs(*one) for one in given]).mean()
        loss.backward()
        for one in self.their_optimizers:
            one.step()
            one.zero_grad()
        return loss.item()


def opened(world: World, folder: Path) -> tc.TierCache:
    given = {"model": world.ours} | ({} if world.dense is None else {"optimizer": world.dense})
    return tiered(folder / "m.tc", world.data, **given)


def step(cache: tc.TierCache, world: World, given: Any) -> float:
    """Train a batch with our model; return its loss."""
    loss = world.ours(*given)
    loss.backward()
    cache.optimizer.step()
    cache.optimizer.zero_grad()
    return loss.item()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_takes_the_keys_that_it_took(name: str, tmp_path: Path) -> None:
    world, seen = World(name, tmp_path), []
    with opened(world, tmp_path) as cache:
        for p in cache.passes(epochs=1):
            seen += [(step(cache, world, given), world.step_theirs(given)) for given, _ in world.batches[p.sub_dataset]]
    assert len(seen) == PASSES * STEPS
    np.testing.assert_allclose(*zip(*seen, strict=True), rtol=1e-5, atol=1e-5)


def test_candidates_are_scored_in_the_middle_of_a_pass_and_between_passes(tmp_path: Path) -> None:
    """Under no_grad the current row of any key is read, in the pass or not."""
    world = World("sequences", tmp_path)

    def check(given: Any) -> None:
        candidates = torch.arange(1, ITEMS)
        mine, other = (one.predict(given[0][:2], candidates) for one in (world.ours, world.theirs))  # type: ignore[operator]
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)

    with opened(world, tmp_path) as cache:
        for p in cache.passes(epochs=1):
            for number, (given, _) in enumerate(world.batches[p.sub_dataset]):
                if number % 20 == 7:
                    check(given)
                step(cache, world, given)
                world.step_theirs(given)
        check(given)


def test_a_batch_and_plain_keys_give_the_same_bits(tmp_path: Path) -> None:
    found = []
    table = tc.Table(name="a", dim=DIM, optimizer=tc.optim.Adam(learning_rate=0.1))
    keys = np.random.default_rng(0).integers(0, 50, (40, 4))
    data = tc.write_key_sets(tmp_path / "keys", [table], [{"a": keys}])
    for plain in (False, True):
        bag, rows = tc.EmbeddingBag(data.schema, "a", mode="mean"), tc.Embedding(data.schema, "a")
        with tc.InMemoryCache(data, model=nn.ModuleList([bag, rows])) as cache:
            for p in cache.passes(epochs=1):
                for some in np.split(keys, 5):
                    given: Any = torch.from_numpy(some) if plain else p.batch({"a": some})
                    (bag(given).square().sum() + rows(given).sin().sum()).backward()
                    cache.optimizer.step()
            found.append([field.copy() for field in cache.fields("a")])
    assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[Any, Any, Any]]:
    table = tc.Table(name="a", dim=4, optimizer=tc.optim.SGD(learning_rate=1.0))
    data = tc.write_key_sets(tmp_path / "keys", [table], [{"a": np.arange(10)}])
    bag, rows = tc.EmbeddingBag(data.schema, "a", mode="mean", padding_idx=3), tc.Embedding(data.schema, "a")
    with tc.InMemoryCache(data, model=nn.ModuleList([bag, rows])) as cache:
        yield cache, bag, rows
        cache._close(failed=True)


def test_forms_of_keys_are_those_of_torch(small: tuple[Any, Any, Any]) -> None:
    cache, bag, rows = small
    loop = cache.passes(epochs=1)
    next(loop)
    weight = torch.from_numpy(cache.fields("a")[0][np.argsort(cache.keys("a"))].copy())
    theirs = nn.EmbeddingBag.from_pretrained(weight, mode="mean", padding_idx=3)
    keys = torch.tensor([[1, 3, 5], [3, 3, 3], [2, 2, 9]])
    torch.testing.assert_close(bag(keys), theirs(keys))
    torch.testing.assert_close(bag(keys.int()), theirs(keys))
    flat, offsets = torch.tensor([1, 3, 5, 2]), torch.tensor([0, 0, 2])
    torch.testing.assert_close(bag(flat, offsets), theirs(flat, offsets))
    nested = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([3])])
    torch.testing.assert_close(bag(nested), theirs(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 2])))
    last = tc.EmbeddingBag(cache.schema, "a", padding_idx=3, include_last_offset=True)
    cache.register(last=last)
    torch.testing.assert_close(last(flat, torch.tensor([0, 0, 2, 4])), theirs(flat, offsets))
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([9])], layout=layout)
        mine, other = rows(nested), nn.functional.embedding(nested, weight)
        assert mine.layout == other.layout
        assert all(torch.equal(one, two) for one, two in zip(mine.unbind(), other.unbind(), strict=True))
    for shape in ((), (0,), (2, 0), (2, 3, 4)):
        some = torch.full(shape, 7)
        assert torch.equal(rows(some), nn.functional.embedding(some, weight))
    summed = tc.EmbeddingBag(cache.schema, "a", mode="sum")
    cache.register(summed=summed)
    weights = torch.rand(3, 3, requires_grad=True)
    torch.testing.assert_close(
        summed(keys, per_sample_weights=weights),
        nn.functional.embedding_bag(keys, weight, mode="sum", per_sample_weights=weights),
    )
    loop.close()


def test_what_a_weight_says_and_what_it_does_not_have(small: tuple[Any, Any, Any]) -> None:
    _, bag, rows = small
    assert bag.weight.device.type == "cpu"
    assert rows.weight.dtype == torch.float32
    assert rows.weight.shape[1] == rows.embedding_dim == 4
    assert (bag.padding_idx, rows.padding_idx, bag.mode) == (3, None, "mean")
    with pytest.raises(AttributeError, match="mode"):
        bag.mode = "sum"
    assert (rows.weight.dim(), len(rows.weight.size()), rows.weight.numel() % 4) == (2, 2, 0)
    with pytest.raises(AttributeError, match="the weight of table 'a' has no data here: its rows are in the store"):
        rows.weight.data.uniform_(-1, 1)


VALUES: dict[str, Callable[[Any], object]] = {
    "[]": lambda weight: weight[torch.tensor([1])],
    "@": lambda weight: torch.ones(2, 4) @ weight,
    "+": lambda weight: weight + 1,
    "len": len,
    "norm": torch.norm,
    "linear": lambda weight: nn.functional.linear(torch.ones(2, 4), weight),
    "embedding": lambda weight: nn.functional.embedding(torch.tensor([1]), weight),
    "cat": lambda weight: torch.cat([torch.ones(2, 4), weight]),
    "uniform_": nn.init.uniform_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "numpy": np.asarray,
    "detach": lambda weight: weight.detach(),
    "data =": lambda weight: setattr(weight, "data", torch.ones(2, 4)),
    "copy_": lambda weight: weight.copy_(torch.ones(2, 4)),
}


@pytest.mark.parametrize("what", VALUES)
def test_a_weight_says_what_to_do_for_its_values(small: tuple[Any, Any, Any], what: str) -> None:
    with one_sentence((AttributeError, TypeError), "table 'a'", "look up keys with the module", "Store.lookup()"):
        VALUES[what](small[2].weight)


@pytest.mark.parametrize("how", ["attribute", "method"])
def test_a_weight_freezes_its_module(small: tuple[Any, Any, Any], how: str) -> None:
    _, _, rows = small
    if how == "attribute":
        rows.weight.requires_grad = False
    else:
        rows.weight.requires_grad_(False)
    assert not rows.weight.requires_grad
    assert not rows(torch.tensor([1, 500])).requires_grad
    rows.weight.requires_grad = True
    assert all(one.requires_grad for one in rows.parameters())


MISTAKES: dict[str, tuple[Callable[[Any, Any, Any], object], type[Exception], list[str]]] = {
    "a key that the pass lacks": (
        lambda cache, bag, rows: rows(torch.tensor([1, 77, 78])), KeyNotInPassError,
        ["2 of 3 keys of table 'a'", "the first is 77", "pass 0", "torch.no_grad()"],
    ),
    "floats": (lambda cache, bag, rows: rows(torch.ones(2)), TypeError, ["torch.float32", "torch.int64"]),
    "no offsets": (lambda cache, bag, rows: bag(torch.tensor([1, 2])), ValueError, ["(2,)", "offsets (N,)"]),
    "weights of another shape": (
        lambda cache, bag, rows: bag(torch.ones(1, 2, dtype=torch.int64), per_sample_weights=torch.ones(3)),
        ValueError, ["(3,)", "expected (1, 2)"],
    ),
    "a module of no cache": (
        lambda cache, bag, rows: tc.Embedding(cache.schema, "a")(torch.tensor([1])),
        StateError, ["belongs to no cache"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_keys_that_cannot_be_looked_up_get_a_sentence(small: tuple[Any, Any, Any], what: str) -> None:
    call, kind, words_ = MISTAKES[what]
    loop = small[0].passes(epochs=1)
    next(loop)
    with one_sentence(kind, *words_):
        call(*small)
    loop.close()


def test_keys_outside_a_pass_are_read_without_gradients_alone(small: tuple[Any, Any, Any]) -> None:
    _, _, rows = small
    with one_sentence(StateError, "outside a pass", "torch.no_grad()"):
        rows(torch.tensor([1]))
    with torch.no_grad():
        assert rows(torch.tensor([1, 500])).shape == (2, 4)


def test_a_compiled_model_of_plain_keys_breaks_its_graph_at_lookups(small: tuple[Any, Any, Any]) -> None:
    cache, _, rows = small
    loop = cache.passes(epochs=1)
    next(loop)
    keys = torch.tensor([1, 2])
    run: Any = torch.compile(lambda k: rows(k).sin().sum(), backend="aot_eager")
    assert torch.equal(run(keys), rows(keys).sin().sum())
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda k: rows(k).sin().sum(), backend="aot_eager", fullgraph=True)(keys)
    loop.close()


def test_a_training_of_plain_keys_goes_on_behind_a_commit_inside_a_pass(tmp_path: Path) -> None:
    """Steps are batches: the loop skips as many."""
    world = World("words", tmp_path)
    for stop in (70, 1000):
        with opened(world, tmp_path) as cache:
            batches = (one for p in cache.passes(epochs=1) for one in world.batches[p.sub_dataset][p.start_batch :])
            for done, (given, _) in enumerate(batches, 1):
                step(cache, world, given)
                if done == stop:
                    cache.commit()
                    break
    for some in world.batches:
        for given, _ in some:
            world.step_theirs(given)
    with tc.Store.open(tmp_path / "m.tc", mode="r") as store:
        for name, weight in (("u_emb", world.theirs.u_emb.weight), ("v_emb", world.theirs.v_emb.weight)):
            trained = np.unique(np.concatenate([p.keys(name) for p in world.data.passes]))
            found = torch.from_numpy(store.lookup(name, trained)["vector"])
            torch.testing.assert_close(found, weight.detach()[torch.from_numpy(trained)], rtol=1e-4, atol=1e-5)
