"""How long the GPU takes for a call, and how long Python takes to launch it: neither is part of the other."""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["COPY_BYTES", "GpuClock", "Times"]

COPY_BYTES = 256 << 20
_CALLS_OF_SAMPLE = 10
_MOST_COPIES = 256  # of what a stream takes before a launch waits


class Times(NamedTuple):
    """Medians over samples."""

    seconds: float
    """Of a call."""
    host_seconds: float | None
    """What Python takes to launch it; None where the call is done when it returns."""


class GpuClock:
    """Times calls on the default stream by events.

    A sample is ten calls behind copies that keep the GPU busy until the last is launched, so no gap between launches
    counts, however slow Python is. Only a call that waits for the GPU itself leaves gaps, in both its times; its host
    time is that of samples without copies, which it would wait for too.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        ones = np.ones(COPY_BYTES // 4, np.float32)  # CuPy's own would be a kernel, for which it wants CUDA's headers
        self._from, self._to = cupy.asarray(ones), cupy.asarray(ones)
        self._copy_seconds: float | None = None

    def copy(self) -> None:
        """Copy 256 MiB on the GPU."""
        self._cupy.copyto(self._to, self._from)

    def times(self, call: Callable[[], Any], samples: int) -> Times:
        """Return the medians of single calls, after two that count for nothing."""
        call()
        self._cupy.cuda.Device().synchronize()
        begun = time.perf_counter()
        call()
        copies = self._copies_for(2 * _CALLS_OF_SAMPLE * (time.perf_counter() - begun))
        taken: list[float] = []
        launched: list[float] = []
        while len(taken) < samples:
            seconds, host_seconds, hidden = self._sample(call, copies)
            if not hidden and copies < _MOST_COPIES:
                copies = min(2 * copies, _MOST_COPIES)
                continue
            if not hidden:
                host_seconds = self._sample(call, 0)[1]
            taken.append(seconds)
            launched.append(host_seconds)
        return Times(statistics.median(taken), statistics.median(launched))

    def _copies_for(self, seconds: float) -> int:
        """Return how many copies take the GPU so long."""
        if self._copy_seconds is None:
            self._copy_seconds = min(self._sample(self.copy, 1)[0] for _ in range(3))
        return min(4 + math.ceil(seconds / self._copy_seconds), _MOST_COPIES)

    def _sample(self, call: Callable[[], Any], copies: int) -> tuple[float, float, bool]:
        """Return the seconds of a call on the GPU and to launch it, and whether the GPU copied until all were."""
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        for _ in range(copies):
            self.copy()
        begin.record()
        begun = time.perf_counter()
        for _ in range(_CALLS_OF_SAMPLE):
            call()
        host_seconds = time.perf_counter() - begun
        end.record()
        hidden = not begin.done
        end.synchronize()
        seconds = float(self._cupy.cuda.get_elapsed_time(begin, end)) / 1e3
        return seconds / _CALLS_OF_SAMPLE, host_seconds / _CALLS_OF_SAMPLE, hidden
