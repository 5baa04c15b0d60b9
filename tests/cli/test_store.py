"""The commands that read a store, by keys and by texts, and make commits of it."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiercache as tc
from tests.cli.command import error_of, run, told
from tests.data.cases import table
from tests.io.cases import filled
from tests.store.conftest import small_tables
from tests.store.world import World
from tiercache.data.raw_batch import NULL_KEY, OOV_KEY
from tiercache.store import Store
from tiercache.store.reads import StoreReads


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, dict[int, World]]:
    """A store with four commits, three of them kept, and the world of each."""
    world, past = World(small_tables(), num_passes=4), dict[int, World]()
    with Store.open(tmp_path / "s.tc", tables=world.tables, retention=3) as store:
        for _ in range(4):
            world.run(store, 1)
            past[store.commit.id] = copy.deepcopy(world)
    return tmp_path / "s.tc", past


def test_lookup_shows_the_rows_of_keys(trained: tuple[Path, dict[int, World]], tmp_path: Path) -> None:
    path, past = trained
    name, key = next(key for key in past[3].rows if past[3].rows[key] != past[1].rows.get(key))
    np.save(tmp_path / "keys.npy", np.array([key, 9999]))
    (row,) = told("lookup", path, name, "--", key)
    vector = np.frombuffer(past[3].rows[name, key], np.float32)[: len(row["vector"])]
    assert row["key"] == key
    assert np.array_equal(np.array(row["vector"], np.float32), vector)
    rows = told("lookup", path, name, "--keys", tmp_path / "keys.npy", "--missing", "zeros", "--commit", 2)
    assert [row["key"] for row in rows] == [key, 9999]
    assert not any(rows[1]["vector"])
    assert str(key) in run("lookup", path, name, "--", key)


def test_changes_are_counted_unread(trained: tuple[Path, dict[int, World]], monkeypatch: pytest.MonkeyPatch) -> None:
    path, past = trained
    monkeypatch.delattr(StoreReads, "changes")
    found = told("changes", path, "--since", 2)
    counts = {table.name: len({key for name, key in past[2].keys(3) if name == table.name}) for table in past[3].tables}
    assert found == {"since": 2, "commit": 3, "rows": counts}
    assert "rows changed between commit 2 and commit 3" in run("changes", path, "--since", 2)


def test_an_export_since_a_commit_has_the_changed_rows(trained: tuple[Path, dict[int, World]], tmp_path: Path) -> None:
    path, past = trained
    done = told("export", path, tmp_path / "out", "--since", 2, "--format", "numpy")
    wanted = set(past[2].keys(3))
    assert (done["since"], done["rows"]) == (2, len(wanted))
    for one in past[3].tables:
        keys = np.load(tmp_path / "out" / one.name / "keys.npy")
        fields = [np.load(tmp_path / "out" / one.name / f"{field.name}.npy") for field in one.fields]
        assert set(keys.tolist()) == {key for name, key in wanted if name == one.name}
        for i, key in enumerate(keys.tolist()):
            assert b"".join(values[i].tobytes() for values in fields) == past[3].rows[one.name, key]
    assert "only the rows that changed since commit 2" in error_of("import", tmp_path / "out", tmp_path / "copy.tc")
    assert "has no changes since 7" in error_of("export", path, tmp_path / "x", "--since", 7, "--format", "numpy")
    assert not (tmp_path / "x").exists()


def test_progress_is_told(
    trained: tuple[Path, dict[int, World]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, past = trained
    calls: list[tuple[str, int, int]] = []

    @contextmanager
    def shown(*, shown: bool, unit: str) -> Iterator[Callable[[str, int, int], None]]:
        assert (shown, unit) == (False, "rows")
        yield lambda *call: calls.append(call)

    monkeypatch.setattr("tiercache.reporting.progress.progress_bars", shown)
    name, key = next(iter(past[3].rows))
    for command, stages in (
        (("lookup", path, name, "--missing", "zeros", "--", key, 9999), ["keys", "rows"]),
        (("export", path, tmp_path / "out", "--format", "numpy", "--since", -1), ["export"]),
        (("diff", path), ["diff"]),
    ):
        calls.clear()
        told(*command)
        assert list(dict.fromkeys(stage for stage, _, _ in calls)) == stages
        for stage in stages:
            done = [d for s, d, _ in calls if s == stage]
            totals = {total for s, _, total in calls if s == stage}
            assert done == sorted(set(done))
            assert totals == {done[-1]}
    assert done[-1] == 2 * len(past[3].rows)


def test_diff_compares_commits_and_stores(trained: tuple[Path, dict[int, World]], tmp_path: Path) -> None:
    path, past = trained
    found = told("diff", path, "--from", 2, "--to", 3, code=1)
    assert not found["same"]
    changed = sum(past[2].rows.get(key) != row for key, row in past[3].rows.items())
    assert sum(t["different"] + t["only_second"] for t in found["tables"]) == changed
    assert told("diff", path)["same"]
    twin = World(small_tables(), num_passes=4)
    with Store.open(tmp_path / "twin.tc", tables=twin.tables) as store:
        twin.run(store, 4)
    assert told("diff", path, tmp_path / "twin.tc")["same"]
    assert "for example keys" in run("diff", path, tmp_path / "twin.tc", "--from", 1, code=1)


def test_diff_compares_the_rows_of_stores_with_the_same_keys(tmp_path: Path) -> None:
    tables = [tc.Table(name="t", dim=2, optimizer=tc.optim.SGD())]
    for name, last in (("one", 0.0), ("other", -0.0)):  # two zeros that are equal, and not the same bits
        tc.import_store({"t": np.array([[1, 2], [3, last]], np.float32)}, tmp_path / name, tables=tables)
    (found,) = told("diff", tmp_path / "one", tmp_path / "other", code=1)["tables"]
    assert found == {
        "table": "t", "only_first": 0, "only_second": 0, "different": 1, "same": 1, "examples": [1],
    }  # fmt: skip


def test_rollback_and_compact_make_commits(trained: tuple[Path, dict[int, World]]) -> None:
    path, past = trained
    shown = told("info", path)
    assert [commit["id"] for commit in shown["commits"]] == [1, 2, 3]
    assert shown["space_amplification"] > 1
    text = run("info", path)
    assert "commits 1, 2, 3 (the newest 3 are kept)" in text
    assert "live ranges" not in text
    assert text.count("\n") < 20 < run("info", path, "--segments").count("\n") + 10
    assert told("rollback", path, "--to", 2) == {"commit": 4, "pass": 3, "sample": 0}
    assert told("compact", path) == {"commit": 5, "rows": len(past[2].rows)}
    with Store.open(path, mode="r") as store:
        past[2].check(store, after=2)
    assert "commit 6 has" in run("compact", path)
    assert "commit 7 has the rows and the position of commit 5" in run("rollback", path, "--to", 5)


def test_a_commit_is_pinned_by_name_and_let_go(trained: tuple[Path, dict[int, World]]) -> None:
    path, _ = trained
    assert told("pin", path, "best", 1) == {"commit": 4, "name": "best", "pinned": 1}
    assert "commit 4 is pinned as 'now'" in run("pin", path, "now")
    assert told("info", path)["pins"] == {"best": 1, "now": 4}
    assert "commit 1 as 'best', commit 4 as 'now'" in run("info", path)
    assert 1 in [commit["id"] for commit in told("info", path)["commits"]]
    assert told("unpin", path, "best") == {"commit": 6, "name": "best"}
    assert "no commit is pinned as 'now' anymore" in run("unpin", path, "now")
    assert told("info", path)["pins"] == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lookup", "PATH", "nobody", "1"], "has no table 'nobody'"),
        (["lookup", "PATH", "user", "99999999999999999999"], "key 99999999999999999999 does not fit in int64"),
        (["lookup", "PATH", "user", "--", "-9223372036854775809"], "key -9223372036854775809 does not fit in int64"),
        (["lookup", "PATH", "user", "alice"], "'alice' is not an integer key: pass --string"),
        (["lookup", "PATH", "user", "9999"], "1 of 1 keys have no row in table 'user'"),
        (["lookup", "PATH", "user"], "no key to look up"),
        (["lookup", "PATH", "user", "--string", "--cross", "a"], "pass either --string or --cross"),
        (["unpin", "PATH", "best"], "has no pinned commit 'best'"),
        (["pin", "PATH", "best", "0"], "has no commit 0"),
        (["rollback", "PATH", "--to", "0"], "has no commit 0: pass one of 1, 2, 3"),
        (["changes", "PATH", "--since", "7"], "has no changes since 7"),
        (["import", "PATH", "PATH/x", "--map", "user"], "--map is 'user': expected TABLE=TENSOR"),
    ],
)
def test_a_wrong_request_is_one_sentence(
    trained: tuple[Path, dict[int, World]], arguments: list[str], words: str
) -> None:
    assert words in error_of(*(argument.replace("PATH", str(trained[0])) for argument in arguments))


TEXTS = ["alice", "bob", "", "größe", "x" * 100, "17", "[b]"]
IDS = [17, 0, -5, 1 << 62, 8, 9, 10]
FEW: dict[str, Any] = {
    "user": {"columns": ("user",), "key": "string"},
    "id": {"columns": ("id",)},
    "both": {"columns": ("user", "hour")},
}
"""Features whose keys are hashes modulo 7."""
HOURS = [0, 5, -1, (1 << 63) - 1, -(1 << 63), 17, 3]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> tc.PassDataset:
    folder = tmp_path_factory.mktemp("texts")
    pq.write_table(pa.table({"user": TEXTS, "hour": HOURS, "id": IDS}), folder / "data.parquet")
    schema = tc.Schema(
        features=(
            tc.Feature(name="user", key="string"),
            tc.Feature(name="user_hour", key="cross", columns=("user", "hour")),
            tc.Feature(name="hour_user", key="cross", columns=("hour", "user")),
            *(tc.Feature(name=f"few_{name}", num_buckets=7, **columns) for name, columns in FEW.items()),
        ),
        tables=tuple(table(n, dim=1) for n in ("user", "user_hour", "hour_user", *(f"few_{name}" for name in FEW))),
    )
    return tc.extract(folder / "data.parquet", schema, folder / "passes", device_budget="1MiB", progress=False)


def test_key_of_gives_the_keys_and_buckets_of_an_extraction(dataset: tc.PassDataset) -> None:
    (only,) = dataset
    texts, pairs = [(text,) for text in TEXTS], list(zip(TEXTS, HOURS, strict=True))
    keys = {"user": texts, "user_hour": pairs, "hour_user": [(hour, text) for text, hour in pairs]}
    for name, values in keys.items():
        assert set(only.keys(name).tolist()) == {tc.key_of(*one) for one in values}
    buckets: dict[str, Any] = {"few_user": texts, "few_id": [(one,) for one in IDS], "few_both": pairs}
    for name, values in buckets.items():
        assert set(only.keys(name).tolist()) == {tc.key_of(*one, num_buckets=7) for one in values}
    assert tc.key_of(None, num_buckets=7) == NULL_KEY


def test_key_of_knows_integers_bytes_nulls_and_reserved_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """An integer is its own key; null is the key of the null row; a hash that is reserved moves by two."""
    assert tc.key_of(17) == tc.key_of(np.int32(17)) == 17
    assert tc.key_of((1 << 64) - 1) == -1
    assert tc.key_of("a") == tc.key_of(b"a") == -3292477735350538661
    assert tc.key_of(None) == tc.key_of("a", None) == NULL_KEY
    for reserved in (OOV_KEY, NULL_KEY):
        with pytest.raises(ValueError, match="is reserved: keys start at"):
            tc.key_of(reserved)
        monkeypatch.setattr("tiercache.data.encode.xxh64", lambda _, key=reserved: key & ((1 << 64) - 1))
        assert tc.key_of("a") == tc.key_of("a", 1) == reserved + 2
    with pytest.raises(ValueError, match="at least one value"):
        tc.key_of()
    with pytest.raises(ValueError, match="num_buckets is 0: it must be at least 1"):
        tc.key_of("a", num_buckets=0)
    with pytest.raises(ValueError, match="does not fit in 64 bits"):
        tc.key_of(1 << 64)
    with pytest.raises(TypeError):
        tc.key_of(1.5)  # type: ignore[arg-type]


def test_the_rows_of_texts_and_crosses_are_shown(dataset: tc.PassDataset, tmp_path: Path) -> None:
    """By the values in the data; integers in a cross are values of an integer column, unless quoted."""
    (only,) = dataset
    rows = {
        one.name: {key: np.float32(i).tobytes() for i, key in enumerate(only.keys(one.name).tolist())}
        for one in dataset.tables
    }
    filled(tmp_path / "s.tc", dataset.tables, rows).close()

    def number(name: str, key: int) -> list[float]:
        return [float(only.keys(name).tolist().index(key))]

    found = told("lookup", tmp_path / "s.tc", "user", "--string", "alice", "17")
    assert [row["text"] for row in found] == ["alice", "17"]
    assert [row["vector"] for row in found] == [number("user", tc.key_of(text)) for text in ("alice", "17")]
    (cross,) = told("lookup", tmp_path / "s.tc", "hour_user", "--cross", "17", '"17"')
    assert cross["vector"] == number("hour_user", tc.key_of(17, "17"))
    assert cross["key"] == tc.key_of(17, "17")
    assert "[b]" in run("lookup", tmp_path / "s.tc", "user", "--string", "[b]")
    (few,) = told("lookup", tmp_path / "s.tc", "few_user", "--string", "bob", "--num-buckets", 7)
    assert few["key"] == tc.key_of("bob", num_buckets=7)
    (few,) = told("lookup", tmp_path / "s.tc", "few_id", "17", "--num-buckets", 7)
    assert few["key"] == tc.key_of(17, num_buckets=7)
    (tmp_path / "ids.txt").write_text("17\n")
    with_file = "lookup", tmp_path / "s.tc", "few_id", "--keys", tmp_path / "ids.txt"
    assert told(*with_file, "--num-buckets", 7) == [few]
    for option in ("--string", "--cross"):
        assert f"ids.txt has integer keys: omit {option} and write" in error_of(*with_file, option)
    unsigned = error_of("lookup", tmp_path / "s.tc", "few_id", 1 << 63)
    assert unsigned.endswith(f"to 2**63 - 1; the key of {1 << 63} in a uint64 column is {-(1 << 63)}")
    assert "bob x 5" in run("lookup", tmp_path / "s.tc", "user_hour", "--cross", "bob", "5")
    gone = error_of("lookup", tmp_path / "s.tc", "user", "--string", "bob", "eve")
    assert "table 'user' of the store" in gone
    assert gone.endswith("(eve): leave them out, or pass --missing initial or zeros")
    assert "no row in table 'user_hour'" in error_of("lookup", tmp_path / "s.tc", "user_hour", "--cross", "bob", "6")
