"""What ranks on stand-ins for GPUs do in the tests of the watch: each function runs on every rank of a run.

As a program (``python -m tests.ranks.watched``) it is one rank of several, of which rank 1 is killed.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

from tests.ranks.launched import say
from tests.ranks.stand_in_nccl import exchange, ranks_on_device
from tiercache.ranks.group import Ranks


def in_order(_: Ranks) -> list[Any]:
    """Exchange on the ranks and beside them, then close both, rank 0 last."""
    with ranks_on_device() as (ranks, wires, stream), ranks:
        beside: Any = ranks.beside()
        for each in (ranks, beside):
            exchange(each, stream)
        logs = [wires.log, beside._wires.log]
        if ranks.rank == 0:
            threading.Event().wait(0.5)
        beside.close()
    ranks.close()
    return logs


def fails(_: Ranks, kind: str) -> Any:
    """Rank 1 fails in its loop, while another thread of it waits for a transfer of other ranks; the others go on."""
    with ranks_on_device() as (ranks, wires, stream):
        beside: Any = ranks.beside()
        other = threading.Thread(target=exchange, args=(beside, stream))
        logs = [wires.log, beside._wires.log]
        try:
            with ranks:
                for step in range(50):
                    exchange(ranks, stream)
                    if ranks.rank == 1 and step == 3:
                        other.start()
                        raise ValueError("on my own") if kind == "ValueError" else torch.cuda.OutOfMemoryError("7 GiB")
        except (RuntimeError, ValueError) as error:
            beside.close()
            if other.ident:
                other.join()
            return [type(error).__name__, str(error), logs]
    return "nothing happened"


def is_silent(_: Ranks) -> Any:
    """Rank 1 does not come, and lives on until the others have gone."""
    with ranks_on_device(timeout=2.0) as (ranks, wires, stream):
        exchange(ranks, stream)
        said: list[str] = []
        try:
            with ranks:
                for _step in range(2):
                    if ranks.rank == 0:
                        exchange(ranks, stream)
                    else:
                        ranks._bond.watch._over.wait(20)  # type: ignore[union-attr]
                ranks.barrier("going on")
        except RuntimeError as error:
            said.append(str(error))
        return [said, wires.log]


def breaks_by_itself(_: Ranks, kind: str) -> Any:
    """A transfer of rank 1 raises an error that no other rank has to do with."""
    with ranks_on_device() as (ranks, wires, stream):
        exchange(ranks, stream)
        begin = wires.transfer

        def broken() -> None:
            raise (
                torch.cuda.OutOfMemoryError("CUDA out of memory.")
                if kind == "memory"
                else RuntimeError("CUDA error: device-side assert triggered\nCompile with ...")
            )

        wires.transfer = broken if ranks.rank == 1 else begin  # type: ignore[method-assign]
        said: list[Any] = []
        with ranks:
            for _step in range(2):
                try:
                    exchange(ranks, stream)
                    ranks.barrier("going on")
                except RuntimeError as error:
                    said.append([type(error).__name__, str(error)])
        return [said, wires.log]


def connects(_: Ranks) -> Any:
    """Connect the devices as ``join`` does that made a default group; then again, where the device has no room."""
    with ranks_on_device() as (ranks, wires, stream), pytest.MonkeyPatch.context() as patch:
        made: list[Any] = []
        patch.setattr(torch.distributed, "all_reduce", lambda one: made.append((one.device.type, stream.begun)))
        patch.setattr(ranks, "_owns_default", True)
        assert ranks._connected() is ranks
        patch.setattr(ranks, "_owns_default", False)

        def full(*_: Any, **__: Any) -> Any:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

        patch.setattr(torch, "zeros", full)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            ranks._connected()
        return [made, stream.begun, wires.log[:1], ranks._host is None]


def main() -> None:
    """Join over Gloo and exchange until rank 1 is killed."""
    torch.set_num_threads(1)
    with Ranks.join(timeout=30), ranks_on_device() as (ranks, wires, stream):
        if ranks.rank == 1:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        try:
            with ranks:
                while True:
                    exchange(ranks, stream)
        except RuntimeError as error:
            say(error=str(error), log=wires.log)


if __name__ == "__main__":
    main()
