"""The count of steps is exported with rows that depend on it, Adam's and 16-bit ones, and is imported again."""

import dataclasses
import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.cli.command import run
from tests.io.cases import FORMATS, rows_of
from tests.train.cases import Case, Spec, table, tiered, train
from tiercache.errors import ImportExportError, ImportExportWarning
from tiercache.store import MemoryEngine, Store, load_rows

ADAM = table("a", 4, tc.optim.Adam(learning_rate=0.01))
PLAIN = table("b", 4)
CASE = Case(tables=(ADAM, PLAIN), specs=(Spec(name="f", table="a"), Spec(name="g", table="b")), epochs=1, dense_lr=0.0)
NARROW = Case(
    tables=(dataclasses.replace(PLAIN, name="a", dtype="bfloat16"),), specs=CASE.specs[:1], epochs=1, dense_lr=0.0
)
STEPS = 16


def trained_on(case: Case, folder: Path) -> Path:
    """Return the path of a store after an epoch; dense layers do not learn."""
    passes = case.cut(folder / "passes")
    with Store.open(folder / "s.tc", tables=case.tables) as store, tiered(store, passes) as cache:
        train(cache, case)
        assert cache.optimizer.rows.steps == STEPS
    return folder / "s.tc"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_on(CASE, tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize(
    ("case", "format_"),
    [(CASE, "numpy"), (CASE, "parquet"), (CASE, "safetensors"), (NARROW, "safetensors")],
    ids=["numpy", "parquet", "safetensors", "16 bits"],
)
def test_training_goes_on_from_an_import_as_it_would_have_without(tmp_path: Path, case: Case, format_: str) -> None:
    """To the same bits: another count would change Adam's steps and the rounding to 16 bits."""
    trained = trained_on(case, tmp_path)
    tc.export_store(trained, tmp_path / "out", format=format_)
    tc.import_store(tmp_path / "out", tmp_path / "copy.tc")
    tc.import_store(tmp_path / "out", tmp_path / "wrong.tc", steps=STEPS + 1)
    again = Case(**{**case.__dict__, "pass_rows": 100})
    passes = again.cut(tmp_path / "other")
    ends = {}
    for path in (trained, tmp_path / "copy.tc", tmp_path / "wrong.tc"):
        with Store.open(path) as store:
            tc.reorganize(store, passes, progress=False)
            with tiered(store, passes) as cache:
                train(cache, again)
            ends[path.name] = rows_of(store)
    assert ends["copy.tc"] == ends["s.tc"]
    assert ends["wrong.tc"]["a"] != ends["s.tc"]["a"]


@pytest.mark.parametrize("given", [None, 5])
def test_a_table_that_stepped_less_leaves_with_its_own_count(tmp_path: Path, given: int | None) -> None:
    """And continues from it in the store that it is imported into; a given count applies to all tables."""
    case = Case(
        tables=(ADAM, dataclasses.replace(ADAM, name="b"), dataclasses.replace(PLAIN, name="c")), specs=CASE.specs
    )
    passes = case.cut(tmp_path / "passes")
    with tiered(tmp_path / "s.tc", passes) as cache:
        first, second = (tc.EmbeddingBag(cache.schema, name) for name in ("f", "g"))
        model = nn.ModuleList([first, second])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cache.register(model=model, optimizer=optimizer)
        optimizer = cache.optimizer
        for p in cache.passes(epochs=1):
            for i, batch in enumerate(p.batches(case.batch)):
                for bag in (first, second)[: 2 - bool(i)]:
                    bag(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        passed = len(passes.passes)
    listing = tc.export_store(tmp_path / "s.tc", tmp_path / "out", format="numpy")
    assert {one.table.name: one.steps for one in listing.tables} == {"a": None, "b": passed, "c": None}
    assert tc.import_store(tmp_path / "out", tmp_path / "copy.tc", steps=given).steps == (given or STEPS)
    with Store.open(tmp_path / "copy.tc") as store:
        tc.reorganize(store, passes, progress=False)
        with tiered(store, passes) as cache:
            cache.restore()
            found = {group["table"]: group["step"] for group in cache.optimizer.rows.param_groups}
    assert found == {"a": given or STEPS, "b": given or passed, "c": given or STEPS}


@pytest.mark.parametrize("format_", FORMATS)
def test_the_count_stands_where_the_state_does(trained: Path, tmp_path: Path, format_: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportExportWarning)
        listing = tc.export_store(trained, tmp_path / "all", format=format_)
        none = tc.export_store(trained, tmp_path / "none", format=format_, with_state=False)
        other = tc.export_store(trained, tmp_path / "other", format=format_, tables=["b"])
    expected = None if format_ == "torch" else STEPS
    assert (listing.steps, none.steps, other.steps) == (expected, None, None)
    record = json.loads((tmp_path / "all" / "tables.json").read_text())
    assert record.get("steps") == expected
    imported = tc.import_store(tmp_path / "all", tmp_path / "copy.tc", initial_state=True)
    assert imported == listing
    with Store.open(tmp_path / "copy.tc", mode="r") as copy:
        assert copy.commit is not None
        assert copy.commit.settings == ({} if expected is None else {"steps": STEPS})


@pytest.mark.parametrize("optimizer", [tc.optim.SGD(learning_rate=0.1), tc.optim.Adagrad(learning_rate=0.1)])
def test_rows_of_16_bits_leave_with_the_count(tmp_path: Path, optimizer: tc.optim.SGD | tc.optim.Adagrad) -> None:
    narrow = dataclasses.replace(PLAIN, optimizer=optimizer, dtype="float16")
    fields = tuple(np.ones((5, field.width), np.float32) for field in narrow.fields)
    with Store.open(None, tables=[narrow], engine=MemoryEngine()) as store:
        load_rows(store, [("b", (np.arange(5, dtype=np.int64), fields))], settings={"steps": 100})
        assert tc.export_store(store, tmp_path / "out", format="numpy").steps == 100
        bare = tc.export_store(store, tmp_path / "bare", format="numpy", with_state=False)
        assert bare.steps == (100 if isinstance(optimizer, tc.optim.SGD) else None)
    tc.import_store(tmp_path / "out", tmp_path / "copy.tc")
    with Store.open(tmp_path / "copy.tc", mode="r") as copy:
        assert copy.tables == (narrow,)
        assert copy.commit is not None
        assert copy.commit.settings == {"steps": 100}
    (tmp_path / "out" / "tables.json").unlink()
    words = r"table 'b' was trained, but the rounding to float16 depends on it"
    with (
        pytest.warns(ImportExportWarning, match=words),
        Store.open(None, tables=[narrow], engine=MemoryEngine()) as copy,
    ):
        tc.import_store(tmp_path / "out", copy, format="numpy")


def test_files_that_do_not_say_it_are_asked_about(trained: Path, tmp_path: Path) -> None:
    tc.export_store(trained, tmp_path / "out", format="numpy")
    (tmp_path / "out" / "tables.json").unlink()
    words = r"how many steps table 'a' was trained, but Adam's state .* unless you pass steps"
    for options, steps in (({}, None), ({"steps": 7}, 7)):
        with (
            Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as copy,
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            assert tc.import_store(tmp_path / "out", copy, format="numpy", **options).steps == steps
        assert [bool(re.search(words, str(one.message))) for one in said] == [True] * (steps is None)
    with pytest.raises(ImportExportError, match=r"steps is -1: it must be 0 \.\. 9,223,372,036,854,775,807"):
        tc.import_store(tmp_path / "out", tmp_path / "c.tc", format="numpy", tables=CASE.tables, steps=-1)
    assert not (tmp_path / "c.tc").exists()


def test_the_command_line_takes_the_count(trained: Path, tmp_path: Path) -> None:
    tc.export_store(trained, tmp_path / "out", format="parquet")
    run("import", tmp_path / "out", tmp_path / "copy.tc", "--steps", 3)
    with Store.open(tmp_path / "copy.tc", mode="r") as copy:
        assert copy.commit is not None
        assert copy.commit.settings == {"steps": 3}
