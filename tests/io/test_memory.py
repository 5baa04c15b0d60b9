"""Memory: exports and imports of more rows than fit."""

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiercache as tc
from tests.io.cases import FORMATS
from tests.memory import Peak, run_alone
from tests.store.big import BIG
from tiercache.io import parquet_format
from tiercache.store import Store, load_rows

pytestmark = pytest.mark.disk

MEMORY, OTHER = 8 << 20, 40 << 20
ROWS = 50_000


def chunks(rows: int) -> Iterator[tuple[str, Any]]:
    for low in range(0, rows, 1000):
        keys = np.arange(low, low + 1000, dtype=np.int64)
        yield "big", (keys, tuple(np.full((1000, f.width), low, dtype=np.float32) for f in BIG.fields))


def measure(folder: Path) -> None:
    """Export and import something small, then something large, and write the additional memory to a file."""
    warnings.simplefilter("ignore")
    parquet_format._GROUP_BYTES = 2 << 20

    def run(name: str, format_: str) -> None:
        source, out, copy = folder / f"{name}.tc", folder / f"{name}-{format_}", folder / f"{name}-{format_}.tc"
        tc.export_store(source, out, format=format_, memory_bytes=MEMORY)
        tc.import_store(out, copy, initial_state=True, memory_bytes=MEMORY)
        shutil.rmtree(out)
        shutil.rmtree(copy)

    for name, rows in (("small", 1000), ("large", ROWS)):
        with Store.open(folder / f"{name}.tc", tables=[BIG]) as store:
            load_rows(store, chunks(rows), memory_bytes=MEMORY)
    peak, taken = Peak(), {}
    for format_ in FORMATS:
        run("small", format_)
        peak.begin()
        run("large", format_)
        taken[format_] = peak.taken
    (folder / "taken.json").write_text(json.dumps(taken))


def test_rows_that_exceed_the_memory_pass_through_it(tmp_path: Path) -> None:
    assert ROWS * BIG.row_bytes > 2 * (MEMORY + OTHER)
    run_alone(measure, tmp_path)
    taken = json.loads((tmp_path / "taken.json").read_text())
    assert taken.keys() == set(FORMATS)
    assert max(taken.values()) < MEMORY + OTHER, taken
