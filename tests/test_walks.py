"""Walks stay short: a budget, a step, a key and a row enter few files and functions."""

import pytest

from tests.walks import Walk, walk_store, walk_training


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> tuple[Walk, Walk, Walk]:
    return walk_training(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Walk]:
    return walk_store(tmp_path_factory.mktemp("store"))


def test_the_device_budget_enters_at_most_12_files(training: tuple[Walk, Walk, Walk]) -> None:
    budget = training[0]
    assert "train/cache.py" in budget.files
    assert "rows/device.py" in budget.files
    assert len(budget.files) <= 12, budget


def test_a_step_enters_the_row_optimizer_once(training: tuple[Walk, Walk, Walk]) -> None:
    step = training[2]
    assert ("rows/backends/cpu.py", "CpuBackend.step") in step.functions
    assert len(step.entries("train/row_optimizer.py")) == 1, step.entries("train/row_optimizer.py")


@pytest.mark.parametrize(
    ("name", "most"), [("look one key up", 85), ("append one segment", 132)], ids=["one key", "one row"]
)
def test_a_key_and_a_row_enter_no_more_functions_of_the_store(store: dict[str, Walk], name: str, most: int) -> None:
    """Before format 5 a key entered 55 and a row 42; a map of keys, and descriptions read in place, came since."""
    assert 0 < len(store[name].functions) <= most, store[name]
