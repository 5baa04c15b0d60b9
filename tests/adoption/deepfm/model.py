"""A click model in the layout of the published DeepFM for PyTorch: one float matrix that forward cuts into features."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

SPARSE, DENSE, VOCABULARY, DIM = 6, 3, 400, 4


def create_embedding_matrix(names: list[str], dim: int) -> nn.ModuleDict:
    embedding_dict = nn.ModuleDict({name: nn.Embedding(VOCABULARY, dim, sparse=False) for name in names})
    for tensor in embedding_dict.values():
        nn.init.normal_(tensor.weight, mean=0, std=0.1)  # type: ignore[arg-type]
    return embedding_dict


class Linear(nn.Module):
    def __init__(self, feature_index: dict[str, tuple[int, int]], names: list[str]) -> None:
        super().__init__()
        self.feature_index, self.names = feature_index, names
        self.embedding_dict = create_embedding_matrix(names, 1)
        self.weight = nn.Parameter(torch.zeros(DENSE, 1))

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        sparse_embedding_list = [
            self.embedding_dict[name](X[:, self.feature_index[name][0] : self.feature_index[name][1]].long())
            for name in self.names
        ]
        linear_logit = torch.sum(torch.cat(sparse_embedding_list, dim=-1), dim=-1, keepdim=False)
        return linear_logit + X[:, len(self.names) :].matmul(self.weight)


class FM(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        square_of_sum = torch.pow(torch.sum(inputs, dim=1, keepdim=True), 2)
        sum_of_square = torch.sum(inputs * inputs, dim=1, keepdim=True)
        return 0.5 * torch.sum(square_of_sum - sum_of_square, dim=2, keepdim=False)


class DeepFM(nn.Module):
    def __init__(self, l2_reg_embedding: float = 0.0, l2_reg_linear: float = 0.0) -> None:
        super().__init__()
        self.names = [f"C{i}" for i in range(SPARSE)]
        self.feature_index = {name: (i, i + 1) for i, name in enumerate(self.names)}
        self.regularization_weight: list[Any] = []
        self.embedding_dict = create_embedding_matrix(self.names, DIM)
        self.linear_model = Linear(self.feature_index, self.names)
        if l2_reg_embedding:
            self.add_regularization_weight(self.embedding_dict.parameters(), l2=l2_reg_embedding)
        if l2_reg_linear:
            self.add_regularization_weight(self.linear_model.parameters(), l2=l2_reg_linear)
        self.fm = FM()
        self.dnn = nn.Sequential(nn.Linear(SPARSE * DIM + DENSE, 16), nn.ReLU(), nn.Linear(16, 1, bias=False))
        self.bias = nn.Parameter(torch.zeros((1,)))

    def add_regularization_weight(self, weight_list: Any, l2: float) -> None:
        """Have `get_regularization_loss` count some weights."""
        self.regularization_weight.append((list(weight_list), l2))

    def get_regularization_loss(self) -> torch.Tensor:
        total = torch.zeros((1,))
        for weight_list, l2 in self.regularization_weight:
            for parameter in weight_list:
                total = total + torch.sum(l2 * torch.square(parameter))
        return total

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        sparse_embedding_list = [
            self.embedding_dict[name](X[:, self.feature_index[name][0] : self.feature_index[name][1]].long())
            for name in self.names
        ]
        logit = self.linear_model(X)
        fm_input = torch.cat(sparse_embedding_list, dim=1)
        logit = logit + self.fm(fm_input)
        dnn_input = torch.cat([torch.flatten(fm_input, start_dim=1), X[:, len(self.names) :]], dim=-1)
        logit = logit + self.dnn(dnn_input)
        return torch.sigmoid(logit + self.bias)


def samples(first: int, count: int) -> TensorDataset:
    chance = np.random.default_rng(first)
    center = np.arange(first, first + count) * VOCABULARY // 3000
    ids = (center[:, None] + chance.integers(0, VOCABULARY // 8, (count, SPARSE))) % VOCABULARY
    dense = chance.random((count, DENSE))
    label = (ids[:, 0] + ids[:, 1]) % 5 < 2
    X = np.concatenate([ids, dense], axis=1).astype(np.float32)
    return TensorDataset(torch.from_numpy(X), torch.from_numpy(label.astype(np.float32)[:, None]))
