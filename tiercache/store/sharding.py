"""A sharding plan: which rank owns which columns of which rows of every table. Knows no passes and no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

from tiercache.store.bits import HASHES
from tiercache.store.records import digest
from tiercache.store.table import Group, Table, group_tables

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


Kind = Literal["row_wise", "table_wise", "column_wise", "data_parallel"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Slice:
    """Neighboring columns of a table, which one rank owns for all keys."""

    rank: int
    first: int
    """The first column."""
    last: int
    """The column after the last."""


@dataclass(frozen=True, slots=True)
class TableSharding:
    """The division of one table's rows among ranks.

    "row_wise": each rank owns the keys of its range of hashes (``hash_bounds``). "data_parallel": the same, and every
    rank also has a copy of all vectors. "table_wise": one rank owns all rows. "column_wise": several ranks own all
    keys, each some columns of the vector with their optimizer state.
    """

    kind: Kind
    slices: tuple[Slice, ...] = ()
    """For "table_wise": one slice with all columns; for "column_wise": two or more in the order of columns, each on a
    different rank; otherwise none."""

    @property
    def by_hash(self) -> bool:
        """True if the hash of a key decides which rank owns it."""
        return self.kind in {"row_wise", "data_parallel"}

    def described(self) -> dict[str, Any]:
        """Return the kind, and the slices if there are any, as plain JSON values."""
        slices = [[part.rank, part.first, part.last] for part in self.slices]
        return {"kind": self.kind, "slices": slices} if slices else {"kind": self.kind}

    def slice_of(self, rank: int) -> Slice | None:
        """Return the columns that a rank owns, None if it owns none or hashes decide."""
        return next((part for part in self.slices if part.rank == rank), None)


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """The sharding of every table over ``num_ranks`` ranks."""

    num_ranks: int
    tables: Mapping[str, TableSharding]
    """By name of the table, in the order of names."""

    def __post_init__(self) -> None:
        if isinstance(self.num_ranks, bool) or not isinstance(self.num_ranks, int) or self.num_ranks < 1:
            raise ValueError(f"a sharding is for {self.num_ranks!r} ranks: expected a whole number >= 1")
        object.__setattr__(self, "tables", dict(sorted(self.tables.items())))
        for name, table_sharding in self.tables.items():
            _check_table(name, table_sharding, self.num_ranks)

    def __hash__(self) -> int:
        return hash((self.num_ranks, tuple(self.tables.items())))

    def check(self, tables: Iterable[Table]) -> None:
        """Raise ValueError unless exactly these tables are sharded, each with all its columns."""
        dims = {table.name: table.dim for table in tables}
        if dims.keys() != self.tables.keys():
            different = ", ".join(sorted(dims.keys() ^ self.tables.keys()))
            raise ValueError(f"the sharding is of other tables (they differ in {different}): shard all tables")
        for name, table_sharding in self.tables.items():
            if table_sharding.slices and table_sharding.slices[-1].last != dims[name]:
                raise ValueError(
                    f"the sharding of table {name!r} has {table_sharding.slices[-1].last} columns, but the table "
                    f"has {dims[name]}: slices must have every column once"
                )

    @classmethod
    def of_one(cls, tables: Iterable[Table]) -> ShardingPlan:
        """Return the sharding of a plain store: one rank has all rows."""
        return cls(1, {table.name: TableSharding("row_wise") for table in tables})

    def shard_tables(self, tables: Iterable[Table], rank: int) -> tuple[Table, ...]:
        """Return the tables of one rank's shard, in the order of table ids: all of them, by name.

        A table whose columns are divided has the rank's columns. A table without rows on this rank is whole. Raises
        ValueError if the sharding is of other tables.
        """
        ordered = sorted(tables, key=lambda table: table.table_id)
        self.check(ordered)
        found = []
        for table in ordered:
            own = self.tables[table.name].slice_of(rank)
            if own is None or own.last - own.first == table.dim:
                found.append(table)
            else:
                found.append(replace(table, dim=own.last - own.first, first_column=own.first, whole_dim=table.dim))
        return tuple(found)

    def owned_hashes(self, table: str, rank: int) -> tuple[int, int] | None:
        """Return the hashes [first, last) of a table's keys that a rank owns, all or some columns; None: no key."""
        sharding = self.tables[table]
        if sharding.by_hash:
            return hash_bounds(self.num_ranks)[rank], hash_bounds(self.num_ranks)[rank + 1]
        return None if sharding.slice_of(rank) is None else (0, HASHES)

    @property
    def digest(self) -> str:
        """Hexadecimal digest: equal if ranks and tables are divided alike."""
        return digest(json.dumps(self.to_record(), sort_keys=True).encode())

    def to_record(self) -> dict[str, Any]:
        """Return the sharding as plain JSON values, which ``from_record`` reads."""
        return {"num_ranks": self.num_ranks, "tables": {name: one.described() for name, one in self.tables.items()}}

    @classmethod
    def from_record(cls, record: Any) -> ShardingPlan:
        """Read what ``to_record`` returned. Raises ValueError for anything else."""
        fields = _fields(record, "a sharding plan's record", {"num_ranks", "tables"}, set())
        tables = {}
        for name, one in _object(fields["tables"], "what a sharding plan's record says of tables").items():
            what = f"the sharding of table {name!r}"
            table_sharding = _fields(one, what, {"kind"}, {"slices"})
            slices = table_sharding.get("slices", [])
            if not isinstance(slices, list) or not all(
                isinstance(part, list) and len(part) == 3 and all(type(number) is int for number in part)
                for part in slices
            ):
                raise ValueError(f"{what} has the slices {_shown(slices)}: each is [rank, first column, end column]")
            kind = table_sharding["kind"]
            if kind not in KINDS:
                raise ValueError(f"{what} is {unknown_kind(kind)}")
            tables[name] = TableSharding(kind, tuple(Slice(*part) for part in slices))
        return cls(fields["num_ranks"], tables)


def groups_of_rank(tables: tuple[Table, ...], sharding: ShardingPlan | None, rank: int) -> tuple[Group, ...]:
    """Return the groups of a rank's tables, whole or a slice of their columns; None: a store of one rank."""
    ignored = tuple((table.compression, getattr(table.initializer, "path", None)) for table in tables)
    return _groups(tables, ignored, sharding, rank)


@lru_cache(maxsize=256)
def _groups(
    tables: tuple[Table, ...],
    _ignored: tuple[tuple[str | None, str | None], ...],
    sharding: ShardingPlan | None,
    rank: int,
) -> tuple[Group, ...]:
    """Group them. ``_ignored`` is what comparisons of tables ignore but their groups contain."""
    return group_tables(tables if sharding is None else sharding.shard_tables(tables, rank))


def hash_bounds(num_ranks: int) -> tuple[int, ...]:
    """Return the first hash of each rank's range, and 2^64 at the end: ``floor(r * 2^64 / W)``."""
    return tuple(r * HASHES // num_ranks for r in range(num_ranks + 1))


def unknown_kind(kind: Any) -> str:
    """Return the end of an error message about a kind that does not exist."""
    return f"{_shown(kind)}: expected one of {listed(KINDS)}"


def _check_table(name: str, table_sharding: TableSharding, num_ranks: int) -> None:
    what, slices = f"the sharding of table {name!r}", table_sharding.slices
    if table_sharding.kind not in KINDS:
        raise ValueError(f"{what} is {unknown_kind(table_sharding.kind)}")
    of_kind = {"table_wise": (1, "1 slice"), "column_wise": (2, "2 or more slices")}
    count, allowed = of_kind.get(table_sharding.kind, (0, "no slices"))
    if min(len(slices), 2) != count:
        raise ValueError(f"{what} is {table_sharding.kind!r} with {len(slices)} slices: it has {allowed}")
    if not slices:
        return
    for part in slices:
        if not 0 <= part.rank < num_ranks:
            raise ValueError(f"{what} names rank {part.rank}: there are {num_ranks} ranks, counted from 0")
        if part.first >= part.last:
            raise ValueError(f"{what} has a slice of columns {part.first} to {part.last}: it must have a column")
    if slices[0].first != 0 or any(one.last != other.first for one, other in pairwise(slices)):
        columns = ", ".join(f"{part.first} to {part.last}" for part in slices)
        raise ValueError(f"{what} has slices of columns {columns}: they must begin at 0 and follow one another")
    if len({part.rank for part in slices}) < len(slices):
        raise ValueError(f"{what} has two slices for one rank: merge the columns of a rank into one slice")


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {_shown(value)}: it must be an object")  # noqa: TRY004 - a record's type is a value
    return value


def _fields(record: Any, what: str, needed: set[str], allowed: set[str]) -> dict[str, Any]:
    """Return an object of a record. Raises ValueError for another type, a missing field or an unknown one."""
    fields = _object(record, what)
    for name in sorted(needed - fields.keys()):
        raise ValueError(f"{what} lacks {name!r}: it must be what a sharding plan wrote")
    for name in sorted(map(str, fields.keys() - needed - allowed)):
        raise ValueError(f"{what} has the unknown {name!r}: it must be what a sharding plan wrote")
    return fields


def listed(words: Iterable[str]) -> str:
    """Return words as an error lists them."""
    return ", ".join(map(repr, words))


def _shown(value: Any) -> str:
    return repr(value)[:80]
