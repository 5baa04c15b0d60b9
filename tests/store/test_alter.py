"""Schema changes: one small commit; every read shows the rows of the new tables, and a rewrite stores them."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.checkpoints import save
from tests.store.conftest import Home, narrow_tables, small_tables, stored_bytes
from tests.store.world import Key, World
from tiercache.store import (
    SGD,
    Adagrad,
    Adam,
    Checkpoint,
    Constant,
    Cursor,
    MemoryEngine,
    RowWiseAdagrad,
    Store,
    Table,
    Uniform,
    Zeros,
    alter,
    forget,
    info,
    load_rows,
)
from tiercache.store.bits import ITEM_BYTES
from tiercache.store.optimizer import RowWiseAdam
from tiercache.store.row_codec import initial_rows, row_words
from tiercache.store.verification import Verification


def first_row(table: Table, key: int) -> bytes:
    return row_words(table.fields, initial_rows(table, np.array([key]))).tobytes()


def converted(rows: dict[Key, bytes], before: Sequence[Table], after: Sequence[Table]) -> dict[Key, bytes]:
    """Return rows after an alteration, byte by byte: the slow obvious way."""
    old, found = {table.name: table for table in before}, {}
    for table in after:
        for (name, key), row in rows.items():
            if name != table.name:
                continue
            one, new, at, to = old[name], bytearray(first_row(table, key)), 0, 0
            for stored, field in zip(one.fields, table.fields, strict=False):
                count = stored.width * ITEM_BYTES[stored.dtype]
                if field is table.fields[0] or states_of(one) == states_of(table):
                    new[to : to + count] = row[at : at + count]
                at, to = at + 4 * stored.words, to + 4 * field.words
            found[name, key] = bytes(new)
    return found


def states_of(table: Table) -> tuple[type, list[str]]:
    """Return the values that decide if state starts over; momentum and none are two kinds of SGD."""
    return type(table.optimizer), [field.name for field in table.fields[1:]]


def in_words(table: Table, chunks: Iterable[tuple[np.ndarray, Sequence[np.ndarray]]]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for keys, fields in chunks:
        words = row_words(table.fields, tuple(fields))
        found |= {key: words[i].tobytes() for i, key in enumerate(keys.tolist())}
    return found


def check(store: Store, rows: dict[Key, bytes]) -> None:
    """Assert that every way to read returns these rows."""
    for table in store.tables:
        mine = {key: row for (name, key), row in rows.items() if name == table.name}
        assert in_words(table, store.scan(table.name)) == mine
        assert store.live_rows(table.name) == len(mine)
        asked = np.arange(-60, 60)
        firsts = {key: mine.get(key, first_row(table, key)) for key in asked.tolist()}
        found = store.lookup(table.name, asked, missing="initial")
        assert in_words(table, [(asked, [*found.values()])]) == firsts
        zeros = store.lookup(table.name, asked, missing="zeros")
        assert not any(values[[key not in mine for key in asked.tolist()]].any() for values in zeros.values())
        changes = ((keys, [*fields.values()]) for keys, fields in store.changes(table.name, since=-1))
        assert in_words(table, changes) == mine
        assert store.changed_rows(table.name, since=-1) == len(mine)
    assert Verification(store).run()["problems"] == []


def changed(tables: Sequence[Table], name: str, **values: object) -> list[Table]:
    """Return tables, one of them with other values."""
    return [replace(table, **values) if table.name == name else table for table in tables]


def without(tables: Sequence[Table], name: str) -> list[Table]:
    return [table for table in tables if table.name != name]


def grown(tables: Sequence[Table]) -> list[Table]:
    """Return tables with larger dims: two from one group, one with one number of optimizer state per row."""
    return [replace(t, dim=t.dim + {"user": 2, "place": 3, "word": 1}.get(t.name, 0)) for t in tables]


NEW = Table(name="new", dim=2)
CHANGES: dict[str, Callable[[list[Table]], list[Table]]] = {
    "a new table": lambda tables: [*tables, NEW],
    "a dropped table": lambda tables: without(tables, "item"),
    "a dim": grown,
    "optimizers": lambda tables: changed(
        changed(changed(tables, "user", optimizer=Adam()), "word", optimizer=SGD()),
        "place", optimizer=Adagrad(initial_accumulator=0.5),
    ),
    "all at once": lambda tables: changed(
        [*grown(tables), NEW], "word", optimizer=RowWiseAdagrad(), dim=20, initializer=Uniform(low=1.0, high=2.0),
    ),
    "momentum and row-wise Adam": lambda tables: changed(
        changed(tables, "day", optimizer=SGD(learning_rate=1.0, momentum=0.5)), "place", optimizer=RowWiseAdam(),
    ),
    "the learning rate of one table of a group": lambda tables: changed(
        tables, "item", optimizer=replace(tables[1].optimizer, learning_rate=0.5)
    ),
}  # fmt: skip


@pytest.mark.sampled(7)
@pytest.mark.parametrize("make", [small_tables, narrow_tables])
@pytest.mark.parametrize("change", CHANGES)
def test_rows_are_those_of_the_new_tables_at_once_and_after_a_rewrite(
    home: Home, change: str, make: Callable[[], list[Table]]
) -> None:
    """Vectors stay, new columns come from the initial row, other state starts over; position and dense state stay."""
    world = World(make(), keys_per_pass=25)
    store = home.open(world.tables, retention=2)
    world.run(store, 4)
    before, tables = store.commit, CHANGES[change](make())
    segments = stored_bytes(store, "segments")
    commit = alter(store, tables)
    assert stored_bytes(store, "segments").keys() <= segments.keys()
    assert (commit.id, commit.cursor, commit.overlaid) == (before.id + 1, before.cursor, before.schedule_digest)
    assert (store.state(), commit.ranks) == (world.state, before.ranks)
    rows = converted(world.rows, world.tables, tables)
    check(store, rows)
    dropped = [row for (name, _), row in world.rows.items() if name not in {table.name for table in tables}]
    assert store.snapshot.waiting_bytes == sum(map(len, dropped))
    store = home.open(tables)
    assert {table.name for table in store.tables} == {table.name for table in tables}
    check(store, rows)
    with store.at(before.id) as older:
        check(older, world.rows)
    store.compact()
    check(store, rows)
    assert (store.commit.cursor, store.commit.stored, store.commit.overlaid) == (before.cursor, (), "cyclic")
    assert store.snapshot.waiting_bytes == 0
    store = home.open(tables)
    check(store, rows)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("compact", [False, True])
def test_training_continues_as_in_a_store_that_was_made_of_the_converted_rows(home: Home, compact: bool) -> None:
    """The schedule resumes at the same place; the rows that it loads are those in the new tables."""
    world, tables = World(small_tables()), CHANGES["all at once"](small_tables())
    store = home.open(world.tables)
    world.run(store, 4)
    rows = converted(world.rows, world.tables, tables)
    alter(store, tables)
    if compact:
        store.compact()
    other = World(tables, pass_index=4)
    other.rows, other.state = {**rows}, world.state
    passes = [{**keys, "new": np.array([1, 5])} for keys in world.passes]
    other.follow(store, passes, start=(4, 0))
    assert store.commit.cursor == Cursor(4, 0)
    assert {key: row for key, row in other.rows.items() if key in rows} == rows
    check(store, other.rows)
    for _ in range(4):
        other.check_load(store, other.pass_index)
        other.run(store, 1)
        check(store, other.rows)


def test_rows_keep_their_digest_until_a_commit_changes_them() -> None:
    """Checkpoints name rows by it: pins, rollbacks, rewrites and settings change none."""
    world, tables = World(small_tables()), small_tables()
    with Store.open(None, tables=tables, engine=MemoryEngine(), retention=9) as store:
        digests = list[str]()
        for _ in range(2):
            world.run(store, 1)
            digests.append(store.commit.digest)
        early = store.commit.id - 1
        slower = [replace(table, optimizer=replace(table.optimizer, learning_rate=0.5)) for table in tables]
        same: list[Callable[[], object]] = [
            lambda: store.pin("best"),
            lambda: store.unpin("best"),
            store.compact,
            lambda: world.follow(store, world.draw(9)),
            lambda: alter(store, slower),
            lambda: store.rollback(early + 1),
        ]
        for step in same:
            before = store.commit.id
            step()
            assert (store.commit.id, store.commit.rows_digest) == (before + 1, digests[-1])
        store.rollback(early)
        assert store.commit.rows_digest == digests[0]
        new: list[Callable[[], object]] = [
            lambda: world.run(store, 1),
            lambda: world.lay_over(store, {"item": [1, 2]}),
            lambda: forget(store, "item", [1]),
            lambda: alter(store, changed(tables, "item", dim=9)),
        ]
        world.pass_index = 1
        for step in new:
            step()
            digests.append(store.commit.digest)
            assert store.commit.rows_digest == digests[-1]
        assert len({*digests}) == len(digests)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 99), steps=st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=4))
def test_several_alterations_are_those_of_one_after_the_other(seed: int, steps: list[str]) -> None:
    """State that started over does not come back."""
    world, tables = World(small_tables(), seed=seed, keys_per_pass=9), small_tables()
    with Store.open(None, tables=tables, engine=MemoryEngine()) as store:
        world.run(store, 3)
        rows = world.rows
        for number, step in enumerate(steps):
            after = CHANGES["a new table" if step == "all at once" and number else step](tables)
            names = {table.name for table in tables}
            after = [*{table.name: table for table in after if table.name != "new" or "new" not in names}.values()]
            if names - {table.name for table in after}:
                after = [table for table in after if table.name in names]
            rows, tables = converted(rows, tables, after), after
            alter(store, tables)
            check(store, rows)
        store.compact()
        check(store, rows)


def test_settings_alone_keep_the_schedule_and_every_segment(home: Home) -> None:
    """A learning rate of all tables of a group, and an initializer: training continues, even inside a pass."""
    world = World(small_tables())
    store = home.open(world.tables)
    world.run(store, 2)
    world.train()
    world.append(store, within=True)
    world.publish(store, sample=7)
    before = store.commit
    assert alter(store, small_tables()) is before  # so a command that was killed can be run again
    slower = [replace(table.optimizer, learning_rate=table.optimizer.learning_rate / 4) for table in small_tables()]
    start = Constant(value=0.25)
    tables = [replace(t, optimizer=one, initializer=start) for t, one in zip(small_tables(), slower, strict=True)]
    commit = alter(store, tables)
    assert (commit.schedule_digest, commit.cursor, commit.stored) == (before.schedule_digest, before.cursor, ())
    assert commit.segment_ids == before.segment_ids
    assert store.tables == store.commit.tables
    assert {table.name: table.optimizer for table in store.tables} == {t.name: t.optimizer for t in tables}
    store = home.open(tables)
    world.check_within(store)
    assert store.lookup("word", np.array([1000]), missing="initial")["vector"].tolist() == [[0.25] * 8]
    world.train(part=1)
    world.append(store)
    world.pass_index += 1
    world.publish(store)
    world.run(store, 2)
    check(store, world.rows)


@pytest.mark.sampled(1)
def test_a_table_that_is_dropped_and_added_again_is_empty(home: Home) -> None:
    """Its rows stay until the rewrite; verification does not miss them, though an older commit has them. A rollback to
    that brings them back, and the schedule.
    """
    world = World(small_tables())
    store = home.open(world.tables, retention=9)
    world.run(store, 2)
    before, whole = store.commit, copy.deepcopy(world)
    store.pin("before")
    alter(store, without(small_tables(), "item"))
    assert {table.name for table in store.tables} == {"user", "word", "day", "place"}
    assert store.snapshot.waiting_bytes == sum(len(row) for (name, _), row in world.rows.items() if name == "item")
    if home.kind != "memory":
        found = info(home.path)
        assert found["waiting_bytes"] == store.snapshot.waiting_bytes
        assert found["rows"] == sum(name != "item" for name, _ in world.rows)
        assert "item" not in [table["name"] for table in found["tables"]]
    alter(store, small_tables())
    assert store.live_rows("item") == 0
    world.rows = {key: row for key, row in world.rows.items() if key[0] != "item"}
    check(store, world.rows)
    store.compact()
    assert store.snapshot.waiting_bytes == 0
    check(store, world.rows)
    world.follow(store, world.passes, start=(2, 0))
    check(store, world.rows)
    alter(store, grown(small_tables()))
    store.rollback(before.id)
    assert (store.tables, store.commit.schedule_digest) == (before.tables, before.schedule_digest)
    whole.check(store, after=1)
    whole.run(store, 1)
    check(store, whole.rows)


def test_live_learning_rates_and_steps_stay_unless_the_record_changes() -> None:
    """A rate in the new record wins; other rates keep the training's value; a new optimizer begins at step 0."""
    tables = [
        Table(name="a", dim=2, optimizer=SGD(learning_rate=0.1), initializer=Zeros()),
        Table(name="b", dim=3, optimizer=Adagrad(learning_rate=0.2, eps=0.5), initializer=Zeros()),
        Table(name="c", dim=4, optimizer=Adam(learning_rate=0.3), initializer=Zeros()),
    ]
    with Store.open(None, tables=tables, engine=MemoryEngine()) as store:
        live = {"a": 0.01, "b": 0.02, "c": 0.03}
        own = {"b": {"eps": 0.75, "weight_decay": 0.5}, "c": {"step": 9, "eps": 0.25}}
        load_rows(store, [], settings={"steps": 10, "learning_rates": live, "tables": own})
        after = changed(changed(tables, "b", optimizer=Adagrad(learning_rate=0.2, eps=0.25)), "c", optimizer=SGD())
        commit = alter(store, [*after, Table(name="d", dim=9)])
        assert commit.settings["learning_rates"] == {"a": 0.01, "b": 0.02, "c": 0.01, "d": 0.01}
        assert commit.settings["steps"] == 10
        assert commit.settings["tables"] == {"b": {"weight_decay": 0.5}, "c": {"step": 0}, "d": {"step": 0}}
        joined = changed(after, "c", optimizer=Adagrad(learning_rate=0.2, eps=0.25), dim=4)
        with pytest.raises(ValueError, match=r"would share a group.*left them at 0.0[12] and 0.[02]+: set a new"):
            alter(store, [*changed(joined, "b", dim=4), Table(name="d", dim=9)])


def test_the_buffer_of_momentum_starts_over_when_momentum_comes_and_goes() -> None:
    """With another momentum above 0 it stays; a setting of a training is dropped if the record changes."""
    first = Table(name="a", dim=2, optimizer=SGD(learning_rate=0.1, momentum=0.5), initializer=Zeros())
    with Store.open(None, tables=[first], engine=MemoryEngine()) as store:
        kept = {"steps": 3, "tables": {"a": {"momentum": 0.25, "weight_decay": 0.5}}}
        rows = [("a", (np.arange(2), [np.full((2, 2), one, np.float32) for one in (7, 3)]))]
        load_rows(store, rows, settings=kept)
        for momentum, buffer in ((0.75, 3.0), (0.0, None), (0.5, 0.0)):
            commit = alter(store, [replace(first, optimizer=replace(first.optimizer, momentum=momentum))])
            assert commit.settings["tables"] == {"a": {"weight_decay": 0.5}}
            found = store.lookup("a", np.arange(2))
            assert (found["vector"] == 7).all()
            assert ("momentum_buffer" in found) == (buffer is not None)
            assert buffer is None or (found["momentum_buffer"] == buffer).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            lambda tables: changed(tables, "user", dim=2), "has dim 3, but 2 was given: a dim can only grow", id="dim"
        ),
        pytest.param(
            lambda tables: changed(tables, "user", dtype="bfloat16"), "dtype 'float32', but 'bfloat16' was given",
            id="dtype",
        ),
        pytest.param(
            lambda tables: [*tables[1:], replace(tables[0], name="person")],
            "has a table 'user' that was not given, and lacks the table 'person': a table cannot be renamed", id="name",
        ),
        pytest.param(
            lambda tables: changed(tables, "day", compression="zstd"), "compression None, but 'zstd'", id="compression"
        ),
        pytest.param(lambda _: [], "no tables were given", id="nothing"),
    ],
)  # fmt: skip
def test_what_cannot_be_altered_is_refused(change: Callable[[list[Table]], list[Table]], words: str) -> None:
    """Rows that cannot become those of other tables; a store without a commit, with appended rows, inside a pass."""
    world, engine = World(small_tables()), MemoryEngine()
    with Store.open(None, tables=world.tables, engine=engine) as store:

        def refuses(tables: list[Table], words: str) -> None:
            head = engine.newest()
            with pytest.raises(ValueError, match=words):
                alter(store, tables)
            assert engine.newest() == head

        refuses(grown(small_tables()), "has no commit yet")
        world.run(store, 1)
        refuses(change(small_tables()), words)
        check(store, world.rows)
        world.train()
        world.append(store, within=True)
        refuses(grown(small_tables()), "rows that no commit names")
        world.publish(store, sample=3)
        refuses(grown(small_tables()), "stands inside pass 1: train to the end of a pass before tables, dims or")
    with Store.open(None, engine=engine, mode="r") as store, pytest.raises(ValueError, match="is open for reading"):
        alter(store, grown(small_tables()))


def test_an_altered_store_takes_no_rows_before_a_rewrite() -> None:
    """They would belong to groups that it does not have."""
    world, tables = World(small_tables()), grown(small_tables())
    with Store.open(None, tables=world.tables, engine=MemoryEngine()) as store:
        world.run(store, 1)
        alter(store, tables)
        user = next(table for table in store.tables if table.name == "user")
        rows = [("user", (np.array([3]), initial_rows(user, np.array([3]))))]
        with pytest.raises(ValueError, match="was altered: reorganize or compact it before you add rows"):
            load_rows(store, rows)
        store.compact()
        load_rows(store, rows)
        assert store.lookup("user", np.array([3]))["vector"].tobytes() == rows[0][1][1][0].tobytes()


def test_new_columns_are_those_of_a_checkpoint_that_moved(tmp_path: Path) -> None:
    """Before the rows are rewritten too. Keys without a row need none in the tensor."""
    table, new = Table(name="gram", dim=2, optimizer=SGD(), initializer=Zeros()), tmp_path / "new.safetensors"
    path = save(tmp_path / "m.safetensors", wide=torch.arange(30.0).view(10, 3))
    wide = replace(table, dim=3, initializer=Checkpoint(path=str(path), tensor="wide"))
    moved = replace(wide, initializer=Checkpoint(path=str(new), tensor="wide"))
    with Store.open(tmp_path / "store", tables=[table]) as store:
        load_rows(store, [("gram", (np.array([5]), (np.full((1, 2), -1.0, np.float32),)))])
        alter(store, [wide])
        found = store.lookup("gram", np.array([5, 10]), missing="zeros")["vector"]
        assert found.tolist() == [[-1, -1, 17], [0, 0, 0]]
        path.rename(new)
        alter(store, [moved])
        for _ in range(2):
            assert store.lookup("gram", np.array([5]))["vector"].tolist() == [[-1, -1, 17]]
            store.compact()
