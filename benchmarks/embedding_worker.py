"""One contender in a process of its own, told over its standard input what to measure and when.

Commands, one a line: ``build SHAPE OPTIMIZER WARM_UP``, ``run REPEATS``, ``drop``. Each is answered by a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from benchmarks.embedding_cases import Shape

THREADS = 2


class Contender(Protocol):
    """One way to do the step."""

    def step(self, number: int) -> None:
        """Forward, backward and update of batch ``number``."""


def build(name: str, shape: Shape, optimizer: str) -> Contender:
    """Make tables and batches of one contender."""
    from benchmarks.embedding_cases import batches_of, gradients_of

    if name == "copy":
        from benchmarks.embedding_peers import Copy

        return Copy()
    ids, grads = batches_of(shape), gradients_of(shape)
    if name == "ours":
        from benchmarks.embedding_ours import Ours

        return Ours(shape, optimizer, ids, grads)
    from benchmarks.embedding_peers import Fbgemm, RowWise, TorchBags

    kinds: dict[str, Any] = {"torch": TorchBags, "by_hand": RowWise, "fbgemm": Fbgemm}
    contender: Contender = kinds[name](shape, optimizer, ids, grads)
    return contender


def main(name: str) -> None:
    """Serve until the input ends, with the threads that OMP_NUM_THREADS says."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    threads = int(os.environ.setdefault("OMP_NUM_THREADS", str(THREADS)))
    import torch

    from benchmarks.embedding_cases import SHAPES
    from benchmarks.machine import faults

    torch.set_num_threads(threads)
    contender: Contender | None = None
    number = 0
    for line in sys.stdin:
        command, *words = line.split()
        answer: dict[str, Any] = {}
        if command == "build":
            contender = None
            contender = build(name, SHAPES[words[0]], words[1])
            for number in range(int(words[2])):
                contender.step(number)
        elif command == "run":
            assert contender is not None
            contender.step(number)  # caches and clocks have rested
            before, seconds = faults(), []
            for _ in range(int(words[0])):
                number += 1
                begun = time.perf_counter()
                contender.step(number)
                seconds.append(time.perf_counter() - begun)
            answer = {"seconds": seconds, "faults": (faults() - before) / len(seconds)}
        else:
            contender = None
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
