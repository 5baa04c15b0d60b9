"""The ids of a rank's batch: a dict that says of a feature whose ids it lacks why, and what brings them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiercache.values.ids import FeatureIds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class BatchIds(dict[str, FeatureIds]):
    """Ids by feature, of those that some module looks up and no other rank pools.

    ``in``, ``get`` and iteration are a dict's; ``ids[name]`` of any other name raises KeyError with a sentence.
    """

    def __init__(self, ids: Mapping[str, FeatureIds], modes: Mapping[str, str], features: Iterable[str]) -> None:
        """modes: by feature, how those are pooled whose ids are not here; features: all of the schema."""
        super().__init__(ids)
        self._modes, self.features = dict(modes), tuple(features)
        """All of the schema, in its order."""

    def __missing__(self, name: str) -> FeatureIds:
        """Raise KeyError."""
        if name in self._modes:
            raise KeyError(
                f"feature {name!r} is pooled by {self._modes[name]} where the rows of its table are, so the batch has "
                f"no ids of it: make the module that looks it up with weighted=[{name!r}] to have them, or look for "
                "its vectors in batch.pooled"
            )
        if name in self.features:
            raise KeyError(
                f"no module of this cache looks up feature {name!r}, so the batch was made without its ids: make one "
                "that does, before the batch is made"
            )
        raise KeyError(f"there is no feature {name!r}: the data have {', '.join(self.features)}")
