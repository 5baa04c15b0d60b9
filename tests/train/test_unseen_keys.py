"""A key that was never trained has one meaning, in an evaluation and in the served model; so does padding."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.dist.pool import RanksPool
from tests.train.cases import table, tiered
from tests.train.oracle import initial_row
from tiercache.dist.communicator import AnyCommunicator
from tiercache.errors import RankError
from tiercache.store.store_errors import KeyMissingError

SCHEMA = tc.Schema(
    features=(
        tc.Feature(name="one", table="a"),
        tc.Feature(name="list", table="a", hotness="multi_hot", length=3),
        tc.Feature(name="bag", table="b", hotness="ragged"),
    ),
    tables=tuple(table(name, 4, tc.optim.SGD(learning_rate=0.1)) for name in "ab"),
)
TRAINED = np.arange(1, 9)
PADDING = 3
KEYS = {
    "one": np.array([1, 40, -7, PADDING, 1 << 40, 8]),
    "list": np.array(
        [[1, 2, 40], [40, 40, -7], [PADDING, PADDING, PADDING], [PADDING, 8, 1 << 40], [5, 5, 5], [-7, 3, 1]]
    ),
    "bag": (np.array([1, 40, PADDING, PADDING, -7, 8, 40, 1 << 40, 2]), np.array([0, 2, 2, 3, 5, 8, 9])),
}
"""Keys of six samples: trained ones, untrained ones, and padding; alone, mixed and in empty bags."""
BAGS = [("sum", None), ("mean", None), ("max", None), ("sum", PADDING), ("mean", PADDING)]
"""Mode and padding of the modules of the bag."""


class Model(nn.Module):
    """Every way to look a feature up that has a plain counterpart."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.padded = tc.Embedding(SCHEMA, "one"), tc.Embedding(SCHEMA, "list", padding_idx=PADDING)
        self.list = tc.EmbeddingBag(SCHEMA, "list", mode="mean", padding_idx=PADDING)
        self.bags = nn.ModuleList(tc.EmbeddingBag(SCHEMA, "bag", mode=mode, padding_idx=one) for mode, one in BAGS)

    def forward(self, one: Any, many: Any, *bag: Any) -> list[torch.Tensor]:
        return [self.one(one), self.padded(many), self.list(many), *(module(*bag) for module in self.bags)]


def plain(keys: dict[str, Any]) -> list[torch.Tensor]:
    bag, ends = keys["bag"]
    return [torch.from_numpy(one) for one in (keys["one"], keys["list"], bag, ends[:-1].copy())]


def expected(store: tc.Store, keys: dict[str, Any], unseen: str) -> list[torch.Tensor]:
    """Return the expected outputs of a model, by torch's functions over the rows of the keys."""

    def rows(name: str, some: torch.Tensor) -> torch.Tensor:
        found = []
        for key in some.flatten().tolist():
            if key in TRAINED:
                found.append(store.lookup(name, np.array([key]))["vector"][0])
            else:
                row = initial_row(SCHEMA.tables["ab".index(name)], key)
                found.append(row if unseen == "initial" else np.zeros(4, np.float32))
        return torch.from_numpy(np.stack(found))

    def pooled(name: str, some: torch.Tensor, ends: Any, mode: str, padding: int | None) -> torch.Tensor:
        flat = some.flatten()
        vectors = torch.cat([rows(name, flat), torch.zeros(1, 4)])  # the last one is that of padding
        ids = torch.tensor([len(flat) if key == padding else i for i, key in enumerate(flat.tolist())])
        return nn.functional.embedding_bag(
            ids, vectors, torch.from_numpy(ends), mode=mode, include_last_offset=True, padding_idx=len(flat)
        )

    one, many, bag, _ = plain(keys)
    padded = torch.where(many[..., None] == PADDING, 0.0, rows("a", many).view(*many.shape, 4))
    found = [rows("a", one), padded, pooled("a", many, np.arange(0, many.numel() + 1, 3), "mean", PADDING)]
    return found + [pooled("b", bag, keys["bag"][1], mode, padding) for mode, padding in BAGS]


def features(batch: tc.Batch) -> list[Any]:
    return [batch.features[name] for name in KEYS]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[tuple[tc.TierCache, Model]]:
    passes = tc.write_key_sets(tmp_path / "keys", SCHEMA, [{"a": TRAINED, "b": TRAINED}])
    model = Model()
    with tiered(tmp_path / "m.tc", passes, model=model) as made:
        keys = {
            "one": TRAINED[:6], "list": np.stack([TRAINED[2:8]] * 3, axis=1),
            "bag": (TRAINED, np.array([0, 2, 3, 5, 6, 7, 8])),
        }  # fmt: skip
        for p in made.passes(epochs=1):
            sum(one.square().sum() for one in model(*features(p.batch(keys)))).backward()
            made.optimizer.step()
        yield made, model


@pytest.mark.parametrize("unseen", [None, "initial", "zeros"])
def test_an_unseen_key_is_read_as_one_thing_everywhere(cache: tuple[tc.TierCache, Model], unseen: str | None) -> None:
    """In the evaluation of raw keys and in the plain model, with every pooling; by default its initial row."""
    made, model = cache
    options: Any = {} if unseen is None else {"unseen": unseen}
    batch = made.evaluate_batch(KEYS, **options)
    served = tc.to_torch(model, made.store, **options)
    for ours, theirs, other in zip(
        expected(made.store, KEYS, unseen or "initial"), model(*features(batch)), served(*plain(KEYS)), strict=True
    ):
        torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(other, ours, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_plain_model_has_the_dtypes_of_its_modules(cache: tuple[tc.TierCache, Model], dtype: torch.dtype) -> None:
    """So its outputs fit the dense layers of that dtype; weights of ids may be float32, as in training."""
    made, model = cache
    model = copy.deepcopy(model).to(dtype)
    served, (one, many, bag, ends) = tc.to_torch(model, made.store), plain(KEYS)
    with torch.no_grad():
        for ours, theirs in zip(model(one, many, bag, ends), served(one, many, bag, ends), strict=True):
            assert ours.dtype == theirs.dtype == dtype
            torch.testing.assert_close(theirs.float(), ours.float(), rtol=1e-2, atol=1e-3)
        weights = torch.linspace(0.5, 2, len(bag))
        found = [part.bags[0](bag, ends, weights) for part in (model, served)]
    torch.testing.assert_close(found[1].float(), found[0].float(), rtol=1e-2, atol=1e-3)


def test_padding_is_served_as_it_was_trained(cache: tuple[tc.TierCache, Model]) -> None:
    """A key that has a row in one module may be padding in another."""
    made, model = cache
    served = tc.to_torch(model, made.store)
    keys = torch.tensor([[PADDING, 1, PADDING], [PADDING, PADDING, PADDING]])
    assert served.padded(keys).shape == (2, 3, 4)
    assert not served.padded(keys)[keys == PADDING].any()
    assert served.list(keys).shape == (2, 4)
    torch.testing.assert_close(served.list(keys)[0], served.one(torch.tensor(1)))
    assert not served.list(keys)[1].any()
    assert served.one(torch.tensor([PADDING])).any()
    assert served.one(torch.tensor(PADDING)).shape == (4,)


@pytest.mark.parametrize("name", ["one", "list", "bag"])
def test_an_unseen_key_is_an_error_where_that_is_asked_for(cache: tuple[tc.TierCache, Model], name: str) -> None:
    made, model = cache
    seen: dict[str, Any] = {
        "one": np.array([1, 8]), "list": np.array([[1, 2, PADDING], [PADDING] * 3]),
        "bag": (np.array([4, PADDING]), np.array([0, 2, 2])),
    }  # fmt: skip
    served = tc.to_torch(model, made.store, unseen="error")
    for ours, theirs in zip(
        served(*plain(seen)), model(*features(made.evaluate_batch(seen, unseen="error"))), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    bad = {
        "one": {"one": np.array([1, 41])}, "list": {"list": np.array([[1, 2, 41], [1, 1, 1]])},
        "bag": {"bag": (np.array([4, 41]), np.array([0, 2, 2]))},
    }[name]  # fmt: skip
    words = r"table '[ab]' has no row for 1 of the keys \(the first is 41\): .* unseen='initial' or 'zeros'"
    for call in (lambda: made.evaluate_batch(seen | bad, unseen="error"), lambda: served(*plain(seen | bad))):
        with pytest.raises(KeyMissingError, match=words) as caught:
            call()
        assert caught.value.keys.tolist() == [41]


@pytest.mark.parametrize("unseen", ["zero", "init", "", None, 0, "INITIAL"])
def test_another_way_to_read_unseen_keys_is_refused(cache: tuple[tc.TierCache, Model], unseen: Any) -> None:
    made, model = cache
    words = r"invalid unseen .*: expected one of 'initial', 'zeros', 'error'"
    with pytest.raises(ValueError, match=words):
        made.evaluate_batch(KEYS, unseen=unseen)
    with pytest.raises(ValueError, match=words):
        tc.to_torch(model, made.store, unseen=unseen)


@pytest.mark.parametrize("unseen", ["initial", "zeros", "error"])
def test_the_out_of_vocabulary_row_stands_for_unseen_keys(tmp_path: Path, unseen: Any) -> None:
    """If the table has one, as for rare keys of the data, whatever is requested for others."""
    schema = tc.Schema(features=(tc.Feature(name="one", table="a"),), tables=SCHEMA.tables[:1], label="y")
    keys = np.array([1, 1, 2, 2, 3, 3, 50, 51])
    data = [{"one": keys, "y": np.ones(8, np.float32)}]
    passes = tc.extract(
        data, schema, tmp_path / "d", device_budget="1MiB", min_count=2, batch_multiple=1, progress=False
    )
    module = tc.Embedding(schema, "one")
    with tiered(tmp_path / "m.tc", passes, model=module) as cache:
        for p in cache.passes(epochs=1):
            for batch in p.batches(8):
                module(batch).square().sum().backward()
                cache.optimizer.step()
        found = module(cache.evaluate_batch({"one": np.array([50, 51, 99, 2])}, unseen=unseen))
        served = tc.to_torch(module, cache.store, unseen=unseen)(torch.tensor([50, 51, 99, 2]))
        some = tc.to_torch(module, cache.store, unseen=unseen, keys={"a": [2]})(torch.tensor([50, 51, 99, 2]))
        every = next(cache.evaluate(passes))
        (batch,) = every.batches(8)
        torch.testing.assert_close(found[0], module(batch)[6])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[3])
    assert torch.equal(found, served)
    assert torch.equal(found, some)


def test_keys_that_are_served_are_integers_of_tables_of_the_model(cache: tuple[tc.TierCache, Model]) -> None:
    made, model = cache
    with pytest.raises(ValueError, match="the keys of table 'a' are float64: keys are int64"):
        tc.to_torch(model, made.store, keys={"a": [1.5]})
    with pytest.raises(ValueError, match="keys= has a table 'one', but the model looks up a, b"):
        tc.to_torch(model, made.store, keys={"one": [1]})


def test_a_plain_model_that_reads_zeros_can_be_traced(cache: tuple[tc.TierCache, Model]) -> None:
    made, model = cache
    served = tc.to_torch(model, made.store, unseen="zeros")
    given = tuple(plain(KEYS))
    traced = torch.jit.trace(served.bags[1], given[2:])
    others = torch.tensor([7, 41, PADDING, 5]), torch.tensor([0, 1])
    torch.testing.assert_close(traced(*others), served.bags[1](*others))
    program = torch.export.export(served.list, (given[1],))
    torch.testing.assert_close(program.module()(given[1]), served.list(given[1]))
    for kind in ("initial", "error"):
        other = tc.to_torch(model, made.store, unseen=kind)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match=f"unseen='{kind}' of table 'b' looks at the keys.*unseen='zeros'"):
            torch.jit.trace(other.bags[1], given[2:])


def read_on_ranks(ranks: AnyCommunicator, folder: str, unseen: str, other: str) -> list[Any]:
    """Look keys up that another rank owns, the last rank with ``other``."""
    passes = tc.PassDataset.open(f"{folder}/keys")
    with tc.TierCache(f"{folder}/r.tc", passes, device_budget="4MiB", host_budget="32MiB") as cache:
        module = tc.Embedding(SCHEMA, "one")
        cache.register(model=module)
        cache.restore()
        keys = {"one": np.array([1, 40, -7, 1 << 40]) + ranks.rank, "list": KEYS["list"][:4] * 0 + 1,
                "bag": (np.array([1]), np.array([0, 1, 1, 1, 1]))}  # fmt: skip
        batch = cache.evaluate_batch(keys, unseen=unseen if ranks.rank == 0 else other)  # type: ignore[arg-type]
        return [keys["one"].tolist(), module(batch).detach().numpy()]


@pytest.mark.parametrize("unseen", ["initial", "zeros"])
def test_ranks_read_unseen_keys_as_one(ranks_pool: RanksPool, tmp_path: Path, unseen: str) -> None:
    """Whichever rank owns them."""
    tc.write_key_sets(tmp_path / "keys", SCHEMA, [{"a": TRAINED, "b": TRAINED}])
    for keys, rows in ranks_pool.run(2, f"{__name__}:read_on_ranks", folder=str(tmp_path), unseen=unseen, other=unseen):
        for key, row in zip(keys, rows, strict=True):
            zeros = unseen == "zeros"  # no key was trained yet
            np.testing.assert_array_equal(row, np.zeros(4) if zeros else initial_row(SCHEMA.tables[0], key))


def test_ranks_that_ask_for_different_ways_are_told(ranks_pool: RanksPool, tmp_path: Path) -> None:
    tc.write_key_sets(tmp_path / "keys", SCHEMA, [{"a": TRAINED, "b": TRAINED}])
    run = f"{__name__}:read_on_ranks"
    for error in ranks_pool.errors(2, run, folder=str(tmp_path), unseen="initial", other="zeros"):
        assert error == (
            "ValueError",
            "ranks passed different values of unseen ('initial', 'zeros'): pass the same one on all ranks",
        )
    found = ranks_pool.errors(2, run, folder=str(tmp_path), unseen="error", other="error")
    assert {one[0] for one in found if one} <= {KeyMissingError.__name__, RankError.__name__}
    assert any(one is not None and "has no row for" in one[1] for one in found)
