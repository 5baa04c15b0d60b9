"""Requests in flight: their contents, threads and waits."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.store.direct_io import WriteQueue
from tiercache.store.files import PAGE_BYTES

MIB = 1 << 20
LONG = np.ones(16 * MIB, np.uint8)
"""A separate request if the next data in the file is elsewhere."""


def put_long(queue: WriteQueue) -> None:
    """Put three long requests that lie apart."""
    for i in range(3):
        queue.put(LONG.data, 20 * i * MIB)


class Disk:
    """A slow file in memory; records thread and bytes of each request, and the most requests in flight."""

    def __init__(
        self, num_bytes: int = 64 * MIB, *, seconds: float = 0.0, step: int = 1 << 40, broken: int | None = None
    ) -> None:
        """A write to offset ``broken`` fails; others take ``step`` bytes at a time."""
        self.data, self._seconds, self._step, self._broken = np.zeros(num_bytes, np.uint8), seconds, step, broken
        self._one, self._now, self.most = threading.Lock(), 0, 0
        self.requests: list[tuple[int, int]] = []

    @property
    def written(self) -> int:
        return sum(size for _, size in self.requests)

    def write(self, views: list[memoryview], offset: int) -> int:
        if offset == self._broken:
            raise OSError("no")
        with self._one:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(self._seconds)
        joined = np.frombuffer(b"".join(views), np.uint8)[: self._step]
        self.data[offset : offset + joined.size] = joined
        with self._one:
            self._now -= 1
            self.requests.append((threading.get_ident(), joined.size))
        return joined.size


@settings(max_examples=30)
@given(data=st.data())
def test_what_was_put_or_copied_is_there_after_a_flush(data: st.DataObject) -> None:
    """For any adjacent requests, copied or not, and though the disk accepts a part at a time."""
    sizes = data.draw(st.lists(st.sampled_from([1, 4096, 5000, 700_000, 3 * MIB + 5]), min_size=1, max_size=25))
    disk = Disk(sum(sizes) + 2 * PAGE_BYTES * len(sizes), seconds=1e-4, step=data.draw(st.sampled_from([MIB, 1 << 40])))
    expected, at = np.zeros_like(disk.data), 0
    rng = np.random.default_rng(len(sizes))
    with closing(WriteQueue(disk.write, bool)) as queue:
        for size in sizes:
            block = rng.integers(1, 256, size, dtype=np.uint8)
            expected[at : at + size] = block
            whole = size // PAGE_BYTES * PAGE_BYTES
            if data.draw(st.booleans()):
                queue.put(block[:whole].data, at)
                queue.copy(block[whole:].data, at + whole)
            else:
                queue.copy(block.data, at)
                block[:] = 0  # it was copied
            at += -(-size // PAGE_BYTES) * PAGE_BYTES + data.draw(st.sampled_from([0, 0, PAGE_BYTES]))
        queue.flush()
        assert np.array_equal(disk.data, expected)


@pytest.mark.parametrize(("is_read", "most"), [(False, 2), (True, 1)])
def test_two_long_requests_are_under_way_at_a_time_and_one_where_the_file_is_read(*, is_read: bool, most: int) -> None:
    disk, page = Disk(seconds=0.02), np.ones(2 * MIB, np.uint8)
    with closing(WriteQueue(disk.write, lambda: is_read)) as queue:
        for i in range(12):
            queue.put(page.data, 4 * i * MIB)
        queue.flush()
    assert disk.most == most
    assert disk.written == 24 * MIB


def test_short_runs_that_lie_apart_are_one_request_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each handover takes the interpreter from the training thread: sixteen of a MiB, and the rest."""
    disk, page, submit, handed = Disk(128 * MIB), np.ones(MIB, np.uint8), ThreadPoolExecutor.submit, list[int]()

    def counted(pool: ThreadPoolExecutor, call: Any, request: Any, runs: Any) -> Any:
        handed.append(len(runs))
        return submit(pool, call, request, runs)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", counted)
    with closing(WriteQueue(disk.write, bool)) as queue:
        for i in range(40):
            queue.put(page.data, 2 * i * MIB)
        queue.put(page.data, 79 * MIB)  # adjacent to the last
        queue.flush()
    assert handed == [16, 16, 8]
    assert sorted(size // MIB for _, size in disk.requests) == [1] * 39 + [2]
    assert disk.data[: 80 * MIB : MIB].tolist() == [1, 0] * 39 + [1, 1]


def test_short_requests_and_a_single_one_are_made_by_the_caller() -> None:
    disk, page, here = Disk(), np.ones(40_960, np.uint8), threading.get_ident()
    with closing(WriteQueue(disk.write, bool)) as queue:
        for i in range(20):
            queue.put(page.data, i * MIB)
        queue.flush()
        queue.put(np.ones(20 * MIB, np.uint8).data, 0)
        queue.flush()
        assert {thread for thread, _ in disk.requests} == {here}
        disk.requests.clear()
        queue.put(LONG.data, 0)
        queue.put(page.data, 20 * MIB)
        queue.flush()
    assert sorted((thread == here, size) for thread, size in disk.requests) == [(False, LONG.size), (True, page.size)]


def test_a_request_that_fails_is_raised_and_nothing_is_under_way_when_it_was_given_up() -> None:
    disk, page = Disk(128 * MIB, seconds=0.05, broken=4 * MIB), np.ones(2 * MIB, np.uint8)
    with closing(WriteQueue(disk.write, bool)) as queue:
        with pytest.raises(OSError, match=r"^no$"):  # noqa: PT012 - any of the puts may raise it
            for i in range(30):
                queue.put(page.data, 4 * i * MIB)
        queue.discard()
        written = disk.written
        assert written % page.size == 0
        queue.flush()
        time.sleep(0.1)
        assert disk.written == written
        queue.put(page.data, 0)
        queue.flush()
        assert disk.written == written + page.size


def test_an_interrupt_while_requests_are_waited_for_leaves_none_under_way() -> None:
    disk = Disk(seconds=0.4)
    with closing(WriteQueue(disk.write, bool)) as queue:
        put_long(queue)
        interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            queue.flush()
        queue.discard()
        written = disk.written
        assert written % LONG.size == 0
        time.sleep(0.5)
        assert disk.written == written
        interrupt.join()


def test_where_no_thread_can_be_had_the_caller_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as when the interpreter exits during a dump."""
    monkeypatch.setattr(ThreadPoolExecutor, "submit", Mock(side_effect=RuntimeError("cannot schedule new futures")))
    disk = Disk()
    with closing(WriteQueue(disk.write, bool)) as queue:
        put_long(queue)
        queue.flush()
    assert disk.written == 3 * LONG.size
    assert {thread for thread, _ in disk.requests} == {threading.get_ident()}


def test_a_request_that_a_thread_has_although_it_was_refused_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool accepts a task before it fails to start one more thread."""
    submit = ThreadPoolExecutor.submit

    def refused(pool: ThreadPoolExecutor, *arguments: Any) -> None:
        submit(pool, *arguments)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refused)
    disk, rng = Disk(seconds=0.01), np.random.default_rng(3)
    expected = np.zeros_like(disk.data)
    with closing(WriteQueue(disk.write, bool)) as queue:
        for i in range(8):
            page = rng.integers(1, 256, 700_000, dtype=np.uint8)
            expected[4 * i * MIB : 4 * i * MIB + page.size] = page
            queue.copy(page.data, 4 * i * MIB)
        queue.flush()
        assert np.array_equal(disk.data, expected)
        written = disk.written
    assert disk.written == written, "a thread wrote again what the caller had written"


def test_a_request_that_no_thread_has_yet_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as when an interrupt comes just before it is handed over: no thread writes it later."""
    held = list[Any]()
    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda _, *arguments: held.append(arguments))
    disk = Disk()
    with closing(WriteQueue(disk.write, bool)) as queue:
        queue.put(LONG.data, 0)
        queue.put(LONG.data, 20 * MIB)
        queue.discard()
        for call, *arguments in held:
            call(*arguments)
        assert held
        assert disk.written == 0
