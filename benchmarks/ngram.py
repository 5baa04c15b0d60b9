"""Tables of language models: python -m benchmarks.ngram [--quick] [--json FILE].

Tokens are pieces of words of Python source code. Keys are those of Qwen's n-gram table: eight heads of 2-grams and
3-grams, 16 rows per token.

million_tokens_per_second = tokens / seconds of `record_ngrams`, from tokens in memory to durable key sets; and
keyset_speed_vs_duckdb = DuckDB's seconds to group the same keys, passed as a column, and to count each / ours.

The same model is trained on the same batches with its table in memory and out of core, in turns of some passes, after
one epoch of each. Lookups and updates are about a third of its step.
table_over_host_budget = bytes of all rows / the smallest host budget that holds the training
throughput_ratio = tokens/s out of core / in memory; wait_fraction = waits of the training thread / its wall seconds
throughput_ratio_of_one_core = the same with torch on one core, which leaves the others to reader and writer
read_ms = median milliseconds to read the rows of a pass
rows_share = share of an in-memory step that lookups and updates take, from the same steps without them
peak_over_limit = (growth of the anonymous memory of the training out of core - that of the same steps without a table)
/ its device and host budget
memmap_tokens_per_second and sparse_tokens_per_second: the same model over a memory map of its rows with a row-wise
update by NumPy (as nanochat does it, without its races), and over nn.Embedding(sparse=True) with torch's SparseAdam.
Theirs is a smaller table, as torch's has to fit in memory with two averages.
"""

from __future__ import annotations

import os
import re
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import nn

import tiercache as tc
from benchmarks.budgets import Budgets, rows_held
from benchmarks.device import CPU, TrainingDevice
from benchmarks.machine import Goal, benchmark, keep_freed_memory, middle, peak_memory, say, seconds_of
from benchmarks.training import CacheRun, in_turns
from benchmarks.window import same_rows
from tiercache.train.raw_keys import IndexPlan

VOCAB, HEADS = 32_768, 8
GOALS = (
    Goal(key="million_tokens_per_second", goal=10, least=5),
    Goal(key="keyset_speed_vs_duckdb", goal=1),
    Goal(key="throughput_ratio", goal=0.97),
    Goal(key="wait_fraction", goal=0.01, below=True),
    Goal(key="rows_share", goal=0.3),
    Goal(key="table_over_host_budget", goal=20),
    Goal(key="planned_equals_measured", goal=1),
    Goal(key="bits_equal", goal=1),
    Goal(key="peak_over_limit", goal=1, below=True),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The size of a run."""

    keyset_tokens: int
    repeats: int
    tokens: int
    passes: int
    rows_per_head: int
    rows_of_others: int
    """Rows per head of the memory map and of torch's module."""
    dim: int
    length: int
    batch: int
    hidden: int
    """Numbers of the hidden layer."""
    turns: int
    turn_passes: int


FULL = Size(keyset_tokens=8 << 20, repeats=5, tokens=8 << 20, passes=576, rows_per_head=1_500_000,
            rows_of_others=300_000, dim=160, length=512, batch=8, hidden=192, turns=8, turn_passes=8)  # fmt: skip
QUICK = Size(keyset_tokens=2 << 20, repeats=3, tokens=256 << 10, passes=32, rows_per_head=60_000,
             rows_of_others=60_000, dim=32, length=256, batch=8, hidden=1024, turns=4, turn_passes=2)  # fmt: skip
GPU = Size(keyset_tokens=0, repeats=0, tokens=4 << 20, passes=64, rows_per_head=1_500_000, rows_of_others=0, dim=160,
           length=512, batch=32, hidden=512, turns=4, turn_passes=4)  # fmt: skip
TINY = Size(keyset_tokens=1 << 14, repeats=1, tokens=1 << 13, passes=32, rows_per_head=600, rows_of_others=600, dim=8,
            length=32, batch=4, hidden=16, turns=2, turn_passes=4)  # fmt: skip


def text_tokens(count: int) -> NDArray[np.uint16]:
    """Return tokens of Python source code: pieces of words in the order of their first appearance, 0 between files."""
    piece, known, found, total = re.compile(r"\w{1,6}|[^\w\s]|\s+"), dict[str, int](), list[Any](), 0
    paths = [path for kind in ("stdlib", "purelib") for path in sorted(Path(sysconfig.get_path(kind)).rglob("*.py"))]
    for index in np.random.default_rng(0).permutation(len(paths)).tolist():
        words = piece.findall(paths[index].read_text(errors="replace"))
        ids = [
            known.setdefault(w, len(known) + 1) if len(known) < VOCAB - 2 or w in known else VOCAB - 1 for w in words
        ]
        found.append(np.array([*ids, 0], np.uint16))
        total += found[-1].size
        if total >= count:
            break
    tokens: NDArray[np.uint16] = np.concatenate(found)
    return np.resize(tokens, count)


def measure_key_sets(size: Size, folder: Path) -> dict[str, Any]:
    """Return the figures of key sets."""
    import duckdb  # a lent GPU may lack it

    tokens = tc.TokenFiles(text_tokens(size.keyset_tokens), size.length)
    grams = tc.ngrams("qwen4_exp", vocab_size=VOCAB, rows_per_head=20_000_000, border=0, heads=HEADS)
    table = tc.Table(name="gram", dim=160, dtype="bfloat16", optimizer=tc.optim.RowWiseAdagrad(learning_rate=0.05))
    ours, theirs, keys = list[float](), list[float](), 0
    keys_column = pa.table({"key": grams(tokens.read(0, len(tokens))).reshape(-1)})
    database = duckdb.connect(config={"threads": len(os.sched_getaffinity(0))})
    for repeat in range(size.repeats + 1):  # the first one compiles
        begun = time.perf_counter()
        data = tc.record_ngrams(tokens, grams, folder / f"keys-{repeat}", tables=table, device_budget="256GiB",
                                progress=False)  # fmt: skip
        ours.append(time.perf_counter() - begun)
        keys = data.passes[0].rows("gram")
        begun = time.perf_counter()
        grouped = database.sql("SELECT key, count(*) AS occurrences FROM keys_column GROUP BY key").arrow()
        theirs.append(time.perf_counter() - begun)
        rows = grouped.read_all().num_rows if hasattr(grouped, "read_all") else grouped.num_rows
        assert rows == keys, f"DuckDB found {rows:,} keys, and there are {keys:,}"
    del keys_column
    file_bytes = sum(path.stat().st_size for path in (folder / "keys-0").iterdir())
    return {
        "million_tokens_per_second": size.keyset_tokens / middle(ours[1:]) / 1e6,
        "keyset_speed_vs_duckdb": middle(theirs[1:]) / middle(ours[1:]),
        "keys_per_token": keys / size.keyset_tokens,
        "keyset_bytes_per_token": file_bytes / size.keyset_tokens,
    }


class Net(nn.Module):
    """Rows of n-grams, and layers that predict the next sum of rows from all of them."""

    def __init__(self, memory: nn.Module, grams: tc.NGrams, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.memory, self.grams, self.head = memory, grams, nn.Linear(size.dim, size.dim)
        self.hidden = nn.Sequential(nn.Linear(size.dim, size.hidden), nn.ReLU(), nn.Linear(size.hidden, size.dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.memory(self.grams(x)).sum(-2)
        return (self.head(total) + self.hidden(total) - total.roll(1, 1)).square().mean()  # type: ignore[no-any-return]


class TokenRun(CacheRun):
    """A training on sequences of tokens."""

    def __init__(self, cache: Any, model: Net, tokens: tc.TokenFiles, batch: int, device: TrainingDevice) -> None:
        def train(x: torch.Tensor) -> None:
            model(x.to(device.torch_name)).backward()
            cache.optimizer.step()
            cache.optimizer.zero_grad()

        super().__init__(cache, train, batch, device)
        self._tokens = tokens

    def batches(self, **how: Any) -> Iterable[Any]:
        return self.current.loader(self._tokens, batch_size=self._batch, **how)


def measure_training(size: Size, folder: Path, device: TrainingDevice = CPU) -> dict[str, Any]:
    """Return the figures of training; those of memory and of others' tables only on the CPU."""
    tokens = tc.TokenFiles(text_tokens(size.tokens), size.length)
    grams = tc.ngrams("qwen4_exp", vocab_size=VOCAB, rows_per_head=size.rows_per_head, border=0, heads=HEADS)
    table = tc.Table(
        name="gram", dim=size.dim, optimizer=tc.optim.RowWiseAdagrad(learning_rate=0.05), initializer=tc.init.Zeros()
    )
    blocks = np.array_split(np.arange(len(tokens)), size.passes)
    most = max(np.unique(grams(tokens.read(int(b[0]), int(b[-1]) + 1))).size for b in blocks)
    data = tc.record_ngrams(tokens, grams, folder / "train", tables=table, progress=False,
                            device_budget=int(most * (4 * size.dim + 4 + 36)))  # fmt: skip
    budgets, (rows, num_bytes) = Budgets.least(data, evaluation=0), rows_held(data)
    index = IndexPlan.of(data, device.backend()).num_bytes  # as tiercache plan --plain-keys
    say(f"{len(data)} passes, {rows:,} rows, a table of {num_bytes / budgets.host:.1f} times the host budget")
    model, other = (Net(tc.Embedding(data.schema, "gram"), grams, size).to(device.torch_name) for _ in range(2))
    batches = [
        torch.from_numpy(tokens.read(at, at + size.batch)).to(device.torch_name)
        for at in range(0, 8 * size.batch, size.batch)
    ]
    step_seconds(_dense(size, grams, device), batches, device)  # allocates what stays, such as the threads' memory
    with peak_memory(anonymous=True) as steps:
        dense = _dense(size, grams, device)
        step_seconds(dense, batches, device)
    memory = tc.InMemoryCache(
        data, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), device=device.open()
    )
    with peak_memory(anonymous=True) as peak:
        tiered = tc.TierCache(
            folder / "store", data, model=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1),
            device=device.open(), device_budget=budgets.device + index, host_budget=budgets.host, eval_budget=0,
            progress=False,
        )  # fmt: skip
        second = TokenRun(tiered, other, tokens, size.batch, device)
        second.turn(len(data))
    first = TokenRun(memory, model, tokens, size.batch, device)
    first.turn(len(data))
    passes = size.turn_passes
    of_dense = list[float]()
    seconds = in_turns(
        size.turns, passes, first, second, lambda _: of_dense.append(step_seconds(dense, batches, device))
    )
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    of_one_core = in_turns(size.turns, passes, first, second)
    torch.set_num_threads(cores)
    equal = same_rows(memory, tiered) and all(map(torch.equal, model.parameters(), other.parameters()))
    tiered.drain()
    reports = list(tiered.reports)[len(data) : len(data) + passes * size.turns]
    figures = {
        "throughput_ratio": _ratio(seconds),
        "throughput_ratio_of_one_core": _ratio(of_one_core),
        "read_ms": 1e3 * middle(end - begin for begin, end in (one.spans["read"] for one in reports)),
        "wait_fraction": sum(sum(r.wait_seconds.values()) for r in reports) / sum(seconds["tiered"]),
        "tokens_per_second": passes * size.turns * size.tokens / len(data) / sum(seconds["tiered"]),
        "disk_bytes_per_second": sum(r.bytes_read + r.bytes_written for r in reports) / sum(seconds["tiered"]),
        "planned_equals_measured": all(r.planned_equals_measured for r in reports),
        "bits_equal": equal,
        "table_bytes": num_bytes,
        "table_over_host_budget": num_bytes / budgets.host,
        "passes": len(data),
    }
    tiered.close()
    memory.close()
    step = sum(seconds["memory"]) / (passes * size.turns * len(tokens) / len(data) / size.batch)
    figures["rows_share"] = 1 - middle(of_dense) / step
    if device is not CPU:
        return figures
    figures["mib_of_steps"] = steps.growth_bytes / (1 << 20)
    figures["peak_over_limit"] = (peak.growth_bytes - steps.growth_bytes) / (budgets.device + index + budgets.host)
    fewer = tc.ngrams("qwen4_exp", vocab_size=VOCAB, rows_per_head=size.rows_of_others, border=0, heads=HEADS)
    for name, make in {"memmap": _memmap, "sparse": _sparse}.items():
        figures[f"{name}_tokens_per_second"] = (
            size.batch * size.length / step_seconds(make(size, fewer, folder), batches)
        )
    return figures


def _ratio(seconds: dict[str, list[float]]) -> float:
    return middle(m / t for m, t in zip(seconds["memory"], seconds["tiered"], strict=True))


def step_seconds(
    step: Callable[[torch.Tensor], None], batches: Sequence[torch.Tensor], device: TrainingDevice = CPU
) -> float:
    """Return the median seconds of a step, after one on each batch."""

    def timed(number: int) -> None:
        step(batches[number % len(batches)])
        device.rest()

    return middle(seconds_of(timed, 2 * len(batches))[len(batches) :])


def _step_of(model: Net, *more: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    """Return a step of the dense part and of other optimizers."""
    dense = [*model.head.parameters(), *model.hidden.parameters()]
    optimizers = [torch.optim.SGD(dense, lr=0.1), *more]

    def step(x: torch.Tensor) -> None:
        model(x).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()

    return step


def _dense(size: Size, grams: tc.NGrams, device: TrainingDevice) -> Callable[[torch.Tensor], None]:
    """Return a step with the same dense part, and with vectors that are not looked up."""
    shape = size.batch, size.length, grams.num_heads, size.dim

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vectors = torch.randn(shape, requires_grad=True)

        def forward(self, _: torch.Tensor) -> torch.Tensor:
            self.vectors.grad = None  # a lookup does not add to what it had
            return self.vectors

    return _step_of(Net(Given(), grams, size).to(device.torch_name))


def _memmap(size: Size, grams: tc.NGrams, folder: Path) -> Callable[[torch.Tensor], None]:
    """Return a step over a file of rows in a memory map, whose row-wise sums are in memory."""
    rows = np.memmap(folder / "rows", np.float32, "w+", shape=(grams.num_embeddings, size.dim))
    sums = np.zeros(grams.num_embeddings, np.float32)
    made: list[Any] = []

    class Mapped(nn.Module):
        def forward(self, keys: torch.Tensor) -> torch.Tensor:
            unique, inverse = np.unique(keys.numpy(), return_inverse=True)
            vectors = torch.from_numpy(rows[unique]).requires_grad_()
            made.append((unique, vectors))
            return vectors[torch.from_numpy(inverse.reshape(-1))].view(*keys.shape, size.dim)

    dense_step = _step_of(Net(Mapped(), grams, size))

    def step(x: torch.Tensor) -> None:
        dense_step(x)
        unique, vectors = made.pop()
        gradient = vectors.grad.numpy()
        sums[unique] += np.square(gradient).mean(1)
        rows[unique] -= 0.05 * gradient / (np.sqrt(sums[unique]) + 1e-8)[:, None]

    return step


def _sparse(size: Size, grams: tc.NGrams, _folder: Path) -> Callable[[torch.Tensor], None]:
    """Return a step over nn.Embedding with sparse gradients."""
    model = Net(nn.Embedding(grams.num_embeddings, size.dim, sparse=True), grams, size)
    return _step_of(model, torch.optim.SparseAdam(model.memory.parameters()))


if __name__ == "__main__":
    with benchmark("ngram", __doc__, "fewer tokens and a smaller table", GOALS) as run:
        amount = run.size(FULL, QUICK, TINY)
        run.is_judged = amount is not TINY
        run.record |= measure_key_sets(amount, run.folder)
        keep_freed_memory()
        run.record |= measure_training(amount, run.folder)
