"""Skip-gram with negative samples, in the layout of a published word2vec: a custom collate, sparse gradients."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn import init
from torch.utils.data import Dataset

WORDS, DIM, PAIRS, NEGATIVES = 1500, 12, 3000, 4


class SkipGramModel(nn.Module):
    def __init__(self, emb_size: int, emb_dimension: int) -> None:
        super().__init__()
        self.emb_size, self.emb_dimension = emb_size, emb_dimension
        self.u_embeddings = nn.Embedding(emb_size, emb_dimension, sparse=True)
        self.v_embeddings = nn.Embedding(emb_size, emb_dimension, sparse=True)
        initrange = 1.0 / self.emb_dimension
        init.uniform_(self.u_embeddings.weight.data, -initrange, initrange)
        init.constant_(self.v_embeddings.weight.data, 0)

    def forward(self, pos_u: torch.Tensor, pos_v: torch.Tensor, neg_v: torch.Tensor) -> torch.Tensor:
        emb_u = self.u_embeddings(pos_u)
        emb_v = self.v_embeddings(pos_v)
        emb_neg_v = self.v_embeddings(neg_v)
        score = torch.sum(torch.mul(emb_u, emb_v), dim=1)
        score = -F.logsigmoid(torch.clamp(score, max=10, min=-10))
        neg_score = torch.bmm(emb_neg_v, emb_u.unsqueeze(2)).squeeze()
        neg_score = -torch.sum(F.logsigmoid(-torch.clamp(neg_score, max=10, min=-10)), dim=1)
        return torch.mean(score + neg_score)


class Word2vecDataset(Dataset[Any]):
    """Pairs of a text whose topic drifts."""

    def __len__(self) -> int:
        return PAIRS

    def __getitem__(self, i: int) -> list[Any]:
        chance = np.random.default_rng(i)
        topic = i * WORDS // PAIRS

        def words(count: int) -> Any:
            return (topic + chance.zipf(1.3, count) % (WORDS // 8)) % WORDS

        return [(words(1)[0], words(1)[0], words(NEGATIVES))]

    @staticmethod
    def collate(batches: list[Any]) -> tuple[torch.Tensor, ...]:
        all_u = [u for batch in batches for u, _, _ in batch]
        all_v = [v for batch in batches for _, v, _ in batch]
        all_neg_v = [neg_v for batch in batches for _, _, neg_v in batch]
        return torch.LongTensor(all_u), torch.LongTensor(all_v), torch.LongTensor(np.array(all_neg_v))
