"""Stores that were not closed, and stores that are closed in the wrong place."""

import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.big import BIG, dump, load, publish
from tests.store.conftest import small_tables
from tests.store.damage import assert_sentence
from tiercache.store import NEVER, Range, SegmentLayout, Store, StoreError, load_rows, verify
from tiercache.store.locks import Lease, WriterLock, leased_commits

KINDS = pytest.mark.parametrize("kind", ["lmdb", "zarr"])


def held() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def trained(path: Path, kind: str) -> Store:
    """Return a store with two commits."""
    store = Store.open(path, tables=[BIG], engine=kind, retention=2)
    for pass_index in range(2):
        dump(store, pass_index, {90: 60})
        publish(store, pass_index + 1)
    return store


@pytest.mark.sampled(1)
@KINDS
def test_a_store_that_is_garbage_lets_others_write(tmp_path: Path, kind: str) -> None:
    before = held()
    store = trained(tmp_path / "s", kind)
    dump(store, 2, {90: 10})
    with pytest.warns(ResourceWarning, match=r"the store at .*/s was never closed: close it, or open it in a with"):
        del store
    assert held() == before
    with Store.open(tmp_path / "s") as store:
        assert store.commit.id == 1
        assert set(load(store, 90)) == {0, 1}


@pytest.mark.sampled(2)
@KINDS
@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_readers_that_are_garbage_hold_nothing(tmp_path: Path, kind: str, *, in_a_cycle: bool) -> None:
    """No file, no lease, and so no space."""
    trained(tmp_path / "s", kind).close()
    before = held()
    with pytest.warns(ResourceWarning, match="was never closed"):  # noqa: PT031
        for _ in range(20):
            reader = Store.open(tmp_path / "s", mode="r")
            load(reader, 90)
            if in_a_cycle:
                reader.itself = reader  # type: ignore[attr-defined]
            del reader
        assert held() == before
    assert leased_commits(tmp_path / "s" / "leases") == set()
    assert not list((tmp_path / "s" / "leases").iterdir())


@KINDS
def test_a_store_at_a_commit_needs_no_close_of_its_own(tmp_path: Path, kind: str) -> None:
    """It keeps its store open, and is collected silently."""
    store = trained(tmp_path / "s", kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = store.at(0)
        assert set(load(first, 90)) == {0}
        del first
        gc.collect()
        assert not store.commit_writer._holds
        store.close()
        del store
        gc.collect()
    with Store.open(tmp_path / "s", mode="r") as reader:
        late = reader.at(0)
        assert set(load(late, 90)) == {0}


def test_a_store_that_did_not_open_warns_of_nothing(tmp_path: Path) -> None:
    trained(tmp_path / "s", "lmdb").close()
    before = held()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"commit": 7, "mode": "r"}, {"engine": "zarr"}, {"mode": "x"}, {"tables": [small_tables()[0]]}):
            with pytest.raises((StoreError, ValueError)):
                Store.open(tmp_path / "s", **options)  # type: ignore[arg-type]
        (tmp_path / "s" / "HEAD").write_bytes(b"x")
        for mode in ("a", "r"):
            with pytest.raises(StoreError):
                Store.open(tmp_path / "s", mode=mode)
        gc.collect()
    assert held() == before


def test_locks_and_leases_by_themselves_go_with_what_holds_them(tmp_path: Path) -> None:
    before = held()
    WriterLock(tmp_path)
    WriterLock(tmp_path).release()
    Lease.take(tmp_path / "leases", 4)
    assert leased_commits(tmp_path / "leases") == set()
    assert held() == before


# -- closed by one of its callbacks ---------------------------------------------------------------------------


ROWS: Any = ("big", (np.arange(5), (np.ones((5, 256), np.float32), np.zeros((5, 256), np.float32))))
LAYOUT = SegmentLayout.of(
    row_bytes=BIG.row_bytes, page_rows=8, block_bytes=1 << 17, ranges=(Range(next_use=NEVER, table_rows=(3,)),)
)


def closing(close: Callable[[], None], *items: Any) -> Iterator[Any]:
    """Close the store when the first item is asked for."""
    close()
    yield from items


class Uses:
    """Uses of a schedule that close the store when read."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close

    def counts(self, _table: str) -> dict[int, int]:
        return {}

    def slices(self, _table: str) -> Iterator[Any]:
        return closing(self._close)


CALLS: dict[str, Callable[[Store, Callable[[], None]], object]] = {
    "compact": lambda store, close: store.compact(progress=lambda *_: close()),
    "rewrite": lambda store, close: store.rewrite(Uses(close), schedule_digest=""),
    "rewrite with progress": lambda store, close: store.rewrite(
        Uses(lambda: None), schedule_digest="", retain_segments=False, progress=lambda *_: close()
    ),
    "append": lambda store, close: store.append(2, [LAYOUT], closing(close)),
}


@pytest.mark.sampled(4)
@KINDS
@pytest.mark.parametrize("call", [*CALLS])
def test_a_store_is_not_closed_from_within(tmp_path: Path, kind: str, call: str) -> None:
    """It would wait for itself: an error says so, the step ends with it, and the store is open and intact."""
    store = trained(tmp_path / "s", kind)
    with pytest.raises(StoreError, match=r"cannot be closed inside a function that it calls") as caught:
        CALLS[call](store, store.close)
    assert_sentence(caught.value)
    assert not store.closed
    assert store.commit.id == 1
    assert set(load(store, 90)) == {0, 1}
    store.compact()
    store.close()
    assert verify(tmp_path / "s")["problems"] == []


READS: dict[str, Callable[[Store, Callable[[], None]], object]] = {
    "lookup": lambda store, close: store.lookup("big", np.arange(3), progress=lambda *_: close()),
    "load_rows": lambda store, close: load_rows(store, closing(close, ROWS)),
    "load_rows with progress": lambda store, close: load_rows(store, [ROWS], progress=lambda *_: close()),
}


@pytest.mark.sampled(3)
@KINDS
@pytest.mark.parametrize("call", [*READS])
def test_what_only_reads_ends_with_an_error_where_it_is_closed(tmp_path: Path, kind: str, call: str) -> None:
    """Or finishes; it never waits."""
    store = trained(tmp_path / "s", kind)
    try:
        READS[call](store, store.close)
    except StoreError as error:
        assert_sentence(error)
    store.close()
    assert verify(tmp_path / "s")["problems"] == []


@KINDS
def test_another_thread_may_close_and_waits(tmp_path: Path, kind: str) -> None:
    store, begun = trained(tmp_path / "s", kind), threading.Event()
    closer = threading.Thread(target=lambda: (begun.wait(), store.close()))
    closer.start()
    store.compact(progress=lambda *_: begun.set())
    closer.join()
    assert store.closed
    with Store.open(tmp_path / "s", mode="r") as reader:
        assert reader.commit.id == 2
