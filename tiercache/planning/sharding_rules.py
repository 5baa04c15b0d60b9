"""Sharding rules: how a user has tables divided without naming each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal, get_args

from tiercache.errors import BudgetError
from tiercache.sizes import format_bytes, parse_bytes
from tiercache.store.sharding import ShardingPlan, listed

Strategy = Literal["auto", "basic", "memory_balanced", "memory_optimized", "cost"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """What the strategy "cost" counts with. Raises ValueError for a number that is not above 0."""

    samples: int = 8192
    """Of a batch of all ranks together."""
    batches_per_step: int = 1
    """Batches, or micro-batches, between two steps."""
    number_bytes: int | None = None
    """Of a number on the wire; None: as the cache's ``comm_dtype`` says."""
    link_bytes_per_second: float = 10e9
    """What a rank can send and receive, together."""
    store_bytes_per_second: float = 1e9
    """What a rank's part can be read and written at."""
    memory_bytes_per_second: float = 20e9
    """What a device gathers and steps rows at."""
    piece_seconds: float = 1e-6
    """What the rows of one table from or for one other rank cost in a batch, however few they are."""

    def __post_init__(self) -> None:
        for one in fields(self):
            number = getattr(self, one.name)
            if number is None and one.name == "number_bytes":
                continue
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
                raise ValueError(f"{one.name} of the cost model is {number!r}: it must be a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingRules:
    """How to divide tables over ranks; the first that speaks of a table decides: kinds, thresholds, the strategy.

    Thresholds are bytes ("64MiB") of the rows of a table in its largest pass, with their optimizer state. Raises
    ValueError for an unknown strategy, and for thresholds that are no sizes or of which one leaves another no table.
    """

    strategy: str = "auto"
    """ "basic": whole tables go to one rank after the other; "memory_balanced": the largest first, to the rank with the
    fewest bytes; "memory_optimized": the same, with tables above a rank's fair share sharded row-wise; "cost", which
    "auto" stands for: as it keeps the busiest rank least busy."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """ "row_wise", "table_wise", "column_wise" or "data_parallel", by name of the table."""
    replicate_threshold: int | str | None = None
    """Tables of at most so many bytes are copied to all ranks."""
    column_threshold: int | str | None = None
    """Larger ones are cut into 2, 4, 8 ... slices of columns, until each is within it."""
    row_threshold: int | str | None = None
    """Larger ones are sharded row-wise."""
    costs: CostModel = CostModel()
    """What the strategy "cost" counts with."""

    def __post_init__(self) -> None:
        check_strategy(self.strategy)
        thresholds = [(name, size) for name, size in self.thresholds.items() if size is not None]
        for (name, size), (other, more) in pairwise(thresholds):
            if size > more:
                raise ValueError(
                    f"{name} is {format_bytes(size)} and {other} {format_bytes(more)}: they must not fall from "
                    "replicate_threshold to column_threshold to row_threshold"
                )

    @property
    def thresholds(self) -> dict[str, int | None]:
        """Return the thresholds in bytes by their names, the one for the smallest tables first."""
        names = ("replicate_threshold", "column_threshold", "row_threshold")
        return {name: _size(name, getattr(self, name)) for name in names}


def check_strategy(strategy: str) -> None:
    """Raise ValueError for an unknown one."""
    if strategy not in STRATEGIES:
        raise ValueError(f"the strategy of sharding is {strategy!r}: it must be one of {listed(STRATEGIES)}")


def sharding_facts(sharding: ShardingPlan | ShardingRules | str | Mapping[str, str]) -> Any:
    """Return a sharding as JSON values, which ranks compare. Raises ValueError for any other object."""
    if isinstance(sharding, ShardingPlan):
        return sharding.to_record()
    if isinstance(sharding, ShardingRules):
        return {
            "strategy": sharding.strategy,
            "kinds": _words(sharding.kinds),
            "costs": asdict(sharding.costs),
        } | sharding.thresholds
    if not isinstance(sharding, str | Mapping):
        raise ValueError(  # noqa: TRY004 - as for a word that there is not
            f"sharding is {sharding!r:.60}: it must be a strategy, kinds by table, ShardingRules or a ShardingPlan"
        )
    return sharding if isinstance(sharding, str) else _words(sharding)


def _words(kinds: Mapping[str, str]) -> dict[str, str]:
    return {str(name): str(kind) for name, kind in kinds.items()}


def _size(name: str, given: int | str | None) -> int | None:
    try:
        return None if given is None else parse_bytes(given)
    except BudgetError as error:
        raise ValueError(f"{name} of the sharding rules: {error}") from error
