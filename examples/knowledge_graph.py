"""Predict links of a knowledge graph: python -m examples.knowledge_graph [--quick] [--data FILE] [--model NAME].

Triples (head, relation, tail) are cut into sub-datasets by buckets of their entities, as in PyTorch-BigGraph
(Lerer et al. 2019), so that neighbors in the schedule share a bucket. In each, ComplEx (Trouillon et al. 2016) or
TransE (Bordes et al. 2013) learns to distinguish the true tail from entities drawn from the pass's key set. Each triple
is learned from both ends, with reciprocal relations (Lacroix et al. 2018). Then all entities are ranked for the test
triples: filtered MRR and Hits@10, and the MRR of the validation triples. ``--data`` takes an archive with train.txt,
valid.txt and test.txt, tab-separated; without it triples are drawn from a ring on which each relation is a rotation.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

import tiercache as tc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Triples = NDArray[np.int64]

console = Console(highlight=False)


@dataclass(frozen=True)
class Graph:
    """Triples (n, 3) of entities 0 .. entities - 1 and relations 0 .. relations - 1."""

    train: Triples
    valid: Triples
    """Held out: settings are chosen by these triples, and the test is scored once."""
    test: Triples
    entities: int
    relations: int

    @classmethod
    def read(cls, path: Path) -> Graph:
        """Read an archive. Triples with entities or relations that the training part lacks are dropped."""
        numbers: tuple[dict[str, int], dict[str, int]] = {}, {}
        parts = {}
        with tarfile.open(path) as archive:
            for name in ("train.txt", "valid.txt", "test.txt"):
                file = archive.extractfile(name)
                assert file is not None, f"{path} has no {name}"
                rows = []
                for line in file.read().decode().splitlines():
                    found = [
                        of.setdefault(word, len(of)) if name == "train.txt" else of.get(word, -1)
                        for word, of in zip(line.split("\t"), (numbers[0], numbers[1], numbers[0]), strict=True)
                    ]
                    if min(found) >= 0:
                        rows.append(found)
                parts[name] = np.array(rows, dtype=np.int64)
        return cls(*parts.values(), len(numbers[0]), len(numbers[1]))

    @classmethod
    def ring(cls, entities: int, relations: int) -> Graph:
        """Return a graph on a ring in which each relation is a fixed step; a tenth of the triples is the test."""
        chance = np.random.default_rng(0)
        heads = np.tile(np.arange(entities), relations)
        kinds = np.repeat(np.arange(relations), entities)
        steps = chance.integers(1, entities, relations)
        triples = chance.permutation(np.stack([heads, kinds, (heads + steps[kinds]) % entities], axis=1))
        tenth = len(triples) // 10
        return cls(triples[2 * tenth :], triples[tenth : 2 * tenth], triples[:tenth], entities, relations)

    def both_ways(self, triples: Triples) -> Triples:
        """Return triples and their reciprocals, (tail, relation + relations, head)."""
        return np.concatenate([triples, triples[:, ::-1] + [0, self.relations, 0]])

    def buckets(self, parts: int) -> NDArray[np.int64]:
        """Return the bucket of each entity, drawn at random."""
        return np.random.default_rng(1).integers(0, parts, self.entities)

    def cut(self, parts: int) -> list[Triples]:
        """Return the triples of each pair of entity buckets; neighbors share a bucket if possible."""
        both = self.both_ways(self.train)
        bucket = self.buckets(parts)
        heads, tails = bucket[both[:, 0]], bucket[both[:, 2]]
        pairs = np.minimum(heads, tails) * parts + np.maximum(heads, tails)
        return [
            both[pairs == low * parts + high]
            for low in range(parts)
            for high in (range(low, parts) if low % 2 == 0 else reversed(range(low, parts)))
        ]


def schema(dim: int) -> tc.Schema:
    """Return a schema in which heads, tails and drawn entities are rows of one table."""
    rule, begin = tc.optim.Adagrad(learning_rate=0.1), tc.init.Normal(std=0.1)
    tables = tuple(tc.Table(name=name, dim=dim, optimizer=rule, initializer=begin) for name in ("entity", "relation"))
    features = (
        tc.Feature(name="head", table="entity"), tc.Feature(name="relation"), tc.Feature(name="tail", table="entity"),
        tc.Feature(name="drawn", table="entity", hotness="ragged"),
    )  # fmt: skip
    return tc.Schema(features=features, tables=tables, label=None, dense=())


class Scorer(nn.Module):
    """Scores triples by their vectors."""

    def __init__(self, dim: int, name: str) -> None:
        super().__init__()
        self.vectors, self.name = tc.EmbeddingCollection(schema(dim)), name

    def asked(self, head: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
        """Return the vectors to compare tails with (N, dim)."""
        if self.name == "transe":
            return head + relation
        a, b = head.chunk(2, dim=-1)
        c, d = relation.chunk(2, dim=-1)
        return torch.cat([a * c - b * d, a * d + b * c], dim=-1)

    def scores(self, asked: torch.Tensor, tails: torch.Tensor) -> torch.Tensor:
        """Return the scores of all tails for each question: (N, tails)."""
        return -torch.cdist(asked, tails) if self.name == "transe" else asked @ tails.T

    def forward(self, batch: tc.Batch, penalty: float) -> torch.Tensor:
        """Return the loss: cross-entropy of each true tail among the drawn ones, plus N3 of ComplEx's vectors."""
        found = self.vectors(batch)
        head, relation, tail = found["head"], found["relation"], found["tail"]
        asked = self.asked(head, relation)
        right = (-(asked - tail).norm(dim=1) if self.name == "transe" else (asked * tail).sum(dim=1))[:, None]
        scores = torch.cat([right, self.scores(asked, found["drawn"])], dim=1)
        loss = nn.functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))
        if self.name == "transe" or not penalty:
            return loss
        cubes = [(one.chunk(2, dim=1)[0] ** 2 + one.chunk(2, dim=1)[1] ** 2) ** 1.5 for one in (head, relation, tail)]
        return loss + penalty * sum(one.sum() for one in cubes) / len(head)


def batches(
    triples: Triples, entities: NDArray[np.int64], bucket: NDArray[np.int64], size: int, drawn: int, seed: Any
) -> Iterator[dict[str, Any]]:
    """Yield the keys of each batch: triples in a new order each time, and entities drawn from the pass for all of them.

    Drawn entities are from the bucket of the batch's tails; otherwise the bucket would give the true tail away.
    """
    chance = np.random.default_rng(seed)
    cuts = []
    for number in np.unique(bucket[triples[:, 2]]):
        order = chance.permutation(np.nonzero(bucket[triples[:, 2]] == number)[0])
        cuts += [(number, order[low : low + size]) for low in range(0, order.size, size)]
    for cut in chance.permutation(len(cuts)):
        number, places = cuts[cut]
        some = triples[places]
        offsets = np.full(len(some) + 1, drawn)
        offsets[0] = 0
        yield {
            "head": some[:, 0].copy(), "relation": some[:, 1].copy(), "tail": some[:, 2].copy(),
            "drawn": (chance.choice(entities[bucket[entities] == number], drawn), offsets),
        }  # fmt: skip


def ranks(graph: Graph, model: Scorer, store: tc.Store, triples: Triples) -> NDArray[np.float64]:
    """Return the filtered rank of each triple, from both ends, among all entities; ties count half."""
    entities = torch.from_numpy(store.lookup("entity", np.arange(graph.entities), missing="initial")["vector"])
    relations = torch.from_numpy(store.lookup("relation", np.arange(2 * graph.relations), missing="initial")["vector"])
    known: dict[tuple[int, int], list[int]] = {}
    for head, relation, tail in graph.both_ways(np.concatenate([graph.train, graph.valid, graph.test])).tolist():
        known.setdefault((head, relation), []).append(tail)
    asked, found = graph.both_ways(triples), []
    with torch.no_grad():
        for low in range(0, len(asked), 128):
            some = torch.from_numpy(asked[low : low + 128])
            scores = model.scores(model.asked(entities[some[:, 0]], relations[some[:, 1]]), entities)
            right = scores.gather(1, some[:, 2:])
            for row, (head, relation, _) in enumerate(some.tolist()):
                scores[row, known[head, relation]] = -torch.inf
            found.append(1 + (scores > right).sum(dim=1) + (scores == right).sum(dim=1) / 2)
    return torch.cat(found).double().numpy()


def run(graph: Graph, options: argparse.Namespace) -> dict[str, Any]:
    """Train and rank; return the figures."""
    parts, bucket, begun = graph.cut(options.parts), graph.buckets(options.parts), time.perf_counter()
    sets = [{"entity": np.unique(part[:, [0, 2]]), "relation": np.unique(part[:, 1])} for part in parts]
    data = tc.write_key_sets(options.folder / "passes", schema(options.dim), sets)
    model, losses = Scorer(options.dim, options.model), []
    with tc.TierCache(
        options.folder / "model.tc", data, model=model, device_budget=options.device_budget, host_budget="1GiB",
    ) as cache:  # fmt: skip
        schedule = torch.optim.lr_scheduler.LinearLR(cache.optimizer, 1.0, 0.1, options.epochs * len(parts))
        cache.register(schedule=schedule)
        for p in cache.passes(epochs=options.epochs):
            triples, entities = parts[p.sub_dataset], sets[p.sub_dataset]["entity"]
            of_pass = []
            for keys in batches(triples, entities, bucket, options.batch, options.drawn, (p.index, 1)):
                loss = model(p.batch(keys), options.penalty)
                loss.backward()
                cache.optimizer.step()
                of_pass.append(loss.item())
            schedule.step()
            losses.append(float(np.mean(of_pass)))
            if p.sub_dataset == len(parts) - 1:
                seconds = time.perf_counter() - begun
                console.print(f"epoch {p.epoch + 1}: loss {np.mean(losses[-len(parts) :]):.3f}, {seconds:.0f} s")
        cache.drain()
        seconds = time.perf_counter() - begun
        valid, found = (ranks(graph, model, cache.store, of[: options.most]) for of in (graph.valid, graph.test))
    figures = {
        "model": options.model, "triples": len(graph.train), "entities": graph.entities, "passes": len(parts),
        "dim": options.dim, "epochs": options.epochs, "penalty": options.penalty, "ranked": len(found),
        "valid_mrr": float((1 / valid).mean()), "mrr": float((1 / found).mean()),
        "hits_at_10": float((found <= 10).mean()), "seconds": seconds,
    }  # fmt: skip
    of_valid = f"MRR of the valid triples {figures['valid_mrr']:.3f}"
    console.print(f"{options.model}: MRR {figures['mrr']:.3f}, Hits@10 {figures['hits_at_10']:.3f}; {of_valid}")
    draw(options.folder / "knowledge_graph.png", losses, found)
    return figures


def draw(path: Path, losses: list[float], found: NDArray[np.float64]) -> None:
    """Draw the losses and how many ranks are how good."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(losses, color="#3b6fb6")
    left.set_xlabel("pass")
    left.set_title("loss", fontsize=10)
    right.plot(np.sort(found), np.arange(1, found.size + 1) / found.size, color="#e8963a")
    right.set_xscale("log")
    right.set_xlabel("rank")
    right.set_title("share of test triples at this rank or better", fontsize=10)
    figure.savefig(path, dpi=130)
    console.print(f"figure: {path}")


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("knowledge-graph"), help="where everything is written")
    parser.add_argument("--quick", action="store_true", help="a small ring")
    parser.add_argument("--data", type=Path, help="an archive with train.txt, valid.txt and test.txt")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--model", choices=["complex", "transe"], default="complex")
    for name, value in {"dim": 200, "epochs": 20, "batch": 512, "drawn": 1500, "parts": 2, "most": 1 << 40}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--penalty", type=float, default=0.02, help="of N3")
    parser.add_argument("--device-budget", default="256MiB")
    options = parser.parse_args()
    if options.quick:
        options.dim, options.epochs, options.batch, options.drawn = 32, 6, 256, 64
    options.folder.mkdir(parents=True, exist_ok=True)
    graph = Graph.read(options.data) if options.data else Graph.ring(*((300, 8) if options.quick else (20_000, 20)))
    figures = run(graph, options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
