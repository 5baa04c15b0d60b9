"""Tables, and the groups of tables whose rows are stored together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.bits import ITEM_BYTES, nearest, xxh64
from tiercache.store.initializer import (
    Initializer,
    Normal,
    Uniform,
    Zeros,
    initializer_from_record,
    initializer_to_record,
)
from tiercache.store.optimizer import KINDS, SGD, Adagrad, Field, Optimizer, optimizer_from_record, optimizer_to_record
from tiercache.store.records import as_integer

if TYPE_CHECKING:
    from collections.abc import Iterable

COMPRESSIONS = ("zstd", "blosc")
_DTYPES = "'float32', 'bfloat16' or 'float16'"
_FARTHEST = 8
"""Standard deviations that a Normal never exceeds: the format's are within 5.8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """An embedding table: unbounded, its keys are int64."""

    name: str
    """Its identity: the table id is a hash of it."""
    dim: int = 16
    """Numbers in a vector."""
    optimizer: Optimizer = field(default_factory=Adagrad)
    """Row optimizer, which also decides the state of a row."""
    initializer: Initializer = field(default_factory=Uniform)
    """Initializer of its vectors."""
    seed: int = 0
    """Decides initial rows, along with name and key."""
    dtype: str = "float32"
    """dtype of vectors: "float32", "bfloat16" or "float16". The optimizer state is always float32; an update computes
    in float32 and rounds the vector of a 16-bit dtype stochastically."""
    compression: str | None = field(default=None, compare=False)
    """"zstd" or "blosc": compression of its rows in a store on Zarr arrays; None: uncompressed. The rows are the same,
    so tables that differ only in this are equal."""
    first_column: int = 0
    """In a column slice: its first column in the whole vectors."""
    whole_dim: int | None = None
    """In a column slice, which has ``dim`` neighboring columns of every vector: the width of the whole vectors. Its
    initial rows are those columns of the whole rows. None: not a slice."""
    table_id: int = field(init=False, repr=False, compare=False)
    """XXH64 (seed 0) of the name in UTF-8."""
    fields: tuple[Field, ...] = field(init=False, repr=False, compare=False)
    """The vector, then each optimizer state: a row in the store."""
    row_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a table is named {self.name!r}: expected a non-empty string")
        if not self.name.isprintable():
            raise ValueError(f"table name {self.name!r} has unprintable characters: remove them")
        for name in ("dim", "seed"):
            if (number := as_integer(getattr(self, name))) is not None:
                object.__setattr__(self, name, number)
        if as_integer(self.dim) is None or self.dim < 1:
            raise ValueError(f"dim of table {self.name!r} is {self.dim!r}: it must be a whole number >= 1")
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                f"optimizer of table {self.name!r} is {self.optimizer!r}: "
                f"it must be one of {', '.join(cls.__name__ for cls in KINDS.values())}"
            )
        if not isinstance(self.initializer, Initializer):
            raise TypeError(
                f"initializer of table {self.name!r} is {self.initializer!r}: "
                "it must be Uniform, Normal, Zeros, Constant or Checkpoint"
            )
        if as_integer(self.seed) is None or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed of table {self.name!r} is {self.seed!r}: it must be 0 .. 2**64 - 1")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype of table {self.name!r} is {self.dtype!r}: it must be {_DTYPES}")
        _check_columns(self)
        _check_start(self)
        _check_spread(self)
        if self.compression is not None and self.compression not in COMPRESSIONS:
            raise ValueError(
                f"compression of table {self.name!r} is {self.compression!r}: it must be 'zstd', 'blosc' or None"
            )
        vector = Field(name="vector", width=self.dim, initial=0.0, dtype=self.dtype)
        fields = (vector, *self.optimizer.state_fields(self.dim))
        object.__setattr__(self, "table_id", xxh64(self.name.encode()))
        object.__setattr__(self, "fields", fields)
        object.__setattr__(self, "row_bytes", 4 * sum(f.words for f in fields))

    def to_record(self) -> dict[str, Any]:
        """Return the table as plain JSON values; compression and slice are omitted if not set."""
        record = {
            "name": self.name,
            "dim": self.dim,
            "optimizer": optimizer_to_record(self.optimizer),
            "initializer": initializer_to_record(self.initializer),
            "seed": self.seed,
            "dtype": self.dtype,
        }
        if self.compression is not None:
            record["compression"] = self.compression
        if self.whole_dim is not None:
            record |= {"first_column": self.first_column, "whole_dim": self.whole_dim}
        return record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Table:
        """Build a table from the record of ``to_record``, with any Normal. Raises ValueError for anything else."""
        try:
            initializer = initializer_from_record(record["initializer"])
            table = cls(
                name=record["name"],
                dim=record["dim"],
                optimizer=optimizer_from_record(record["optimizer"]),
                initializer=Zeros(),
                seed=record["seed"],
                dtype=record["dtype"],
                compression=record.get("compression"),
                first_column=record.get("first_column", 0),
                whole_dim=record.get("whole_dim"),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"a table's record lacks {error}: it must be what a store wrote") from error
        object.__setattr__(table, "initializer", initializer)  # bypasses the check: it may have rows
        _check_start(table)
        return table


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Tables with the same row layout, optimizer and compression; their rows are stored together."""

    index: int
    """Its index among the groups of a store."""
    tables: tuple[Table, ...]
    """In the order of unsigned table ids."""
    fields: tuple[Field, ...] = field(init=False, repr=False, compare=False)
    """The fields of a row, in all its tables."""
    optimizer: Optimizer = field(init=False, repr=False, compare=False)
    """The row optimizer of all its tables."""
    dim: int = field(init=False, repr=False, compare=False)
    """Numbers in a vector."""
    dtype: str = field(init=False, repr=False, compare=False)
    """dtype of vectors."""
    compression: str | None = field(init=False, repr=False, compare=False)
    """Compression of its rows in a store on Zarr arrays."""
    row_bytes: int = field(init=False, repr=False, compare=False)
    """Bytes of a row."""

    def __post_init__(self) -> None:
        for name in ("fields", "optimizer", "dim", "dtype", "compression", "row_bytes"):
            object.__setattr__(self, name, getattr(self.tables[0], name))

    def place(self, table_name: str) -> int:
        """Return the index of a table within the group. Raises KeyError for an unknown name."""
        for index, table in enumerate(self.tables):
            if table.name == table_name:
                return index
        raise KeyError(table_name)


def group_tables(tables: Iterable[Table]) -> tuple[Group, ...]:
    """Group tables by (dim, dtype, optimizer, compression); groups and their tables are in the order of table ids.

    A column slice with a row-wise optimizer, whose rows have one number for all slices, is a separate group.

    Raises ValueError for an empty list, two tables of one name, or two names of one table id.
    """
    ordered = sorted(tables, key=lambda table: table.table_id)
    if not ordered:
        raise ValueError("no tables were given: a store needs at least one")
    for one, other in pairwise(ordered):
        if one.name == other.name:
            raise ValueError(f"two tables are named {one.name!r}: every table needs a unique name")
        if one.table_id == other.table_id:
            raise ValueError(f"tables {one.name!r} and {other.name!r} have the same table id: rename one of them")
    members: dict[tuple[int, str, Optimizer, str | None, str | None], list[Table]] = {}
    for table in ordered:
        alone = table.whole_dim is not None and table.optimizer.row_wise
        layout = table.dim, table.dtype, table.optimizer, table.compression, table.name if alone else None
        members.setdefault(layout, []).append(table)
    return tuple(Group(index=i, tables=tuple(group)) for i, group in enumerate(members.values()))


def _check_columns(table: Table) -> None:
    """Raise ValueError unless the table is whole, or a slice of fewer columns than the whole."""
    first, whole = table.first_column, table.whole_dim
    numbers = [first] if whole is None else [first, whole]
    whole = table.dim if whole is None else whole
    if any(isinstance(n, bool) or not isinstance(n, int) for n in numbers) or not 0 <= first <= whole - table.dim:
        raise ValueError(
            f"columns of table {table.name!r} are {table.dim} from first_column {first!r} on, of whole_dim "
            f"{table.whole_dim!r}: they must lie within the whole"
        )
    if table.whole_dim == table.dim:
        raise ValueError(f"table {table.name!r} is a slice with all {table.dim} columns: omit whole_dim if it is whole")


def _check_start(table: Table) -> None:
    """Raise ValueError if a number of the initializer is beyond the dtype."""
    for name, value in initializer_to_record(table.initializer).items():
        if isinstance(value, float | int) and not np.isfinite(nearest(np.array([value], np.float32), table.dtype)[0]):
            raise ValueError(
                f"{name} of table {table.name!r} is {value}, which is infinite in {table.dtype}: use a smaller value"
            )


def _check_spread(table: Table) -> None:
    """Raise ValueError if a Normal may draw a number beyond a 16-bit dtype."""
    start = table.initializer
    if not isinstance(start, Normal) or table.dtype == "float32":
        return
    most = abs(start.mean) + _FARTHEST * start.std
    with np.errstate(over="ignore"):
        beyond = not np.isfinite(nearest(np.array([most]).astype(np.float32), table.dtype)[0])
    if beyond:
        raise ValueError(
            f"Normal of table {table.name!r} reaches {most:g} at {_FARTHEST} deviations from its mean, which is "
            f"infinite in {table.dtype}: use a smaller std or mean"
        )


def table_named(tables: Iterable[Table], name: str, store: str) -> Table:
    """Return a table by name. Raises ValueError; ``store`` is its name in messages."""
    by_name = {table.name: table for table in tables}
    if name not in by_name:
        raise ValueError(f"{store} has no table {name!r}: it has {', '.join(map(repr, by_name))}")
    return by_name[name]


def tombstone_groups(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Return groups of the same tables for keys without rows: a row is one word."""

    def empty(table: Table) -> Table:
        return replace(
            table, dim=1, dtype="float32", optimizer=SGD(), initializer=Zeros(), first_column=0, whole_dim=None
        )

    return tuple(Group(index=group.index, tables=tuple(map(empty, group.tables))) for group in groups)


def state_layout(rows: Table | Group) -> tuple[object, ...]:
    """Return the optimizer's kind and the names of its states: rows keep their state while these stay the same."""
    return type(rows.optimizer), *(field.name for field in rows.fields[1:])


def row_layout(groups: Iterable[Group]) -> tuple[object, ...]:
    """Return the key of a row layout: groups of tables with the same one are stored in the same way."""
    return tuple(
        (tuple(table.name for table in group.tables), group.dtype, group.dim, state_layout(group), group.compression)
        for group in groups
    )
