"""For tests of whatever uses a store: engines that misbehave, and stores whose content is known.

``StoreMachine`` needs Hypothesis and is imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tiercache.store.testing.failing import FailingEngine, KilledError, disk_full
from tiercache.store.testing.slow import SlowEngine

if TYPE_CHECKING:
    from tiercache.store.testing.machine import StoreMachine
    from tiercache.store.testing.world import World

__all__ = ["FailingEngine", "KilledError", "SlowEngine", "StoreMachine", "World", "disk_full"]

_HOME = {"StoreMachine": "machine", "World": "world"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tiercache.store.testing' has no attribute {name!r}")
    return getattr(import_module(f"tiercache.store.testing.{_HOME[name]}"), name)
