"""Verification takes as much memory of a store whose keys exceed it as its bound says."""

from pathlib import Path

import numpy as np
import pytest

from tests.memory import Peak, run_alone
from tiercache.store import SGD, Cursor, Range, Store, Table, Zeros, hash_keys
from tiercache.store.base_segment import base_layout
from tiercache.store.key_invariants import SORT_BYTES, VERIFY_BYTES
from tiercache.store.verification import Verification

pytestmark = pytest.mark.disk

ONE = Table(name="one", dim=1, optimizer=SGD(learning_rate=0.1), initializer=Zeros())
PASSES, PASS_ROWS = 3, 6_000_000


def make(path: Path) -> None:
    """Dump pass after pass, each with other keys."""
    with Store.open(path, tables=[ONE]) as store:
        layout = base_layout(store.groups[0], [Range(next_use=9, table_rows=(PASS_ROWS,))])
        rows = np.zeros(layout.block_rows * ONE.row_bytes, np.uint8)
        for index in range(PASSES):
            keys = np.arange(index * PASS_ROWS, (index + 1) * PASS_ROWS)
            keys = keys[np.argsort(hash_keys(keys, ONE.table_id))]
            cuts = [(b, *layout.rows_of_block(b)) for b in range(layout.num_blocks)]
            blocks = ((0, b, rows[: (high - low) * ONE.row_bytes], keys[low:high]) for b, low, high in cuts)
            store.append(index, [layout], blocks)
            store.publish(Cursor(index + 1, 0), state=b"", schedule_digest="", settings={}, environment={})


def measure(path: Path) -> None:
    """Verify, and compare what is taken with the bound."""
    peak = Peak()
    with Store.open(path, mode="r") as store:
        peak.begin()
        assert not Verification(store).run()["problems"]
        assert peak.taken < VERIFY_BYTES
        assert store.counters.spill_bytes_written == 8 * PASSES * PASS_ROWS


def test_keys_that_exceed_the_memory_of_verification_are_sorted_in_a_file(tmp_path: Path) -> None:
    """18 million of them, 144 MB of hashes, of rows of 4 bytes: hashes take more memory than rows."""
    assert 8 * PASSES * PASS_ROWS > SORT_BYTES
    make(tmp_path / "s")
    run_alone(measure, tmp_path / "s")
