"""min_count: rare keys share one row, and counts continue from earlier datasets."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tiercache as tc
from tests.data.cases import (
    bounds_of,
    extracted,
    plain_schema,
    reference,
    rich_columns,
    rich_schema,
    table,
    write_parquet,
)
from tests.files import files_of
from tiercache.data.raw_batch import NULL_KEY, OOV_KEY
from tiercache.errors import DatasetError, ExtractionError
from tiercache.schema import Schema

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.data.extract import ExtractionProgress
    from tiercache.data.manifest import SubDatasetRecord


def keys_by_table(columns: dict[str, Any]) -> dict[str, Counter[int]]:
    """Count the keys of columns of the rich schema, by table."""
    counts: dict[str, Counter[int]] = {"a": Counter(), "b": Counter()}
    counts["a"].update(columns["a"].tolist())
    counts["a"].update(key for tags in columns["tags"] for key in tags)
    counts["b"].update(columns["b"].tolist())
    counts["b"].update(columns["pair"].reshape(-1).tolist())
    return counts


def without_rare(columns: dict[str, Any], counts: dict[str, Counter[int]], least: int) -> dict[str, Any]:
    """Replace the keys with fewer than ``least`` occurrences."""
    keep = {name: {key for key, n in counter.items() if n >= least} for name, counter in counts.items()}

    def kept(values: Any, name: str) -> Any:
        return [[k if k in keep[name] else OOV_KEY for k in row] for row in values]

    flat = {name: np.array(kept(columns[name][:, None].tolist(), name))[:, 0] for name in ("a", "b")}
    return columns | flat | {"pair": np.array(kept(columns["pair"].tolist(), "b")), "tags": kept(columns["tags"], "a")}


def counted(dataset: tc.PassDataset, name: str) -> Counter[int]:
    """Add up the counts of a table over all passes."""
    total: Counter[int] = Counter()
    for p in dataset:
        total.update(dict(zip(p.keys(name).tolist(), p.counts(name).tolist(), strict=True)))
    return total


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run_bytes", [1 << 17, 1 << 30])
def test_rare_keys_share_the_out_of_vocabulary_row(
    tmp_path: Path, run_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts are over all files and all features of a table, in one run of counts or in many."""
    from tiercache.data import frequency

    runs: list[Path] = []
    write_run = frequency.KeyCounter.write_run

    def count_run(counter: frequency.KeyCounter, path: Path) -> SubDatasetRecord:
        runs.append(path)
        return write_run(counter, path)

    monkeypatch.setattr(
        "tiercache.data.extract.KeyCounter", lambda schema, _, pool: frequency.KeyCounter(schema, run_bytes, pool)
    )
    monkeypatch.setattr(frequency.KeyCounter, "write_run", count_run)
    schema, columns = rich_schema(), rich_columns(20_000)
    paths = write_parquet(tmp_path, columns, [0, 9000, 20_000])
    how: dict[str, Any] = {"device_budget": "110KiB", "batch_multiple": 512, "memory_limit": "16MiB"}
    made = extracted(paths, schema, tmp_path / "out", min_count=3, **how)
    assert (len(runs) > 5) == (run_bytes == 1 << 17)
    counts = keys_by_table(columns)
    kept = without_rare(columns, counts, 3)
    wanted = reference(tmp_path / "ref", schema, kept, bounds_of(made))
    assert made.digest == wanted.digest
    assert len(made) > 1
    rare = made.rare_keys()
    assert rare is not None
    for name in ("a", "b"):
        found = dict(zip(rare.keys(name).tolist(), rare.counts(name).tolist(), strict=True))
        assert found == {key: n for key, n in counts[name].items() if n < 3}
        assert counted(made, name)[OOV_KEY] == sum(found.values())


def test_merging_works_one_hash_range_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With little memory the counts are merged in many ranges, to the same files."""
    schema, columns = rich_schema(), rich_columns(5000)
    paths = write_parquet(tmp_path, columns, [0, 5000])
    call: dict[str, Any] = {"min_count": 2, "memory_limit": "16MiB"}
    extracted(paths, schema, tmp_path / "one", **call)
    monkeypatch.setattr("tiercache.data.frequency._MERGE_BYTES", 96 * 300_000)
    extracted(paths, schema, tmp_path / "many", **call)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "many")


def test_counts_go_on_from_earlier_datasets(tmp_path: Path) -> None:
    """A key is kept if it was frequent enough in all sets together; earlier counts of rare keys count too."""
    columns = [
        {"a": np.array(values), "y": np.zeros(len(values))} for values in ([1, 1, 2, 3], [2, 4, 5, 5], [3, 4, 6])
    ]
    sets: list[tc.PassDataset] = []
    for day, data in enumerate(columns):
        folder = tmp_path / str(day)
        folder.mkdir()
        paths = write_parquet(folder, data, [0, len(data["a"])])
        options: dict[str, Any] = {"min_count": 2, "prior_counts": sets}
        sets.append(extracted(paths, plain_schema(), folder / "out", **options))
    keys = [p.keys("a")[p.read(np.arange(p.samples)).ids["a"].ids].tolist() for s in sets for p in s]
    assert keys == [[1, 1, OOV_KEY, OOV_KEY], [2, OOV_KEY, 5, 5], [3, 4, OOV_KEY]]


def chained(folder: Path, days: list[list[int]], least: int) -> tuple[list[list[int]], list[dict[int, int]]]:
    """Extract a set each day with the counts of earlier ones; return its keys, and its rare ones with counts."""
    sets: list[tc.PassDataset] = []
    for day, keys in enumerate(days):
        at = folder / str(day)
        at.mkdir()
        paths = write_parquet(at, {"a": np.array(keys), "y": np.zeros(len(keys))}, [0, len(keys)])
        sets.append(extracted(paths, plain_schema(), at / "out", min_count=least, prior_counts=list(sets)))
    found, rare = [], []
    for one in sets:
        found.append([k for p in one for k in p.keys("a")[p.read(np.arange(p.samples)).ids["a"].ids].tolist()])
        own = one.rare_keys()
        assert own is not None
        rare.append(dict(zip(own.keys("a").tolist(), own.counts("a").tolist(), strict=True)))
    return found, rare


CHAINS: dict[str, tuple[int, list[list[int]]]] = {
    "rare, absent, back": (3, [[1, 9, 9, 9], [2, 9], [1, 9]]),
    "rare, absent twice, back": (3, [[1], [2], [2, 3], [1]]),
    "rare in every set": (5, [[1, 2], [1], [1], [1, 2]]),
    "rare, then one more each day": (3, [[1, 1], [2], [1], [1, 2], [2]]),
    "as often as needed at the last": (2, [[7], [8], [8, 9], [7, 9]]),
    "admitted, absent, back once": (2, [[4, 4], [5], [4, 5], [6]]),
    **{
        f"drawn {seed}": (
            2 + seed % 3,
            [np.random.default_rng([seed, day]).integers(0, 40, 30).tolist() for day in range(4)],
        )
        for seed in range(3)
    },
}
"""The required number of occurrences, and the keys of each day."""


@pytest.mark.parametrize("ranges", ["one", "many"])
@pytest.mark.parametrize("chain", CHAINS)
def test_chained_counts_count_each_occurrence_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chain: str, ranges: str
) -> None:
    """In whatever sets a key was rare, absent, or admitted; rare keys are counted in their set only."""
    if ranges == "many":
        monkeypatch.setattr("tiercache.data.frequency._MERGE_BYTES", 96 * 300_000)
    least, days = CHAINS[chain]
    found, rare = chained(tmp_path, days, least)
    so_far: Counter[int] = Counter()
    for keys, ours, own in zip(days, found, rare, strict=True):
        so_far.update(keys)
        assert ours == [key if so_far[key] >= least else OOV_KEY for key in keys]
        assert own == {key: count for key, count in Counter(keys).items() if so_far[key] < least}


def test_null_keeps_its_row_however_rare(tmp_path: Path) -> None:
    """The null row is the schema's choice, not a key of the data."""
    schema = Schema(features=(tc.Feature(name="a", null="embed"),), tables=(table("a"),))
    paths = write_parquet(tmp_path, {"a": [7, None, 7, 8]}, [0, 4])
    made = extracted(paths, schema, tmp_path / "out", min_count=2)
    assert sorted(made.passes[0].keys("a").tolist()) == [OOV_KEY, NULL_KEY, 7]
    rare = made.rare_keys()
    assert rare is not None
    assert rare.keys("a").tolist() == [8]


def test_counting_goes_on_from_its_last_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a stop while counting, the same call does not start with the first file again and ends with the same
    bits.
    """
    from tiercache.data import frequency

    monkeypatch.setattr(
        "tiercache.data.extract.KeyCounter", lambda schema, _, pool: frequency.KeyCounter(schema, 1 << 17, pool)
    )
    schema, columns = rich_schema(), rich_columns(20_000)
    paths = write_parquet(tmp_path, columns, [0, 9000, 20_000])
    call: dict[str, Any] = {"device_budget": "200KiB", "batch_multiple": 512, "min_count": 3, "memory_limit": "16MiB"}
    events: list[ExtractionProgress] = []

    def stop(event: ExtractionProgress) -> None:
        events.append(event)
        if event.samples > 12_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extracted(paths, schema, tmp_path / "cut", progress=stop, **call)
    assert {e.stage for e in events} == {"count"}
    events.clear()
    extracted(paths, schema, tmp_path / "cut", progress=events.append, **call)
    assert max(e.samples for e in events if e.stage == "count") < 20_000
    extracted(paths, schema, tmp_path / "whole", **call)
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


def test_earlier_sets_must_mean_the_same(tmp_path: Path) -> None:
    """Counts of another schema are meaningless, and without min_count they have no use."""
    paths = write_parquet(tmp_path, {"a": np.arange(4), "y": np.zeros(4)}, [0, 4])
    first = extracted(paths, plain_schema(), tmp_path / "first")
    other = replace(plain_schema(), label=None)
    with pytest.raises(DatasetError, match="other label"):
        extracted(paths, other, tmp_path / "x", min_count=2, prior_counts=[first.path])
    with pytest.raises(ExtractionError, match="prior_counts has no effect with min_count = 1"):
        extracted(paths, plain_schema(), tmp_path / "y", prior_counts=[first])
