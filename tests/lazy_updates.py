"""The measured difference between lazy and dense updates, for docs/migration.md: python -m tests.lazy_updates.

Users click items by the product of hidden vectors; most users and items are rare. The same model is trained on the same
batches with torch's dense optimizer, which moves every row in every step, and with row optimizers, which move the rows
of the batch. The loss is on held-out clicks.
"""

import tempfile
from typing import Any

import numpy as np
import torch
from torch import nn

import tiercache as tc

ROWS = {"user": 3000, "item": 2000}
DIM, SAMPLES, TEST, BATCH, EPOCHS = 8, 60_000, 20_000, 256, 4
RULES: dict[str, tuple[Any, Any]] = {
    "Adam": (lambda p: torch.optim.Adam(p, lr=0.01), tc.optim.Adam(learning_rate=0.01)),
    "AdamW": (
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=1.0),
        tc.optim.Adam(learning_rate=0.01, decay=1.0, decoupled=True),
    ),
    "SGD with momentum": (
        lambda p: torch.optim.SGD(p, lr=3.0, momentum=0.9), tc.optim.SGD(learning_rate=3.0, momentum=0.9)
    ),
}  # fmt: skip
START = tc.init.Uniform(low=-0.1, high=0.1)


def clicks() -> dict[str, np.ndarray]:
    rng, num = np.random.default_rng(0), SAMPLES + TEST
    user, item = ((rows * rng.random(num) ** 4).astype(np.int64) for rows in ROWS.values())
    hidden = [rng.standard_normal((rows, DIM)) for rows in ROWS.values()]
    logit = (hidden[0][user] * hidden[1][item]).sum(axis=1)
    clicked = rng.random(num) < 1 / (1 + np.exp(-logit))
    return {"user": user, "item": item, "clicked": clicked.astype(np.float32)}


def loss(users: torch.Tensor, items: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits((users * items).sum(dim=1), clicked)


def untrained_loss(tables: dict[str, torch.Tensor]) -> float:
    user, item, clicked = (torch.from_numpy(values[SAMPLES:]) for values in clicks().values())
    return float(loss(tables["user"][user], tables["item"][item], clicked).detach())


def losses(rule: str) -> tuple[float, float]:
    make, optimizer = RULES[rule]
    train = {name: values[:SAMPLES] for name, values in clicks().items()}
    schema = tc.Schema(
        features=(tc.Feature(name="user", table="user"), tc.Feature(name="item", table="item")),
        tables=tuple(tc.Table(name=n, dim=DIM, optimizer=optimizer, initializer=START) for n in ROWS),
        label="clicked",
    )
    with tempfile.TemporaryDirectory() as folder:
        passes = tc.extract([train], schema, f"{folder}/passes", device_budget="64MiB", progress=False)
        model = tc.EmbeddingCollection(schema)
        with tc.InMemoryCache(passes, model=model) as cache:
            dense = vectors_of(cache)
            for p in cache.passes(epochs=EPOCHS):
                for batch in p.batches(BATCH):
                    found = model(batch)
                    loss(found["user"], found["item"], batch.label).backward()
                    cache.optimizer.step()
            lazy = vectors_of(cache)
    step_dense(make, dense, train)
    return untrained_loss(dense), untrained_loss(lazy)


def vectors_of(cache: tc.InMemoryCache) -> dict[str, torch.Tensor]:
    """Return a copy of all vectors, (rows, DIM), by table; rows that no training sample has are zeros."""
    found = {name: torch.zeros(rows, DIM) for name, rows in ROWS.items()}
    for name, vectors in found.items():
        vectors[torch.from_numpy(cache.keys(name).copy())] = torch.from_numpy(cache.fields(name)[0].copy())
    return found


def step_dense(make: Any, tables: dict[str, torch.Tensor], train: dict[str, np.ndarray]) -> None:
    optimizer = make([one.requires_grad_() for one in tables.values()])
    user, item, clicked = (torch.from_numpy(values) for values in train.values())
    for _ in range(EPOCHS):
        for at in range(0, SAMPLES, BATCH):
            of = slice(at, at + BATCH)
            loss(tables["user"][user[of]], tables["item"][item[of]], clicked[of]).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    for name in RULES:
        print("{}: dense {:.3f}, lazy {:.3f}".format(name, *losses(name)))  # noqa: T201
