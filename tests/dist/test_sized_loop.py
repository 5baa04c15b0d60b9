"""A flat loop on several ranks has the length of the global batches, and ends with the bits of a loop over passes."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import tiercache as tc
from tests.dist.pool import RanksPool
from tests.dist.test_fetch_ahead import opened
from tests.dist.trainings import assert_same_rows, dense_of, stored
from tests.train.test_fetch_ahead import CASE, STEPS, Training
from tiercache.dist.communicator import AnyCommunicator

TRAIN = f"{__name__}:train"


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


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_end_with_the_bits_of_a_loop_over_passes(tmp_path: Path, ranks_pool: RanksPool, size: int) -> None:
    """All at once, by as many batches as the length says, and resumed after a stop inside a pass."""
    CASE.cut(tmp_path / "passes")
    expected = ranks_pool.run(size, TRAIN, folder=str(tmp_path), name="passes.tc", how="passes")[0]
    rows = stored(tmp_path, "passes.tc")
    for name, hows in {"flat.tc": ["flat"], "sized.tc": ["sized"], "resumed.tc": ["left", "stopped", "sized"]}.items():
        for how in hows:
            stop = 6 if how == "left" else STEPS
            found = ranks_pool.run(size, TRAIN, folder=str(tmp_path), name=name, how=how, stop=stop)
            before = {"stopped": 4, "sized": 28 if len(hows) > 1 else 0}.get(how, 0)
            assert {tuple(one.pop("lengths")) for one in found} == {(STEPS - before, STEPS - before)} or how == "flat"
        ended = {name: value for name, value in found[0].items() if name != "lengths"}
        assert ended.keys() == expected.keys()
        for weight, value in expected.items():
            assert (value == ended[weight]).all(), weight
        assert_same_rows(stored(tmp_path, name), rows)
        with tc.Store.open(tmp_path / name, mode="r") as store:
            assert store.commit is not None
            assert store.commit.cursor.pass_index == 8
