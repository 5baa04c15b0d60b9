"""The dense state of several ranks in commits, once or that of each rank, and what resumed ranks go through."""

import io
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tiercache as tc
from tests.dist.meeting import meet
from tests.dist.pool import RanksPool
from tests.dist.test_gradients_as_torch import CASE, opened
from tests.dist.test_gradients_as_torch import Net as BagsNet
from tests.dist.trainings import CASES, OPTIONS, dense_of, on_ranks, open_sharded, step, step_by
from tests.train.cases import Net, table
from tiercache.dist.communicator import AnyCommunicator
from tiercache.errors import RankError, StateError
from tiercache.rows.backends.cpu import CpuBackend
from tiercache.train.dense_state import DenseState


def test_dense_state_is_kept_once(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """By rank 0 for all ranks, except random generators and per-rank state."""
    on_ranks(ranks_pool, 3, tmp_path, "bags", epochs=1)
    with tc.Store.open(tmp_path / "model.tc", mode="r") as store:
        first, *others = (torch.load(io.BytesIO(shard.state()), weights_only=True) for shard in store.ranks)
    assert set(first["objects"]) == {"model", "optimizer"}
    for other in others:
        assert other.keys() == first.keys()
        assert (other["objects"], other["shared"]) == ({}, ["model", "optimizer"])

    alone = DenseState(CpuBackend())
    layer = torch.nn.Linear(2, 2)
    alone.register({"layer": layer, "counter": Counter()})
    other = DenseState(CpuBackend())
    with torch.no_grad():
        changed = torch.nn.Linear(2, 2)
        changed.load_state_dict(layer.state_dict())
    other.register({"layer": changed, "counter": Counter()})

    def body(ranks: Any) -> list[str]:
        dense = (alone, other)[ranks.rank]
        dense.keep_once(ranks)
        return sorted(torch.load(io.BytesIO(dense.capture()()), weights_only=True)["objects"])

    assert meet(2, body) == [["counter", "layer"], ["counter"]]
    with torch.no_grad():
        changed.weight += 1
    assert meet(2, body) == [["counter", "layer"], ["counter", "layer"]]


def test_tensors_of_any_layout_are_kept_once() -> None:
    def body(ranks: Any) -> list[str]:
        dense = DenseState(CpuBackend())
        for name, value in {
            "sparse": torch.eye(3).to_sparse(),
            "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
            "other": torch.eye(3).to_sparse() * ranks.rank,
        }.items():
            module = torch.nn.Module()
            module.register_buffer("value", value)
            dense.register({name: module})
        dense.keep_once(ranks)
        return sorted(torch.load(io.BytesIO(dense.capture()()), weights_only=True)["objects"])

    assert meet(2, body) == [["conjugate", "other", "sparse"], ["other"]]


@pytest.mark.parametrize("what", ["weights", "state", "buffers"])
def test_an_object_that_begins_to_differ_is_kept_by_each_rank(what: str) -> None:
    """A warning names it and says what the user may have forgotten. Of a model, buffers alone may differ."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())

    def body(ranks: Any) -> list[list[str]]:
        dense, layer = DenseState(CpuBackend()), layers[ranks.rank]
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0 if what == "state" else 0.5, momentum=0.5)
        dense.register({"layer": layer, "optimizer": optimizer})
        dense.keep_once(ranks)
        dense.keep_apart(ranks)
        assert len(dense.same) == 2
        if what == "buffers":
            layer(torch.full((3, 64), float(ranks.rank)))
        else:
            layer(torch.arange(128.0).reshape(2, 64) * (1 + ranks.rank)).square().mean().backward()
            optimizer.step()
        dense.keep_apart(ranks)
        found = torch.load(io.BytesIO(dense.capture()()), weights_only=True)["objects"]
        return [sorted(found), sorted(found["layer"])]

    buffers = ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    every = ["0.bias", "0.weight", "1.bias", *buffers, "1.weight"]
    expected = {"weights": [["layer", "optimizer"], every], "state": [["layer", "optimizer"], buffers],
                "buffers": [["layer"], buffers]}  # fmt: skip
    warned: Any = nullcontext()
    if what != "buffers":
        warned = pytest.warns(
            UserWarning, match="each rank commits its own: if the ranks train one model, wrap it in D"
        )
    with warned:
        assert meet(2, body) == [[["layer", "optimizer"], every], expected[what]]


def train_apart(_: AnyCommunicator, case: str, folder: str, *, how: str, stop: bool) -> dict[str, Any]:
    """Train a model with a batch norm, or stop after a commit inside the pass; return its weights and buffers."""
    one = CASES[case]
    with open_sharded(one, folder) as cache:
        torch.manual_seed(1)
        model: Any = Net(cache, one)
        model.top = torch.nn.Sequential(torch.nn.BatchNorm1d(model.top.in_features), model.top)
        if how != "apart":
            model = DistributedDataParallel(model, broadcast_buffers=how == "broadcast")
        cache.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=one.dense_lr, momentum=0.5))
        for p in cache.passes(epochs=1):
            for batch in p.batches(one.batch):
                step([batch], model, cache.optimizer)
                if stop:
                    cache.commit()
                    return {}
        return dense_of(model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["apart", "buffers of their own", "broadcast"])
def test_ranks_resume_with_their_own_weights_and_buffers(ranks_pool: RanksPool, tmp_path: Path, how: str) -> None:
    """Models whose gradients nothing averages, and statistics of a batch norm: as in an uninterrupted training."""
    found = dict[str, Any]()
    for name in ("whole", "left"):
        if name == "left":
            on_ranks(ranks_pool, 2, tmp_path / name, body=train_apart, how=how, stop=True)
        found[name] = on_ranks(ranks_pool, 2, tmp_path / name, body=train_apart, how=how, stop=False)
    for one, other in zip(found["left"], found["whole"], strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            np.testing.assert_array_equal(one[name], value, err_msg=name)
    differs = "dense.top.0.running_mean" if how != "apart" else "dense.top.1.weight"
    assert not np.array_equal(*(one[differs] for one in found["whole"]))


class Counter:
    """A user's object that may differ between ranks."""

    def state_dict(self) -> dict[str, int]:
        return {"number": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take nothing."""


# -- shards of dense state, and what ranks go through --------------------------------------------------------


def sharded(ranks: AnyCommunicator, cache: tc.TierCache) -> tuple[BagsNet, Callable[[], list[list[float]]]]:
    """Register a model with a sharded layer, and Adam; return it, and a function of this rank's weights and moments."""
    torch.manual_seed(1)
    model = BagsNet(cache.schema)
    fully_shard(model.top, mesh=init_device_mesh("cpu", (ranks.size,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    cache.register(model=model, optimizer=optimizer)

    def local() -> list[list[float]]:
        weight: Any = model.top.weight
        states = [weight, *(optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq"))]
        return [one.detach().to_local().flatten().tolist() for one in states]

    return model, local


def restored(ranks: AnyCommunicator, folder: str) -> list[list[float]]:
    with opened(folder, "resumed.tc") as cache:
        _, local = sharded(ranks, cache)
        cache.restore()
        return local()


def refused(ranks: AnyCommunicator, folder: str) -> str:
    with pytest.raises(StateError) as caught:
        restored(ranks, folder)
    return str(caught.value)


def resume_sharded(ranks: AnyCommunicator, folder: str) -> dict[str, Any]:
    """Train an epoch with a sharded layer, and restore it; return this rank's numbers then."""
    with opened(folder, "resumed.tc") as cache:
        model, local = sharded(ranks, cache)
        for p in cache.passes(epochs=1):
            for batch in p.batches(16):
                step_by(cache, model(batch).square().mean() * batch.weight)
        trained = local()
    return {"trained": trained, "restored": restored(ranks, folder)}


def test_each_rank_restores_its_own_shards_of_an_optimizer(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Before the first step an optimizer has no state, and so the same on all ranks."""
    CASE.cut(tmp_path / "passes")
    first, second = ranks_pool.run(2, resume_sharded, folder=str(tmp_path))
    assert first["restored"] == first["trained"] != second["trained"] == second["restored"]
    for error in ranks_pool.run(3, refused, folder=str(tmp_path)):
        assert re.search(r"the state of model, optimizer in .* is sharded over 2 ranks, .* there are 3 now", error)
    again = ranks_pool.run(2, restored, folder=str(tmp_path))
    assert again == [first["trained"], second["trained"]], "the refused ranks changed the store"


def differing(ranks: AnyCommunicator, folder: str, what: str) -> str:
    with opened(folder, f"{what}.tc") as cache:
        try:
            if what == "epochs":
                next(cache.passes(epochs=1 + ranks.rank))
            else:
                next(cache.evaluate(tc.PassDataset.open(f"{folder}/passes{ranks.rank}")))
        except RankError as caught:
            return str(caught)
    return "no error"


@pytest.mark.parametrize("what", ["epochs", "the evaluated dataset"])
def test_ranks_that_differ_in_what_they_go_through_are_told(ranks_pool: RanksPool, tmp_path: Path, what: str) -> None:
    """They would wait for each other for ever, or read each other's rows."""
    CASE.cut(tmp_path / "passes")
    for rank in range(2):
        replace(CASE, data_seed=10 + rank).cut(tmp_path / f"passes{rank}")
    for error in ranks_pool.run(2, differing, folder=str(tmp_path), what=what):
        assert what in error
        assert "rank 1" in error


def commit_within(ranks: AnyCommunicator, folder: str, *, restarts: bool) -> dict[str, Any]:
    """Look up a quarter of the keys on rank 0 and the rest on rank 1, and commit after the second of four steps."""
    keys = torch.arange(32).view(4, 8)
    with tc.TierCache(f"{folder}/uneven.tc", f"{folder}/keys", **OPTIONS) as cache:
        module = tc.Embedding(cache.schema, "k")
        cache.register(model=module)
        for p in cache.passes(epochs=1):
            begin = p.start_batch, p.start_sample
            for step in range(p.start_batch, 4):
                step_by(cache, module(keys[step, slice(0, 2) if ranks.rank == 0 else slice(2, 8)]).sum())
                if step == 1 and not restarts:
                    cache.commit()
                    p.stop()
                    break
        with torch.no_grad():
            return {"begin": begin, "rows": module(keys.flatten()).sum(1).tolist()}


def test_a_commit_within_a_pass_counts_the_plain_keys_of_all_ranks(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Ranks may have different numbers of samples; a restart begins after those of all."""
    schema = tc.Schema(tables=(table("k", 4),), features=(tc.Feature(name="k", table="k"),))
    tc.write_key_sets(tmp_path / "keys", schema, [{"k": np.arange(32)}])
    for restarts in (False, True):
        found = ranks_pool.run(2, commit_within, folder=str(tmp_path), restarts=restarts)
        assert [one["begin"] for one in found] == [(2, 16) if restarts else (0, 0)] * 2
    first, second = found
    assert first["rows"] == second["rows"]
