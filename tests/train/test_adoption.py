"""A plain DLRM adopts tiercache by replacing its `nn.EmbeddingBag`s, and trains to torch's numbers.

Both sides run the loop that people write, and the same variants of it: loss scaling, clipping, schedulers,
accumulation, two optimizers, batches fetched ahead. The rows are out of core: the device holds a quarter of them, and
in the middle the training process is killed; another one resumes from its last commit.
"""

import copy
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import tiercache as tc
from tests.crash.told import finish, start
from tests.datasets import write_dataset
from tests.dist.pool import RanksPool
from tests.train.cases import tiered
from tests.train.test_fetch_ahead import ahead
from tiercache.data.raw_batch import FeatureKeys, RawBatch
from tiercache.dist.communicator import AnyCommunicator
from tiercache.rows.prefetch import initial_vectors

TABLES, ROWS, DIM, DENSE = 8, 400, 16, 4
PASSES, BATCHES, BATCH, EPOCHS = 8, 5, 32, 5
SAMPLES = BATCH * BATCHES - 5  # of a pass: its last batch is smaller, and is not divided by two
STEPS = PASSES * BATCHES * EPOCHS
GIVEN_UP = STEPS // 2 + 2  # the step at which a training ends, to be resumed from its last commit
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

    def parts(self, loop: "Loop") -> list[tuple[list[nn.Parameter], list[nn.Parameter]]]:
        """Return the dense parameters and those of tables that each optimizer has."""
        first, last = ([*tables.parameters()] for tables in (self.tables[:4], self.tables[4:]))
        if loop.two_optimizers:
            return [([*self.bottom.parameters()], first), ([*self.top.parameters()], last)]
        return [(self.dense_parameters(), first + last)]


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

loss_of = nn.BCEWithLogitsLoss()


@dataclass(frozen=True)
class Loop:
    """What a training loop has besides forward, backward and step."""

    scales: bool = False  # the loss, with an overflow at every 37th step
    clip: float | None = None  # the norm of all gradients
    accumulates: int = 1  # batches of a step; the rest of a pass is a step too
    schedule: str | None = None  # rates change at every "batch" or "pass"
    ahead: bool = False  # a loader that does not know passes fetches one batch ahead
    two_optimizers: bool = False  # a backward reaches the parameters of both, a step takes its own


LOOPS = {
    "plain": Loop(),
    "GradScaler": Loop(scales=True),
    "clip_grad_norm": Loop(clip=0.04, accumulates=2),
    "both": Loop(scales=True, clip=0.1),
    "StepLR": Loop(schedule="pass"),
    "OneCycleLR": Loop(schedule="batch"),
    "accumulation": Loop(accumulates=4),
    "one batch ahead": Loop(ahead=True),
    "OneCycleLR, one batch ahead": Loop(schedule="batch", ahead=True),
    "two optimizers": Loop(two_optimizers=True),
}


class Side:
    """A model, its optimizers and its loop, which is the same on both sides."""

    def __init__(
        self, loop: Loop, model: nn.Module, optimizers: list[Any], clip: Callable[[float], Any],
        register: Callable[..., object] = lambda **_: None, losses: dict[int, float] | None = None, *,
        overflows: bool = True,
    ) -> None:  # fmt: skip
        self.loop, self.model, self.optimizers, self.clip = loop, model, optimizers, clip
        self.losses = {} if losses is None else losses
        self.overflows, self.rows = overflows, list[Any]()
        self.scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=15, enabled=loop.scales)
        if loop.scales:
            register(scaler=self.scaler)
        groups = optimizers[0].param_groups
        if loop.schedule == "pass":
            self.scheduler: Any = StepLR(optimizers[0], step_size=3, gamma=0.7)
        elif loop.schedule == "batch":
            rates = [2 * (ROW_RATE if "table" in group else group["lr"]) for group in groups]
            self.scheduler = OneCycleLR(optimizers[0], max_lr=rates, total_steps=STEPS + 1, cycle_momentum=False)
        if loop.schedule:
            register(scheduler=self.scheduler)

    def run(self, batches: Iterable[Any]) -> None:
        """Train the batches of a pass, or of all passes if they are fetched ahead."""
        for batch in batches:
            (self.adversarial if self.loop.two_optimizers else self.step)(*batch)
            if self.loop.schedule == "batch":
                self.scheduler.step()
        if self.loop.schedule == "pass":
            self.scheduler.step()

    def step(self, step: int, dense: torch.Tensor, bags: Any, label: torch.Tensor, weight: float) -> None:
        """Train a batch, as in the documentation of torch.amp."""
        loop, optimizer, at = self.loop, self.optimizers[0], step % BATCHES
        loss = loss_of(self.model(dense, bags), label) * weight
        overflow = 1e38 if loop.scales and self.overflows and step % 37 == 36 else 1.0
        self.scaler.scale(loss * overflow / loop.accumulates).backward()
        self.losses[step] = loss.item()
        if (at + 1) % loop.accumulates == 0 or at == BATCHES - 1:
            if loop.clip:
                self.scaler.unscale_(optimizer)
                self.clip(loop.clip)
            self.scaler.step(optimizer)
            self.scaler.update()
            optimizer.zero_grad()

    def adversarial(self, step: int, dense: torch.Tensor, bags: Any, label: torch.Tensor, weight: float) -> None:
        """Step a discriminator, then a generator."""
        generator, discriminator = self.optimizers
        discriminator.zero_grad()
        loss = loss_of(self.model(dense, bags), label) * weight
        loss.backward()
        discriminator.step()
        generator.zero_grad()
        other = loss_of(-self.model(dense, bags), label) * weight
        (other * 0.5).backward()
        generator.step()
        self.losses[step] = loss.item() + other.item()


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """Return torch's. An accumulator that starts at 0 would divide small gradients, and their noise, by themselves."""
    if name == "Adagrad":
        return torch.optim.Adagrad(parameters, lr=DENSE_RATE, initial_accumulator_value=0.1)
    return torch.optim.SGD(parameters, lr=DENSE_RATE)


def train_in_memory(model: DLRM, optimizer: str, loop: Loop, data: list[RawBatch]) -> Side:
    """Train a model with `nn.EmbeddingBag`s over all batches as torch takes them."""
    optimizers = [
        make_optimizer(optimizer, [{"params": dense}, {"params": tables, "lr": ROW_RATE}])
        for dense, tables in model.parts(loop)
    ]
    side = Side(loop, model, optimizers, lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm))
    for index in range(PASSES * EPOCHS):
        part = data[index % PASSES]
        cuts = [part.slice(b * BATCH, min(SAMPLES, b * BATCH + BATCH)) for b in range(BATCHES)]
        side.run([(index * BATCHES + b, *torch_batch(cut)) for b, cut in enumerate(cuts)])
    return side


def theirs(optimizer: str, data: list[RawBatch], loop: Loop) -> Side:
    """Train with `nn.EmbeddingBag` in memory, from the rows that ours begin with."""
    tables = [nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(TABLES)]
    torch.manual_seed(1)
    model = DLRM(list(tables))
    for table, spec in zip(tables, schema_of(optimizer).tables, strict=True):
        table.weight.data = torch.from_numpy(initial_vectors(spec, np.arange(ROWS)))
    return train_in_memory(model, optimizer, loop, data)


def torch_batch(part: RawBatch) -> tuple[Any, ...]:
    """Return (dense, bags, label) in torch's form, and a weight of 1."""
    bags = []
    for one in part.features.values():
        offsets = np.arange(part.dense.shape[0]) if one.offsets is None else one.offsets[:-1]
        bags.append((torch.from_numpy(one.keys), torch.from_numpy(offsets)))
    return torch.from_numpy(part.dense), bags, torch.from_numpy(part.label), 1.0


class GivenUpError(Exception):
    """A rank leaves its training: processes of the pool are not killed (tests/dist/test_torchrun.py kills ranks)."""


def ours(optimizer: str, folder: Path, passes: tc.PassDataset, name: str) -> Side:
    """Train out of core: first in a process that is killed, then from the last commit."""
    assert finish(start(killed, optimizer, folder, name)) == -signal.SIGKILL
    losses = {int(step): loss for step, loss in json.loads(folder.with_suffix(".json").read_text()).items()}
    with tc.Store.open(folder, tables=passes.tables) as store:
        side = ours_until(optimizer, store, passes, LOOPS[name], losses, None)
        side.rows = rows_of(store)
    return side


def killed(optimizer: str, folder: Path, name: str) -> None:
    """Train up to the step where the process is killed."""
    losses: dict[int, float] = {}

    def kill() -> None:
        folder.with_suffix(".json").write_text(json.dumps(losses))
        os.kill(os.getpid(), signal.SIGKILL)

    passes = tc.PassDataset.open(folder.with_name("passes"))
    ours_until(optimizer, folder, passes, LOOPS[name], losses, GIVEN_UP, kill)


def on_ranks(ranks: AnyCommunicator, *, name: str, optimizer: str, folder: str, stop: int | None) -> dict[str, Any]:
    """Train as one of several ranks, with DistributedDataParallel; only the first one's losses overflow."""
    losses: dict[int, float] = {}
    dense: list[Any] = []
    passes = tc.PassDataset.open(Path(folder) / "passes")
    with suppress(GivenUpError):
        side = ours_until(optimizer, Path(folder) / "model.tc", passes, LOOPS[name], losses, stop, ranks=ranks)
        dense = [one.detach().numpy() for one in side.model.module.dense_parameters()]  # type: ignore[operator, union-attr]
    return {"losses": {str(step): loss for step, loss in losses.items()}, "dense": dense}


def give_up() -> None:
    raise GivenUpError


def rows_of(store: tc.Store) -> list[Any]:
    return [store.lookup(f"f{t}", np.arange(ROWS), missing="initial")["vector"] for t in range(TABLES)]


def ours_until(
    optimizer: str, store: tc.Store | Path, passes: tc.PassDataset, loop: Loop, losses: dict[int, float],
    stop: int | None, end: Callable[[], None] = give_up, *, ranks: AnyCommunicator | None = None,
) -> Side:  # fmt: skip
    """Train up to a step, then call ``end``."""
    torch.manual_seed(1)
    model: Any = DLRM([tc.EmbeddingBag(passes.schema, f"f{t}", mode="sum") for t in range(TABLES)])
    optimizers = [make_optimizer(optimizer, dense + tables) for dense, tables in model.parts(loop)]
    model = DistributedDataParallel(model) if ranks is not None else model
    budgets: dict[str, Any] = {"device_budget": row_bytes(optimizer) // 4, "host_budget": "32MiB"}
    with tc.TierCache(store, passes, model=model, optimizer=optimizers, **budgets, progress=False) as cache:
        stepped = [cache.optimizer.part(one) for one in optimizers] if loop.two_optimizers else [cache.optimizer]
        is_first = ranks is None or ranks.rank == 0
        side = Side(loop, model, stepped, cache.clip_grad_norm_, cache.register, losses, overflows=is_first)
        passes_of = (numbered(p, p.batches(BATCH), stop, end) for p in cache.passes(epochs=EPOCHS))
        for batches in [ahead(chain.from_iterable(passes_of), 1)] if loop.ahead else passes_of:
            side.run(batches)
    return side


def row_bytes(optimizer: str) -> int:
    """Return the bytes of all rows, with the state of an optimizer."""
    return ROWS * TABLES * (DIM + (DIM if optimizer == "Adagrad" else 0)) * 4


def numbered(
    p: tc.Pass, batches: Iterator[tc.Batch], stop: int | None = None, end: Callable[[], None] = give_up
) -> Iterator[Any]:
    """Yield the batches of a pass with their steps, as loops take them, up to the one at which the training ends."""
    for step, batch in enumerate(batches, p.index * BATCHES):
        if step == stop:
            end()
        yield step, batch.dense, list(batch.features.values()), batch.label, batch.weight


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "optimizer"), [*zip(LOOPS, cycle(ROW_OPTIMIZERS), strict=False)])
def test_a_loop_gives_the_numbers_of_torch(tmp_path: Path, name: str, optimizer: str) -> None:
    data = samples()
    passes = write_dataset(tmp_path / "passes", schema_of(optimizer), data)
    reference = theirs(optimizer, data, LOOPS[name])
    side = ours(optimizer, tmp_path / "model.tc", passes, name)
    compare(side.losses, side.model.dense_parameters(), side.rows, reference)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_a_converted_model_gives_the_numbers_of_the_model_that_it_was(tmp_path: Path, optimizer: str) -> None:
    data, names = samples(), [f"f{t}" for t in range(TABLES)]
    passes = write_dataset(tmp_path / "passes", schema_of(optimizer), data)
    torch.manual_seed(3)
    tables: list[nn.Module] = [nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=name == "f3") for name in names]
    for one in tables:
        nn.init.uniform_(one.weight, -0.2, 0.2)  # type: ignore[arg-type]
    torch.manual_seed(1)
    begin = DLRM(tables)
    plain = copy.deepcopy(begin)
    plain.tables[3].sparse = False
    reference = train_in_memory(plain, optimizer, LOOPS["plain"], data)
    losses: dict[int, float] = {}
    for stop in (PASSES * EPOCHS // 2, None):
        torch.manual_seed(1)
        empty = DLRM([nn.EmbeddingBag(ROWS, DIM, mode="sum", device="meta") for _ in names])
        model = tc.convert(copy.deepcopy(begin) if stop else empty, passes, {"tables": names})
        given = {"model": model, "optimizer": make_optimizer(optimizer, model.parameters()), "device": "cpu"}
        budget = row_bytes(optimizer) // 4
        with tiered(tmp_path / "model.tc", passes, **given, device_budget=budget) as cache:
            assert not any(one.weights for one in model.tables)
            side = Side(LOOPS["plain"], model, [cache.optimizer], cache.clip_grad_norm_, cache.register, losses)
            for p in cache.passes(epochs=EPOCHS):
                if p.index == stop:
                    break
                side.run(numbered(p, p.batches(BATCH)))
    with tc.Store.open(tmp_path / "model.tc", mode="r") as store:
        compare(losses, model.dense_parameters(), rows_of(store), reference)
        back = tc.to_torch(model, store)
    part = data[0].slice(0, 20)
    dense, bags, *_ = torch_batch(part)
    with torch.no_grad():
        torch.testing.assert_close(back(dense, bags), reference.model(dense, bags), atol=1e-5, rtol=1e-5)
    assert isinstance(model.tables[0], tc.EmbeddingBag)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("plain", "Adagrad"), ("GradScaler", "SGD"), ("clip_grad_norm", "SGD"), ("both", "Adagrad"),
     ("OneCycleLR", "Adagrad"), ("accumulation", "SGD")],
)  # fmt: skip
def test_two_ranks_give_the_numbers_of_torch(ranks_pool: RanksPool, tmp_path: Path, name: str, optimizer: str) -> None:
    data = samples()
    write_dataset(tmp_path / "passes", schema_of(optimizer), data)
    reference = theirs(optimizer, data, LOOPS[name])
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
    assert len(reference.losses) == len(losses) == STEPS
    np.testing.assert_allclose([losses[s] for s in range(STEPS)], [reference.losses[s] for s in range(STEPS)],
                               atol=1e-5, rtol=1e-5)  # fmt: skip
    for mine, other in zip(dense, reference.model.dense_parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
    for mine, table in zip(rows, reference.model.tables, strict=True):
        np.testing.assert_allclose(mine, table.weight.detach().numpy(), atol=1e-5, rtol=0)
