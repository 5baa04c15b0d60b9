"""Where a store stands at one moment, for those who read while another thread makes commits."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tiercache.store.errors import CorruptStoreError, StoreError
from tiercache.store.life import Life

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiercache.store.commit import Commit
    from tiercache.store.segment import Segment
    from tiercache.store.store import Store

TRIES = 8
"""How often commits may free what a reading is at; then the next one waits until the reading has ended."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """The newest commit and the segments that go with it, which a store replaces together: read it once, pass it on."""

    commit: Commit | None
    segments: tuple[Segment, ...]
    """Those of the commit and those appended since, by id."""

    @property
    def named(self) -> tuple[Segment, ...]:
        """The segments of the commit, without those appended since."""
        ids = frozenset[int]() if self.commit is None else frozenset(self.commit.segment_ids)
        return tuple(segment for segment in self.segments if segment.id in ids)

    def first_range(self, segment: Segment, group: int) -> int:
        """Return the first range of a segment stream that is not dead at the commit."""
        if self.commit is None or segment.id not in self.commit.segment_ids:
            return 0
        return Life.of(self.commit, self.segments).first_range(segment, group)


def steady(store: Store, read: Callable[[Standing], Result]) -> Result:
    """Return ``read`` of where the store stands; again, of where it stands then, where a commit freed what it read.

    What is freed is missing or has other bytes, so a reading that ends well is one of the commit that it began with.
    Commits go on beside it, but one that was disturbed ``TRIES`` times holds them off while it reads once more.
    Raises what ``read`` raises while the store stands still.
    """
    for tries in range(TRIES + 1):
        last = tries == TRIES
        with store._history.held() if last else nullcontext():
            standing = store.standing
            try:
                return read(standing)
            except CorruptStoreError:
                if store.stands_at(standing) or last:
                    raise
    raise AssertionError


def undisturbed(store: Store, standing: Standing, what: str, parts: Iterator[Result]) -> Iterator[Result]:
    """Yield ``parts``, which are read of ``standing``; raises StoreError for a commit made since, whatever it freed.

    The words ``what`` complete "made a commit while". What was yielded is of the standing.
    """
    while True:
        try:
            part = next(parts, None)
        except CorruptStoreError:
            if not store.stands_at(standing):
                _check_commit(store, standing, what)
            raise
        _check_commit(store, standing, what)
        if part is None:
            return
        yield part


def _check_commit(store: Store, standing: Standing, what: str) -> None:
    if store.commit is not standing.commit:
        raise StoreError(
            f"{store.label} made a commit while {what}: read it from a store that was opened with mode='r', which "
            "stays at its commit"
        )
