"""Knowledge graph embeddings in the layout of the published RotatE: tables are parameters, and loaders alternate."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

ENTITIES, RELATIONS, DIM, TRIPLES, NEGATIVES = 1000, 8, 8, 2000, 6


class KGEModel(nn.Module):
    def __init__(self, nentity: int, nrelation: int, hidden_dim: int, gamma: float) -> None:
        super().__init__()
        self.nentity, self.nrelation, self.hidden_dim, self.epsilon = nentity, nrelation, hidden_dim, 2.0
        self.gamma = nn.Parameter(torch.Tensor([gamma]), requires_grad=False)
        self.embedding_range = nn.Parameter(
            torch.Tensor([(self.gamma.item() + self.epsilon) / hidden_dim]), requires_grad=False
        )
        self.entity_embedding = nn.Parameter(torch.zeros(nentity, hidden_dim * 2))
        nn.init.uniform_(self.entity_embedding, a=-self.embedding_range.item(), b=self.embedding_range.item())
        self.relation_embedding = nn.Parameter(torch.zeros(nrelation, hidden_dim))
        nn.init.uniform_(self.relation_embedding, a=-self.embedding_range.item(), b=self.embedding_range.item())

    def forward(self, sample: Any, mode: str = "single") -> torch.Tensor:
        if mode == "single":
            head = torch.index_select(self.entity_embedding, dim=0, index=sample[:, 0]).unsqueeze(1)
            relation = torch.index_select(self.relation_embedding, dim=0, index=sample[:, 1]).unsqueeze(1)
            tail = torch.index_select(self.entity_embedding, dim=0, index=sample[:, 2]).unsqueeze(1)
        elif mode == "head-batch":
            tail_part, head_part = sample
            batch_size, negative_sample_size = head_part.size(0), head_part.size(1)
            head = torch.index_select(self.entity_embedding, dim=0, index=head_part.view(-1)).view(
                batch_size, negative_sample_size, -1
            )
            relation = torch.index_select(self.relation_embedding, dim=0, index=tail_part[:, 1]).unsqueeze(1)
            tail = torch.index_select(self.entity_embedding, dim=0, index=tail_part[:, 2]).unsqueeze(1)
        else:
            head_part, tail_part = sample
            batch_size, negative_sample_size = tail_part.size(0), tail_part.size(1)
            head = torch.index_select(self.entity_embedding, dim=0, index=head_part[:, 0]).unsqueeze(1)
            relation = torch.index_select(self.relation_embedding, dim=0, index=head_part[:, 1]).unsqueeze(1)
            tail = torch.index_select(self.entity_embedding, dim=0, index=tail_part.view(-1)).view(
                batch_size, negative_sample_size, -1
            )
        return self.RotatE(head, relation, tail, mode)

    def RotatE(  # noqa: N802 - as published
        self, head: torch.Tensor, relation: torch.Tensor, tail: torch.Tensor, mode: str
    ) -> torch.Tensor:
        """Return how near the rotated head is to the tail."""
        re_head, im_head = torch.chunk(head, 2, dim=2)
        re_tail, im_tail = torch.chunk(tail, 2, dim=2)
        phase_relation = relation / (self.embedding_range.item() / np.pi)
        re_relation, im_relation = torch.cos(phase_relation), torch.sin(phase_relation)
        if mode == "head-batch":
            re_score = re_relation * re_tail + im_relation * im_tail - re_head
            im_score = re_relation * im_tail - im_relation * re_tail - im_head
        else:
            re_score = re_head * re_relation - im_head * im_relation - re_tail
            im_score = re_head * im_relation + im_head * re_relation - im_tail
        score = torch.stack([re_score, im_score], dim=0).norm(dim=0)
        return self.gamma.item() - score.sum(dim=2)  # type: ignore[no-any-return]

    @staticmethod
    def train_step(model: nn.Module, optimizer: Any, batch: Any) -> float:
        model.train()
        optimizer.zero_grad()
        positive_sample, negative_sample, subsampling_weight, mode = batch
        negative_score = model((positive_sample, negative_sample), mode=mode)
        weights = F.softmax(negative_score * 1.0, dim=1).detach()
        negative_score = (weights * F.logsigmoid(-negative_score)).sum(dim=1)
        positive_score = F.logsigmoid(model(positive_sample)).squeeze(dim=1)
        positive_sample_loss = -(subsampling_weight * positive_score).sum() / subsampling_weight.sum()
        negative_sample_loss = -(subsampling_weight * negative_score).sum() / subsampling_weight.sum()
        loss = (positive_sample_loss + negative_sample_loss) / 2
        loss.backward()
        optimizer.step()
        return loss.item()  # type: ignore[no-any-return]


class TrainDataset(Dataset[Any]):
    def __init__(self, mode: str) -> None:
        self.mode = mode

    def __len__(self) -> int:
        return TRIPLES

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        chance = np.random.default_rng((i, self.mode == "head-batch"))
        center = i * ENTITIES // TRIPLES
        entities = (center + chance.integers(0, ENTITIES // 10, NEGATIVES + 2)) % ENTITIES
        positive = torch.LongTensor([entities[0], int(entities[0] + entities[1]) % RELATIONS, entities[1]])
        return positive, torch.from_numpy(entities[2:]), torch.Tensor([chance.random() + 0.5]), self.mode

    @staticmethod
    def collate_fn(data: list[Any]) -> tuple[Any, ...]:
        positive, negative, weight, mode = zip(*data, strict=True)
        return torch.stack(positive), torch.stack(negative), torch.cat(weight), mode[0]


class BidirectionalLoader:
    """Batches of negative heads and of negative tails in turn."""

    def __init__(self, batch_size: int) -> None:
        self.loaders = [
            DataLoader(TrainDataset(mode), batch_size, collate_fn=TrainDataset.collate_fn)
            for mode in ("head-batch", "tail-batch")
        ]

    def __iter__(self) -> Iterator[Any]:
        for batches in zip(*self.loaders, strict=True):
            yield from batches
