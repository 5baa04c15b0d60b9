"""Quality of predictions: the area under the ROC curve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from numpy.typing import NDArray

    import tiercache as tc


def area_under_curve(scores: NDArray[np.float32], labels: NDArray[np.float32]) -> float:
    """Return the probability that a random sample with label 1 scores above a random other one; ties count half."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    num_ones = int(labels.sum())
    num_others = labels.size - num_ones
    return float((ranks[labels > 0].sum() - num_ones * (num_ones + 1) / 2) / (num_ones * num_others))


def score(cache: tc.TierCache, model: nn.Module, test: tc.PassDataset, batch: int) -> float:
    """Return the area under the curve of test samples, read slice by slice; each rank scores its part."""
    found: list[Any] = [torch.empty(0, 2)]
    model.eval()
    with torch.no_grad():
        for piece in cache.evaluate(test):
            found += [torch.stack([model(one), one.label], dim=1).cpu() for one in piece.batches(batch) if one.weight]
    model.train()
    flat, ranks = torch.cat(found).reshape(-1), cache.communicator
    scores, labels = ranks.all_gather(flat, ranks.all_gather_object(flat.numel())).reshape(-1, 2).numpy().T
    return area_under_curve(scores, labels)
