"""A plain DLRM adopts tiercache by replacing its `nn.EmbeddingBag`s, and trains to torch's numbers.

Both sides run the loop that people write, and the same variants of it: loss scaling, clipping, schedulers,
accumulation, two optimizers, batches fetched ahead. The rows are out of core: the device holds a quarter of them, and
in the middle the training process is killed; another one resumes from its last commit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import tiercache as tc
from tiercache.data.dataset_writer import write_dataset
from tiercache.data.raw_batch import FeatureKeys, RawBatch
from tiercache.rows.prefetch import initial_vectors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.dist.pool import RanksPool
    from tiercache.dist.communicator import AnyCommunicator

TABLES, ROWS, DIM, DENSE = 8, 400, 16, 4
PASSES, BATCHES, BATCH, EPOCHS = 8, 5, 32, 5
SAMPLES = BATCH * BATCHES - 5
"""Samples of a pass: its last batch is smaller, and is not divided by two."""
STEPS = PASSES * BATCHES * EPOCHS
GIVEN_UP = STEPS // 2 + 2
"""The step at which a training ends, to be resumed from its last commit."""
FORKED = multiprocessing.get_context("forkserver")
"""Creates processes that have imported everything, and have no threads yet."""
FORKED.set_forkserver_preload(["tests.train.test_adoption"])
DENSE_RATE, ROW_RATE = 0.05, 0.2
ROW_OPTIMIZERS = {
    "SGD": tc.optim.SGD(learning_rate=ROW_RATE),
    "Adagrad": tc.optim.Adagrad(learning_rate=ROW_RATE, initial_accumulator=0.1),
}


# -- the model, as people write it ----------------------------------------------------------------------------


class DLRM(nn.Module):
    """A bottom of dense features, a vector for each table, the products of all pairs, and a top."""

    def __init__(self, tables: list[nn.Module], top_width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 16), nn.ReLU(), nn.Linear(16, DIM), nn.ReLU())
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(nn.Linear(DIM + pairs, top_width), nn.ReLU(), nn.Linear(top_width, 1))
        self.register_buffer("rows_of_pairs", torch.tril_indices(TABLES + 1, TABLES + 1, offset=-1))

    def forward(self, dense: torch.Tensor, bags: list[Any]) -> torch.Tensor:
        x = self.bottom(dense)
        looked_up = [
            table(*bag) if isinstance(bag, tuple) else table(bag) for table, bag in zip(self.tables, bags, strict=True)
        ]
        vectors = torch.stack([x, *looked_up], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        i, j = self.rows_of_pairs
        return self.top(torch.cat([x, products[:, i, j]], dim=1)).squeeze(1)

    def dense_parameters(self) -> list[nn.Parameter]:
        return [*self.bottom.parameters(), *self.top.parameters()]


# -- the data: pass p has the keys of a window, most of them several times ------------------------------------


def schema_of(optimizer: str) -> tc.Schema:
    features = [tc.Feature(name=f"f{t}", hotness="ragged" if t % 2 else "one_hot") for t in range(TABLES)]
    initializer = tc.init.Uniform(low=-0.3, high=0.3)
    tables = [
        tc.Table(name=one.name, dim=DIM, optimizer=ROW_OPTIMIZERS[optimizer], initializer=initializer)
        for one in features
    ]
    dense = tuple(tc.DenseFeature(column=f"d{i}") for i in range(DENSE))
    return tc.Schema(features=tuple(features), tables=tuple(tables), label="y", dense=dense)


def samples() -> list[RawBatch]:
    chance = np.random.default_rng(5)
    found = []
    for p in range(PASSES):
        n, features = SAMPLES, {}
        for t in range(TABLES):
            offsets = np.concatenate([[0], np.cumsum(chance.integers(0, 5, n))]) if t % 2 else None
            count = n if offsets is None else int(offsets[-1])
            keys = (p * ROWS // PASSES + (chance.random(count) ** 2 * ROWS / 6).astype(np.int64)) % ROWS
            features[f"f{t}"] = FeatureKeys(keys, offsets)
        dense = chance.normal(size=(n, DENSE)).astype(np.float32)
        label = (dense.sum(axis=1) + chance.normal(size=n) > 0).astype(np.float32)
        found.append(RawBatch(label, dense, features))
    return found


# -- two sides of one training --------------------------------------------------------------------------------


@dataclass
class Side:
    """A model and its optimizers; the loops see nothing else."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    clip: Callable[[float], Any]
    rate_optimizers: list[torch.optim.Optimizer]
    """The optimizers that get a scheduler."""
    register: Callable[..., None]
    losses: dict[int, float] = field(default_factory=dict)
    overflows: bool = True
    """True if losses are sometimes so large that scaled gradients are infinite."""
    rows: list[Any] = field(default_factory=list)


Batches = Any


@dataclass(frozen=True)
class Loop:
    """A training loop over the batches of a pass, with its state besides model and optimizers."""

    run: Callable[[Side, dict[str, Any], Batches], None]
    begin: Callable[[Side, dict[str, Any]], None] = lambda _side, _state: None
    fetches_ahead: bool = False
    """True if it takes its batches from a loader that fetches one ahead and does not know passes."""


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """Return torch's. An accumulator that starts at 0 would divide small gradients, and their noise, by themselves."""
    if name == "Adagrad":
        return torch.optim.Adagrad(parameters, lr=DENSE_RATE, initial_accumulator_value=0.1)
    return torch.optim.SGD(parameters, lr=DENSE_RATE)


def torch_optimizer(name: str, model: DLRM, tables: slice = slice(None), dense: list[Any] | None = None) -> Any:
    """Return torch's optimizer, with the tables as its second group."""
    groups = [
        {"params": model.dense_parameters() if dense is None else dense, "lr": DENSE_RATE},
        {"params": [p for table in model.tables[tables] for p in table.parameters()], "lr": ROW_RATE},
    ]
    return make_optimizer(name, groups)


def theirs(optimizer: str, data: list[RawBatch], loop: Loop, *, gan: bool) -> Side:
    torch.manual_seed(1)
    tables = [nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(TABLES)]
    torch.manual_seed(1)
    model = DLRM(list(tables))
    for table, spec in zip(tables, schema_of(optimizer).tables, strict=True):
        table.weight.data = torch.from_numpy(initial_vectors(spec, np.arange(ROWS)))
    optimizers = [torch_optimizer(optimizer, model)]
    if gan:
        optimizers = [
            torch_optimizer(optimizer, model, slice(0, 4), [*model.bottom.parameters()]),
            torch_optimizer(optimizer, model, slice(4, 8), [*model.top.parameters()]),
        ]
    side = Side(
        model, optimizers, lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm), optimizers, lambda **_: None
    )
    train_in_memory(side, loop, data)
    return side


def train_in_memory(side: Side, loop: Loop, data: list[RawBatch]) -> None:
    state: dict[str, Any] = {}
    loop.begin(side, state)
    for index in range(PASSES * EPOCHS):
        part = data[index % PASSES]
        cuts = [part.slice(b * BATCH, min(SAMPLES, b * BATCH + BATCH)) for b in range(BATCHES)]
        loop.run(side, state, [(index * BATCHES + b, *torch_batch(cut)) for b, cut in enumerate(cuts)])


def torch_batch(part: RawBatch) -> tuple[Any, ...]:
    bags = []
    for one in part.features.values():
        offsets = np.arange(part.dense.shape[0]) if one.offsets is None else one.offsets[:-1]
        bags.append((torch.from_numpy(one.keys), torch.from_numpy(offsets)))
    assert part.label is not None
    return torch.from_numpy(part.dense), bags, torch.from_numpy(part.label), 1.0


class GivenUpError(Exception):
    """A rank leaves its training: processes of the pool are not killed (tests/dist/test_torchrun.py kills ranks)."""


def ours(optimizer: str, folder: Path, passes: tc.PassDataset, name: str) -> Side:
    first = FORKED.Process(target=killed, args=(optimizer, folder, name))
    first.start()
    first.join(120)
    assert first.exitcode == -signal.SIGKILL
    losses = {int(step): loss for step, loss in json.loads(folder.with_suffix(".json").read_text()).items()}
    with tc.Store.open(folder, tables=passes.tables) as store:
        assert store.commit is not None
        side = ours_until(optimizer, store, passes, LOOPS[name], losses, None, gan=name == "two optimizers")
        side.rows = rows_of(store)
    return side


def killed(optimizer: str, folder: Path, name: str) -> None:
    losses: dict[int, float] = {}

    def kill() -> None:
        folder.with_suffix(".json").write_text(json.dumps(losses))
        os.kill(os.getpid(), signal.SIGKILL)

    passes = tc.PassDataset.open(folder.with_name("passes"))
    ours_until(optimizer, folder, passes, LOOPS[name], losses, GIVEN_UP, kill, gan=name == "two optimizers")


def on_ranks(ranks: AnyCommunicator, *, name: str, optimizer: str, folder: str, stop: int | None) -> dict[str, Any]:
    """Train as one of several ranks, with DistributedDataParallel; only the first one's losses overflow."""
    losses: dict[int, float] = {}
    dense: list[Any] = []
    passes = tc.PassDataset.open(Path(folder) / "passes")
    with suppress(GivenUpError):
        side = ours_until(
            optimizer, Path(folder) / "model.tc", passes, LOOPS[name], losses, stop, gan=False, rank=ranks.rank,
            size=ranks.size,
        )  # fmt: skip
        dense = [one.detach().numpy() for one in side.model.module.dense_parameters()]  # type: ignore[operator, union-attr]
    return {"losses": {str(step): loss for step, loss in losses.items()}, "dense": dense}


def give_up() -> None:
    raise GivenUpError


def rows_of(store: tc.Store) -> list[Any]:
    return [store.lookup(f"f{t}", np.arange(ROWS), missing="initial")["vector"] for t in range(TABLES)]


def ours_until(
    optimizer: str, store: tc.Store | Path, passes: tc.PassDataset, loop: Loop, losses: dict[int, float],
    stop: int | None, end: Callable[[], None] = give_up, *, gan: bool, rank: int = 0, size: int = 1,
) -> Side:  # fmt: skip
    torch.manual_seed(1)
    model: Any = DLRM([tc.EmbeddingBag(passes.schema, f"f{t}", mode="sum") for t in range(TABLES)])
    parts: list[Any] = [model.parameters()]
    if gan:
        parts = [[*one.parameters(), *tables.parameters()]
                 for one, tables in ((model.bottom, model.tables[:4]), (model.top, model.tables[4:]))]  # fmt: skip
    optimizers = [make_optimizer(optimizer, part) for part in parts]
    model = DistributedDataParallel(model) if size > 1 else model
    budgets: dict[str, Any] = {"device_budget": row_bytes(optimizer) // 4, "host_budget": "32MiB"}
    with tc.TierCache(store, passes, model=model, optimizer=optimizers, **budgets, progress=False) as cache:
        stepped: list[Any] = [cache.optimizer.part(one) for one in optimizers] if gan else [cache.optimizer]
        side = Side(model, stepped, cache.clip_grad_norm_, [cache.optimizer], cache.register, losses, rank == 0)
        state: dict[str, Any] = {}
        loop.begin(side, state)
        passes_of = by_pass(cache, stop, end)
        for batches in [one_ahead(chain.from_iterable(passes_of))] if loop.fetches_ahead else passes_of:
            loop.run(side, state, batches)
    return side


def row_bytes(optimizer: str) -> int:
    return ROWS * TABLES * (DIM + (DIM if optimizer == "Adagrad" else 0)) * 4


def numbered(p: tc.Pass, batches: Iterator[tc.Batch]) -> Batches:
    return (
        (p.index * BATCHES + b, batch.dense, list(batch.features.values()), batch.label, batch.weight)
        for b, batch in enumerate(batches)
    )


def by_pass(cache: tc.TierCache, stop: int | None, end: Callable[[], None]) -> Iterator[Batches]:
    for p in cache.passes(epochs=EPOCHS):
        yield numbered(p, checked(p, stop, end))


def one_ahead(loader: Iterator[Any]) -> Iterator[Any]:
    """Fetch each batch before the previous one is trained, as Lightning does."""
    held = next(loader)
    for following in loader:
        yield held
        held = following
    yield held


def checked(p: Any, stop: int | None, end: Callable[[], None]) -> Iterator[Any]:
    for b, batch in enumerate(p.batches(BATCH)):
        if p.index * BATCHES + b == stop:
            end()
        yield batch


# -- the loops ------------------------------------------------------------------------------------------------

loss_of = nn.BCEWithLogitsLoss()


def plain(side: Side, _state: dict[str, Any], batches: Batches) -> None:
    for step, dense, bags, label, weight in batches:
        loss = loss_of(side.model(dense, bags), label) * weight
        loss.backward()
        side.optimizers[0].step()
        side.optimizers[0].zero_grad()
        side.losses[step] = loss.item()


def scaled(side: Side, state: dict[str, Any], batches: Batches) -> None:
    """Loss scaling, with an overflow at every 37th step."""
    scaler = state["scaler"]
    for step, dense, bags, label, weight in batches:
        loss = loss_of(side.model(dense, bags), label) * weight
        side.optimizers[0].zero_grad()
        scaler.scale(loss * (1e38 if step % 37 == 36 and side.overflows else 1.0)).backward()
        scaler.step(side.optimizers[0])
        scaler.update()
        side.losses[step] = loss.item()


def begin_scaled(side: Side, state: dict[str, Any]) -> None:
    state["scaler"] = GradScaler("cpu", init_scale=2.0**10, growth_interval=15)
    side.register(scaler=state["scaler"])


def clipped(side: Side, _state: dict[str, Any], batches: Batches) -> None:
    for step, dense, bags, label, weight in batches:
        loss = loss_of(side.model(dense, bags), label) * weight * 5
        loss.backward()
        side.losses[step] = loss.item()
        at = step % BATCHES
        if at % 2 or at == BATCHES - 1:
            side.clip(0.4)
            side.optimizers[0].step()
            side.optimizers[0].zero_grad()


def scaled_and_clipped(side: Side, state: dict[str, Any], batches: Batches) -> None:
    scaler = state["scaler"]
    for step, dense, bags, label, weight in batches:
        loss = loss_of(side.model(dense, bags), label) * weight
        scaler.scale(loss).backward()
        scaler.unscale_(side.optimizers[0])
        side.clip(0.1)
        scaler.step(side.optimizers[0])
        scaler.update()
        side.optimizers[0].zero_grad()
        side.losses[step] = loss.item()


def stepped_rate(side: Side, state: dict[str, Any], batches: Batches) -> None:
    plain(side, state, batches)
    for scheduler in state["schedulers"]:
        scheduler.step()


def begin_stepped_rate(side: Side, state: dict[str, Any]) -> None:
    begin_schedulers(side, state, [StepLR(one, step_size=3, gamma=0.7) for one in side.rate_optimizers])


def begin_schedulers(side: Side, state: dict[str, Any], schedulers: list[Any]) -> None:
    state["schedulers"] = schedulers
    side.register(**{f"scheduler{i}": one for i, one in enumerate(schedulers)})


def one_cycle(side: Side, state: dict[str, Any], batches: Batches) -> None:
    for batch in batches:
        stepped_rate(side, state, [batch])


def begin_one_cycle(side: Side, state: dict[str, Any]) -> None:
    schedulers = []
    for one in side.rate_optimizers:
        rates = [2 * (ROW_RATE if "table" in group else group["lr"]) for group in one.param_groups]
        schedulers.append(OneCycleLR(one, max_lr=rates, total_steps=STEPS + 1, cycle_momentum=False))
    begin_schedulers(side, state, schedulers)


def accumulated(side: Side, _state: dict[str, Any], batches: Batches) -> None:
    for step, dense, bags, label, weight in batches:
        loss = loss_of(side.model(dense, bags), label) * weight
        (loss / 4).backward()
        side.losses[step] = loss.item()
        at = step % BATCHES
        if at % 4 == 3 or at == BATCHES - 1:
            side.optimizers[0].step()
            side.optimizers[0].zero_grad()


def adversarial(side: Side, _state: dict[str, Any], batches: Batches) -> None:
    generator, discriminator = side.optimizers
    for step, dense, bags, label, weight in batches:
        discriminator.zero_grad()
        loss = loss_of(side.model(dense, bags), label) * weight
        loss.backward()
        discriminator.step()
        generator.zero_grad()
        other = loss_of(-side.model(dense, bags), label) * weight
        (other * 0.5).backward()
        generator.step()
        side.losses[step] = loss.item() + other.item()


LOOPS = {
    "plain": Loop(plain),
    "GradScaler": Loop(scaled, begin_scaled),
    "clip_grad_norm": Loop(clipped),
    "both": Loop(scaled_and_clipped, begin_scaled),
    "StepLR": Loop(stepped_rate, begin_stepped_rate),
    "OneCycleLR": Loop(one_cycle, begin_one_cycle),
    "accumulation": Loop(accumulated),
    "one batch ahead": Loop(plain, fetches_ahead=True),
    "OneCycleLR, one batch ahead": Loop(one_cycle, begin_one_cycle, fetches_ahead=True),
    "two optimizers": Loop(adversarial),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "optimizer"), [*zip(LOOPS, cycle(ROW_OPTIMIZERS), strict=False)])
def test_a_loop_gives_the_numbers_of_torch(tmp_path: Path, name: str, optimizer: str) -> None:
    data, gan = samples(), name == "two optimizers"
    passes = write_dataset(tmp_path / "passes", schema_of(optimizer), data)
    reference = theirs(optimizer, data, LOOPS[name], gan=gan)
    side = ours(optimizer, tmp_path / "model.tc", passes, name)
    assert isinstance(side.model, DLRM)
    compare(side.losses, side.model.dense_parameters(), side.rows, reference)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("plain", "Adagrad"), ("GradScaler", "SGD"), ("clip_grad_norm", "SGD"), ("both", "Adagrad"),
     ("OneCycleLR", "Adagrad"), ("accumulation", "SGD")],
)  # fmt: skip
def test_two_ranks_give_the_numbers_of_torch(ranks_pool: RanksPool, tmp_path: Path, name: str, optimizer: str) -> None:
    data = samples()
    write_dataset(tmp_path / "passes", schema_of(optimizer), data)
    reference = theirs(optimizer, data, LOOPS[name], gan=False)
    losses: dict[int, float] = {}
    for stop in (GIVEN_UP, None):
        found = ranks_pool.run(
            2, "tests.train.test_adoption:on_ranks", name=name, optimizer=optimizer, folder=str(tmp_path), stop=stop
        )
        losses |= {int(step): (one + found[1]["losses"][step]) / 2 for step, one in found[0]["losses"].items()}
    with tc.Store.open(tmp_path / "model.tc", mode="r") as store:
        for one in found:
            compare(losses, [torch.from_numpy(weight) for weight in one["dense"]], rows_of(store), reference)


def compare(losses: dict[int, float], dense: Sequence[torch.Tensor], rows: list[Any], reference: Side) -> None:
    assert isinstance(reference.model, DLRM)
    assert len(reference.losses) == len(losses) == STEPS
    np.testing.assert_allclose([losses[s] for s in range(STEPS)], [reference.losses[s] for s in range(STEPS)],
                               atol=1e-5, rtol=1e-5)  # fmt: skip
    for mine, other in zip(dense, reference.model.dense_parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
    for mine, table in zip(rows, reference.model.tables, strict=True):
        np.testing.assert_allclose(mine, table.weight.detach().numpy(), atol=1e-5, rtol=0)
