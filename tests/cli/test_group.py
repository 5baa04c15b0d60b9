"""Rules for every command of the group, and `info` and `verify` of stores and datasets."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiercache as tc
from tests.apart import ran
from tests.cli.command import error_of, invoke, run, told
from tests.data.cases import plain_schema, reference, write_parquet
from tests.files import flip
from tests.io.cases import filled
from tiercache.cli import app, main
from tiercache.kernels.cpu import compile as kernels

SCHEMA = """
[label]
column = "y"
[tables.a]
dim = 4
optimizer = { name = "sgd", learning_rate = 1.0 }
initializer = { name = "zeros" }
[features.a]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a dataset ``passes``, a store ``s.tc`` with two commits, and files."""
    columns = {"a": np.arange(5000) % 700, "y": np.zeros(5000)}
    write_parquet(tmp_path, columns, [0, 2000, 5000])
    (tmp_path / "schema.toml").write_text(SCHEMA)
    dataset = reference(tmp_path / "passes", plain_schema(), columns, [0, 2000, 5000])
    filled(tmp_path / "s.tc", dataset.tables, {"a": {key: bytes(16) for key in range(700)}}).close()
    with tc.Store.open(tmp_path / "s.tc", retention=2) as store:
        store.compact()
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMANDS: dict[str, tuple[str, ...]] = {
    "extract": ("part-0.parquet", "--schema", "schema.toml", "--out", "new", "--device-budget", "1MiB"),
    "info": ("s.tc",),
    "verify": ("s.tc",),
    "lookup": ("s.tc", "a", "1", "2"),
    "changes": ("s.tc", "--since", "-1"),
    "diff": ("s.tc",),
    "compact": ("s.tc",),
    "estimate": ("--rows", "1e4", "--samples", "1e5", "--passes", "4", "--disk-gbps", "1"),
    "plan": ("passes", "--store", "planned.tc", "--samples-per-second", "1e5"),
    "rollback": ("s.tc", "--to", "0"),
    "alter": ("s.tc", "--schema", "schema.toml"),
    "forget": ("s.tc", "a", "--unused-since", "0"),
    "reorganize": ("s.tc", "passes"),
    "repartition": ("passes", "new", "--rows", "650", "--batch-multiple", "100"),
    "export": ("s.tc", "out", "--format", "numpy"),
    "import": ("numpy", "new.tc"),
    "warmup": (),
}


def test_every_command_is_tried() -> None:
    """The group is flat, and has these commands and those tested elsewhere."""
    names = {command.name for command in app.registered_commands}
    assert COMMANDS.keys() <= names
    assert names - COMMANDS.keys() <= {"report", "pin", "unpin"}


def test_the_pages_use_commands_that_exist() -> None:
    root = Path(__file__).parents[2]
    text = "".join(page.read_text() for page in [root / "README.md", *(root / "docs").glob("*.md")])
    code = "\n".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL))
    used = set(re.findall(r"^`?tiercache ([a-z]+)", code, re.MULTILINE))
    assert {"extract", "import", "lookup"} <= used <= {command.name for command in app.registered_commands}


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_value_and_quiet_is_silent(folder: Path, command: str) -> None:
    tc.export_store("s.tc", "numpy", format="numpy")
    before = {path.name for path in folder.iterdir()}
    result = invoke(command, "--json", *COMMANDS[command])
    assert (result.exit_code, result.stderr) == (0, "")
    json.loads(result.stdout)
    for name in {path.name for path in folder.iterdir()} - before:
        Path(name).rename(f"first {name}")
    result = invoke(command, "--quiet", *COMMANDS[command])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"warmup", "estimate"}))
def test_a_missing_path_is_one_sentence_and_a_missing_argument_is_usage(folder: Path, command: str) -> None:
    arguments = [Path(one).name if one not in {"s.tc", "passes", "numpy"} else "gone" for one in COMMANDS[command]]
    assert error_of(command, *(one.replace("part-0", "gone") for one in arguments))
    assert invoke(command, "--no-such-option").exit_code == 2
    assert invoke(command).exit_code == 2


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"warmup", "estimate"}))
def test_a_path_with_a_tilde_is_in_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """A shell leaves the tilde in quotes, and after an equals sign. No folder of that name is created."""
    tc.export_store("s.tc", "numpy", format="numpy")
    paths = {path.name for path in folder.iterdir()} | {"new", "new.tc", "out", "planned.tc"}
    paths -= {"numpy"} if command == "export" else set()  # its format
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder / "numpy")
    files = {path.name for path in Path().iterdir()}
    run(command, *(f"~/{one}" if one in paths else one for one in COMMANDS[command]))
    assert {path.name for path in Path().iterdir()} == files


def test_options_expand_a_tilde_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    (folder / "keys.txt").write_text("1\n2\n")
    assert [row["key"] for row in told("lookup", "~/s.tc", "a", "--keys", "~/keys.txt")] == [1, 2]
    run("diff", "~/s.tc", "~/s.tc")
    run("plan", "~/passes", "--store=~/planned.tc", "--samples-per-second", "1e5", "--out=~/plan.toml")
    run("estimate", "--rows", "1e6", "--dim", "8", "--samples", "1e9", "--store=~/s.tc")
    for prior in ((), ("--prior-counts=~/one", "--prior-counts=~/one")):
        run("extract", "~/part-*.parquet", "--schema=~/schema.toml", f"--out=~/{'two' if prior else 'one'}",
            "--device-budget", "1MiB", "--min-count", "2", *prior)  # fmt: skip
    assert {"one", "two", "plan.toml"} <= {path.name for path in folder.iterdir()}
    assert not [*Path().iterdir()]


def test_alter_says_what_changed_and_how_many_bytes_wait(folder: Path) -> None:
    """A larger dim and a new table; then the table is dropped; a schema that the store has makes no commit."""
    wider = SCHEMA.replace("dim = 4", "dim = 6") + "[tables.b]\ndim = 2\n[features.b]\n"
    Path("wider.toml").write_text(wider)
    changes = ["table 'b' is new", "table 'a': dim 4 becomes 6"]
    done = {"commit": 2, "changes": changes, "dropped_rows": {}, "waiting_bytes": 0}
    assert told("alter", "s.tc", "--schema", "wider.toml") == done
    assert len(told("lookup", "s.tc", "a", "1")[0]["vector"]) == 6
    assert "s.tc already has these tables" in run("alter", "s.tc", "--schema", "wider.toml")
    Path("new.toml").write_text(wider.replace("[tables.a]\ndim = 6", "[tables.c]").replace(".a]", ".c]"))
    assert "a table cannot be renamed" in error_of("alter", "s.tc", "--schema", "new.toml")
    Path("b.toml").write_text(
        wider.replace("[tables.a]", "").partition("dim = 6")[0] + wider[wider.index("[tables.b]") :]
    )
    found = run("alter", "s.tc", "--schema", "b.toml")
    for line in ("table 'a' is dropped", "table 'a' had 700 rows", "the next rewrite frees 10.9 KiB"):
        assert line in found
    assert told("info", "s.tc")["waiting_bytes"] == 700 * 16
    assert "; the next rewrite frees 10.9 KiB" in run("info", "s.tc")


def test_forget_says_what_waits_and_what_lists_the_rows(folder: Path) -> None:
    Path("keys.txt").write_text("1\n2\n\n9999\n")
    np.save("keys.npy", np.array([3, 4]))
    listed = ["commit 1 (retention)"]
    done = {"commit": 2, "rows": 2, "unknown": 1, "waiting_bytes": 32, "listed_by": listed}
    assert told("forget", "s.tc", "a", "--keys", "keys.txt") == done
    assert "have no row" in error_of("lookup", "s.tc", "a", "1")
    found = run("forget", "s.tc", "a", "--keys", "keys.npy", "--now")
    assert "commit 4 has 2 fewer rows in table a" in found
    assert "no commit lists the rows anymore, and their bytes are free" in found
    assert told("info", "s.tc")["rows"] == 696
    Path("keys.txt").write_text("1\nx\n")
    assert "line 2 of keys.txt is 'x': expected one int64 key" in error_of("forget", "s.tc", "a", "--keys", "keys.txt")
    assert "pass either keys or unused_since" in error_of("forget", "s.tc", "a")


def test_changes_and_their_export_warn_of_forgotten_rows(folder: Path) -> None:
    Path("keys.txt").write_text("1\n2\n")
    told("forget", "s.tc", "a", "--keys", "keys.txt", "--now")
    for command in (("changes", "s.tc"), ("export", "s.tc", "out", "--format", "numpy")):
        assert invoke(*command, "--since", "1").stderr.count("may have been forgotten after commit 1") == 1
    assert "forgotten" not in invoke("changes", "s.tc", "--since", "-1").output


def test_keys_of_files_are_taken_as_they_are_written(folder: Path) -> None:
    """Signs, a byte order mark, empty lines, integers of any type that fit; nothing else is taken for a number."""
    for number, data in enumerate([b"\xef\xbb\xbf1\r\n+2\n\n003 \n", b"1\n2\n3"]):
        Path(f"{number}.txt").write_bytes(data)
    for number, dtype in enumerate(["<i8", ">i8", "int32", "uint64", ">u2"], 2):
        np.save(f"{number}.npy", np.array([1, 2, 3], dtype))
    files = sorted(map(str, (*Path().glob("[0-9].txt"), *Path().glob("[0-9].npy"))))
    assert len(files) == 7
    found = [told("lookup", "s.tc", "a", "--keys", file) for file in files]
    assert [[row["key"] for row in rows] for rows in found] == [[1, 2, 3]] * 7
    np.save("large.npy", np.array([1 << 63], np.uint64))
    np.save("half.npy", np.array([0.5]))
    np.savez("keys.npz", keys=np.array([1]))
    wrong = {"1_2": "a", "\uff11\uff12": "b", "9223372036854775808": "c", "1.0": "d", "1,2": "e", "9" * 5000: "f"}
    for text, name in wrong.items():
        Path(f"{name}.txt").write_text(f"1\n{text}\n", encoding="utf-8")
    Path("g.txt").write_text("1\n", encoding="utf-16")
    Path("h.txt").write_bytes(b"1\n\xe9\n")
    errors = {f"{name}.txt": "expected one int64 key per line" for name in wrong.values()} | {
        "large.npy": "large.npy cannot be used: key 9223372036854775808 does not fit in int64",
        "half.npy": "expected integers of shape (n,)",
        "keys.npz": "keys.npz is an archive (.npz): save one array of keys with np.save",
        "g.txt": "g.txt is UTF-16 text: save it as UTF-8",
        "h.txt": "h.txt is not UTF-8 text",
    }
    for file, words in errors.items():
        for command in ("lookup", "forget"):
            assert words in error_of(command, "s.tc", "a", "--keys", file)
    assert told("info", "s.tc")["rows"] == 700
    for text in ("1_2", "\uff11"):
        assert f"{text!r} is not an integer key" in error_of("lookup", "s.tc", "a", text)


@pytest.mark.parametrize("command", ["lookup", "forget"])
def test_keys_of_a_fifo_are_refused_at_once_and_those_of_a_shell_are_read(folder: Path, command: str) -> None:
    """A FIFO without a writer would wait forever. What a shell opens for the command, as <(...), has one."""
    for name in ("pipe", "pipe.npy"):
        os.mkfifo(name)
        assert "is a FIFO: pass a file of keys" in error_of(command, "s.tc", "a", "--keys", name)
    reader, writer = os.pipe()
    os.write(writer, b"1\n2\n")
    os.close(writer)
    run(command, "s.tc", "a", "--keys", f"/dev/fd/{reader}")
    os.close(reader)


def test_info_and_verify_take_a_dataset(folder: Path) -> None:
    found = told("info", "passes")
    assert [(one["samples"], one["rows"]) for one in found["passes"]] == [(2000, 700), (3000, 700)]
    assert "passes: 2 passes, 5,000 samples" in run("info", "passes")
    assert "passes is intact: 2 passes, 5,000 samples, as extracted" in run("verify", "passes")
    samples = next(folder.glob("passes/*00001*"))
    flip(samples, samples.stat().st_size // 2)
    assert "sub-dataset 1" in error_of("verify", "passes")
    (problem,) = told("verify", "passes", code=1)["problems"]
    assert "sub-dataset 1" in problem


def test_a_store_is_put_in_the_order_of_a_dataset_and_a_dataset_is_cut(folder: Path) -> None:
    assert "commit 2 has the rows in the order of passes" in run("reorganize", "s.tc", "passes")
    assert "s.tc follows passes already" in run("reorganize", "s.tc", "passes")
    assert told("reorganize", "s.tc", "passes") == {"commit": 2, "rewritten": False}
    assert "new has 9 passes with 5,000 samples" in run(
        "repartition", "passes", "new", "--rows", "650", "--batch-multiple", "50"
    )
    assert told("info", "new")["samples"] == 5000
    assert "pass either device_budget or rows" in error_of("repartition", "passes", "other")
    with tc.Store.open("empty.tc", tables=tc.PassDataset.open("passes").tables):
        pass
    assert "empty.tc has no commit, so it may follow any dataset" in run("reorganize", "empty.tc", "passes")


def test_what_is_neither_store_nor_dataset_is_said(folder: Path) -> None:
    (folder / "half" / "unfinished").mkdir(parents=True)
    for name, words in (
        (".", "is neither a store nor a dataset"),
        ("gone", "nothing at gone"),
        ("half", "is unfinished: run the same extraction again"),
    ):
        for command in ("info", "verify"):
            assert words in error_of(command, name)


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "s.tc/data.mdb"), "s.tc/data.mdb: Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (KeyboardInterrupt(), "interrupted: you can run the same command again"),
        (MemoryError(), "out of memory"),
        (ValueError("a message\nof two lines"), "a message of two lines"),
    ],
)
def test_expected_errors_are_sentences(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, words: str
) -> None:
    """For any error of the system, and Ctrl-C; a defect keeps its traceback."""
    monkeypatch.setattr("tiercache.store.info", failing(error))
    told = invoke("info", "s.tc")
    assert told.exit_code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert told.stderr.startswith(f"error: {words}")
    monkeypatch.setattr("tiercache.store.info", failing(KeyError("defect")))
    assert isinstance(invoke("info", "s.tc").exception, KeyError)


def test_commands_on_stores_name_a_dataset(folder: Path) -> None:
    for command in (
        ("lookup", "passes", "a", "1"),
        ("changes", "passes", "--since", "0"),
        ("diff", "s.tc", "passes"),
        ("compact", "passes"),
        ("rollback", "passes", "--to", "0"),
        ("reorganize", "passes", "s.tc"),
    ):
        assert error_of(*command) == "passes is a dataset: pass the directory of a store"
    assert "exported whole" in error_of("export", "passes", "out", "--format", "hugectr", "--since", "0")


def test_a_path_with_nul_is_refused(folder: Path) -> None:
    for command in (
        ("info", "a\0b"),
        ("compact", "a\0b"),
        ("diff", "s.tc", "a\0b"),
        ("lookup", "s.tc", "a", "1", "--keys", "a\0b"),
        ("reorganize", "s.tc", "a\0b"),
        ("repartition", "passes", "a\0b", "--rows", "650"),
        ("export", "s.tc", "a\0b", "--format", "numpy"),
        ("import", "a\0b", "new.tc"),
        ("extract", "part-0.parquet", "--schema", "a\0b", "--out", "new", "--device-budget", "1MiB"),
    ):
        result = invoke(*command)
        assert isinstance(result.exception, SystemExit), command
        assert result.exit_code in {1, 2}
        assert "null byte" in result.stderr or "NUL" in result.stderr


def test_the_program_shows_its_version_and_ends_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--version") == f"tiercache {tc.__version__}\n"
    done = ran("import sys; from tiercache.cli import main; sys.argv = ['tiercache', 'info', '/gone']; main()")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    monkeypatch.setattr("sys.argv", ["tiercache", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0


EXTRACT = ("extract", "--device-budget", "1MiB", "--out")
EXTRACT_ALL = ("extract", "part-0.parquet", "--schema", "schema.toml", "--device-budget", "1MiB", "--out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("info", "passes", "--segments"), "passes is a dataset: --segments is for stores"),
        (("info", "s.tc", "--curve"), "s.tc is a store: --curve and --plot are for datasets"),
        (("info", "s.tc", "--plot", "a.png"), "s.tc is a store: --curve and --plot are for datasets"),
        (("reorganize", "s.tc", "passes", "--order", "random"), "random"),
        (
            (*EXTRACT, "new", "no-*.csv", "--schema", "schema.toml"),
            "no file matches 'no-*.csv': pass files, folders or",
        ),
        ((*EXTRACT, "new", "part-0.parquet", "--schema", "none.toml"), "the schema none.toml cannot be read"),
        ((*EXTRACT_ALL, "new", "--split-by", "day"), "invalid split_by 'day': expected one of budget"),
        ((*EXTRACT_ALL, "new", "--memory-limit", "much"), "invalid size 'much'"),
        ((*EXTRACT_ALL, "part-1.parquet"), "part-1.parquet is not a directory"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in error_of(*arguments)
    assert not (folder / "new").exists()


def test_a_store_is_put_into_the_order_that_a_training_by_overlap_has(folder: Path) -> None:
    assert told("reorganize", "s.tc", "passes", "--order", "overlap")["rewritten"]
    budgets = {"device_budget": "1MiB", "host_budget": "64MiB", "order": "overlap"}
    options = tc.TierCacheOptions(reorganize=False)
    with tc.Store.open("s.tc") as store, tc.TierCache(store, "passes", progress=False, options=options, **budgets):
        pass


def test_warmup_compiles_all_kernels_and_says_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(kernels, "is_cached", lambda *, narrow: False)
    monkeypatch.setattr(kernels, "prepare", lambda notify=None, *, narrow=False: asked.append(narrow))
    done = invoke("warmup")
    assert (done.exit_code, asked) == (0, [True])
    assert "compiling the CPU kernels of tiercache" in done.output
    assert "kernels are compiled: " in done.stdout
    monkeypatch.setattr(kernels, "is_cached", lambda *, narrow: True)
    assert "expected 'cpu', 'cuda'" in error_of("warmup", "--device", "tpu")


def test_the_command_extracts(folder: Path) -> None:
    command = (
        "extract", "part-*.parquet", "--schema", "schema.toml", "--out", "new", "--device-budget", "64MiB",
        "--split-by", "rows=1000", "--batch-multiple", "1000", "--min-count", "2", "--memory-limit", "32MiB",
    )  # fmt: skip
    for begin in ("new: 5 passes, 5,000 samples, ", "new: 5 passes, 5,000 samples, already extracted, "):
        done = ran(f"import sys; from tiercache.cli import main; sys.argv = {['tiercache', *command]}; main()")
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr.startswith(begin)
    assert len(tc.PassDataset.open("new")) == 5
    more = ("--schema", "schema.toml", "--device-budget", "1MiB", "--min-count", "2", "--prior-counts", "new")
    assert run("extract", "part-0.parquet", "--out", "second", "--quiet", *more) == ""
    assert tc.PassDataset.open("second").samples == 2000
