"""What changed in a sharded store since one of its commits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import tiercache as tc
from tests.ranks import sharded_world
from tests.ranks.sharded_world import (
    WHOLE,
    expected,
    roll_back,
    train_shards,
    whole_row,
)
from tiercache.store import CommitMissingError, Cursor

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_changed_since_a_commit_is_what_was_trained_since(tmp_path: Path, num_ranks: int) -> None:
    """Whole rows of every sharding, since every commit that is kept, at any of them; after a rollback too."""
    path = tmp_path / "s"
    assert train_shards(path, num_ranks, 6, retention=4) == [None] * num_ranks
    sharded_world.ahead(path, num_ranks, 0)
    assert train_shards(path, num_ranks, 1) == [None] * num_ranks
    for turn in range(2):
        with tc.Store.open(path, mode="r") as newest:
            for at in newest.commits:
                store = newest.at(at.id)
                for since in newest.commits:
                    if since.id <= at.id:
                        check_changes(store, since.id, since.cursor)
                check_changes(store, -1, None)
                words = "knows no changes since" if at.id < since.id else "has no commit 99|knows no changes"
                with pytest.raises(CommitMissingError, match=words):
                    store.changed_rows("item", since=max(99 * (at.id == since.id), since.id))
            gone = newest.commits[0].id - 1
            with pytest.raises(CommitMissingError, match=rf"has no commit {gone}: give .*, or take all rows with -1"):
                list(newest.changes("item", since=gone))
            if not turn:
                to = newest.commits[1].id
        roll_back(path, to)
        assert train_shards(path, num_ranks, 1) == [None] * num_ranks


def test_changes_of_slices_read_the_keys_of_each_part_a_few_times(tmp_path: Path) -> None:
    """However many chunks there are."""
    path = tmp_path / "s"
    assert train_shards(path, 2, 7) == [None] * 2
    with tc.Store.open(path, mode="r") as store:
        first, other = store.shards
        rows = store.live_rows("word")
        keys = np.concatenate([keys for keys, _ in store.changes("word", since=-1)])
        assert sorted(keys.tolist()) == sorted(expected(store.commit.cursor)["word"])
        assert keys.size == rows
        assert 8 * rows <= first.counters.key_bytes_read == other.counters.key_bytes_read <= 4 * 8 * rows


def check_changes(store: tc.Store, since: int, cursor: Cursor | None) -> None:
    """Assert which rows changed, and how many."""
    before = {name: {} for name in WHOLE} if cursor is None else expected(cursor)
    for name, rows in expected(store.commit.cursor).items():
        wanted = {key for key, trained in rows.items() if before[name].get(key) != trained}
        found = dict[int, list[bytes]]()
        for keys, fields in store.changes(name, since=since):
            assert list(fields) == [field.name for field in WHOLE[name].fields]
            for i, key in enumerate(keys.tolist()):
                assert key not in found
                found[key] = [values[i].tobytes() for values in fields.values()]
        assert found.keys() == wanted
        assert store.changed_rows(name, since=since) == len(wanted)
        for key, values in found.items():
            assert values == [one[0].tobytes() for one in whole_row(WHOLE[name], key, *rows[key])]
