"""A dense part in two stages: torchrun --nproc-per-node 2 -m tests.dist.pipeline_stages.

The embeddings stay outside the pipeline: every rank looks up its part of the batch in rows that all ranks share, the
first stage gets all vectors, and the last stage has the loss. Prints the loss of the first and the last epoch, which
equal the losses of the same model without stages on one process.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import tiercache as tc
from tiercache.dist.pipeline import StageInput, check_micro_batches

BATCH, MICRO_BATCHES, EPOCHS, DIM, WIDTH = 64, 4, 4, 8, 32
BUDGETS: dict[str, Any] = {"device_budget": "1MiB", "host_budget": "8MiB"}
SCHEMA = tc.Schema(
    label="clicked",
    dense=(),
    features=(tc.Feature(name="user", table="users"), tc.Feature(name="item", table="items")),
    tables=tuple(
        tc.Table(
            name=name,
            dim=DIM,
            optimizer=tc.optim.Adagrad(learning_rate=0.1),
            initializer=tc.init.Uniform(low=-0.1, high=0.1),
        )
        for name in ("users", "items")
    ),
)


def prepare(folder: Path) -> None:
    """Write users who like some items, and cut passes of whole batches."""
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, 200, 2048), rng.integers(0, 50, 2048)
    clicked = ((user * 7 + item * 3) % 5 < 2).astype(np.float32)
    pq.write_table(pa.table({"user": user, "item": item, "clicked": clicked}), folder / "clicks.parquet")
    tc.extract(
        folder / "clicks.parquet", SCHEMA, folder / "passes", split_by="rows=512", batch_multiple=BATCH,
        device_budget="1MiB", progress=False,
    )  # fmt: skip


def stages() -> list[nn.Module]:
    """Return the dense part, cut in two; the same weights on every rank."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(2 * DIM, WIDTH), nn.ReLU()),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1), nn.Flatten(0)),
    ]


def train_in_stages(folder: Path, passes: tc.PassDataset, device: str) -> list[float]:
    """Train on all ranks, a stage on each; return each epoch's mean loss, on the last stage."""
    check_micro_batches(passes, batch_size=BATCH, micro_batches=MICRO_BATCHES, stages=dist.get_world_size())
    losses = np.zeros((EPOCHS, 0)).tolist()
    with tc.TierCache(folder / "model.tc", passes, device=device, **BUDGETS) as cache:
        ranks = cache.communicator
        bag, mine = tc.EmbeddingBagCollection(cache.schema), stages()[ranks.rank].to(cache.device)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        cache.register(bag=bag, stage=mine, optimizer=optimizer)
        optimizer = cache.optimizer
        stage = PipelineStage(mine, ranks.rank, ranks.size, cache.device)
        schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.BCEWithLogitsLoss())
        first, last = StageInput(ranks), ranks.size - 1
        for p in cache.passes(epochs=EPOCHS):
            for batch in p.batches(BATCH):
                vectors = first.collect(bag(batch), batch)
                label = first.bring(batch.label[: len(batch) if batch.weight else 0], to=last)
                found: list[torch.Tensor] = []
                if stage.is_first:
                    schedule.step(vectors)
                else:
                    schedule.step(target=label, losses=found)
                    losses[p.epoch].append(torch.stack(found).mean().item())
                first.give_back(vectors)
                optimizer.step()
                optimizer.zero_grad()
    return [float(np.mean(epoch)) for epoch in losses if epoch]


def train_whole(passes: tc.PassDataset) -> list[float]:
    """Train the same model on one process, all in memory."""
    cache = tc.InMemoryCache(passes)
    bag, dense = tc.EmbeddingBagCollection(cache.schema), nn.Sequential(*stages())
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    cache.register(model=dense, optimizer=optimizer)
    optimizer = cache.optimizer
    criterion, losses = nn.BCEWithLogitsLoss(), np.zeros((EPOCHS, 0)).tolist()
    for p in cache.passes(epochs=EPOCHS):
        for batch in p.batches(BATCH):
            loss = criterion(dense(bag(batch)), batch.label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[p.epoch].append(loss.item())
    return [float(np.mean(epoch)) for epoch in losses]


def main() -> None:
    parser = argparse.ArgumentParser(description="A dense part in two stages on two devices, embeddings on both.")
    parser.add_argument("--folder", type=Path, help="where everything goes; a temporary folder where not given")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: each rank on the GPU of its LOCAL_RANK")
    options = parser.parse_args()
    dist.init_process_group()
    rank, stages = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as made:
        folders = [made]
        dist.broadcast_object_list(folders, src=0)
        folder = options.folder or Path(folders[0])
        if rank == 0:
            folder.mkdir(exist_ok=True)
            prepare(folder)
        dist.barrier()
        passes = tc.PassDataset.open(folder / "passes")
        losses = train_in_stages(folder, passes, options.device)
        if rank == stages - 1:
            whole = train_whole(passes)
            sys.stdout.write(f"in {stages} stages: {losses[-1]:.4f}; whole: {whole[-1]:.4f}\n")
            if not np.allclose(losses, whole, atol=1e-4):
                raise SystemExit("the losses differ")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
