"""An extraction that kills itself, run by test_kill in child processes.

A fork server imports this module once, with the kernels, so that a process takes milliseconds instead of seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.crash.told import Told
from tests.data.cases import rich_schema
from tiercache.data.extract import extract
from tiercache.kernels.cpu.hashing import hash_keys
from tiercache.kernels.cpu.unique_keys import UniqueKeys

if TYPE_CHECKING:
    from pathlib import Path

# Loads the compiled code that takes longest. It is serial: a process with threads must not be forked.
hash_keys(np.zeros(1, np.int64), 0)
UniqueKeys(0).add(np.zeros(1, np.int64), np.zeros(1, np.int32))


def run(folder: Path, options: dict[str, Any], fatal_event: int) -> None:
    """Extract and die at one event (-1: never); write the number of events."""
    told = Told(fatal_event)
    extract(str(folder / "*.parquet"), rich_schema(), folder / "out", progress=told, **options)
    (folder / "events").write_text(str(told.events))
