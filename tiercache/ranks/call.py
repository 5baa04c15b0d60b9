"""What ranks meet for: said with the first numbers of each call, so that none waits for one that went elsewhere."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FRAME_NUMBERS", "Call", "elsewhere", "frame_bytes", "framed", "unframed"]

FRAME_NUMBERS = 32
"""int64 to each rank in the one message that most counts are."""
_SAME_ORDER = "all ranks make the same batches, and step, discard, commit and evaluate after the same ones"
_LOADERS = (
    "all ranks make equally many batches of raw keys in a visit, so a rank whose loader has ended gives None in place "
    "of keys until the batch is None on all"
)
_HEADER = 2  # what call it is, and how many numbers it has


class Call(IntEnum):
    """A collective call of a training."""

    COUNTS = 0
    POOLED_FEATURES = 1
    ROWS = 2
    GRADIENTS = 3
    POOLED_GRADIENTS = 4
    SLICES = 5
    MIRRORS = 6
    RAW_BATCH = 7
    RAW_EVALUATION = 8
    PASSES = 9
    VISIT_END = 10
    COMMIT = 11
    EVALUATION = 12
    EVALUATION_SLICE = 13
    LEARNING_RATE = 14

    @property
    def words(self) -> str:
        """What a rank was doing there; follows "was"."""
        return _WORDS[self]


_WORDS = {
    Call.COUNTS: "exchanging counts",
    Call.POOLED_FEATURES: "asking for a batch",
    Call.ROWS: "asking for the rows of a batch",
    Call.GRADIENTS: "stepping rows",
    Call.POOLED_GRADIENTS: "stepping the rows of pooled features",
    Call.SLICES: "stepping column slices",
    Call.MIRRORS: "having mirrors follow a step",
    Call.RAW_BATCH: "making a batch of raw keys",
    Call.RAW_EVALUATION: "making a read-only batch of raw keys",
    Call.PASSES: "beginning to train passes",
    Call.VISIT_END: "ending a visit",
    Call.COMMIT: "committing inside a visit",
    Call.EVALUATION: "beginning an evaluation",
    Call.EVALUATION_SLICE: "going on to the next slice of an evaluation",
    Call.LEARNING_RATE: "setting the learning rate",
}


def framed(call: Call, to: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first message of ``to`` (W, n), of one size whatever the call, and the numbers beyond its room.

    So ranks whose calls differ understand each other: a collective of torch.distributed in which sizes differ ends the
    process.
    """
    room = FRAME_NUMBERS - _HEADER
    frame = np.zeros((to.shape[0], FRAME_NUMBERS), dtype=np.int64)
    frame[:, 0], frame[:, 1] = call, to.shape[1]
    frame[:, _HEADER : _HEADER + min(room, to.shape[1])] = to[:, :room]
    return frame, np.ascontiguousarray(to[:, room:])


def unframed(frame: NDArray[np.int64], rest: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of a frame and what came behind it."""
    here = frame[:, _HEADER : _HEADER + int(frame[0, 1]) - rest.shape[1]]
    return np.concatenate([here, rest], axis=1) if rest.shape[1] else np.ascontiguousarray(here)


def elsewhere(call: Call, mine: NDArray[np.int64], came: NDArray[np.int64]) -> tuple[list[int], str, str] | None:
    """Return the ranks that are in another call, and words of what they were doing and what all should do.

    None where all are in one call, with equally many numbers. ``mine`` and ``came``: frames.
    """
    others = np.nonzero((came[:, :_HEADER] != mine[:, :_HEADER]).any(axis=1))[0].tolist()
    if not others:
        return None
    other = Call(int(came[others[0], 0]))
    words = other.words if other != call else f"{call.words} of other tables or features"
    return others, words, _LOADERS if Call.RAW_BATCH in (call, other) else _SAME_ORDER


def frame_bytes(numbers: int) -> int:
    """Return the bytes that so many numbers for one rank are on the wire."""
    return 8 * max(FRAME_NUMBERS, numbers + _HEADER)
