"""The sharding planner: strategies that choose which ranks own the rows of each table, from sizes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tiercache.planning.sharding_rules import CostModel, ShardingRules
from tiercache.store.sharding import KINDS, Kind, ShardingPlan, Slice, TableSharding, listed, unknown_kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.data.dataset import PassDataset
    from tiercache.data.sub_dataset import SubDataset
    from tiercache.store.table import Table


COUNTED_KEYS = 1 << 22
"""Keys of a table whose counts are read: they are in hash order, so the first are a fair sample."""
_SAMPLED_KEYS = 1 << 16
"""Keys read if only their sum is needed."""
_STEPS = 4
"""Bins per factor of two in counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableStats:
    """One pass's demand on a table."""

    rows: int
    """Rows of the largest pass."""
    samples: int = 1
    """Samples of that pass."""
    hotness: float = 1.0
    """Mean ids per sample, over all features of the table."""
    uses: tuple[tuple[float, float], ...] = ()
    """Keys with equal use: (number of keys, occurrences of each in the pass). Empty: all alike."""

    def unique(self, samples: float) -> int:
        """Return the expected distinct ids in ``samples``: ``sum n (1 - exp(-ids p))``, n keys of the share p."""
        ids = samples * self.hotness
        total = sum(keys * count for keys, count in self.uses)
        if not total:
            return round(self.rows * -math.expm1(-ids / self.rows)) if self.rows else 0
        return round(sum(keys * -math.expm1(-ids * count / total) for keys, count in self.uses))


def stats_of(passes: PassDataset) -> Mapping[str, TableStats]:
    """Return the statistics of every table, by name, from the counts of its largest pass: of 4,194,304 keys at most.

    A pass of key sets alone is assumed to have as many samples as the given keys make: the true number if each table's
    keys were given as often as they occur, and fewer if each was given once.
    """
    table_stats = {}
    for table in passes.tables:
        largest = max(passes.passes, key=lambda p: p.rows(table.name), default=None)
        if largest is None or largest.rows(table.name) == 0:
            table_stats[table.name] = TableStats(rows=0, hotness=0.0)
            continue
        rows, samples = largest.rows(table.name), max(1, largest.samples or _least_samples(passes, largest))
        uses = _uses(largest.counts(table.name)[:COUNTED_KEYS], rows)
        ids = sum(keys * count for keys, count in uses)
        table_stats[table.name] = TableStats(rows=rows, samples=samples, hotness=ids / samples, uses=uses)
    return table_stats


def _least_samples(passes: PassDataset, source: SubDataset) -> int:
    """Return the least number of samples for the keys of a pass, counting a list of any length as one key."""
    keys = dict.fromkeys((table.name for table in passes.tables), 0)
    for feature in passes.schema.features:
        keys[feature.table] += feature.length or 1
    most = 0.0
    for name, of_sample in keys.items():
        counts = source.counts(name)[:_SAMPLED_KEYS] if of_sample and source.rows(name) else None
        if counts is not None:
            most = max(most, float(counts.sum()) * source.rows(name) / counts.size / of_sample)
    return round(most)


def _uses(counts: NDArray[np.int64], rows: int) -> tuple[tuple[float, float], ...]:
    """Group the counts (n,) of some of ``rows`` keys by size."""
    bins = (_STEPS * np.log2(np.maximum(counts, 1))).astype(np.int64)
    keys, ids = np.bincount(bins), np.bincount(bins, weights=counts)
    scale = rows / counts.size
    return tuple((n * scale, total / n) for n, total in zip(keys.tolist(), ids.tolist(), strict=True) if n)


_COLUMNS_SAVE = 1.01
"""Columns must be better by this factor: the ranks of a table make each of its new rows once per slice."""


def plan_sharding(
    tables: Sequence[Table], table_stats: Mapping[str, TableStats], num_ranks: int, rules: ShardingRules
) -> ShardingPlan:
    """Divide every table over the ranks. Equal arguments give equal plans; on one rank every table is "row_wise".

    Columns are cut in 2, 4, 8 ... slices until each is within the threshold, in as many as there are ranks (or columns)
    at most; slices that meet on a rank are one. A rank's fair share, for "memory_optimized", counts if neither of the
    larger thresholds is given. Raises ValueError for an unknown kind or table.
    """
    requested = _checked_kinds(tables, rules.kinds)
    if num_ranks == 1:
        return ShardingPlan(1, {table.name: TableSharding("row_wise") for table in tables})
    num_bytes = {table.name: table_stats[table.name].rows * table.row_bytes for table in tables}
    replicate_threshold, column_threshold, row_threshold = rules.thresholds.values()
    if rules.strategy == "memory_optimized" and row_threshold is None and column_threshold is None:
        row_threshold = sum(num_bytes.values()) // num_ranks
    choices: dict[str, tuple[Kind | None, int]] = {}
    for table in tables:
        kind, size, slices = requested.get(table.name), num_bytes[table.name], min(num_ranks, table.dim)
        if kind is None and replicate_threshold is not None and size <= replicate_threshold:
            kind = "data_parallel"
        elif kind is None and row_threshold is not None and size > row_threshold:
            kind = "row_wise"
        elif kind is None and column_threshold is not None and size > column_threshold:
            kind, slices = "column_wise", min(slices, 1 << (-(-size // column_threshold) - 1).bit_length())
        choices[table.name] = kind, slices
    if rules.strategy in {"auto", "cost"}:
        return _by_cost(tables, table_stats, num_ranks, choices, rules.costs)
    return _by_bytes(tables, num_bytes, num_ranks, choices, in_turn=rules.strategy == "basic")


def sharding_of(
    passes: PassDataset,
    num_ranks: int,
    how: ShardingPlan | ShardingRules | str | Mapping[str, str],
    *,
    number_bytes: int = 4,
) -> ShardingPlan:
    """Return the sharding of a dataset's tables for a user's argument.

    ``how``: a strategy, kinds by table, rules, or the sharding itself. number_bytes: bytes of a number on the wire,
    unless the costs of rules give it. Reads counts of keys. Raises ValueError if it does not fit these tables or
    ``num_ranks``.
    """
    if isinstance(how, ShardingPlan):
        how.check(passes.tables)
        if how.num_ranks != num_ranks:
            raise ValueError(f"the sharding is for {how.num_ranks} ranks, but there are {num_ranks}: create another")
        return how
    if not isinstance(how, ShardingRules):
        how = ShardingRules(strategy=how) if isinstance(how, str) else ShardingRules(kinds=how)
    if how.costs.number_bytes is None:
        how = replace(how, costs=replace(how.costs, number_bytes=number_bytes))
    return plan_sharding(passes.schema.tables, stats_of(passes), num_ranks, how)


def _checked_kinds(tables: Sequence[Table], kinds: Mapping[str, str]) -> dict[str, Kind]:
    names = [table.name for table in tables]
    found: dict[str, Kind] = {}
    for name, requested in kinds.items():
        if name not in names:
            raise ValueError(f"the sharding names the unknown table {name!r}: the tables are {listed(names)}")
        kind = next((kind for kind in KINDS if kind == requested), None)
        if kind is None:
            raise ValueError(f"table {name!r} is to be sharded by {unknown_kind(requested)}")
        found[name] = kind
    return found


def _by_bytes(
    tables: Sequence[Table],
    num_bytes: Mapping[str, int],
    num_ranks: int,
    choices: Mapping[str, tuple[Kind | None, int]],
    *,
    in_turn: bool,
) -> ShardingPlan:
    """Assign whole tables and slices to ranks in turn, or the largest first to the rank with the fewest bytes."""
    shardings: dict[str, TableSharding] = {}
    bytes_W = [0.0] * num_ranks
    pieces: list[tuple[float, Table]] = []
    for table in tables:
        kind, slices = choices[table.name]
        if kind in {"row_wise", "data_parallel"}:
            shardings[table.name] = TableSharding(kind)
            bytes_W = [some + num_bytes[table.name] / num_ranks for some in bytes_W]
        else:
            widths = slice_widths(table.dim, slices if kind == "column_wise" else 1)
            pieces += [(num_bytes[table.name] * width / table.dim, table) for width in widths]
    if not in_turn:
        pieces.sort(key=lambda piece: -piece[0])
    ranks: dict[str, list[int]] = {}
    for turn, (size, table) in enumerate(pieces):
        rank = turn % num_ranks if in_turn else bytes_W.index(min(bytes_W))
        bytes_W[rank] += size
        ranks.setdefault(table.name, []).append(rank)
    dims = {table.name: table.dim for table in tables}
    return ShardingPlan(num_ranks, shardings | {name: sliced(dims[name], some) for name, some in ranks.items()})


def _by_cost(
    tables: Sequence[Table],
    table_stats: Mapping[str, TableStats],
    num_ranks: int,
    choices: Mapping[str, tuple[Kind | None, int]],
    costs: CostModel,
) -> ShardingPlan:
    """Shard the most expensive tables first, each to minimize the busiest rank's time."""
    models = [_TableCost(table, table_stats[table.name], num_ranks, costs) for table in tables]
    busy, chance, shardings = np.zeros(num_ranks), 0.0, {}
    for model in sorted(models, key=lambda model: -model.of(TableSharding("row_wise"))[0][0]):
        kind, slices = choices[model.table.name]
        best: tuple[tuple[float, float], TableSharding, NDArray[np.float64], float] | None = None
        for choice in _choices(model.table, kind, slices, busy, all_ranks=len(tables) < num_ranks):
            seconds, variance = model.of(choice)
            after, risk = busy + seconds, chance + variance
            most = float(after.max()) + math.sqrt(2 * math.log(num_ranks) * risk)
            if kind is None and choice.kind == "column_wise":
                most *= _COLUMNS_SAVE
            score = most, float(after.sum())
            if best is None or score < best[0]:
                best = score, choice, after, risk
        assert best is not None
        _, shardings[model.table.name], busy, chance = best
    return ShardingPlan(num_ranks, shardings)


def _choices(
    table: Table, kind: Kind | None, slices: int, busy: NDArray[np.float64], *, all_ranks: bool
) -> Iterator[TableSharding]:
    """Yield the candidate shardings of a table; the least busy ranks get slices."""
    order = np.argsort(busy, kind="stable").tolist()
    if kind in {None, "row_wise"}:
        yield TableSharding("row_wise")
    if kind == "table_wise" or (kind is None and not all_ranks):
        yield sliced(table.dim, order[:1])
    if kind == "column_wise":
        yield sliced(table.dim, order[:slices])
    elif kind is None:
        counts = [1 << i for i in range(1, len(order).bit_length()) if 1 << i < len(order)] + [len(order)]
        for count in counts[-1:] if all_ranks else counts:
            if count <= table.dim:
                yield sliced(table.dim, order[:count])
    if kind in {None, "data_parallel"}:
        yield TableSharding("data_parallel")


class _TableCost:
    """The seconds that one table costs each of W ranks in one batch.

    With u the distinct ids of one rank's samples of a batch, U the ids of all ranks between two steps, D numbers in a
    vector, b bytes of a number and a batches between two steps; a rank asks with addresses of 4 bytes, gets rows, and
    sends gradients. Bytes in and out of a rank that owns the share f of the rows:

    * row_wise: ``u (4 + 2 b D) (f (W - 1) + 1 - f)`` with f = 1/W. Hashes do not give all ranks the same: f has the
      variance ``(1 - 1/W) / (W u)``, variances of tables add up, and the busiest of W ranks has ``sqrt(2 ln W
      variance)`` more.
    * table_wise: the same with f = 1 for the owner and f = 0 for others.
    * column_wise: the same, summed over the slices with their own widths; every slice is asked. With row-wise rules
      each of S slices gets and sends ``4 U (S - 1) / a`` more.
    * data_parallel: ``u (4 + b D) (f (W - 1) + 1 - f)`` for addresses and gradients, and ``2 U b D (W - 1) / (W a)``
      for the rows that owners send to all after a step; lookups bring no rows.

    These bytes are divided by those a second of the link. Owning all rows costs ``W u 4 D + 2 U row_bytes / a`` bytes
    of memory, gathered and stepped, and ``2 rows row_bytes / (batches of the pass)`` bytes of the store, loaded and
    dumped; a share of them that share. To these come the copies of replicated vectors, which a pass begins with, and
    the seconds of a piece for each other rank asked and served.
    """

    def __init__(self, table: Table, stats: TableStats, num_ranks: int, costs: CostModel) -> None:
        self.table, self._stats, self._ranks, self._costs = table, stats, num_ranks, costs
        self._number_bytes = costs.number_bytes or 4
        self._batches = max(1.0, stats.samples / costs.samples)
        self._unique_rows = stats.unique(costs.samples / num_ranks)
        self._stepped = stats.unique(costs.samples * costs.batches_per_step) / costs.batches_per_step
        moved = num_ranks * self._unique_rows * 4 * table.dim + 2 * self._stepped * table.row_bytes
        stored = 2 * stats.rows * table.row_bytes / self._batches
        self._owner_seconds = moved / costs.memory_bytes_per_second + stored / costs.store_bytes_per_second

    def of(self, table_sharding: TableSharding) -> tuple[NDArray[np.float64], float]:
        """Return the mean seconds of every rank (W,), and the variance that hashes add to those of each."""
        if not table_sharding.by_hash:
            return self._of_slices(table_sharding), 0.0
        ranks, dim, link = self._ranks, self.table.dim, self._costs.link_bytes_per_second
        ways = 1 if table_sharding.kind == "data_parallel" else 2
        seconds = self._traffic(dim, 1 / ranks, ways) + self._owner_seconds / ranks
        if table_sharding.kind == "data_parallel":
            vector = self._number_bytes * dim
            updates = 2 * self._stepped * vector * (ranks - 1) / ranks
            seconds += (updates + self._stats.rows * 4 * dim / self._batches) / link
        per_shard = self._unique_rows * self._row_bytes(dim, ways) * (ranks - 2) / link
        return np.full(ranks, seconds), per_shard**2 * (1 - 1 / ranks) / (ranks * max(1, self._unique_rows))

    def _of_slices(self, table_sharding: TableSharding) -> NDArray[np.float64]:
        total = np.zeros(self._ranks)
        squares = 2 * 4 * self._stepped * (len(table_sharding.slices) - 1) / self._costs.link_bytes_per_second
        for part in table_sharding.slices:
            width = part.last - part.first
            asking = self._traffic(width, 0.0)
            total += asking
            total[part.rank] += self._traffic(width, 1.0) - asking + self._owner_seconds * width / self.table.dim
            if self.table.optimizer.row_wise:
                total[part.rank] += squares
        return total

    def _row_bytes(self, width: int, ways: int) -> int:
        """Return the bytes of an address and of ``width`` columns, sent ``ways`` times."""
        return 4 + ways * self._number_bytes * width

    def _traffic(self, width: int, share: float, ways: int = 2) -> float:
        """Return the seconds for which ``width`` columns keep a rank busy that owns a share of the rows."""
        others = self._ranks - 1
        num_bytes = self._unique_rows * self._row_bytes(width, ways) * (share * others + 1 - share)
        pieces = (others if share > 0 else 0) + (0 if share == 1 else 1 if share == 0 else others)
        return num_bytes / self._costs.link_bytes_per_second + pieces * self._costs.piece_seconds


def slice_widths(dim: int, num_slices: int) -> tuple[int, ...]:
    """Return the widths of slices of ``dim`` columns, wider ones first. Raises ValueError if one gets no column."""
    if not 1 <= num_slices <= dim:
        raise ValueError(f"{dim} columns cannot be {num_slices} slices: a slice has at least 1 column")
    width, wider = divmod(dim, num_slices)
    return tuple(width + (i < wider) for i in range(num_slices))


def sliced(dim: int, ranks: Sequence[int]) -> TableSharding:
    """Return the sharding of ``dim`` columns in equal slices for ranks; a rank's slices are one, if it has several."""
    widths: dict[int, int] = {}
    for rank, width in zip(ranks, slice_widths(dim, len(ranks)), strict=True):
        widths[rank] = widths.get(rank, 0) + width
    first, slices = 0, []
    for rank, width in widths.items():
        slices.append(Slice(rank, first, first + width))
        first += width
    return TableSharding("table_wise" if len(slices) == 1 else "column_wise", tuple(slices))
