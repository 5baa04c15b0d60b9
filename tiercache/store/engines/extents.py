"""Runs of pages in a file: those that are free, and those that a blob is in."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from tiercache.store.files import PAGE_BYTES, paged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Run = tuple[int, int]
"""The first byte of a run of whole pages, and its bytes."""
_SPLIT_BYTES = 1 << 20
"""A run this long may always hold a part of a larger blob; smaller blobs split over shorter runs."""


class ExtentAllocator:
    """Free runs of [0, ``end``), apart from each other and in order.

    Room comes from the run that goes on where the last room ended, else from the first one that is large enough:
    what is written together stands together, and what is freed together is a hole that its like fits into again.
    """

    def __init__(self, end: int = 0, low: Iterable[int] = (), high: Iterable[int] = ()) -> None:
        """Make it of the free runs there are, apart from each other and in order: where they begin, and end."""
        self.end = end
        """End of the space, in bytes."""
        self._low, self._high = list(low), list(high)
        self._next = -1

    @property
    def free_bytes(self) -> int:
        """Bytes of all runs."""
        return sum(self._high) - sum(self._low)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Beginning and end of each run."""
        return list(zip(self._low, self._high, strict=True))

    @property
    def tail_bytes(self) -> int:
        """Bytes of the run that touches the end."""
        return self._high[-1] - self._low[-1] if self._high and self._high[-1] == self.end else 0

    def grow(self, num_bytes: int) -> None:
        """Move the end; what is new is free."""
        if not num_bytes:
            return
        if self._high and self._high[-1] == self.end:
            self._high[-1] += num_bytes
        else:
            self._low.append(self.end)
            self._high.append(self.end + num_bytes)
        self.end += num_bytes

    def cut_tail(self) -> None:
        """Move the end to where the run that touches it begins."""
        if self.tail_bytes:
            self.end = self._low.pop()
            self._high.pop()

    def take(self, num_bytes: int) -> list[Run]:
        """Take so many bytes in one run or, where none is large enough, in several; fewer where no more are free.

        Of those, runs are left that are short beside the bytes: what is read together stands together.
        """
        i = bisect_left(self._low, self._next)
        if i == len(self._low) or self._low[i] != self._next or self._high[i] - self._next < num_bytes:
            i = next((i for i, low in enumerate(self._low) if self._high[i] - low >= num_bytes), -1)
        if i >= 0:
            return [self._take(i, num_bytes)] if num_bytes else []
        found, least, i = list[Run](), min(_SPLIT_BYTES, paged(num_bytes // 8)), 0
        while num_bytes and i < len(self._low):
            if (size := min(num_bytes, self._high[i] - self._low[i])) < min(least, num_bytes):
                i += 1
                continue
            found.append(self._take(i, size))
            num_bytes -= size
        return found

    def _take(self, i: int, num_bytes: int) -> Run:
        """Take the first bytes of a run."""
        low = self._low[i]
        self._next = self._low[i] = low + num_bytes
        if self._low[i] == self._high[i]:
            del self._low[i], self._high[i]
        return low, num_bytes

    def give(self, low: int, num_bytes: int) -> None:
        """Free bytes that were taken."""
        high = low + num_bytes
        if low == high:
            return
        i = bisect_left(self._low, low)
        assert i == 0 or self._high[i - 1] <= low, f"bytes {low} to {high} are free already"
        assert i == len(self._low) or high <= self._low[i], f"bytes {low} to {high} are free already"
        if i < len(self._low) and self._low[i] == high:
            self._low[i] = low
        else:
            self._low.insert(i, low)
            self._high.insert(i, high)
        if i > 0 and self._high[i - 1] == low:
            self._high[i - 1] = self._high[i]
            del self._low[i], self._high[i]


class Extents:
    """The runs of the file that hold a blob. Immutable."""

    __slots__ = ("_starts", "dropped", "runs", "size")

    def __init__(self, size: int, dropped: int, runs: tuple[Run, ...]) -> None:
        """``runs`` have its bytes from ``dropped`` on, and zeros to the end of its last page."""
        self.size, self.dropped, self.runs = size, dropped, runs
        self._starts = [*accumulate((count for _, count in runs), initial=dropped)]

    def pieces(self, offset: int, num_bytes: int) -> Iterator[Run]:
        """Yield the bytes of the file that some bytes of the blob, none dropped, are."""
        i = bisect_right(self._starts, offset) - 1
        while num_bytes:
            low, inside = self.runs[i][0], offset - self._starts[i]
            count = min(num_bytes, self.runs[i][1] - inside)
            yield low + inside, count
            offset, num_bytes, i = offset + count, num_bytes - count, i + 1

    def drop(self, upto: int) -> tuple[Extents, list[Run]]:
        """Return it without the whole pages that end before a byte, and where these are."""
        dropped = self.size if upto >= self.size else upto - upto % PAGE_BYTES
        gone = min(paged(dropped), self._starts[-1]) - self.dropped
        if gone <= 0:
            return self, []
        rest = self.pieces(self.dropped + gone, self._starts[-1] - self.dropped - gone)
        return Extents(self.size, dropped, tuple(rest)), [*self.pieces(self.dropped, gone)]

    def whole_bytes(self, file_bytes: int) -> int:
        """Return its size, or the bytes before those that a file of so many bytes lacks."""
        for start, (low, count) in zip(self._starts, self.runs, strict=False):
            if low + min(count, self.size - start) > file_bytes:
                return start + max(0, file_bytes - low)
        return self.size


def joined(runs: Iterable[Run]) -> list[Run]:
    """Return runs, those as one of which one begins where the one before ends."""
    found = list[Run]()
    for low, count in runs:
        if found and sum(found[-1]) == low:
            low, count = found[-1][0], found.pop()[1] + count  # noqa: PLW2901
        found.append((low, count))
    return found
