"""Bulk load: the first rows of a store, or rows that replace stored ones."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.bits import hash_keys, keys_of, row_beyond
from tiercache.store.commit import Commit, Cursor, between_passes
from tiercache.store.compaction_plan import FirstUses, NoUses
from tiercache.store.external_sort import ExternalSorter, flush_largest, rising
from tiercache.store.rewrite import Rewrite
from tiercache.store.row_codec import blocks_of, row_words
from tiercache.store.segment import BASE_PASS, Layout, base_layout, base_layouts, base_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.store.layout import SegmentLayout
    from tiercache.store.scan import Chunk
    from tiercache.store.store import Store
    from tiercache.store.table import Group, Table

LOAD_BYTES = 256 << 20
_PLAIN_KEYS = -(1 << 63) + 2
"""The smallest key that is not reserved for a shared row."""


@contextmanager
def discarding(store: Store) -> Iterator[None]:
    """Drop the segments that are appended inside if it raises before they are committed."""
    before = store.commit
    try:
        yield
    except BaseException:
        if not store.closed and store.commit is before:
            store.discard_uncommitted()
        raise


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

    In a store that has rows, each row replaces the row of its key, and everything else is kept: see ``Store.overlay``.

    ``chunks`` yields (table name, (keys (n,), fields (n, width))), all float32; the fields of a row keep their bits,
    NaN too, but vectors of 16-bit dtypes are rounded to the nearest; a finite number that would become infinite is
    refused. In an empty store the cursor is before pass 0 and the rows have no next use. Rows are sorted in unlinked
    temporary files in the store's folder. In addition to the caller's chunk this takes about ``memory_bytes``; each row
    is written there, read, and written to the store. Rows that fit the memory need no files.

    ``initial_state``: chunks with the vector alone are taken, and the optimizer state starts at its initial value.
    ``reserved_keys``: names of tables in which INT64_MIN and INT64_MIN + 1 are the out-of-vocabulary row and the null
    row, as in a store that was trained with them; in others these keys are refused. ``settings``: plain values that the
    commit keeps; the store's existing values win. ``progress(stage, rows)`` is called with the rows done since the last
    call: "sort", then "write".

    Raises ValueError for invalid rows, for duplicate keys and for a store inside a pass; StoreFullError. After any
    error or kill the store is unchanged.
    """
    if (before := store.commit) is not None:
        between_passes(before, store.label, "rows are imported")
    if len(store.segments) > len(store.snapshot.committed):
        raise ValueError(f"{store.label} has rows that no commit names: call discard_uncommitted() first")
    with discarding(store):
        _append(
            store, chunks, initial_state=initial_state, reserved_keys=reserved_keys, memory_bytes=memory_bytes,
            progress=progress or (lambda *_: None),
        )  # fmt: skip
        if before is not None:
            return store.overlay(settings=settings)
        return store.publish(Cursor(0, 0), state=b"", schedule_digest="", settings=settings or {}, environment={})


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
    """Make commit 0 of an empty store, at ``start`` of a schedule, from other rows, and return it.

    ``rows(table)`` yields keys (n,), each once and in hash order over all chunks, and all fields (n, width), float32,
    which keep their bits. ``most_rows``: by table name, the maximum rows that it yields; with it, temporary files take
    the stated fraction of all rows, without it that fraction of the rows in ``uses``. ``uses``, ``first_rows``,
    ``layout``, ``progress``, memory and disk are as for ``Store.rewrite``; rows that are not in ``uses`` have next use
    ``NEVER``. All rows count as changed at this commit.

    Raises ValueError for a store that is not empty, StoreFullError, and the errors of ``rows``; after any error or kill
    the store has no commit.
    """
    if store.commit is not None or store.segments:
        raise ValueError(f"{store.label} has rows already: rows of other stores go into a new one")
    begin = Cursor(*start)

    def words(table: Table) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        for keys, fields in rows(table):
            yield keys, row_words(table.fields, fields, changed=0)

    with discarding(store):
        with ExitStack() as files:
            rewrite = Rewrite(
                store.reader, store.snapshot, uses or NoUses(), first_rows, progress or (lambda *_: None), files,
                layout=layout, retain_segments=False, stored=words, most_rows=most_rows,
            )  # fmt: skip
            for one in rewrite.segments():
                blocks = (block[:4] for block in one.blocks)
                store.append(base_pass(begin.pass_index), one.layouts, blocks, within=begin.sample > 0)
        return store.publish(
            begin, state=state, schedule_digest=schedule_digest, settings=settings or {}, environment=environment or {}
        )


def _append(
    store: Store, chunks: Iterable[tuple[str, Chunk]], *, initial_state: bool, reserved_keys: Collection[str],
    memory_bytes: int, progress: Callable[[str, int], None],
) -> None:  # fmt: skip
    """Sort the rows of all tables and append them as one segment."""
    tables = {table.name: table for table in store.tables}
    with ExitStack() as stack:
        sorters = {
            name: stack.enter_context(
                ExternalSorter(
                    [("<f4", (table.row_bytes // 4,))], store.reader.scratch, f"sorting the rows of table {name!r}",
                    memory_bytes, store.counters,
                )
            )
            for name, table in tables.items()
        }  # fmt: skip
        for name, (keys, fields) in chunks:
            if name not in tables:
                names = ", ".join(map(repr, tables))
                raise ValueError(f"there are rows of table {name!r}, but {store.label} has {names}: drop these rows")
            table = tables[name]
            _check(table, keys, fields, initial_state=initial_state, reserved=name in reserved_keys)
            states = table.fields[len(fields) :]
            initial = (np.full((keys.size, field.width), field.initial, np.float32) for field in states)
            sorters[name].add(hash_keys(keys, table.table_id), row_words(table.fields, (*fields, *initial)))
            flush_largest(sorters.values())
            progress("sort", keys.size)

        def rows(group: Group, layout: SegmentLayout) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
            for table in group.tables:
                for keys, words in _sorted(table, sorters[table.name], layout.block_rows):
                    progress("write", keys.size)
                    yield keys, words

        layouts = base_layouts(store.groups, lambda table: sorters[table.name].rows)
        store.append(BASE_PASS, layouts, blocks_of(store.groups, layouts, rows))


def _sorted(
    table: Table, sorter: ExternalSorter, chunk_rows: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Yield keys and rows in hash order. Raises ValueError for a key that is there twice."""
    last: int | None = None
    for hashes, rows in sorter.sorted(chunk_rows):
        keys = keys_of(hashes, table.table_id)
        if not rising(hashes, last):
            same = hashes[1:] == hashes[:-1]
            key = keys[0] if int(hashes[0]) == last else keys[int(np.argmax(same))]
            raise ValueError(f"key {key} of table {table.name!r} occurs twice: pass each key once")
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
    if any(np.ma.is_masked(values) for values in (keys, *fields)):
        raise ValueError(f"rows of table {table.name!r} have masked values: leave these rows out, or fill the values")
    if keys.dtype != np.int64 or keys.ndim != 1:
        raise ValueError(f"keys of table {table.name!r} are {keys.shape} of {keys.dtype}: expected int64 of shape (n,)")
    if len(fields) != len(table.fields) and not (len(fields) == 1 and initial_state):
        names = ", ".join(field.name for field in table.fields)
        advice = ": or pass initial_state to start from the initial state" if len(fields) == 1 else ""
        raise ValueError(f"rows of table {table.name!r} have {len(fields)} fields, not {names}{advice}")
    for field, values in zip(table.fields, fields, strict=False):
        if values.dtype != np.float32 or values.shape != (keys.size, field.width):
            raise ValueError(
                f"{field.name} of table {table.name!r} is {values.shape} of {values.dtype} for {keys.size:,} keys: "
                f"expected float32 of shape ({keys.size}, {field.width})"
            )
        row = row_beyond(values, field.dtype)
        if row is not None:
            number = values[row][np.isfinite(values[row])]
            most = number[np.argmax(np.abs(number))]
            raise ValueError(
                f"{field.name} of table {table.name!r} has {most:g} for key {keys[row]}, which is infinite in "
                f'{field.dtype}: clip the vectors, or set dtype = "float32" for the table'
            )
    if not reserved and keys.size and int(keys.min()) < _PLAIN_KEYS:
        shared = "out-of-vocabulary" if int(keys.min()) < _PLAIN_KEYS - 1 else "null"
        raise ValueError(
            f"key {keys.min()} of table {table.name!r} is reserved for the {shared} row: keys start at {_PLAIN_KEYS}; "
            "name the table in reserved_keys if it is that row"
        )
