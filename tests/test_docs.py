"""The code and the commands of the README and of docs/ run as written, page by page.

Blocks of a page share their names, in order. All of them run, except blocks without a language.
"""

import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiercache as tc
from tests.cli.command import invoke
from tests.data.test_sources import write_split_binary

ROOT = Path(__file__).parents[1]
README, START, SCHEMA = ROOT / "README.md", ROOT / "docs" / "start.md", ROOT / "docs" / "schema.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


class Block(NamedTuple):
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^( *)```(python|toml|sh)\n(.*?)^ *```$", page.read_text(), re.S | re.M)
    return [Block(language, re.sub(f"(?m)^{indent}", "", text)) for indent, language, text in found]


def commands(text: str) -> list[list[str]]:
    lines = text.replace("\\\n", " ").splitlines()
    return [line.split("#")[0].split()[1:] for line in lines if line.startswith("tiercache ")]


def write_clicks(folder: Path, names: str, seed: int, samples: int) -> None:
    chance = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(chance.integers(0, 4, samples))]).astype(np.int32)
    columns = {
        "user": chance.integers(0, 500, samples),
        "item": chance.integers(0, 300, samples),
        "history": pa.ListArray.from_arrays(offsets, chance.integers(0, 300, int(offsets[-1]))),
        "price": chance.random(samples).astype(np.float32),
        "age": chance.random(samples).astype(np.float32),
        "clicked": chance.integers(0, 2, samples),
    }
    (folder / names).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / names)


def write_of_schema_page(folder: Path) -> None:
    for month in (1, 2):
        data = {
            "late": [1.0, None, 0.0], "distance": [100, 300, 2500], "delay": [5.0, None, -3.0],
            "origin": ["VIE", "GRZ", "VIE"], "dest": ["GRZ", "VIE", "LNZ"], "carrier": ["OS", None, "OS"],
        }  # fmt: skip
        (folder / "flights" / f"month={month}").mkdir(parents=True)
        pq.write_table(pa.table(data), folder / "flights" / f"month={month}" / "a.parquet")
    (folder / "ratings.csv").write_text("user,rating,genres\n7,4.5,Action|Drama\n8.0,3\n9,,Drama\n9,1,Drama,x\n")
    (folder / "day_0").write_text("\t".join(["1", *["3"] * 13, *["a0"] * 26]) + "\n")
    bought = {
        "user": [1, 2], "item": [3, 4], "session": [9, 9], "seconds": [1.5, 2.0], "clicked": [True, False],
        "bought": [0, 1],
    }  # fmt: skip
    pq.write_table(pa.table(bought), folder / "purchases.parquet")
    (folder / "wordnet").mkdir()
    (folder / "wordnet" / "train.txt").write_text("dog\tis a\tanimal\ncat\tis a\tanimal\n")
    lists = {"user": [1, 2], "clicked": [0, 1], "history": [[5, 6], []], "ratings": [[0.5, 1.0], []]}
    pq.write_table(pa.table(lists), folder / "histories.parquet")
    write_split_binary(folder / "dlrm", 1000)


def set_up() -> str:
    """Return the setup code for all pages that do not start from scratch: the model of the README."""
    main = next(one.text for one in blocks(README) if one.language == "python")
    return (
        "import numpy as np\n" + main.split("schema = ")[0] + "schema = tc.Schema.load('clicks.toml')\n"
        "data = tc.PassDataset.open('passes/')\n"
        "model, criterion = Net(schema), torch.nn.BCEWithLogitsLoss()\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
    )


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    write_clicks(folder, "clicks/day.parquet", 0, 3000)
    (folder / "clicks.toml").write_text(next(one.text for one in blocks(README) if one.language == "toml"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for day, name in enumerate(("monday", "tuesday", "test")):
            write_clicks(folder, f"days/{name}/clicks.parquet", 1 + day, 1000)
        whole = {"device_budget": "64MiB", "split_by": "rows=1000", "batch_multiple": 500, "progress": False}
        tc.extract("clicks/*.parquet", "clicks.toml", "passes/", **whole)
        tc.extract("days/test/*.parquet", "clicks.toml", "test-passes/", **whole)
        names: dict[str, Any] = {}
        exec(set_up(), names)
        budgets = {"device_budget": "64MiB", "host_budget": "256MiB", "retention": 3}
        with tc.TierCache("model.tc", names["data"], model=names["model"], optimizer=names["optimizer"],
                          **budgets) as cache:  # fmt: skip
            for p in cache.passes(epochs=1):
                for batch in p.batches(500):
                    names["criterion"](names["model"](batch), batch.label).backward()
                    cache.optimizer.step()
            cache.write_report("run.jsonl")
    np.minimum(np.random.default_rng(0).zipf(1.2, 20_000), 999).astype(np.uint16).tofile(folder / "tokens.bin")
    return folder


@pytest.fixture
def begun(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the initial names for the code of a page, and change to a folder with its data."""
    monkeypatch.chdir(tmp_path)
    page: Path = request.param
    if page in {README, START}:  # they start from scratch
        write_clicks(tmp_path, "clicks/day.parquet", 0, 3000)
        return {"page": page, "__name__": "__main__"}
    if page == SCHEMA:
        write_of_schema_page(tmp_path)
        return {"page": page}
    trained = request.getfixturevalue("trained")
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    names: dict[str, Any] = {}
    exec(set_up(), names)
    return names | {"page": page}


def run_block(block: Block, names: dict[str, Any]) -> None:
    """Run a block: code, commands, or a schema, which is written to the file that its first line names."""
    if block.language == "python":
        exec(compile(block.text, str(names["page"]), "exec"), names)
    elif block.language == "toml":
        named = re.match(r"# (\S+\.toml)", block.text)
        Path(named[1] if named else "clicks.toml").write_text(block.text)
    else:
        for arguments in commands(block.text):
            newest = _newest() if {"--to", "--since", "--commit"} & {*arguments} else ""
            ended = invoke(*(newest if one == "12" else one for one in arguments))
            assert ended.exit_code == 0, f"tiercache {' '.join(arguments)}: {ended.output}{ended.exception!r}"
            for told in TOLD.get(arguments[arguments.index("--out") + 1], ()) if "--out" in arguments else ():
                assert told in ended.stderr


def _newest() -> str:
    with tc.Store.open("model.tc", mode="r") as store:
        assert store.commit is not None
        return str(store.commit.id)


TOLD = {
    "flight_passes/": ("4 samples", "2 rows dropped without a label"),
    "rating_passes/": ("2 samples", "1 row skipped, 1 row padded, 1 row dropped without a label"),
    "criteo_passes/": ("1 sample",),
    "purchase_passes/": ("2 samples",),
    "dlrm_passes/": ("1,000 samples",),
    "triple_passes/": ("2 samples",),
    "history_passes/": ("2 samples",),
}
"""Expected output of the extractions in the page of schemas."""


@pytest.mark.parametrize(("page", "begun"), [(one, one) for one in PAGES], ids=lambda one: one.stem, indirect=["begun"])
def test_the_code_of_a_page_runs(page: Path, begun: dict[str, Any]) -> None:
    for block in blocks(page):
        run_block(block, begun)


@pytest.mark.parametrize("begun", [README], indirect=True)
def test_the_main_job_of_the_readme_has_nothing_to_do_again(begun: dict[str, Any]) -> None:
    schema, main = blocks(README)[:2]
    run_block(schema, begun)
    run_block(main, begun)
    assert int(newest := _newest()) > 0
    run_block(main._replace(text=main.text.replace("tc.extract(", "# tc.extract(")), begun)
    assert _newest() == newest


@pytest.mark.parametrize("begun", [SCHEMA], indirect=True)
def test_what_a_schema_leaves_out_has_the_defaults_of_the_page(begun: dict[str, Any]) -> None:
    run_block(blocks(SCHEMA)[0], begun)
    user = tc.Schema.load("clicks.toml").tables[0]
    assert (user.dim, user.optimizer) == (16, tc.optim.Adagrad(learning_rate=0.01))
    assert user.initializer == tc.init.Uniform(low=-0.05, high=0.05)


def test_the_reference_has_every_public_name_once() -> None:
    pages = "".join(one.read_text() for one in (ROOT / "docs" / "api").glob("*.md"))
    assert sorted(re.findall(r"^::: tiercache\.(\w+)$", pages, re.MULTILINE)) == sorted([*tc.__all__, "errors"])


def test_files_that_texts_name_exist() -> None:
    """Including those of the design records, whose commands may be of an earlier time."""
    missing = {}
    for text in [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        named = set(
            re.findall(r"\b(?:tests|benchmarks|examples)/[\w/.-]+\.(?:py|toml|json|txt|ipynb)\b", text.read_text())
        )
        missing[text.name] = sorted(name for name in named if not (ROOT / name).exists())
    assert {name: files for name, files in missing.items() if files} == {}
