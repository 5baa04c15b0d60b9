"""Threads that work beside the training and leave it the core that both want."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiercache.processors.processor import Mover

_NICER = 10
"""Added to the niceness of such a thread."""


def nicer_thread(name: str, mover: Mover) -> ThreadPoolExecutor:
    """Return one thread that does what is submitted, in order; what is idle it takes all the same."""
    return ThreadPoolExecutor(1, thread_name_prefix=f"tiercache-{name}", initializer=partial(_begin, mover))


def _begin(mover: Mover) -> None:
    mover.enter_thread()
    with suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
