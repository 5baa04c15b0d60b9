"""Gradients of rows on two ranks: overflows of one, DistributedDataParallel's modes and FSDP."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tiercache as tc
from tests.dist.trainings import OPTIONS, assert_same_rows, step_by, stored
from tests.train.cases import SPECS, Case, table
from tests.train.test_plain_keys import MODELS, PASSES, STEPS, World
from tiercache.errors import StateError

if TYPE_CHECKING:
    from tests.dist.pool import RanksPool
    from tiercache.dist.communicator import AnyCommunicator

CASE = Case(
    tables=(table("a", 4, tc.optim.SGD(learning_rate=0.1)), table("b", 4)), specs=SPECS, num_samples=96, pass_rows=96
)


class Net(nn.Module):
    """Bags and a layer, or only bags."""

    def __init__(self, schema: tc.Schema, *, dense: bool = True) -> None:
        super().__init__()
        self.bag = tc.EmbeddingBagCollection(schema, mode={spec.name: spec.mode for spec in SPECS})
        self.top = nn.Linear(self.bag.out_features, 1) if dense else None

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        bags = self.bag(batch)
        return bags.sum(1) if self.top is None else self.top(bags).squeeze(1)


def opened(folder: str, name: str) -> tc.TierCache:
    return tc.TierCache(Path(folder) / name, tc.PassDataset.open(Path(folder) / "passes"), **OPTIONS)


def wrapped(ranks: AnyCommunicator, net: Any, how: str) -> Any:
    """Return a model in a wrapper of torch, or as it is."""
    if "fsdp" in how:
        mesh = init_device_mesh("cpu", (ranks.size,))
        fully_shard(net.top if how == "fsdp of a part" else net.bag, mesh=mesh)
        return net if how == "fsdp of a part" else fully_shard(net, mesh=mesh)
    return DistributedDataParallel(net, static_graph=how == "static") if how in {"ddp", "static", "clipped"} else net


def train_scaled(
    ranks: AnyCommunicator,
    folder: str,
    *,
    large: list[list[int]],
    wraps: str = "nothing",
    dense: bool = True,
    registers: bool = True,
    epochs: int = 1,
    batch: int = 16,
    drops_first: bool = False,
    commit_after: int | None = None,
) -> dict[str, Any]:
    """Train under a scaler; at [pass, batch, rank] of ``large`` the gradients of a rank are not finite."""
    cache = opened(folder, "scaled.tc")
    torch.manual_seed(1)
    model = wrapped(ranks, Net(cache.schema, dense=dense), wraps)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    cache.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    if registers:
        cache.register(scaler=scaler)
    scales, passes = list[float](), list[int]()
    try:
        for p in cache.passes(epochs=epochs):
            for i, samples in enumerate(p.batches(batch)):
                if drops_first:
                    cache.optimizer.zero_grad()
                loss = model(samples).square().mean() * samples.weight
                scaler.scale(loss * (torch.inf if [p.index, i, ranks.rank] in large else 1.0)).backward()
                scaler.step(cache.optimizer)
                scaler.update()
                if not drops_first:
                    cache.optimizer.zero_grad()
                scales.append(scaler.get_scale())
                if i == commit_after:
                    cache.commit()
            passes.append(p.index)
    except tc.errors.RankError as caught:
        cache._close(failed=True)
        return {"error": str(caught), "scales": scales}
    steps = cache.optimizer.rows.steps
    cache.close()
    return {"scales": scales, "steps": steps, "passes": passes}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("wraps", "dense"), [("ddp", True), ("ddp", False), ("nothing", False), ("fsdp", True), ("fsdp of a part", True)]
)
def test_an_overflow_on_one_rank_skips_the_step_of_all(
    ranks_pool: RanksPool, tmp_path: Path, wraps: str, dense: bool
) -> None:
    """Scales stay the same everywhere: by the gradients of anchors, or by a scaler that was registered."""
    CASE.cut(tmp_path / "passes")
    how = {"wraps": wraps, "dense": dense, "registers": wraps not in {"ddp", "fsdp"}}
    found = ranks_pool.run(2, train_scaled, folder=str(tmp_path), large=[[0, 2, 0], [0, 5, 1]], **how)
    assert found == [{"scales": [2.0**10, 2.0**10, 2.0**9, 2.0**9, 2.0**9, 2.0**8], "steps": 4, "passes": [0]}] * 2
    for _, fields in stored(tmp_path, "scaled.tc").values():
        assert all(np.isfinite(field).all() for field in fields)


@pytest.mark.parametrize("drops_first", [False, True])
def test_a_pass_whose_only_step_is_skipped_is_trained(ranks_pool: RanksPool, tmp_path: Path, drops_first: bool) -> None:
    CASE.cut(tmp_path / "passes")
    how = {"large": [[1, 0, 1]], "epochs": 3, "batch": 96, "drops_first": drops_first}
    for one in ranks_pool.run(2, train_scaled, folder=str(tmp_path), **how):
        assert one == {"scales": [2.0**10, 2.0**9, 2.0**9], "steps": 2, "passes": [0, 1, 2]}


@pytest.mark.parametrize(("last", "commits"), [(2, False), (2, True), (5, False), (5, True)])
def test_a_step_that_one_rank_skips_alone_is_an_error_of_all_at_once(
    ranks_pool: RanksPool, tmp_path: Path, last: int, commits: bool
) -> None:
    """In a pass, at its end and at a commit. The error says to register the scaler, and nothing is committed."""
    CASE.cut(tmp_path / "passes")
    how = {"large": [[0, last, 1]], "registers": False, "commit_after": last if commits else None}
    found = ranks_pool.run(2, train_scaled, folder=str(tmp_path), **how)
    assert [sum(scale < 2.0**10 for scale in one["scales"]) for one in found] == [0, 1]
    for one in found:
        assert "did something else" in one["error"], one
        assert "a GradScaler must be registered: cache.register(scaler=scaler)" in one["error"]
        assert "Timed out" not in one["error"]
    with tc.Store.open(tmp_path / "scaled.tc", mode="r") as store:
        assert store.commit is not None
        assert store.commit.cursor == (0, 0)


def train(ranks: AnyCommunicator, folder: str, how: str, *, accumulates: bool) -> dict[str, Any]:
    with opened(folder, f"{how}.tc") as cache:
        torch.manual_seed(1)
        model = wrapped(ranks, Net(cache.schema), how)
        cache.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer, losses, error = cache.optimizer, [], ""
        try:
            for p in cache.passes(epochs=1):
                for i, batch in enumerate(p.batches(16)):
                    waits = accumulates and i % 2 == 0
                    syncs = nullcontext() if not waits or how != "ddp" else model.no_sync()
                    with syncs:
                        loss = model(batch).square().mean() * batch.weight
                        loss.backward()
                    losses.append(loss.item())
                    if not waits:
                        if how == "by hand":
                            for one in model.parameters():
                                torch.distributed.all_reduce(one.grad)
                                one.grad /= ranks.size
                        elif how == "clipped":
                            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                        optimizer.step()
                        optimizer.zero_grad()
        except (RuntimeError, StateError) as caught:
            error = str(caught).splitlines()[0]
            cache._close(failed=True)
        return {"losses": losses, "error": error}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize(("size", "how"), [(2, "static"), (2, "fsdp"), (2, "by hand"), (1, "fsdp")])
def test_other_wrappers_train_as_plain_data_parallel(
    ranks_pool: RanksPool, tmp_path: Path, size: int, how: str, accumulates: bool
) -> None:
    """A static graph, FSDP, which takes anchors as any parameter, and loops that average; accumulated and not."""
    CASE.cut(tmp_path / "passes")
    plain = "ddp" if size > 1 else "plain"
    sides = [
        ranks_pool.run(size, train, folder=str(tmp_path), how=one, accumulates=accumulates) for one in (how, plain)
    ]
    for mine, other in zip(*sides, strict=True):
        assert mine["error"] == ""
        np.testing.assert_allclose(mine["losses"], other["losses"], rtol=1e-5)
    assert_alike(tmp_path, f"{how}.tc", f"{plain}.tc")


def assert_alike(folder: Path, one: str, other: str) -> None:
    """Compare the rows of two stores, within the roundings of some steps."""
    for mine, theirs in zip(stored(folder, one).values(), stored(folder, other).values(), strict=True):
        for numbers, others in zip(mine[1], theirs[1], strict=True):
            np.testing.assert_allclose(numbers, others, rtol=1e-4, atol=1e-6)


def test_clipping_that_leaves_rows_out_is_refused_on_ranks_too(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Also under DistributedDataParallel. A loop that averages gradients itself leaves whole numbers in the anchor."""
    CASE.cut(tmp_path / "passes")
    found = ranks_pool.run(2, train, folder=str(tmp_path), how="clipped", accumulates=False)
    for one in found:
        assert "gradients were changed" in one["error"]
        assert "cache.clip_grad_norm_" in one["error"]


class Words(nn.Module):
    """Two tables of plain keys."""

    def __init__(self, schema: tc.Schema) -> None:
        super().__init__()
        self.one, self.two = tc.Embedding(schema, "one"), tc.EmbeddingBag(schema, "two", mode="mean")

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        return (self.one(keys[:, 0]) * self.two(keys)).sum(1)


def plain(ranks: AnyCommunicator, folder: str, name: str, *, wrong: str) -> dict[str, Any]:
    keys = torch.from_numpy(np.random.default_rng(0).integers(0, 40, (64, 3)))
    error = ""
    cache = tc.TierCache(Path(folder) / name, tc.PassDataset.open(Path(folder) / "keys"), **OPTIONS)
    try:
        torch.manual_seed(1)
        model = Words(cache.schema)
        cache.register(model=model)
        for p in cache.passes(epochs=1):
            for some in keys.view(4, 16, 3):
                mine = some[ranks.rank :: ranks.size]
                if wrong == "validates alone" and ranks.rank == 0:
                    with torch.no_grad():
                        model.two(mine)
                if wrong == "other order" and ranks.rank == 0:
                    model.two(mine)
                step_by(cache, model(mine).square().mean())
                with torch.no_grad():
                    model(torch.arange(100, 106).view(2, 3) + p.index)
    except tc.errors.RankError as caught:
        error = str(caught)
        cache._close(failed=True)
    cache.close()
    return {"error": error}


def cut_keys(folder: Path, passes: int = 1) -> None:
    """Write key sets of two tables."""
    optimizer, uniform = tc.optim.Adagrad(learning_rate=0.1), tc.init.Uniform(low=-1, high=1)
    tables = [tc.Table(name=name, dim=4, optimizer=optimizer, initializer=uniform) for name in ("one", "two")]
    tc.write_key_sets(folder / "keys", tables, [{"one": np.arange(40), "two": np.arange(40)}] * passes)


def test_ranks_train_plain_keys_as_one_process(ranks_pool: RanksPool, tmp_path: Path) -> None:
    cut_keys(tmp_path)
    for size in (1, 2):
        found = ranks_pool.run(size, plain, folder=str(tmp_path), name=f"{size}.tc", wrong="")
        assert [one["error"] for one in found] == [""] * size
    assert_alike(tmp_path, "1.tc", "2.tc")


@pytest.mark.parametrize("wrong", ["validates alone", "other order"])
def test_ranks_that_look_other_keys_up_are_told_so(ranks_pool: RanksPool, tmp_path: Path, wrong: str) -> None:
    cut_keys(tmp_path)
    for one in ranks_pool.run(2, plain, folder=str(tmp_path), name="wrong.tc", wrong=wrong):
        assert "look" in one["error"], one


def beside_batches(ranks: AnyCommunicator, folder: str, when: str, *, evaluates: bool) -> dict[str, Any]:
    """Train batches; rank 0 validates by itself, at some moment of a step."""
    error = ""
    with opened(folder, f"{when}.tc") as cache:
        torch.manual_seed(1)
        model, rows = Net(cache.schema), tc.Embedding(cache.schema, "g")
        cache.register(model=model, rows=rows, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

        def validate(now: str) -> None:
            if ranks.rank or now != when:
                return
            if evaluates:
                next(cache.evaluate(cache.dataset))
            with torch.no_grad():
                rows(torch.arange(5))

        try:
            for p in cache.passes(epochs=1):
                for batch in p.batches(16):
                    validate("before forward")
                    loss = model(batch).square().mean() * batch.weight
                    validate("before backward")
                    loss.backward()
                    validate("before step")
                    cache.optimizer.step()
                    cache.optimizer.zero_grad()
                validate("at the end of the pass")
        except tc.errors.RankError as caught:
            error = str(caught)
            cache._close(failed=True)
    return {"error": error}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("when", ["before forward", "before backward", "before step", "at the end of the pass"])
def test_a_validation_of_one_rank_beside_batches_is_told_at_once(
    ranks_pool: RanksPool, tmp_path: Path, when: str, evaluates: bool
) -> None:
    """No step gets the keys of a validation, and no rank waits for a time-out."""
    CASE.cut(tmp_path / "passes")
    for one in ranks_pool.run(2, beside_batches, folder=str(tmp_path), when=when, evaluates=evaluates):
        assert "all ranks must make the same" in one["error"], one


def one_leaves(ranks: AnyCommunicator, folder: str) -> dict[str, Any]:
    error = ""
    cache = opened(folder, "left.tc")
    rows = tc.Embedding(cache.schema, "g")
    cache.register(rows=rows)
    try:
        if ranks.rank == 1:
            raise ZeroDivisionError
        with torch.no_grad():
            rows(torch.arange(5))
    except (tc.errors.RankError, ZeroDivisionError) as caught:
        error = type(caught).__name__ + str(caught)
        cache._close(failed=True)
    return {"error": error}


def test_a_rank_that_fails_ends_a_lookup_of_the_others(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Immediately, without a time-out, and the error says what they were doing."""
    CASE.cut(tmp_path / "passes")
    found = ranks_pool.run(2, one_leaves, folder=str(tmp_path))
    assert "RankErrora rank ended or did not answer while rank 0 was looking up keys" in found[0]["error"]
    assert "Timed out" not in found[0]["error"]
    assert found[1]["error"] == "ZeroDivisionError"


def without_store(ranks: AnyCommunicator, folder: str) -> dict[str, Any]:
    """Train all rows on each rank."""
    passes = tc.PassDataset.open(Path(folder) / "passes")
    with pytest.warns(UserWarning, match=f"each of the {ranks.size} ranks trains its own copy of all rows"):
        cache = tc.TierCache(None, passes)
    bag = tc.EmbeddingBag(cache.schema, SPECS[0].name, mode="sum")
    cache.register(bag=bag)
    for p in cache.passes(epochs=1):
        for batch in p.batches(16):
            step_by(cache, bag(batch).square().mean())
    return {"sum": float(cache.live_rows().fields(SPECS[0].table, np.arange(30))[0].sum())}


def test_a_cache_without_store_trains_alone_on_each_rank_and_says_so(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """A baseline may need exactly that."""
    CASE.cut(tmp_path / "passes")
    one, two = ranks_pool.run(2, without_store, folder=str(tmp_path))
    assert one == two
    assert np.isfinite(one["sum"])


def train_model(ranks: AnyCommunicator, folder: str, name: str) -> dict[str, Any]:
    """Train a converted model on plain keys; in each step every rank has a different batch."""
    world = World(name, Path(folder) / f"rank{ranks.rank}", ranks=ranks.size)
    model = DistributedDataParallel(world.ours)
    given: dict[str, Any] = {"model": model} | ({} if world.dense is None else {"optimizer": world.dense})
    losses = []
    with tc.TierCache(Path(folder) / "m.tc", world.data, **given, **OPTIONS) as cache:
        for p in cache.passes(epochs=1):
            for one, _ in world.batches[p.sub_dataset][ranks.rank :: ranks.size]:
                loss = model(*one)
                step_by(cache, loss)
                losses.append(loss.item())
    return {"losses": losses}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_trains_on_two_ranks_to_the_losses_of_torch(
    ranks_pool: RanksPool, tmp_path: Path, name: str
) -> None:
    """No line of forward is changed; over 200 steps."""
    found = ranks_pool.run(2, train_model, folder=str(tmp_path), name=name)
    world, theirs = World(name, tmp_path / "alone", ranks=2), []
    for some in world.batches:
        for one, two in zip(some[::2], some[1::2], strict=True):
            theirs.append(world.step_theirs(one[0], two[0]))
    ours = np.mean([one["losses"] for one in found], axis=0)
    assert ours.shape == (PASSES * STEPS,)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def train_by_outputs(ranks: AnyCommunicator, folder: str, *, gives: str) -> str:
    """Pass gradients of outputs to backward, twice for each step; return the error of the first step."""
    data = tc.PassDataset.open(Path(folder) / "passes")
    sharding = {"a": "table_wise", "b": "column_wise"}
    with tc.TierCache(Path(folder) / f"{gives}.tc", data, sharding=sharding, **OPTIONS) as cache:
        bag = tc.EmbeddingBagCollection(cache.schema, ["g", "h"])
        cache.register(bag=bag)
        for p in cache.passes(epochs=1):
            for batch in p.batches(32, read_by="owner"):
                held = torch.ones(len(batch), 2 * bag.out_features)
                for factor in (1.0, 2.0):
                    gradient = held.fill_(factor) if gives == "one buffer" else torch.full_like(held, factor)
                    bag(batch).backward(gradient[:, : bag.out_features])
                if gives == "a view that changes":
                    torch.cat([bag(batch), bag(batch)], dim=1).backward(held)
                    held.zero_()
                else:
                    cache.clip_grad_norm_(0.5)
                try:
                    cache.optimizer.step()
                except StateError as error:
                    cache._close(failed=True)
                    return str(error)
                cache.optimizer.zero_grad()
    return ""


def test_gradients_that_backward_is_given_are_those_of_then(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Also of features that their owners pool."""
    CASE.cut(tmp_path / "passes")
    for gives in ("fresh ones", "one buffer"):
        assert ranks_pool.run(2, train_by_outputs, folder=str(tmp_path), gives=gives) == ["", ""]
    assert_same_rows(stored(tmp_path, "fresh ones.tc"), stored(tmp_path, "one buffer.tc"))
    for error in ranks_pool.run(2, train_by_outputs, folder=str(tmp_path), gives="a view that changes"):
        assert "was changed in place after backward()" in error


def validate_alone(ranks: AnyCommunicator, folder: str) -> dict[str, Any]:
    """Look up keys on rank 0 alone, in the middle of a pass and after the loop, while rank 1 continues."""
    keys, found = torch.arange(50), {}
    with tc.TierCache(Path(folder) / "m.tc", tc.PassDataset.open(Path(folder) / "keys"), **OPTIONS) as cache:
        model = Words(cache.schema)
        cache.register(model=model)
        for p in cache.passes(epochs=1):
            for some in torch.arange(36).view(4, 3, 3):
                step_by(cache, model(some).square().mean())
            if ranks.rank == 0 and p.index == 2:
                with tc.Store.open(Path(folder) / "m.tc", mode="r") as store:
                    known = store.lookup("one", keys.numpy(), missing="initial")["vector"]
                with cache.lookups(local=True), torch.no_grad():
                    found["in the pass"] = np.array_equal(model.one(keys).numpy(), known)
                with pytest.raises(tc.errors.StateError, match="no_grad"), cache.lookups(local=True):
                    model.one(keys[:3])
        with torch.no_grad():
            now = model.two(keys.view(10, 5))
            if ranks.rank == 0:
                with cache.lookups(local=True):
                    found["after it"] = torch.equal(model.two(keys.view(10, 5)), now)
    return found


def test_rank_0_validates_alone_on_the_rows_of_the_last_commit(ranks_pool: RanksPool, tmp_path: Path) -> None:
    """Without a collective: the other rank takes no part."""
    cut_keys(tmp_path, passes=3)
    found = ranks_pool.run(2, validate_alone, folder=str(tmp_path))
    assert found == [{"in the pass": True, "after it": True}, {}]
