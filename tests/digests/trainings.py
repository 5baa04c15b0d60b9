"""The trainings whose results must not change, and their digests: all that these tests use of the library's training.

Nothing here depends on the machine. Rows are summed and stepped by kernels that define the order of every addition. The
dense part computes with small integers times powers of two, which float32 holds exactly in any order: pooled rows, and
the weights that multiply them, are rounded to a grid first, and the gradient skips the rounding (Bengio, Leonard and
Courville, "Estimating or propagating gradients through stochastic neurons", 2013). So any number of ranks ends with the
same digests, too. One training, of one process, has gradients of rows that are not on the grid, so that the order in
which they are added is checked as well.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tiercache as tc
from tests.digests import data
from tiercache.dist.communicator import AnyCommunicator

PATH = Path(__file__).with_name("digests.json")  # the committed digests, by training
GIVEN = ("batches", "raw")  # the forms of samples: batches of extracted passes, or keys from a user's own loader
TRAININGS = (*GIVEN, "ordered")
"""And batches again, with gradients whose sums depend on the order of addition in one process (docs/format)."""
EPOCHS = 2
HOST_BUDGETS = {1: "1360KiB", 2: "1120KiB", 4: "1056KiB"}
"""Per rank, by number of ranks: little more than the least, so that rows come from the store. Digests do not change."""
SHARDING = {
    "sgd": "row_wise", "sgd_too": "row_wise", "adagrad": "table_wise", "rowwise": "row_wise", "adam": "column_wise",
    "sgd_bf16": "row_wise", "adagrad_bf16": "data_parallel", "rowwise_bf16": "table_wise", "adam_bf16": "row_wise",
}  # fmt: skip
"""The sharding over several ranks: each kind. Column slices are float32, because others round by different bits."""
MOVES = ("kept", "generated", "read", "written")


class Grid(torch.autograd.Function):
    """Rounds to multiples of 1/8 within [-1, 1]; its gradient is the output's, times a factor of each sample."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
        ctx.factor = factor
        return (8 * x).round().clamp(-8, 8) / 8

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        return grad if ctx.factor is None else grad * ctx.factor.view(-1, *[1] * (grad.ndim - 1)), None


class Net(nn.Module):
    """Pooled and unpooled features and the dense column, on the grid, times one weight each."""

    def __init__(self, *, ordered: bool) -> None:
        super().__init__()
        self.ordered = ordered
        pooled = {spec.name: spec.mode for spec in data.SPECS if spec.mode is not None}
        self.bags = tc.EmbeddingBagCollection(data.SCHEMA, list(pooled), mode=pooled)
        self.rows = tc.EmbeddingCollection(data.SCHEMA, [spec.name for spec in data.SPECS if spec.mode is None])
        width = self.bags.out_features + sum(self.rows.dims) + 1
        self.weight = nn.Parameter((torch.from_numpy(data.draw("weight", width, 17)).float() - 8) / 8)

    def forward(self, batch: Any) -> torch.Tensor:
        factor = torch.from_numpy(data.FACTORS)[batch.label.long() + 4] if self.ordered else None
        singles = [Grid.apply(out, factor) for out in self.rows(batch).values()]
        singles = [out.sum(dim=1) if out.ndim == 3 else out for out in singles]
        inputs = torch.cat([Grid.apply(self.bags(batch), factor), *singles, batch.dense], dim=1)
        return (inputs * Grid.apply(self.weight)).sum(dim=1)


def prepare(folder: Path, given: str) -> None:
    (data.write_keys if given == "raw" else data.extract)(folder)


def train(
    folder: Path, given: str, engine: str, ranks: AnyCommunicator | None = None
) -> tuple[dict[str, NDArray[np.float32]], dict[str, int]]:
    """Train from the position of ``folder / "model.tc"`` to the end, in one process or as one rank of several.

    Returns the dense weights, and the numbers of rows that this process kept at switches, created, read from the store
    and wrote.
    """
    passes, host_budget = tc.PassDataset.open(folder / "passes"), HOST_BUDGETS[1 if ranks is None else ranks.size]
    with tc.TierCache(
        folder / "model.tc", passes, device_budget="1MiB", host_budget=host_budget, seed=3,
        sharding=SHARDING, options=tc.TierCacheOptions(engine=engine),
    ) as cache:  # fmt: skip
        net = Net(ordered=given == "ordered")
        model = net if ranks is None or ranks.size == 1 else DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=1 / 8, momentum=1 / 2)
        cache.register(model=model, optimizer=optimizer)
        optimizer = cache.optimizer
        for p in cache.passes(epochs=EPOCHS):
            batches = raw_batches(p, ranks) if given == "raw" else p.batches(data.BATCH, shuffle=True)
            for batch in batches:
                (nn.functional.l1_loss(model(batch), batch.label) * batch.weight).backward()
                optimizer.step()
                optimizer.zero_grad()
        moved = {name: sum(getattr(report, f"rows_{name}") for report in cache.reports) for name in MOVES}
        return {name: value.numpy().copy() for name, value in net.state_dict().items()}, moved


def raw_batches(p: Any, ranks: AnyCommunicator | None) -> Iterator[Any]:
    """Yield the batches of a pass from its position, with keys from a loader."""
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    for keys, others in data.raw_batches(p.epoch, p.sub_dataset, p.start_sample, rank, size):
        yield p.batch(keys, **others)


def train_rank(ranks: AnyCommunicator, folder: str, given: str, engine: str) -> Any:
    return train(Path(folder), given, engine, ranks)


def digests(folder: Path, dense: dict[str, NDArray[np.float32]]) -> dict[str, str]:
    """Return digests of all rows after a training, by table of vectors and of optimizer state, and of ``dense``.

    Rows are looked up in key order, so neither files nor the order of rows in them matter.
    """
    found = {}
    with tc.Store.open(folder / "model.tc", mode="r") as store:
        for table in data.TABLES:
            keys = data.keys_of(table.name)
            vectors, *state = store.lookup(table.name, keys).values()
            found[f"{table.name} vectors"] = digest(keys, vectors)
            if state:
                found[f"{table.name} state"] = digest(*state)
    return found | {f"dense {name}": digest(value) for name, value in dense.items()}


def digest(*arrays: NDArray[Any]) -> str:
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return whole.hexdigest()[:32]
