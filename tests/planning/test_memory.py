"""Planning many passes takes memory from the host budget, and the whole process stays within it."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tiercache as tc
from tests.files import files_of
from tests.planning.memory_child import DEVICE_BYTES, TABLES
from tiercache.dist.budget_checks import plans_of
from tiercache.errors import BudgetError
from tiercache.planning.budgets import _PAGE_RECORD_BYTES, _RANGE_BYTES, _RANGE_TABLE_BYTES, Budgets
from tiercache.store import MemoryEngine

PASSES, KEYS, UNIVERSE = 200, 70, 7000


@pytest.mark.sampled(1)
@pytest.mark.parametrize("order_seed", [None, 3])
def test_a_process_stays_within_the_smallest_budget_for_many_passes(tmp_path: Path, order_seed: int | None) -> None:
    """In addition to its memory before: an epoch and more. With a tenth less it is refused, and nothing is written."""
    rng = np.random.default_rng(0)
    for name, count in (("few", 3), ("many", PASSES)):
        tc.write_key_sets(
            tmp_path / name, TABLES, ({"a": rng.choice(UNIVERSE, KEYS, replace=False)} for _ in range(count))
        )
    before = files_of(tmp_path)
    smallest = refused(tmp_path, 1, order_seed)
    assert refused(tmp_path, 9 * smallest // 10, order_seed) == smallest
    assert files_of(tmp_path) == before
    with tc.Store.open(tmp_path / "given.tc", tables=TABLES) as store:
        before = files_of(tmp_path)
        assert refused(tmp_path, 9 * smallest // 10, order_seed, store=store) == smallest
        assert store.commit is None
        assert files_of(tmp_path) == before
    passes = str(PASSES + 20)
    options = [] if order_seed is None else [str(order_seed)]
    child = subprocess.run(
        [sys.executable, "-m", "tests.planning.memory_child", str(tmp_path), str(smallest), passes, *options],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    assert child.stdout.split()[-1] == passes


def test_planning_of_a_seeded_order_counts_the_ranges_of_two_epochs(tmp_path: Path) -> None:
    """Rows wait for passes of this epoch and of the next, in dumps of as many passes."""
    rng, count = np.random.default_rng(0), 200
    keys = ({"a": rng.integers(0, 1 << 19, 1500)} for _ in range(count))
    data = tc.write_key_sets(tmp_path / "d", TABLES, keys)
    with tc.Store.open(None, tables=TABLES, engine=MemoryEngine()) as store:
        plans, _ = plans_of(Budgets(device_budget=DEVICE_BYTES, host_budget=1 << 30), data, store, order=3)
        ranges = [sum(one.next_use_R.size for one in plan.dumps) for plan in plans.passes(3 * count)]
    held = max(sum(ranges[first : first + 2 * count]) for first in range(count))
    least = held * (_RANGE_BYTES + _RANGE_TABLE_BYTES + _PAGE_RECORD_BYTES)  # a range has a page at least
    assert least <= plans.host.planning


def refused(folder: Path, host_bytes: int, order_seed: int | None, store: tc.Store | None = None) -> int:
    """Return the budget that the error for a small one suggests."""
    with pytest.raises(BudgetError, match="for planning") as caught:
        tc.TierCache(
            store or folder / "s.tc", tc.PassDataset.open(folder / "many"), device_budget=DEVICE_BYTES,
            host_budget=host_bytes, order_seed=order_seed,
        )  # fmt: skip
    found = re.search(r"raise host_budget to (\d+) bytes", str(caught.value))
    assert found is not None
    return int(found[1])
