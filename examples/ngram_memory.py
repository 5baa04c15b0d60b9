"""A language model with an n-gram memory: python -m examples.ngram_memory [--quick] [--folder DIR] [--data FILE ...].

A GPT of nanoGPT's layout, with a table of rows for the 2-grams and 3-grams that end at each token. Their rows are gated
into two of its layers, as in Engram (arXiv 2601.07372). ``--keys exact`` gives each n-gram its own row;
``--keys hashed`` hashes each by several heads to a fixed number of rows. ``--data`` takes text files; without it the
text is the source of Python's standard library. A token is a byte, or, with ``--bpe SIZE``, from a vocabulary that is
trained on the text (the extra ``llm``).

Prints the loss with and without the memory, tokens per second, and for each pass the unique keys per token and the
bytes planned and measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import tiercache as tc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BYTES, END = 257, 256
"""Size of the byte-level vocabulary, and the token that ends a text."""
console = Console(highlight=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The size of a run."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    memory_dim: int
    tokens: int
    hashed_rows: int
    """Rows of each hash head."""
    device_budget: str
    host_budget: str


QUICK = Size(layers=2, heads=2, width=32, context=32, batch=16, memory_dim=8, tokens=16_000, hashed_rows=2_000,
             device_budget="160KiB", host_budget="64MiB")  # fmt: skip
FULL = Size(layers=4, heads=4, width=128, context=128, batch=32, memory_dim=64, tokens=2_000_000, hashed_rows=200_000,
            device_budget="96MiB", host_budget="512MiB")  # fmt: skip


class Memory(nn.Module):
    """Rows of n-grams, gated into the hidden states."""

    def __init__(self, rows: nn.Module, num_keys: int, dim: int, width: int) -> None:
        super().__init__()
        self.rows = rows
        self.value, self.key = (nn.Linear(num_keys * dim, width, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the addition to hidden states (N, T, width); keys: (N, T, keys of a token)."""
        found = self.rows(keys).flatten(-2)
        gate = torch.sigmoid((self.norm(hidden) * self.key(found)).sum(-1, keepdim=True) / hidden.shape[-1] ** 0.5)
        return gate * self.value(found)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention to earlier tokens, then two linear layers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.first, self.second = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attend, self.project = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states (N, T, width)."""
        n, t, width = x.shape
        q, k, v = (
            part.view(n, t, self.heads, -1).transpose(1, 2) for part in self.attend(self.first(x)).split(width, 2)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(found.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.second(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """nanoGPT's layout, with memories at the first layer and in the middle."""

    def __init__(self, size: Size, vocab_size: int, grams: tc.NGrams | None, schema: tc.Schema | None) -> None:
        super().__init__()
        self.grams = grams
        self.tokens, self.places = nn.Embedding(vocab_size, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.memories = nn.ModuleDict()
        if grams is not None and schema is not None:
            for layer in sorted({0, size.layers // 2}):
                rows = tc.Embedding(schema, "gram")
                self.memories[str(layer)] = Memory(rows, grams.num_heads, size.memory_dim, size.width)
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, vocab_size, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting tokens y (N, T) after tokens x (N, T)."""
        hidden = self.tokens(x) + self.places.weight[: x.shape[1]]
        keys = None if self.grams is None else self.grams(x)
        for layer, block in enumerate(self.blocks):
            if str(layer) in self.memories:
                hidden = hidden + self.memories[str(layer)](hidden, keys)
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


def texts_of(files: Sequence[Path], most_tokens: int) -> Iterator[str]:
    """Yield texts, shuffled, up to a number of characters; from Python's standard library if no files are given."""
    paths = [*files] or sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    left = most_tokens
    for index in np.random.default_rng(0).permutation(len(paths)).tolist():
        text = paths[index].read_text(errors="replace")
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def write_tokens(options: argparse.Namespace, size: Size, folder: Path) -> tuple[Path, int, int]:
    """Write the tokens of the texts; return the file, the vocabulary size and the end-of-text token."""
    path = folder / "tokens.bin"
    path.unlink(missing_ok=True)
    if not options.bpe:
        encoded = (np.frombuffer(text.encode(), np.uint8) for text in texts_of(options.data, size.tokens))
        return tc.TokenFiles.write(path, encoded, separator=END, dtype=np.uint16), BYTES, END
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=options.bpe, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts_of(options.data, 4 * size.tokens), trainer)
    encoded = (tokenizer.encode(text).ids for text in texts_of(options.data, 4 * size.tokens))
    return tc.TokenFiles.write(path, encoded, separator=0, dtype=np.uint16), tokenizer.get_vocab_size(), 0


def grams_of(keys: str, size: Size, vocab_size: int, end: int) -> tc.NGrams:
    """Return the mapping from n-grams to keys."""
    if keys == "exact":
        return tc.ngrams("exact", vocab_size=vocab_size, orders=(2, 3), border=end)
    return tc.ngrams("qwen4_exp", vocab_size=vocab_size, rows_per_head=size.hashed_rows, border=end, heads=4)


def train_plain(size: Size, tokens: tc.TokenFiles, vocab_size: int) -> float:
    """Train without a memory; return the mean loss of the last tenth of the batches."""
    torch.manual_seed(0)
    model = GPT(size, vocab_size, None, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for first in range(0, len(tokens), size.batch):
        batch = torch.from_numpy(tokens.read(first, min(len(tokens), first + size.batch)))
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return float(np.mean(losses[-max(1, len(losses) // 10) :]))


def train(size: Size, tokens: tc.TokenFiles, data: tc.PassDataset, grams: tc.NGrams, store: Path) -> dict[str, Any]:
    """Train with the memory out of core; return the figures."""
    torch.manual_seed(0)
    model = GPT(size, grams.vocab_size, grams, data.schema)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, begun = list[float](), time.perf_counter()
    with tc.TierCache(
        store, data, model=model, optimizer=optimizer, device_budget=size.device_budget, host_budget=size.host_budget,
        progress=False,
    ) as cache:  # fmt: skip
        for p in cache.passes(epochs=1):
            for batch in p.loader(tokens, batch_size=size.batch):
                loss = model(batch[:, :-1], batch[:, 1:])
                loss.backward()
                cache.optimizer.step()
                cache.optimizer.zero_grad()
                losses.append(loss.item())
        cache.drain()
        reports = list(cache.reports)
    seconds = time.perf_counter() - begun
    for one in reports:
        of_pass = data.passes[one.sub_dataset]
        unique = of_pass.rows("gram") / (of_pass.samples * size.context)
        planned, measured = one.bytes_read_planned + one.bytes_written_planned, one.bytes_read + one.bytes_written
        console.print(
            f"pass {one.pass_index}: {unique:.3f} unique keys per token, {planned:,} bytes planned, {measured:,} moved"
        )
    return {
        "loss": float(np.mean(losses[-max(1, len(losses) // 10) :])),
        "tokens_per_s": len(tokens) * size.context / seconds,
        "passes": len(data),
        "keys_per_token": float(np.mean([p.rows("gram") / (p.samples * size.context) for p in data.passes])),
        "planned_equals_measured": all(one.planned_equals_measured for one in reports),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Create tokens and key sets, and train both models; return the figures."""
    size, folder = QUICK if options.quick else FULL, options.folder
    path, vocab_size, end = write_tokens(options, size, folder)
    tokens = tc.TokenFiles(path, size.context + 1, dtype=np.uint16)
    grams = grams_of(options.keys, size, vocab_size, end)
    table = tc.Table(
        name="gram", dim=size.memory_dim, dtype="bfloat16", initializer=tc.init.Zeros(),
        optimizer=tc.optim.RowWiseAdagrad(learning_rate=0.05),
    )  # fmt: skip
    begun = time.perf_counter()
    data = tc.record_ngrams(
        tokens, grams, folder / "keys", tables=table, device_budget=size.device_budget, progress=False
    )
    speed = len(tokens) * tokens.sequence_length / (time.perf_counter() - begun) / 1e6
    console.print(f"{len(tokens):,} sequences in {len(data)} passes, key sets at {speed:.1f} million tokens/s")
    figures = train(size, tokens, data, grams, folder / "memory.tc")
    plain = train_plain(size, tokens, vocab_size)
    console.print(f"loss {figures['loss']:.3f} with the memory, {plain:.3f} without")
    console.print(
        f"{figures['tokens_per_s']:,.0f} tokens/s; bytes planned = measured: {figures['planned_equals_measured']}"
    )
    return {"keys": options.keys, **figures, "plain_loss": plain}


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("ngram_memory"), help="a new folder for everything written")
    parser.add_argument("--quick", action="store_true", help="few tokens, narrow layers")
    parser.add_argument("--keys", choices=["exact", "hashed"], default="exact")
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="texts")
    parser.add_argument("--bpe", type=int, default=0, help="train a BPE vocabulary of this size; 0: bytes")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    figures = run(options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
