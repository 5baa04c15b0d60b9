"""Control characters in cells, file names and table names are escaped in output."""

from pathlib import Path

import pytest
from rich.console import Console

import tiercache as tc
from tests.cli.command import error_of, invoke, run
from tests.io.cases import filled, random_rows
from tiercache.cli.output import Output, new_table
from tiercache.sizes import printable

HOSTILE = {
    "window title": "\x1b]0;owned\x07",
    "cursor": "\x1b[2J",
    "8-bit sequence": "\x9b31m",
    "backspace": "abc\x08\x08",
    "carriage return": "good\rbad",
    "reversed letters": "\u202egpj.exe",
    "null": "\x00",
    "surrogate": "\udce9",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_control_characters_are_escaped(name: str) -> None:
    text = printable(f"ключ 键 é [b] {HOSTILE[name]}\n")
    assert text.startswith("ключ 键 é [b] ")
    assert text.endswith("\n")
    assert text[:-1].isprintable()
    assert "\\" in text


@pytest.mark.parametrize("name", ["window title", "cursor", "8-bit sequence", "reversed letters"])
def test_a_cell_of_a_file_reaches_the_terminal_escaped(tmp_path: Path, name: str) -> None:
    (tmp_path / "s.toml").write_text('[label]\ncolumn = "y"\n[features.a]\n')
    (tmp_path / "x.csv").write_text(f"y,a\n0,{HOSTILE[name]}\n")
    options = "--schema", tmp_path / "s.toml", "--out", tmp_path / "out", "--device-budget", "1MiB"
    assert error_of("extract", tmp_path / "x.csv", *options).isprintable()
    hostile = tmp_path / f"{HOSTILE[name]}.csv"
    hostile.write_text("y,b\n0,1\n")
    assert error_of("extract", hostile, *options).isprintable()


def test_texts_and_tables_of_commands_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    output, text = Output(as_json=False, quiet=False), f"{HOSTILE['window title']}[b]"

    def shown(console: Console) -> None:
        table = new_table(text, text, text)
        table.add_row(text, text)
        console.print(table)
        console.print(text)

    output.result(None, shown)
    output.result(None, text)
    found = capsys.readouterr().out
    assert "\x1b" not in found
    assert "\x07" not in found
    assert found.count(r"\x1b]0;owned\x07[b]") == 7


def test_paths_that_commands_report_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE["window title"]
    folder.mkdir()
    (folder / "s.toml").write_text('[label]\ncolumn = "y"\n[features.a]\n')
    (folder / "x.csv").write_text("y,a\n0,1\n")
    options = "--schema", folder / "s.toml", "--out", folder / "out", "--device-budget", "1MiB"
    tables = tc.Schema.load(folder / "s.toml").tables
    filled(folder / "s.tc", tables, random_rows(tables, [3])).close()
    extracted = invoke("extract", folder / "x.csv", *options)
    reorganized = invoke("reorganize", folder / "s.tc", folder / "out")
    (damaged,) = (folder / "out").glob("pass-*")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    verified = invoke("verify", folder / "out")
    sizes = "--rows", "1e10", "--samples", "1e11", "--passes", "200", "--disk-gbps", "2"
    estimated = invoke("estimate", *sizes, "--store", folder)
    for ended, code in ((extracted, 0), (reorganized, 0), (verified, 1), (estimated, 0)):
        assert ended.exit_code == code, ended.output
        assert ended.stderr
        assert "\x1b" not in ended.output


def test_the_help_of_extract_shows_sections_in_brackets() -> None:
    shown = run("extract", "--help")
    assert "[source] format" in shown
    assert "\\[" not in shown
