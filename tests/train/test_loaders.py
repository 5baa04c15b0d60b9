"""Users' own loaders: wrapped, they resume from a commit; keys in all usual forms are the same batch."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tiercache as tc
from tests.data.cases import Jagged, KeyedJagged
from tests.train.cases import table, tiered
from tiercache.train.raw_samples import feature_keys, samples_of

PASSES, SAMPLES, BATCH = 3, 40, 8
SCHEMA = tc.Schema(
    features=(tc.Feature(name="a", table="t"), tc.Feature(name="b", table="t")),
    tables=(table("t", 4, tc.optim.Adagrad(learning_rate=0.1), tc.init.Uniform(low=-0.5, high=0.5)),),
    label="y",
    dense=(tc.DenseFeature(column="d"),),
)


class Samples(Dataset[Any]):
    def __init__(self, index: int) -> None:
        self._index = index

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, at: int) -> tuple[Any, ...]:
        chance = np.random.default_rng((self._index, at))
        ids = chance.integers(0, 50, 2) + 20 * self._index
        return ids, np.float32(chance.random((1,))), np.float32(ids[0] % 2)


class Stateful:
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        items = list(loader(0))
        while self.at < len(items):
            self.at += 1
            yield items[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def loader(index: int, workers: int = 0) -> DataLoader[Any]:
    context = "forkserver" if workers else None
    return DataLoader(Samples(index), batch_size=BATCH, num_workers=workers, multiprocessing_context=context)


def train(folder: Path, name: str, *, stop: tuple[int, int] | None = None, workers: int = 0, by: str = "wrap") -> Any:
    data = tc.PassDataset.open(folder / "passes")
    torch.manual_seed(0)
    bags, top = tc.EmbeddingBagCollection(SCHEMA), nn.Linear(9, 1)
    model = nn.ModuleList([bags, top])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tiered(folder / name, data, model=model, optimizer=optimizer) as cache:
        optimizer = cache.optimizer
        for p in cache.passes(epochs=2):
            if by == "wrap":
                batches: Any = p.wrap(loader(p.sub_dataset, workers if p.index == 1 else 0))  # starting them takes long
            else:
                batches = (p.batch(keys, dense=dense, label=label) for keys, dense, label in loader(p.sub_dataset))
            for number, batch in enumerate(batches):
                logits = top(torch.cat([bags(batch), batch.dense], dim=1)).squeeze(1)
                nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
                optimizer.step()
                optimizer.zero_grad()
                if (p.index, number) == stop:
                    cache.commit()
                    return None
    with tc.Store.open(folder / name, mode="r") as store:
        return [(keys.tolist(), fields[0].tobytes()) for keys, fields in store.scan("t")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys = ({"t": np.concatenate([Samples(p)[i][0] for i in range(SAMPLES)])} for p in range(PASSES))
    tc.write_key_sets(tmp_path / "passes", SCHEMA, keys)
    return tmp_path


def test_a_wrapped_loader_trains_as_its_batches_do(folder: Path) -> None:
    expected = train(folder, "plain.tc", by="batch")
    assert train(folder, "wrapped.tc", workers=2) == expected
    assert train(folder, "resumed.tc", stop=(4, 2)) is None
    assert train(folder, "resumed.tc") == expected


def test_a_loader_with_a_state_goes_on_by_itself(folder: Path) -> None:
    data, seen = tc.PassDataset.open(folder / "passes"), list[int]()
    for stop in (2, None):
        mine = Stateful()
        bags = tc.EmbeddingBagCollection(SCHEMA)
        with tiered(folder / "m.tc", data, model=bags) as cache:
            cache.register(loader=mine)
            passes = cache.passes(epochs=1)
            p = next(passes)
            for batch in p.wrap(mine):
                bags(batch).sum().backward()
                cache.optimizer.step()
                seen.append(mine.at)
                if mine.at == stop:
                    cache.commit()
                    break
    assert seen == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (torch.zeros(3), r"the loader yielded a Tensor: expected \(keys, label\), \(keys, dense, label\) or a map"),
        ((1,), "the loader yielded a tuple of 1: expected"),
        ({"a": 1, "b": 2}, "the loader yielded a mapping of 'a', 'b': expected"),
    ],
)
def test_an_item_that_is_none_is_a_sentence(folder: Path, item: Any, words: str) -> None:
    data = tc.PassDataset.open(folder / "passes")
    passes = tc.InMemoryCache(data).passes(epochs=1)
    p = next(passes)
    with pytest.raises(TypeError, match=words):
        next(p.wrap([item]))
    keys, dense, label = next(iter(loader(0)))
    (batch,) = p.wrap([item], lambda _: {"keys": keys, "dense": dense, "label": label})
    assert len(batch) == BATCH


FORMS = tc.Schema(
    features=(
        tc.Feature(name="user", table="t"), tc.Feature(name="seen", table="t", hotness="ragged"),
        tc.Feature(name="words", table="t", hotness="multi_hot", length=2),
    ),
    tables=(table("t", 4),), label="y",
)  # fmt: skip
USER, WORDS = [7, 8, 9], [[1, 2], [3, 4], [5, 6]]
VALUES, OFFSETS = [10, 11, 12], [0, 2, 2, 3]
LISTS = [torch.tensor(VALUES[low:high], dtype=torch.int64) for low, high in pairwise(OFFSETS)]


def sparse() -> torch.Tensor:
    rows = [i for i, one in enumerate(LISTS) for _ in one]
    return torch.sparse_coo_tensor(torch.tensor([rows, VALUES]), torch.tensor([1.0, 2.0, 3.0]), (3, 20))


WHOLE = {"user": USER, "seen": (VALUES, OFFSETS), "words": WORDS}


def test_a_whole_keyed_jagged_tensor_is_taken() -> None:
    lists = Jagged(USER, [0, 1, 2, 3]), Jagged(VALUES, OFFSETS), Jagged([1, 2, 3, 4, 5, 6], [0, 2, 4, 6])
    given = KeyedJagged(**dict(zip(("user", "seen", "words"), lists, strict=True)))
    samples, found = feature_keys(FORMS, given, None)
    expected = feature_keys(FORMS, WHOLE, None)
    assert samples == expected[0] == 3
    for name, one in found.items():
        assert one.keys.tolist() == expected[1][name].keys.tolist()
        np.testing.assert_equal((one.offsets, one.weights), (expected[1][name].offsets, expected[1][name].weights))


ONE = tc.Schema(features=(tc.Feature(name="seen", table="t", hotness="ragged"),), tables=FORMS.tables)
TWO = tc.Schema(features=(*ONE.features, tc.Feature(name="more", table="t", hotness="ragged")), tables=FORMS.tables)
ENDED = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])
NESTED = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])])


@pytest.mark.parametrize(
    ("schema", "keys", "columns", "ends"),
    [
        # the last offset is given or not, as the number of another feature's keys says
        (FORMS, WHOLE, (), OFFSETS),
        (FORMS, WHOLE | {"seen": (torch.tensor(VALUES), torch.tensor(OFFSETS[:-1]))}, (), OFFSETS),
        (FORMS, WHOLE | {"seen": (np.array(VALUES), np.array(OFFSETS[:-1], np.int32))}, (), OFFSETS),
        (FORMS, WHOLE | {"seen": (torch.tensor(VALUES), torch.tensor([0, 2, 3]))}, (), [0, 2, 3, 3]),
        (FORMS, WHOLE | {"seen": torch.nested.nested_tensor(LISTS)}, (), OFFSETS),
        (FORMS, WHOLE | {"seen": torch.nested.nested_tensor(LISTS, layout=torch.jagged)}, (), OFFSETS),
        # as a label or dense features say
        (ONE, {"seen": ENDED}, (torch.zeros(2), None), [0, 2, 3]),
        (ONE, {"seen": ENDED}, (torch.zeros(3), None), [0, 2, 3, 3]),
        (ONE, {"seen": ENDED}, (None, np.zeros((3, 4))), [0, 2, 3, 3]),
        # or the values
        (ONE, {"seen": ([1, 2, 3], [0, 2])}, (), [0, 2, 3]),
        (ONE, {"seen": ([1, 2, 3], [0, 2, 2])}, (), [0, 2, 2, 3]),
        # it is always given
        (ONE, {"seen": NESTED}, (), [0, 2, 3]),
        (ONE, {"seen": Jagged([1, 2, 3], [0, 2, 3])}, (), [0, 2, 3]),
        # as the lists of another feature say
        (TWO, {"seen": ENDED, "more": ([4, 5], [0, 1])}, (), [0, 2, 3]),
        (TWO, {"seen": ENDED, "more": ([4, 5], [0, 1, 1])}, (), [0, 2, 3, 3]),
        (TWO, {"seen": ENDED, "more": ([4, 5], [0, 1, 2, 2])}, (), [0, 2, 3, 3]),
        (TWO, {"seen": ENDED, "more": Jagged([4], [0, 1, 1])}, (), [0, 2, 3]),
    ],
)
def test_lists_end_where_the_number_of_samples_says(schema: Any, keys: Any, columns: Any, ends: list[int]) -> None:
    samples, found = feature_keys(schema, keys, None, columns)
    assert samples == len(ends) - 1
    assert found["seen"].offsets.tolist() == ends
    assert found["seen"].keys.tolist() == (VALUES if schema is FORMS else [1, 2, 3])
    assert found["seen"].weights is None


@pytest.mark.parametrize("seen", [Jagged(VALUES, OFFSETS, [1.0, 2.0, 3.0]), sparse(), sparse().to_sparse_csr()])
def test_lists_with_weights_come_in_many_forms(seen: Any) -> None:
    found = feature_keys(FORMS, WHOLE | {"seen": seen}, None)[1]["seen"]
    assert (found.keys.tolist(), found.offsets.tolist(), found.weights.tolist()) == (VALUES, OFFSETS, [1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("schema", "keys", "ends"),
    [
        (ONE, {"seen": ENDED}, [0, 2, 3, 3]),
        (ONE, {"seen": (np.array([1, 2, 3]), np.array([0, 3, 3, 3]))}, [0, 3, 3, 3, 3]),
        (ONE, {"seen": ([1], [0, 1])}, [0, 1, 1]),
        (ONE, {"seen": ([], [0])}, [0, 0]),
        (TWO, {"seen": ENDED, "more": ([4, 5], [0, 1, 2])}, [0, 2, 3, 3]),
    ],
)
def test_offsets_that_fit_two_numbers_of_samples_are_of_bags(schema: tc.Schema, keys: Any, ends: list[int]) -> None:
    """EmbeddingBag sees an empty last list: no sample is lost or shifted."""
    samples, found = feature_keys(schema, keys, None)
    values, offsets = (torch.as_tensor(part, dtype=torch.int64) for part in keys["seen"])
    pooled = torch.nn.EmbeddingBag(9, 1, mode="sum")(values, offsets)
    assert samples == len(pooled) == len(ends) - 1
    assert found["seen"].offsets.tolist() == ends


def test_values_between_the_rows_of_a_nested_tensor_are_no_keys() -> None:
    """A tensor created with lengths may have such gaps."""
    values, offsets = torch.tensor([1, 99, 2, 3]), torch.tensor([0, 2, 4])
    nested = torch.nested.nested_tensor_from_jagged(values, offsets, torch.tensor([1, 2]))
    found = feature_keys(ONE, {"seen": nested}, None)[1]["seen"]
    assert (found.keys.tolist(), found.offsets.tolist()) == ([1, 2, 3], [0, 1, 3])


@pytest.mark.parametrize(
    "value",
    [
        np.ma.array([1, 99], mask=[0, 1]),
        np.ma.array([[1, 99]], mask=[[0, 1]]),
        (np.ma.array([1, 99], mask=[0, 1]), [0, 1]),
    ],
)
def test_masked_keys_are_refused(value: Any) -> None:
    """Their fill values are not keys, and a raw key cannot be null."""
    with pytest.raises(ValueError, match="the keys of feature 'seen' have masked values"):
        feature_keys(ONE, {"seen": value}, None)


def test_weights_have_the_form_of_their_keys() -> None:
    """A nested tensor, a pair or values; other offsets and numbers that are not finite are refused."""
    schema = tc.Schema(features=(tc.Feature(name="a", hotness="ragged"),))
    offsets = torch.tensor([0, 2, 2, 3])
    keys = torch.nested.nested_tensor_from_jagged(torch.tensor([7, 8, 9]), offsets)
    values = torch.tensor([0.5, 1.0, 2.0])
    nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    for weights in (values, nested, (values, offsets), (values.numpy(), offsets.numpy()[:-1])):
        found = feature_keys(schema, {"a": keys}, {"a": weights})[1]["a"].weights
        assert found is not None
        assert found.tolist() == [0.5, 1.0, 2.0]
    with pytest.raises(ValueError, match="the weights of feature 'a' have other offsets than its keys"):
        feature_keys(schema, {"a": keys}, {"a": (values, torch.tensor([0, 1, 2, 3]))})
    for bad in (float("nan"), 1e39):
        with pytest.raises(ValueError, match=r"the weights of feature 'a' have .+ at entry 1: use finite numbers"):
            feature_keys(schema, {"a": keys}, {"a": np.array([1.0, bad, 1.0])})


def test_a_pair_that_torch_made_a_list_is_refused() -> None:
    """It was read as two samples: the values and the offsets."""
    schema = tc.Schema(features=(tc.Feature(name="a", hotness="ragged"),))
    (item,) = DataLoader([{"a": (torch.tensor([7, 8]), torch.tensor([0, 1]))}], batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the keys of feature 'a' are a list of two tensors, which is a pair"):
        feature_keys(schema, item, None)


def test_one_tensor_has_a_column_for_each_feature() -> None:
    schema = tc.Schema(features=tuple(tc.Feature(name=n, table="t") for n in "abc"), tables=FORMS.tables, label="y")
    for keys in (torch.arange(12).view(4, 3), np.arange(12).reshape(4, 3)):
        samples, found = feature_keys(schema, keys, None)
        assert samples == 4
        assert [found[n].keys.tolist() for n in "abc"] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    words = r"one array of shape \(4, 2\), but there are 3 features \(a, b, c\): pass a map"
    with pytest.raises(ValueError, match=words):
        feature_keys(schema, torch.zeros(4, 2, dtype=torch.int64), None)
    with pytest.raises(ValueError, match="the keys are a list: pass a mapping from features to their keys"):
        feature_keys(schema, [1, 2, 3], None)


def test_a_batch_may_lack_features_that_it_does_not_look_up(tmp_path: Path) -> None:
    tables = [table(name, 4, tc.optim.SGD(learning_rate=0.1), tc.init.Uniform()) for name in ("user", "item")]
    features = (tc.Feature(name="user"), tc.Feature(name="item"), tc.Feature(name="candidate", table="item"))
    schema = tc.Schema(features=features, tables=tuple(tables))
    data = tc.write_key_sets(tmp_path / "k", schema, [{"user": np.arange(5), "item": np.arange(9)}])
    model = nn.ModuleDict({name: tc.Embedding(schema, name) for name in ("user", "item", "candidate")})
    user, item, candidate = (np.array(keys) for keys in ([1, 2], [3, 8], [0, 7]))
    with tiered(tmp_path / "m.tc", data, model=model) as cache:
        for p in cache.passes(epochs=1):
            batch = p.batch({"user": user, "item": item})
            (model["user"](batch).sum() + model["item"](batch).sum()).backward()
            cache.optimizer.step()
            with pytest.raises(ValueError, match=r"without the rows of feature 'candidate': pass its keys"):
                model["candidate"](batch)
            evaluated = cache.evaluate_batch({"user": user, "candidate": candidate})
            with torch.no_grad():
                whole = cache.evaluate_batch({"user": user, "item": item, "candidate": candidate})
                for name in ("user", "candidate"):
                    assert torch.equal(model[name](evaluated), model[name](whole))
            p.skip()


def test_a_column_that_two_features_look_up_is_given_once(tmp_path: Path) -> None:
    features = (tc.Feature(name="id", table="wide"), tc.Feature(name="deep", columns=("id",), table="deep"))
    tables = [table(name, 4, tc.optim.SGD(learning_rate=0.1), tc.init.Uniform()) for name in ("wide", "deep")]
    schema = tc.Schema(features=features, tables=tuple(tables))
    samples, found = feature_keys(schema, {"id": np.array([4, 2])}, None)
    assert samples == 2
    assert [one.keys.tolist() for one in found.values()] == [[4, 2], [4, 2]]
    _, found = feature_keys(schema, {"id": np.array([4, 2]), "deep": np.array([5, 1])}, None)
    assert found["deep"].keys.tolist() == [5, 1]
    both = [tc.Feature(name=name, columns=("id",), table=of) for name, of in (("a", "wide"), ("b", "deep"))]
    renamed = tc.Schema(features=tuple(both), tables=tuple(tables))
    _, found = feature_keys(renamed, {"id": np.array([4, 2])}, None)
    assert [*found] == ["a", "b"]
    with pytest.raises(ValueError, match=r"the keys of feature 'a' are .*, and a pair \(values, offsets\) for lists"):
        feature_keys(renamed, {"id": [[4], [2, 3]]}, None)
    with pytest.raises(ValueError, match="keys were given for 'idd'"):
        feature_keys(renamed, {"id": np.array([4, 2]), "idd": np.array([4, 2])}, None)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_data_frame_is_keys_by_the_names_of_its_columns(library: str) -> None:
    frames = pytest.importorskip(library)
    columns = {"a": [17, 42, 9999], "b": [3, 4, 5]}
    count, found = feature_keys(SCHEMA, frames.DataFrame(columns), None)
    assert count == 3
    assert {name: one.keys.tolist() for name, one in found.items()} == columns
    with pytest.raises(ValueError, match="the keys of feature 'a' are strings or objects: keys are int64"):
        feature_keys(SCHEMA, frames.DataFrame(columns | {"a": ["x", "y", "z"]}), None)
    with pytest.raises(ValueError, match="keys were given for 'c', but the features are a, b"):
        feature_keys(SCHEMA, frames.DataFrame(columns | {"c": [1, 2, 3]}), None)


@pytest.mark.parametrize("size", [2, 3])
def test_lists_that_torch_collates_are_those_of_the_samples(size: int) -> None:
    """It makes a list of the first elements of all samples, one of the second ones, and so on."""
    samples = [({"a": i, "b": [i, i + 10]}, [i / 8, -1.0], float(i)) for i in range(6)]
    schema = tc.Schema(features=(tc.Feature(name="a"), tc.Feature(name="b", hotness="ragged")))
    items = samples_of(DataLoader(samples, size), 0, None)  # type: ignore[arg-type]
    for first in range(0, 6, size):
        item, expected = next(items), samples[first : first + size]
        number, keys = feature_keys(schema, item["keys"], None)
        assert number == size
        assert keys["b"].keys.tolist() == [key for one, *_ in expected for key in one["b"]]
        assert item["dense"].tolist() == [dense for _, dense, _ in expected]
        assert item["label"].tolist() == [label for *_, label in expected]
    assert next(items) == {"keys": None}
