"""``tiercache export`` and ``import``."""

from pathlib import Path

import numpy as np
import torch

import tiercache as tc
from tests.cli.command import error_of, invoke, run, told
from tests.io.cases import all_tables, expected_after, filled, random_rows, rows_of
from tests.train.cases import table
from tiercache.store import Store

SCHEMA = """
[features.f]
table = "t"
[tables.t]
dim = 2
initializer = { name = "zeros" }
optimizer = { name = "sgd", learning_rate = 0.1 }
[features.g]
table = "u"
[tables.u]
dim = 3
initializer = { name = "zeros" }
optimizer = { name = "adagrad", learning_rate = 0.1 }
"""


def test_a_store_goes_to_files_and_back_by_command(tmp_path: Path) -> None:
    tables = all_tables()
    rows = random_rows(tables, [30, 20, 10, 5, 4])
    filled(tmp_path / "a.tc", tables, rows).close()
    done = invoke("export", tmp_path / "a.tc", tmp_path / "out", "--format", "hugectr")
    assert done.exit_code == 0
    assert "rowwise (20 rows)" in done.stdout
    assert "69 rows in" in done.stdout
    assert done.stderr == (
        "warning: format 'hugectr' cannot hold the optimizer state of 'rowwise' (sum): only the vectors are exported\n"
    )
    assert "(--initial-state) to start with sum at 0.0" in error_of("import", tmp_path / "out", tmp_path / "b.tc")
    assert told("import", tmp_path / "out", tmp_path / "b.tc", "--initial-state")["rows"] == 69
    with Store.open(tmp_path / "b.tc") as store:
        assert rows_of(store) == expected_after("hugectr", tables, rows)


def test_only_the_tables_that_were_asked_for_are_exported(tmp_path: Path) -> None:
    tables = all_tables()
    filled(tmp_path / "a.tc", tables, random_rows(tables, [30, 20, 10, 5, 4])).close()
    command = ["export", tmp_path / "a.tc", tmp_path / "out", "--format", "parquet"]
    report = told(*command, "--table", "adam", "--table", "sgd", "--no-state")
    assert (report["format"], report["since"], report["rows"]) == ("parquet", None, 40)
    assert [(t["name"], t["rows"], t["has_state"]) for t in report["tables"]] == [
        ("adam", 30, False),
        ("sgd", 10, False),
    ]


def test_files_without_a_manifest_are_imported_with_a_schema(tmp_path: Path) -> None:
    """For example a HugeCTR model from elsewhere; a subset of the schema's tables is enough."""
    (tmp_path / "schema.toml").write_text(SCHEMA)
    (tmp_path / "model" / "t").mkdir(parents=True)
    (tmp_path / "model" / "t" / "key").write_bytes((5).to_bytes(8, "little"))
    (tmp_path / "model" / "t" / "emb_vector").write_bytes(bytes(8))
    command = ["import", tmp_path / "model", tmp_path / "b.tc", "--schema", tmp_path / "schema.toml"]
    assert "pass the format of its files (--format)" in error_of(*command)
    assert "the schema has no table 'x': it has 't', 'u'" in error_of(*command, "--table", "x")
    run(*command, "--format", "hugectr", "--table", "t")
    with Store.open(tmp_path / "b.tc") as store:
        assert rows_of(store) == {"t": {5: bytes(8)}}


def test_the_state_dict_of_a_model_is_imported_by_the_names_of_its_tensors(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    state = {"emb.t.weight": torch.rand(4, 2), "towers.0.weight": torch.rand(5, 3), "head.bias": torch.zeros(1)}
    torch.save({"model": state, "epoch": 3}, tmp_path / "model.pt")
    command = ["import", tmp_path / "model.pt", tmp_path / "s.tc", "--initial-state"]
    assert "does not describe its tables: pass the tables to import (--schema)" in error_of(*command)
    command += ["--schema", tmp_path / "schema.toml"]
    assert "has no array for table 'u': choose one of model.emb.t.weight, model.towers.0.weight" in error_of(*command)
    assert "has no 'towers' for table 'u'" in error_of(*command, "--map", "u=towers")
    twice = ["--map", "u=towers", "--map", "u=model.towers.0.weight"]
    assert "--map has table 'u' twice, as 'towers' and 'model.towers.0.weight'" in error_of(*command, *twice)
    assert told(*command, "--map", "u=model.towers.0.weight")["rows"] == 9
    with Store.open(tmp_path / "s.tc", mode="r") as store:
        for table, name, rows in (("t", "emb.t.weight", 4), ("u", "towers.0.weight", 5)):
            assert np.array_equal(store.lookup(table, np.arange(rows))["vector"], state[name].numpy())
    torch.save({"t": torch.full((6, 2), 7.0)}, tmp_path / "newer.pt")
    again = ["import", tmp_path / "newer.pt", tmp_path / "s.tc", "--initial-state"]
    assert "the store has no table 'x': it has" in error_of(*again, "--table", "x")
    created = error_of("import", tmp_path / "newer.pt", tmp_path / "new.tc", "--table", "t")
    assert created.endswith("new.tc: a new store with --table needs the settings of --schema")
    assert "s.tc is a store: export it and import" in error_of("import", tmp_path / "s.tc", tmp_path / "new.tc")
    assert told(*again, "--table", "t")["rows"] == 6
    with Store.open(tmp_path / "s.tc", mode="r") as store:
        assert (store.lookup("t", np.arange(6))["vector"] == 7).all()
        assert np.array_equal(store.lookup("u", np.arange(5))["vector"], state["towers.0.weight"].numpy())


def test_the_key_sets_of_a_dataset_leave_as_files_of_hugectr(tmp_path: Path) -> None:
    made = tc.write_key_sets(tmp_path / "passes", [table("t", 4)], [{"t": [3, 1, 3]}, {"t": [7]}])
    found = told("export", made.path, tmp_path / "out", "--format", "hugectr")
    assert (found["sub_datasets"], found["keys"], found["tables"]) == (2, 3, ["t"])
    keys = np.fromfile(tmp_path / "out" / "t" / "pass-00000.keys", "<i8")
    assert sorted(keys.tolist()) == [1, 3]
    assert "pass --format hugectr" in error_of("export", made.path, tmp_path / "other", "--format", "numpy")
