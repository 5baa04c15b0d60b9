"""Extraction compared with DuckDB and Polars: python -m benchmarks.extract [--quick] [--json FILE].

The data are 26 columns of int64 and 26 of strings, power law 1.05 over 10 to 20 million values, permuted, in Parquet
written by pyarrow. The peers group each column by value and count. We write key sets with the same counts, and whole
datasets. keyset_speed_vs_fastest, string_speed_vs_fastest: key sets of the integer columns, and of the string columns,
relative to the faster peer on the same columns. dataset_speed_vs_fastest: a dataset with samples of the integer
columns, relative to the same peer. small_passes_ratio: seconds of a dataset of 165 passes over 21 passes.
peak_over_limit: memory in excess of an idle process over the memory limit, with uncompressed files of 10 times the
limit.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import tiercache as tc
from benchmarks.drawn_passes import permuted_power_law
from benchmarks.machine import Goal, benchmark, peak_memory
from tiercache.kernels.cpu.compile import prepare

COLUMNS = 26
GOALS = (
    Goal(key="keyset_speed_vs_fastest", goal=1.2, least=0.9),
    Goal(key="dataset_speed_vs_fastest", goal=0.4),
    Goal(key="small_passes_ratio", goal=1.5, below=True),
    Goal(key="peak_over_limit", goal=1.1, below=True),
)
_LIMIT = 64 << 20


def write_data(path: Path, rows: int, sizes: dict[str, int], **options: Any) -> None:
    """Write columns of random values below ``sizes``, strings if the name begins with "s", and a label."""
    rng, step = np.random.default_rng(0), 1 << 18
    kinds = [(name, pa.string() if name.startswith("s") else pa.int64()) for name in sizes]
    schema = pa.schema([*kinds, ("y", pa.float32())])
    with pq.ParquetWriter(path, schema, **options) as writer:
        for begin in range(0, rows, step):
            count = min(step, rows - begin)
            columns: list[Any] = [
                pa.array(permuted_power_law(rng, sizes[name], count)).cast(kind) for name, kind in kinds
            ]
            columns.append(pa.array(rng.random(count, dtype=np.float32)))
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def schema_of(kind: str) -> tc.Schema:
    """Return a schema of the columns of one kind, "i" or "s", each with a table."""
    names = [f"{kind}{c}" for c in range(COLUMNS)]
    adagrad, uniform = tc.optim.Adagrad(learning_rate=0.05), tc.init.Uniform(low=-0.05, high=0.05)
    return tc.Schema(
        label="y",
        features=tuple(tc.Feature(name=name, key="string" if kind == "s" else "integer") for name in names),
        tables=tuple(tc.Table(name=name, dim=16, optimizer=adagrad, initializer=uniform) for name in names),
    )


def _duckdb_groups(duckdb: Any, path: Path, column: str) -> int:
    query = f"SELECT {column} AS k, count(*) AS n FROM read_parquet('{path}') GROUP BY k"
    return int(duckdb.sql(query).to_arrow_table().num_rows)


def _polars_groups(polars: Any, path: Path, column: str) -> int:
    return int(polars.scan_parquet(path).group_by(column).agg(polars.len()).collect().height)


PEERS = {"duckdb": _duckdb_groups, "polars": _polars_groups}


def peer_seconds(name: str, path: Path, kind: str) -> tuple[float, int]:
    """Group each column by value and count; return seconds and groups."""
    peer = importlib.import_module(name)
    began = time.perf_counter()
    groups = sum(PEERS[name](peer, path, f"{kind}{c}") for c in range(COLUMNS))
    return time.perf_counter() - began, groups


def our_seconds(path: Path, kind: str, folder: Path, *, samples: bool, **options: Any) -> tuple[float, int]:
    """Extract into a new folder and remove it; return seconds and keys of all passes."""
    how: dict[str, Any] = {"device_budget": "1TiB", "memory_limit": "4GiB", "progress": False} | options
    began = time.perf_counter()
    made = tc.extract(path, schema_of(kind), folder / "out", samples=samples, **how)
    seconds = time.perf_counter() - began
    keys = sum(one.rows(table.name) for one in made for table in made.tables)
    shutil.rmtree(folder / "out")
    return seconds, keys


def measure(path: Path, rows: int, folder: Path, repeats: int) -> dict[str, Any]:
    """Measure everything; the best of alternating repeats."""
    runs: dict[str, Callable[[], tuple[float, int]]] = {}
    for kind in "is":
        for name in PEERS:
            if importlib.util.find_spec(name) is not None:
                runs[f"{name}_{kind}"] = partial(peer_seconds, name, path, kind)
        runs[f"keysets_{kind}"] = partial(our_seconds, path, kind, folder, samples=False)
    runs["dataset_i"] = partial(our_seconds, path, "i", folder, samples=True)
    for passes in (21, 165):
        unit = max(1, rows // passes)
        cut: dict[str, Any] = {"split_by": f"rows={unit}", "batch_multiple": unit}
        runs[f"passes_{passes}"] = partial(our_seconds, path, "i", folder, samples=True, **cut)
    seconds: dict[str, float] = {}
    keys: dict[str, int] = {}
    for _ in range(repeats):
        for name, run in runs.items():
            took, keys[name] = run()
            seconds[name] = min(took, seconds.get(name, took))
    for kind in "is":
        found = {keys[name] for name in keys if name in {f"{who}_{kind}" for who in (*PEERS, "keysets")}}
        assert len(found) == 1, keys
    fastest = {k: min(seconds[f"{who}_{k}"] for who in PEERS if f"{who}_{k}" in seconds) for k in "is"}
    return {f"{name}_seconds": value for name, value in seconds.items()} | {
        "rows": rows,
        "keyset_speed_vs_fastest": fastest["i"] / seconds["keysets_i"],
        "string_speed_vs_fastest": fastest["s"] / seconds["keysets_s"],
        "dataset_speed_vs_fastest": fastest["i"] / seconds["dataset_i"],
        "small_passes_ratio": seconds["passes_165"] / seconds["passes_21"],
        "million_keys_per_second": rows * COLUMNS / seconds["keysets_i"] / 1e6,
    }


def measure_peak(folder: Path) -> dict[str, Any]:
    """Extract uncompressed data of 10 times a memory limit, and return the peak memory."""
    path, names = folder / "large.parquet", [f"i{c}" for c in range(8)]
    sizes = dict.fromkeys(names, 60_000)
    write_data(path, 10 * _LIMIT // (8 * 8), sizes, compression="none", use_dictionary=False)
    short = tc.Schema(features=tuple(tc.Feature(name=name) for name in names), tables=schema_of("i").tables[:8])
    prepare()  # load libraries and compile kernels first
    with peak_memory(anonymous=True) as peak:
        tc.extract(path, short, folder / "large", device_budget="8MiB", memory_limit=_LIMIT, progress=False)
    return {"peak_over_limit": peak.growth_bytes / _LIMIT}


if __name__ == "__main__":
    with benchmark("extract", __doc__, "fewer rows", GOALS) as run:
        num_rows, data = run.size(4_000_000, 400_000, 5000), run.folder / "data.parquet"
        if not run.options.tiny:
            run.record |= measure_peak(run.folder)
        columns = [f"{kind}{c}" for kind in "is" for c in range(COLUMNS)]
        values = np.linspace(10_000_000, 20_000_000, COLUMNS).astype(int).tolist()
        write_data(data, num_rows, dict(zip(columns, 2 * values, strict=True)))
        run.record |= measure(data, num_rows, run.folder, 1 if run.options.tiny else 2)
