"""A flat loop on several ranks has the length of the global batches, and ends with the bits of a loop over passes."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiercache as tc
from tests.dist.pool import RanksPool
from tests.dist.test_fetch_ahead import opened
from tests.dist.trainings import assert_same_rows, dense_of, stored
from tests.train.test_fetch_ahead import CASE, STEPS, Training
from tiercache.dist.communicator import AnyCommunicator


def train(ranks: AnyCommunicator, folder: str, name: str, *, how: str, stop: int = STEPS) -> dict[str, Any]:
    """Train by a loop over passes, or in a flat one: to its end, by ``len`` batches, or up to a ``stop``."""
    with opened(folder, name) as trained:
        training = Training(trained)
        if how == "passes":
            training.run(0)
            return dense_of(training.net)
        loader = trained.batches(CASE.batch, epochs=2, shuffle=True)
        lengths, batches = [len(loader)], iter(loader)
        for batch in batches if how == "flat" else islice(batches, min(stop, lengths[0])):
            current = loader.current_pass
            assert current is not None
            training.step(current, batch.end, batch)
            if how == "stopped" and batch.end == current.num_samples and current.index == 7:
                current.stop()
        return dense_of(training.net) | {"lengths": [*lengths, len(loader)]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_end_with_the_bits_of_a_loop_over_passes(tmp_path: Path, ranks_pool: RanksPool, size: int) -> None:
    """All at once, by batches up to the length, and resumed after a stop inside a pass."""
    CASE.cut(tmp_path / "passes")
    expected = ranks_pool.run(size, train, folder=str(tmp_path), name="passes.tc", how="passes")[0]
    rows = stored(tmp_path, "passes.tc")
    runs = {"flat.tc": {"flat": 0}, "sized.tc": {"sized": 0}, "resumed.tc": {"left": 0, "stopped": 4, "sized": 28}}
    for name, trained_before in runs.items():
        for how, before in trained_before.items():
            stop = 10 if how == "left" else STEPS
            found = ranks_pool.run(size, train, folder=str(tmp_path), name=name, how=how, stop=stop)
            lengths = {tuple(one.pop("lengths")) for one in found}
            assert lengths == {(STEPS - before, 0 if how == "flat" else STEPS - before)}
        assert found[0].keys() == expected.keys()
        # after a restart, three ranks may add the gradients of dense parameters in another order; two cannot
        tolerance = 1e-6 if size > 2 and name == "resumed.tc" else 0.0
        for weight, value in expected.items():
            np.testing.assert_allclose(value, found[0][weight], rtol=0, atol=tolerance, err_msg=weight)
        assert_same_rows(stored(tmp_path, name), rows, tolerance)
        with tc.Store.open(tmp_path / name, mode="r") as store:
            assert store.commit is not None
            assert store.commit.cursor.pass_index == 8
