"""For tests of engines, and of whatever uses a store: the contract that every engine passes, engines that misbehave.

``EngineContract`` needs pytest and Hypothesis; they are imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiercache.store.testing.failing import FailingEngine, KilledError, disk_full
from tiercache.store.testing.slow import SlowEngine

if TYPE_CHECKING:
    from tiercache.store.testing.contract import EngineContract

__all__ = ["EngineContract", "FailingEngine", "KilledError", "SlowEngine", "disk_full"]


def __getattr__(name: str) -> Any:
    if name != "EngineContract":
        raise AttributeError(f"module 'tiercache.store.testing' has no attribute {name!r}")
    from tiercache.store.testing.contract import EngineContract

    return EngineContract
