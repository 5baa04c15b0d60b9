"""Cases dealt to processes of one thread each, which kill on their own, and what they found put together."""

from __future__ import annotations

import os
import pickle
import traceback
from typing import TYPE_CHECKING

from benchmarks.store_killer import EnoughError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.store_killer import Killer, Outcome

    Case = Callable[[Killer], None]


def deal(cases: Sequence[Case], killer: Killer, jobs: int, notify: Callable[[int], None]) -> None:
    """Let ``jobs`` forks of this process go through ``cases``, and add what they find to the killer's outcome.

    Every one takes each ``jobs``-th case, in a folder and with random numbers of its own, and no further one when
    enough is wrong with those of any. ``notify`` is called with the stores examined since its last call. The caller
    must have one thread.
    """
    enough = killer.folder / "enough"
    reading, writing = os.pipe()
    workers = {}
    for number in range(jobs):
        process = os.fork()
        if process == 0:
            os.close(reading)
            _work(cases[number::jobs], killer.worker(number, lambda: os.write(writing, b".")), enough)
        workers[process] = killer.folder / f"worker-{number}.outcome"
    os.close(writing)
    while told := os.read(reading, 1 << 16):
        notify(len(told))
    os.close(reading)
    for process, file in workers.items():
        _, status = os.waitpid(process, 0)
        if status:
            raise RuntimeError(f"worker {process} ended with status {status}: see its output")
        found: Outcome = pickle.loads(file.read_bytes())
        killer.outcome.add(found)
        file.unlink()
    enough.unlink(missing_ok=True)


def _work(cases: Sequence[Case], killer: Killer, enough: Path) -> None:
    """Go through cases until ``enough`` is there, leave the outcome beside the killer's folder, and end the process."""
    status = 1
    try:
        try:
            for case in cases:
                if enough.exists():
                    break
                case(killer)
        except EnoughError:
            enough.touch()
        killer.folder.with_suffix(".outcome").write_bytes(pickle.dumps(killer.outcome))
        status = 0
    except BaseException:  # nobody above this process would show it
        traceback.print_exc()
    finally:
        os._exit(status)
