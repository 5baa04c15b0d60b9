"""Word vectors with subwords: python -m examples.word_vectors [--quick] [--data FILE] [--folder DIR].

Skip-gram with negative sampling (Mikolov et al. 2013). A word is the mean of its row and the rows of its
character n-grams, hashed by FNV-1a as in fastText (Bojanowski et al. 2017): a table of two million rows, of which
each pass has the rows of its text. ``--data`` takes a text; without it sentences are generated, each about one of many
themes. Prints the nearest words of some words and, for generated text, how often the nearest word with a different stem
has the same theme.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
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

    Ids = NDArray[np.int64]

BUCKETS, WINDOW, DRAWN = 2_000_000, 4, 5
console = Console(highlight=False)


def fnv1a(text: str) -> int:
    """Return fastText's hash of a text: 32-bit FNV-1a over signed bytes."""
    found = 2166136261
    for byte in text.encode():
        found = ((found ^ (byte if byte < 128 else byte | 0xFFFFFF00)) * 16777619) & 0xFFFFFFFF
    return found


def parts_of(word: str, number: int, words: int) -> list[int]:
    """Return the keys of a word: its own key, and the keys of its n-grams of 3 to 6 characters."""
    marked = f"<{word}>"
    grams = {marked[i : i + n] for n in range(3, 7) for i in range(len(marked) - n + 1)}
    return [number, *sorted(words + fnv1a(gram) % BUCKETS for gram in grams)]


def made_text(sentences: int, themes: int) -> tuple[str, dict[str, int]]:
    """Return sentences, each with words of one theme, and the theme of each word; a theme has words of two stems."""
    chance, letters = np.random.default_rng(0), (list("bdfgklmnprstvz"), list("aeiou"))
    stems = ["".join(chance.choice(letters[i % 2]) for i in range(6)) for _ in range(2 * themes)]
    words = np.array(
        [[stem + end for stem in stems[t::themes] for end in ("", "s", "er", "ing")] for t in range(themes)]
    )
    about = np.linspace(0, themes, sentences) + chance.normal(scale=themes / 20, size=sentences)  # texts have an order
    text = "\n".join(" ".join(chance.choice(words[int(theme) % themes], 8)) for theme in about)
    return text, {word: theme for theme in range(themes) for word in words[theme].tolist()}


class Text:
    """Words as numbers from 0, most frequent first, and the keys of each."""

    def __init__(self, text: str, least: int) -> None:
        lines = [re.findall(r"[^\W\d_]+", line.lower()) for line in text.splitlines()]
        counts = Counter(word for line in lines for word in line)
        self.words = [word for word, count in counts.most_common() if count >= least]
        numbers = {word: i for i, word in enumerate(self.words)}
        self.lines = [np.array([numbers[w] for w in line if w in numbers], dtype=np.int64) for line in lines]
        parts = [parts_of(word, i, len(self.words)) for i, word in enumerate(self.words)]
        self.keys = np.array([key for one in parts for key in one], dtype=np.int64)
        self.starts = np.cumsum([0, *map(len, parts)])
        weights = np.array([counts[word] for word in self.words], dtype=np.float64) ** 0.75
        self.chances = np.cumsum(weights) / weights.sum()

    def bags(self, words: Ids) -> tuple[Ids, Ids]:
        """Return the concatenated keys of words, and the offset of each word (words + 1)."""
        sizes = self.starts[words + 1] - self.starts[words]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        return self.keys[np.repeat(self.starts[words] - offsets[:-1], sizes) + np.arange(offsets[-1])], offsets

    def pairs(self, lines: range, chance: np.random.Generator) -> tuple[Ids, Ids]:
        """Return pairs of words and nearby words, in any order."""
        found = [
            np.stack([line[:-step], line[step:]], axis=1)[:: 1 if flip else -1, :: 1 if flip else -1]
            for line in (self.lines[i] for i in lines)
            for step in range(1, min(WINDOW, line.size - 1) + 1)
            for flip in (True, False)
        ]
        both = chance.permutation(np.concatenate(found)) if found else np.empty((0, 2), np.int64)
        return both[:, 0], both[:, 1]


def schema(dim: int) -> tc.Schema:
    """Return a schema of words, by their parts, and of nearby words."""
    rule = tc.optim.Adagrad(learning_rate=0.1)
    begin = tc.init.Uniform(low=-1 / dim, high=1 / dim)
    tables = tuple(tc.Table(name=name, dim=dim, optimizer=rule, initializer=begin) for name in ("part", "near"))
    features = (
        tc.Feature(name="word", table="part", hotness="ragged"),
        tc.Feature(name="near", hotness="multi_hot", length=1 + DRAWN),
    )
    return tc.Schema(features=features, tables=tables, label=None, dense=())


class SkipGram(nn.Module):
    """Distinguishes nearby words from randomly drawn ones."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.words, self.near = tc.EmbeddingBag(schema(dim), "word"), tc.Embedding(schema(dim), "near")

    def forward(self, batch: tc.Batch) -> torch.Tensor:
        """Return the loss, summed over the drawn words."""
        scores = (self.near(batch) @ self.words(batch)[:, :, None]).squeeze(2)
        wanted = torch.zeros_like(scores)
        wanted[:, 0] = 1
        return nn.functional.binary_cross_entropy_with_logits(scores, wanted, reduction="sum") / len(scores)


def batches(text: Text, lines: range, size: int, seed: Any, near: Ids) -> Iterator[dict[str, Any]]:
    """Yield the keys of each batch; drawn words are from the pass."""
    chance = np.random.default_rng(seed)
    words, others = text.pairs(lines, chance)
    known = np.zeros(len(text.words), dtype=bool)
    known[near] = True
    for low in range(0, words.size, size):
        centers, nearby = words[low : low + size], others[low : low + size]
        drawn = np.searchsorted(text.chances, chance.random((centers.size, DRAWN)))
        drawn = np.where(known[drawn], drawn, chance.choice(near, drawn.shape))
        yield {"word": text.bags(centers), "near": np.concatenate([nearby[:, None], drawn], axis=1)}


def run(text: Text, themes: dict[str, int], options: argparse.Namespace) -> dict[str, Any]:
    """Train; return the figures."""
    cuts = [range(low, min(len(text.lines), low + options.lines)) for low in range(0, len(text.lines), options.lines)]
    begun, sets = time.perf_counter(), []
    for lines in cuts:
        near = np.unique(np.concatenate([text.lines[i] for i in lines]))
        sets.append({"part": np.unique(text.bags(near)[0]), "near": near})
    data = tc.write_key_sets(options.folder / "passes", schema(options.dim), sets)
    model, losses, pairs = SkipGram(options.dim), list[float](), 0
    with tc.TierCache(
        options.folder / "model.tc", data, model=model, device_budget=options.device_budget, host_budget="512MiB"
    ) as cache:
        for p in cache.passes(epochs=options.epochs):
            for keys in batches(text, cuts[p.sub_dataset], options.batch, p.index, sets[p.sub_dataset]["near"]):
                loss = model(p.batch(keys))
                loss.backward()
                cache.optimizer.step()
                losses.append(loss.item())
                pairs += len(keys["near"])
        cache.drain()
        most = min(len(text.words), 20_000)
        keys, offsets = text.bags(np.arange(most))
        known, which = np.unique(keys, return_inverse=True)
        rows = torch.from_numpy(cache.store.lookup("part", known, missing="initial")["vector"])
        stored = cache.store.live_rows("part")
    vectors = nn.functional.embedding_bag(torch.from_numpy(which), rows, torch.from_numpy(offsets[:-1]), mode="mean")
    vectors = nn.functional.normalize(vectors).numpy()
    nearest = [np.argsort(-vectors @ vectors[i])[1:20] for i in range(min(most, 200))]
    for i in range(0, min(most, 200), 40):
        console.print(f"{text.words[i]}: {', '.join(text.words[j] for j in nearest[i][:6])}")
    other = (next(j for j in near if text.words[j][:4] != text.words[i][:4]) for i, near in enumerate(nearest))
    right = [themes.get(text.words[i]) == themes.get(text.words[j]) for i, j in enumerate(other)]
    figures = {
        "words": len(text.words), "rows": stored, "passes": len(cuts), "pairs": pairs,
        "pairs_per_s": pairs / (time.perf_counter() - begun), "loss_first": losses[0] if losses else None,
        "loss_last": float(np.mean(losses[-20:])) if losses else None,
        "same_theme": float(np.mean(right)) if themes else None,
    }  # fmt: skip
    console.print(f"{pairs:,} pairs, {figures['pairs_per_s']:,.0f} a second; {stored:,} rows of parts")
    if themes:
        console.print(f"of the frequent words {np.mean(right):.0%} have one of their theme nearest, of another stem")
    draw(options.folder / "word_vectors.png", losses, vectors[:200], text.words)
    return figures


def draw(path: Path, losses: list[float], vectors: NDArray[np.float32], words: list[str]) -> None:
    """Draw the loss, and the most frequent words in the plane of their two largest components."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(losses, color="#3b6fb6", linewidth=0.6)
    left.set_title("loss of each batch", fontsize=10)
    plane = vectors @ np.linalg.svd(vectors - vectors.mean(axis=0), full_matrices=False)[2][:2].T
    right.scatter(*plane.T, s=3, color="#e8963a")
    for i in range(0, len(plane), 5):
        right.annotate(words[i], plane[i], fontsize=6)
    right.set_title("words", fontsize=10)
    figure.savefig(path, dpi=130)
    console.print(f"figure: {path}")


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("word-vectors"), help="where everything is written")
    parser.add_argument("--quick", action="store_true", help="few sentences")
    parser.add_argument("--data", type=Path, help="a UTF-8 text, sentences on separate lines")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--device-budget", default="32MiB")
    options = parser.parse_args()
    small = options.quick
    options.dim, options.batch, options.epochs, options.lines = (16, 512, 3, 400) if small else (64, 4096, 3, 10_000)
    options.folder.mkdir(parents=True, exist_ok=True)
    source, themes = made_text(*((1200, 60) if small else (100_000, 3000)))
    if options.data:
        source, themes = options.data.read_text(), {}
    figures = run(Text(source, least=2), themes, options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
