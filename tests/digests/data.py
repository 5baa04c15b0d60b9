"""The tables, features and samples of the digests: all drawn from a hash of integers, so the same everywhere.

A gradient that reaches rows is a small integer times a power of two, also after every scaling: ids that are averaged
are 1, 2 or 4, weights of ids powers of two, and so is the number of samples of every batch on every rank.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

import tiercache as tc

PASSES, PASS_SAMPLES, BATCH = 4, 40, 16  # a pass has batches of 16, 16 and 8 samples
SAMPLES = PASSES * PASS_SAMPLES
KEYS = 240  # keys of a table
OPTIMIZERS = {
    "sgd": tc.optim.SGD(learning_rate=0.1, decay=0.01),
    "adagrad": tc.optim.Adagrad(learning_rate=0.1),
    "rowwise": tc.optim.RowWiseAdagrad(learning_rate=0.1, decay=0.02),
    # powers of these are exact in float64 for all steps: pow of others differs between C libraries
    "adam": tc.optim.Adam(learning_rate=0.05, beta1=0.5, beta2=0.75),
}


def table(name: str, dim: int) -> tc.Table:
    """Return a table by a name that begins with its optimizer and ends with its dtype if that is not float32."""
    return tc.Table(
        name=name,
        dim=dim,
        optimizer=OPTIMIZERS[name.split("_", maxsplit=1)[0]],
        initializer=tc.init.Uniform(low=-0.5, high=0.5),
        dtype="bfloat16" if name.endswith("bf16") else "float32",
        seed=7,
    )


TABLES = (
    table("sgd", 8), table("sgd_too", 8), table("adagrad", 20), table("rowwise", 5), table("adam", 16),
    table("sgd_bf16", 3), table("adagrad_bf16", 8), table("rowwise_bf16", 16), table("adam_bf16", 20),
)  # fmt: skip
"""Two of one layout, which share a group; dims below, at and above the kernels' sixteen lanes."""


@dataclass(frozen=True)
class Spec:
    """A feature: keys per sample (0: 0, 1, 2 or 4 of them) and pooling (None: not pooled)."""

    name: str
    table: str
    length: int
    mode: str | None
    weighted: bool = False

    @property
    def feature(self) -> tc.Feature:
        hotness = {0: "ragged", 1: "one_hot"}.get(self.length, "multi_hot")
        return tc.Feature(
            name=self.name, table=self.table, hotness=hotness, length=self.length if hotness == "multi_hot" else None,
            weights=f"{self.name}_w" if self.weighted else None,
        )  # fmt: skip


SPECS = (
    Spec("a", "sgd", 1, "sum"),
    Spec("b", "sgd", 4, "mean"),
    Spec("c", "sgd_too", 0, "sum", weighted=True),
    Spec("d", "adagrad", 0, "sum", weighted=True),
    Spec("e", "adagrad", 1, "sum"),
    Spec("f", "rowwise", 0, "max"),
    Spec("g", "rowwise", 1, None),
    Spec("h", "adam", 4, "mean"),
    Spec("i", "adam", 2, None),
    Spec("j", "sgd_bf16", 1, "sum"),
    Spec("k", "sgd_bf16", 0, "mean"),
    Spec("l", "adagrad_bf16", 2, "max"),
    Spec("m", "adagrad_bf16", 0, "sum", weighted=True),
    Spec("n", "rowwise_bf16", 1, None),
    Spec("o", "rowwise_bf16", 0, "sum"),
    Spec("p", "adam_bf16", 0, "mean", weighted=True),
    Spec("q", "adam_bf16", 1, "sum"),
)
SCHEMA = tc.Schema(
    label="label", dense=(tc.DenseFeature(column="x"),), features=tuple(spec.feature for spec in SPECS), tables=TABLES
)


def draw(what: str, count: int, below: int = 2**32) -> NDArray[np.int64]:
    x = (np.uint64(zlib.crc32(what.encode())) << np.uint64(32)) + np.arange(count, dtype=np.uint64)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return ((x ^ x >> np.uint64(31)) % np.uint64(below)).astype(np.int64)


@dataclass(frozen=True)
class Column:
    """The keys of a feature, list by list, and their weights."""

    spec: Spec
    keys: NDArray[np.int64]
    offsets: NDArray[np.int64]
    weights: NDArray[np.float32]

    @classmethod
    def of(cls, spec: Spec) -> "Column":
        """Draw it: some keys come in every pass, others in few, and many are negative."""
        lengths = np.array([0, 1, 2, 4])[draw(f"{spec.name} lengths", SAMPLES, 4)]
        lengths = lengths if spec.length == 0 else np.full(SAMPLES, spec.length)
        total = int(lengths.sum())
        ids = np.minimum(draw(f"{spec.name} one", total, KEYS), draw(f"{spec.name} other", total, KEYS))
        universe = draw(f"{spec.table} keys", KEYS, 2**62) - 2**61
        weights = np.array([0.5, 1, 2], np.float32)[draw(f"{spec.name} weights", total, 3)]
        return cls(spec, universe[ids], np.concatenate([[0], np.cumsum(lengths)]), weights)

    def columns(self) -> dict[str, Any]:
        if self.spec.length == 1:
            return {self.spec.name: self.keys}
        offsets = self.offsets.astype(np.int32)
        found = {self.spec.name: pa.ListArray.from_arrays(offsets, self.keys)}
        if self.spec.weighted:
            found[f"{self.spec.name}_w"] = pa.ListArray.from_arrays(offsets, self.weights)
        return found

    def taken(self, places: NDArray[np.int64]) -> tuple[Any, NDArray[np.float32]]:
        """Return the keys of some samples in the form of ``Pass.batch``, and their weights."""
        lists = [np.arange(self.offsets[i], self.offsets[i + 1]) for i in places]
        entries = np.concatenate(lists) if lists else np.empty(0, np.int64)
        keys, weights = self.keys[entries], self.weights[entries]
        if self.spec.length == 0:
            return (keys, np.concatenate([[0], np.cumsum([one.size for one in lists])]).astype(np.int64)), weights
        return keys.reshape((-1, self.spec.length) if self.spec.length > 1 else -1), weights


COLUMNS = tuple(Column.of(spec) for spec in SPECS)
FACTORS = np.array([0.1, 0.3, 0.7, 0.9, 1.1, 1.3, 1.7, 1.9, 2.3], np.float32)
"""Factors by label, for gradients whose sums depend on their order."""
LABELS = (draw("label", SAMPLES, 9) - 4).astype(np.float32)
DENSE = (draw("x", SAMPLES, 9) - 4).astype(np.float32)


def keys_of(table_name: str, first: int = 0, last: int = SAMPLES) -> NDArray[np.int64]:
    mine = [c.keys[c.offsets[first] : c.offsets[last]] for c in COLUMNS if c.spec.table == table_name]
    return np.unique(np.concatenate(mine))


def extract(folder: Path) -> tc.PassDataset:
    columns = {"label": LABELS, "x": DENSE} | {k: v for column in COLUMNS for k, v in column.columns().items()}
    pq.write_table(pa.table(columns), folder / "data.parquet")
    return tc.extract(
        folder / "data.parquet", SCHEMA, folder / "passes", device_budget="1GiB", split_by=f"rows={PASS_SAMPLES}",
        batch_multiple=1, progress=False,
    )  # fmt: skip


def write_keys(folder: Path) -> tc.PassDataset:
    firsts = range(0, SAMPLES, PASS_SAMPLES)
    keys = ({t.name: keys_of(t.name, first, first + PASS_SAMPLES) for t in TABLES} for first in firsts)
    return tc.write_key_sets(folder / "passes", SCHEMA, keys)


def raw_batches(epoch: int, sub_dataset: int, start: int, rank: int, ranks: int) -> Any:
    """Yield the arguments of ``Pass.batch`` for a rank's part of each batch, in the loader's own order."""
    order = np.argsort(draw(f"order of pass {sub_dataset} in epoch {epoch}", PASS_SAMPLES), kind="stable")
    for first in range(start, PASS_SAMPLES, BATCH):
        whole = order[first : first + BATCH] + sub_dataset * PASS_SAMPLES
        mine = whole[rank * whole.size // ranks : (rank + 1) * whole.size // ranks]
        taken = {column.spec: column.taken(mine) for column in COLUMNS}
        keys = {spec.name: given for spec, (given, _) in taken.items()}
        weights = {spec.name: given for spec, (_, given) in taken.items() if spec.weighted}
        yield keys, {"weights": weights, "label": LABELS[mine], "dense": DENSE[mine, None]}
