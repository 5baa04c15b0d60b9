"""Offsets of lists, with the last one or without it, and the number of samples that they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def num_samples(
    counts: Iterable[int], lists: Mapping[str, tuple[int, int, int]], *, as_bags: bool = False
) -> int | None:
    """Return how many samples a batch has whose offsets may lack the last, as `nn.EmbeddingBag` takes them.

    counts: the samples of all columns that say so. lists: of each column of values and offsets, the number of offsets,
    the last of them (0 if there is none), and the number of values. None: no number fits all of them.

    Two numbers fit if nothing else says it: offsets that end at the number of values may have the last or lack it.
    as_bags: then they lack it, as those of `nn.EmbeddingBag` do; otherwise raises ValueError.
    """
    fits: set[int] | None = None
    for count in counts:
        fits = {count} if fits is None else fits & {count}
    for num_offsets, last, num_values in lists.values():
        lacks_last = not num_offsets or last < num_values
        either = {num_offsets} if lacks_last else {num_offsets - 1, num_offsets}
        fits = either if fits is None else fits & either
    if fits is not None and len(fits) > 1 and not as_bags:
        raise ValueError(
            f"offsets of {', '.join(map(repr, lists))} end at the number of values and nothing else says how many "
            f"samples there are: {min(fits)}, or {max(fits)} if offsets lack the last and the last list is empty"
        )
    return max(fits) if fits else None


def lacks_last(samples: int | None, num_offsets: int, last: int, num_values: int) -> bool:
    """Return True if offsets lack the last one; samples: as ``num_samples`` returned it."""
    return num_offsets == samples if samples is not None else last < num_values
