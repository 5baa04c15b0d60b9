"""Processes that read a store while another one writes it, and check every row.

``python -m tests.store.reading_process FOLDER SECONDS SEED`` reads ``FOLDER/s`` and prints its counts as JSON.
"""

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercache.store import SGD, CommitMissingError, Cursor, SegmentLayout, Store, Table, hash_keys

NUM_PASSES, NUM_KEYS = 5, 3000
TABLES = (Table(name="u", dim=4, optimizer=SGD()), Table(name="w", dim=4, optimizer=SGD()))
KEYS = np.arange(NUM_KEYS, dtype=np.int64)
IN_PASS = np.stack([(KEYS * 2654435761 + one * 40503) % 1009 % 3 != 0 for one in range(NUM_PASSES)])
"""True for each key of each sub-dataset."""


def trained_in(cursor: int) -> NDArray[np.int64]:
    """Return the last pass before ``cursor`` that trained each key, -1 for none; all numbers of its row have this
    value.
    """
    found = np.full(NUM_KEYS, -1)
    for one in range(max(0, cursor - NUM_PASSES), cursor):
        found[IN_PASS[one % NUM_PASSES]] = one
    return found


def next_uses(pass_index: int) -> NDArray[np.int64]:
    """Return the next pass after ``pass_index`` that needs each key, -1 for none."""
    found = np.full(NUM_KEYS, -1)
    for one in range(pass_index + NUM_PASSES, pass_index, -1):
        found[IN_PASS[one % NUM_PASSES]] = one
    return found


class Uses:
    """The first uses of all keys from a pass on."""

    def __init__(self, pass_index: int) -> None:
        self._uses = next_uses(pass_index - 1)

    def counts(self, _: str) -> dict[int, int]:
        """Return the number of keys that each pass is the first to use."""
        return dict(Counter(self._uses[self._uses >= 0].tolist()))

    def slices(self, name: str) -> Any:
        """Yield keys in hash order, with their first uses."""
        keys = in_order(KEYS[self._uses >= 0], {table.name: table for table in TABLES}[name])
        yield keys, self._uses[keys]


def in_order(keys: NDArray[np.int64], table: Table) -> NDArray[np.int64]:
    return keys[np.argsort(hash_keys(keys, table.table_id))]


def train(store: Store, pass_index: int) -> None:
    """Append the dump of a pass."""
    (group,) = store.groups
    uses = next_uses(pass_index)
    ranges = list(range(pass_index + 1, pass_index + NUM_PASSES + 1))
    keys = [
        in_order(KEYS[IN_PASS[pass_index % NUM_PASSES] & (uses == use)], table)
        for use in ranges
        for table in group.tables
    ]
    counts = np.array([part.size for part in keys]).reshape(len(ranges), -1)
    layout = SegmentLayout(
        row_bytes=group.row_bytes, page_rows=50, block_bytes=400 * group.row_bytes, next_use_R=np.array(ranges),
        table_rows_RT=counts,
    )  # fmt: skip
    every = np.concatenate(keys)
    data = np.full(every.size * group.row_bytes // 4, float(pass_index), np.float32).view(np.uint8)
    bounds = [layout.rows_of_block(block) for block in range(layout.num_blocks)]
    blocks = (
        (0, block, data[low * group.row_bytes : high * group.row_bytes], every[low:high])
        for block, (low, high) in enumerate(bounds)
    )
    store.append(pass_index, [layout], blocks)


def commit(store: Store, pass_index: int) -> None:
    """Commit at the begin of a pass."""
    state = bytes([pass_index % 256]) * 5000
    store.publish(Cursor(pass_index), state=state, schedule_digest="cyclic", settings={}, environment={})


def check(store: Store, draw: random.Random) -> str:
    """Compare rows, in one of two ways, with the expected ones at the cursor; return the way."""
    assert store.commit is not None
    cursor, table = store.commit.cursor.pass_index, draw.choice(TABLES)
    expected, at = trained_in(cursor), f"commit {store.commit.id} at pass {cursor}"
    if draw.random() < 0.5:
        keys = np.array(draw.sample(range(-50, NUM_KEYS + 50), 300))
        found = store.lookup(table.name, keys, missing="zeros")["vector"]
        inside = (keys >= 0) & (keys < NUM_KEYS)
        wanted = np.zeros(keys.size)
        wanted[inside] = np.maximum(expected[keys[inside]], 0)
        assert np.array_equal(found, np.repeat(wanted[:, None], table.dim, axis=1)), f"a lookup of {at}"
        return "lookup"
    seen = 0
    for keys, (vectors,) in store.scan(table.name):
        assert np.array_equal(vectors, np.repeat(expected[keys][:, None], table.dim, axis=1)), f"a scan of {at}"
        seen += keys.size
    assert seen == np.count_nonzero(expected >= 0), f"a scan of {at}: {seen} rows"
    assert store.state() == bytes([cursor % 256]) * 5000
    return "scan"


def read(path: Path, seconds: float, seed: int) -> Counter[str]:
    """Open the store repeatedly, keep some open, and check them and older commits."""
    draw, done, held = random.Random(seed), Counter[str](), list[Store]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            held.append(Store.open(path, mode="r"))
            store = draw.choice(held)
            done[check(store, draw)] += 1
            if len(store.commits) > 1:
                with store.at(draw.choice(store.commits).id) as older:
                    done["older " + check(older, draw)] += 1
        except CommitMissingError:
            done["given up"] += 1  # an older commit without a lease
        if len(held) > 3:
            held.pop(draw.randrange(len(held))).close()
    for store in held:
        store.close()
    return done


if __name__ == "__main__":
    sys.stdout.write(json.dumps(read(Path(sys.argv[1]) / "s", float(sys.argv[2]), int(sys.argv[3]))))
