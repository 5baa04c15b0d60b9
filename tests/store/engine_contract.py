"""The contract of ``Engine``, promise by promise, as tests that every engine inherits."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiercache.store.engines.engine import Block, BlockLayout, FieldSource, LocatingEngine, ReadRequest, ReadSource
from tiercache.store.layout import CHANGED, KEYS, ROWS, STATE, Range, SegmentLayout
from tiercache.store.optimizer import SGD, Adam, RowWiseAdagrad, Zeros
from tiercache.store.store_errors import BlockReadError, StoreFullError
from tiercache.store.table import Table, group_tables

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    from tiercache.store.engines.engine import Data, Engine

    Bytes = NDArray[np.uint8]

OPTIMIZERS = (SGD(learning_rate=0.1), RowWiseAdagrad(learning_rate=0.1), Adam())
SIZES = (0, 1, 4095, 4096, 10_000, 300_001)


def some_bytes(size: int, seed: int = 0) -> Bytes:
    """Return made-up bytes."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def layout_of(rows: tuple[int, ...], *, page_rows: int = 3, block_rows: int = 7, **of_table: Any) -> BlockLayout:
    """Return the layout of a layout of one table with so many rows in each range."""
    usual: dict[str, Any] = {"name": "t", "dim": 3, "optimizer": OPTIMIZERS[1], "initializer": Zeros()}
    group = group_tables([Table(**usual | of_table)])[0]
    ranges = tuple(Range(next_use=use, table_rows=(n,)) for use, n in enumerate(rows, start=1))
    layout = SegmentLayout.of(
        row_bytes=group.row_bytes, page_rows=page_rows, block_bytes=group.row_bytes * block_rows, ranges=ranges
    )
    return BlockLayout(group, layout)


def segment_blocks(layout: BlockLayout, segment: int = 0, seed: int = 0) -> list[Data]:
    """Return made-up blocks of rows, keys and last changes of a whole layout."""
    blocks: list[Data] = []
    for index, size in enumerate(map(layout.segment_layout.bytes_of_block, range(layout.segment_layout.num_blocks))):
        rows = size // layout.segment_layout.row_bytes
        for at, (kind, num) in enumerate([(ROWS, size), (KEYS, 8 * rows), (CHANGED, 4 * rows)]):
            block = Block(kind, segment, layout.group.index, index, num, layout=layout)
            blocks.append((block, some_bytes(num, seed=1000 * segment + 100_000 * seed + 3 * index + at)))
    return blocks


def state_block(data: Bytes, index: int = 0, *, commit: int = 1) -> Data:
    """Return a block of dense state."""
    return Block(STATE, commit, 0, index, data.nbytes), data


def put(engine: Engine, blocks: Iterable[Data], *, stable: bool = False) -> dict[Block, bytes]:
    """Write blocks; returns the bytes of each, with its place."""
    blocks = [*blocks]
    places = engine.write(blocks, stable=stable)
    assert len(places) == len(blocks)
    return {block._replace(place=place): data.tobytes() for (block, data), place in zip(blocks, places, strict=True)}


def bytes_of(engine: Engine, block: Block) -> bytes:
    """Return a whole block."""
    out = np.ones(block.size, np.uint8)
    engine.read(ReadRequest(block, 0, out))
    return out.tobytes()


def check(engine: Engine, blocks: dict[Block, bytes]) -> None:
    """Compare blocks with what they were when they were written."""
    for block, data in blocks.items():
        assert engine.problem(block) == ""
        assert bytes_of(engine, block) == data


class EngineContract:
    """The tests. Inherit, and say how the engine is made, opened after a crash, and opened by a reader."""

    outlives = True
    """Whether what was committed, and only that, is there when another process opens the engine."""
    compression: str | None = None
    """Of the tables whose rows are written."""

    def layout(self, rows: tuple[int, ...], **how: Any) -> BlockLayout:
        """Return a layout of such a table."""
        return layout_of(rows, compression=self.compression, **how)

    @classmethod
    def make(cls, path: Path, *, store_budget: int | None = None) -> Engine:
        """Make an empty engine in a folder that is empty; ``store_budget`` bounds its blocks."""
        raise NotImplementedError

    @classmethod
    def open(cls, path: Path, engine: Engine) -> Engine:
        """Open for writing what a process that died left; ``engine`` is what it had, and is closed."""
        raise NotImplementedError

    @classmethod
    def open_reader(cls, path: Path) -> Engine:
        """Open the engine for reading, in a process that has nothing else of it open."""
        raise NotImplementedError

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[Engine]:
        """An empty engine."""
        engine = self.make(tmp_path)
        yield engine
        engine.close()

    def crashed(self, path: Path, engine: Engine, needed: Iterable[Block]) -> Engine:
        """Return what is there after the process died, opened as a store opens it."""
        engine.close()
        engine = self.open(path, engine)
        engine.retain(needed)
        return engine

    # -- blocks ------------------------------------------------------------------------------------------

    def test_blocks_come_back_from_any_byte_on(self, engine: Engine) -> None:
        """Whatever their length, wherever they lie in memory, before and after the commit."""
        written = put(engine, (state_block(some_bytes(size + 1, i)[1:], i) for i, size in enumerate(SIZES)))
        for _ in range(2):
            for block, data in written.items():
                for low, high in ((0, block.size), (block.size // 3, block.size // 2), (block.size, block.size)):
                    out = np.ones(high - low, np.uint8)
                    engine.read(ReadRequest(block, low, out))
                    assert out.tobytes() == data[low:high]
            engine.commit({})

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(
        rows=st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any),
        page_rows=st.integers(1, 6),
        block_rows=st.integers(1, 9),
        optimizer=st.sampled_from(OPTIMIZERS),
        cuts=st.tuples(st.integers(0, 8), st.integers(1, 8)),
        order=st.randoms(use_true_random=False),
    )
    def test_pages_come_back_however_fields_are_kept(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        rows: list[int],
        page_rows: int,
        block_rows: int,
        optimizer: Any,
        cuts: tuple[int, int],
        order: Any,
    ) -> None:
        """Any run of pages of any block of any layout is what was written, in whatever order blocks came."""
        of_blocks = self.layout(tuple(rows), page_rows=page_rows, block_rows=block_rows, optimizer=optimizer)
        layout, blocks = of_blocks.segment_layout, segment_blocks(of_blocks, segment=5)
        order.shuffle(blocks)
        engine = self.make(tmp_path_factory.mktemp("engine"))
        half = len(blocks) // 2
        written = put(engine, blocks[:half]) | put(engine, blocks[half:])
        check(engine, written)
        engine.commit({})
        check(engine, written)
        for block, data in written.items():
            if block.kind == ROWS:
                first, last = layout.pages_of_block(block.index)
                low = min(first + cuts[0], last - 1)
                high = min(low + cuts[1], last)
                begin, end = (layout.byte_of_page(page) - layout.byte_of_page(first) for page in (low, high))
                out = np.ones(end - begin, np.uint8)
                engine.read(ReadRequest(block, begin, out))
                assert out.tobytes() == data[begin:end]
        engine.close()

    def test_what_a_block_does_not_have_is_an_error_in_words(self, engine: Engine) -> None:
        """Bytes beyond its end."""
        blocks = [state_block(some_bytes(10_000)), *segment_blocks(self.layout((10,)))]
        for block in put(engine, blocks):
            with pytest.raises(BlockReadError, match="ends at byte"):
                engine.read(ReadRequest(block, 0, np.empty(block.size + 16, np.uint8)))

    def test_each_block_is_taken_before_the_next_is_asked_for(self, engine: Engine) -> None:
        """A source may give all of them in the same memory."""
        memory = np.empty(300_000, np.uint8)

        def blocks() -> Iterator[Data]:
            for i in range(12):
                memory[:] = i
                yield state_block(memory, i)
            memory[:] = 99

        places = engine.write(blocks())
        for i, place in enumerate(places):
            assert set(bytes_of(engine, state_block(memory, i)[0]._replace(place=place))) == {i}

    def test_stable_blocks_are_taken_before_write_returns(self, engine: Engine) -> None:
        """Their memory may be used again from then on."""
        memory = [np.full(300_000, i, np.uint8) for i in range(6)]
        written = put(engine, [state_block(data, i) for i, data in enumerate(memory)], stable=True)
        for data in memory:
            data[:] = 99
        check(engine, written)

    def test_a_write_whose_source_fails_writes_nothing(self, tmp_path: Path) -> None:
        """The error is the source's own, what was there stays, no room is lost, and the write can be done again."""
        layout = self.layout((10,))
        engine = self.make(tmp_path, store_budget=1 << 20)
        kept = put(engine, [state_block(some_bytes(9000)), *segment_blocks(layout, 1)])

        def failing() -> Iterator[Data]:
            yield state_block(some_bytes(300_000, 1), 1)
            yield from segment_blocks(layout, 2)
            raise OSError("the source broke")

        for _ in range(6):
            with pytest.raises(OSError, match="the source broke"):
                engine.write(failing())
            check(engine, kept)
        written = put(engine, [state_block(some_bytes(300_000, 1), 1), *segment_blocks(layout, 2)])
        engine.commit({})
        check(engine, kept | written)
        engine.close()

    def test_a_block_that_was_freed_may_be_written_again(self, engine: Engine, tmp_path: Path) -> None:
        """Even at once, whether some of its layout stays or nothing, and through a crash."""
        layout = self.layout((10, 20))
        for i in range(4):
            written = put(engine, segment_blocks(layout, seed=i))
            engine.commit({"i": bytes([i])})
            check(engine, written)
            gone = [block for block in written if block.index in {1, 3}]
            engine.free(gone)
            kept = {block: data for block, data in written.items() if block not in gone}
            check(engine, kept)
            again = [data for data in segment_blocks(layout, seed=i + 10) if data[0].index in {1, 3}]
            kept |= put(engine, again)
            check(engine, kept)
            engine.commit({})
            if i == 2:
                engine = self.crashed(tmp_path, engine, kept)
            check(engine, kept)
            engine.free(kept)
        assert engine.records() == {"i": b"\3"}
        engine.close()

    def test_what_is_freed_is_room(self, tmp_path: Path) -> None:
        """And so is what is not retained."""
        engine = self.make(tmp_path, store_budget=1 << 20)
        written: dict[Block, bytes] = {}
        for i in range(6):
            if i == 4:
                engine = self.crashed(tmp_path, engine, [])
            else:
                engine.free(written)
            written = put(engine, [state_block(some_bytes(700_000, i), commit=i)])
            engine.commit({})
            engine.shrink()
            check(engine, written)
        engine.close()

    def test_a_full_engine_says_so_and_changes_nothing(self, tmp_path: Path) -> None:
        """With the bytes that were needed."""
        engine = self.make(tmp_path, store_budget=1 << 20)
        kept = put(engine, [state_block(some_bytes(700_000))])
        engine.commit({"r": b"1"})
        with pytest.raises(StoreFullError, match=r"needs [0-9,]+ more bytes but .* may") as full:
            engine.write([state_block(some_bytes(200_000, i), i, commit=2) for i in range(5)])
        assert full.value.needed_bytes >= 200_000
        assert engine.records() == {"r": b"1"}
        check(engine, kept)
        engine.commit({"r": b"2"})
        engine = self.crashed(tmp_path, engine, kept)
        assert engine.records() == {"r": b"2"}
        check(engine, kept)
        engine.close()

    # -- commits -----------------------------------------------------------------------------------------

    def test_a_commit_sets_and_removes_records(self, engine: Engine, tmp_path: Path) -> None:
        """In one step, for whoever opens the engine next; what is gone already is no error."""
        written = put(engine, [state_block(some_bytes(10)), *segment_blocks(self.layout((10,)))])
        engine.commit({"one": b"1", "größe": b"", "long": bytes(100_000), "commit/1": b"x"})
        written |= put(engine, [state_block(some_bytes(20, 3), 1)])
        engine.commit({"one": b"2", "long": None, "none": None, "commit/2": b"y"})
        expected = {"one": b"2", "größe": b"", "commit/1": b"x", "commit/2": b"y"}
        assert engine.records() == expected
        engine = self.crashed(tmp_path, engine, written)
        assert engine.records() == expected
        check(engine, written)
        engine.commit({"commit/1": None})
        del expected["commit/1"]
        engine = self.crashed(tmp_path, engine, written)
        assert engine.records() == expected
        check(engine, written)
        engine.close()

    def test_what_no_commit_followed_does_not_survive_a_crash(self, engine: Engine, tmp_path: Path) -> None:
        """What was committed is there as it was, and the names of what is gone are free."""
        if not self.outlives:
            pytest.skip("nothing of this engine outlives its process")
        old, new = self.layout((10,)), self.layout((12, 5), optimizer=OPTIMIZERS[2])
        kept = put(engine, [state_block(some_bytes(9000)), *segment_blocks(old, 3)])
        engine.commit({"r": b"1"})
        for i in range(3):
            put(engine, [state_block(some_bytes(80, i), 1), *segment_blocks(new, 4, seed=i)])
            engine = self.crashed(tmp_path, engine, kept)
            assert engine.records() == {"r": b"1"}
            check(engine, kept)
        kept |= put(engine, segment_blocks(new, 4))
        engine.commit({})
        engine = self.crashed(tmp_path, engine, kept)
        check(engine, kept)
        engine.close()

    def test_what_is_retained_stays(self, engine: Engine, tmp_path: Path) -> None:
        """Of a layout some blocks, of others all or none; again at the next opening."""
        layout = self.layout((10, 20))
        written = put(engine, [data for segment in range(3) for data in segment_blocks(layout, segment)])
        written |= put(engine, [state_block(some_bytes(5000, i), commit=i) for i in range(3)])
        engine.commit({"r": b"1"})
        kept = {b: data for b, data in written.items() if b.owner == 1 or (b.owner == 2 and b.index in {0, 3, 4})}
        for _ in range(2):
            engine = self.crashed(tmp_path, engine, kept)
            check(engine, kept)
        kept |= put(engine, segment_blocks(layout, 3))
        engine.commit({})
        check(engine, kept)
        engine.close()
        engine.close()  # does nothing

    # -- threads and processes ---------------------------------------------------------------------------

    def test_reads_of_other_threads_see_whole_blocks_while_one_writes(self, engine: Engine) -> None:
        """Blocks that stay are what they were while others are written, committed and freed."""
        layout = self.layout((40,))
        kept = put(engine, segment_blocks(layout, 0))
        engine.commit({})
        failures: list[BaseException] = []
        done = threading.Event()

        def read() -> None:
            try:
                while not done.is_set():
                    for block, data in kept.items():
                        assert bytes_of(engine, block) == data
            except BaseException as error:  # shown in the main thread
                failures.append(error)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        before: dict[Block, bytes] = {}
        for segment in range(1, 15):
            written = put(engine, segment_blocks(layout, segment))
            engine.commit({"i": bytes([segment])})
            engine.free(before)
            before = written
        done.set()
        for reader in readers:
            reader.join()
        assert not failures, failures

    def test_located_bytes_are_those_of_the_blocks(self, engine: Engine) -> None:
        """Of engines that keep blocks in files: where they say that rows lie, they lie."""
        layout = self.layout((40, 3))
        written = put(engine, segment_blocks(layout, 1))
        engine.commit({})
        if not isinstance(engine, LocatingEngine):
            pytest.skip("this engine does not say where blocks lie")
        requests = [ReadRequest(block, 0, np.empty(block.size, np.uint8)) for block in written if block.kind == ROWS]
        with engine.locate(requests) as sources:
            assert len(sources) == len(requests)
            for source, request in zip(sources, requests, strict=True):
                if isinstance(source, ReadSource):
                    assert _at(source.handle, source.offset, request.block.size) == written[request.block]
                elif isinstance(source, FieldSource):
                    assert engine.fields_apart
                    assert _fields_of(source, layout, request.block) == written[request.block]

    def test_a_reader_in_another_process_sees_the_newest_commit(self, engine: Engine, tmp_path: Path) -> None:
        """Each time that it asks for records, and what the writer keeps is there for it, through a crash of that."""
        if not self.outlives:
            pytest.skip("nothing of this engine is seen by another process")
        layout = self.layout((10, 20))
        kept = put(engine, [*segment_blocks(layout, 1), state_block(some_bytes(5000))])
        engine.commit({"r": b"first"})
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(type(self), tmp_path, theirs))
        process.start()
        for i in range(2, 6):
            ours.send([*kept])
            records, found = ours.recv()
            assert records == {"r": b"first" if i == 2 else bytes([i - 1])}
            assert found == [*kept.values()]
            kept |= put(engine, segment_blocks(layout, i))
            engine.commit({"r": bytes([i])})
            dead = [block for block in kept if block.owner == i - 1 and block.index == 1]
            engine.free(dead)
            kept = {block: data for block, data in kept.items() if block not in dead}
            if i == 3:
                engine = self.crashed(tmp_path, engine, kept)
        ours.send(None)
        process.join()
        assert process.exitcode == 0
        engine.close()


def _at(handle: int, offset: int, size: int) -> bytes:
    """Return bytes of an open file, which may take whole pages only."""
    low = offset // mmap.PAGESIZE * mmap.PAGESIZE
    pages = mmap.mmap(-1, -(-(offset + size - low) // mmap.PAGESIZE) * mmap.PAGESIZE)
    os.preadv(handle, [pages], low)
    return pages[offset - low : offset - low + size]


def _fields_of(source: FieldSource, layout: BlockLayout, block: Block) -> bytes:
    """Put the fields of a block together, page by page."""
    files: list[bytes] = []
    for one in source.files:
        whole = Path(one.path).read_bytes()
        assert len(whole) == one.file_bytes
        files.append(whole[one.begin :])
    cut, found, row = layout.segment_layout, b"", 0
    first, last = cut.pages_of_block(block.index)
    for rows in cut.page_sizes(first, last).tolist():
        for data, file in zip(files, source.files, strict=True):
            found += data[row * file.row_bytes : (row + rows) * file.row_bytes]
        row += rows
    return found


def _serve(contract: type[EngineContract], path: Path, pipe: Connection[Any, Any]) -> None:
    """Open the engine for reading; each time that blocks are asked for answer with its records and them."""
    engine = contract.open_reader(path)
    while (wanted := pipe.recv()) is not None:
        records = dict(engine.records())
        pipe.send((records, [bytes_of(engine, block) for block in wanted]))
    engine.close()
