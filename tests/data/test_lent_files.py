"""A process ends after Arrow has let go of the Python files that it reads."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tiercache.data import text_reader
from tiercache.data.inputs import find_inputs
from tiercache.data.text_fields import LentFile
from tiercache.schema import Schema

HELD = """
import io, sys, threading, time
from tiercache.data.text_fields import LentFile

def hold(files):
    while not ended.is_set():
        time.sleep(0.001)
    time.sleep(0.2)
    print("released", flush=True)
    files.clear()

ended = threading.Event()
threading.Thread(target=hold, args=([LentFile(io.BytesIO(b""))],), daemon=True).start()
ended.set()
"""
FAILED = """
import sys, tiercache as tc
from tiercache.data import text_fields
text_fields._EXIT_SECONDS = 1e9
schema = tc.Schema(features=(tc.Feature(name="u"),), label=None, dense=())
tc.extract(sys.argv[1], schema, sys.argv[2], device_budget="1GiB", progress=False)
"""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120
    )


def test_the_end_of_a_process_waits_for_a_thread_that_holds_a_file() -> None:
    done = run(HELD)
    assert (done.returncode, done.stdout) == (0, "released\n")


def test_a_failed_extraction_holds_no_file(tmp_path: Path) -> None:
    """Though the traceback is kept until the end, which would not come."""
    for text, message in (
        ("u;v\n1;2\n", "set delimiter"),
        ("u,v\n1,2\n3\n", "it has 1 field"),
        ("u\nx\n", "cannot be read"),
    ):
        (tmp_path / "data.csv").write_text(text)
        done = run(FAILED, tmp_path / "data.csv", tmp_path / "out")
        assert done.returncode == 1
        assert message in done.stderr


@pytest.mark.parametrize("name", ["day_0", "day_0.gz"])
def test_a_reader_of_a_url_gets_a_lent_file_and_one_of_a_path_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Criteo's files need no Python between Arrow and a path; a URL is a Python file however it is wrapped."""
    given, open_csv = list[Any](), text_reader.pacsv.open_csv
    monkeypatch.setattr(
        text_reader.pacsv, "open_csv", lambda file, **more: given.append(file) or open_csv(file, **more)
    )
    schema, line = Schema.of(None, "criteo"), b"\t".join([b"1"] * 40) + b"\n"
    for place in (str(tmp_path), "memory://lent"):
        with fsspec.open(f"{place}/{name}", "wb", compression="infer") as file:
            file.write(line)
        (found,) = find_inputs(f"{place}/{name}", "criteo")
        text_reader.TextReader(found, schema, [])
    assert [isinstance(file, LentFile) for file in given] == [False, True]
