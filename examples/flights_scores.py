"""How good predictions are: the area under the ROC curve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    import tiercache as tc
    from examples.flights_training import Training


def area_under_curve(scores: NDArray[np.float32], labels: NDArray[np.float32]) -> float:
    """Return the chance that a random sample with label 1 scores above a random other one; ties count half."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    num_ones = int(labels.sum())
    num_others = labels.size - num_ones
    return float((ranks[labels > 0].sum() - num_ones * (num_ones + 1) / 2) / (num_ones * num_others))


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
