"""Train a click model on several processes: torchrun --nproc-per-node 2 train_ddp.py. Run it again, and it resumes.

Each rank owns a part of the rows and trains a part of every batch. On GPUs use the backend "nccl" and device="cuda".
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tiercache as tc


class Net(torch.nn.Module):
    def __init__(self, schema):
        super().__init__()
        self.embeddings = tc.EmbeddingBagCollection(schema)
        self.top = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, batch):
        return self.top(self.embeddings(batch)).squeeze(1)


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
if rank == 0:  # one process extracts, for all ranks
    if not Path("clicks.parquet").exists():
        rng = np.random.default_rng(0)
        user, item = rng.integers(0, 5_000, 100_000), rng.integers(0, 2_000, 100_000)
        pq.write_table(pa.table({"user": user, "item": item, "clicked": user % 10 + item % 10 > 9}), "clicks.parquet")
    Path("clicks.toml").write_text("""label = { column = "clicked" }
defaults = { dim = 16, optimizer = { name = "adagrad", learning_rate = 0.1 } }
[features.user]
[features.item]""")
    budget = {"device_budget": "512KiB", "devices": ranks}
    tc.extract("clicks.parquet", "clicks.toml", f"passes-{ranks}/", batch_multiple=1024, **budget)
dist.barrier()

data = tc.PassDataset.open(f"passes-{ranks}/")
torch.manual_seed(0)
model, criterion = DistributedDataParallel(Net(data.schema)), torch.nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
budgets = {"device_budget": "1MiB", "host_budget": "64MiB"}
with tc.TierCache("model.tc", data, model=model, optimizer=optimizer, **budgets) as cache:
    for p in cache.passes(epochs=3):
        for batch in p.batches(1024, shuffle=True):  # of all ranks together
            loss = criterion(model(batch), batch.label) * batch.weight
            cache.optimizer.zero_grad()
            loss.backward()
            cache.optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {p.epoch}, pass {p.index}: loss {mean.item():.3f}")
dist.destroy_process_group()
