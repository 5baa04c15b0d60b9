"""A process that reads a store repeatedly while another one writes it."""

import hashlib
from multiprocessing.connection import Connection
from pathlib import Path

from tiercache.store import Store


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
