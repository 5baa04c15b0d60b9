"""The contract of ``Engine``, promise by promise, as tests that every engine inherits.

class TestMyEngine(EngineContract):
    @classmethod
    def make(cls, path, *, max_bytes=None): ...
    @classmethod
    def open(cls, path, engine): ...
    @classmethod
    def open_reader(cls, path): ...
"""

from __future__ import annotations

import multiprocessing
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiercache.store.blocks import CHANGED, KEYS, ROWS, block_name
from tiercache.store.engine import Form
from tiercache.store.errors import BlockReadError, StoreClosedError, StoreFullError
from tiercache.store.initializer import Zeros
from tiercache.store.optimizer import SGD, Adam, RowWiseAdagrad
from tiercache.store.stream import Range, Stream
from tiercache.store.table import Table, group_tables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.engine import Block, Engine

    Bytes = NDArray[np.uint8]

OPTIMIZERS = (SGD(learning_rate=0.1), RowWiseAdagrad(learning_rate=0.1), Adam())
SIZES = (0, 1, 4095, 4096, 10_000, 300_001)


def some_bytes(size: int, seed: int = 0) -> Bytes:
    """Return made-up bytes."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def form_of(rows: tuple[int, ...], *, piece_rows: int = 3, block_rows: int = 7, **of_table: Any) -> Form:
    """Return the form of a stream of one table with so many rows in each range."""
    usual: dict[str, Any] = {"name": "t", "dim": 3, "optimizer": OPTIMIZERS[1], "initializer": Zeros()}
    group = group_tables([Table(**usual | of_table)])[0]
    ranges = tuple(Range(next_use=use, table_rows=(n,)) for use, n in enumerate(rows, start=1))
    stream = Stream(
        row_bytes=group.row_bytes, piece_rows=piece_rows, block_bytes=group.row_bytes * block_rows, ranges=ranges
    )
    return Form(group, stream)


def segment_blocks(form: Form, segment: int = 0) -> dict[bytes, tuple[Bytes, Form]]:
    """Return made-up blocks of rows, keys and last changes of a whole segment stream, by name."""
    blocks: dict[bytes, tuple[Bytes, Form]] = {}
    for block, size in enumerate(form.stream.block_bytes_B.tolist()):
        rows = size // form.stream.row_bytes
        for at, (kind, num) in enumerate([(ROWS, size), (KEYS, 8 * rows), (CHANGED, 4 * rows)]):
            name = block_name(kind, segment, form.group.index, block)
            blocks[name] = some_bytes(num, seed=1000 * segment + 3 * block + at), form
    return blocks


def given_as(blocks: dict[bytes, tuple[Bytes, Form]]) -> list[Block]:
    """Return blocks as ``write`` takes them."""
    return [(name, data, form) for name, (data, form) in blocks.items()]


def bytes_of(engine: Engine, name: bytes, form: Form | None = None) -> bytes:
    """Return a whole block."""
    out = np.ones(engine.contents().blocks[name], np.uint8)
    engine.read(name, 0, out, form)
    return out.tobytes()


class EngineContract:
    """The tests. Inherit, and say how the engine is made, opened after a crash, and opened by a reader."""

    outlives = True
    """Whether what was committed, and only that, is there when another process opens the engine."""
    compression: str | None = None
    """Of the tables whose rows are written."""

    def form(self, rows: tuple[int, ...], **how: Any) -> Form:
        """Return a form of such a table."""
        return form_of(rows, compression=self.compression, **how)

    @classmethod
    def make(cls, path: Path, *, max_bytes: int | None = None) -> Engine:
        """Make an empty engine in a folder that is empty; ``max_bytes`` bounds its blocks."""
        raise NotImplementedError

    @classmethod
    def open(cls, path: Path, engine: Engine) -> Engine:
        """Open what a process that died left behind; ``engine`` is what it had, and is closed."""
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

    def crashed(self, path: Path, engine: Engine) -> Engine:
        """Return what is there after the process died."""
        engine.close()
        return self.open(path, engine)

    # -- blocks ------------------------------------------------------------------------------------------

    def test_blocks_come_back_from_any_byte_on(self, engine: Engine) -> None:
        """Whatever their length, wherever they lie in memory, before and after the commit."""
        blocks = {bytes([65 + i]): some_bytes(size + 1, i)[1:] for i, size in enumerate(SIZES)}
        engine.write([(name, data, None) for name, data in blocks.items()])
        for _ in range(2):
            for name, data in blocks.items():
                for low, high in ((0, data.size), (data.size // 3, data.size // 2), (data.size, data.size)):
                    out = np.ones(high - low, np.uint8)
                    engine.read(name, low, out)
                    assert out.tobytes() == data[low:high].tobytes()
            engine.commit({}, [])

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(
        rows=st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any),
        piece_rows=st.integers(1, 6),
        block_rows=st.integers(1, 9),
        optimizer=st.sampled_from(OPTIMIZERS),
        cuts=st.tuples(st.integers(0, 8), st.integers(1, 8)),
    )
    def test_pieces_come_back_however_fields_are_kept(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        rows: list[int],
        piece_rows: int,
        block_rows: int,
        optimizer: Any,
        cuts: tuple[int, int],
    ) -> None:
        """Any run of pieces of any block of any stream, and its keys, are the bytes that were written."""
        form = self.form(tuple(rows), piece_rows=piece_rows, block_rows=block_rows, optimizer=optimizer)
        stream, blocks = form.stream, segment_blocks(form, segment=5)
        engine = self.make(tmp_path_factory.mktemp("engine"))
        engine.write(given_as(blocks))
        engine.commit({}, [])
        for block in range(stream.num_blocks):
            first, last = stream.block_piece_B[block : block + 2].tolist()
            low = min(first + cuts[0], last - 1)
            high = min(low + cuts[1], last)
            begin, end = (stream.piece_offset_P[[low, high]] - stream.piece_offset_P[first]).tolist()
            out = np.ones(end - begin, np.uint8)
            name = block_name(ROWS, 5, 0, block)
            engine.read(name, begin, out, form)
            assert out.tobytes() == blocks[name][0][begin:end].tobytes()
        for name, (data, _) in blocks.items():
            assert bytes_of(engine, name, form) == data.tobytes()
        engine.close()

    def test_a_block_that_is_not_there_is_an_error_in_words(self, engine: Engine) -> None:
        """So are bytes beyond its end, and so is a block that a commit deleted."""
        form = self.form((10,))
        rows = block_name(ROWS, 0, 0, 0)
        engine.write([(b"a", some_bytes(10_000), None), *given_as(segment_blocks(form))])
        size = engine.contents().blocks[rows]
        for name, num, words in (
            (b"c", 1, "is missing"),
            (b"a", 10_001, "ends at byte 10,000"),
            (rows, size + 16, "ends"),
        ):
            with pytest.raises(BlockReadError, match=words):
                engine.read(name, 0, np.empty(num, np.uint8), form if name == rows else None)
        engine.commit({}, [b"a", rows])
        for name in (b"a", rows):
            with pytest.raises(BlockReadError, match="is missing"):
                engine.read(name, 0, np.empty(16, np.uint8), form if name == rows else None)

    def test_each_block_is_taken_before_the_next_is_asked_for(self, engine: Engine) -> None:
        """A source may give all of them in the same memory."""
        memory = np.empty(300_000, np.uint8)

        def blocks() -> Iterator[Block]:
            for i in range(12):
                memory[:] = i
                yield bytes([i]), memory, None
            memory[:] = 99

        engine.write(blocks())
        for i in range(12):
            assert set(bytes_of(engine, bytes([i]))) == {i}

    def test_stable_blocks_are_taken_before_write_returns(self, engine: Engine) -> None:
        """Their memory may be used again from then on."""
        memory = [np.full(300_000, i, np.uint8) for i in range(6)]
        engine.write([(bytes([i]), data, None) for i, data in enumerate(memory)], stable=True)
        for data in memory:
            data[:] = 99
        for i in range(6):
            assert set(bytes_of(engine, bytes([i]))) == {i}

    def test_a_write_whose_source_fails_writes_nothing(self, engine: Engine) -> None:
        """The error is the source's own, blocks of the same names stay, and the write can be done again."""
        form = self.form((10,))
        blocks = segment_blocks(form)
        engine.write([(b"a", some_bytes(9000), None)])
        before = engine.contents().blocks

        def failing() -> Iterator[Block]:
            yield b"a", some_bytes(300_000, 1), None
            yield from given_as(blocks)
            raise OSError("the source broke")

        with pytest.raises(OSError, match="the source broke"):
            engine.write(failing())
        assert engine.contents().blocks == before
        assert bytes_of(engine, b"a") == some_bytes(9000).tobytes()
        engine.write(given_as(blocks))
        engine.commit({}, [])
        for name, (data, _) in blocks.items():
            assert bytes_of(engine, name, form) == data.tobytes()

    def test_a_block_of_the_same_name_is_replaced(self, engine: Engine) -> None:
        """In a later write, and within one; with another length, and with a form."""
        form = self.form((10,))
        for i, size in enumerate((5000, 400_000, 10)):
            engine.write([(b"a", some_bytes(7, 50), None), (b"a", some_bytes(size, i), None)])
            blocks = {name: (some_bytes(d.size, i), f) for name, (d, f) in segment_blocks(form).items()}
            engine.write(given_as(blocks))
            assert bytes_of(engine, b"a") == some_bytes(size, i).tobytes()
            assert all(bytes_of(engine, name, form) == data.tobytes() for name, (data, _) in blocks.items())
            if i:
                engine.commit({}, [])

    # -- commits -----------------------------------------------------------------------------------------

    def test_a_commit_sets_and_removes_records_and_deletes_blocks(self, engine: Engine, tmp_path: Path) -> None:
        """In one step, for whoever opens the engine next; what is gone already is no error."""
        engine.write([(b"a", some_bytes(10), None), (b"b", some_bytes(5000), None)])
        engine.commit({"one": b"1", "größe": b"", "long": bytes(100_000)}, [])
        engine.write([(b"c", some_bytes(20, 3), None)])
        engine.commit({"one": b"2", "long": None, "none": None}, [b"a", b"x"])
        again = self.crashed(tmp_path, engine)
        found = again.contents()
        assert found.records == {"one": b"2", "größe": b""}
        assert found.blocks == {b"b": 5000, b"c": 20}
        assert bytes_of(again, b"c") == some_bytes(20, 3).tobytes()
        again.close()

    def test_what_no_commit_named_does_not_survive_a_crash(self, engine: Engine, tmp_path: Path) -> None:
        """New blocks are gone, and a block that was replaced is there as it was; the names are free."""
        if not self.outlives:
            pytest.skip("nothing of this engine outlives its process")
        old, new = self.form((10,)), self.form((12, 5), optimizer=OPTIMIZERS[2])
        engine.write([(b"a", some_bytes(9000), None), *given_as(segment_blocks(old, 3))])
        engine.commit({"r": b"1"}, [])
        for _ in range(3):
            before = engine.contents()
            engine.write([(b"a", some_bytes(80, 1), None), (b"b", some_bytes(70), None)])
            engine.write(given_as(segment_blocks(new, 3)))
            engine.write(given_as(segment_blocks(new, 4)))
            engine = self.crashed(tmp_path, engine)
            assert engine.contents() == before
            assert bytes_of(engine, b"a") == some_bytes(9000).tobytes()
            for name, (data, _) in segment_blocks(old, 3).items():
                assert bytes_of(engine, name, old) == data.tobytes()
        engine.write(given_as(segment_blocks(new, 4)))
        engine.commit({}, [])
        engine = self.crashed(tmp_path, engine)
        for name, (data, _) in segment_blocks(new, 4).items():
            assert bytes_of(engine, name, new) == data.tobytes()
        engine.close()

    def test_a_block_deleted_and_written_again_is_the_new_one(self, engine: Engine, tmp_path: Path) -> None:
        """Even at once, and through a crash."""
        form = self.form((10, 20))
        names = [*segment_blocks(form)]
        for i in range(4):
            blocks = {name: (some_bytes(d.size, 10 * i + 1), f) for name, (d, f) in segment_blocks(form).items()}
            engine.write(given_as(blocks))
            engine.commit({"i": bytes([i])}, [])
            for name in names:
                assert bytes_of(engine, name, form) == blocks[name][0].tobytes()
            engine.commit({}, names)
            assert engine.contents().blocks == {}
            if i == 2:
                engine = self.crashed(tmp_path, engine)
        assert engine.contents().records == {"i": b"\3"}
        engine.close()

    def test_a_full_engine_says_so_and_changes_nothing(self, tmp_path: Path) -> None:
        """With the bytes that were needed; what is deleted makes room."""
        engine = self.make(tmp_path, max_bytes=1 << 20)
        engine.write([(b"a", some_bytes(700_000), None)])
        engine.commit({"r": b"1"}, [])
        before = engine.contents()
        with pytest.raises(StoreFullError, match=r"needs [0-9,]+ more bytes but .* may") as full:
            engine.write([(bytes([i]), some_bytes(200_000, i), None) for i in range(5)])
        assert full.value.needed_bytes >= 200_000
        assert engine.contents() == before
        assert bytes_of(engine, b"a") == some_bytes(700_000).tobytes()
        engine.commit({"r": b"2"}, [b"a"])
        engine.commit({}, [])
        engine.write([(b"b", some_bytes(800_000, 2), None)])
        engine.commit({}, [])
        engine = self.crashed(tmp_path, engine)
        assert engine.contents().records == {"r": b"2"}
        assert bytes_of(engine, b"b") == some_bytes(800_000, 2).tobytes()
        engine.close()

    # -- threads and processes ---------------------------------------------------------------------------

    def test_reads_of_other_threads_see_whole_blocks_while_one_writes(self, engine: Engine) -> None:
        """Blocks that stay are what they were while others are written, committed and deleted."""
        form = self.form((40,))
        kept = segment_blocks(form, 0)
        engine.write(given_as(kept))
        engine.commit({}, [])
        failures: list[BaseException] = []
        done = threading.Event()

        def read() -> None:
            try:
                while not done.is_set():
                    for name, (data, _) in kept.items():
                        out = np.empty(data.size, np.uint8)
                        engine.read(name, 0, out, form)
                        assert out.tobytes() == data.tobytes()
            except BaseException as error:  # shown in the main thread
                failures.append(error)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for segment in range(1, 15):
            engine.write(given_as(segment_blocks(form, segment)))
            engine.commit({"i": bytes([segment])}, [*segment_blocks(form, segment - 1)] if segment > 1 else [])
        done.set()
        for reader in readers:
            reader.join()
        assert not failures, failures

    def test_a_reader_in_another_process_stays_at_its_commit(self, engine: Engine, tmp_path: Path) -> None:
        """However far this one goes, and through a crash of it, what the commit named is there, whole."""
        if not self.outlives:
            pytest.skip("nothing of this engine is seen by another process")
        form = self.form((10, 20))
        first = segment_blocks(form, 1)
        engine.write([*given_as(first), (b"a", some_bytes(5000), None)])
        engine.commit({"r": b"first"}, [])
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(type(self), tmp_path, theirs))
        process.start()
        assert ours.recv() == "open"
        dead = [b"a", *first]
        for i in range(2, 8):
            engine.write(given_as(segment_blocks(form, i)))
            engine.write([(b"a", some_bytes(100, i), None)])
            engine.commit({"r": bytes([i])}, dead)
            dead = [*segment_blocks(form, i)]
            if i in {3, 5}:
                engine = self.crashed(tmp_path, engine)
        ours.send([(name, form) for name in first] + [(b"a", None)])
        records, found = ours.recv()
        process.join()
        assert records == {"r": b"first"}
        assert found == {name: data.tobytes() for name, (data, _) in first.items()} | {b"a": some_bytes(5000).tobytes()}
        engine.close()

    def test_a_closed_engine_says_so(self, engine: Engine) -> None:
        """And is closed again without harm."""
        engine.close()
        engine.close()
        if self.outlives:
            calls = (lambda: engine.commit({}, []), lambda: engine.write([]), engine.contents)
            for call in (*calls, lambda: engine.read(b"a", 0, np.empty(1, np.uint8))):
                with pytest.raises(StoreClosedError, match="is closed: open it again"):
                    call()


def _serve(contract: type[EngineContract], path: Path, pipe: Connection[Any, Any]) -> None:
    """Open the engine for reading; when asked, answer with its records and the blocks that are wanted."""
    engine = contract.open_reader(path)
    pipe.send("open")
    wanted = pipe.recv()
    pipe.send((engine.contents().records, {name: bytes_of(engine, name, form) for name, form in wanted}))
    engine.close()
