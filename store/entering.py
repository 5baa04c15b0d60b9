"""A store that begins in the midst of a schedule: its first commit, of rows that other stores have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.base_segment import Layout, base_layout
from tiercache.store.commit import Cursor
from tiercache.store.rewrite import FirstUses, NoUses, Rewrite
from tiercache.store.segment import base_pass
from tiercache.store.vectors import row_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from tiercache.store.commit import Commit
    from tiercache.store.scan import Chunk
    from tiercache.store.store import Store
    from tiercache.store.table import Table

__all__ = ["enter"]


def enter(
    store: Store,
    rows: Callable[[Table], Iterator[Chunk]],
    *,
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
    which keep their bits. ``uses``, ``first_rows``, ``layout``, ``progress`` and what is taken of memory and disk are
    as for ``Store.rewrite``; rows that ``uses`` does not have are there with next use ``NEVER``. All rows count as
    changed at this commit.

    Raises ValueError for a store that is not empty, StoreFullError, and what ``rows`` raises; after any error, and
    after a kill, the store has no commit.
    """
    if store.commit is not None or store.segments:
        raise ValueError(f"{store.label} has rows already: rows of other stores go into a new one")
    begin = Cursor(*start)
    unchanged: NDArray[np.float32] = np.zeros(1, dtype=np.float32)  # the bits of commit 0

    def words(table: Table) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        for keys, fields in rows(table):
            changed = np.broadcast_to(unchanged, (keys.size, 1))
            yield keys, np.concatenate([row_words(table.fields, fields), changed], axis=1)

    try:
        with Rewrite(
            store,
            uses or NoUses(),
            first_rows,
            progress or (lambda *_: None),
            layout=layout,
            retain_segments=False,
            stored=words,
        ) as rewrite:
            layouts = rewrite.read()
            blocks = (block[:4] for block in rewrite.blocks(layouts))
            store.append(base_pass(begin.pass_index), layouts, blocks, within=begin.sample > 0)
        return store.publish(
            begin, state=state, schedule_digest=schedule_digest, settings=settings or {}, environment=environment or {}
        )
    except BaseException:
        if not store.closed and store.commit is None:
            store.forget()
        raise
