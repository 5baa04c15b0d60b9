"""What modules look up: a cache that brings rows from elsewhere brings what some module uses, and nothing else."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Use", "Uses"]


class Use:
    """How a module looks up its features. Copies of the module share it: it lives as long as one of them does."""

    __slots__ = ("__weakref__", "modes")

    def __init__(self, modes: Mapping[str, str | None]) -> None:
        """modes: by feature, how it is pooled; None where the module needs the rows themselves."""
        self.modes = dict(modes)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Uses:
    """The uses of all modules that are left. For any thread."""

    def __init__(self) -> None:
        self._found: weakref.WeakSet[Use] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, use: Use) -> None:
        """Add that of a module, which goes when the module does."""
        with self._lock:
            self._found.add(use)

    def modes(self, features: Iterable[str]) -> dict[str, str | None]:
        """Return how each feature that some module uses is pooled; None: in several ways, or its rows are needed.

        Without any module all ``features`` are used, by their rows. In the order of ``features``.
        """
        with self._lock:
            found = list(self._found)
        asked: dict[str, set[str | None]] = {}
        for use in found:
            for name, mode in use.modes.items():
                asked.setdefault(name, set()).add(mode)
        if not asked:
            return dict.fromkeys(features)
        return {name: next(iter(asked[name])) if len(asked[name]) == 1 else None for name in features if name in asked}
