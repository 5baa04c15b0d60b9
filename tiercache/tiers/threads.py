"""Threads that work beside the training and leave it the core that both want."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiercache.backends.base import Backend, Streams

_NICER = 10
"""Added to the niceness of such a thread."""


def nicer_thread(name: str, backend: Backend) -> ThreadPoolExecutor:
    """Return one thread that does what is submitted, in order; what is idle it takes all the same."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"tiercache-{name}", initializer=partial(_begin, backend.streams))


def _begin(streams: Streams) -> None:
    streams.enter_thread()
    with suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
