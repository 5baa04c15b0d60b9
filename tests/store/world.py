"""The world that tests of the store share: ``tiercache.store.testing`` ships it."""

from __future__ import annotations

from tiercache.store.testing.world import World

__all__ = ["World"]
