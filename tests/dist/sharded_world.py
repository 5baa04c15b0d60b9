"""A training of made-up rows on several ranks: every row is a function of table, key and its last training.

So the expected content of the sharded store at a cursor is known without running anything: the oracle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.dist.meeting import meet
from tests.store.world import World
from tiercache.dist.shard_writer import ShardWriter
from tiercache.errors import RankError
from tiercache.planning.sharding_planner import sliced
from tiercache.store import Adagrad, Adam, Cursor, MemoryEngine, RowWiseAdagrad, Store, Table, Uniform, Zeros, hash_keys
from tiercache.store.reads import StoreReads
from tiercache.store.row_codec import row_words
from tiercache.store.sharding import ShardingPlan, Slice, TableSharding, hash_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.store import Commit

TABLES = (
    Table(name="item", dim=8, optimizer=Adagrad(learning_rate=0.1), initializer=Uniform(low=-1.0, high=1.0)),
    Table(name="word", dim=5, optimizer=RowWiseAdagrad(learning_rate=0.1), initializer=Uniform(low=-1.0, high=1.0)),
    Table(name="day", dim=3, optimizer=Adam(), initializer=Zeros()),
    Table(name="user", dim=3, optimizer=Adagrad(learning_rate=0.1), initializer=Zeros()),
)
WHOLE = {table.name: table for table in TABLES}
NUM_PASSES = 3
UNIVERSE = 60


def sharding_on(num_ranks: int, turn: int = 0) -> ShardingPlan:
    """Return a sharding of every kind; varies with ``turn``."""
    ways = [
        TableSharding("row_wise"),
        sliced(5, list(range(num_ranks))) if num_ranks > 1 else TableSharding("data_parallel"),
        TableSharding("table_wise", (Slice(num_ranks - 1, 0, 3),)),
        TableSharding("data_parallel"),
    ]
    if turn:
        ways = [
            sliced(8, list(range(num_ranks))[::-1]),
            ways[0],
            ways[0],
            TableSharding("table_wise", (Slice(0, 0, 3),)),
        ]
    return ShardingPlan(num_ranks, {table.name: way for table, way in zip(TABLES, ways, strict=True)})


def whole_row(table: Table, key: int, pass_index: int, half: int) -> tuple[NDArray[np.float32], ...]:
    """Return the fields (1, width) of the row that a half of a pass leaves."""
    random = np.random.default_rng([pass_index, half, key & 0xFFFF, table.table_id & 0xFFFF])
    return tuple(random.random((1, field.width), dtype=np.float32) for field in table.fields)


class ShardWorld(World):
    """The keys and rows of one rank."""

    def train(self, *, part: int = 0) -> None:
        """Change the rank's columns of every row of the pass."""
        for table in self.tables:
            columns = slice(table.first_column, table.first_column + table.dim)
            whole = WHOLE[table.name]
            for key in self.passes[self.pass_index % self.num_passes][table.name].tolist():
                fields = whole_row(whole, key, self.pass_index, part)
                mine = tuple(values[:, columns] if values.shape[1] == whole.dim else values for values in fields)
                self.rows[table.name, key] = row_words(table.fields, mine).tobytes()


def whole_passes() -> list[dict[str, NDArray[np.int64]]]:
    return World(TABLES, num_passes=NUM_PASSES, universe=UNIVERSE, keys_per_pass=25).passes


def world_of(sharding: ShardingPlan, rank: int) -> ShardWorld:
    """Return the world of one rank: the keys that it owns in each pass."""
    world = ShardWorld(sharding.shard_tables(TABLES, rank), num_passes=NUM_PASSES, universe=UNIVERSE, keys_per_pass=25)
    bounds = [bound - (bound == 1 << 64) for bound in hash_bounds(sharding.num_ranks)[rank : rank + 2]]
    passes = whole_passes()
    for keys in passes:
        for name, table_sharding in sharding.tables.items():
            if not table_sharding.by_hash:
                keys[name] = keys[name][: None if table_sharding.slice_of(rank) else 0]
            else:
                hashes = hash_keys(keys[name], WHOLE[name].table_id)
                keys[name] = keys[name][(hashes >= bounds[0]) & (hashes < bounds[1])]
    world.passes = passes
    return world


def cursor_of(shards: ShardWriter) -> Cursor | None:
    """Return the cursor of the newest commit; None before the first one of these ranks."""
    return None if shards.store.commit is None else shards.store.commit.cursor


def next_cursor(cursor: Cursor | None) -> Cursor:
    """Return the cursor of the next commit: every other pass commits in its middle, too."""
    if cursor is None:
        return Cursor(0)
    if cursor.pass_index % 2 and not cursor.sample:
        return Cursor(cursor.pass_index, 5)
    return Cursor(cursor.pass_index + 1)


def advance(
    store: Store, world: ShardWorld, before: Cursor | None, note: Callable[..., None] = lambda **_: None
) -> Cursor:
    """Train a rank to the next commit and make it; return its cursor."""
    after = next_cursor(before)
    if before is not None:
        world.pass_index = before.pass_index
        world.train(part=0 if after.sample else 1)
        world.append(store, within=after.sample > 0)
        world.pass_index = after.pass_index
    note(begun=after)
    world.publish(store, sample=after.sample)
    return after


def take(shards: ShardWriter, world: ShardWorld, note: Callable[..., None] = lambda **_: None) -> None:
    """Train to the next commit and publish it on all ranks."""
    after = advance(shards.store, world, cursor_of(shards), note)
    shards.publish(after)
    note(done=after)


def roll_back(path: Path, to: int) -> Commit:
    with Store.open(path) as store:
        return store.rollback(to)


def divide_anew(
    path: Path,
    ranks: AnyCommunicator,
    sharding: ShardingPlan,
    note: Callable[..., None] = lambda **_: None,
    **options: object,
) -> None:
    """Divide a store by another sharding; the new ranks get the rows of the old ones."""
    with ShardWriter.open(path, TABLES, sharding, ranks, resharded=True, **options) as shards:  # type: ignore[arg-type]
        cursor = shards.before.cursor
        assert not cursor.sample
        world = world_of(sharding, ranks.rank)
        for pass_index in range(max(0, cursor.pass_index - NUM_PASSES), cursor.pass_index):
            world.pass_index = pass_index
            world.train(part=1)
            world.append(shards.store)
        world.pass_index = cursor.pass_index
        world.publish(shards.store)
        note(switching=True)
        shards.publish(cursor)
        note(done=cursor)


def opened(path: Path, ranks: AnyCommunicator, turn: int = 0, **options: object) -> tuple[ShardWriter, ShardWorld]:
    """Open or make the sharded store."""
    sharding = sharding_on(ranks.size, turn)
    shards = ShardWriter.open(path, TABLES, sharding, ranks, **options)  # type: ignore[arg-type]
    return shards, world_of(sharding, ranks.rank)


def expected(cursor: Cursor) -> dict[str, dict[int, tuple[int, int]]]:
    """Return by table the pass and half in which each key was last trained."""
    passes, found = whole_passes(), {name: dict[int, tuple[int, int]]() for name in WHOLE}
    steps = [(pass_index, 1) for pass_index in range(cursor.pass_index)] + (
        [(cursor.pass_index, 0)] if cursor.sample else []
    )
    for pass_index, half in steps:
        for name, keys in passes[pass_index % NUM_PASSES].items():
            found[name] |= dict.fromkeys(keys.tolist(), (pass_index, half))
    return found


def problems(store: Store) -> Iterator[str]:
    """Yield a message for each difference from the expected store at its cursor."""
    for rank, shard in enumerate(store.ranks):
        if shard.commit is None or shard.commit.cursor != store.commit.cursor:
            yield f"shard {rank} stands elsewhere than {store.commit.cursor}"
    if store.state() != f"state at {store.commit.cursor.pass_index}, {store.commit.cursor.sample}".encode():
        yield f"the dense state is not that of {store.commit.cursor}"
    for name, wanted in expected(store.commit.cursor).items():
        table, chunks = WHOLE[name], list(store.scan(name, chunk_rows=7))
        keys = np.concatenate([keys for keys, _ in chunks]) if chunks else np.empty(0, np.int64)
        if keys.size and np.any(np.diff(hash_keys(keys, table.table_id).astype(object)) <= 0):
            yield f"rows of table {name!r} are not in hash order"
        if set(keys.tolist()) != set(wanted) or keys.size != len(wanted):
            yield f"table {name!r} has other keys at {store.commit.cursor}"
            continue
        for chunk, fields in chunks:
            for i, key in enumerate(chunk.tolist()):
                row = whole_row(table, key, *wanted[key])
                if any(one[i].tobytes() != other[0].tobytes() for one, other in zip(fields, row, strict=True)):
                    yield f"row {key} of table {name!r} at {store.commit.cursor} has other bits"


class OneStore(StoreReads):
    """The rows of ranks in memory, at their newest commits."""

    def __init__(self, tables: Sequence[Table], sharding: ShardingPlan, shards: Sequence[Store]) -> None:
        self.label, self.tables, self.sharding = "the store in memory", tuple(tables), sharding
        self._shards, self.reader = shards, shards[0].reader

    @property
    def parts(self) -> Sequence[Store]:
        return self._shards

    @property
    def snapshot(self) -> Any:
        return self.parts[0].snapshot

    @property
    def commit(self) -> Any:
        return self.parts[0].commit


def old_shards(sharding: ShardingPlan, commits: int) -> list[Store]:
    """Train made-up rows on every rank, for ``commits`` commits."""
    shards = []
    for rank in range(sharding.num_ranks):
        world = world_of(sharding, rank)
        store = Store.open(None, tables=world.tables, engine=MemoryEngine())
        cursor = advance(store, world, None)
        for _ in range(commits):
            cursor = advance(store, world, cursor)
        shards.append(store)
    return shards


def on_ranks(
    path: Path, num_ranks: int, body: Callable[[Any, ShardWriter, ShardWorld], Any], **options: Any
) -> list[Any]:
    """Open the store on ranks and call ``body`` on each; returns each one's result or error."""

    def run(ranks: Any) -> Any:
        shards, world = opened(path, ranks, **options)
        with shards:
            return body(ranks, shards, world)

    return meet(num_ranks, run)


def train_shards(path: Path, num_ranks: int, commits: int, **options: Any) -> list[Any]:
    """Make ``commits`` commits on ``num_ranks`` ranks; returns each rank's error, or None."""

    def body(_: Any, shards: ShardWriter, world: ShardWorld) -> None:
        for _ in range(commits):
            take(shards, world)

    return on_ranks(path, num_ranks, body, **options)


def train_on(path: Path, num_ranks: int, commits: int, at: Cursor | None = None, **options: Any) -> None:
    """Make ``commits`` commits on ``num_ranks`` ranks, without an error; ``at``: the store then is at this cursor."""
    assert train_shards(path, num_ranks, commits, **options) == [None] * num_ranks
    if at is not None:
        check_shards(path, at)


def divide_among(path: Path, num_ranks: int, turn: int = 0, **options: Any) -> list[Any]:
    """Divide a store among ``num_ranks`` ranks; returns each rank's error, or None."""
    return meet(num_ranks, lambda ranks: divide_anew(path, ranks, sharding_on(num_ranks, turn), **options))


def check_shards(path: Path, cursor: Cursor) -> None:
    with Store.open(path, mode="r") as store:
        assert store.commit.cursor == cursor
        assert list(problems(store)) == []


def sentences(errors: list[Any]) -> str:
    """Return the one message of all ranks: the first rank's, which the others quote."""
    assert all(isinstance(error, Exception) for error in errors), errors
    own = [error for error in errors if not isinstance(error, RankError)]
    for error in errors:
        if isinstance(error, RankError):
            assert str(own[0]) in str(error)
        assert ": " in str(error)
        assert "\n" not in str(error)
    return str(own[0])


def ahead(path: Path, num_ranks: int, *who: int) -> None:
    """Have some ranks prepare a commit that is not published."""

    def body(ranks: Any, shards: ShardWriter, world: ShardWorld) -> None:
        if ranks.rank in who:
            advance(shards.store, world, cursor_of(shards))

    assert on_ranks(path, num_ranks, body) == [None] * num_ranks
