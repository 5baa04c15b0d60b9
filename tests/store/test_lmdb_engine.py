"""What is special about LMDB: places in the file, readers beside the writer, growth."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np
import pytest

from tests.apart import ran
from tests.store.big import dump, load, publish
from tiercache.kernels.cpu.file_io import has_reads, read_checked
from tiercache.store import LmdbEngine, Store, verify
from tiercache.store.lmdb_file import LmdbFile
from tiercache.store.record_chain import Manifest

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.disk


def test_the_file_tells_where_lmdb_keeps_each_value(tmp_path: Path) -> None:
    """For values of all sizes, in trees of several levels: the same keys, and the same bytes at their places."""
    generator = np.random.default_rng(0)
    values = {f"{i:05d}".encode(): generator.bytes(int(generator.integers(1, 9000))) for i in range(1500)}
    with lmdb.open(str(tmp_path), map_size=1 << 26, sync=False) as environment:
        for _ in range(3):
            with environment.begin(write=True) as txn:
                for key, value in values.items():
                    txn.put(key, value)
            for key in list(values)[::7]:
                with environment.begin(write=True) as txn:
                    txn.delete(key)
                del values[key]
    file = LmdbFile(str(tmp_path / "data.mdb"))
    meta = file.metas()[0]
    found = {value.key: os.pread(file.handle, value.size, value.offset) for value in file.values(meta)}
    assert found == values
    assert list(found) == sorted(values)
    file.close()


READ_ALL = """
import re, sys
import numpy as np
from tiercache.store import Store

store = Store.open(sys.argv[1], mode="r")
layout = store.segments[0].layouts[0]
out = np.ones(layout.byte_of_page(layout.num_pages), np.uint8)
store.read(store.segments[0], 0, 0, layout.num_pages, out)
print("data.mdb" in open("/proc/self/maps").read())
"""


def test_no_reader_has_a_map(big: Store) -> None:
    """So a file that is cut short beside it is no signal."""
    for pass_index in range(4):
        dump(big, pass_index, {pass_index + 4: 200})
    publish(big, 4)
    big.close()
    assert ran(READ_ALL, big.path).stdout == "False\n"


@pytest.mark.parametrize("at_once", [False, True])
def test_a_reader_beside_the_writer_sees_whole_blocks(big: Store, *, at_once: bool) -> None:
    """Ranges read on one thread while another dumps, commits and frees are always what was written."""
    big.read_with(read_checked if at_once and has_reads() else None)
    stored = {v: dump(big, v, {40 + v: 64, v + 1: 64}) for v in range(3)}
    publish(big, 3)
    kept = [segment for segment in big.segments if segment.pass_index < 3]
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                for segment in kept:
                    layout = segment.layouts[0]
                    low, high = layout.pages_of_range(layout.num_ranges - 1)
                    out = np.empty(layout.byte_of_page(high) - layout.byte_of_page(low), np.uint8)
                    big.read(segment, 0, low, high, out)
                    assert out.tobytes() == stored[segment.pass_index][40 + segment.pass_index]
        except BaseException as error:  # shown in the main thread
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for pass_index in range(3, 30):
        dump(big, pass_index, {pass_index + 1: 64, pass_index + 3: 200})
        publish(big, pass_index + 1)
    done.set()
    reader.join()
    assert not failures, failures


@pytest.mark.parametrize("done", [True, False])
def test_an_interrupt_at_the_end_of_a_commit_leaves_what_is_durable(
    big: Store, monkeypatch: pytest.MonkeyPatch, *, done: bool
) -> None:
    """Whether it came after the transaction or before: the store stands where its file does, and goes on from there."""
    stored = [dump(big, 0, {1: 50, 2: 50})]
    publish(big, 1)
    stored.append(dump(big, 1, {2: 50, 3: 50}))

    def interrupted(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    raised = []

    class Interrupting(LmdbEngine):
        """Raises when its transaction is over."""

        def commit(self, records: Any) -> None:
            super().commit(records)
            raised.append(1)
            raise KeyboardInterrupt

    if done:
        big._opened.engine.__class__ = Interrupting
    else:
        monkeypatch.setattr(Manifest, "to_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publish(big, 2)
    big._opened.engine.__class__ = LmdbEngine
    monkeypatch.undo()
    assert bool(raised) == done
    big.discard_uncommitted()
    assert big.commit.cursor.pass_index == (2 if done else 1)
    assert load(big, 2) == ({0: stored[0][2], 1: stored[1][2]} if done else {0: stored[0][2]})
    pass_index = big.commit.cursor.pass_index
    dump(big, pass_index, {pass_index + 1: 80})
    publish(big, pass_index + 1)
    big.close()
    assert verify(big.path)["problems"] == []
