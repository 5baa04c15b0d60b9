"""p.loader on several ranks: each gets its part of every batch, and all end as one process."""

from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import tiercache as tc
from tests.dist.loader_trainings import converted, run
from tests.dist.pool import RanksPool, RunFailedError
from tests.dist.trainings import assert_same_rows, stored
from tests.train.recorded import SAMPLES, Clicks

BODY = "tests.dist.loader_trainings:train"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with key sets, and a store that one process trained."""
    loader = DataLoader(Clicks(), batch_size=20, shuffle=True)
    tc.record_key_sets(
        converted(), loader, tmp_path / "keys", device_budget="6KiB", devices=2, progress=False,
        call=lambda model, batch: model(batch[0], batch[1]),
    )  # fmt: skip
    assert run(str(tmp_path / "keys"), str(tmp_path / "alone.tc")) == 2 * SAMPLES
    return tmp_path


def test_ranks_share_each_batch_and_end_as_one_process(ranks_pool: RanksPool, place: Path) -> None:
    """In two runs; the first one is committed inside a pass."""
    first = ranks_pool.run(2, BODY, folder=str(place), stop=9)
    rest = ranks_pool.run(2, BODY, folder=str(place))
    assert first == [90, 90]
    assert [a + b for a, b in zip(first, rest, strict=True)] == [SAMPLES, SAMPLES]
    assert_same_rows(stored(place, "ranks.tc"), stored(place, "alone.tc"), 1e-5)


def test_each_rank_draws_its_own_random_numbers(ranks_pool: RanksPool, place: Path) -> None:
    """Augmentations and negatives of the samples of a batch are as many as in one process, and always the same."""
    one, two = ranks_pool.run(2, "tests.dist.loader_trainings:noise", folder=str(place), store="noise.tc")
    assert len(one) == len(two) > 10
    assert len({*one, *two}) == 2 * len(one)
    again = ranks_pool.run(2, "tests.dist.loader_trainings:noise", folder=str(place), store="noise.tc")
    assert again == [one, two]


def test_a_batch_without_a_sample_for_each_rank_is_refused(ranks_pool: RanksPool, place: Path) -> None:
    """Before the first batch, on all ranks."""
    with pytest.raises(RunFailedError, match="a batch of 1 samples, which leaves some of 3 ranks without"):
        ranks_pool.run(3, BODY, folder=str(place), store="other.tc", batch_size=1)
