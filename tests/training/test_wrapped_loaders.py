"""A loader of one's own is wrapped: its items become batches of raw keys, from where a commit stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tiercache as tc

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PASSES, SAMPLES, BATCH = 3, 40, 8
SCHEMA = tc.Schema(
    features=(tc.Feature(name="a", table="t"), tc.Feature(name="b", table="t")),
    tables=(
        tc.Table(
            name="t", dim=4, optimizer=tc.optim.Adagrad(learning_rate=0.1),
            initializer=tc.init.Uniform(low=-0.5, high=0.5),
        ),
    ),
    label="y",
    dense=(tc.DenseFeature(column="d"),),
)  # fmt: skip


class Samples(Dataset[Any]):
    """The samples of a pass."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, at: int) -> tuple[Any, ...]:
        chance = np.random.default_rng((self._index, at))
        ids = chance.integers(0, 50, 2) + 20 * self._index
        return ids, np.float32(chance.random((1,))), np.float32(ids[0] % 2)


class Stateful:
    """A loader that knows where it stands."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        items = list(loader(0))
        while self.at < len(items):
            self.at += 1
            yield items[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        """Return where it stands."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self.at = state["at"]


def loader(index: int, workers: int = 0) -> DataLoader[Any]:
    """Return a DataLoader of (keys (N, 2), dense (N, 1), label (N,))."""
    return DataLoader(
        Samples(index), batch_size=BATCH, num_workers=workers,
        multiprocessing_context="forkserver" if workers else None,
    )  # fmt: skip


def train(folder: Path, name: str, *, stop: tuple[int, int] | None = None, workers: int = 0, by: str = "wrap") -> Any:
    """Train all passes, or to a commit inside one; returns all rows."""
    data = tc.PassDataset.open(folder / "passes")
    torch.manual_seed(0)
    bags, top = tc.EmbeddingBagCollection(SCHEMA), nn.Linear(9, 1)
    model = nn.ModuleList([bags, top])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tc.TierCache(
        folder / name, data, model=model, optimizer=optimizer, device_budget="1MiB", host_budget="64MiB", progress=False
    ) as cache:
        for p in cache.passes(epochs=2):
            if by == "wrap":
                batches: Any = p.wrap(loader(p.sub_dataset, workers))
            else:
                batches = (p.batch(keys, dense=dense, label=label) for keys, dense, label in loader(p.sub_dataset))
            for number, batch in enumerate(batches):
                logits = top(torch.cat([bags(batch), batch.dense], dim=1)).squeeze(1)
                nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
                optimizer.step()
                optimizer.zero_grad()
                if (p.index, number) == stop:
                    cache.commit()
                    return None
    with tc.Store.open(folder / name, mode="r") as store:
        return [(keys.tolist(), fields[0].tobytes()) for keys, fields in store.scan("t")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Key sets of the samples."""
    keys = ({"t": np.concatenate([Samples(p)[i][0] for i in range(SAMPLES)])} for p in range(PASSES))
    tc.write_key_sets(tmp_path / "passes", SCHEMA, keys)
    return tmp_path


def test_a_wrapped_loader_trains_as_its_batches_do(folder: Path) -> None:
    """With workers too, and from a commit in the midst of a pass, where its first items are left out."""
    expected = train(folder, "plain.tc", by="batch")
    assert train(folder, "wrapped.tc", workers=2) == expected
    assert train(folder, "resumed.tc", stop=(4, 2)) is None
    assert train(folder, "resumed.tc") == expected


def test_a_loader_with_a_state_goes_on_by_itself(folder: Path) -> None:
    """Registered, its state is part of the commit."""
    data, seen = tc.PassDataset.open(folder / "passes"), list[int]()
    for stop in (2, None):
        mine = Stateful()
        bags = tc.EmbeddingBagCollection(SCHEMA)
        with tc.TierCache(
            folder / "m.tc", data, model=bags, device_budget="1MiB", host_budget="64MiB", progress=False
        ) as cache:
            cache.register(loader=mine)
            passes = cache.passes(epochs=1)
            p = next(passes)
            for batch in p.wrap(mine):
                bags(batch).sum().backward()
                cache.optimizer.step()
                seen.append(mine.at)
                if mine.at == stop:
                    cache.commit()
                    break
    assert seen == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (
            torch.zeros(3),
            r"the loader gave a Tensor: it must give \(keys, label\), \(keys, dense, label\) or a mapping",
        ),
        ((1,), "the loader gave a tuple of 1: it must"),
        ({"a": 1, "b": 2}, "the loader gave a mapping of 'a', 'b': it must"),
    ],
)
def test_an_item_that_is_none_is_a_sentence(folder: Path, item: Any, words: str) -> None:
    """It says what to give; a function may make it of an item."""
    data = tc.PassDataset.open(folder / "passes")
    passes = tc.InMemoryCache(data).passes(epochs=1)
    p = next(passes)
    with pytest.raises(TypeError, match=words):
        next(p.wrap([item]))
    keys, dense, label = next(iter(loader(0)))
    (batch,) = p.wrap([item], lambda _: {"keys": keys, "dense": dense, "label": label})
    assert len(batch) == BATCH
