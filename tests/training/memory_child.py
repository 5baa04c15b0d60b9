"""A training in a process whose memory is limited to what it had before and the budgets: prints the visits trained."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np

import tiercache as tc
from tests.training.cases import table

TABLES = (table("a", 8),)
DEVICE_BYTES = 1 << 20


def data_bytes() -> int:
    """Return the bytes that RLIMIT_DATA counts."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) << 10


def train(path: Path, passes: tc.PassSet, host_bytes: int, visits: int) -> int:
    """Train so many visits, a batch each, on one epoch after the other; return how many there were."""
    done = 0
    with (
        tc.Store.open(path, tables=TABLES) as store,
        tc.TierCache(store, passes, device_budget=DEVICE_BYTES, host_budget=host_bytes, progress=False) as cache,
    ):
        rows = tc.TieredEmbedding(cache)
        for visit in cache.passes(epochs=1 + visits // len(passes)):
            batch = visit.batch({"a": np.asarray(passes.passes[visit.pass_index].keys("a")[:64])})
            rows(batch)["a"].square().sum().backward()
            cache.step()
            done += 1
            if done == visits:
                break
    return done


def main(folder: Path, host_bytes: int, visits: int) -> None:
    """Train the key sets in ``folder``, after those of its smaller sister made threads and compiled kernels."""
    train(folder / "warm.tc", tc.PassSet.open(folder / "few"), 64 << 20, 4)
    limit = data_bytes() + DEVICE_BYTES + host_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sys.stdout.write(f"{train(folder / 's.tc', tc.PassSet.open(folder / 'many'), host_bytes, visits)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
