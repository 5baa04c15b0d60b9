"""Real and generated data go through the commands as the pages show them; NumPy and pyarrow read the same."""

import re
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import torch

import tiercache as tc
from tests.cli.command import run, told
from tests.data.test_sources import write_split_binary
from tiercache.data.raw_batch import NULL_KEY

DATA = Path(__file__).parents[3] / "shared" / "data"
PAGE = (Path(__file__).parents[2] / "docs" / "schema.md").read_text()
FLIGHTS = """
dense = [{ column = "distance", transform = "log" }]
label = { column = "label" }
[defaults]
dim = 8
[tables.airport]
[features.carrier]
key = "string"
[features.tailnum]
key = "string"
[features.origin]
table = "airport"
key = "string"
[features.dest]
table = "airport"
key = "string"
[features.route]
columns = ["origin", "dest"]
[features.flight]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, with the schemas of the page."""
    monkeypatch.chdir(tmp_path)
    for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL):
        Path(text.split()[1]).write_text(text)
    return tmp_path


def real(name: str) -> Path:
    if not (DATA / name).exists():
        pytest.skip(f"{DATA / name} is absent: it is not part of the project")
    return DATA / name


def unpacked(name: str, into: Path) -> Path:
    with tarfile.open(real(name)) as archive:
        archive.extractall(into, filter="data")
    return into


def extract(*arguments: object) -> tc.PassDataset:
    run("extract", *arguments, "--out", "passes", "--quiet")
    assert told("verify", "passes")["problems"] == []
    return tc.PassDataset.open("passes")


def counts_of(data: tc.PassDataset, table: str) -> dict[int, int]:
    """Return how often each key of a table occurs in all sub-datasets."""
    found = Counter[int]()
    for one in data:
        found.update(dict(zip(one.keys(table).tolist(), one.counts(table).tolist(), strict=True)))
    return found


def texts_of(*columns: Any) -> dict[int, int]:
    """Return the keys of the texts in columns with their counts."""
    found = Counter[int]()
    for column in columns:
        for pair in pc.value_counts(column).to_pylist():
            found[tc.key_of(pair["values"])] += pair["counts"]
    return found


def triples(*paths: Path) -> list[Any]:
    read, parse = pacsv.ReadOptions(column_names=["h", "r", "t"]), pacsv.ParseOptions(delimiter="\t", quote_char=False)
    texts = pacsv.ConvertOptions(column_types=dict.fromkeys("hrt", pa.string()), strings_can_be_null=False)
    return pa.concat_tables(pacsv.read_csv(path, read, parse, texts) for path in paths).columns


def test_flights_have_the_keys_that_pyarrow_counts() -> None:
    """A compressed TSV of texts, integers, a cross and a shared table, over several passes."""
    Path("flights.toml").write_text(FLIGHTS)
    data = extract(real("flights.tsv.gz"), "--schema", "flights.toml", "--device-budget", "1MiB")
    kinds = pacsv.ConvertOptions(column_types={"flight": pa.int64()}, strings_can_be_null=True)
    whole = pacsv.read_csv(
        DATA / "flights.tsv.gz", parse_options=pacsv.ParseOptions(delimiter="\t"), convert_options=kinds
    )
    assert len(data) > 1
    assert told("info", "passes")["samples"] == data.samples == whole.num_rows == 648_580
    for name in ("carrier", "tailnum"):
        assert counts_of(data, name) == texts_of(whole[name])
    assert counts_of(data, "airport") == texts_of(whole["origin"], whole["dest"])
    pairs = whole.group_by(["origin", "dest"]).aggregate([([], "count_all")]).to_pylist()
    assert counts_of(data, "route") == {tc.key_of(p["origin"], p["dest"]): p["count_all"] for p in pairs}
    assert counts_of(data, "flight") == Counter(whole["flight"].to_pylist())
    samples = data.passes[0].read(np.arange(1000))
    assert samples.label.tolist() == whole["label"][:1000].to_pylist()
    np.testing.assert_allclose(samples.dense[:, 0], np.log1p(whole["distance"][:1000]), rtol=1e-6)


def test_triples_of_names_are_appended_to(folder: Path) -> None:
    """WordNet without a header, with the page's schema and commands: first one file, then all."""
    files = sorted(
        unpacked("wordnet_triples.tgz", folder / "wordnet").glob("*.txt"), key=lambda p: p.name != "train.txt"
    )
    how = ("--schema", "triples.toml", "--device-budget", "16MiB")
    assert extract(files[0], *how).samples == 1_051_293
    data = extract(*files, *how, "--append")
    heads, relations, tails = triples(*files)
    assert counts_of(data, "entity") == texts_of(heads, tails)
    assert counts_of(data, "relation") == texts_of(relations)
    assert data.samples == 1_061_293


def test_a_store_of_texts_is_trained_looked_up_and_copied(folder: Path) -> None:
    """CoDEx: each row is found by its text, and an export that is imported again is the same store."""
    (train,) = unpacked("codex_m.tgz", folder / "codex").glob("train.txt")
    data = extract(train, "--schema", "triples.toml", "--device-budget", "4MiB", "--batch-multiple", "4096")
    model = tc.EmbeddingBagCollection(data.schema)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budgets = {"device_budget": "4MiB", "host_budget": "32MiB"}
    with tc.TierCache("model.tc", data, model=model, optimizer=optimizer, **budgets, progress=False) as cache:
        optimizer = cache.optimizer
        for one in cache.passes(epochs=1):
            for batch in one.batches(4096):
                model(batch).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    heads, relations, tails = triples(train)
    rows = {table["name"]: table["rows"] for table in told("info", "model.tc")["tables"]}
    assert rows == {"entity": len(texts_of(heads, tails)), "relation": len(texts_of(relations))}
    texts = relations.unique().to_pylist()
    found = told("lookup", "model.tc", "relation", "--string", *texts)
    with tc.Store.open("model.tc", mode="r") as store:
        wanted = store.lookup("relation", [tc.key_of(text) for text in texts])["vector"]
    np.testing.assert_array_equal(np.array([row["vector"] for row in found], np.float32), wanted)
    run("export", "model.tc", "rows", "--format", "parquet")
    run("import", "rows", "copy.tc")
    assert told("diff", "model.tc", "copy.tc")["same"]


def test_criteo_files_have_hexadecimal_keys_and_logarithms(folder: Path) -> None:
    """The page's command reads them: no schema, missing values, no header."""
    random, n = np.random.default_rng(0), 10_000
    numbers = random.integers(-2, 1000, (n, 13)).astype(object)
    keys = np.minimum(random.zipf(1.2, (n, 26)), 1 << 31)
    numbers[random.random((n, 13)) < 0.1] = ""
    texts = np.where(random.random((n, 26)) < 0.1, "", [[f"{key:08x}" for key in row] for row in keys])
    labels = random.integers(0, 2, n)
    rows = ("\t".join(map(str, (y, *a, *b))) for y, a, b in zip(labels, numbers, texts, strict=True))
    (folder / "day_0").write_text("\n".join(rows) + "\n")
    data = extract("day_0", "--format", "criteo", "--device-budget", "64MiB")
    for i in range(26):
        wanted = Counter(int(text, 16) if text else NULL_KEY for text in texts[:, i].tolist())
        assert counts_of(data, f"C{i + 1}") == wanted
    samples = data.passes[0].read(np.arange(n))
    np.testing.assert_array_equal(samples.label, labels)
    known = np.where(numbers == "", 0, numbers).astype(np.float64)
    np.testing.assert_allclose(samples.dense, np.log1p(np.maximum(known, 0)), rtol=1e-6)


def test_split_binary_data_have_the_keys_of_their_arrays(folder: Path) -> None:
    columns = write_split_binary(folder / "dlrm", 5000)
    data = extract("dlrm/", "--schema", "dlrm.toml", "--device-budget", "64MiB")
    for name in ("cat_0", "cat_1"):
        assert counts_of(data, f"{name}.bin") == Counter(columns[name].tolist())
    np.testing.assert_array_equal(data.passes[0].read(np.arange(5000)).label, columns["label"])


def test_a_ragged_csv_of_pandas_is_read_with_its_whole_floats(folder: Path) -> None:
    """Nullable integers are 5.0 there; short rows are padded, long ones skipped, those without a label dropped."""
    random, n = np.random.default_rng(0), 5000
    frame = pd.DataFrame({"user": random.integers(0, 300, n), "rating": random.integers(1, 6, n)})
    frame["user"] = frame["user"].where(random.random(n) > 0.01)
    frame["rating"] = frame["rating"].where(random.random(n) > 0.05)
    frame["genres"] = ["|".join(f"g{g}" for g in random.integers(0, 20, random.integers(0, 4))) for _ in range(n)]
    lines = frame.to_csv(index=False).splitlines()
    lines[8] = lines[8].rpartition(",")[0]
    lines[9] += ",x"
    assert ".0," in lines[1]
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")
    schema = Path("ratings.toml")
    schema.write_text(schema.read_text().replace("[features.user]", '[features.user]\nnull = "embed"'))
    data = extract("ratings.csv", "--schema", "ratings.toml", "--device-budget", "64MiB")
    frame.loc[7, "genres"] = ""
    taken = frame.drop(index=8).dropna(subset="rating")
    users = Counter(NULL_KEY if np.isnan(user) else int(user) for user in taken["user"])
    genres = Counter(tc.key_of(genre) for text in taken["genres"] if text for genre in text.split("|"))
    assert data.samples == len(taken)
    assert counts_of(data, "user") == users
    assert counts_of(data, "genres") == genres


def test_lists_of_parquet_keep_their_last_keys_with_weights(folder: Path) -> None:
    """With the page's schema, from hive folders at a URL; passes end where the year changes."""
    random, n = np.random.default_rng(0), 2000
    wanted, labels = list[list[int]](), list[float]()
    for year in (2023, 2024):
        lists = [random.integers(0, 5000, length).tolist() for length in random.integers(0, 90, n)]
        weights = [[key / 2 for key in keys] for keys in lists]
        table = {"user": random.integers(0, 99, n), "clicked": random.random(n), "history": lists, "ratings": weights}
        (folder / "logs" / f"year={year}").mkdir(parents=True)
        pq.write_table(pa.table(table), folder / "logs" / f"year={year}" / "a.parquet", row_group_size=300)
        wanted += [keys[-50:] for keys in lists]
        labels += table["clicked"].astype(np.float32).tolist()
    how = ("--schema", "histories.toml", "--device-budget", "64MiB", "--split-by", "column=year")
    data = extract(f"file://{folder}/logs", *how)
    assert [one.samples for one in data] == [n, n]
    found, seen = list[list[int]](), list[float]()
    for one in data:
        samples, keys = one.read(np.arange(n)), one.keys("history")
        history = samples.ids["history"]
        values = keys[history.ids]
        np.testing.assert_array_equal(history.weights, values / 2)
        found += [part.tolist() for part in np.split(values, history.offsets[1:-1])]
        seen += samples.label.tolist()
    assert found == wanted
    assert seen == labels
