"""Train a click model whose rows are on disk: python train.py. Run it again after a kill, and it resumes."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import tiercache as tc


class Net(torch.nn.Module):
    def __init__(self, schema):
        super().__init__()
        self.embeddings = tc.EmbeddingBagCollection(schema)
        self.top = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, batch):
        return self.top(self.embeddings(batch)).squeeze(1)


# Your data: Parquet files with one row for each sample. Here the last digits of user and item decide.
if not Path("clicks.parquet").exists():
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, 5_000, 100_000), rng.integers(0, 2_000, 100_000)
    pq.write_table(pa.table({"user": user, "item": item, "clicked": user % 10 + item % 10 > 9}), "clicks.parquet")
Path("clicks.toml").write_text("""label = { column = "clicked" }
defaults = { dim = 16, optimizer = { name = "adagrad", learning_rate = 0.1 } }
[features.user]
[features.item]""")
data = tc.extract("clicks.parquet", "clicks.toml", "passes/", device_budget="1MiB", batch_multiple=1024)
torch.manual_seed(0)
model, criterion = Net(data.schema), torch.nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
budgets = {"device_budget": "1MiB", "host_budget": "64MiB"}
with tc.TierCache("model.tc", data, model=model, optimizer=optimizer, **budgets) as cache:
    for p in cache.passes(epochs=3):
        for batch in p.batches(1024, shuffle=True):
            loss = criterion(model(batch), batch.label)
            cache.optimizer.zero_grad()
            loss.backward()
            cache.optimizer.step()
        print(f"epoch {p.epoch}, pass {p.index}: loss {loss.item():.3f}")
