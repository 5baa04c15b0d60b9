"""Which bytes of a file are free: runs between a beginning and an end."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class ExtentAllocator:
    """Free runs of [0, ``end``), apart from each other and in order.

    Room comes from the run that goes on where the last room ended, else from the first one that is large enough:
    what is written together stands together, and what is freed together is a hole that its like fits into again.
    """

    def __init__(self) -> None:
        self.end = 0
        """Where the space ends."""
        self._low: list[int] = []
        self._high: list[int] = []
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
        self.end += num_bytes
        self.give(self.end - num_bytes, num_bytes)

    def cut_tail(self) -> None:
        """Move the end to where the run that touches it begins."""
        if self.tail_bytes:
            self.end = self._low.pop()
            self._high.pop()

    def take(self, num_bytes: int) -> int | None:
        """Return where so many bytes are free, which then are not; None where no run is large enough."""
        i = bisect_left(self._low, self._next)
        if i == len(self._low) or self._low[i] != self._next or self._high[i] - self._next < num_bytes:
            i = next((i for i, low in enumerate(self._low) if self._high[i] - low >= num_bytes), -1)
        if i < 0:
            return None
        low = self._low[i]
        self._next = self._low[i] = low + num_bytes
        if self._low[i] == self._high[i]:
            del self._low[i], self._high[i]
        return low

    def use(self, low: int, num_bytes: int) -> None:
        """Take exactly these bytes, which are free."""
        high = low + num_bytes
        i = bisect_right(self._low, low) - 1
        assert i >= 0, f"bytes {low} to {high} are not free"
        assert high <= self._high[i], f"bytes {low} to {high} are not free"
        left, right = (self._low[i], low), (high, self._high[i])
        del self._low[i], self._high[i]
        for a, b in (right, left):
            if a < b:
                self._low.insert(i, a)
                self._high.insert(i, b)

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
