"""How good the predictions are: the area under the ROC curve, of the model and of a logistic regression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tiercache.training.batch import sample_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    import tiercache as tc
    from examples.flights_training import Settings, Training


def area_under_curve(scores: NDArray[np.float32], labels: NDArray[np.float32]) -> float:
    """Return the chance that a random late flight scores above a random other one; ties count half."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    num_late = int(labels.sum())
    num_others = labels.size - num_late
    return float((ranks[labels > 0].sum() - num_late * (num_late + 1) / 2) / (num_late * num_others))


def model_area(training: Training, test: tc.PassDataset) -> tuple[float, int]:
    """Score a test set over the tiers, slice by slice; returns the area and the number of slices."""
    scores, labels, num_slices = [], [], 0
    training.model.eval()
    with torch.no_grad():
        for piece in training.cache.evaluate(test):
            num_slices += 1
            for batch in piece.batches(training.settings.batch):
                scores.append(training.model(batch).numpy().copy())
                labels.append(batch.label.numpy().copy())
    training.model.train()
    return area_under_curve(np.concatenate(scores), np.concatenate(labels)), num_slices


class LogisticRegression(nn.Module):
    """One weight for each key of each feature (exactly one-hot), and one for each dense feature."""

    LEARNING_RATE, EPS, DENSE_LEARNING_RATE = 0.3, 0.01, 1e-2
    """The best of those tried on three earlier tenths of the flights, each after training on all before it."""

    def __init__(self, train: tc.PassDataset) -> None:
        super().__init__()
        tables = [table.name for table in train.tables]
        self.features = train.schema.features
        self.keys = {name: np.unique(np.concatenate([p.keys(name) for p in train.passes])) for name in tables}
        sizes = [self.keys[name].size for name in tables]
        self.first = dict(zip(tables, np.cumsum([1, *sizes]).tolist(), strict=False))
        self.weights = nn.EmbeddingBag(1 + sum(sizes), 1, mode="sum", sparse=True, padding_idx=0)
        nn.init.zeros_(self.weights.weight)
        self.dense = nn.Linear(len(train.schema.dense), 1)

    def forward(self, ids_NF: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Return one logit a sample: (N,)."""
        return (self.weights(ids_NF) + self.dense(dense)).squeeze(1)

    def read(self, source: Any, order: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Read samples of a pass: the number of each key (0: not in the training set), dense features, labels."""
        samples = source.read(order)
        columns = []
        for feature in self.features:
            known, asked = self.keys[feature.table], np.asarray(source.keys(feature.table))
            places = np.minimum(np.searchsorted(known, asked), known.size - 1)
            numbers = np.where(known[places] == asked, places + self.first[feature.table], 0)
            columns.append(numbers[samples.ids[feature.name].ids])
        return (
            torch.from_numpy(np.stack(columns, axis=1)),
            torch.from_numpy(samples.dense.copy()),
            torch.from_numpy(samples.label.copy()),
        )

    def fit(self, train: tc.PassDataset, settings: Settings) -> None:
        """Train on the batches of the tiered run, in the same order, with learning rates that drop as there."""
        sparse = torch.optim.Adagrad(self.weights.parameters(), lr=self.LEARNING_RATE, eps=self.EPS)
        dense = torch.optim.Adam(self.dense.parameters(), lr=self.DENSE_LEARNING_RATE)
        criterion = nn.BCEWithLogitsLoss()
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # said aloud, as torch asks for
            for epoch in range(settings.epochs):
                for group, rate in ((sparse, self.LEARNING_RATE), (dense, self.DENSE_LEARNING_RATE)):
                    group.param_groups[0]["lr"] = rate * settings.drop**epoch
                for source in train.passes:
                    order = sample_order(
                        source.samples, seed=settings.seed, epoch=epoch, sub_dataset=source.index, shuffle=True
                    )
                    parts = [part.split(settings.batch) for part in self.read(source, order(0, source.samples))]
                    for ids, described, label in zip(*parts, strict=True):
                        criterion(self(ids, described), label).backward()
                        for optimizer in (sparse, dense):
                            optimizer.step()
                            optimizer.zero_grad()

    def area(self, test: tc.PassDataset) -> float:
        """Return the area under the curve on a test set; keys never trained weigh nothing."""
        scores, labels = [], []
        with torch.no_grad():
            for source in test.passes:
                ids, described, label = self.read(source, np.arange(source.samples))
                scores.append(self(ids, described).numpy())
                labels.append(label.numpy())
        return area_under_curve(np.concatenate(scores), np.concatenate(labels))
