"""The child processes of `benchmarks.scale`: trainings of a store, or in memory, and lookups next to them."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.machine import digest, drop_cache, middle, python

TURN = 9
"""Passes of a turn with lookups, or without."""
LOOKED_UP = 100
"""Keys of each lookup."""


def train(work: dict[str, Any]) -> dict[str, Any]:
    """Train under a limit, and return the measurements; the process kills itself if requested.

    work: `dataset`, `batch`, `width`, `epochs`; `store` and `plan`, or neither for training in memory; `limit`, bytes
    of RLIMIT_DATA; `die_in_pass`, in the middle of which it kills itself; `lookups`: in every other turn of passes of
    the last epoch a process that this one starts opens the store once a second and looks up keys in it.
    """
    limit = work.get("limit")
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # counts what is loaded already, too
    import torch  # not by the process that looks up keys

    import tiercache as tc
    from benchmarks.disk_case import trainer_of

    torch.set_num_threads(1)
    store, dataset = work.get("store"), tc.PassDataset.open(work["dataset"])
    cache: Any = (
        tc.InMemoryCache(dataset)
        if store is None
        else tc.TierCache(store, dataset, plan=work["plan"], device="cpu", progress=False)
    )

    asker = Asker(work) if work.get("lookups") else None
    step = trainer_of(cache, work["width"])
    begun: dict[int, float] = {}
    samples: dict[int, int] = {}
    with ThreadPoolExecutor(1) as dropper:
        for p in cache.passes(epochs=work["epochs"]):
            begun.setdefault(p.epoch, time.perf_counter())
            if asker is not None:
                asker.turn(p.epoch == work["epochs"] - 1 and p.index // TURN % 2 == 1)
            for batch in p.batches(work["batch"], shuffle=True):
                step(batch)
                samples[p.epoch] = samples.get(p.epoch, 0) + len(batch)
                if p.index == work.get("die_in_pass") and p.samples_done >= p.num_samples // 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            if store is not None:  # file pages are outside the memory limit
                for folder in (store, work["dataset"]):
                    dropper.submit(drop_cache, Path(folder))
        ended = time.perf_counter()
    last = max(begun)
    found = {
        "samples_per_second": samples[last] / (ended - begun[last]),
        "dense_digest": digest(tensor.numpy() for tensor in step.net.state_dict().values()),
    }
    if store is not None:
        found |= {
            "reports": [report.record() for report in cache.reports],
            "host_bytes_peak": cache.host_bytes_peak,
            "device_bytes": cache.device_bytes,
        }
        cache.close()
    if asker is not None:
        found |= asker.end()
    return found


class Asker:
    """A process that looks up keys in a store during training, in turns."""

    def __init__(self, work: dict[str, Any]) -> None:
        command = python("benchmarks.scale_worker", work["store"], work["lookups"])
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.turn(False)

    def turn(self, asking: bool) -> None:
        """Start or pause lookups."""
        self._process.send_signal(signal.SIGCONT if asking else signal.SIGSTOP)

    def end(self) -> dict[str, float]:
        """End the process; return the number of lookups and their median seconds."""
        self.turn(True)
        self._process.terminate()
        seconds = [*map(float, self._process.communicate()[0].split())]
        return {"lookups": len(seconds), "lookup_seconds": middle(seconds or [0.0])}


def look_up(store: str, rows: int) -> None:
    """Open a store, look up keys below ``rows`` and close it, once a second; print the seconds of each round."""
    import numpy as np

    from tiercache.store import Store

    rng = np.random.default_rng(1)
    while True:
        begun = time.perf_counter()
        with Store.open(store, mode="r") as opened:
            keys = np.sort(rng.integers(0, rows, LOOKED_UP))
            opened.lookup(opened.tables[0].name, keys, missing="zeros")
        took = time.perf_counter() - begun
        print(took, flush=True)
        time.sleep(max(0.0, 1.0 - took))


if __name__ == "__main__":
    look_up(sys.argv[1], int(sys.argv[2]))
