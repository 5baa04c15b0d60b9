"""Commits: the atomic steps of a store."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiercache.store.blocks import STATE, checksum
from tiercache.store.engine import Block
from tiercache.store.errors import CorruptStoreError
from tiercache.store.record import decode, encode, whole
from tiercache.store.retained_segment import RetainedSegment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

STATE_CHUNK_BYTES = 4 << 20


class Cursor(NamedTuple):
    """Where training stands: the next pass to train, and how many of its samples are trained already."""

    pass_index: int
    sample: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Commit:
    """One atomic step of the store."""

    id: int
    """Counts commits from 0."""
    cursor: Cursor
    schedule_digest: str
    """The dataset and order that next uses come from."""
    settings: dict[str, Any]
    """Plain values that decide the bits of what follows."""
    environment: dict[str, Any]
    """Plain values that describe where it was made."""
    segment_ids: tuple[int, ...]
    """The segments with live rows."""
    first_commits: tuple[int, ...]
    """For each of them the first commit that named it: with that its rows last changed, where it does not say of each
    row with which it did."""
    next_segment: int
    """Above the id of every segment that was ever written before: ids are never used twice."""
    retention: int
    """How many of the newest commits are kept, this one included."""
    abandoned: tuple[tuple[int, int], ...]
    """First and last id of the commits that each rollback gave up, in their order."""
    state_bytes: int
    """Bytes of the dense state."""
    state_chunk_bytes: int
    """Bytes of every block of the state but the last."""
    state_checksums: NDArray[np.uint32]
    """CRC32C of each block of the state."""
    state_places: NDArray[np.int64]
    """Where the engine keeps each block of the state."""
    retained: tuple[RetainedSegment, ...] = ()
    """What is live in the first of its segments, which schedules before this one left where they are."""
    overlaid: str = ""
    """The digest of the schedule that a compaction or an import interrupted: reorganized for it, the store goes on at
    the cursor."""

    @property
    def made_of(self) -> int:
        """The commit whose rows and state it has: its own id, or that of the one that was rolled back to."""
        found = self.id
        for first, last in reversed(self.abandoned):
            if last + 1 != found:
                break
            found = first - 1
        return found

    @property
    def named(self) -> dict[int, int]:
        """Its segments by id, each with the first commit that named it."""
        return dict(zip(self.segment_ids, self.first_commits, strict=True))

    @property
    def retained_ids(self) -> frozenset[int]:
        """The retained ones of its segments."""
        return frozenset(retained.segment_id for retained in self.retained)

    def state_blocks(self) -> list[Block]:
        """Return the blocks of the dense state, in order."""
        return state_blocks(self.id, self.state_bytes, self.state_chunk_bytes, self.state_places.tolist())

    def to_bytes(self) -> bytes:
        """Return its record. Raises ValueError where settings or environment are not plain JSON values."""
        values = {
            "id": self.id,
            "cursor": list(self.cursor),
            "schedule_digest": self.schedule_digest,
            "settings": self.settings,
            "environment": self.environment,
            "segments": [list(pair) for pair in zip(self.segment_ids, self.first_commits, strict=True)],
            "next_segment": self.next_segment,
            "retention": self.retention,
            "abandoned": [list(ids) for ids in self.abandoned],
            "state_bytes": self.state_bytes,
            "state_chunk_bytes": self.state_chunk_bytes,
        }
        if self.retained:
            values["retained"] = [retained.to_record() for retained in self.retained]
        if self.overlaid:
            values["overlaid"] = self.overlaid
        try:
            return encode("commit", values, {"state": self.state_checksums, "state_at": self.state_places})
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings and environment of a commit must be plain JSON values: {error}") from error

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Commit:
        """Read a record. Raises CorruptStoreError that calls it ``name``."""
        values, arrays = decode("commit", data, name)
        try:
            pass_index, sample = values["cursor"]
            state_bytes, chunk = (whole(values[name], name) for name in ("state_bytes", "state_chunk_bytes"))
            segment_ids = tuple(whole(id_, "the id of a segment") for id_, _ in values["segments"])
            next_segment, retention = (whole(values[name], name) for name in ("next_segment", "retention"))
            if any(b <= a for a, b in pairwise([*segment_ids, next_segment])):
                raise ValueError("its segments do not stand in the order of their ids")
            retained = tuple(RetainedSegment.from_record(record) for record in values.get("retained", []))
            if tuple(one.segment_id for one in retained) != segment_ids[: len(retained)]:
                raise ValueError("its retained segments are not the first ones")
            if retention < 1:
                raise ValueError("it keeps no commit")
            if chunk < 1 or -(-state_bytes // chunk) != arrays["state"].size:
                raise ValueError(f"{arrays['state'].size} checksums for {state_bytes} bytes of state")
            if arrays["state_at"].size != arrays["state"].size:
                raise ValueError(f"{arrays['state_at'].size} places for {arrays['state'].size} blocks of state")
            return cls(
                id=whole(values["id"], "id"),
                cursor=Cursor(whole(pass_index, "pass"), whole(sample, "sample")),
                schedule_digest=str(values["schedule_digest"]),
                settings=dict(values["settings"]),
                environment=dict(values["environment"]),
                segment_ids=segment_ids,
                first_commits=tuple(whole(first, "a segment's first commit") for _, first in values["segments"]),
                next_segment=next_segment,
                retention=retention,
                abandoned=tuple((whole(a, "abandoned"), whole(b, "abandoned")) for a, b in values["abandoned"]),
                state_bytes=state_bytes,
                state_chunk_bytes=chunk,
                state_checksums=arrays["state"],
                state_places=arrays["state_at"],
                retained=retained,
                overlaid=str(values.get("overlaid", "")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptStoreError(f"{name} cannot be read ({error}): restore the store from a copy") from error


def state_blocks(commit: int, state_bytes: int, chunk_bytes: int, places: Sequence[int]) -> list[Block]:
    """Return the blocks of a dense state of so many bytes: each where ``places`` says, or to be written."""
    sizes = [min(chunk_bytes, state_bytes - start) for start in range(0, state_bytes, chunk_bytes)]
    return [Block(STATE, commit, 0, i, size, place) for i, (size, place) in enumerate(zip(sizes, places, strict=True))]


def state_chunks(state: NDArray[np.uint8]) -> tuple[list[NDArray[np.uint8]], NDArray[np.uint32]]:
    """Cut the dense state into blocks and return them with their checksums."""
    chunks = [state[i : i + STATE_CHUNK_BYTES] for i in range(0, state.size, STATE_CHUNK_BYTES)]
    return chunks, np.array([checksum(chunk) for chunk in chunks], dtype=np.uint32)
