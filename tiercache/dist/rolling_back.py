"""Rolling a store back to an older commit before training opens it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from tiercache.errors import StateError
from tiercache.planning.matching import check_tables

if TYPE_CHECKING:
    from tiercache.data.dataset import PassDataset
    from tiercache.store import Commit, Store
    from tiercache.store.sharding import ShardingPlan


def roll_back(store: Store, at: int | str, passes: PassDataset, sharding: ShardingPlan | None) -> None:
    """Make the commit ``at`` the newest one again, unless the newest has the same rows and state.

    ``sharding``: the sharding of the training ranks; None for one rank. Warns of the commits that are dropped: later
    ones that are not pinned. Raises CommitMissingError, DatasetError for a commit with other tables than the passes,
    StateError for a commit of other ranks, ValueError for a store opened read-only, and the errors of
    ``Store.rollback``; the store is unchanged then.
    """
    if store.mode != "a":
        raise ValueError(
            f"{store.label} is open read-only, but at= rolls it back: pass its path, or open it for writing"
        )
    with store.at(at) as there:
        target, newest = there.commit, store.commit
        assert target is not None, "the store has this commit"
        assert newest is not None, "a store with a commit has a newest one"
        check_tables(there, passes)
    name = f"commit {target.id}" + (f", pinned as {at!r}," if isinstance(at, str) else "")
    if target.sharding != sharding:
        ranks = 1 if target.sharding is None else target.sharding.num_ranks
        raise StateError(
            f"{name} of {store.label} has the rows of {ranks} ranks, sharded differently from the tables of this "
            f"training: start {ranks} ranks with sharding='auto', or roll back first (tiercache rollback) and unpin, "
            "because a change of ranks keeps no older commit"
        )
    if _is_same(newest, target):
        return
    pinned = [one for one in store.commits if one.id in newest.pins.values()]
    lost = [one for one in store.commits if one.id > target.id and not any(_is_same(one, kept) for kept in pinned)]
    lost = [one for one in lost if not _is_same(one, target)]
    store.rollback(target.id)
    if lost:
        ids = ", ".join(str(one.id) for one in lost)
        warnings.warn(
            f"{store.label} resumes from {name} at pass {target.cursor.pass_index}, and drops commit"
            f"{'s' if lost[1:] else ''} {ids}, up to pass {lost[-1].cursor.pass_index}, which no pin keeps: pin a "
            "commit first to keep it",
            stacklevel=7,
        )


def _is_same(one: Commit, other: Commit) -> bool:
    """Return True if two commits have the same rows and state."""
    names = ("ranks", "cursor", "settings", "tables", "stored", "schedule_digest")
    return one.made_of == other.made_of or all(getattr(one, name) == getattr(other, name) for name in names)
