"""A training in a process with a memory limit of its initial memory plus the budgets: prints the passes trained."""

import resource
import sys
from pathlib import Path

import numpy as np
import torch

import tiercache as tc
from tests.train.cases import table

TABLES = (table("a", 8),)
DEVICE_BYTES = 1 << 20


def data_bytes() -> int:
    """Return the bytes that RLIMIT_DATA counts."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) << 10


def train(path: Path, dataset: tc.PassDataset, host_bytes: int, passes: int, order_seed: int | None) -> int:
    done, rows = 0, tc.EmbeddingCollection(dataset.schema)
    with tc.TierCache(
        path, dataset, model=rows, device_budget=DEVICE_BYTES, host_budget=host_bytes, order_seed=order_seed,
        progress=False,
    ) as cache:  # fmt: skip
        cache.register(rows=rows)
        for p in cache.passes(epochs=1 + passes // len(dataset.passes)):
            batch = p.batch({"a": torch.from_numpy(np.array(dataset.passes[p.sub_dataset].keys("a")[:64]))})
            rows(batch)["a"].square().sum().backward()
            cache.optimizer.step()
            done += 1
            if done == passes:
                break
    return done


def main(folder: Path, host_bytes: int, passes: int, order_seed: int | None) -> None:
    """Train the key sets in ``folder``, after a smaller sibling's have started threads and compiled kernels."""
    train(folder / "warm.tc", tc.PassDataset.open(folder / "few"), 64 << 20, 4, order_seed)
    limit = data_bytes() + DEVICE_BYTES + host_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    many = tc.PassDataset.open(folder / "many")
    sys.stdout.write(f"{train(folder / 's.tc', many, host_bytes, passes, order_seed)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else None)
