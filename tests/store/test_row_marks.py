"""Row marks: marks are read back, for any windows and passes."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.store import compaction_plan
from tiercache.store.compaction_plan import IDLE, STALE, USED, RowMarks, mark_codes
from tiercache.store.files import ScratchFile


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 200),
    seed=st.integers(0, 99),
    window=st.sampled_from([4, 8, 64, 1 << 20]),
    passes=st.integers(1, 4),
    chunk=st.integers(1, 50),
)
def test_marks_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: int, seed: int, window: int, passes: int, chunk: int
) -> None:
    """In several ascending sweeps over disjoint rows, in chunks cut anywhere by windows."""
    rng = np.random.default_rng(seed)
    expected, owner = rng.choice([IDLE, STALE, USED], rows).astype(np.uint8), rng.integers(0, passes, rows)
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch, ScratchFile(folder, "a test") as file:
        patch.setattr(compaction_plan, "_WINDOW_ROWS", window)
        marks = RowMarks(rows, file)
        for number in range(passes):
            mine = [np.nonzero((owner == number) & (expected == mark))[0] for mark in (STALE, USED)]
            codes = np.sort(np.concatenate([mark_codes(mine[0], STALE), mark_codes(mine[1], USED)]))
            for low in range(0, codes.size, chunk):
                marks.set(codes[low : low + chunk])
        marks.flush()
        for low, high in [(0, rows), *(sorted(rng.integers(0, rows + 1, 2).tolist()) for _ in range(5))]:
            np.testing.assert_array_equal(marks.read(low, high), expected[low:high])


def test_marks_take_a_quarter_of_a_byte_a_row_and_room_only_where_rows_are_marked(tmp_path: Path) -> None:
    with ScratchFile(tmp_path, "a test") as file:
        marks = RowMarks(40_000_000, file)
        marks.set(mark_codes(np.array([39_999_999]), USED))
        marks.flush()
        assert marks.read(39_999_998, 40_000_000).tolist() == [IDLE, USED]
        assert marks.read(0, 3).tolist() == [IDLE] * 3
        status = os.fstat(marks._file._file.fileno())
        assert status.st_size == 10_000_000
        assert status.st_blocks * 512 <= 2 << 20
