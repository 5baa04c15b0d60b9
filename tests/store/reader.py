"""Processes that read a store repeatedly while another one writes it."""

import contextlib
import hashlib
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from tiercache.store import CommitMissingError, Store


def digest(store: Store) -> str:
    """Return a digest of every row, every optimizer state and the dense state at a store's commit."""
    found = hashlib.sha256(store.state())
    for one in store.tables:
        for keys, fields in store.scan(one.name):
            found.update(keys.tobytes())
            for values in fields:
                found.update(values.tobytes())
    return found.hexdigest()


READER = """
import sys
from tests.store.reader import digest
from tiercache.store import Store

with Store.open(sys.argv[1], mode="r") as store:
    for _ in range(2):
        print(store.commit.id, digest(store), flush=True)
        sys.stdin.readline()
"""
"""Code that opens a store and prints its content twice, the second time on request."""


def read_on(path: Path, end: Connection) -> None:
    """Report that this process runs; send each commit from the first on, digested twice, until told to stop."""
    end.send("ready")
    while not end.poll():
        with Store.open(path, mode="r") as store:
            if store.commit is not None:
                end.send((store.commit.id, digest(store), digest(store)))
    end.send(None)


def read(path: Path, seconds: float, seed: int) -> list[tuple[int, str]]:
    """Open a store with a commit repeatedly, keep some open, and return commits that were read, with their digests."""
    draw, found, held = random.Random(seed), list[tuple[int, str]](), list[Store]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(CommitMissingError):  # an older commit without a lease
            held.append(Store.open(path, mode="r"))
            store = draw.choice(held)
            table = draw.choice(store.tables)
            for keys, fields in store.scan(table.name):
                looked_up = store.lookup(table.name, keys)
                assert all(map(np.array_equal, fields, looked_up.values())), (store.commit, table.name)
            found.append((store.commit.id, digest(store)))
            with store.at(draw.choice(store.commits).id) as older:
                found.append((older.commit.id, digest(older)))
        if len(held) > 3:
            held.pop(draw.randrange(len(held))).close()
    for store in held:
        store.close()
    return found
