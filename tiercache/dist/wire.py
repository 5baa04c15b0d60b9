"""The wire: what leaves this rank for others, narrowed and counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tiercache.dist.communicator import splits_width

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.dist.communicator import AnyCommunicator

WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Wire:
    """Sends flat tensors and counts among the ranks; what stays on this rank does not come here."""

    def __init__(self, ranks: AnyCommunicator, dtype: torch.dtype) -> None:
        """Raises ValueError for a dtype that is none of `WIRE_DTYPES`."""
        if dtype not in WIRE_DTYPES:
            raise ValueError(f"rows cannot travel as {dtype}: it must be one of {', '.join(map(str, WIRE_DTYPES))}")
        self.ranks, self.dtype = ranks, dtype
        self.bytes_sent = 0
        """Bytes that left this rank for others so far."""

    def remote(self, sizes_W: Iterable[int]) -> list[int]:
        """Return sizes by rank without this rank's own."""
        return [0 if rank == self.ranks.rank else int(size) for rank, size in enumerate(sizes_W)]

    def count(self, to: NDArray[np.int64], what: str) -> NDArray[np.int64]:
        """Tell every rank its row of ``to``, and return what each told this one. Collective."""
        self.bytes_sent += 8 * splits_width(to.shape[1]) * (self.ranks.size - 1)
        return self.ranks.exchange_splits(to, what)

    def send(self, send: torch.Tensor, sizes: list[int], receive: list[int], into: torch.Tensor, what: str) -> None:
        """Send to the others, float32 in the wire's dtype, and receive ``into``. Collective."""
        narrow = send.dtype == torch.float32 and self.dtype != torch.float32
        send = send.to(self.dtype) if narrow else send
        self.bytes_sent += send.numel() * send.element_size()
        if narrow:
            into.copy_(self.ranks.all_to_all(send, sizes, receive, what=what))
        else:
            self.ranks.all_to_all(send, sizes, receive, into, what=what)
