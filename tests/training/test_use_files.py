"""The file of next uses that a run leaves beside the store: damage of it reaches no row and no commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.training.cases import SPECS, Case, assert_same_bits, resident_result, result_of, table, tiered, train
from tiercache.store import Store, verify

if TYPE_CHECKING:
    from pathlib import Path

CASE = Case(tables=(table("a", 3), table("b", 5)), specs=SPECS)


class StoppedError(Exception):
    """A run ends in its midst."""


@pytest.mark.parametrize("damage", ["a number", "two swapped", "all zeros", "a checksum", "cut short", "none"])
def test_a_damaged_file_of_next_uses_is_found_anew(tmp_path: Path, damage: str) -> None:
    """A run that goes on ends with the same bits, and its file is what was written first."""
    passes, path = CASE.cut(tmp_path / "passes"), tmp_path / "s"

    def stop(pass_index: int, _: int) -> None:
        if pass_index == 3:
            raise StoppedError

    with Store.open(path, tables=CASE.tables) as store, tiered(store, passes) as cache, pytest.raises(StoppedError):
        train(cache, CASE, each_batch=stop)
    (file,) = (path / "schedule").glob("*.gaps")
    written = file.read_bytes()
    numbers = np.frombuffer(bytearray(written), np.int32).copy()
    i = int(np.nonzero(np.diff(numbers[: numbers.size // 2]))[0][50])
    match damage:
        case "a number":
            numbers[i] += 1
        case "two swapped":
            numbers[[i, i + 1]] = numbers[[i + 1, i]]
        case "all zeros":
            numbers[:] = 0
        case "a checksum":
            numbers[-1] ^= 1
    file.write_bytes(numbers.tobytes()[: -4 if damage == "cut short" else None])
    before = file.stat().st_mtime_ns
    with Store.open(path, tables=CASE.tables) as store, tiered(store, passes) as cache:
        model = train(cache, CASE)
        assert_same_bits(result_of(store, passes, model), resident_result(CASE, passes))
    assert verify(path)["problems"] == []
    assert file.read_bytes() == written
    assert (file.stat().st_mtime_ns == before) == (damage == "none")
