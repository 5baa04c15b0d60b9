"""Extraction: equal to the obvious definition, whatever the files, chunks and budgets."""

from __future__ import annotations

import itertools
import os
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.data.cases import (
    ROW_BYTES,
    arrow,
    bounds_of,
    extracted,
    key_batch,
    plain_schema,
    reference,
    rich_columns,
    rich_schema,
    table,
    write_parquet,
)
from tests.files import files_of
from tiercache.data.extract import extract
from tiercache.data.extraction_resources import Workers
from tiercache.data.open_pass import OpenPass
from tiercache.data.pass_builder import RowBudget
from tiercache.data.sample_layout import SampleLayout
from tiercache.errors import BudgetError, ExtractionError, SourceError, TierCacheError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiercache.data.dataset import PassDataset
    from tiercache.data.extract import ExtractionProgress
    from tiercache.schema import Schema

SMALL: dict[str, Any] = {"schema": plain_schema(), "device_budget": "1MiB", "progress": False}


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Two files of 25 samples."""
    return write_parquet(tmp_path, {"a": np.arange(50), "y": np.zeros(50)}, [0, 25, 50])


def interrupt_at(passes: int) -> Callable[[ExtractionProgress], None]:
    """Return a progress function that stops an extraction after a number of passes."""

    def stop(event: ExtractionProgress) -> None:
        if event.passes == passes:
            raise KeyboardInterrupt

    return stop


def greedy_bounds(schema: Schema, columns: dict[str, Any], budget: int, batch_multiple: int) -> list[int]:
    """Return the expected starts of passes: each takes aligned units while the rows of all passes so far fit."""
    num_samples, limit, bounds = len(columns["a"]), RowBudget(schema.tables, budget), [0]
    keys: list[set[int]] = [set() for _ in schema.tables]
    for low in range(0, num_samples, batch_multiple):
        batch = key_batch(schema, columns, low, min(low + batch_multiple, num_samples))
        new = [
            {key for f in schema.features if f.table == t.name for key in batch.features[f.name].keys.tolist()}
            for t in schema.ordered_tables
        ]
        if not limit.fits([len(old | more) for old, more in zip(keys, new, strict=True)]):
            limit.close([len(old) for old in keys])
            bounds.append(low)
            keys = [set() for _ in keys]
            assert limit.fits([len(more) for more in new])
        keys = [old | more for old, more in zip(keys, new, strict=True)]
    return [*bounds, num_samples]


def assert_same_files(one: PassDataset, other: PassDataset) -> None:
    """Compare all files except the manifest, and the digest."""
    mine, theirs = (
        {name: data for name, data in files_of(p.path).items() if name != "dataset.json"} for p in (one, other)
    )
    assert mine == theirs
    assert one.digest == other.digest


@given(
    cuts=st.lists(st.integers(1, 2999), max_size=3, unique=True),
    batch_multiple=st.sampled_from([7, 16, 100, 512]),
    slack=st.floats(1.0, 3.0),
    seed=st.integers(0, 3),
    chunk=st.sampled_from([1 << 12, 1 << 15, 1 << 22]),
)
@settings(deadline=None, max_examples=6)
def test_passes_close_before_the_unit_that_exceeds_the_budget(
    cuts: list[int], batch_multiple: int, slack: float, seed: int, chunk: int
) -> None:
    """Bounds are the greedy ones and files the obvious ones, for any files and chunks of the samples."""
    schema, columns = rich_schema(), rich_columns(3000, seed)
    budget = int(slack * 105_000)
    bounds = greedy_bounds(schema, columns, budget, batch_multiple)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiercache.data.extraction_resources._SMALLEST_CHUNK", chunk)
        patch.setattr("tiercache.data.extraction_resources._LARGEST_CHUNK", chunk)
        folder = Path(name)
        paths = write_parquet(folder, columns, sorted({0, *cuts, 3000}))
        made = extracted(paths, schema, folder / "out", device_budget=budget, batch_multiple=batch_multiple)
        assert bounds_of(made) == bounds
        assert_same_files(made, reference(folder / "ref", schema, columns, bounds))


@pytest.mark.parametrize(
    ("split_by", "bounds"),
    [
        ("rows=1000", [0, 1000, 2000, 3000, 3500]),
        ("rows=3500", [0, 3500]),
        ("rows=500", [0, 500, 1000, 1500, 2000, 2500, 3000, 3500]),
        ("file", [0, 701, 2000, 3500]),
        ("column=day", [0, 300, 1500, 1501, 3500]),
        ("column=at", [0, 300, 1500, 3500]),
    ],
)
def test_exact_cuts_are_where_rows_files_or_values_change(tmp_path: Path, split_by: str, bounds: list[int]) -> None:
    """Rows are counted over files, and a value that continues in the next file does not begin a pass; NaN is one."""
    schema, columns = rich_schema(), rich_columns(3500)
    days = np.repeat(np.array(["mon", "tue", "", "mon"]), np.diff([0, 300, 1500, 1501, 3500]))
    at = np.repeat(np.array([1.5, np.nan, 2.5], np.float16), np.diff([0, 300, 1500, 3500]))
    data = {**columns, "day": [day or None for day in days.tolist()], "at": at}
    write_parquet(tmp_path, data, [0, 701, 2000, 3500])
    made = extracted(tmp_path / "*.parquet", schema, tmp_path / "out", split_by=split_by, batch_multiple=500)
    assert bounds_of(made) == bounds
    assert_same_files(made, reference(tmp_path / "ref", schema, columns, bounds))


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1, 1, 1001, 1 << 62], pa.timestamp("s", "UTC")),  # years beyond 9999
        pa.array([1, 1, 2, 1 << 62], pa.time64("ns")),
        pa.array([1, 1, 2, 1 << 62], pa.duration("ns")),
        pa.array([1, 1, 2, 1 << 30], pa.date32()),
        pa.array([b"\xff", b"\xff", b"\xfe", b""]).cast(pa.string(), safe=False),
    ],
)
def test_values_that_python_cannot_hold_begin_passes(tmp_path: Path, values: Any) -> None:
    """Also without pandas, which Arrow needs to return nanoseconds."""
    batches = [{"a": [1, 2], "t": values[:2]}, {"a": [3, 4], "t": values[2:]}]
    schema = plain_schema(label=None)
    assert bounds_of(extracted(batches, schema, tmp_path / "out", split_by="column=t")) == [0, 2, 3, 4]


def test_a_finished_set_is_returned_as_it_is(tmp_path: Path, paths: list[Path]) -> None:
    """The same call reads nothing and writes nothing; only training parameters of tables are updated."""
    schema, out = plain_schema(), tmp_path / "out"
    first = extract(paths, out=out, **SMALL)
    before = {p: p.stat().st_mtime_ns for p in out.iterdir()}
    again = extract(paths, out=out, memory_limit="2GiB", **SMALL)
    assert again.digest == first.digest
    assert {p: p.stat().st_mtime_ns for p in out.iterdir()} == before
    faster = replace(schema, tables=(replace(schema.tables[0], optimizer=tc.optim.SGD(learning_rate=9.0)),))
    changed = extract(paths, out=out, **{**SMALL, "schema": faster})
    assert changed.schema == faster
    assert changed.digest == first.digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_budget": "2MiB"}, "device_budget was 1048576 and is now 2097152"),
        ({"devices": 2}, "devices was null and is now 2"),
        ({"batch_multiple": 16}, "batch_multiple was 8192 and is now 16"),
        ({"split_by": "file"}, 'split_by was "budget" and is now "file"'),
        ({"min_count": 2}, "min_count was 1 and is now 2"),
        ({"schema": plain_schema(label=None)}, "the schema now has different columns, features or tables"),
        ({"schema": plain_schema(tables=(table("a", dim=9),))}, "a row of table 'a' took 44 bytes on the device but"),
    ],
)
def test_a_finished_set_of_other_options_is_refused(
    tmp_path: Path, paths: list[Path], changes: dict[str, Any], message: str
) -> None:
    """Nothing is overwritten; the message names the option with both values."""
    extract(paths, out=tmp_path / "out", **SMALL)
    with pytest.raises(ExtractionError, match=message):
        extract(paths, out=tmp_path / "out", **{**SMALL, **changes})


@pytest.mark.parametrize("is_text", [True, False])
def test_other_names_for_the_same_columns_are_refused(tmp_path: Path, is_text: bool) -> None:
    """The columns of a finished or an interrupted extraction had other names; other data may have any."""
    (tmp_path / "x.tsv").write_text("1\t5\n2\t6\n3\t7\n")
    data = tmp_path / "x.tsv" if is_text else [([1, 2, 3], [5, 6, 7])]
    options = {"split_by": "rows=1", "batch_multiple": 1}

    def named(*names: str) -> Schema:
        source = tc.schema.SourceFormat(columns=names)
        return plain_schema(source=source, csv=tc.schema.CsvFormat(header=False))

    finished, stopped = tmp_path / "finished", tmp_path / "stopped"
    extracted(data, named("a", "y"), finished, **options)
    with pytest.raises(KeyboardInterrupt):
        extracted(data, named("a", "y"), stopped, progress=interrupt_at(1), **options)
    for out in (finished, stopped):
        with pytest.raises(
            ExtractionError, match=r"different names \(\[source\] columns was \[\"a\", \"y\"\] and is now"
        ):
            extracted(data, named("y", "a"), out, **options)
        extracted(data, named("a", "y"), out, **options)
    (tmp_path / "new.csv").write_text("8,0\n")
    extracted(tmp_path / "new.csv", named("a", "y"), finished, append=True, **options)


def test_another_format_of_the_same_files_is_refused(tmp_path: Path) -> None:
    """For a finished and an interrupted extraction; to name the format of the suffix changes nothing."""
    (tmp_path / "x.csv").write_text("1,x\tz\n" * 3)
    options, features = {"split_by": "rows=1", "batch_multiple": 1}, (tc.Feature(name="a", key="string"),)

    def of(name: Any) -> Schema:
        source = tc.schema.SourceFormat(columns=("a", "b"), format=name)
        return plain_schema(label=None, features=features, source=source, csv=tc.schema.CsvFormat(header=False))

    finished, stopped = tmp_path / "finished", tmp_path / "stopped"
    extracted(tmp_path / "x.csv", of(None), finished, **options)
    with pytest.raises(KeyboardInterrupt):
        extracted(tmp_path / "x.csv", of(None), stopped, progress=interrupt_at(1), **options)
    for out in (finished, stopped):
        with pytest.raises(ExtractionError, match=r"from another format \(a file was read as csv and is tsv now\)"):
            extracted(tmp_path / "x.csv", of("tsv"), out, **options)
        extracted(tmp_path / "x.csv", of("csv"), out, **options)


def test_a_batch_with_other_names_is_other_data(tmp_path: Path) -> None:
    """The digest of the first batch covers the names of its columns."""
    extracted([{"a": [1], "y": [2]}], plain_schema(), tmp_path)
    with pytest.raises(ExtractionError, match="the Python iterable: its version was"):
        extracted([{"y": [1], "a": [2]}], plain_schema(), tmp_path)


def test_a_finished_set_of_other_data_is_refused(tmp_path: Path, paths: list[Path]) -> None:
    """Changed files are detected by size and modification time."""
    extract(paths, out=tmp_path / "out", **SMALL)
    with pytest.raises(ExtractionError, match="it had 2 files and now has 1"):
        extract(paths[:1], out=tmp_path / "out", **SMALL)
    os.utime(paths[1], ns=(1, 1))
    with pytest.raises(ExtractionError, match=r"part-1.parquet: its mtime_ns was .* and is now 1"):
        extract(paths, out=tmp_path / "out", **SMALL)


def test_a_directory_with_other_files_is_refused(tmp_path: Path, paths: list[Path]) -> None:
    """A dataset is never mixed with what is not its own."""
    with pytest.raises(ExtractionError, match="holds other files but no dataset"):
        extract(paths, out=tmp_path, **SMALL)
    with pytest.raises(ExtractionError, match="is not a directory"):
        extract(paths, out=paths[0], **SMALL)


def test_two_extractions_into_one_directory_are_refused(tmp_path: Path, paths: list[Path]) -> None:
    """The second raises an error, and the first continues undisturbed."""
    seen: list[object] = []

    def progress(event: ExtractionProgress) -> None:
        if event.stage == "close" and not seen:
            with pytest.raises(ExtractionError, match="another process is extracting into") as caught:
                extract(paths, out=tmp_path / "out", **SMALL)
            seen.append(caught)

    assert extract(paths, out=tmp_path / "out", **{**SMALL, "progress": progress}).samples == 50
    assert seen


def test_a_failed_extraction_goes_on_when_its_cause_is_gone(tmp_path: Path) -> None:
    """An exception in the middle leaves closed passes; the same call ends with the files of an undisturbed one."""
    schema, columns = rich_schema(), rich_columns(6000)
    paths = write_parquet(tmp_path, columns, [0, 3000, 6000])
    call: dict[str, Any] = {"device_budget": 2000 * ROW_BYTES, "batch_multiple": 64, "memory_limit": "16MiB"}
    whole = extracted(paths, schema, tmp_path / "whole", **call)
    assert len(whole) > 3
    with pytest.raises(KeyboardInterrupt):
        extracted(paths, schema, tmp_path / "cut", progress=interrupt_at(2), **call)
    with pytest.raises(ExtractionError, match="batch_multiple was 64 and is now 128"):
        extracted(paths, schema, tmp_path / "cut", **{**call, "batch_multiple": 128})
    extracted(paths, schema, tmp_path / "cut", **call)
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path, paths: list[Path]) -> None:
    """The result would match neither the old nor the new file."""

    def touch(event: ExtractionProgress) -> None:
        if event.stage == "close":
            os.utime(paths[0], ns=(1, 1))

    with pytest.raises(ValueError, match=r"part-0.parquet was changed while it was read"):
        extract(paths, out=tmp_path / "out", **{**SMALL, "progress": touch})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device_budget": 99 * ROW_BYTES, "batch_multiple": 100}, BudgetError, "multiple of 100 samples needs 100 r"),
        (
            {"device_budget": 150 * ROW_BYTES, "split_by": "rows=200", "batch_multiple": 100},
            BudgetError,
            "sub-dataset 0, of at least 200 samples, needs 200 rows",
        ),
        ({"device_budget": 150 * ROW_BYTES, "split_by": "file"}, BudgetError, "device_budget or cut smaller passes"),
        ({"memory_limit": "1MiB"}, BudgetError, "the memory limit is 1 MiB, but extraction"),
        ({"split_by": "rows=150", "batch_multiple": 100}, ExtractionError, "use rows=200"),
        ({"split_by": "rows=0"}, ExtractionError, "one of budget, rows=N, file, column=NAME"),
        ({"split_by": "column="}, ExtractionError, "one of budget, rows=N"),
        (
            {"split_by": None},
            TierCacheError,
            "invalid split_by None: expected one of budget, rows=N, file, column=NAME",
        ),
        ({"batch_multiple": 0}, ExtractionError, "batch_multiple is 0"),
        ({"batch_multiple": 1 << 70}, ExtractionError, "a whole number from 1 to"),
        ({"devices": 0}, ExtractionError, "devices is 0"),
        ({"min_count": 0}, ExtractionError, "min_count is 0"),
        ({"workers": 0}, TierCacheError, "workers is 0: expected a whole number from 1"),
        ({"schema": "a\0b"}, TierCacheError, "a.x00b"),
        ({"data": None}, TierCacheError, "data is None: pass files, folders or patterns"),
        ({"data": 5}, TierCacheError, "data is 5: pass files"),
        (
            {"out": "a\0b"},
            TierCacheError,
            r"the path '.*a\\x00b' has a NUL character: choose another directory for "
            "the dataset",
        ),
        ({"device_budget": "much"}, ValueError, "invalid size 'much'"),
    ],
)
def test_what_cannot_be_done_says_the_numbers(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Budgets that are too small and invalid options raise one message, and leave no dataset."""
    paths = write_parquet(tmp_path, {"a": np.arange(1000), "y": np.zeros(1000)}, [0, 1000])
    call: dict[str, Any] = {"data": paths, "schema": plain_schema(), "out": tmp_path / "out", **options}
    with pytest.raises(error, match=message):
        extracted(**call)
    assert not (tmp_path / "out" / "dataset.json").exists()


@pytest.mark.parametrize(
    ("batch_multiple", "message"),
    [
        (8192, r"sub-dataset 0 has [\d,]+ rows after [\d,]+ samples, and their keys fill the"),
        (500_000, r"one batch multiple of 500,000 samples takes more than [\d.]+ MiB of host"),
    ],
)
def test_what_does_not_fit_the_host_budget_is_refused(tmp_path: Path, batch_multiple: int, message: str) -> None:
    """The keys of a pass, and an aligned unit, which is numbered as a whole."""
    paths = write_parquet(tmp_path, {"a": np.arange(600_000), "y": np.zeros(600_000)}, [0, 600_000])
    how: dict[str, Any] = {"batch_multiple": batch_multiple, "memory_limit": "16MiB"}
    with pytest.raises(BudgetError, match=message):
        extracted(paths, plain_schema(), tmp_path / "out", **how)


def test_progress_tells_samples_passes_and_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A function sees every stage with growing numbers; without a terminal, True leaves one line."""
    columns = rich_columns(6000)
    paths = write_parquet(tmp_path, columns, [0, 3000, 6000])
    events: list[ExtractionProgress] = []
    call: dict[str, Any] = {"device_budget": "1GiB", "split_by": "rows=2000", "batch_multiple": 1000}
    extract(paths, rich_schema(), tmp_path / "one", progress=events.append, **call)
    assert [e.stage for e in events if e.stage != "number"] == ["close"] * 3 + ["done"]
    for before, after in itertools.pairwise(events):
        assert before.passes <= after.passes
        assert before.done_bytes <= after.done_bytes <= after.total_bytes == sum(p.stat().st_size for p in paths)
    assert (events[-1].samples, events[-1].passes, events[-1].done_bytes) == (6000, 3, events[-1].total_bytes)
    assert capsys.readouterr() == ("", "")
    extract(paths, rich_schema(), tmp_path / "two", progress=True, **call)
    assert "two: 3 passes, 6,000 samples, " in capsys.readouterr().err


def test_an_arrow_table_of_every_type_survives_the_whole_way(tmp_path: Path) -> None:
    """Text files and Parquet with the same values give the same passes, including strings and crosses."""
    text, cross = (
        tc.Feature(name="s", key="string", null="embed"),
        tc.Feature(name="x", columns=("s", "i"), null="embed"),
    )
    schema = plain_schema(
        dense=(tc.DenseFeature(column="d", null=-1.0),), features=(text, tc.Feature(name="i", table="s"), cross),
        tables=(table("s"), table("x")),
    )  # fmt: skip
    random = np.random.default_rng(0)
    data = arrow(
        {
            "s": [None if i % 17 == 0 else f"s{i % 50}" for i in range(2000)],
            "i": random.integers(-(1 << 62), 1 << 62, 2000),
            "d": [None if i % 5 == 0 else i / 8 for i in range(2000)],
            "y": random.integers(0, 2, 2000),
        }
    )
    pq.write_table(data, tmp_path / "x.parquet")
    data.to_pandas().assign(d=data["d"].to_pandas()).to_csv(tmp_path / "x.csv.gz", index=False)
    one, other = (extracted(tmp_path / f"x.{kind}", schema, tmp_path / kind) for kind in ("parquet", "csv.gz"))
    assert one.digest == other.digest


@pytest.mark.parametrize("split_by", ["budget", "rows=1500"])
def test_workers_and_memory_change_no_byte(tmp_path: Path, split_by: str) -> None:
    """One, two and four threads, a small memory limit and a large one: the same files."""
    paths = write_parquet(tmp_path, rich_columns(9000), [0, 4000, 9000])
    call: dict[str, Any] = {"device_budget": 2500 * ROW_BYTES, "split_by": split_by, "batch_multiple": 100}
    if split_by != "budget":
        call |= {"device_budget": "1GiB"}
    found = [
        files_of(extracted(paths, rich_schema(), tmp_path / f"{n}-{limit}", workers=n, memory_limit=limit, **call).path)
        for n, limit in ((1, "1GiB"), (2, "16MiB"), (4, "16MiB"), (4, "1GiB"))
    ]
    assert len(found[0]) > 4
    assert all(one == found[0] for one in found)


def test_new_files_add_sub_datasets(tmp_path: Path) -> None:
    """Existing sub-datasets do not change by a byte; an interruption leaves the old dataset, and the same call
    resumes.
    """
    paths = write_parquet(tmp_path, rich_columns(9000), [0, 4000, 6000, 9000])
    call: dict[str, Any] = {"device_budget": 2000 * ROW_BYTES, "batch_multiple": 64, "memory_limit": "16MiB"}
    first = extract(paths[:1], rich_schema(), tmp_path / "out", progress=False, append=True, **call)
    (first.path / "mine.safetensors").write_bytes(b"a file of the user's")
    before, passes = files_of(first.path), len(first)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            extract(paths, rich_schema(), tmp_path / "out", progress=interrupt_at(passes + 1), append=True, **call)
        assert tc.PassDataset.open(tmp_path / "out").digest == first.digest
    whole = extract(paths, rich_schema(), tmp_path / "out", progress=False, append=True, **call)
    assert whole.samples == 9000
    assert [one.digest for one in whole][:passes] == [one.digest for one in first]
    after = files_of(whole.path)
    assert {name: after[name] for name in before if name != "dataset.json"} == {
        name: data for name, data in before.items() if name != "dataset.json"
    }
    whole.verify()
    again = extract(paths[2], rich_schema(), tmp_path / "out", progress=False, append=True, **call)
    assert again.digest == whole.digest
    with pytest.raises(ExtractionError, match="its rare keys are already determined"):
        extract(paths[0], rich_schema(), first.path, append=True, min_count=2, **{**call, "progress": False})


def test_a_new_file_has_the_types_of_the_earlier_ones_in_a_cross(tmp_path: Path) -> None:
    """Otherwise the same values would have other keys in it."""
    schema = plain_schema(features=(tc.Feature(name="c", columns=("a", "b")),))
    for name, values in {"1": [1, 2], "2": [3, 4], "3": ["5", "6"]}.items():
        pq.write_table(arrow({"a": values, "b": [1, 2], "y": [0, 1]}), tmp_path / f"{name}.parquet")
    paths = [tmp_path / f"{name}.parquet" for name in "123"]
    for count in (1, 2):
        assert extracted(paths[:count], schema, tmp_path / "out", append=True).samples == 2 * count
    with pytest.raises(SourceError, match=r"3.parquet, column 'a': it holds strings here and integers in .*1.parquet"):
        extracted(paths, schema, tmp_path / "out", append=True)


def test_passes_of_one_batch_multiple_are_told(tmp_path: Path) -> None:
    """Each costs a switch: the warning says how to make them larger."""
    paths = write_parquet(tmp_path, {"a": np.arange(2000), "y": np.zeros(2000)}, [0, 2000])
    with pytest.warns(UserWarning, match="19 of 19 sub-datasets hold one batch multiple of 100 samples"):
        extracted(paths, plain_schema(), tmp_path / "out", device_budget=150 * ROW_BYTES, batch_multiple=100)


def test_key_sets_alone_are_those_of_the_dataset(tmp_path: Path) -> None:
    """Without samples, sub-datasets end at the same places and have the same keys and counts."""
    paths = write_parquet(tmp_path, rich_columns(6000), [0, 3000, 6000])
    call: dict[str, Any] = {"device_budget": 2000 * ROW_BYTES, "batch_multiple": 64}
    whole = extracted(paths, rich_schema(), tmp_path / "whole", **call)
    alone = extracted(paths, rich_schema(), tmp_path / "alone", samples=False, **call)
    assert len(alone) == len(whole) > 2
    assert alone.summary == f"{len(whole)} passes of key sets without samples"
    for one, other in zip(alone, whole, strict=True):
        assert not one.has_samples
        for spec in whole.tables:
            assert one.keys(spec.name).tolist() == other.keys(spec.name).tolist()
            assert one.counts(spec.name).tolist() == other.counts(spec.name).tolist()


def test_a_truncated_scratch_file_ends_the_extraction(tmp_path: Path) -> None:
    """A read past its end returns nothing, so waiting for the rest would not end."""
    batch = key_batch(plain_schema(), {"a": np.arange(9), "y": np.zeros(9)}, 0, 9)
    with closing(Workers(1)) as workers:
        one = OpenPass(SampleLayout(plain_schema()), tmp_path / "scratch", workers, expected=[0], with_samples=True)
        one.append(batch, one.number([batch])[0])
        assert [one.read(part).size for part in one.batches[0]] == [9, 9]
        os.truncate(tmp_path / "scratch", 4)
        with pytest.raises(ExtractionError, match="scratch was truncated while it was in use: run the same again"):
            one.read(one.batches[0][0])
        one.discard()
