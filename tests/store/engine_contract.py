"""The contract of ``Engine`` as tests that every engine inherits."""

import multiprocessing
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.store.blobs import (
    OPTIMIZERS,
    Content,
    Part,
    bytes_of,
    check,
    commit_of,
    drop_all,
    drop_fronts,
    head_of,
    layout_of,
    parts_of,
    plain,
    publish,
    put,
    segment,
    serve,
    some_bytes,
)
from tiercache.store.engines.engine import Blob, BlobRows, Engine, ReadRequest
from tiercache.store.files import PAGE_BYTES, paged
from tiercache.store.store_errors import BlockReadError, StoreError, StoreFullError

CALLS = ["put", "front", "drop", "publish", "crash", "fail"]
HYPOTHESIS = {"deadline": None, "suppress_health_check": [HealthCheck.differing_executors]}


class EngineContract:
    """The tests. Inherit, and implement creation, opening after a crash, and opening by a reader."""

    outlives = True
    """True if exactly the published data exists when another process opens the engine."""
    compression: str | None = None
    """The compression of the tables whose rows are put."""

    def layout(self, rows: Sequence[int], **how: Any) -> BlobRows:
        return layout_of(rows, compression=self.compression, **how)

    @classmethod
    def make(cls, path: Path, *, store_budget: int | None = None) -> Engine:
        """Create an empty engine in an empty folder; ``store_budget`` bounds its blobs."""
        raise NotImplementedError

    @classmethod
    def open(cls, path: Path, engine: Engine) -> Engine:
        """Open for writing the data of a dead process; ``engine`` is its closed engine."""
        raise NotImplementedError

    @classmethod
    def open_reader(cls, path: Path) -> Engine:
        """Open the engine for reading, in a process that does not have it open otherwise."""
        raise NotImplementedError

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[Engine]:
        engine = self.make(tmp_path)
        yield engine
        engine.close()

    def crashed(self, path: Path, engine: Engine, needed: Iterable[Content]) -> Engine:
        """Return the engine after the death of the process, opened as a store opens it: with the same fronts
        dropped.
        """
        engine.close()
        engine = self.open(path, engine)
        kept = {blob.name: min(pieces, default=blob.size) for blob, pieces in needed}
        stored = engine.list()
        assert kept.keys() <= stored.keys()
        engine.drop([(name, kept.get(name)) for name in stored if kept.get(name) != 0])
        return engine

    # -- blobs -------------------------------------------------------------------------------------------

    @settings(max_examples=25, **HYPOTHESIS)
    @given(
        sizes=st.lists(st.sampled_from([0, 1, 4095, 4096, 9000, 70_000, 400_000]), min_size=1, max_size=5),
        cut=st.sampled_from([PAGE_BYTES, 3 * PAGE_BYTES, 1 << 17]),
        shift=st.integers(0, 1),
        order=st.none() | st.randoms(use_true_random=False),
        stable=st.booleans(),
    )
    def test_blobs_come_back_from_any_byte_on_whatever_their_parts(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        sizes: list[int],
        cut: int,
        shift: int,
        order: Any,
        *,
        stable: bool,
    ) -> None:
        """Before and after they are published; parts of several blobs alternate, from any memory address."""
        engine = self.make(tmp_path_factory.mktemp("engine"))
        contents = [plain(f"states/0.{i}", some_bytes(size + shift, i)[shift:], cut) for i, size in enumerate(sizes)]
        contents = put(engine, contents, stable=stable, order=order)
        for _ in range(2):
            check(engine, contents)
            for blob, pieces in contents:
                whole = b"".join(data.tobytes() for data in pieces.values())
                for low, high in ((0, blob.size), (blob.size * 3 // 7, blob.size * 6 // 7), (blob.size, blob.size)):
                    assert bytes_of(engine, blob, low, high) == whole[low:high]
            contents += publish(engine, 0) if engine.newest() is None else []
        engine.close()
        engine.close()  # no effect

    @settings(max_examples=15, **HYPOTHESIS)
    @given(
        rows=st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any),
        page_rows=st.integers(1, 6),
        block_rows=st.integers(1, 9),
        optimizer=st.sampled_from(OPTIMIZERS),
        cuts=st.tuples(st.integers(0, 8), st.integers(1, 8)),
        order=st.randoms(use_true_random=False),
        changed=st.booleans(),
    )
    def test_pages_come_back_however_fields_are_stored(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        rows: list[int],
        page_rows: int,
        block_rows: int,
        optimizer: Any,
        cuts: tuple[int, int],
        order: Any,
        *,
        changed: bool,
    ) -> None:
        """Any run of pages of any block, and any keys, equal the data put, in any order of blocks."""
        of = self.layout(rows, page_rows=page_rows, block_rows=block_rows, optimizer=optimizer)
        engine = self.make(tmp_path_factory.mktemp("engine"))
        contents = put(engine, segment(of, 5, changed=changed), order=order)
        for _ in range(2):
            check(engine, contents)
            for blob, pieces in contents:
                kind = blob.name.rpartition("/")[2]
                for block, (at, data) in enumerate(sorted(pieces.items())):
                    if kind == "rows":
                        first, last = of.layout.pages_of_block(block)
                        low = min(first + cuts[0], last - 1)
                        high = min(low + cuts[1], last)
                        begin, end = (of.layout.byte_of_page(p) - of.layout.byte_of_page(first) for p in (low, high))
                    else:
                        begin, end = sorted((min(cuts[0] * 8, data.size), min(cuts[1] * 8, data.size)))
                    assert bytes_of(engine, blob, at + begin, at + end) == data[begin:end].tobytes()
            contents += publish(engine, 0) if engine.newest() is None else []
        engine.close()

    def test_bytes_beyond_the_end_are_an_error_in_words(self, engine: Engine) -> None:
        for blob, _ in put(engine, [plain("states/0.1", some_bytes(10_000)), *segment(self.layout((10,)))]):
            with pytest.raises(BlockReadError, match="ends at byte") as caught:
                engine.read(ReadRequest(blob, 0, np.empty(blob.size + 16, np.uint8)))
            assert caught.value.seen.startswith("ends at byte")
        for name in ("states/0.2", "segments/0.9/meta"):
            with pytest.raises(BlockReadError, match="is missing"):
                engine.read(ReadRequest(Blob(name, 10), 0, np.empty(10, np.uint8)))

    def test_each_part_is_taken_before_the_next_is_asked_for(self, engine: Engine) -> None:
        """A source may yield all of them in the same memory."""
        memory, step = np.empty(300_000, np.uint8), paged(300_000)

        def parts() -> Iterator[Part]:
            for i in range(12):
                memory[:] = i
                yield i % 2, i // 2 * step, memory
            memory[:] = 99

        blobs = [Blob(f"states/0.{i}", 5 * step + memory.size) for i in range(2)]
        engine.put(blobs, parts())
        for i in range(12):
            low = i // 2 * step
            assert set(bytes_of(engine, blobs[i % 2], low, low + memory.size)) == {i}

    def test_stable_parts_are_taken_before_put_returns(self, engine: Engine) -> None:
        """Their memory can be reused from then on."""
        contents = [plain(f"states/0.{i}", np.full(300_000, i, np.uint8)) for i in range(6)]
        contents += segment(self.layout((40,)), 1)
        copies = put(engine, contents, stable=True)
        for _, pieces in contents:
            for data in pieces.values():
                data[:] = 99
        check(engine, copies)

    def test_parts_may_be_read_from_the_engine_that_they_are_put_into(self, engine: Engine) -> None:
        """Like a compaction: from published blobs, and from pending ones."""
        sources = put(engine, segment(self.layout((40,)), 1))
        publish(engine, 0)
        sources += put(engine, [plain("states/0.0", some_bytes(300_000))])
        copies = [one._replace(blob=one.blob._replace(name=one.blob.name.replace("/0.", "/0.9"))) for one in sources]

        def parts() -> Iterator[Part]:
            for index, at, data in parts_of(sources):
                found = bytes_of(engine, sources[index].blob, at, at + data.size)
                yield index, at, np.frombuffer(found, np.uint8)

        engine.put([one.blob for one in copies], parts())
        check(engine, [*sources, *copies])

    def test_a_put_whose_source_fails_changes_nothing(self, tmp_path: Path) -> None:
        layout = self.layout((10,))
        engine = self.make(tmp_path, store_budget=1 << 20)
        kept = put(engine, [plain("states/0.0", some_bytes(9000)), *segment(layout, 1)])
        added = [plain("states/0.1", some_bytes(300_000, 1), 1 << 17), *segment(layout, 2)]

        def failing(whole: int) -> Iterator[Part]:
            yield from parts_of(added)[:whole]
            raise OSError("the source broke")

        for i in range(6):
            with pytest.raises(OSError, match="the source broke"):
                engine.put([one.blob for one in added], failing(i))
            check(engine, kept)
            assert engine.list().keys() == {one.blob.name for one in kept}
        kept += publish(engine, 0, added)
        check(engine, kept)
        engine.close()

    @pytest.mark.parametrize("wrong", ["gap", "twice", "no page", "too long", "no blob", "none"])
    def test_parts_that_are_not_what_the_blobs_say_are_refused(self, engine: Engine, wrong: str) -> None:
        kept = put(engine, [plain("states/0.0", some_bytes(9000))])
        added = plain("states/0.1", some_bytes(50_000), PAGE_BYTES)
        parts = parts_of([added])
        bad = {
            "gap": parts[:3] + parts[4:],
            "twice": parts[:3] + parts[2:],
            "no page": [*parts[:-1], (0, parts[-1][1] + 8, parts[-1][2][8:])],
            "too long": [*parts[:-1], (0, parts[-1][1], some_bytes(PAGE_BYTES))],
            "no blob": [*parts, (1, 0, some_bytes(10))],
            "none": [],
        }[wrong]
        with pytest.raises(ValueError, match=r": .*"):
            engine.put([added.blob], bad)
        assert engine.list().keys() == {"states/0.0"}
        check(engine, kept + put(engine, [added]))

    # -- room --------------------------------------------------------------------------------------------

    def test_a_byte_within_a_page_drops_what_ends_before_it(self, engine: Engine) -> None:
        """Bytes from it on stay; bytes dropped before do not return; unknown blobs count for nothing."""
        data = some_bytes(50_000)
        contents = plain("states/0.1", data)
        put(engine, [contents])
        for upto in (1, 4095, 9000, 20_480, 100, 49_999):
            engine.drop([("states/0.1", upto), ("states/0.9", upto), ("segments/0.77/0/rows", None)])
            stored = engine.list()["states/0.1"]
            assert stored.size == 50_000
            assert stored.dropped <= max(upto, 20_480)
            assert bytes_of(engine, contents.blob, 49_999, 50_000) == data[49_999:].tobytes()
            if upto > 20_000:
                assert bytes_of(engine, contents.blob, upto, 50_000) == data[upto:].tobytes()

    def test_what_is_dropped_is_room(self, tmp_path: Path) -> None:
        """And so are unpublished blobs."""
        engine, commits = self.make(tmp_path, store_budget=1 << 20), list[Content]()
        contents: list[Content] = []
        for i in range(8):
            if i % 4 == 3:
                engine = self.crashed(tmp_path, engine, commits)
            drop_all(engine, contents, shrink=bool(i % 2))
            contents = put(engine, [plain(f"states/0.{i}", some_bytes(700_000, i), 1 << 16)])
            if i % 4 != 2:
                commits += publish(engine, len(commits))
            check(engine, contents + commits)
            if i % 4 == 2:
                drop_all(engine, contents)
                contents = []
        engine.close()

    def test_a_full_engine_says_so_and_changes_nothing(self, tmp_path: Path) -> None:
        engine = self.make(tmp_path, store_budget=1 << 20)
        kept = publish(engine, 0, [plain("states/0.0", some_bytes(700_000))])
        added = [plain(f"states/0.{i}", some_bytes(200_000, i)) for i in range(1, 6)]
        with pytest.raises(StoreFullError, match=r"needs [0-9,]+ more bytes but .* may") as full:
            put(engine, added)
        assert full.value.needed_bytes >= 200_000
        assert engine.newest() == head_of(0)
        assert engine.list().keys() == {one.blob.name for one in kept}
        check(engine, kept)
        kept += publish(engine, 1, added[:1])
        engine = self.crashed(tmp_path, engine, kept)
        assert engine.newest() == head_of(1)
        check(engine, kept)
        engine.close()

    # -- the head ----------------------------------------------------------------------------------------

    def test_a_head_that_follows_another_one_is_refused(self, engine: Engine, tmp_path: Path) -> None:
        """Another writer was faster; nothing changes."""
        with pytest.raises(StoreError, match=r": .*open it again"):
            engine.publish(head_of(1), head_of(0))
        assert engine.newest() is None
        kept = publish(engine, 0) + publish(engine, 1)
        added = put(engine, [plain("commits/2", some_bytes(10))])
        for before in (None, head_of(0), head_of(2), head_of(1)._replace(digest="0" * 64)):
            with pytest.raises(StoreError, match=r": .*open it again"):
                engine.publish(head_of(2), before)
            assert engine.newest() == head_of(1)
            check(engine, kept + added)
        drop_all(engine, added)
        kept += publish(engine, 2)
        engine = self.crashed(tmp_path, engine, kept)
        assert engine.newest() == head_of(2)
        engine.close()

    @settings(max_examples=40, **HYPOTHESIS)
    @example(steps=[("put", 4), ("publish", 0), *[("front", 1), ("put", 4), ("crash", 0)] * 3, ("drop", 0), ("put", 4)])
    @given(steps=st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 7)), max_size=30))
    def test_through_any_order_of_calls_an_engine_is_a_dict(
        self, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
    ) -> None:
        """Nothing is dropped that the newest commit, or the previous one, needs; a crash loses later data.

        Names that were dropped, or lost by a crash, are put again.
        """
        path = tmp_path_factory.mktemp("engine")
        engine, commits = self.make(path), 0
        there, published = dict[str, Content](), dict[str, Content]()
        for seed, (step, which) in enumerate(steps):
            names = sorted({name.rpartition("/")[0] for name in there if name.startswith("segments")})
            numbers = {int(name.split("/")[1].removeprefix("0.")) for name in names}
            if step == "put":
                of = self.layout([which % 5 + 1, which, which * 3])
                number = min({*range(len(numbers) + 1)} - numbers)
                for one in put(engine, segment(of, number, seed=seed, changed=which % 2 > 0)):
                    there[one.blob.name] = one
            elif step == "publish":
                for one in publish(engine, commits):
                    there[one.blob.name] = one
                commits, published = commits + 1, dict(there)
            elif step == "crash":
                engine = self.crashed(path, engine, published.values() if self.outlives else there.values())
                there = dict(published) if self.outlives else there
            elif step == "fail":
                with pytest.raises(ValueError, match="gap"):
                    engine.put([Blob("states/0.0", 90_000)], [(0, 4096, some_bytes(4096))])
            elif names:
                chosen = names[which % len(names)]
                found = [one for name, one in there.items() if name.rpartition("/")[0] == chosen]
                rest = [] if step == "drop" else drop_fronts(engine, found, which)
                drop_all(engine, [] if step == "front" else found)
                left = {one.blob.name: one for one in rest}
                for name in [one.blob.name for one in found]:
                    del there[name]
                    if published.pop(name, None) is not None and name in left:
                        published[name] = left[name]  # no commit needs the lost ones
                there |= left
            check(engine, there.values())
            assert engine.list().keys() == there.keys()
            assert engine.newest() == (head_of(commits - 1) if commits else None)
        engine.close()

    # -- threads and processes ---------------------------------------------------------------------------

    def test_reads_of_other_threads_see_whole_blobs_while_one_writes(self, engine: Engine) -> None:
        """Remaining blobs do not change while others are put, published and dropped."""
        layout, done = self.layout((40,)), threading.Event()
        kept = put(engine, segment(layout, 0))
        publish(engine, 0)

        def read() -> None:
            while not done.is_set():
                check(engine, kept)
                assert engine.newest() is not None

        with ThreadPoolExecutor(2) as threads:
            readers = [threads.submit(read) for _ in range(2)]
            try:
                before: list[Content] = []
                for i in range(1, 15):
                    contents = put(engine, segment(layout, i))
                    publish(engine, i)
                    drop_all(engine, before)
                    before = contents
            finally:
                done.set()
            for reader in readers:
                reader.result()

    def test_a_reader_in_another_process_sees_the_newest_commit(self, engine: Engine, tmp_path: Path) -> None:
        """On each request; data that the writer keeps exists for it, even after a crash of the writer."""
        if not self.outlives:
            pytest.skip("nothing of this engine is seen by another process")
        layout = self.layout((10, 20))
        kept = put(engine, [*segment(layout, 1), plain("states/0.0", some_bytes(5000))])
        publish(engine, 0)
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(self.open_reader, tmp_path, theirs))
        process.start()
        commits = [commit_of(0)]
        for i in range(1, 6):
            put(engine, segment(layout, 100 + i))  # not published yet
            ours.send(kept)
            head, problem = ours.recv()
            assert (head, problem) == (head_of(i - 1), "")
            kept += put(engine, segment(layout, i + 1))
            commits += publish(engine, i)
            dead = [one for one in kept if one.blob.name.startswith(f"segments/0.{i}/")]
            kept = [one for one in kept if one not in dead] + drop_fronts(engine, dead, 2)
            drop_all(engine, segment(layout, 100 + i))
            if i == 3:
                engine = self.crashed(tmp_path, engine, kept + commits)
        ours.send(None)
        process.join()
        assert process.exitcode == 0
        engine.close()
