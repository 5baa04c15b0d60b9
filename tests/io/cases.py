"""Stores to export: tables of every optimizer, rows of any bits, and their contents."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import tiercache as tc
from tiercache.store import MemoryEngine, Store, Table, Uniform, Zeros, load_rows
from tiercache.store.bits import nearest
from tiercache.store.optimizer import Optimizer

FORMATS = ("numpy", "parquet", "safetensors", "hugectr", "torch")
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": tc.optim.SGD(learning_rate=0.1),
    "adagrad": tc.optim.Adagrad(learning_rate=0.1, initial_accumulator=0.25),
    "rowwise": tc.optim.RowWiseAdagrad(learning_rate=0.1),
    "adam": tc.optim.Adam(),
    "momentum": tc.optim.SGD(momentum=0.9),
    "rowwise_adam": tc.optim.RowWiseAdam(decoupled=True),
    "rowwise_rmsprop": tc.optim.RowWiseRMSprop(),
}

Rows = dict[str, dict[int, bytes]]


def keeps_state(format_: str, table: Table) -> bool:
    if len(table.fields) == 1:
        return True
    if format_ == "hugectr":
        return isinstance(table.optimizer, tc.optim.Adagrad | tc.optim.Adam)
    return format_ != "torch"


def table(name: str, dim: int, optimizer: str, dtype: str = "float32") -> Table:
    initializer = Uniform(low=-0.1, high=0.1) if dim > 2 else Zeros()
    return Table(name=name, dim=dim, optimizer=OPTIMIZERS[optimizer], initializer=initializer, dtype=dtype)


def all_tables() -> list[Table]:
    """Return one table for each optimizer, two of them in one group."""
    return [table(name, dim, name.split("-")[0]) for name, dim in (("adam", 5), ("rowwise", 3), ("sgd", 1))] + [
        table("adagrad-a", 4, "adagrad"),
        table("adagrad/b", 4, "adagrad"),
    ]


def random_rows(tables: Sequence[Table], counts: Sequence[int], seed: int = 0) -> Rows:
    """Return rows of any bits that the dtype holds: every NaN, infinity and denormal number may be there."""
    generator = np.random.default_rng(seed)
    rows: Rows = {}
    for one, count in zip(tables, counts, strict=True):
        keys = np.unique(generator.integers(-(1 << 63) + 2, (1 << 63) - 1, count))
        width = sum(field.width for field in one.fields)
        bits = generator.integers(0, 256, (keys.size, 4 * width), dtype=np.uint8)
        special = generator.integers(0, 4, (keys.size, width)) == 0
        bits.view(np.uint32)[special] |= np.uint32(0x7F800000)
        if one.dtype != "float32":
            vectors = bits.view(np.float32)[:, : one.dim]
            vectors[...] = nearest(vectors, one.dtype)
        rows[one.name] = {key: bits[i].tobytes() for i, key in enumerate(keys.tolist())}
    return rows


def filled(path: Path | None, tables: Sequence[Table], rows: Rows) -> Store:
    store = Store.open(path, tables=tables, engine=MemoryEngine() if path is None else "lmdb")
    chunks = []
    for one in tables:
        if not rows[one.name]:
            continue
        numbers = np.frombuffer(b"".join(rows[one.name].values()), np.float32).reshape(len(rows[one.name]), -1)
        cuts = np.cumsum([f.width for f in one.fields])[:-1]
        keys = np.array(list(rows[one.name]), dtype=np.int64)
        chunks.append((one.name, (keys, tuple(np.split(numbers, cuts, axis=1)))))
    load_rows(store, chunks, reserved_keys=[one.name for one in tables])
    return store


def rows_of(store: Store) -> Rows:
    found: Rows = {}
    for one in store.tables:
        found[one.name] = {}
        for keys, fields in store.scan(one.name):
            for i, key in enumerate(keys.tolist()):
                found[one.name][key] = b"".join(values[i].tobytes() for values in fields)
    return found


def expected_after(format_: str, tables: Sequence[Table], rows: Rows) -> Rows:
    """Return the rows that come back from a format: state without a place in it is at its initial value."""
    out: Rows = {}
    for one in tables:
        state = b"".join(np.full(f.width, f.initial, np.float32).tobytes() for f in one.fields[1:])
        out[one.name] = {
            key: row if keeps_state(format_, one) else row[: 4 * one.dim] + state for key, row in rows[one.name].items()
        }
    return out
