"""Table statistics: how large a table is and how often it is looked up, as the sharding planner needs to know."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from tiercache.data.dataset import PassDataset, SubDataset

COUNTED_KEYS = 1 << 22
"""Keys of a table whose counts are looked at: in hash order, so the first are a fair sample of all."""
_SAMPLED_KEYS = 1 << 16
"""Where only their sum is asked for."""
_STEPS = 4
"""Steps in which counts that are twice as large are told apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableStats:
    """What one pass asks of a table."""

    rows: int
    """Of the pass that has the most."""
    samples: int = 1
    """Of that pass."""
    hotness: float = 1.0
    """Mean ids of a sample, over all features that look into the table."""
    uses: tuple[tuple[float, float], ...] = ()
    """Keys that are used alike: (how many, how often each occurs in the pass). Empty: all alike."""

    def unique(self, samples: float) -> int:
        """Return how many different ids so many samples are expected to have: ``sum n (1 - exp(-ids p))``.

        n keys have the share p of all ids.
        """
        ids = samples * self.hotness
        total = sum(keys * count for keys, count in self.uses)
        if not total:
            return round(self.rows * -math.expm1(-ids / self.rows)) if self.rows else 0
        return round(sum(keys * -math.expm1(-ids * count / total) for keys, count in self.uses))


def stats_of(passes: PassDataset) -> Mapping[str, TableStats]:
    """Return the statistics of every table, by name, from the counts of its largest pass: of 4,194,304 keys at most.

    A pass of key sets alone is taken to have as many samples as the keys that were given for its tables make: as many
    as they had where each table's keys were given as often as they occur, and fewer where each was given once.
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
    """Return how many samples the keys of a pass make at least, lists of any length taken for one key."""
    keys = dict.fromkeys((table.name for table in passes.tables), 0)
    for feature in passes.schema.features:
        keys[feature.table] += feature.length or 1
    most = 0.0
    for name, of_sample in keys.items():
        some = source.counts(name)[:_SAMPLED_KEYS] if of_sample and source.rows(name) else None
        if some is not None:
            most = max(most, float(some.sum()) * source.rows(name) / some.size / of_sample)
    return round(most)


def _uses(counts: NDArray[np.int64], rows: int) -> tuple[tuple[float, float], ...]:
    """Put counts (n,) of some of ``rows`` keys together by size."""
    bins = (_STEPS * np.log2(np.maximum(counts, 1))).astype(np.int64)
    keys, ids = np.bincount(bins), np.bincount(bins, weights=counts)
    scale = rows / counts.size
    return tuple((n * scale, total / n) for n, total in zip(keys.tolist(), ids.tolist(), strict=True) if n)
