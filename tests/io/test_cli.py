"""``tiercache store export`` and ``import``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from typer.testing import CliRunner

from tests.io.cases import all_tables, expected_after, filled, random_rows, rows_of
from tiercache.cli import app
from tiercache.errors import ImportExportError
from tiercache.store import Store

if TYPE_CHECKING:
    from pathlib import Path


def invoke(*arguments: object) -> tuple[int, str, str, BaseException | None]:
    """Run a command; returns exit code, standard output, standard error, and what it raised."""
    done = CliRunner().invoke(app, ["store", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr, done.exception


def test_a_store_goes_to_files_and_back_by_command(tmp_path: Path) -> None:
    """Without a schema: the export says what its tables are."""
    tables = all_tables()
    rows = random_rows(tables, [30, 20, 10, 5, 4])
    filled(tmp_path / "a.tc", tables, rows).close()
    code, out, err, _ = invoke("export", tmp_path / "a.tc", tmp_path / "out", "--format", "hugectr")
    assert code == 0
    assert "rowwise (20 rows)" in out
    assert "69 rows in" in out
    assert "warning: format 'hugectr' has no place for the optimizer state (sum) of table 'rowwise'" in err
    code, _, _, error = invoke("import", tmp_path / "out", tmp_path / "b.tc")
    assert code == 1
    assert isinstance(error, ImportExportError)
    assert "(--initial-state) to begin with sum at 0.0" in str(error)
    assert invoke("import", tmp_path / "out", tmp_path / "b.tc", "--initial-state")[0] == 0
    with Store.open(tmp_path / "b.tc") as store:
        assert rows_of(store) == expected_after("hugectr", tables, rows)


def test_json_is_one_object_and_nothing_else(tmp_path: Path) -> None:
    """With the rows of each table; only the tables that were asked for, without state."""
    tables = all_tables()
    rows = random_rows(tables, [30, 20, 10, 5, 4])
    filled(tmp_path / "a.tc", tables, rows).close()
    command = ["export", tmp_path / "a.tc", tmp_path / "out", "--format", "parquet"]
    code, out, err, _ = invoke(*command, "--table", "adam", "--table", "sgd", "--no-state", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["format"] == "parquet"
    assert report["rows"] == 40
    assert [(t["name"], t["rows"], t["has_state"]) for t in report["tables"]] == [
        ("adam", 30, False),
        ("sgd", 10, False),
    ]
    code, out, err, _ = invoke("import", tmp_path / "out", tmp_path / "b.tc", "--initial-state", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["rows"] == 40


def test_files_without_a_listing_are_imported_with_a_schema(tmp_path: Path) -> None:
    """As of a HugeCTR model from elsewhere."""
    (tmp_path / "schema.toml").write_text(
        '[features.f]\ntable = "t"\n[tables.t]\ndim = 2\ninitializer = { name = "zeros" }\n'
        'optimizer = { name = "sgd", learning_rate = 0.1 }\n'
    )
    (tmp_path / "model" / "t").mkdir(parents=True)
    (tmp_path / "model" / "t" / "key").write_bytes((5).to_bytes(8, "little"))
    (tmp_path / "model" / "t" / "emb_vector").write_bytes(bytes(8))
    command = ["import", tmp_path / "model", tmp_path / "b.tc", "--schema", tmp_path / "schema.toml"]
    assert isinstance(invoke(*command)[3], ImportExportError)
    code, _, err, _ = invoke(*command, "--format", "hugectr")
    assert (code, err) == (0, "")
    with Store.open(tmp_path / "b.tc") as store:
        assert rows_of(store) == {"t": {5: bytes(8)}}
