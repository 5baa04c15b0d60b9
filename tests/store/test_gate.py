"""The guard of reads, writes and closing."""

from __future__ import annotations

import threading

import pytest
from tiercache.store.gate import Gate

from tiercache.store import StoreClosedError


def test_the_oldest_read_says_what_may_still_be_seen() -> None:
    """The newest commit where nothing is read; else the one that was newest when the oldest read began."""
    gate = Gate("the store", 3)
    assert gate.oldest() == 3
    with gate.reading():
        gate.advance(5)
        assert gate.oldest() == 3
        with gate.reading():
            gate.advance(6)
            assert gate.oldest() == 3
        assert gate.oldest() == 3
    assert gate.oldest() == 6


@pytest.mark.parametrize("what", ["reading", "writing"])
def test_closing_waits_for_what_goes_on_and_lets_nothing_more_through(what: str) -> None:
    """Reads and writes in other threads end first; a second time does nothing."""
    gate = Gate("the store at x")
    inside, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with getattr(gate, what)():
            inside.set()
            go_on.wait()
            assert not closed.is_set()

    def close() -> None:
        assert gate.close()
        closed.set()

    worker, closer = threading.Thread(target=work), threading.Thread(target=close)
    worker.start()
    inside.wait()
    closer.start()
    while not gate._closed:
        pass
    for refused in (gate.reading, gate.writing):
        with pytest.raises(StoreClosedError, match="the store at x is closed: open it again"), refused():
            pass
    assert not closed.wait(0.05)
    go_on.set()
    worker.join()
    closer.join()
    assert closed.is_set()
    assert not gate.close()
