"""A click model in the layout of the published DLRM: lists of bags and layers, made by methods of the net."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

TABLES, ROWS, DIM, DENSE = 4, 600, 8, 5


class DLRM_Net(nn.Module):  # noqa: N801 - as published
    def create_mlp(self, ln: list[int], sigmoid_layer: int) -> nn.Sequential:
        """Return a tower of layers; the one of this number ends in a sigmoid."""
        layers = nn.ModuleList()
        for i in range(len(ln) - 1):
            layer = nn.Linear(ln[i], ln[i + 1])
            nn.init.normal_(layer.weight, std=np.sqrt(2 / (ln[i] + ln[i + 1])))
            nn.init.normal_(layer.bias, std=np.sqrt(1 / ln[i + 1]))
            layers.append(layer)
            layers.append(nn.Sigmoid() if i == sigmoid_layer else nn.ReLU())
        return nn.Sequential(*layers)

    def create_emb(self, m: int, ln: list[int]) -> tuple[nn.ModuleList, list[Any]]:
        emb_l, v_w_l = nn.ModuleList(), []
        for n in ln:
            bag = nn.EmbeddingBag(n, m, mode="sum", sparse=True)
            weight = np.random.uniform(low=-np.sqrt(1 / n), high=np.sqrt(1 / n), size=(n, m)).astype(np.float32)
            bag.weight.data = torch.tensor(weight, requires_grad=True)
            v_w_l.append(None)
            emb_l.append(bag)
        return emb_l, v_w_l

    def __init__(self) -> None:
        super().__init__()
        self.emb_l, self.v_W_l = self.create_emb(DIM, [ROWS] * TABLES)
        self.bot_l = self.create_mlp([DENSE, 16, DIM], -1)
        self.top_l = self.create_mlp([DIM + TABLES * (TABLES + 1) // 2, 16, 1], 1)

    def apply_emb(self, lS_o: torch.Tensor, lS_i: list[torch.Tensor]) -> list[torch.Tensor]:
        ly = []
        for k, sparse_index_group_batch in enumerate(lS_i):
            bag = self.emb_l[k]
            ly.append(bag(sparse_index_group_batch, lS_o[k], per_sample_weights=self.v_W_l[k]))
        return ly

    def interact_features(self, x: torch.Tensor, ly: list[torch.Tensor]) -> torch.Tensor:
        batch_size, d = x.shape
        vectors = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
        products = torch.bmm(vectors, torch.transpose(vectors, 1, 2))
        _, ni, nj = products.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        return torch.cat([x, products[:, li, lj]], dim=1)

    def forward(self, dense_x: torch.Tensor, lS_o: torch.Tensor, lS_i: list[torch.Tensor]) -> torch.Tensor:
        x = self.bot_l(dense_x)
        ly = self.apply_emb(lS_o, lS_i)
        z = self.interact_features(x, ly)
        return self.top_l(z)  # type: ignore[no-any-return]


class Clicks(Dataset[Any]):
    """Samples in the order of time: keys come in waves, as they do in logs."""

    def __init__(self, first: int, count: int) -> None:
        chance = np.random.default_rng(first)
        center = (np.arange(first, first + count) * ROWS // 4000) % ROWS
        self.lengths = chance.integers(0, 4, (count, TABLES))
        self.ids = (center[:, None, None] + chance.zipf(1.5, (count, TABLES, 4)) % (ROWS // 8)) % ROWS
        self.dense = chance.random((count, DENSE), np.float32)
        self.label = ((self.ids[:, :, 0].sum(axis=1) + self.dense.sum(axis=1)) % 3 > 1).astype(np.float32)

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        bags = [self.ids[i, t, : self.lengths[i, t]] for t in range(TABLES)]
        return self.dense[i], bags, self.label[i]


def collate_wrapper(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    dense, bags, label = zip(*samples, strict=True)
    lengths = np.array([[len(one) for one in sample] for sample in bags])
    offsets = np.cumsum(lengths, axis=0) - lengths
    ids = [torch.from_numpy(np.concatenate([sample[t] for sample in bags])) for t in range(TABLES)]
    return torch.tensor(np.array(dense)), torch.from_numpy(offsets.T.copy()), ids, torch.tensor(label)[:, None]
