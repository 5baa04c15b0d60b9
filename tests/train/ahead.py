"""Shared code of the tests of batches that are made ahead."""

import threading
import time
from typing import Any

import tiercache as tc
from tests.train.cases import SPECS, Case, resident, table
from tests.train.devices import DEVICES
from tiercache.train.passes import Pass

CASE = Case(
    tables=(table("a", 8), table("b", 3, dtype="bfloat16")), specs=SPECS, num_samples=200, pass_rows=100, batch=16
)


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("tiercache-batches") and t.is_alive()]


def one_pass(passes: tc.PassDataset, device: str = "cpu") -> tuple[Any, Pass]:
    loop = resident(passes, device=DEVICES[device]()).passes(epochs=1)
    return loop, next(loop)


def wait_for(seen: Any) -> None:
    for _ in range(1000):
        if seen():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")
