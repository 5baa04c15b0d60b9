"""Trainings end with the committed bits, however their rows are moved, kept and sharded.

If a test fails after a change that is meant to change bits: ``python -m tests.digests --write``.
"""

import json
from pathlib import Path

import pytest

from tests.digests.trainings import GIVEN, MOVES, PATH, TRAININGS, digests, prepare, train
from tests.dist.pool import RanksPool

COMMITTED = json.loads(PATH.read_text())
ENGINES = ("lmdb", "zarr")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("given", TRAININGS)
def test_a_training_ends_with_the_committed_digests(tmp_path: Path, given: str, engine: str) -> None:
    prepare(tmp_path, given)

    dense, moved = train(tmp_path, given, engine)

    assert all(moved[name] > 0 for name in MOVES), moved
    assert digests(tmp_path, dense) == COMMITTED[given]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("given", GIVEN)
def test_any_number_of_ranks_has_them(
    ranks_pool: RanksPool, tmp_path: Path, given: str, engine: str, size: int
) -> None:
    """For any sharding of tables: gradients that are exact in float32 have one sum, in any order."""
    prepare(tmp_path, given)

    told = ranks_pool.run(size, "tests.digests.trainings:train_rank", folder=str(tmp_path), given=given, engine=engine)

    moved = {name: sum(moves[name] for _, moves in told) for name in MOVES}
    assert all(moved.values()), moved
    for dense, _ in told:
        assert digests(tmp_path, dense) == COMMITTED[given]
