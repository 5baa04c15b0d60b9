"""Real data go through the commands as the pages show them; pyarrow reads the same."""

import re
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pytest
import torch

import tiercache as tc
from tests.cli.command import run, told

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
