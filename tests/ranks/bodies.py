"""What ranks do in the tests of how they talk: each function runs on every rank of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tiercache.ranks.group import Ranks


def who(ranks: Ranks) -> list[int]:
    """Say who this is."""
    return [ranks.rank, ranks.size]


def tell(ranks: Ranks) -> list[Any]:
    """Tell each other a value of many kinds."""
    return ranks.values({"rank": ranks.rank, "words": "é" * ranks.rank, "list": list(range(ranks.rank)), "none": None})


def uneven_exchange(ranks: Ranks, dtype: str, silent: bool = False) -> list[Any]:
    """Send ``3 s + r`` elements from rank s to rank r, each element 16 s + r; nothing from rank 0 where ``silent``."""

    def size(source: int, target: int) -> int:
        return 0 if silent and source == 0 else 3 * source + target

    kind = getattr(torch, dtype)
    send_sizes = [size(ranks.rank, target) for target in range(ranks.size)]
    receive_sizes = [size(source, ranks.rank) for source in range(ranks.size)]
    send = torch.tensor([16 * ranks.rank + target for target in range(ranks.size) for _ in range(send_sizes[target])])
    send = send.to(kind)
    received = ranks.exchange(send, send_sizes, receive_sizes)
    into = torch.empty(sum(receive_sizes), dtype=kind)
    again = ranks.exchange(send, send_sizes, receive_sizes, into)
    assert again is into
    assert torch.equal(again, received)
    assert received.dtype == kind
    return received.to(torch.float64).tolist()
