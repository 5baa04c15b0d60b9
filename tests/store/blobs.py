"""Random blobs of segments, states and commits: put, published, compared and dropped."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tiercache.store.engines.engine import Blob, BlobRows, Engine, Head, ReadRequest
from tiercache.store.files import paged
from tiercache.store.initializer import Zeros
from tiercache.store.layout import Range, SegmentLayout
from tiercache.store.optimizer import SGD, Adam, RowWiseAdagrad
from tiercache.store.store_errors import StoreError
from tiercache.store.table import Table, group_tables

Bytes = NDArray[np.uint8]
Part = tuple[int, int, NDArray[Any]]
"""The index of a blob in a put, an offset, and the bytes there."""
OPTIMIZERS = (SGD(learning_rate=0.1), RowWiseAdagrad(learning_rate=0.1), Adam())


def some_bytes(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Content(NamedTuple):
    """A blob and its content: bytes by their offset, in whole pages except at ends."""

    blob: Blob
    pieces: dict[int, Bytes]


def plain(name: str, data: Bytes, cut: int = 1 << 40) -> Content:
    """Return a blob of bytes, put in parts of ``cut`` bytes."""
    return Content(Blob(name, data.size), {at: data[at : at + cut] for at in range(0, data.size, cut)})


def layout_of(rows: Sequence[int], *, page_rows: int = 3, block_rows: int = 7, **of_table: Any) -> BlobRows:
    """Return the layout of one table with the given number of rows in each range."""
    usual: dict[str, Any] = {"name": "t", "dim": 3, "optimizer": OPTIMIZERS[1], "initializer": Zeros()}
    group = group_tables([Table(**usual | of_table)])[0]
    ranges = tuple(Range(next_use=use, table_rows=(n,)) for use, n in enumerate(rows, start=1))
    layout = SegmentLayout.of(
        row_bytes=group.row_bytes, page_rows=page_rows, block_bytes=group.row_bytes * block_rows, ranges=ranges
    )
    return BlobRows(group, layout)


def segment(of: BlobRows, number: int = 0, *, seed: int = 0, changed: bool = True) -> list[Content]:
    """Return random blobs of a whole segment: rows, keys, last changes and metadata."""
    layout, name = of.layout, f"segments/0.{number}"
    found = [plain(f"{name}/meta", some_bytes(5000, 10 * number + seed))]
    for kind, item in (("rows", layout.row_bytes), ("keys", 8), ("changed", 4))[: 3 if changed else 2]:
        step, pieces, size = paged(layout.block_rows * item), dict[int, Bytes](), 0
        for block in range(layout.num_blocks):
            low, high = layout.rows_of_block(block)
            pieces[block * step] = some_bytes((high - low) * item, seed=1000 * number + 100_000 * seed + block + item)
            size = block * step + pieces[block * step].size
        found.append(Content(Blob(f"{name}/{of.group.index}/{kind}", size, of), pieces))
    return found


def parts_of(contents: Iterable[Content]) -> list[Part]:
    return [(index, at, data) for index, one in enumerate(contents) for at, data in one.pieces.items()]


def put(engine: Engine, contents: Sequence[Content], *, stable: bool = False, order: Any = None) -> list[Content]:
    """Put blobs, their parts in a random ``order`` if one is given; return copies of their content."""
    copies = [one._replace(pieces={at: data.copy() for at, data in one.pieces.items()}) for one in contents]
    parts = parts_of(contents)
    if order is not None:
        order.shuffle(parts)
    engine.put([one.blob for one in contents], parts, stable=stable)
    return copies


def publish(engine: Engine, number: int, contents: Sequence[Content] = ()) -> list[Content]:
    """Put blobs, and publish a commit; return them together with the commit's blob."""
    contents = put(engine, [*contents, commit_of(number)])
    engine.publish(head_of(number), head_of(number - 1) if number else None)
    return contents


def assert_broken_by_a_failed_sync(engine: Engine, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Publish while a function of a module, which syncs, fails: this and later calls fail; closes the engine."""

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(5, "the disk broke")

    monkeypatch.setattr(module, name, failing)
    with pytest.raises(StoreError, match="the disk broke"):
        publish(engine, 1)
    monkeypatch.undo()
    assert engine.newest() == head_of(0)
    with pytest.raises(StoreError, match="could not be synced: fix that and open the store again"):
        engine.publish(head_of(1), head_of(0))
    engine.close()


def commit_of(number: int) -> Content:
    """Return the commit that ``publish`` puts for a number."""
    return plain(f"commits/{number}", np.frombuffer(f"commit {number}".encode() * 9, np.uint8))


def head_of(number: int) -> Head:
    """Return the head of that commit."""
    blob, pieces = commit_of(number)
    return Head(blob.name, blob.size, hashlib.sha256(pieces[0].tobytes()).hexdigest())


def bytes_of(engine: Engine, blob: Blob, low: int, high: int) -> bytes:
    out = np.ones(high - low, np.uint8)
    engine.read(ReadRequest(blob, low, out))
    return out.tobytes()


def check(engine: Engine, contents: Iterable[Content]) -> None:
    """Compare blobs with their original content."""
    stored = engine.list()
    for blob, pieces in contents:
        assert stored[blob.name].size == blob.size
        assert stored[blob.name].dropped <= min(pieces, default=blob.size)
        for at, data in pieces.items():
            assert bytes_of(engine, blob, at, at + data.size) == data.tobytes(), (blob.name, at)


def drop_all(engine: Engine, contents: Iterable[Content], **how: Any) -> None:
    engine.drop([(one.blob.name, None) for one in contents], **how)


def drop_fronts(engine: Engine, contents: Iterable[Content], blocks: int) -> list[Content]:
    """Drop the first blocks of a segment's blobs, and whole ones without further blocks; return the rest."""
    rest, gone = list[Content](), list[tuple[str, int | None]]()
    for one in contents:
        if one.blob.of is not None and blocks:
            kept = {at: one.pieces[at] for at in sorted(one.pieces)[blocks:]}
            gone.append((one.blob.name, min(kept, default=None)))
            rest += [one._replace(pieces=kept)] if kept else []
        else:
            rest.append(one)
    engine.drop(gone)
    return rest


def serve(open_reader: Callable[[Path], Engine], path: Path, pipe: Connection) -> None:
    """Open an engine for reading; for each message with blobs answer with its head, and differences from them."""
    engine = open_reader(path)
    while (contents := pipe.recv()) is not None:
        head, problem = engine.newest(), ""
        try:
            check(engine, contents)
        except (AssertionError, StoreError) as error:
            problem = repr(error)
        pipe.send((head, problem))
    engine.close()
