"""Memory: exports and imports of more rows than they may hold."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tiercache as tc
from tests.exchange.cases import FORMATS
from tests.store.big import BIG
from tiercache.exchange import parquet_file
from tiercache.store import Store, fill

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.disk

MEMORY, BESIDE = 8 << 20, 40 << 20
ROWS = 50_000


def anonymous_bytes() -> int:
    """Return the memory of this process that is not backed by files."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def chunks(rows: int) -> Iterator[tuple[str, Any]]:
    """Yield rows in the order of keys."""
    for low in range(0, rows, 1000):
        keys = np.arange(low, low + 1000, dtype=np.int64)
        yield "big", (keys, tuple(np.full((1000, f.width), low, dtype=np.float32) for f in BIG.fields))


def measure(folder: Path) -> None:
    """Export and import something small, then something large, and leave behind what that took beside the small."""
    warnings.simplefilter("ignore")
    parquet_file._GROUP_BYTES = 2 << 20
    peak = [0]

    def watch() -> None:
        while True:
            peak[0] = max(peak[0], anonymous_bytes())
            time.sleep(0.005)

    def run(name: str, format_: str) -> None:
        source, out, copy = folder / f"{name}.tc", folder / f"{name}-{format_}", folder / f"{name}-{format_}.tc"
        tc.export_store(source, out, format=format_, memory_bytes=MEMORY)
        tc.import_store(out, copy, initial_state=True, memory_bytes=MEMORY)
        shutil.rmtree(out)
        shutil.rmtree(copy)

    for name, rows in (("small", 1000), ("large", ROWS)):
        with Store.open(folder / f"{name}.tc", tables=[BIG]) as store:
            fill(store, chunks(rows), memory_bytes=MEMORY)
    threading.Thread(target=watch, daemon=True).start()
    taken = {}
    for format_ in FORMATS:
        run("small", format_)
        before = peak[0] = anonymous_bytes()
        run("large", format_)
        taken[format_] = peak[0] - before
    (folder / "taken.json").write_text(json.dumps(taken))


def test_rows_that_exceed_the_memory_pass_through_it(tmp_path: Path) -> None:
    """In every format, what the process holds beside its libraries stays far below the rows."""
    assert ROWS * BIG.row_bytes > 2 * (MEMORY + BESIDE)
    process = multiprocessing.get_context("spawn").Process(target=measure, args=(tmp_path,))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    taken = json.loads((tmp_path / "taken.json").read_text())
    assert taken.keys() == set(FORMATS)
    assert max(taken.values()) < MEMORY + BESIDE, taken
