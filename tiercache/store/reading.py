"""Reading blocks, with every byte checked against its checksum."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from tiercache.store.commit_reader import memory_for
from tiercache.store.engines.engine import Counters, Engine, ReadRequest, Stored
from tiercache.store.files import scratch_in
from tiercache.store.layout import CHANGED, KEY_BYTES, KEY_PAGE_ROWS, KEYS, ROWS, key_page_bounds
from tiercache.store.records import checksum
from tiercache.store.segment import Compute, Segment, first_hashes_of
from tiercache.store.store_errors import (
    ADVICE,
    BlockReadError,
    CorruptBlockError,
    CorruptStoreError,
    StoreClosedError,
    StoreError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.commit import Commit
    from tiercache.store.locks import UseCount
    from tiercache.store.records import Part


Item = TypeVar("Item", bound=tuple[Any, ...])
Result = TypeVar("Result")


def read_ahead(
    pool: ThreadPoolExecutor, call: Callable[..., Result], items: Iterable[Item], *, most: int
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with ``call(*item)``, in order; up to ``most`` calls are made ahead, by the threads of ``pool``.

    Items are taken on the caller's thread, which makes the call itself if there is only one: no thread is started for
    it. An error of a call is raised in place of its result.
    """
    remaining = iter(items)
    begin = list(islice(remaining, 2))
    if len(begin) == 1:
        yield begin[0], call(*begin[0])
        return
    pending: deque[tuple[Item, Future[Result]]] = deque()
    for item in chain(begin, remaining):
        pending.append((item, pool.submit(call, *item)))
        if len(pending) > most:
            first, result = pending.popleft()
            yield first, result.result()
    for first, result in pending:
        yield first, result.result()


_READS = 4
"""Maximum concurrent reads: one is checked while others keep the disk busy."""
_READ_BYTES = 32 << 20
"""Bytes that all threads request together, and check when they are there."""
_SHARES = 4
"""Minimum turns of each of several threads: one reads while another checks."""


class Pages(NamedTuple):
    """Pages [low, high) of a layout, and the bytes that they are to fill."""

    segment: Segment
    group: int
    low: int
    high: int
    out: NDArray[np.uint8]


class _Span(NamedTuple):
    """Pages [low, high) of one block: one read of the engine."""

    request: ReadRequest
    part: Part
    """The bytes to fill and to check, the start of each page in them, and their end (high - low + 1,)."""
    segment: Segment
    group: int
    block: int
    low: int
    high: int


class BlockReader:
    """Reads pages, keys and dense state from an engine; from any thread."""

    def __init__(
        self,
        engine: Engine,
        label: str,
        counters: Counters,
        uses: UseCount,
        explain: Callable[[CorruptStoreError], StoreError],
        folder: Path | None,
    ) -> None:
        """``explain`` returns the error to raise for a given one; ``folder`` is the store's."""
        self.label, self.counters, self.folder = label, counters, folder
        self._engine, self._uses, self._explain = engine, uses, explain
        self._pid, self._closed = os.getpid(), False
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self.compute = Compute()
        """Functions over many rows; training substitutes kernels that run in parallel with it, without the GIL."""

    @property
    def scratch(self) -> Path:
        """The folder for temporary files: the store's own, or the system's if that cannot be written to."""
        return scratch_in(self.folder)

    def check_open(self) -> None:
        """Raise StoreClosedError after ``close``, and in a fork."""
        if self._closed:
            raise StoreClosedError(f"{self.label} is closed: open it again")
        if os.getpid() != self._pid:
            forked = f"was opened by process {self._pid} and is used in its fork {os.getpid()}"
            raise StoreClosedError(f"{self.label} {forked}: open it in the process that uses it")

    def close(self) -> None:
        """End the threads; current reads are finished first."""
        self._closed = True
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()

    def stored(self) -> Mapping[str, Stored]:
        """Return the stored blobs; reads none."""
        with self._uses.using():
            return self._engine.list()

    def load(self, requests: Sequence[Pages], at_once: int | None = None) -> None:
        """Read and check all of ``requests`` as ``Store.load`` does."""
        self.check_open()
        for segment, group, low, high, out in requests:  # all are checked before anything is read
            layout = segment.layouts[group]
            if not 0 <= low <= high <= layout.num_pages:
                found = f"pages {low} to {high} of segment {segment.id} are not there"
                raise ValueError(f"{found}: it has {layout.num_pages}")
            size = (layout.row_of_page(high) - layout.row_of_page(low)) * layout.row_bytes
            if out.dtype != np.uint8 or out.size != size or not out.flags.c_contiguous:
                raise ValueError(f"out is {out.size:,} of {out.dtype}: expected {size:,} contiguous bytes")
        at_once = min(_READS if at_once is None else at_once, len(requests))
        if at_once < 2:
            self._work(iter(requests), _READ_BYTES)
            return
        share = min(_READ_BYTES // at_once, sum(one.out.size for one in requests) // (_SHARES * at_once) + 1)
        queue = _RequestQueue(requests)
        try:
            with self._lock:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(_READS, thread_name_prefix="tiercache-reads")
                jobs = [self._threads.submit(self._work_from, queue, share) for _ in range(at_once)]
            wait(jobs)
        finally:
            queue.stop()  # even if interrupted: the caller may reuse the memory once this raises
        for job in jobs:
            job.result()

    def _work_from(self, queue: _RequestQueue, most_bytes: int) -> None:
        with queue:
            self._work(queue, most_bytes)

    def _work(self, requests: Iterator[Pages], most_bytes: int) -> None:
        """Read and check requests until none are left, about ``most_bytes`` at a time."""
        spans = chain.from_iterable(map(self._spans, requests))
        try:
            while read := self._read_some(spans, most_bytes):
                self._check(read)
        except BaseException:
            for _ in requests:
                pass  # after an error the others stop early
            raise

    def _read_some(self, spans: Iterator[_Span], most_bytes: int) -> list[_Span]:
        """Read spans of about ``most_bytes`` together, or all that are left; returns them."""
        read, size = list[_Span](), 0
        for span in spans:
            read.append(span)
            size += span.request.out.size
            if size >= most_bytes:
                break
        if len(read) > 1:
            with self._uses.using(), suppress(BlockReadError):
                self._engine.read(*(span.request for span in read))
                return read
        for span in read:  # of several, finds the one that failed
            self._read(span.request, span.segment, span.group, span.block)
        return read

    def _spans(self, pages: Pages) -> Iterator[_Span]:
        segment, group, low, high, out = pages
        layout = segment.layouts[group]
        blob, stop = segment.blob(ROWS, segment.groups[group]), layout.row_of_page(high)
        while low < high:
            row = layout.row_of_page(low)
            block = row // layout.block_rows
            block_end = (block + 1) * layout.block_rows
            end = high if stop <= block_end else layout.page_of_row(block_end)
            bounds = layout.page_bounds(low, end)
            data, out = out[: bounds[-1]], out[bounds[-1] :]
            inside = (row - block * layout.block_rows) * layout.row_bytes
            request = ReadRequest(blob, layout.byte_in_blob(ROWS, block) + inside, data)
            yield _Span(request, (data, bounds), segment, group, block, low, end)
            low = end

    def _check(self, spans: Sequence[_Span]) -> None:
        """Count spans that were read, and compare their checksums. Raises CorruptBlockError."""
        rows = sum(span.request.out.size // span.segment.layouts[span.group].row_bytes for span in spans)
        num_bytes = sum(span.request.out.size for span in spans)
        self.counters.add(row_bytes_read=num_bytes, rows_read=rows, reads=len(spans))
        sums = self.compute.checksums([span.part for span in spans])
        expected = np.concatenate([span.segment.meta[span.group].checksums[span.low : span.high] for span in spans])
        if np.array_equal(sums, expected):
            return
        at = int(np.argmax(sums != expected))
        words, written = f"has checksum {sums[at]:08x}", int(expected[at])
        for span in spans:
            if at < span.high - span.low:
                words += f" in page {span.low + at}"
                raise self._corrupt(span.segment, span.group, span.block, words, written)
            at -= span.high - span.low

    def _corrupt(self, segment: Segment, group: int, block: int, seen: str, expected: int | None = None) -> StoreError:
        """Return the error of a block that differs from what was written; ``expected`` is the checksum, if known."""
        tables = tuple(table.name for table in segment.groups[group].tables)
        named = ", ".join(repr(name) for name in tables[:3]) + (f" and {len(tables) - 3} more" if tables[3:] else "")
        suffix = "" if expected is None else f", but {expected:08x} was written"
        message = (
            f"block {block} of segment {segment.id} (pass {segment.pass_index}; tables {named}) of {self.label} "
            f"{seen}{suffix}: {ADVICE}, or train again from the start"
        )
        return self._explain(CorruptBlockError(message, segment=segment.id, block=block, tables=tables))

    def keys(
        self, segment: Segment, group: int, block: int, first: int = 0, last: int | None = None
    ) -> NDArray[np.int64]:
        """Return the keys of the rows of one block, or of its key pages [first, last). Raises CorruptBlockError."""
        self.check_open()
        layout, blob = segment.layouts[group], segment.blob(KEYS, segment.groups[group])
        rows = layout.bytes_of_block(block) // layout.row_bytes
        bounds = key_page_bounds(rows)[first : None if last is None else last + 1]
        data = np.empty(int(bounds[-1] - bounds[0]), dtype=np.uint8)
        request = ReadRequest(blob, layout.byte_in_blob(KEYS, block) + int(bounds[0]), data)
        self._read(request, segment, group, block)
        sums, keys = self.compute.checksums([(data, bounds - bounds[0])]), data.view(np.int64)
        page = block * layout.key_pages + first
        meta = segment.meta[group]
        wrong = np.nonzero(sums != meta.key_checksums[page : page + sums.size])[0]
        if wrong.size:
            at = int(wrong[0])
            words, expected = f"has checksum {sums[at]:08x} over its keys", int(meta.key_checksums[page + at])
            raise self._corrupt(segment, group, block, words, expected)
        starts = (bounds[:-1] - bounds[0]) // KEY_BYTES
        first_row = block * layout.block_rows + int(bounds[0]) // KEY_BYTES
        hashes = first_hashes_of(keys[starts], first_row + starts, layout, segment.groups[group])
        if np.any(hashes != meta.first_hashes[page : page + sums.size]):
            words = "has different first keys than the segment's description"
            raise self._corrupt(segment, group, block, words)
        self.counters.add(key_bytes_read=data.size, reads=1)
        return keys

    def keys_between(self, segment: Segment, group: int, low: int, high: int) -> NDArray[np.int64]:
        """Return the keys of rows [low, high) of one block; reads the key pages that have them."""
        layout = segment.layouts[group]
        first, last = layout.key_pages_of_rows(np.array([low, high - 1])).tolist()
        block, page = divmod(first, layout.key_pages)
        start = block * layout.block_rows + page * KEY_PAGE_ROWS
        return self.keys(segment, group, block, page, page + last - first + 1)[low - start : high - start]

    def changed(self, segment: Segment, group: int, block: int) -> NDArray[np.uint32]:
        """Return the last change of each row of a block that has them stored. Raises CorruptBlockError."""
        self.check_open()
        layout, stored = segment.layouts[group], segment.meta[group].changed
        assert stored is not None, "they are stored"
        numbers = np.empty(layout.bytes_of_block(block) // layout.row_bytes, dtype=np.uint32)
        data = numbers.view(np.uint8)
        blob = segment.blob(CHANGED, segment.groups[group])
        self._read(ReadRequest(blob, layout.byte_in_blob(CHANGED, block), data), segment, group, block)
        seen, expected = checksum(data), int(stored.checksums_B[block])
        if seen != expected:
            words = f"has checksum {seen:08x} over the commits that changed its rows"
            raise self._corrupt(segment, group, block, words, expected)
        if (numbers.min(), numbers.max()) != (stored.oldest_B[block], stored.newest_B[block]):
            words = "has rows that were changed by different commits than its record says"
            raise self._corrupt(segment, group, block, words)
        self.counters.add(changed_bytes_read=data.size, reads=1)
        return numbers

    def state(self, commit: Commit) -> NDArray[np.uint8]:
        """Return the dense state of ``commit``. Raises CorruptStoreError."""
        of_rank, i = commit.own.state, 0
        try:
            with self._uses.using():
                state = memory_for(self._engine, of_rank.blob, of_rank.size)
            for i, expected in enumerate(of_rank.checksums.tolist()):
                part = state[i * of_rank.chunk_bytes :][: of_rank.chunk_bytes]
                with self._uses.using():
                    self._engine.read(ReadRequest(of_rank.blob, i * of_rank.chunk_bytes, part))
                seen = checksum(part)
                if seen != expected:
                    raise BlockReadError(f"has checksum {seen:08x}, but {expected:08x} was written")
        except BlockReadError as error:
            corrupt = CorruptStoreError(
                f"part {i} of the dense state of commit {commit.id} of {self.label} {error.seen}: "
                "restore the store from a copy, or train again from the start"
            )
            raise self._explain(corrupt) from error
        self.counters.add(state_bytes_read=state.size, reads=of_rank.checksums.size)
        return state

    def _read(self, request: ReadRequest, segment: Segment, group: int, block: int) -> None:
        try:
            with self._uses.using():
                self._engine.read(request)
        except BlockReadError as error:
            raise self._corrupt(segment, group, block, error.seen) from error


class _RequestQueue:
    """The requests that several threads take from; a thread works inside ``with``."""

    def __init__(self, requests: Sequence[Pages]) -> None:
        self._requests = iter(requests)
        self._at_work = 0
        self._changed = threading.Condition()

    def __iter__(self) -> _RequestQueue:
        return self

    def __next__(self) -> Pages:
        with self._changed:
            return next(self._requests)

    def __enter__(self) -> None:
        with self._changed:
            self._at_work += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._at_work -= 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Yield nothing more, and return when no thread is at work: an interruption is raised only then."""
        interruption: KeyboardInterrupt | None = None
        while True:
            try:
                with self._changed:
                    self._requests = iter(())
                    self._changed.wait_for(lambda: not self._at_work)
                break
            except KeyboardInterrupt as error:
                interruption = error
        if interruption is not None:
            raise interruption
