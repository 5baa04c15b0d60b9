"""What ranks do in the tests of shards, over torch.distributed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.ranks.sharded_world import divide_anew, opened, sharding_on, take

if TYPE_CHECKING:
    from tiercache.dist.communicator import AnyCommunicator


def train(ranks: AnyCommunicator, path: str, commits: int, turn: int = 0) -> list[int]:
    """Make so many commits; returns where they end."""
    shards, world = opened(Path(path), ranks, turn)
    with shards:
        for _ in range(commits):
            take(shards, world)
        assert shards.cursor is not None
        return list(shards.cursor)


def divide(ranks: AnyCommunicator, path: str) -> None:
    """Make shards for these ranks."""
    divide_anew(Path(path), ranks, sharding_on(ranks.size, 1), lambda **_: None)
