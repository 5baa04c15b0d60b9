"""The commands of ``tiercache store`` that read and move commits."""

from __future__ import annotations

import copy
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.store.conftest import small_tables
from tiercache.cli import main
from tiercache.cli.store import app
from tiercache.io.column_file import ColumnFile
from tiercache.store import KeyMissingError, Store, Table, Zeros
from tiercache.store.testing.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, dict[int, World]]:
    """A store with four commits, three of them kept, and the world of each."""
    world, past = World(small_tables(), num_passes=4), dict[int, World]()
    with Store.open(tmp_path / "s.tc", tables=world.tables, retention=3) as store:
        for _ in range(4):
            world.run(store, 1)
            past[store.commit.id] = copy.deepcopy(world)
    return tmp_path / "s.tc", past


def run(*arguments: object, code: int = 0) -> str:
    """Run a command and return what it prints."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.stdout


def told(*arguments: object, code: int = 0) -> Any:
    """Run a command with --json."""
    return json.loads(run(arguments[0], "--json", *arguments[1:], code=code))


def test_lookup_shows_the_rows_of_keys(trained: tuple[Path, dict[int, World]], tmp_path: Path) -> None:
    """From the command line and from a file; of the newest commit and of an older one."""
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
    result = CliRunner().invoke(app, ["lookup", str(path), name, "9999"])
    assert isinstance(result.exception, KeyMissingError)
    assert str(key) in run("lookup", path, name, "--", key)


def test_changes_counts_and_writes_keys(trained: tuple[Path, dict[int, World]], tmp_path: Path) -> None:
    """For each table the rows that later passes trained; a table's name cannot lead out of the folder."""
    path, past = trained
    found = told("changes", path, "--since", 2, "--out", tmp_path / "keys")
    wanted = {table.name: {k for n, k in past[2].keys(3) if n == table.name} for table in past[3].tables}
    assert (found["since"], found["commit"]) == (2, 3)
    assert found["rows"] == {name: len(keys) for name, keys in wanted.items()}
    for name, keys in wanted.items():
        assert set(np.load(tmp_path / "keys" / f"{name}.npy").tolist()) == keys
    assert "rows changed between commit 2 and commit 3" in run("changes", path, "--since", 2)
    rule = past[3].tables[0].optimizer
    outside = Table(name="../../out", dim=2, optimizer=rule, initializer=Zeros())
    with Store.open(tmp_path / "other.tc", tables=[outside]) as store:
        World([outside]).run(store, 1)
    run("changes", tmp_path / "other.tc", "--since", -1, "--out", tmp_path / "a" / "b" / "keys")
    assert [entry.name for entry in (tmp_path / "a" / "b" / "keys").iterdir()] == ["%2E%2E%2F%2E%2E%2Fout.npy"]


def test_changes_are_counted_without_reading_them_and_written_a_chunk_at_a_time(
    trained: tuple[Path, dict[int, World]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So neither takes memory for all keys of a table."""
    path, past = trained
    wanted = {table.name: {k for n, k in past[3].keys(3) if n == table.name} for table in past[3].tables}
    sizes, plain = [], ColumnFile.write

    def write(file: ColumnFile, values: np.ndarray) -> None:
        sizes.append(values.size)
        plain(file, values)

    monkeypatch.setattr(ColumnFile, "write", write)
    monkeypatch.setattr("tiercache.store.serving._CHUNK_BYTES", 1)
    told("changes", path, "--since", 2, "--out", tmp_path / "keys")
    assert set(sizes) == {1}
    for name, keys in wanted.items():
        assert set(np.load(tmp_path / "keys" / f"{name}.npy").tolist()) == keys
    assert sorted(entry.name for entry in (tmp_path / "keys").iterdir()) == sorted(f"{name}.npy" for name in wanted)
    monkeypatch.delattr(Store, "changes")
    assert told("changes", path, "--since", 2)["rows"] == {name: len(keys) for name, keys in wanted.items()}


def test_what_takes_long_says_how_far_it_is(
    trained: tuple[Path, dict[int, World]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookups, changes and differences tell what they have done, in steps, up to all of it."""
    path, past = trained
    calls: list[tuple[str, int, int]] = []

    @contextmanager
    def shown(*, as_json: bool) -> Iterator[Callable[[str, int, int], None]]:
        assert as_json
        yield lambda *call: calls.append(call)

    monkeypatch.setattr("tiercache.cli.store.shown_rows", shown)
    name, key = next(iter(past[3].rows))
    for command, stages in (
        (("lookup", path, name, "--missing", "zeros", "--", key, 9999), ["keys", "rows"]),
        (("changes", path, "--since", -1, "--out", tmp_path / "keys"), ["changes"]),
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
    """Exit code 1 and counts where they differ, 0 where they are the same."""
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


def test_rollback_and_compact_make_commits(trained: tuple[Path, dict[int, World]]) -> None:
    """Each is a new commit; info shows all that are kept."""
    path, past = trained
    shown = told("info", path)
    assert [commit["id"] for commit in shown["commits"]] == [1, 2, 3]
    assert shown["space_amplification"] > 1
    assert "the newest 3 are kept" in run("info", path)
    assert told("rollback", path, "--to", 2) == {"commit": 4, "pass": 3, "sample": 0}
    assert told("compact", path) == {"commit": 5, "rows": len(past[2].rows)}
    with Store.open(path, mode="r") as store:
        past[2].check(store, after=2)
    assert "commit 6 has" in run("compact", path)
    assert "commit 7 stands where commit 5 stood" in run("rollback", path, "--to", 5)


def test_what_is_asked_wrongly_is_one_sentence(
    trained: tuple[Path, dict[int, World]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On standard error, with exit code 1."""
    path, _ = trained
    for arguments, words in (
        (["lookup", str(path), "nobody", "1"], "has no table 'nobody'"),
        (["lookup", str(path), "user", "99999999999999999999"], "key 99999999999999999999 is beyond int64"),
        (["lookup", str(path), "user", "--", "-9223372036854775809"], "key -9223372036854775809 is beyond int64"),
        (["rollback", str(path), "--to", "0"], "has no commit 0: give one of 1, 2, 3"),
        (["changes", str(path), "--since", "7"], "knows no changes since 7"),
    ):
        monkeypatch.setattr("sys.argv", ["tiercache", "store", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1
        assert words in capsys.readouterr().err
