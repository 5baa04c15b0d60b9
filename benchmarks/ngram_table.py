"""A table of 51.2 billion parameters in 4 GiB: python -m benchmarks.ngram_table [--quick] [--json FILE].

The n-gram table of Qwen3.8-Flash-Next, 320,001,536 rows of 160 numbers in bfloat16, begins as a tensor of a checkpoint:
a sparse file of 102 GB that this command makes, with random numbers in a stripe here and there. A small head trains it
on tokens of Python source code, in a process whose memory is limited (RLIMIT_DATA); once in one go, and once killed in
the middle of a pass and resumed. The rows of the second store are exported as an overlay.

bits_equal = rows, states and dense weights of both are the same bits
rows_begun = new rows that were read from the checkpoint; touched_rows = rows in the store
store_over_touched = bytes of the store's files / bytes of the touched rows; store_over_table = / bytes of the tensor
overlay_equal = the overlay has the keys and the vectors of the store, and no others
untouched_equal = rows that were not trained equal the rows of the checkpoint
peak_over_limit = largest resident memory of the trainings / the limit
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import nn

import tiercache as tc
from benchmarks.machine import Goal, benchmark, digest, in_child, of_process, say
from benchmarks.ngram import text_tokens
from tiercache.sizes import parse_bytes
from tiercache.store.inspect import file_bytes_of

TENSOR, TARGETS, STRIPE_BYTES = "model.ngram_embedding.weight", 1024, 64 << 10
GOALS = (
    Goal(key="bits_equal", goal=1),
    Goal(key="overlay_equal", goal=1),
    Goal(key="untouched_equal", goal=1),
    Goal(key="planned_equals_measured", goal=1),
    Goal(key="store_over_touched", goal=1.4, below=True),
    Goal(key="store_over_table", goal=0.1, below=True),
    Goal(key="peak_over_limit", goal=1, below=True),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The size of a run."""

    tokens: int
    rows_per_head: int
    dim: int
    stripes: int
    length: int
    batch: int
    pass_bytes: str
    device: str
    host: str
    limit: str


FULL = Size(tokens=4_000_000, rows_per_head=20_000_000, dim=160, stripes=4096, length=500, batch=8,
            pass_bytes="640MiB", device="1GiB", host="1792MiB", limit="4GiB")  # fmt: skip
QUICK = Size(tokens=60_000, rows_per_head=20_000_000, dim=160, stripes=4096, length=250, batch=8,
             pass_bytes="32MiB", device="64MiB", host="320MiB", limit="4GiB")  # fmt: skip
TINY = Size(tokens=6_000, rows_per_head=2_000, dim=160, stripes=16, length=50, batch=8,
            pass_bytes="2MiB", device="4MiB", host="96MiB", limit="4GiB")  # fmt: skip


def grams_of(size: Size) -> tc.NGrams:
    """Return the keys of the model."""
    return tc.ngrams("qwen4_exp", vocab_size=248_320, rows_per_head=size.rows_per_head, border=0)


def make_checkpoint(path: Path, size: Size) -> tuple[int, int]:
    """Write a sparse safetensors file with stripes of random numbers; returns its rows and the tensor's first byte."""
    rows = grams_of(size).num_embeddings
    num_bytes = 2 * rows * size.dim
    entry = {"dtype": "BF16", "shape": [rows, size.dim], "data_offsets": [0, num_bytes]}
    header = json.dumps({TENSOR: entry}).encode()
    rng, first = np.random.default_rng(0), 8 + len(header)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(first + num_bytes)
        for at in np.linspace(0, num_bytes - STRIPE_BYTES, size.stripes).astype(np.int64) // 2 * 2:
            numbers = (rng.standard_normal(STRIPE_BYTES // 2) * 0.02).astype(np.float32)
            file.seek(first + int(at))
            file.write((numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return rows, first


class Net(nn.Module):
    """The n-gram memory, and a small head that predicts the next token modulo 1024."""

    def __init__(self, memory: nn.Module, grams: tc.NGrams, dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.memory, self.grams = memory, grams
        self.down, self.out = nn.Linear(grams.num_heads * dim, 64), nn.Linear(64, TARGETS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.memory(self.grams(x)[:, :-1]).flatten(-2).float()
        logits = self.out(torch.relu(self.down(found)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), (x[:, 1:] % TARGETS).flatten())


def train(size: Size, folder: Path, name: str, kill_at: int | None = None) -> dict[str, Any]:
    """Train one epoch in this process, whose memory is limited from now on; ``kill_at``: a pass to be killed in."""
    limit = parse_bytes(size.limit)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    data, grams = tc.PassDataset.open(folder / "keys"), grams_of(size)
    tokens = tc.TokenFiles(str(folder / "tokens.npy"), size.length)
    model = Net(tc.Embedding(data.schema, "gram"), grams, size.dim)
    dense = [*model.down.parameters(), *model.out.parameters()]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    begun, losses = time.perf_counter(), list[float]()
    with tc.TierCache(
        folder / name, data, model=model, optimizer=optimizer, device_budget=size.device, host_budget=size.host,
        progress=False,
    ) as cache:  # fmt: skip
        for p in cache.passes(epochs=1):
            batches = p.loader(tokens, batch_size=size.batch, shuffle=True)
            middle = len(batches) // 2
            for number, x in enumerate(batches):
                loss = model(x)
                loss.backward()
                cache.optimizer.step()
                cache.optimizer.zero_grad()
                losses.append(loss.item())
                if p.index == kill_at and number == middle:
                    cache.reports[-2].durable.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
        cache.drain()
        return {
            "seconds": time.perf_counter() - begun,
            "passes": len(cache.reports),
            "rows_begun": sum(report.checkpoint_rows for report in cache.reports),
            "checkpoint_bytes": sum(report.checkpoint_bytes for report in cache.reports),
            "waited": sum(report.waited for report in cache.reports),
            "planned": all(report.planned_equals_measured for report in cache.reports if report.durable.is_set()),
            "dense": digest(part.detach().numpy() for part in dense),
            "first_loss": float(np.mean(losses[:10])),
            "last_loss": float(np.mean(losses[-10:])),
            "peak_bytes": of_process("status")["VmHWM"],
        }


def digest_of(store: Path) -> str:
    """Return a digest of all rows of a store, states included."""
    with tc.Store.open(store, mode="r") as opened:
        return digest(array for keys, fields in opened.scan("gram") for array in (keys, *fields))


def overlay_equals(store: Path, overlay: Path) -> bool:
    """Compare the rows of an overlay with the rows of a store."""
    rows = 0
    with safe_open(overlay, framework="pt") as file, tc.Store.open(store, mode="r") as opened:
        keys = file.get_tensor(f"{TENSOR}.keys").numpy()
        vectors = file.get_tensor(f"{TENSOR}.rows").view(torch.int16).numpy()
        for found, fields in opened.scan("gram"):
            at = np.searchsorted(keys, found)
            expected = torch.from_numpy(np.ascontiguousarray(fields[0])).bfloat16().view(torch.int16).numpy()
            if not (np.array_equal(keys[at], found) and np.array_equal(vectors[at], expected)):
                return False
            rows += found.size
    return rows == keys.size and bool(np.all(np.diff(keys) > 0))


def untouched_equal(store: Path, checkpoint: Path, first: int, size: Size, rows: int) -> bool:
    """Look rows of stripes up that were never trained, and compare them with the file."""
    at = np.linspace(0, 2 * rows * size.dim - STRIPE_BYTES, size.stripes).astype(np.int64) // 2 * 2
    keys = np.unique(-(-at // (2 * size.dim)) + 1)[:2000]
    with tc.Store.open(store, mode="r") as opened, checkpoint.open("rb") as file:
        found = opened.lookup("gram", keys, missing="zeros")["vector"]
        keys = keys[~found.any(axis=1)]  # those that are stored were trained
        ours: NDArray[np.float32] = opened.lookup("gram", keys, missing="initial")["vector"]
        for key, vector in zip(keys.tolist(), ours, strict=True):
            file.seek(first + 2 * size.dim * key)
            bits = np.frombuffer(file.read(2 * size.dim), np.uint16).astype(np.uint32) << 16
            if not np.array_equal(bits.view(np.float32), vector):
                return False
    return bool(len(keys)) and bool(ours.any(axis=1).all())


def measure(size: Size, folder: Path) -> dict[str, Any]:
    """Return the figures."""
    checkpoint = folder / "model.safetensors"
    rows, first = make_checkpoint(checkpoint, size)
    say(f"a table of {rows * size.dim:,} parameters, in a file of {checkpoint.stat().st_size:,} bytes")
    np.save(folder / "tokens.npy", text_tokens(size.tokens))
    table = tc.Table(
        name="gram", dim=size.dim, dtype="bfloat16", optimizer=tc.optim.RowWiseAdagrad(learning_rate=0.05),
        initializer=tc.init.Checkpoint(path=str(checkpoint), tensor=TENSOR),
    )  # fmt: skip
    tokens = tc.TokenFiles(str(folder / "tokens.npy"), size.length)
    begun = time.perf_counter()
    data = tc.record_ngrams(
        tokens, grams_of(size), folder / "keys", tables=table, device_budget=size.pass_bytes, progress=False
    )
    recorded = time.perf_counter() - begun
    touched = np.unique(np.concatenate([one.keys("gram") for one in data.passes])).size
    say(f"{len(data)} passes, {touched:,} rows are used")
    whole = in_child(train, size, folder, "whole")
    say(f"trained in one go: {whole['seconds']:.0f} s, loss {whole['first_loss']:.3f} to {whole['last_loss']:.3f}")
    in_child(train, size, folder, "resumed", len(data) // 2, ended=-signal.SIGKILL)
    resumed = in_child(train, size, folder, "resumed")
    say(f"killed in pass {len(data) // 2} and resumed: {resumed['seconds']:.0f} s more")
    overlay = folder / "overlay.safetensors"
    exported = tc.export_overlay(folder / "resumed", overlay)
    equal = whole["dense"] == resumed["dense"] and digest_of(folder / "whole") == digest_of(folder / "resumed")
    stored, touched_bytes = file_bytes_of(folder / "resumed"), touched * table.row_bytes
    return {
        "parameters": rows * size.dim,
        "tokens": size.tokens,
        "passes": len(data),
        "touched_rows": touched,
        "rows_begun": whole["rows_begun"],
        "record_seconds": recorded,
        "train_seconds": whole["seconds"],
        "waited_seconds": whole["waited"],
        "resumed_seconds": resumed["seconds"],
        "first_loss": whole["first_loss"],
        "last_loss": whole["last_loss"],
        "checkpoint_read_bytes": whole["checkpoint_bytes"],
        "store_bytes": stored,
        "touched_bytes": touched_bytes,
        "overlay_rows": exported.rows,
        "peak_bytes": max(whole["peak_bytes"], resumed["peak_bytes"]),
        "bits_equal": equal,
        "overlay_equal": exported.rows == touched and overlay_equals(folder / "resumed", overlay),
        "untouched_equal": untouched_equal(folder / "resumed", checkpoint, first, size, rows),
        "planned_equals_measured": whole["planned"] and resumed["planned"] and whole["rows_begun"] == touched,
        "store_over_touched": stored / touched_bytes,
        "store_over_table": stored / (2 * rows * size.dim),
        "peak_over_limit": max(whole["peak_bytes"], resumed["peak_bytes"]) / parse_bytes(size.limit),
    }


if __name__ == "__main__":
    with benchmark("ngram_table", __doc__, "60,000 tokens, the same table", GOALS) as run:
        amount = run.size(FULL, QUICK, TINY)
        run.is_judged = amount is not TINY
        run.record |= {f"size_{name}": value for name, value in asdict(amount).items()}
        run.record |= measure(amount, run.folder)
