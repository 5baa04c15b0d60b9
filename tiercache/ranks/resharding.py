"""Another number of ranks, or another placement: parts are written anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiercache.errors import StateError

if TYPE_CHECKING:
    import os

    from tiercache.ranks.group import Ranks
    from tiercache.ranks.parts import Parts
    from tiercache.ranks.shares import Share


def reshard(path: str | os.PathLike[str], share: Share, ranks: Ranks, **_options: Any) -> Parts:
    """Raise StateError: this comes next."""
    raise StateError(
        f"the sharded store at {path} has parts of another number of ranks or another placement than {ranks.size} "
        f"ranks with {share.placement.digest[:12]}: start as many as made it"
    )
