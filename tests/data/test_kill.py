"""kill -9 at any moment: the same call resumes and ends with the same files, bit for bit."""

from __future__ import annotations

import random
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.crash.told import finish, start
from tests.data.cases import rich_columns, write_parquet
from tests.data.killed import run
from tests.files import files_of
from tiercache.data.dataset import PassDataset
from tiercache.data.resume import ExtractionState
from tiercache.store.files import replace_file

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess
    from pathlib import Path

OPTIONS: dict[str, dict[str, Any]] = {
    "budget": {"device_budget": "120KiB", "batch_multiple": 256, "memory_limit": "16MiB"},
    "rows": {"device_budget": "1GiB", "split_by": "rows=1500", "batch_multiple": 500, "memory_limit": "16MiB"},
    "min_count": {"device_budget": "110KiB", "batch_multiple": 256, "memory_limit": "16MiB", "min_count": 2},
}


def extraction(folder: Path, name: str, fatal_event: int = -1) -> ForkServerProcess:
    """Start an extraction in a child process that dies at an event."""
    return start(run, folder, OPTIONS[name], fatal_event)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data in two files."""
    folder = tmp_path_factory.mktemp("killed")
    write_parquet(folder, rich_columns(8000), [0, 3000, 8000])
    return folder


@pytest.fixture
def folder(data: Path) -> Path:
    """Return the folder with data and no dataset: the same files, with the same times, for every test."""
    shutil.rmtree(data / "out", ignore_errors=True)
    return data


@pytest.fixture(scope="module")
def whole(data: Path) -> dict[str, tuple[dict[str, bytes], int]]:
    """Return the files and the number of events of undisturbed extractions, by the name of their options."""
    results = {}
    for name in OPTIONS:
        assert finish(extraction(data, name)) == 0
        assert len(PassDataset.open(data / "out")) > 3
        results[name] = (files_of(data / "out"), int((data / "events").read_text()))
        shutil.rmtree(data / "out")
    return results


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPTIONS)
def test_killed_at_any_event_it_ends_with_the_same_files(
    folder: Path, whole: dict[str, tuple[dict[str, bytes], int]], name: str
) -> None:
    """Each life dies at another batch, before closing a pass or after it; the last one reaches the end."""
    files, events = whole[name]
    rng = random.Random(name)
    for fatal_event in [*sorted(rng.randint(2, 1 + events // 5) for _ in range(5)), -1]:
        assert not (folder / "out" / "dataset.json").exists()
        assert finish(extraction(folder, name, fatal_event)) == (0 if fatal_event < 0 else -signal.SIGKILL)
    assert files_of(folder / "out") == files


def test_killed_at_any_time_it_ends_with_the_same_files(
    folder: Path, whole: dict[str, tuple[dict[str, bytes], int]]
) -> None:
    """Kills come at any time: in the middle of a write, between two renames."""
    rng = random.Random(1)
    deaths = 0
    while deaths < 20:
        process = extraction(folder, "budget")
        while not (folder / "out" / "unfinished").exists() and process.is_alive():
            time.sleep(0.002)  # a kill before the first file tests nothing
        time.sleep(rng.random() * 0.15)
        process.kill()
        if finish(process) == 0:
            break
        deaths += 1
    assert deaths > 0
    assert finish(extraction(folder, "budget")) == 0
    assert files_of(folder / "out") == whole["budget"][0]


def test_a_death_after_the_last_step_leaves_a_finished_set(
    folder: Path, whole: dict[str, tuple[dict[str, bytes], int]]
) -> None:
    """If the manifest was written but the work folder not yet deleted, the next call only cleans up."""
    assert finish(extraction(folder, "budget")) == 0
    work = folder / "out" / "unfinished"
    work.mkdir()
    manifest = PassDataset.open(folder / "out").manifest
    ExtractionState(options=manifest.options, inputs=manifest.inputs, passes=manifest.passes).write(work)
    replace_file(work / "pass-00009.safetensors", b"half")
    assert finish(extraction(folder, "budget")) == 0
    assert files_of(folder / "out") == whole["budget"][0]
