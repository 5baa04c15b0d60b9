"""Rows from outside: the first ones of a store, or laid over those that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.bits import hash_keys, keys_of, row_beyond
from tiercache.store.commit import Cursor
from tiercache.store.compaction_plan import NoUses
from tiercache.store.external_sort import ExternalSorter, flush_largest
from tiercache.store.layout import NEVER, Range
from tiercache.store.rewrite import Rewrite
from tiercache.store.row_codec import blocks_of, row_words, to_words
from tiercache.store.segment import BASE_PASS, base_layout, base_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from tiercache.store.commit import Commit
    from tiercache.store.compaction_plan import FirstUses
    from tiercache.store.scan import Chunk
    from tiercache.store.segment import Layout
    from tiercache.store.store import Store
    from tiercache.store.table import Group, Table

LOAD_BYTES = 256 << 20
_PLAIN_KEYS = -(1 << 63) + 2
"""The least key that is no shared row's."""


def load_rows(
    store: Store,
    chunks: Iterable[tuple[str, Chunk]],
    *,
    initial_state: bool = False,
    reserved_keys: Collection[str] = (),
    settings: Mapping[str, Any] | None = None,
    memory_bytes: int = LOAD_BYTES,
    progress: Callable[[str, int], None] | None = None,
) -> Commit:
    """Make a commit of rows from outside, in any order of keys and tables, and return it.

    In a store that has rows each takes the place of its key's row, and all else stays: see ``Store.overlay``.

    ``chunks`` yields (table name, (keys (n,), fields (n, width))), all float32; the fields of a row keep their bits,
    NaN too, but vectors of 16-bit dtypes are rounded to the nearest; a finite number that would become infinite is
    refused. In an empty store the cursor stands before pass 0
    and no pass is said to need the rows. Rows are sorted in temporary files without a name in its folder, so beside the
    caller's chunk about ``memory_bytes`` are taken; each is written there, read, and written to the store. Rows that
    fit the memory need no files.

    ``initial_state``: chunks with the vector alone are taken, and the optimizer state starts at its initial value.
    ``reserved_keys``: names of tables in which INT64_MIN and INT64_MIN + 1 are the out-of-vocabulary row and the null
    row, as in a store that was trained with them; in others these keys are refused.
    ``settings``: plain values that the commit keeps; those that the store has already stay.
    ``progress(stage, rows)`` is called with the rows done since the last call: "sort", then "write".

    Raises ValueError for rows that cannot be taken, a key given twice among them, and for a store that stands inside a
    pass; StoreFullError. After any error, and after a kill, the store stands where it stood.
    """
    before = store.commit
    if before is not None and before.cursor.sample:
        raise ValueError(
            f"{store.label} stands inside pass {before.cursor.pass_index}: train to its end before rows are imported"
        )
    if len(store.segments) > len(store.snapshot.committed):
        raise ValueError(f"{store.label} has rows that no commit names: call discard_uncommitted() first")
    try:
        with _BulkLoad(store, memory_bytes, progress or (lambda *_: None)) as load:
            for name, chunk in chunks:
                load.add(name, chunk, initial_state=initial_state, reserved=name in reserved_keys)
            load.write()
        if before is not None:
            return store.overlay(settings=settings)
        return store.publish(Cursor(0, 0), state=b"", schedule_digest="", settings=settings or {}, environment={})
    except BaseException:
        if not store.closed and store.commit is before:
            store.discard_uncommitted()
        raise


def load_sorted(
    store: Store,
    rows: Callable[[Table], Iterator[Chunk]],
    *,
    most_rows: Mapping[str, int] | None = None,
    uses: FirstUses | None = None,
    start: tuple[int, int] = (0, 0),
    schedule_digest: str = "",
    first_rows: Callable[[Table, NDArray[np.int64]], Sequence[NDArray[np.float32]]] | None = None,
    layout: Layout = base_layout,
    state: bytes = b"",
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Commit:
    """Make commit 0 of an empty store, at ``start`` of a schedule, of rows from elsewhere, and return it.

    ``rows(table)`` yields keys (n,), each once and in hash order over all chunks, and all fields (n, width), float32,
    which keep their bits. ``most_rows``: by table name, the most rows that it yields; with it, temporary files take the
    stated fraction of all rows, without it that of rows that ``uses`` has. ``uses``, ``first_rows``, ``layout``,
    ``progress`` and what is taken of memory and disk are as for ``Store.rewrite``; rows that ``uses`` does not have
    are there with next use ``NEVER``. All rows count as
    changed at this commit.

    Raises ValueError for a store that is not empty, StoreFullError, and what ``rows`` raises; after any error, and
    after a kill, the store has no commit.
    """
    if store.commit is not None or store.segments:
        raise ValueError(f"{store.label} has rows already: rows of other stores go into a new one")
    begin = Cursor(*start)

    def words(table: Table) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        for keys, fields in rows(table):
            yield keys, row_words(table.fields, fields, changed=0)

    try:
        with Rewrite(
            store.reader,
            store.snapshot,
            uses or NoUses(),
            first_rows,
            progress or (lambda *_: None),
            layout=layout,
            retain_segments=False,
            stored=words,
            most_rows=most_rows,
        ) as rewrite:
            for one in rewrite.segments():
                blocks = (block[:4] for block in one.blocks)
                store.append(base_pass(begin.pass_index), one.layouts, blocks, within=begin.sample > 0)
        return store.publish(
            begin, state=state, schedule_digest=schedule_digest, settings=settings or {}, environment=environment or {}
        )
    except BaseException:
        if not store.closed and store.commit is None:
            store.discard_uncommitted()
        raise


class _BulkLoad:
    """Rows of all tables on their way into one segment."""

    def __init__(self, store: Store, memory_bytes: int, progress: Callable[[str, int], None]) -> None:
        self._store, self._progress = store, progress
        self._sorters = {
            table.name: ExternalSorter(
                [("<f4", (table.row_bytes // 4,))], store.reader.scratch, f"sorting the rows of table {table.name!r}",
                memory_bytes, store.counters,
            )
            for table in store.tables
        }  # fmt: skip
        self._tables = {table.name: table for table in store.tables}

    def __enter__(self) -> _BulkLoad:
        return self

    def __exit__(self, *_: object) -> None:
        for sorter in self._sorters.values():
            sorter.close()

    def add(self, name: str, chunk: Chunk, *, initial_state: bool, reserved: bool) -> None:
        """Take a chunk of a table, checked."""
        if name not in self._tables:
            known = ", ".join(repr(table) for table in self._tables)
            raise ValueError(f"there are rows of table {name!r}, but {self._store.label} has {known}: leave them out")
        table, (keys, fields) = self._tables[name], chunk
        _check(table, keys, fields, initial_state=initial_state, reserved=reserved)
        rows = np.empty((keys.size, table.row_bytes // 4), dtype=np.float32)
        column = 0
        for i, field in enumerate(table.fields):
            words = rows[:, column : column + field.words]
            if i < len(fields):
                to_words(field, fields[i], words)
            else:
                words[:] = field.initial
            column += field.words
        self._sorters[name].add(hash_keys(keys, table.table_id), rows)
        flush_largest(self._sorters.values())
        self._progress("sort", keys.size)

    def write(self) -> None:
        """Append all rows as one segment."""
        counts = {name: sorter.rows for name, sorter in self._sorters.items()}
        layouts = []
        for group in self._store.groups:
            rows = tuple(counts[table.name] for table in group.tables)
            layouts.append(base_layout(group, [Range(next_use=NEVER, table_rows=rows)] if sum(rows) else []))
        blocks = (
            block
            for group, layout in zip(self._store.groups, layouts, strict=True)
            for block in blocks_of(group, layout, self._rows(group, layout.block_rows))
        )
        self._store.append(BASE_PASS, layouts, blocks)

    def _rows(self, group: Group, chunk_rows: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yield the rows of all tables of a group in their order."""
        for table in group.tables:
            for keys, rows in self._sorted(table, chunk_rows):
                self._progress("write", keys.size)
                yield keys, rows

    def _sorted(self, table: Table, chunk_rows: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        last: int | None = None
        for hashes, rows in self._sorters[table.name].sorted(chunk_rows):
            keys = keys_of(hashes, table.table_id)
            same = hashes[1:] == hashes[:-1]
            if np.any(same) or int(hashes[0]) == last:
                key = keys[0] if int(hashes[0]) == last else keys[int(np.argmax(same))]
                raise ValueError(f"key {key} of table {table.name!r} is given twice: give each key once")
            last = int(hashes[-1])
            yield keys, rows


def _check(
    table: Table,
    keys: NDArray[np.int64],
    fields: tuple[NDArray[np.float32], ...],
    *,
    initial_state: bool,
    reserved: bool,
) -> None:
    """Raise ValueError for a chunk that cannot be rows of ``table``."""
    if keys.dtype != np.int64 or keys.ndim != 1:
        raise ValueError(f"keys of table {table.name!r} are {keys.shape} of {keys.dtype}: they must be (n,) of int64")
    if len(fields) != len(table.fields) and not (len(fields) == 1 and initial_state):
        names = ", ".join(field.name for field in table.fields)
        advice = ": or ask for the state's initial value with initial_state" if len(fields) == 1 else ""
        raise ValueError(f"rows of table {table.name!r} have {len(fields)} fields and not {names}{advice}")
    for field, values in zip(table.fields, fields, strict=False):
        if values.dtype != np.float32 or values.shape != (keys.size, field.width):
            raise ValueError(
                f"{field.name} of table {table.name!r} is {values.shape} of {values.dtype} for {keys.size:,} keys: "
                f"it must be ({keys.size}, {field.width}) of float32"
            )
        row = row_beyond(values, field.dtype)
        if row is not None:
            number = values[row][np.isfinite(values[row])]
            most = number[np.argmax(np.abs(number))]
            raise ValueError(
                f"{field.name} of table {table.name!r} has {most:g} for key {keys[row]}, which is infinite in "
                f'{field.dtype}: clip the vectors, or give the table dtype = "float32"'
            )
    if not reserved and keys.size and int(keys.min()) < _PLAIN_KEYS:
        shared = "out-of-vocabulary" if int(keys.min()) < _PLAIN_KEYS - 1 else "null"
        raise ValueError(
            f"key {keys.min()} of table {table.name!r} is reserved for the {shared} row: keys start at {_PLAIN_KEYS}; "
            "name the table in reserved_keys if it is that row"
        )
