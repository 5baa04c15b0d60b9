"""A sequential recommender in the layout of the published SASRec for PyTorch: raw arrays of items go into forward."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

ITEMS, USERS, MAXLEN, HIDDEN = 900, 400, 12, 16


class PointWiseFeedForward(nn.Module):
    def __init__(self, hidden_units: int, dropout_rate: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(hidden_units, hidden_units, kernel_size=1)
        self.dropout1 = nn.Dropout(p=dropout_rate)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv1d(hidden_units, hidden_units, kernel_size=1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.conv2(self.relu(self.dropout1(self.conv1(inputs.transpose(-1, -2)))))
        return outputs.transpose(-1, -2) + inputs  # type: ignore[no-any-return]


class SASRec(nn.Module):
    def __init__(self, item_num: int, maxlen: int, hidden_units: int, num_blocks: int = 2) -> None:
        super().__init__()
        self.dev = "cpu"
        self.item_emb = nn.Embedding(item_num + 1, hidden_units, padding_idx=0)
        self.pos_emb = nn.Embedding(maxlen + 1, hidden_units, padding_idx=0)
        self.emb_dropout = nn.Dropout(p=0.0)
        self.attention_layernorms, self.attention_layers = nn.ModuleList(), nn.ModuleList()
        self.forward_layernorms, self.forward_layers = nn.ModuleList(), nn.ModuleList()
        self.last_layernorm = nn.LayerNorm(hidden_units, eps=1e-8)
        for _ in range(num_blocks):
            self.attention_layernorms.append(nn.LayerNorm(hidden_units, eps=1e-8))
            self.attention_layers.append(nn.MultiheadAttention(hidden_units, 1, 0.0))
            self.forward_layernorms.append(nn.LayerNorm(hidden_units, eps=1e-8))
            self.forward_layers.append(PointWiseFeedForward(hidden_units, 0.0))

    def log2feats(self, log_seqs: Any) -> torch.Tensor:
        seqs = self.item_emb(torch.LongTensor(log_seqs).to(self.dev))
        seqs *= self.item_emb.embedding_dim**0.5
        poss = np.tile(np.arange(1, log_seqs.shape[1] + 1), [log_seqs.shape[0], 1])
        poss *= log_seqs != 0
        seqs += self.pos_emb(torch.LongTensor(poss).to(self.dev))
        seqs = self.emb_dropout(seqs)
        tl = seqs.shape[1]
        attention_mask = ~torch.tril(torch.ones((tl, tl), dtype=torch.bool, device=self.dev))
        for i in range(len(self.attention_layers)):
            seqs = torch.transpose(seqs, 0, 1)
            query = self.attention_layernorms[i](seqs)
            outputs, _ = self.attention_layers[i](query, seqs, seqs, attn_mask=attention_mask)
            seqs = torch.transpose(query + outputs, 0, 1)
            seqs = self.forward_layers[i](self.forward_layernorms[i](seqs))
        return self.last_layernorm(seqs)  # type: ignore[no-any-return]

    def forward(self, _user_ids: Any, log_seqs: Any, pos_seqs: Any, neg_seqs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        log_feats = self.log2feats(log_seqs)
        pos_embs = self.item_emb(torch.LongTensor(pos_seqs).to(self.dev))
        neg_embs = self.item_emb(torch.LongTensor(neg_seqs).to(self.dev))
        return (log_feats * pos_embs).sum(dim=-1), (log_feats * neg_embs).sum(dim=-1)

    def predict(self, _user_ids: Any, log_seqs: Any, item_indices: Any) -> torch.Tensor:
        final_feat = self.log2feats(log_seqs)[:, -1, :]
        item_embs = self.item_emb(torch.LongTensor(item_indices).to(self.dev))
        return item_embs.matmul(final_feat.unsqueeze(-1)).squeeze(-1)  # type: ignore[no-any-return]


class Sequences(Dataset[Any]):
    """The sequence of each user, the items that follow, and for each of them another item."""

    def __len__(self) -> int:
        return USERS

    def __getitem__(self, user: int) -> tuple[Any, ...]:
        chance = np.random.default_rng(user)
        center = user * ITEMS // USERS
        items = 1 + (center + chance.integers(0, ITEMS // 8, MAXLEN + 1)) % ITEMS
        items[: chance.integers(0, MAXLEN - 2)] = 0
        negatives = np.where(items[1:] != 0, 1 + (center + chance.integers(0, ITEMS // 8, MAXLEN)) % ITEMS, 0)
        return user, items[:-1], items[1:], negatives


def as_arrays(samples: list[Any]) -> list[Any]:
    """Return a batch as the published sampler does: arrays, no tensors."""
    return [np.array(part) for part in zip(*samples, strict=True)]
