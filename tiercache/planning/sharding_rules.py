"""Sharding rules: how to divide tables without naming each."""

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
    """The inputs of the strategy "cost". Raises ValueError for a number that is not above 0."""

    samples: int = 8192
    """Samples of a batch, over all ranks."""
    batches_per_step: int = 1
    """Batches, or micro-batches, between two steps."""
    number_bytes: int | None = None
    """Bytes of a number on the wire; None: by the cache's ``comm_dtype``."""
    link_bytes_per_second: float = 10e9
    """Send and receive rate of a rank, together."""
    store_bytes_per_second: float = 1e9
    """Read or write rate of a rank's part."""
    memory_bytes_per_second: float = 20e9
    """Rate at which a device gathers and steps rows."""
    piece_seconds: float = 1e-6
    """Fixed cost per batch of one table's rows from or for one other rank."""

    def __post_init__(self) -> None:
        for one in fields(self):
            number = getattr(self, one.name)
            if number is None and one.name == "number_bytes":
                continue
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
                raise ValueError(f"{one.name} of the cost model is {number!r}: it must be a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingRules:
    """Rules for dividing tables over ranks; the first that applies wins: kinds, thresholds, the strategy.

    Thresholds are bytes ("64MiB") of the rows of a table in its largest pass, with their optimizer state. Raises
    ValueError for an unknown strategy, and for thresholds that are invalid or exclude each other.
    """

    strategy: str = "auto"
    """"basic": whole tables go to one rank after the other; "memory_balanced": the largest first, to the rank with the
    fewest bytes; "memory_optimized": the same, with tables above a rank's fair share sharded row-wise; "cost", an alias
    of "auto": minimize the busiest rank's time."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """ "row_wise", "table_wise", "column_wise" or "data_parallel", by name of the table."""
    replicate_threshold: int | str | None = None
    """Tables of at most this many bytes are copied to all ranks."""
    column_threshold: int | str | None = None
    """Larger ones are cut into 2, 4, 8 ... slices of columns, until each is within it."""
    row_threshold: int | str | None = None
    """Larger ones are sharded row-wise."""
    costs: CostModel = CostModel()
    """The inputs of the strategy "cost"."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"the strategy of sharding is {self.strategy!r}: it must be one of {listed(STRATEGIES)}, or pass kinds "
                "by table, such as {'user': 'row_wise'}"
            )
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
        raise ValueError(  # noqa: TRY004 - as for an unknown word
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
