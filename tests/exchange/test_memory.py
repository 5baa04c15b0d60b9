"""Memory: exports and imports of more rows than they may hold."""

from __future__ import annotations

import multiprocessing
import re
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

MEMORY, BESIDE = 16 << 20, 40 << 20
ROWS = 60_000


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


def measure(folder: Path, format_: str) -> None:
    """Export and import something small, then something large, and leave behind what that took beside the small."""
    warnings.simplefilter("ignore")
    parquet_file._GROUP_BYTES = 4 << 20

    def run(name: str, rows: int) -> None:
        with Store.open(folder / f"{name}.tc", tables=[BIG]) as store:
            fill(store, chunks(rows), memory_bytes=MEMORY)
            tc.export_store(store, folder / name, format=format_, memory_bytes=MEMORY)
        tc.import_store(folder / name, folder / f"{name}-copy.tc", initial_state=True, memory_bytes=MEMORY)

    run("small", 1000)
    before, peak = anonymous_bytes(), [0]

    def watch() -> None:
        while True:
            peak[0] = max(peak[0], anonymous_bytes())
            time.sleep(0.005)

    threading.Thread(target=watch, daemon=True).start()
    run("large", ROWS)
    (folder / "peak").write_text(str(peak[0] - before))


@pytest.mark.parametrize("format_", FORMATS)
def test_rows_that_exceed_the_memory_pass_through_it(tmp_path: Path, format_: str) -> None:
    """What the process holds beside its libraries stays below what it may, and far below the rows."""
    assert ROWS * BIG.row_bytes > 2 * (MEMORY + BESIDE)
    process = multiprocessing.get_context("spawn").Process(target=measure, args=(tmp_path, format_))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    assert int((tmp_path / "peak").read_text()) < MEMORY + BESIDE
