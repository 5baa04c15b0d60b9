"""p.loader: training keys must be in the pass, and data that a pass cannot feed is refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import tiercache as tc
from tests.train.cases import tiered
from tests.train.loops import first_pass
from tests.train.recorded import TAGS, Clicks, Net, call, converted, loader, opened, record, torch_step
from tests.train.test_bad_input import one_sentence
from tiercache.data.raw_batch import OOV_KEY
from tiercache.errors import DatasetError, KeyNotInPassError, StateError
from tiercache.rows.prefetch import initial_vectors


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tc.PassDataset:
    return record(tmp_path_factory.mktemp("recorded") / "keys", loader(shuffle=True))


@pytest.fixture(scope="module")
def in_order(tmp_path_factory: pytest.TempPathFactory) -> tc.PassDataset:
    return record(tmp_path_factory.mktemp("recorded") / "keys")


class Changed(Clicks):
    def __init__(self, user: int, at: int = 33) -> None:
        super().__init__()
        self.users[at] = user


def train(folder: Path, data: tc.PassDataset, dataset: Any, **arguments: Any) -> None:
    cache, step = opened(folder, data)
    with cache:
        for p in cache.passes(epochs=1):
            for batch in p.loader(dataset, **arguments):
                step(batch)


def test_a_key_that_the_pass_lacks_names_the_batch(tmp_path: Path, in_order: tc.PassDataset) -> None:
    lacking = next(user for user in range(400) if user not in in_order.passes[0].keys("user"))
    told = "recorded batch 1 of pass 0 (its samples 20 to 39)", "same_draws=True", "p.sample()", str(lacking)
    with one_sentence(KeyNotInPassError, *told):
        train(tmp_path / "a", in_order, Changed(lacking))
    with one_sentence(KeyNotInPassError, "a batch of pass 0 (its samples"):
        train(tmp_path / "b", in_order, Changed(lacking), shuffle=True)


def test_a_recorded_batch_with_other_keys_is_named(tmp_path: Path, in_order: tc.PassDataset) -> None:
    users = in_order.passes[0].keys("user").tolist()
    other = next(user for user in users if user != int(Clicks().users[33]))
    told = "recorded batch 1 of pass 0", "1 of its 3 recorded lookups", "check_keys=False", "Record key sets again"
    with one_sentence(DatasetError, *told):
        train(tmp_path / "a", in_order, Changed(other))
    train(tmp_path / "b", in_order, Changed(other), shuffle=True)
    train(tmp_path / "c", in_order, Changed(other), check_keys=False)
    train(tmp_path / "d", in_order, Changed(other), batch_size=30)


def test_other_keys_in_the_last_batch_of_a_pass_are_no_exception(tmp_path: Path, in_order: tc.PassDataset) -> None:
    last, users = in_order.passes[0].samples - 1, in_order.passes[0].keys("user").tolist()
    dataset = Changed(next(user for user in users if user != int(Clicks().users[last])), last)
    with one_sentence(DatasetError, f"to {last}) did not make 1 of"):
        train(tmp_path / "store", in_order, dataset)
    with tc.Store.open(tmp_path / "store", mode="r") as store:
        assert store.commit.cursor.pass_index == 0


def test_more_lookups_than_were_recorded_are_fine(tmp_path: Path, in_order: tc.PassDataset) -> None:
    cache, step = opened(tmp_path / "store", in_order)
    with cache:
        for p in cache.passes(epochs=1):
            for batch in p.loader(Clicks()):
                call(step.model, batch)
                negatives = p.sample("item", 6)
                step.model.item(negatives.keys).sum().backward()  # type: ignore[operator, union-attr]
                step(batch)


def test_negatives_that_the_dataset_draws_are_those_recorded_if_asked_for(tmp_path: Path) -> None:
    dataset = Clicks(draws=True)
    data = record(tmp_path / "same", loader(dataset), same_draws=True)
    for name, arguments in {"a": {}, "b": {"shuffle": True, "batch_size": 11, "num_workers": 2}}.items():
        train(tmp_path / name, data, dataset, **arguments)
    new = record(tmp_path / "new", loader(dataset))
    with one_sentence(KeyNotInPassError, "random numbers differ from the recording", "same_draws=True"):
        train(tmp_path / "c", new, dataset)


def test_rare_keys_train_the_row_that_they_share(tmp_path: Path) -> None:
    dataset = Clicks()
    data = record(tmp_path / "keys", model=converted("meta"), min_count=3)
    rare = data.rare_keys()
    assert all(rare.rows(name) for name in ("user", "item"))
    theirs = Net(more=1)
    with torch.no_grad():
        for table in data.tables:
            weight = theirs.get_submodule(table.name).weight
            keys = np.array([*range(len(weight) - 1), OOV_KEY])
            weight.copy_(torch.from_numpy(initial_vectors(table, keys)))  # type: ignore[operator]
        theirs.item.weight[0] = 0

    def shared(name: str, keys: torch.Tensor) -> torch.Tensor:
        last = len(theirs.get_submodule(name).weight) - 1  # type: ignore[arg-type]
        is_rare = torch.isin(keys, torch.from_numpy(rare.keys(name).copy()))
        return torch.where(is_rare, last, keys)

    def forward(user: torch.Tensor, items: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        x = theirs.user(shared("user", user)) * theirs.item(shared("item", items)).sum(1)
        x = x + theirs.tag(shared("tag", items % TAGS))
        return theirs.top(theirs.drop(theirs.norm(x)))[:, 0] + noise

    cache, ours = opened(tmp_path / "store", data, converted("meta"))
    theirs.norm, theirs.forward = copy.deepcopy(ours.model.norm), forward  # type: ignore[assignment,method-assign]
    theirs.top.load_state_dict(ours.model.top.state_dict())  # type: ignore[union-attr]
    step = torch_step(theirs)
    with cache:
        for p in cache.passes(epochs=2):
            for batch in p.loader(dataset):
                losses = []
                for one in (ours, step):
                    torch.manual_seed(p.samples_done)
                    losses.append(one(batch))
                np.testing.assert_allclose(*losses, atol=1e-5)
        batch = default_collate([dataset[index] for index in range(60)])
        with torch.no_grad():
            torch.testing.assert_close(ours.model.user(batch[0]), theirs.user(shared("user", batch[0])))  # type: ignore[operator]


def test_a_model_with_a_weight_for_each_key_does_not_train_rare_keys(tmp_path: Path) -> None:
    """A rare key would be trained as one row and evaluated as another."""
    data = record(tmp_path / "keys", model=converted("meta"), min_count=3)
    model = tc.convert(Net(), data)
    with one_sentence(DatasetError, "rare keys", "a weight for each key", 'on "meta"'):
        opened(tmp_path / "store", data, model)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("trains", [False, True])
def test_frozen_tables_are_looked_up_and_count(tmp_path: Path, in_order: tc.PassDataset, trains: bool) -> None:
    cache, step = opened(tmp_path / "store", in_order)
    for name in ("user", "item", "tag"):
        step.model.get_submodule(name).requires_grad_(trains and name == "item")
    with cache:
        before = [one.clone() for one in step.model.top.parameters()]  # type: ignore[union-attr]
        for p in cache.passes(epochs=1):
            for batch in p.loader(Clicks()):
                step(batch)
        assert all((a != b).any() for a, b in zip(before, step.model.top.parameters(), strict=True))  # type: ignore[union-attr]


REFUSED: dict[str, tuple[Callable[[tc.Pass], object], type[Exception], list[str]]] = {
    "a dataset of another length": (
        lambda p: p.loader(Clicks(601)), DatasetError, ["has 601 samples, but had 600 when its key sets were recorded"],
    ),
    "no dataset": (lambda p: p.loader(iter([1])), TypeError, ["pass the dataset of the loader"]),
    "a sampler": (lambda p: p.loader(Clicks(), sampler=[1]), ValueError, ["takes no sampler", "p.sampler()"]),
    "a generator": (lambda p: p.loader(Clicks(), generator=torch.Generator()), ValueError, ["takes no generator"]),
    "drop_last": (lambda p: p.loader(Clicks(), drop_last=True), ValueError, ["trains all its samples"]),
    "a batch of none": (lambda p: p.loader(Clicks(), 0), ValueError, ["invalid batch size 0"]),
    "another order": (
        lambda p: [next(iter(p.loader(Clicks(), shuffle=shuffle))) for shuffle in (True, False)], StateError,
        ["is after 20 samples in the order", "request the same order"],
    ),
    "a sampler after a loader": (
        lambda p: (next(iter(p.loader(Clicks()))), p.sampler()), StateError, ["has begun with p.loader()"],
    ),
    "a loader after a sampler": (
        lambda p: (p.sampler(), p.loader(Clicks())), StateError, ["already uses p.sampler()"],
    ),
    "batches": (lambda p: list(p.batches(5)), DatasetError, ["take its batches from p.loader(dataset)"]),
    "an unknown table": (lambda p: p.sample("person", 1), ValueError, ["unknown table 'person'", "user, item, tag"]),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_pass_cannot_feed_is_refused(tmp_path: Path, data: tc.PassDataset, what: str) -> None:
    ask, kind, words = REFUSED[what]
    cache, _ = opened(tmp_path / "store", data)
    with first_pass(cache) as p, one_sentence(kind, *words):
        ask(p)
    cache._close(failed=True)


def test_a_dataset_without_recorded_samples_has_no_loader(tmp_path: Path) -> None:
    model = converted()
    keys = {"user": [1], "item": [1], "tag": [1]}
    written = tc.write_key_sets(tmp_path / "keys", model.user.schema, [keys])  # type: ignore[union-attr, arg-type]
    with tiered(tmp_path / "store", written, model=model) as cache:
        for p in cache.passes(epochs=1):
            with one_sentence(DatasetError, "make the dataset with tc.record_key_sets"):
                p.loader(Clicks())
            p.stop()


def test_a_pass_that_was_not_trained_to_its_end_is_refused(tmp_path: Path, data: tc.PassDataset) -> None:
    cache, step = opened(tmp_path / "a", data)
    with one_sentence(StateError, "pass 0 ended after 1 batch with 20 of its"), cache:
        for p in cache.passes(epochs=1):
            step(next(iter(p.loader(Clicks()))))
    cache, step = opened(tmp_path / "b", data)
    with one_sentence(StateError, "pass 0 ended with", "looked up with gradients enabled"), cache:
        for p in cache.passes(epochs=1):
            for number, batch in enumerate(p.loader(Clicks())):
                if number != 1:
                    step(batch)
