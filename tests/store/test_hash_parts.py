"""The keys of a store are checked in one reading, however many there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.conftest import small_tables
from tiercache.store import Store, StoreFullError, hash_parts, key_check
from tiercache.store.full_disk import check_room
from tiercache.store.hash_parts import HashParts
from tiercache.store.testing.world import World
from tiercache.store.verification import Verification


@given(st.lists(st.integers(0, 60), max_size=12), st.integers(1, 200), st.integers(1, 80), st.integers(0, 9))
def test_every_hash_comes_back_once_in_its_part(runs: list[int], part_rows: int, batch_rows: int, seed: int) -> None:
    """With its number, in the order in which it came, and no part before another's hashes."""
    generator = np.random.default_rng(seed)
    given_hashes = [generator.integers(0, 1 << 64, size=size, dtype=np.uint64) for size in runs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hash_parts, "BATCH_ROWS", batch_rows)
        with HashParts(None, sum(runs), part_rows) as parts:
            for number, hashes in enumerate(given_hashes):
                parts.add(number, hashes)
            found = list(parts.parts())
    assert len(found) == max(1, -(-sum(runs) // part_rows))
    last = -1
    for hashes, _ in found:
        if hashes.size:
            assert int(hashes.min()) > last
            last = int(hashes.max())
    numbers = np.concatenate([numbers for _, numbers in found])
    everything = np.concatenate([hashes for hashes, _ in found])
    for number, hashes in enumerate(given_hashes):
        order = np.argsort((hashes >> np.uint64(32)) * np.uint64(len(found)) >> np.uint64(32), kind="stable")
        np.testing.assert_array_equal(everything[numbers == number], hashes[order])


def report(path: Path) -> tuple[dict[str, Any], int]:
    """Return the verification's report and the bytes of keys that it read."""
    with Store.open(path, mode="r") as store:
        found = Verification(store).run()
        return {name: value for name, value in found.items() if name != "seconds"}, store.counters.key_bytes_read


@pytest.mark.parametrize("retention", [1, 3])
@pytest.mark.parametrize("careless", [False, True])
def test_keys_are_read_once_whatever_fits_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retention: int, *, careless: bool
) -> None:
    """Of a few rows at a time the same is found, with as much reading, and no file is left."""
    world = World(small_tables(), num_passes=4, block_rows=20)
    with Store.open(tmp_path / "s", tables=world.tables, retention=retention) as store:
        world.run(store, 5)
    if careless:
        monkeypatch.setattr(Store, "first_range", lambda *_: 0)
    at_once = report(tmp_path / "s")
    assert any("have two live rows" in problem for problem in at_once[0]["problems"]) == careless
    assert careless or not at_once[0]["problems"]
    before = sorted(tmp_path.rglob("*"))
    for rows in (1, 7, 50):
        monkeypatch.setattr(key_check, "SLICE_ROWS", rows)
        monkeypatch.setattr(hash_parts, "BATCH_ROWS", 3 * rows)
        assert report(tmp_path / "s") == at_once
    assert sorted(tmp_path.rglob("*")) == before


def test_the_temporary_directory_stands_in_for_a_folder_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one in which this process may not write; without either, the sentence says how much is needed."""
    hashes = np.arange(10, dtype=np.uint64) << np.uint64(60)
    full: list[Path] = [tmp_path]

    def room(path: Path, needed_bytes: int) -> None:
        if path in full:
            raise OSError(28, "No space left on device")
        check_room(path, needed_bytes)

    monkeypatch.setattr(hash_parts, "check_room", room)
    for folder in (tmp_path, tmp_path / "missing"):
        with HashParts(folder, 10, 3) as parts:
            parts.add(0, hashes)
            np.testing.assert_array_equal(np.concatenate([found for found, _ in parts.parts()]), hashes)
    full.append(Path(hash_parts.tempfile.gettempdir()))
    with pytest.raises(StoreFullError, match=r"the check of the keys of a store needs 120 more bytes"):
        HashParts(tmp_path, 10, 3)
