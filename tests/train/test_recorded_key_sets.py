"""record_key_sets: a loader is run once, and its batches' keys become key sets that fit the device budget."""

import copy
import random
import re
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import tiercache as tc
from tests.crash.told import finish, start
from tests.files import files_of, flip
from tests.train.cases import tiered
from tests.train.loops import descend
from tests.train.recorded import (
    BATCH,
    BUDGET,
    ITEMS,
    SAMPLES,
    TABLES,
    TAGS,
    USERS,
    Clicks,
    Net,
    call,
    converted,
    indices,
    killed,
    loader,
    opened,
    record,
)
from tests.train.test_bad_input import one_sentence
from tiercache.data.pass_builder import RowBudget
from tiercache.data.sub_dataset import lookup_digest
from tiercache.errors import BudgetError, DatasetError, ExtractionError
from tiercache.sizes import parse_bytes
from tiercache.store.bits import hash_keys, mix, xxh64


def keys_of(dataset: Clicks, samples: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the keys that a model looks up for samples, padding left out."""
    items = dataset.items[samples].numpy().reshape(-1)
    return {"user": dataset.users[samples].numpy(), "item": items[items != 0], "tag": items % TAGS}


def assert_key_sets(data: tc.PassDataset, samples: list[Any]) -> None:
    for one, chosen in zip(data.passes, samples, strict=True):
        for name, keys in keys_of(Clicks(), chosen).items():
            unique, counts = np.unique(keys, return_counts=True)
            order = np.argsort(one.keys(name))
            np.testing.assert_array_equal(one.keys(name)[order], unique)
            np.testing.assert_array_equal(one.counts(name)[order], counts)


LOADERS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "workers": {"shuffle": True, "num_workers": 2},
    "without the last batch": {"batch_size": 35, "drop_last": True},
    "one sample": {"batch_size": None, "collate_fn": lambda sample: [part[None] for part in sample]},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LOADERS)
def test_key_sets_are_those_of_the_samples_of_each_sub_dataset(tmp_path: Path, name: str) -> None:
    data = record(tmp_path / "keys", loader(**LOADERS[name]))
    assert len(data) > 3
    samples = indices(data)
    assert_key_sets(data, samples)
    expected = SAMPLES - SAMPLES % 35 if "last" in name else SAMPLES
    assert sorted(np.concatenate(samples).tolist()) == list(range(expected))
    assert data.samples == expected
    is_ordered = np.concatenate(samples).tolist() == list(range(expected))
    assert is_ordered == ("shuffle" not in LOADERS[name])


def test_a_sub_dataset_has_the_batches_that_fit_and_one_more_would_not(tmp_path: Path) -> None:
    """Rows count as in an extraction, with the maximum of all previous sub-datasets."""
    data, dataset = record(tmp_path / "keys"), Clicks()
    budget = RowBudget(data.schema.tables, parse_bytes(BUDGET))

    def rows(samples: Any) -> list[int]:
        keys = keys_of(dataset, samples)
        return [np.unique(keys[table.name]).size for table in data.tables]

    samples = indices(data)
    for one, following in pairwise(samples):
        assert one.size % BATCH == 0
        assert budget.fits(rows(one))
        assert not budget.fits(rows(np.concatenate([one, following[:BATCH]])))
        budget.close(rows(one))


def test_recording_leaves_the_model_and_random_numbers_as_they_were(tmp_path: Path) -> None:
    """Buffers of batch norm, gradients, weights that become rows; generators of torch, numpy, random and the loader."""
    model, generator = converted(), torch.Generator().manual_seed(5)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate(), generator.get_state()  # type: ignore[index] # noqa: NPY002
    sampler = RandomSampler(range(SAMPLES), replacement=True, num_samples=300, generator=generator)
    record(tmp_path / "keys", loader(Clicks(draws=True), sampler=sampler), model)
    batched = BatchSampler(WeightedRandomSampler(torch.ones(SAMPLES), 200, generator=generator), BATCH, drop_last=False)
    record(tmp_path / "batched", DataLoader(Clicks(), batch_sampler=batched), model)
    record(tmp_path / "others", lambda: loader(shuffle=True), model)
    assert torch.equal(states[0], torch.get_rng_state())
    np.testing.assert_array_equal(states[1], np.random.get_state()[1])  # type: ignore[index] # noqa: NPY002
    assert states[2] == random.getstate()
    assert torch.equal(states[3], generator.get_state())
    after = model.state_dict()
    assert all(torch.equal(one, after[name]) for name, one in before.items())
    assert all(one.grad is None for one in model.parameters())
    assert model.training
    assert model.user.weights["user"].shape == (USERS, 8)  # type: ignore[union-attr, index]


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(50, 4, padding_idx=0, dtype=torch.bfloat16)
        self.bag = nn.EmbeddingBag(50, 3, mode="sum")
        self.seen: list[torch.Tensor] = []

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        self.seen += [self.rows(keys), self.bag(keys), self.bag(keys[0], torch.tensor([0, 1]))]
        with torch.no_grad():
            self.rows(torch.arange(50))
        return nn.functional.normalize(self.seen[-1]).sum()


def test_a_recorded_lookup_returns_what_a_real_one_would_but_for_values(tmp_path: Path) -> None:
    """Shape, dtype and gradients; values are nonzero except for padding, and the same for the same key."""
    seen: list[torch.Tensor] = []

    def run(model: Any, batch: Any) -> None:
        assert torch.isfinite(model(batch))
        seen.extend(model.seen)

    keys = torch.tensor([[1, 0, 2], [2, 3, 4]])
    data = record(tmp_path / "keys", DataLoader(keys, batch_size=2), tc.convert(Looks()), call=run)  # type: ignore[arg-type]
    rows, bags, offsets = seen
    assert rows.shape == (2, 3, 4)
    assert rows.dtype == torch.bfloat16
    assert bags.shape == offsets.shape == (2, 3)
    assert rows.requires_grad
    assert (rows[0, 1] == 0).all()
    assert (rows[[0, 0, 1], [0, 2, 1]] != 0).all()
    assert torch.equal(rows[0, 2], rows[1, 0])
    assert (bags != 0).all()
    assert sorted(data.passes[0].keys("rows").tolist()) == [1, 2, 3, 4]  # not those under no_grad


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_keys_that_checkpointing_looks_up_again_are_recorded(tmp_path: Path, use_reentrant: bool) -> None:
    """Reentrant checkpointing looks them up without gradients, and trains those that backward looks up again."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.top = nn.Embedding(50, 4), nn.Linear(4, 1)

        def forward(self, keys: torch.Tensor) -> torch.Tensor:
            x = torch.ones(len(keys), 4, requires_grad=True)
            h = checkpoint(lambda x: x * self.rows(keys), x, use_reentrant=use_reentrant)
            return self.top(h).sum()  # type: ignore[no-any-return]

    keys, model = torch.arange(3, 11), Checkpointed()
    theirs, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.5)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.5)
    tc.convert(model, optimizer=optimizer)
    data = record(tmp_path / "keys", DataLoader(keys, batch_size=4), model, call=None)  # type: ignore[arg-type]
    with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
        for p in cache.passes(epochs=1):
            for batch in p.loader(keys, batch_size=4):
                descend(model(batch), cache.optimizer)
                descend(theirs(batch), reference)
        made = tc.to_torch(model, cache.store, like=Checkpointed())
    torch.testing.assert_close(dict(made.state_dict()), dict(theirs.state_dict()))


def test_keys_may_be_named_without_running_the_model(tmp_path: Path) -> None:
    one = record(tmp_path / "forward")
    other = record(
        tmp_path / "keys",
        keys=lambda batch: {"user": batch[0], "item": (batch[1][:, :1], batch[1][:, 1:]), "tag": batch[1] % TAGS},
    )
    for ours, theirs in zip(one.passes, other.passes, strict=True):
        for name in TABLES:
            np.testing.assert_array_equal(ours.keys(name), theirs.keys(name))
            np.testing.assert_array_equal(ours.counts(name), theirs.counts(name))
    assert other.passes[0].recorded.digests(0).size == 0


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        dataset = Clicks()
        return (dataset[index] for index in range(len(dataset)))


def test_an_iterable_is_recorded_from_a_function_that_makes_it(tmp_path: Path) -> None:
    data = record(tmp_path / "keys", lambda: loader(Numbers()))
    ends = np.cumsum([one.samples for one in data.passes]).tolist()
    assert_key_sets(data, [np.arange(end - one.samples, end) for one, end in zip(data.passes, ends, strict=True)])
    firsts = [one.recorded.recording.first_batch for one in data.passes]
    assert firsts == [0, *(end // BATCH for end in ends[:-1])]


@pytest.mark.parametrize("name", ["batch sampler", "weighted"])
def test_a_sampler_of_the_users_is_recorded_in_its_order(tmp_path: Path, name: str) -> None:
    groups = [[1, 2], [5], [7, 7, 9], *([i, i + 1] for i in range(20, 300, 2))]
    weighted = WeightedRandomSampler(torch.ones(SAMPLES), 200)
    given = {"sampler": weighted} if name == "weighted" else {"batch_sampler": groups, "batch_size": 1}
    samples = indices(data := record(tmp_path / "keys", loader(**given)))
    assert_key_sets(data, samples)
    if name != "weighted":
        assert np.concatenate(samples).tolist() == [one for group in groups for one in group]


BATCHED: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "shuffled": lambda data: (BatchSampler(RandomSampler(data), BATCH, drop_last=False), {"shuffle": True}),
    "in order": lambda data: (BatchSampler(SequentialSampler(data), BATCH, drop_last=False), {}),
    "without the last": lambda data: (
        BatchSampler(RandomSampler(data), 35, drop_last=True), {"batch_size": 35, "shuffle": True, "drop_last": True}
    ),
    "a part": lambda _: (
        BatchSampler(SequentialSampler(range(130)), BATCH, drop_last=False),
        {"batch_sampler": [[*range(i, min(130, i + BATCH))] for i in range(0, 130, BATCH)]},
    ),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_sampler_of_torch_is_recorded_as_the_loader_that_would_make_it(tmp_path: Path, name: str) -> None:
    dataset = Clicks()
    sampler, arguments = BATCHED[name](dataset)
    loaders = [DataLoader(dataset, batch_sampler=sampler)]
    loaders.append(DataLoader(dataset, **arguments) if "batch_sampler" in arguments else loader(dataset, **arguments))
    trained = []
    for number, one in enumerate(loaders):
        data = record(tmp_path / f"{number}", one)
        cache, step = opened(tmp_path / f"{number}.tc", data)
        with cache:
            seen = [batch[0].tolist() for batch in cache.loader(one, epochs=1) if step(batch) is not None]
        assert sum(map(len, seen)) == data.samples
        trained.append(([part.tolist() for part in indices(data)], seen))
    assert trained[0] == trained[1]


def test_batches_of_one_sample_are_collated(tmp_path: Path) -> None:
    """A batch sampler may make them; samples are collated then, as in its loader."""
    given = DataLoader(Clicks(), batch_sampler=[[3], [7], [5]])
    cache, step = opened(tmp_path / "m.tc", record(tmp_path / "keys", given))
    with cache:
        shapes = [tuple(batch[1].shape) for batch in cache.loader(given, epochs=1) if step(batch) is not None]
    assert shapes == [(1, 4)] * 3


def test_rare_keys_share_a_row(tmp_path: Path) -> None:
    data, dataset = record(tmp_path / "keys", model=converted("meta"), min_count=3), Clicks()
    unique, counts = np.unique(dataset.users.numpy(), return_counts=True)
    frequent, rare = set(unique[counts >= 3].tolist()), set(unique[counts < 3].tolist())
    oov = tc.data.raw_batch.OOV_KEY  # type: ignore[attr-defined]
    seen = {int(key) for one in data.passes for key in one.keys("user")}
    assert seen == frequent | {oov}
    found = data.rare_keys()
    assert found is not None
    assert set(found.keys("user").tolist()) == rare
    assert sum(int(one.counts("user").sum()) for one in data.passes) == SAMPLES


def test_the_digest_of_a_lookup_is_that_of_the_format() -> None:
    """Keys may have any order; their number counts."""
    text = (Path(__file__).parents[2] / "docs/format/bits.md").read_text()
    found = re.search(r"lookup of the keys 1, 2 and 2 in the table `user` \| `(\w+)`", text)
    assert found is not None
    table_id = xxh64(b"user")
    for keys in ([1, 2, 2], [2, 1, 2]):
        assert lookup_digest(np.array(keys), table_id) == int(found[1], 16)
    hashes = hash_keys(np.array([1, 2, 2]), table_id).tolist()
    assert int(mix(np.array([(sum(hashes) + 3) % (1 << 64)], np.uint64))[0]) == int(found[1], 16)


# -- stops ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"min_count": 2}], ids=["", "min_count"])
def test_a_killed_recording_goes_on_and_ends_with_the_same_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    """After kill -9 at several moments, from the last closed sub-dataset on."""
    for name in ("whole", "one"):
        (tmp_path / name).mkdir()
    assert finish(start(killed, tmp_path / "whole", options, -1)) == 0
    events = int((tmp_path / "whole" / "events").read_text())
    for fatal in (2 * events // 3, events // 3, 3):
        assert finish(start(killed, tmp_path / "one", options, fatal)) == -signal.SIGKILL
    assert finish(start(killed, tmp_path / "one", options, -1)) == 0
    assert int((tmp_path / "one" / "events").read_text()) < events
    assert files_of(tmp_path / "one" / "keys") == files_of(tmp_path / "whole" / "keys")


class StopError(Exception):
    """Interrupts a recording."""


def stopped(folder: Path, loader_: Any, **options: Any) -> None:
    def stop(progress: Any) -> None:
        if progress.passes == 2:
            raise StopError

    with pytest.raises(StopError):
        record(folder, loader_, progress=stop, **options)


def test_a_sampler_that_gives_another_order_after_a_stop_is_refused(tmp_path: Path) -> None:
    """Some samples would be in two sub-datasets, and some in none."""

    class Sampler:
        def __init__(self, first: int) -> None:
            self.first = first

        def __len__(self) -> int:
            return SAMPLES

        def __iter__(self) -> Iterator[int]:
            return iter([(self.first + i) % SAMPLES for i in range(SAMPLES)])

    stopped(tmp_path / "keys", loader(sampler=Sampler(0)))
    with one_sentence(DatasetError, "yields different samples than before the stop", "seed its sampler"):
        record(tmp_path / "keys", loader(sampler=Sampler(7)))
    data = record(tmp_path / "keys", loader(sampler=Sampler(0)))
    assert np.concatenate(indices(data)).tolist() == list(range(SAMPLES))


@pytest.mark.parametrize("is_done", [False, True])
def test_other_arguments_do_not_continue_a_recording(tmp_path: Path, is_done: bool) -> None:
    """This also applies to a finished one, which the same arguments return unchanged."""
    if is_done:
        first = record(tmp_path / "keys")
        runs: list[Any] = []
        assert record(tmp_path / "keys", call=lambda *_: runs.append(0)).digest == first.digest
        assert not runs
    else:
        stopped(tmp_path / "keys", loader())
    for given, options, words in (
        (loader(Clicks(700)), {}, "dataset_length was 600 and is now 700"),
        (loader(batch_size=30), {}, "batch_size was 20 and is now 30"),
        (loader(), {"seed": 1}, "seed was 0 and is now 1"),
    ):
        with one_sentence(ExtractionError, words, "choose another directory"):
            record(tmp_path / "keys", given, **options)


def test_a_damaged_byte_of_the_samples_of_a_pass_is_refused(tmp_path: Path) -> None:
    data = record(tmp_path / "keys")
    flip(data.passes[1].path, data.passes[1].num_bytes() - 9)  # the last index, before 8 bytes of checksums
    with one_sentence(DatasetError, "the checksum of MiB 0 does not match"):
        indices(tc.PassDataset.open(tmp_path / "keys"))
    with pytest.raises(DatasetError):
        tc.PassDataset.open(tmp_path / "keys").verify()


def test_recorded_key_sets_cannot_be_cut_into_smaller_passes(tmp_path: Path) -> None:
    """Their samples are elsewhere."""
    data = record(tmp_path / "keys")
    with one_sentence(DatasetError, "cannot be cut: record key sets again"):
        tc.repartition(data, tmp_path / "smaller", device_budget="8KiB")


# -- refusals ------------------------------------------------------------------------------------------------


def generated() -> Iterator[Any]:
    yield from loader()


class Unsized(Clicks):
    __len__ = None  # type: ignore[assignment]


class NoKeys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, 2)
        self.top = nn.Linear(1, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.user(batch[0]) if 0 in batch[0] or self.top is None else self.top(batch[2][:, None])


LIST = [1, 2]
SAME = iter(LIST)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "a generator": ({"loader_": generated()}, TypeError, ["a generator", "its batches once", "lambda: batches()"]),
    "an iterator": ({"loader_": iter(loader())}, TypeError, ["yields its batches once"]),
    "a list": ({"loader_": LIST}, TypeError, ["a list", "pass a torch.utils.data.DataLoader, or a function"]),
    "a function of one iterator": (
        {"loader_": lambda: SAME}, TypeError, ["the same list_iterator each time", "create a new one"],
    ),
    "a sampler of lists": (
        {"loader_": loader(sampler=BatchSampler(range(0, 400, 2), 4, drop_last=False), batch_size=None)},
        DatasetError, ["yields [[0, 2, 4, 6]]", "must yield integers"],
    ),
    "an IterableDataset": ({"loader_": loader(Numbers())}, TypeError, ["no indices", "such as lambda: loader"]),
    "a dataset without a length": (
        {"loader_": DataLoader(Unsized(), sampler=[1, 2])}, TypeError, ["Unsized, has no len()"],
    ),
    "an empty loader": ({"loader_": lambda: LIST[:0]}, DatasetError, ["the loader yielded no batches"]),
    "no call for a list": ({"call": None}, TypeError, ["batch 0 of the loader is a list of 4", "call=lambda model"]),
    "no call for a mapping": (
        {"call": None, "loader_": lambda: [{"user": torch.tensor([1])}]}, TypeError,
        ["model(batch) failed for batch 0 of the loader, a dict", "model(**batch) for named arguments"],
    ),
    "call and keys": ({"keys": lambda _: {}}, ValueError, ["call= and keys= exclude each other"]),
    "a batch without keys": (
        {"model": lambda: tc.convert(NoKeys()), "call": lambda m, b: m(b)}, DatasetError,
        ["batch 0 of the loader has no keys", "pass call="],
    ),
    "keys that are none": ({"call": None, "keys": lambda _: {}}, DatasetError, ["keys= returned none"]),
    "keys of an unknown table": (
        {"call": None, "keys": lambda b: {"person": b[0]}}, DatasetError, ["'person'", "tables are user, item, tag"],
    ),
    "keys that are no mapping": ({"call": None, "keys": lambda b: b[0]}, TypeError, ["returned Tensor", "a mapping"]),
    "keys that are floats": (
        {"call": None, "keys": lambda b: {"user": b[2]}}, ValueError, ["'user' in batch 0 of the loader", "float32"],
    ),
    "a key that the module lacks": (
        {"call": lambda m, b: m.user(b[0] + USERS)}, IndexError, ["batch 0 of the loader in 'user'", f"[0, {USERS})"],
    ),
    "a key of keys= that the module lacks": (
        {"call": None, "keys": lambda b: {"item": b[1] - ITEMS}}, IndexError, ["batch 0 of the loader in 'item'"],
    ),
    "a budget below a batch": (
        {"device_budget": "2KiB"}, BudgetError,
        ["batch 0 of the loader needs", "but the device budget is 2 KiB", "make the loader's batches smaller"],
    ),
    "a model without tables": ({"model": lambda: nn.Linear(1, 1)}, ValueError, ["no tiercache embedding"]),
    "a model that was not converted": ({"model": Net}, ValueError, ["pass the model returned by tc.convert"]),
    "rare keys of a table with a row for each key": (
        {"min_count": 2}, ValueError, ["module 'user' has a weight for each key", 'on "meta"'],
    ),
    "a min_count of 0": ({"min_count": 0}, ValueError, ["min_count is 0"]),
    "same draws of a function": ({"loader_": loader, "same_draws": True}, ValueError, ["same_draws was given with"]),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_recorded_is_refused(tmp_path: Path, what: str) -> None:
    """The error names the batch, and what to do."""
    options, kind, words = REFUSED[what]
    options = {"call": call, "progress": False, "device_budget": BUDGET, "loader_": loader()} | options
    given, model = options.pop("loader_"), options.pop("model", converted)()
    with one_sentence(kind, *words):
        tc.record_key_sets(model, given, tmp_path / "keys", **options)
