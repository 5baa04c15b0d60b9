"""Moved rows when a schedule begins, and the result of a process that dies meanwhile."""

import copy
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.apart import ran
from tests.store.big import append
from tests.store.conftest import small_tables
from tests.store.test_retained_segments import check
from tests.store.world import World, WorldUses
from tiercache.store import MemoryEngine, Range, SegmentLayout, Store, Table, Zeros, hash_keys
from tiercache.store.optimizer import SGD

WIDE = Table(name="wide", dim=64, optimizer=SGD(learning_rate=0.1), initializer=Zeros())


def days(store: Store, passes: int, rows: int) -> None:
    """Commit passes that each dump ``rows`` rows with new keys, in pages of 8 rows."""
    for pass_index in range(passes):
        keys = np.arange(pass_index * rows, (pass_index + 1) * rows)
        keys = keys[np.argsort(hash_keys(keys, WIDE.table_id))]
        layout = SegmentLayout.of(
            row_bytes=256,
            page_rows=8,
            block_bytes=256 * 64,
            ranges=(Range(next_use=pass_index + passes, table_rows=(rows,)),),
        )
        append(store, pass_index, layout, np.repeat(keys.astype(np.float32), 64).view(np.uint8), keys)
    store.publish((passes, 0), state=b"", schedule_digest="old", settings={}, environment={})


@pytest.mark.parametrize("spread", [False, True])
def test_what_a_schedule_moves_is_in_proportion_to_what_it_uses(spread: bool) -> None:
    """5 % of 20 passes' rows are used, all from one pass or equally from each: exactly these are written.

    Pages with a used row are read once, all keys once, and keys of blocks with a used row once more.
    """
    passes, rows = 20, 1024
    with Store.open(None, tables=[WIDE], engine=MemoryEngine()) as store:
        days(store, passes, rows)
        keys = range(0, passes * rows, passes) if spread else range(3 * rows, 4 * rows)
        used = {("wide", key): 0 for key in [*keys, *range(10**6, 10**6 + 50)]}
        pages, blocks = set(), set()
        for segment in store.segments:
            stored = np.concatenate([store.reader.keys(segment, 0, b) for b in range(segment.layouts[0].num_blocks)])
            mine = np.nonzero([("wide", key) in used for key in stored.tolist()])[0]
            pages |= {(segment.id, row // 8) for row in mine.tolist()}
            blocks |= {(segment.id, row // 64) for row in mine.tolist()}
        before = copy.copy(store.counters.__dict__)
        commit = store.rewrite(WorldUses(store.tables, used, slice_keys=500), schedule_digest="new")
        done = {name: value - before[name] for name, value in store.counters.__dict__.items() if name != "_lock"}
        assert len(commit.retained_ids) == (passes if spread else passes - 1)
        assert done["rows_written"] == rows + 50
        assert done["row_bytes_read"] == len(pages) * 8 * 256
        assert done["key_bytes_read"] == 8 * passes * rows + 8 * 64 * len(blocks)
        assert done["spill_bytes_written"] == 0
        assert store.live_rows("wide") == passes * rows + 50
        assert {
            key: values[0, 0]
            for keys, fields in store.changes("wide", since=-1)
            for key, values in zip(keys.tolist(), fields["vector"][:, None], strict=True)
        } == {**{key: float(key) for key in range(passes * rows)}, **dict.fromkeys(range(10**6, 10**6 + 50), 0.0)}


KILLED = """
import os, signal, sys
from tests.store.conftest import small_tables
from tiercache.store import Store
from tests.store.world import World

path, engine, stage = sys.argv[1:]
world = World(small_tables(), num_passes=4, keys_per_pass=60, universe=200)
with Store.open(path, tables=small_tables(), engine=engine) as store:
    world.run(store, 5)
    world.keys_per_pass = 20
    world.follow(store, world.draw(1), lambda what, _: what == stage and os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["lmdb", "zarr"])
@pytest.mark.parametrize("stage", ["sort", "write"])
def test_a_process_killed_while_it_reorganizes_leaves_the_commit_before(
    kind: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.tc"
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    assert ran(KILLED, path, kind, stage).returncode == -signal.SIGKILL
    world = World(small_tables(), num_passes=4, keys_per_pass=60, universe=200)
    with Store.open(None, tables=world.tables, engine=MemoryEngine()) as memory:
        world.run(memory, 5)
    with Store.open(path) as store:
        assert (store.commit.id, store.commit.retained_ids) == (4, frozenset())
        check(store, world)
        assert not [*path.glob("tmp*"), *(tmp_path / "tmp").iterdir()]
        assert [entry.name for entry in tmp_path.iterdir() if entry.name != "tmp"] == ["s.tc"]
        world.keys_per_pass = 20
        world.follow(store, world.draw(1))
        assert store.commit.retained_ids
        world.run(store, 1)
        check(store, world)
