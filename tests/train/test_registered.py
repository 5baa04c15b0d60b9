"""Objects registered with a cache besides tables: wrapped models, schedulers; contents of commits and checkpoints."""

import copy
import io
import os
import pickle
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim.lr_scheduler import StepLR

import tiercache as tc
from tests.train.cases import SPECS, Case, Net, open_store, table, tiered
from tiercache.dist.communicator import communicator_of
from tiercache.errors import StateError
from tiercache.rows.backends.cpu import CpuBackend
from tiercache.train.dense_state import DenseState

CASE = Case(tables=(table("a", 4), table("b", 6)), specs=SPECS, num_samples=64, pass_rows=32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tc.Store]:
    with open_store(tmp_path, CASE, "memory") as made:
        yield made


def saved(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def new_model(passes: tc.PassDataset, kind: Any = torch.optim.SGD) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(passes, CASE)
    return model, kind(model.parameters(), lr=0.1)


def train(cache: tc.TierCache, model: torch.nn.Module, epochs: int, stop: int | None = None) -> None:
    for p in cache.passes(epochs=epochs):
        if p.index == stop:
            break
        for batch in p.batches(16):
            cache.optimizer.zero_grad()
            model(batch).sum().backward()
            cache.optimizer.step()


def test_the_state_of_a_compiled_model_has_the_names_of_the_model(store: tc.Store, passes: tc.PassDataset) -> None:
    """So a training can resume without compiling, or with it."""
    model, optimizer = new_model(passes)
    with tiered(store, passes, model=torch.compile(model), optimizer=optimizer) as cache:
        train(cache, model, 1)
    other, again = new_model(passes)
    with tiered(store, passes, model=other, optimizer=again) as cache:
        assert list(cache.passes(epochs=1)) == []
    assert torch.equal(other.top.weight, model.top.weight)


def test_the_last_commit_is_restored_without_a_loop(store: tc.Store, passes: tc.PassDataset) -> None:
    model, optimizer = new_model(passes)
    with tiered(store, passes, model=model, optimizer=optimizer) as cache:
        train(cache, model, 1)
        committed = model.top.weight.clone()
        loop = cache.passes(epochs=2)
        batch = next(next(loop).batches(16))
        model(batch).sum().backward()
        cache.optimizer.step()
        assert not torch.equal(model.top.weight, committed)
        cache.restore()
        assert torch.equal(model.top.weight, committed)
        with pytest.raises(StateError, match="replaced by a newer one"):
            next(loop)
        assert store.commit is not None
        assert store.commit.cursor.pass_index == 2


def test_a_model_on_meta_is_refused(store: tc.Store, passes: tc.PassDataset) -> None:
    with torch.device("meta"):
        model, optimizer = new_model(passes)
    with pytest.raises(
        StateError, match=r"the state at model\['.*'\] is on \"meta\" .*: call model.to_empty"
    ) as caught:
        tc.TierCache(store, passes, model=model, optimizer=optimizer, device_budget="1MiB", host_budget="16MiB")
    assert "anchor" not in str(caught.value)


@pytest.mark.parametrize("whose", ["optimizer", "cache.optimizer"])
def test_a_scheduler_that_was_not_registered_is_named(store: tc.Store, passes: tc.PassDataset, whose: str) -> None:
    """A resumed training would restart its rates; a registered one is not named."""
    model, optimizer = new_model(passes)
    with tiered(store, passes, model=model, optimizer=optimizer) as cache:
        scheduler = StepLR(cache.optimizer if "." in whose else optimizer, 1)
        with pytest.warns(UserWarning, match=f"^{whose} has a learning-rate scheduler that was not registered"):
            train(cache, model, 1)
        cache.register(scheduler=scheduler)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(StateError, match="register the same objects"):
                cache.restore()


def test_a_restored_optimizer_has_the_state_of_all_its_parameters(store: tc.Store, passes: tc.PassDataset) -> None:
    """Commits leave out the state of anchors: the optimizer keeps its initial one."""
    sums = []
    for epochs in (1, 2):
        model, optimizer = new_model(passes, torch.optim.Adagrad)
        with tiered(store, passes, model=model, optimizer=optimizer) as cache:
            optimizer = cache.optimizer
            cache.restore()
            assert all("sum" in optimizer.state[one] for one in model.parameters())
            sums.append(optimizer.state[model.top.weight]["sum"].sum().item())
            train(cache, model, epochs)
    assert sums[0] == 0 < sums[1]


def checkpointed(folder: Path, passes: int, save: Path | None = None, load: Path | None = None) -> Any:
    """Train some passes, optionally from a checkpoint, and make a checkpoint; returns the dense weights then."""
    data = tc.PassDataset.open(folder / "passes")
    torch.manual_seed(1)
    model, optimizer = new_model(data)
    with tiered(folder / "m.tc", data, model=model, optimizer=optimizer, retention=9) as cache:
        if load is not None:
            before = cache.store.commit.id
            dcp.load({"rows": cache, "model": model}, checkpoint_id=load, no_dist=True)
            assert cache.store.commit.id == before
        train(cache, model, 9, stop=passes)
        cache.drain()
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        if save is not None:
            dcp.save({"rows": cache, "model": model}, checkpoint_id=save, no_dist=True)
        return kept


def test_a_checkpoint_names_the_commit_of_its_rows(tmp_path: Path) -> None:
    """It is loaded if the store is at that commit, also after a rollback to it, and refused otherwise."""
    CASE.cut(tmp_path / "passes")
    kept = checkpointed(tmp_path, 2, save=tmp_path / "early")
    assert sum(path.stat().st_size for path in (tmp_path / "early").iterdir()) < 100_000
    with tc.Store.open(tmp_path / "m.tc", mode="r") as store:
        early = store.commit.id
    checkpointed(tmp_path, 4)
    words = rf"made at commit {early} of m.tc, but the cache is at commit {early + 2} of m.tc: roll the store back"
    with pytest.raises((StateError, dcp.api.CheckpointException), match=words):
        checkpointed(tmp_path, 5, load=tmp_path / "early")
    with tc.Store.open(tmp_path / "m.tc") as store:
        assert store.rollback(early).made_of == early
    again = checkpointed(tmp_path, 2, load=tmp_path / "early")
    for name, value in kept.items():
        assert torch.equal(again[name], value)


def state_of(folder: Path, store: str, seed: int = 1, load: Any = None) -> Any:
    """Train one pass more and return the state of the model, or load a state at the beginning."""
    data = tc.PassDataset.open(folder / "passes")
    torch.manual_seed(seed)
    model, optimizer = new_model(data)
    with tiered(folder / store, data, model=model, optimizer=optimizer, seed=seed, reorganize=True) as cache:
        if load is not None:
            return model.load_state_dict(load)
        train(cache, model, 1)
        cache.drain()
        return copy.deepcopy(model.state_dict())


def test_a_state_belongs_to_the_rows_of_its_run_whatever_their_folder_is_called(tmp_path: Path) -> None:
    """Pins, compaction and another name of the folder change no row; a copy that was trained has others."""
    CASE.cut(tmp_path / "passes")
    state = state_of(tmp_path, "a/m.tc")
    other = state_of(tmp_path, "b/m.tc", seed=2)
    words = r"rows of commit (\d) of m.tc of another run, but the cache has those of commit \1 of m.tc"
    for store, wrong in (("a/m.tc", other), ("b/m.tc", state)):
        with pytest.raises(StateError, match=words):
            state_of(tmp_path, store, load=wrong)
    with tc.Store.open(tmp_path / "a/m.tc") as store:
        store.pin("best")
        store.compact()
        store.unpin("best")
    (tmp_path / "a/m.tc").rename(tmp_path / "best.tc")
    state_of(tmp_path, "best.tc", load=state)


def drawn() -> tuple[list[float], list[float], float]:
    """Draw from all generators that a training may use; normal numbers of `random` and numpy come in pairs."""
    mine = [random.gauss(0, 1) for _ in range(3)]
    theirs = [float(np.random.standard_normal()) for _ in range(3)]  # noqa: NPY002 - users' global generator
    return mine, theirs, float(torch.rand(1))


def test_random_generators_go_on_from_a_commit() -> None:
    """Generators of `random`, numpy and torch, in the middle of a pair."""
    drawn()
    dense = DenseState(CpuBackend())
    data = dense.capture()()
    wanted = drawn()
    drawn()
    dense.restore(data, communicator_of())
    assert drawn() == wanted


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (pickle.dumps(Runs()), "it cannot be unpickled"),
        (pickle.dumps({"objects": Runs()}, 2), "it names posix.mkdir"),
        (saved(Runs()), "it names posix.mkdir"),
        (pickle.dumps(print, 2), "print), so it was not loaded"),
        (b"no pickle", "it cannot be unpickled"),
        (b"\x80\x05.", "it cannot be unpickled"),
        (saved({"objects": {}})[:-40], "it cannot be unpickled"),
    ],
)
def test_wrong_dense_state_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, named: str) -> None:
    """Torch's own error would say how to run it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StateError, match=r"not only tensors and plain values .*so it was not loaded") as caught:
        DenseState(CpuBackend()).restore(data, communicator_of())
    assert named in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
