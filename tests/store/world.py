"""A small world to store: a cyclic schedule over random passes, and a dict of the current value of every row.

The slow obvious version of a store: tests compare the store with it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiercache.store.bits import hash_keys
from tiercache.store.bulk_load import load_rows
from tiercache.store.commit import Commit, Cursor
from tiercache.store.layout import NEVER, Range, SegmentLayout
from tiercache.store.row_codec import initial_rows, row_words
from tiercache.store.segment import Segment
from tiercache.store.store import Store
from tiercache.store.table import Group, Table

Key = tuple[str, int]
Int64s = NDArray[np.int64]


@dataclass
class World:
    """Passes of keys for tables; ``rows`` has each key's row, ``uses`` the next use with which it was stored.

    ``pass_index`` is the next pass; ``scheduled`` is True if rows wait for passes; ``state`` is the dense state of the
    newest commit, ``cursor`` its position, and ``digest`` that of its schedule. Rows are functions of schedule, pass,
    table and key. ``changed`` is the commit that last changed each row, except rows
    ``trained`` since, which the next commit will change.
    """

    tables: Sequence[Table]
    num_passes: int = 3
    keys_per_pass: int = 40
    universe: int = 100
    seed: int = 0
    page_rows: int = 4
    block_rows: int = 10
    pass_index: int = 0
    schedule: int = 0
    rows: dict[Key, bytes] = field(default_factory=dict)
    uses: dict[Key, int] = field(default_factory=dict)
    changed: dict[Key, int] = field(default_factory=dict)
    trained: set[Key] = field(default_factory=set)
    scheduled: bool = True
    cursor: Cursor | None = None
    digest: str = ""
    state: bytes = b""

    def __post_init__(self) -> None:
        self.passes = self.draw(self.seed)

    def draw(self, seed: int) -> list[dict[str, Int64s]]:
        generator = np.random.default_rng(seed)
        return [
            {
                table.name: generator.choice(self.universe, size=self.keys_per_pass, replace=False).astype(np.int64)
                - self.universe // 2
                for table in self.tables
            }
            for _ in range(self.num_passes)
        ]

    def keys(self, pass_index: int) -> Iterator[Key]:
        """Yield (table, key) of all rows that ``pass_index`` trains."""
        for name, keys in self.passes[pass_index % self.num_passes].items():
            for key in keys.tolist():
                yield name, key

    def next_use(self, key: Key, pass_index: int) -> int:
        """Return the first pass after ``pass_index`` that needs ``key``."""
        name, number = key
        upcoming = range(pass_index + 1, pass_index + self.num_passes + 1)
        return next(v for v in upcoming if number in self.passes[v % self.num_passes][name])

    def train(self, *, part: int = 0) -> None:
        """Change every row that the present pass trains."""
        for table in self.tables:
            widths = [field.width for field in table.fields]
            for key in self.passes[self.pass_index % self.num_passes][table.name].tolist():
                seed = [self.schedule, self.pass_index, part, key & 0xFFFF, table.table_id & 0xFFFF]
                numbers = np.random.default_rng(seed).random((1, sum(widths)), dtype=np.float32)
                self._set(table, [key], np.split(numbers, np.cumsum(widths)[:-1], axis=1))

    def layout(self, group: Group, *, within: bool) -> tuple[SegmentLayout, list[Key]]:
        """Return the layout of the present pass's dump, and its keys in order; record their next uses."""
        uses: dict[int, list[list[Key]]] = {}
        for place, table in enumerate(group.tables):
            keys = np.sort(self.passes[self.pass_index % self.num_passes][table.name])
            for key in keys[np.argsort(hash_keys(keys, table.table_id))].tolist():
                pair = table.name, key
                use = self.pass_index if within else self.next_use(pair, self.pass_index)
                self.uses[pair] = use
                uses.setdefault(use, [[] for _ in group.tables])[place].append(pair)
        ordered = sorted(uses.items())
        ranges = tuple(Range(next_use=use, table_rows=tuple(map(len, keys))) for use, keys in ordered)
        layout = SegmentLayout.of(
            row_bytes=group.row_bytes,
            page_rows=self.page_rows,
            block_bytes=group.row_bytes * self.block_rows,
            ranges=ranges,
        )
        return layout, [key for _, tables in ordered for keys in tables for key in keys]

    def blocks(
        self, layout: SegmentLayout, keys: list[Key], group: Group
    ) -> Iterator[tuple[int, int, NDArray[np.uint8], NDArray[np.int64]]]:
        """Yield the blocks of a layout, all in the same two arrays."""
        data = np.empty(layout.block_rows * layout.row_bytes, dtype=np.uint8)
        numbers = np.empty(layout.block_rows, dtype=np.int64)
        for block in range(layout.num_blocks):
            pages = range(*layout.pages_of_block(block))
            packed = b"".join(self.pack_page(layout, keys, group, page) for page in pages)
            first, last = layout.rows_of_block(block)
            data[: len(packed)] = np.frombuffer(packed, np.uint8)
            numbers[: last - first] = [key for _, key in keys[first:last]]
            yield group.index, block, data[: len(packed)], numbers[: last - first]

    def pack_page(self, layout: SegmentLayout, keys: list[Key], group: Group, page: int) -> bytes:
        """Return the bytes of a page: field by field, and in each row by row."""
        first, last = layout.row_of_page(page), layout.row_of_page(page + 1)
        rows = [np.frombuffer(self.rows[key], np.float32) for key in keys[first:last]]
        cuts = np.cumsum([f.words for f in group.fields])[:-1]
        fields = zip(*(np.split(row, cuts) for row in rows), strict=True)
        return b"".join(np.concatenate(values).tobytes() for values in fields)

    def append(self, store: Store, *, within: bool = False) -> Segment:
        """Dump the present pass."""
        laid = [(*self.layout(group, within=within), group) for group in store.groups]
        blocks = (block for layout, keys, group in laid for block in self.blocks(layout, keys, group))
        return store.append(self.pass_index, [layout for layout, _, _ in laid], blocks, within=within)

    def compact(self, store: Store) -> None:
        """Compact; from now on no row has a next use, and only ``follow`` can continue."""
        self._note(store.compact())
        self.uses, self.scheduled = dict.fromkeys(self.rows, NEVER), False

    def follow(
        self,
        store: Store,
        passes: list[dict[str, Int64s]],
        progress: Callable[[str, int], None] | None = None,
        *,
        start: tuple[int, int] | None = None,
        retain_segments: bool = True,
    ) -> Commit:
        """Enter a schedule of other passes: rows wait for the first of them, and new keys have a row."""
        self.passes, self.num_passes, self.pass_index = passes, len(passes), 0 if start is None else start[0]
        self.schedule += 1
        upcoming = range(self.pass_index, self.pass_index + self.num_passes)
        first_uses = {key: pass_index for pass_index in reversed(upcoming) for key in self.keys(pass_index)}
        for table in self.tables:
            new = [key for name, key in first_uses if name == table.name and (name, key) not in self.rows]
            self._set(table, new, initial_rows(table, np.array(new, dtype=np.int64)))
        self.uses = {key: first_uses.get(key, NEVER) for key in self.rows}
        commit = store.rewrite(
            WorldUses(self.tables, first_uses), schedule_digest=f"schedule {self.schedule}", progress=progress,
            start=None if start is None else Cursor(*start), retain_segments=retain_segments,
        )  # fmt: skip
        self._note(commit)
        self.scheduled = True
        return commit

    def lay_over(self, store: Store, keys: dict[str, list[int]]) -> Commit:
        """Import random rows for keys; from now on no row has a next use, and only ``follow`` can continue."""
        chunks = []
        for table in self.tables:
            if mine := keys.get(table.name):
                draw = np.random.default_rng([self.pass_index, len(self.changed), table.table_id & 0xFFFF])
                fields = tuple(draw.random((len(mine), field.width), dtype=np.float32) for field in table.fields)
                self._set(table, mine, fields)
                chunks.append((table.name, (np.array(mine, np.int64), fields)))
        commit = load_rows(store, chunks)
        self._note(commit)
        self.uses, self.scheduled = dict.fromkeys(self.rows, NEVER), False
        return commit

    def _set(self, table: Table, keys: Sequence[int], fields: Sequence[NDArray[np.float32]]) -> None:
        """Give keys of a table rows, each a number of every field."""
        words = row_words(table.fields, fields)
        for i, key in enumerate(keys):
            self.rows[table.name, key] = words[i].tobytes()
            self.trained.add((table.name, key))

    def run(self, store: Store, passes: int) -> None:
        """Train, dump and commit some passes."""
        for _ in range(passes):
            self.train()
            self.append(store)
            self.pass_index += 1
            self.publish(store)

    def publish(self, store: Store, *, sample: int = 0) -> None:
        """Commit the state of the world."""
        state = f"state at {self.pass_index}, {sample}".encode()
        commit = store.publish(
            Cursor(self.pass_index, sample), state=state, schedule_digest="cyclic", settings={"seed": self.seed},
            environment={"threads": 1},
        )  # fmt: skip
        self.state = state
        self._note(commit)

    def _note(self, commit: Commit) -> None:
        """Record that ``commit`` has the trained rows."""
        self.cursor, self.digest = commit.cursor, commit.schedule_digest
        self.changed |= dict.fromkeys(self.trained, commit.id)
        self.trained = set()

    def check_changes(self, store: Store, since: int) -> None:
        """Assert that exactly the rows that changed after commit ``since`` are returned, once each, and are counted.

        A commit that a rollback gave up is not checked.
        """
        if store.commit is not None and any(first <= since <= last for first, last in store.commit.abandoned):
            return
        for table in self.tables:
            given = []
            for keys, fields in store.changes(table.name, since=since):
                words = row_words(table.fields, tuple(fields.values()))
                given += [(key, words[i].tobytes()) for i, key in enumerate(keys.tolist())]
            keys = sorted(key for (name, key), id_ in self.changed.items() if name == table.name and id_ > since)
            assert sorted(given) == [(key, self.rows[table.name, key]) for key in keys], (table.name, since)
            assert store.changed_rows(table.name, since=since) == len(keys)

    def check(self, store: Store, *, after: int) -> None:
        """Assert that every row is found with its bits, except rows whose next use is pass ``after`` or earlier."""
        keys = np.arange(-self.universe // 2, self.universe // 2 + 1)
        for group in store.groups:
            for table in group.tables:
                ids, rows = store.locate(table.name, keys, after=after)
                for key, id_ in zip(keys.tolist(), ids.tolist(), strict=True):
                    assert (id_ >= 0) == (self.uses.get((table.name, key), -1) > after), (table.name, key, id_)
                for segment in store.segments:
                    mine = ids == segment.id
                    found = row_words(group.fields, store.read_rows(segment, group.index, rows[mine]))
                    for i, key in enumerate(keys[mine].tolist()):
                        assert found[i].tobytes() == self.rows[table.name, key], (table.name, key)

    def check_load(self, store: Store, pass_index: int) -> None:
        """Assert that the ranges with next use ``pass_index`` hold exactly the rows that it needs and that exist."""
        expected = {key: self.rows[key] for key in self.keys(pass_index) if key in self.rows}
        assert self.loaded(store, pass_index) == expected

    def check_within(self, store: Store) -> None:
        """Assert that, after a commit inside the present pass, its key set loads with its current rows."""
        assert self.loaded(store, self.pass_index) == {key: self.rows[key] for key in self.keys(self.pass_index)}
        for name, keys in self.passes[self.pass_index % self.num_passes].items():
            ids, _ = store.locate(name, keys, after=self.pass_index - 1)
            assert set(ids.tolist()) == {store.segments[-1].id}

    def loaded(self, store: Store, pass_index: int) -> dict[Key, bytes]:
        """Read the live ranges of the schedule with next use ``pass_index``."""
        loaded: dict[Key, bytes] = {}
        for segment in scheduled(store):
            for group in store.groups:
                loaded |= self.load_range(store, segment, group, pass_index)
        return loaded

    def load_range(self, store: Store, segment: Segment, group: Group, pass_index: int) -> dict[Key, bytes]:
        """Read the live range with next use ``pass_index`` of a layout, row by row."""
        layout, loaded = segment.layouts[group.index], {}
        for index in range(store.snapshot.first_range(segment, group.index), layout.num_ranges):
            rows = layout.ranges[index]
            if rows.next_use != pass_index:
                continue
            low, high = layout.pages_of_range(index)
            out = np.empty(layout.byte_of_page(high) - layout.byte_of_page(low), np.uint8)
            store.read(segment, group.index, low, high, out)
            names = np.repeat([table.name for table in group.tables], rows.table_rows).tolist()
            for page in range(low, high):
                first, last = layout.row_of_page(page), layout.row_of_page(page + 1)
                numbers, out = np.split(out, [(last - first) * layout.row_bytes])
                cuts = np.cumsum([field.words * (last - first) for field in group.fields])[:-1]
                fields = [part.reshape(last - first, -1) for part in np.split(numbers.view(np.float32), cuts)]
                block = layout.block_of_page(page)
                keys = store.reader.keys(segment, group.index, block)[first - layout.rows_of_block(block)[0] :]
                for i, key in enumerate(keys[: last - first].tolist()):
                    name = names[first + i - layout.first_row_R.item(index)]
                    loaded[name, key] = b"".join(values[i].tobytes() for values in fields)
        return loaded


def scheduled(store: Store) -> list[Segment]:
    """Return the segments whose next uses are passes of the schedule: those that are not retained."""
    retained = store.commit.retained_ids if store.commit else ()
    return [segment for segment in store.segments if segment.id not in retained]


class WorldUses:
    """First uses of a schedule from a dict of (table, key), a few keys at a time."""

    def __init__(self, tables: Sequence[Table], uses: Mapping[Key, int], *, slice_keys: int = 5) -> None:
        self._tables, self._uses, self._slice_keys = {table.name: table for table in tables}, uses, slice_keys

    def counts(self, table_name: str) -> Mapping[int, int]:
        """Return the number of keys of a table with each first use."""
        return Counter(use for (name, _), use in self._uses.items() if name == table_name)

    def slices(self, table_name: str) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield keys in hash order with their first uses."""
        keys = np.array([key for name, key in self._uses if name == table_name], np.int64)
        keys = keys[np.argsort(hash_keys(keys, self._tables[table_name].table_id))]
        for first in range(0, keys.size, self._slice_keys):
            part = keys[first : first + self._slice_keys]
            yield part, np.array([self._uses[table_name, key] for key in part.tolist()], np.int64)
