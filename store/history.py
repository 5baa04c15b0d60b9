"""The commits that a store keeps, and the names of the records that say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercache.store.record_chain import digest
from tiercache.store.snapshot import Needed, Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tiercache.store.commit import Commit
    from tiercache.store.segment import Segment

COMMIT, SEGMENT, TABLES, KEPT = "commit/", "segment/", "tables", "kept"
"""Names of records: those of commits and segments end in an id; ``KEPT`` says which commits are kept."""


def commit_digest(commit: Commit, digests: Mapping[str, str]) -> str:
    """Return the SHA-256 of the names of all records of a commit, each with its own, as hexadecimal digits.

    Commits with the same one have the same tables, rows and state. ``digests`` has those of the records, by name.
    """
    names = [TABLES, f"{COMMIT}{commit.id}", *(f"{SEGMENT}{id_}" for id_ in commit.segment_ids)]
    return digest("".join(f"{name} {digests[name]}\n" for name in sorted(names)).encode())


@dataclass(frozen=True, slots=True)
class History:
    """The commits that are kept, each as a snapshot, the oldest first."""

    snapshots: tuple[Snapshot, ...] = ()

    @classmethod
    def of(cls, commits: Iterable[Commit], segments: Mapping[int, Segment]) -> History:
        """Return the history of ``commits``; ``segments`` has at least all that they name.

        Raises ValueError for a commit whose cursor none of its segments can stand at.
        """
        return cls(tuple(Snapshot(commit, (segments[id_] for id_ in commit.segment_ids)) for commit in commits))

    @property
    def commits(self) -> tuple[Commit, ...]:
        """The oldest first."""
        return tuple(snapshot.commit for snapshot in self.snapshots if snapshot.commit is not None)

    @property
    def newest(self) -> Snapshot:
        """The newest commit; without one a snapshot of nothing."""
        return self.snapshots[-1] if self.snapshots else Snapshot(None, ())

    @property
    def needed(self) -> Needed:
        """What the commits need."""
        return Needed.of(self.snapshots)
