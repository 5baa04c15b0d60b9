"""TierCache(None, data): the loop of a cache with a store, with all rows on the device and no commit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.cache_options import gathered
from tests.train.beside_torch import CASE as LOOPS_CASE
from tests.train.beside_torch import Ours
from tests.train.test_bad_input import one_sentence
from tiercache.errors import StateError

CASE = LOOPS_CASE


def train(cache: tc.TierCache, model: nn.Module, *, epochs: int, stop_in: int = -1) -> None:
    """Train; end the training after two batches of one pass."""
    for p in cache.passes(epochs=epochs):
        for number, batch in enumerate(p.batches(16)):
            model(batch).square().mean().backward()
            cache.optimizer.step()
            cache.optimizer.zero_grad()
            if p.index == stop_in and number == 1:
                p.stop()


def made(passes: tc.PassDataset, **options: Any) -> tuple[tc.TierCache, Ours]:
    torch.manual_seed(0)
    model = Ours()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return tc.TierCache(None, passes, model=model, optimizer=optimizer, **options), model


def test_the_weights_of_a_converted_model_need_a_store(tmp_path: Path) -> None:
    """They would become no rows; registered later, they come too late for a store."""
    model: Any = tc.convert(nn.ModuleDict({"user": nn.Embedding(9, 4)}))
    data = tc.write_key_sets(tmp_path / "keys", model["user"].schema, [{"user": np.arange(9)}])
    words = "table 'user' has a weight", "a cache without a store starts from initializers: use TierCache(path, ...)"
    with one_sentence(StateError, *words):
        tc.InMemoryCache(data, model=model)
    assert model["user"].weights, "the weights are still there"
    with tc.InMemoryCache(data) as cache, one_sentence(StateError, *words):
        cache.register(model=model)


def test_it_trains_the_bits_of_the_named_class(passes: tc.PassDataset) -> None:
    cache, model = made(passes)
    train(cache, model, epochs=2)
    torch.manual_seed(0)
    other = Ours()
    named = tc.InMemoryCache(passes, model=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    assert isinstance(named, tc.TierCache)
    train(named, other, epochs=2)
    for table in ("a", "b"):
        mine = cache.live_rows().fields(table, named.keys(table))
        assert all(np.array_equal(one, two) for one, two in zip(mine, named.fields(table), strict=True))
    assert torch.equal(model.top.weight, other.top.weight)


NOT_USED = {
    "device_budget": "1GiB", "host_budget": "1GiB", "eval_budget": "1MiB", "store_budget": "1GiB", "shard_dirs": ["x"],
    "engine": "zarr", "retention": 2, "commit_every": 1, "sharding": "basic",
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_USED)
def test_an_argument_about_stores_is_refused(passes: tc.PassDataset, name: str) -> None:
    with one_sentence(ValueError, f"does not use {name}", "path of a store"):
        tc.TierCache(None, passes, **gathered({name: NOT_USED[name]}))  # type: ignore[arg-type]


def test_what_needs_a_store_says_so(passes: tc.PassDataset) -> None:
    cache, _ = made(passes)
    for call in (cache.plan, cache.store_plan):
        with one_sentence(StateError, f"{call.__name__}() needs a store"):
            call()


def test_the_same_script_runs_with_its_commits_reports_and_checkpoints(tmp_path: Path, passes: tc.PassDataset) -> None:
    """Nothing is kept; commit() checks the moment as usual."""
    cache, model = made(passes)
    state = cache.state_dict()
    for p in cache.passes(epochs=1):
        for batch in p.batches(16):
            model(batch).square().mean().backward()
            with one_sentence(StateError, "between backward and step"):
                cache.commit()
            cache.optimizer.step()
            cache.optimizer.zero_grad()
            cache.commit()
    cache.load_state_dict(state)
    cache.restore()
    cache.write_report(tmp_path / "report.jsonl")
    reports = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    assert [one["bytes_read"] + one["bytes_written"] for one in reports] == [0] * len(passes.passes)
    assert all(one["planned_equals_measured"] for one in reports)
    assert list(cache.passes(epochs=1)) == []


def test_a_training_that_was_ended_goes_on_with_the_pass_that_was_not_trained(passes: tc.PassDataset) -> None:
    """Its rows keep their training, because there is nothing to roll back to."""
    cache, model = made(passes)
    train(cache, model, epochs=2, stop_in=1)
    kept = [one.copy() for one in cache.live_rows().fields("a", np.arange(20))]
    begun = []
    for p in cache.passes(epochs=2):
        begun.append((p.index, p.samples_done))
        now = cache.live_rows().fields("a", np.arange(20))
        assert all(np.array_equal(one, two) for one, two in zip(kept, now, strict=True))
        p.stop()
    assert begun == [(1, 0)]


def test_a_closed_cache_says_that_its_rows_are_gone(passes: tc.PassDataset) -> None:
    """Dropping it gives no warning, because nothing of value is lost."""
    cache, _ = made(passes)
    cache.close()
    with one_sentence(StateError, "its rows are gone"):
        cache.live_rows()
