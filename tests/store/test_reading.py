"""Reading many pages at once."""

import signal
import threading
import time

import numpy as np
import pytest

from tests.store.between import Between
from tests.store.conftest import small_tables
from tests.store.world import World
from tiercache.store import MemoryEngine, Store
from tiercache.store.reading import Pages


@pytest.mark.parametrize("interruptions", [1, 2])
def test_an_interrupted_load_leaves_nothing_that_is_being_read(interruptions: int) -> None:
    """Ctrl-C, pressed once or twice while threads read: the memory is the caller's when the interruption comes."""
    engine = Between(MemoryEngine())
    with Store.open(None, tables=small_tables(), engine=engine) as store:
        World(store.tables, keys_per_pass=80).run(store, 1)
        segment = store.segments[0]
        byte = segment.layouts[0].byte_of_page
        wanted = [
            Pages(segment, 0, i, i + 1, np.zeros(byte(i + 1) - byte(i), np.uint8))
            for i in range(segment.layouts[0].num_pages)
        ]

        def interrupt() -> None:
            for _ in range(interruptions):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                time.sleep(0.1)  # the other thread has time to go wrong

        engine.in_reads(2, interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.load(wanted)
        assert engine.reading == 0
        assert engine.reached
        store.load(wanted)
        data = np.concatenate([pages.out for pages in wanted])
        whole = np.empty_like(data)
        store.read(segment, 0, 0, segment.layouts[0].num_pages, whole)
        assert np.array_equal(data, whole)
