"""The size of a store on disk, pass after pass."""

from pathlib import Path

import numpy as np
import pytest

from tests.store.big import BIG, dump, publish
from tiercache.store import Store

TRAINED, PASSES, PASS_ROWS = 50, 6, 1000
PASS_BYTES = PASS_ROWS * BIG.row_bytes
RETENTIONS = [("lmdb", 1), ("lmdb", 3), ("zarr", 1), ("zarr", 3)]
"""Engines, and the commits that are kept."""


@pytest.mark.parametrize(("engine", "commits"), RETENTIONS)
def test_a_store_stays_within_its_live_rows_two_passes_and_15_percent(
    tmp_path: Path, engine: str, commits: int
) -> None:
    """At each of 50 commits and for any next uses; a further commit that is kept may cost a sub-dataset.

    Live rows are the most of an epoch: what was needed at its fullest pass stays in the file for the next epoch.
    """
    rng = np.random.default_rng(0)
    shapes = [rng.multinomial(PASS_ROWS, rng.dirichlet(np.ones(PASSES))) for _ in range(PASSES)]
    waiting: dict[int, int] = {}
    live, sizes = [], []
    with Store.open(tmp_path / "s", tables=[BIG], engine=engine, retention=commits) as store:
        for pass_index in range(TRAINED):
            rows = {pass_index + gap: int(n) for gap, n in enumerate(shapes[pass_index % PASSES], 1)}
            dump(store, pass_index, rows, block_bytes=PASS_BYTES // 32)
            publish(store, pass_index + 1)
            waiting.pop(pass_index, None)
            for use, n in rows.items():
                waiting[use] = waiting.get(use, 0) + n
            live.append(sum(waiting.values()) * BIG.row_bytes)
            sizes.append(file_bytes(tmp_path / "s", store))
        assert len(store.commits) == commits
    fullest = [max(live[max(0, pass_index + 1 - PASSES) : pass_index + 1]) for pass_index in range(TRAINED)]
    allowed = [1.15 * (num_bytes + (1 + commits) * PASS_BYTES) for num_bytes in fullest]
    beyond = [
        (pass_index, size, most)
        for pass_index, (size, most) in enumerate(zip(sizes, allowed, strict=True))
        if size > most
    ]
    assert not beyond


def file_bytes(path: Path, store: Store) -> int:
    """Return the bytes of all files below ``path``."""
    store._opened.engine.shrink()  # dead chunks are deleted beside the training
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
