"""A model in the style of DLRM (Naumov et al., 2019): embeddings and dense features that interact by dot products."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn

import tiercache as tc

if TYPE_CHECKING:
    from collections.abc import Sequence


class FlightsModel(nn.Module):
    """Bottom layers turn the dense features into one more vector; every pair of vectors gives a dot product.

    The first number of every vector also adds to the logit as it is, so that a key counts from its first step on.
    """

    def __init__(self, schema: tc.Schema) -> None:
        super().__init__()
        self.embeddings = tc.EmbeddingBagCollection(schema)
        (dim,) = set(self.embeddings.dims)
        num_vectors = len(self.embeddings.dims) + 1
        self.bottom = _layers([len(schema.dense), 32, dim])
        self.top = _layers([num_vectors * dim + num_vectors * (num_vectors - 1) // 2, 64, 32])
        self.out = nn.Linear(32, 1)
        self.register_buffer("pairs", torch.triu_indices(num_vectors, num_vectors, 1), persistent=False)

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        """Return one logit a sample: (N,)."""
        looked_up, described = self.embeddings(batch), self.bottom(batch.dense)
        flat = torch.cat([looked_up, described], dim=1)
        vectors_NVD = flat.view(len(batch), -1, described.shape[1])
        dots = torch.bmm(vectors_NVD, vectors_NVD.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        interacting = self.out(self.top(torch.cat([flat, dots], dim=1))).squeeze(1)
        return interacting + vectors_NVD[:, :-1, 0].sum(dim=1)


def _layers(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers)
