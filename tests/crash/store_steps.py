"""A store's life in a few steps, each a commit, resumable after any of them; and the expected content after each.

All rows are functions of table, key and the pass that changed them last. So the content of the store after a commit
is known without running anything: that is the oracle.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercache.store import (
    NEVER,
    Adagrad,
    Cursor,
    Group,
    Range,
    SegmentLayout,
    Store,
    StoreError,
    StoreFullError,
    Table,
    TableMismatchError,
    Zeros,
    alter,
    direct_io,
    forget,
    group_tables,
    hash_keys,
    mix,
)

TABLES = (
    Table(name="item", dim=256, optimizer=Adagrad(learning_rate=0.1), initializer=Zeros()),  # rows of 2 KiB
    Table(name="user", dim=3, optimizer=Adagrad(learning_rate=0.1), initializer=Zeros()),
    Table(name="word", dim=3, optimizer=Adagrad(learning_rate=0.1), initializer=Zeros()),
)
ADDED = Table(name="added", dim=3, optimizer=Adagrad(learning_rate=0.1), initializer=Zeros())
"""The table added by an alteration."""
ERASED = 50  # the first keys of the first table, which are forgotten
UNIVERSE = 240  # keys of a table: 0 to UNIVERSE - 1
PASS_KEYS = (150, 40, 90)
"""Keys of each table in each pass; their numbers differ so that the file grows, shrinks and has holes."""
BLOCK_BYTES = {2048: 256 << 10, 24: 24 * 64}
"""By bytes of a row: blocks of items are written and read past the page cache, the other blocks are gathered."""
PAGE_ROWS = 8
_STEPS_IN_PASS = 16  # more than any step's sample


Note = Callable[..., None]  # note(begun=number) before the publish of a commit, note(done=number) after it


class StoreChangedError(Exception):
    """A reader sees a different commit than it opened."""


class BrokenSourceError(Exception):
    """A dump's blocks ended in an error, as the step requested."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The operations up to one commit."""

    passes: tuple[int, ...] = ()  # passes whose rows are dumped
    sample: int = 0  # the position of the commit inside the last pass; 0: after it
    state_bytes: int = 100  # bytes of the dense state
    stable: bool = False  # true if the blocks of a dump may be written together
    reopen: bool = False  # true if the store is closed and reopened first
    forget: bool = False  # true if a dump is made and forgotten first
    broken: bool = False  # true if a dump fails half-way first
    reader: bool = False
    """True if a reader opens the store first, and reads its whole unpinned commit two commits later."""
    compact: bool = False  # true if the commit is a compaction without a dump; no pass comes after it
    erase: bool = False  # true if the commit forgets the first keys of a table
    alter: bool = False  # true if the commit adds a table
    pin: str = ""  # the name that pins the previous commit from this one on, which equals it otherwise
    unpin: str = ""  # the name that this commit unpins; it equals the previous one otherwise
    rollback: int = -1  # the commit that this one restores; -1: none

    @property
    def like(self) -> bool:
        """True if it has the position, the settings and the dense state of an older commit."""
        return self.compact or self.erase or self.alter or bool(self.pin or self.unpin) or self.rollback >= 0

    @property
    def cursor(self) -> Cursor:
        if not self.passes:
            return Cursor(0)
        return Cursor(self.passes[-1], self.sample) if self.sample else Cursor(self.passes[-1] + 1)


STEPS = (
    Step(),
    Step(passes=(0,), stable=True),
    Step(passes=(1,), sample=3),
    Step(passes=(1,), sample=9, state_bytes=9000),
    Step(pin="inside"),
    Step(passes=(1,)),
    Step(passes=(2,), forget=True, state_bytes=0, reader=True),
    Step(passes=(3, 4), stable=True),
    Step(passes=(5,), reopen=True, broken=True, state_bytes=(4 << 20) + 5000),
    Step(pin="best"),
    Step(passes=(6,), stable=True),
    Step(passes=(7,), sample=5, reopen=True, reader=True),
    Step(rollback=8),
    Step(unpin="inside"),
    Step(passes=(6, 7), forget=True, state_bytes=300_000),
    Step(pin="best"),
    Step(passes=(8,)),
    Step(compact=True),
    Step(erase=True),
    Step(alter=True),
    Step(compact=True),
    Step(unpin="best"),
)
"""Chosen for coverage: commits inside a pass, growth, holes, freed places, pinned commits."""


def go_on(path: Path, engine: str, note: Note, relieve: Callable[[StoreFullError], bool] | None = None) -> None:
    """Open or create the store, and run from its commit to the last one.

    ``note(begun=number)`` is called before each publish, ``note(done=number)`` as soon as it has returned.
    If a disk is full, ``relieve`` frees space; then the same store continues, or is reopened if that returns True.
    """
    store = _open(path, engine, relieve)
    reader: Store | None = None
    as_they_are = direct_io.REQUEST_BYTES, direct_io.SHORT_BYTES
    direct_io.REQUEST_BYTES, direct_io.SHORT_BYTES = 64 << 10, 0  # two requests at a time, as in a large store
    try:
        first = stands(store) + 1
        for number in range(first, len(STEPS)):
            if STEPS[number].reopen and number > first:
                store.close()
                store = _open(path, engine, relieve)
            if reader is not None and number == stands(reader) + 3:
                _check_reader(reader)
                reader = None
            if STEPS[number].reader and number:
                reader = Store.open(path, mode="r")
            try:
                take(store, number, note)
            except StoreFullError as error:
                if relieve is None:
                    raise
                if not relieve(error):
                    store.discard_uncommitted()
                    try:
                        take(store, number, note)
                        continue
                    except StoreError as later:
                        if "open the store again" not in str(later):
                            raise
                store.close()
                store = _open(path, engine, relieve)
                take(store, number, note)
    finally:
        direct_io.REQUEST_BYTES, direct_io.SHORT_BYTES = as_they_are
        store.close()
        if reader is not None:
            reader.close()


def _check_reader(reader: Store) -> None:
    """Raise StoreChangedError unless a reader's commit is unchanged; then close it."""
    try:
        for sentence in problems(reader, pinned=False):  # they may have been dropped
            raise StoreChangedError(sentence)
    finally:
        reader.close()


def _open(path: Path, engine: str, relieve: Callable[[StoreFullError], bool] | None) -> Store:
    try:
        return opened(path, engine=engine)
    except StoreFullError as error:
        if relieve is None:
            raise
        relieve(error)
        return opened(path, engine=engine)


def opened(path: Path, **options: Any) -> Store:
    """Open or create a store for writing: with its first tables, or with the tables after the alteration."""
    try:
        return Store.open(path, tables=TABLES, **options)
    except TableMismatchError:
        return Store.open(path, tables=[*TABLES, ADDED], **options)


def stands(store: Store) -> int:
    return -1 if store.commit is None else store.commit.id


def take(store: Store, number: int, note: Note) -> None:
    """Run a step except the reopening; the store must be at the previous commit."""
    step = STEPS[number]
    if step.like:
        note(begun=number)
        if step.compact:
            store.compact()
        elif step.erase:
            forget(store, TABLES[0].name, np.arange(ERASED))
        elif step.alter:
            alter(store, [*TABLES, ADDED])
        elif step.rollback >= 0:
            store.rollback(step.rollback)
        elif step.pin:
            store.pin(step.pin)
        else:
            store.unpin(step.unpin)
        note(done=number)
        return
    if step.broken:
        try:
            _dump(store, step, step.passes[0], broken=True)
        except BrokenSourceError:
            store.discard_uncommitted()
    if step.forget:
        _dump(store, step, step.passes[0])
        store.discard_uncommitted()
    for pass_index in step.passes:
        _dump(store, step, pass_index)
    note(begun=number)
    store.publish(step.cursor, state=state(number), schedule_digest="cyclic", settings={"step": number}, environment={})
    note(done=number)


@cache
def state(number: int) -> bytes:
    """Return the dense state of a commit."""
    made = made_by(number)
    return np.random.default_rng(made).bytes(STEPS[made].state_bytes)


def made_by(number: int) -> int:
    """Return the commit whose position, settings and dense state a commit has."""
    step = STEPS[number]
    while step.like:
        number = number - 1 if step.rollback < 0 else step.rollback
        step = STEPS[number]
    return number


@cache
def pins(number: int) -> dict[str, int]:
    """Return the pinned commits from a commit on."""
    step = STEPS[number]
    found = pins(number - 1) if number else {}
    found = {name: id_ for name, id_ in found.items() if name != step.unpin}
    return found | ({step.pin: number - 1} if step.pin else {})


def problems(store: Store, *, pinned: bool = True) -> list[str]:
    """Compare every row and the dense state with the expected ones at the store's commit, and at the ``pinned`` ones;
    a message for each difference.

    Reads everything: raises the store's errors for damage.
    """
    number, commit = stands(store), store.commit
    if commit is None:
        return [] if not store.segments else ["a store without a commit has segments"]
    found = _problems_at(store, number)
    if pinned:
        if commit.pins != pins(number):
            found.append(f"commit {number} keeps {commit.pins} by name, and {pins(number)} were named")
        if [one.id for one in store.commits] != (kept := sorted({*pins(number).values(), number})):
            found.append(f"commit {number} keeps {[one.id for one in store.commits]}, and {kept} were to be kept")
        for id_ in {*pins(number).values()} - {number}:
            with store.at(id_) as older:
                found += _problems_at(older, id_)
    return found


def _problems_at(store: Store, number: int) -> list[str]:
    """Compare a store's content with the expected content of commit ``number``."""
    found = []
    commit, made = store.commit, made_by(number)
    assert commit is not None
    cursor = STEPS[made].cursor
    if commit.id != number:
        found.append(f"commit {number} is commit {commit.id}")
    if commit.cursor != cursor or commit.settings != {"step": made}:
        found.append(f"commit {number} is at {commit.cursor} and was made at {cursor}")
    if store.state() != state(number):
        found.append(f"the dense state of commit {number} has other bits")
    keys = np.arange(UNIVERSE, dtype=np.int64)
    for group in store.snapshot.groups:
        for table in group.tables:
            if table == ADDED:
                continue
            ids, rows = store.locate(table.name, keys, after=cursor.pass_index - 1)
            versions, uses = _RESULT[table.name]
            if not np.array_equal(ids >= 0, versions[number] >= 0):
                found.append(f"commit {number} has other keys of table {table.name!r} than were stored")
            for segment in store.segments:
                mine = np.nonzero(ids == segment.id)[0]
                bits = np.concatenate(store.read_rows(segment, group.index, rows[mine]), axis=1)
                if bits.tobytes() != row_bits(table, mine, versions[number][mine]).tobytes():
                    found.append(f"rows of table {table.name!r} at commit {number} have other bits")
                layout = segment.layouts[group.index]
                ranges = np.searchsorted(layout.first_row_R, rows[mine], side="right") - 1
                if not np.array_equal([layout.ranges[i].next_use for i in ranges], uses[number][mine]):
                    found.append(f"rows of table {table.name!r} at commit {number} wait for other passes")
    return found


def row_bits(table: Table, keys: NDArray[np.int64], versions: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the rows of ``keys`` (n,) after ``versions`` (n,): (n, width)."""
    seeds = mix(keys.view(np.uint64) ^ mix(versions.view(np.uint64) ^ np.uint64(table.table_id)))
    words = mix(seeds[:, None] ^ np.arange(table.row_bytes // 4, dtype=np.uint64))
    return (words >> np.uint64(40)).astype(np.float32)


# -- the schedule --------------------------------------------------------------------------------------------


def _keys(table: Table, pass_index: int) -> NDArray[np.int64]:
    return _pass_keys(table, pass_index % len(PASS_KEYS))


@cache
def _pass_keys(table: Table, index: int) -> NDArray[np.int64]:
    generator = np.random.default_rng([index, table.table_id & 0xFFFF])
    keys = generator.choice(UNIVERSE, PASS_KEYS[index], replace=False).astype(np.int64)
    ordered: NDArray[np.int64] = keys[np.argsort(hash_keys(keys, table.table_id))]
    return ordered


def _next_uses(table: Table, pass_index: int, keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first pass after ``pass_index`` that trains each of its keys."""
    uses = np.full(keys.size, NEVER)
    for later in range(pass_index + len(PASS_KEYS), pass_index, -1):
        uses[np.isin(keys, _keys(table, later))] = later
    return uses


def _version(pass_index: int, sample: int) -> int:
    """Return the number of the training that ended with this; larger than 0 and than all earlier ones."""
    return pass_index * _STEPS_IN_PASS + (sample or _STEPS_IN_PASS)


def _results() -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return for each table the versions and next uses of all keys, (commits, UNIVERSE): -1 for keys without a row."""
    results = {}
    for table in TABLES:
        versions, uses = (np.full((len(STEPS) + 1, UNIVERSE), -1) for _ in range(2))
        for number, step in enumerate(STEPS):
            before = number - 1 if step.rollback < 0 else step.rollback
            versions[number], uses[number] = versions[before], uses[before]
            if step.compact:  # no pass comes after it
                uses[number, versions[number] >= 0] = NEVER
            if step.erase and table is TABLES[0]:
                versions[number, :ERASED] = -1
            for pass_index in step.passes:
                keys = _keys(table, pass_index)
                versions[number, keys] = _version(pass_index, step.sample)
                uses[number, keys] = pass_index if step.sample else _next_uses(table, pass_index, keys)
        results[table.name] = versions, uses
    return results


_RESULT = _results()

# -- dumping -------------------------------------------------------------------------------------------------


def _dump(store: Store, step: Step, pass_index: int, *, broken: bool = False) -> None:
    """Append the rows of a pass. ``broken`` lets the last block end in BrokenSourceError."""
    laid = [_lay_out(group, pass_index, step.sample) for group in store.groups]

    def blocks() -> Iterator[tuple[int, int, NDArray[np.uint8], NDArray[np.int64]]]:
        left = sum(layout.num_blocks for layout, _, _ in laid)
        for group, (layout, keys, rows) in zip(store.groups, laid, strict=True):
            for block in range(layout.num_blocks):
                left -= 1
                if broken and not left:
                    raise BrokenSourceError
                low, high = layout.rows_of_block(block)
                yield group.index, block, _pack(layout, group, block, rows), keys[low:high]

    layouts = [layout for layout, _, _ in laid]
    store.append(pass_index, layouts, blocks(), within=step.sample > 0, stable=step.stable)


def prepare() -> None:
    """Create all data of the dumps, which takes longer than dumping: once, before all forks."""
    for number, step in enumerate(STEPS):
        state(number)
        for pass_index in step.passes:
            for group in group_tables(TABLES):
                _lay_out(group, pass_index, step.sample)
                _lay_out(group, pass_index, 0)


@cache
def _lay_out(
    group: Group, pass_index: int, sample: int
) -> tuple[SegmentLayout, NDArray[np.int64], NDArray[np.float32]]:
    """Return layout, keys and rows of a group's dump, in the layout's order: next use, table, hash."""
    keys_T = [_keys(table, pass_index) for table in group.tables]
    uses_T = [
        np.full(keys.size, pass_index) if sample else _next_uses(table, pass_index, keys)
        for table, keys in zip(group.tables, keys_T, strict=True)
    ]
    rows_T = [
        row_bits(table, keys, np.full(keys.size, _version(pass_index, sample)))
        for table, keys in zip(group.tables, keys_T, strict=True)
    ]
    order = np.argsort(np.concatenate(uses_T), kind="stable")
    ranges = tuple(
        Range(next_use=use, table_rows=tuple(int(np.count_nonzero(uses == use)) for uses in uses_T))
        for use in np.unique(np.concatenate(uses_T)).tolist()
    )
    layout = SegmentLayout.of(
        row_bytes=group.row_bytes, page_rows=PAGE_ROWS, block_bytes=BLOCK_BYTES[group.row_bytes], ranges=ranges
    )
    return layout, np.concatenate(keys_T)[order], np.concatenate(rows_T)[order]


def _pack(layout: SegmentLayout, group: Group, block: int, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the bytes of a block, starting at a page boundary of memory."""
    size = layout.bytes_of_block(block)
    room = np.empty(size + 4096, dtype=np.uint8)
    out = room[-room.ctypes.data % 4096 :][:size]
    cuts, at = np.cumsum([field.width for field in group.fields])[:-1], 0
    for page in range(*layout.pages_of_block(block)):
        low, high = layout.row_of_page(page), layout.row_of_page(page + 1)
        for part in np.split(rows[low:high], cuts, axis=1):
            packed = np.frombuffer(part.tobytes(), np.uint8)
            out[at : at + packed.size] = packed
            at += packed.size
    return out


def quiet(*, begun: int | None = None, done: int | None = None) -> None:
    """Ignore commits."""
