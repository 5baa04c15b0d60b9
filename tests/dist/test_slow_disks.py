"""A rank whose disk is slower than the time-out of data is waited for."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.dist import trainings
from tests.dist.pool import RanksPool
from tests.dist.trainings import ONE, assert_same_rows, dense_of, model_of, open_sharded, stored
from tests.store.failing import HitchingEngine
from tests.train.cases import Case
from tiercache.dist import shard_writer
from tiercache.dist.communicator import AnyCommunicator, communicator_of
from tiercache.errors import RankError
from tiercache.store import rank_folder
from tiercache.store.opening import Opened

TIMEOUT, HITCH = 3.0, 5.0
"""Seconds."""
WIDE = Case(tables=ONE.tables, specs=ONE.specs, num_samples=512, num_keys=2000, pass_rows=128, batch=64)
"""More rows than the host holds: some are read at every switch."""


@contextmanager
def impatient(seconds: float = TIMEOUT) -> Iterator[pytest.MonkeyPatch]:
    """Give new process groups a short time-out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "default_pg_timeout", timedelta(seconds=seconds))
        yield patch


def trained(ranks: AnyCommunicator, folder: str, slow: str | None) -> dict[str, Any]:
    """Train, with a commit inside pass 3; on rank 1 a disk operation takes longer than the timeout in pass 2."""
    case, engines = WIDE, list[HitchingEngine]()

    def hitching(opening: Callable[..., Opened]) -> Callable[..., Opened]:
        def opened(*arguments: Any, **options: Any) -> Opened:
            found = opening(*arguments, **options)
            if found.lock is not None:  # it is open for writing
                found.engine = made = HitchingEngine(found.engine)
                engines.append(made)
            return found

        return opened

    with impatient(TIMEOUT if slow else 60.0) as patch:
        patch.setattr(shard_writer, "open_engine", hitching(shard_writer.open_engine))
        patch.setattr(rank_folder, "open_folder", hitching(rank_folder.open_folder))
        with open_sharded(case, folder, host_budget="212KiB") as cache:
            model, optimizer = model_of(cache, case)
            for p, number in trainings.trained(cache, case, (model, optimizer)):
                if slow and number == 0 and p.index == (3 if slow == "publish" else 2) and ranks.rank == 1:
                    cache.drain()
                    engines[-1].seconds[slow] = HITCH
                if p.index == 3 and number == 0:
                    cache.commit()
            return dense_of(model) | {"left": len(engines[-1].seconds), "read": sum(r.rows_read for r in cache.reports)}


def fails_late(_: AnyCommunicator) -> None:
    """Fail on rank 1 after working for longer than the timeout."""
    with impatient():
        ranks = communicator_of()
    with ranks.raise_on_all("reading rows"):
        if ranks.rank == 1:
            time.sleep(HITCH)
            raise OSError("the disk is gone")


@pytest.fixture(scope="module")
def in_time(ranks_pool: RanksPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of a training with fast disks, and the results of its ranks."""
    folder = tmp_path_factory.mktemp("fast")
    WIDE.cut(folder / "passes")
    return folder, ranks_pool.run(2, trained, folder=str(folder), slow=None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("slow", ["read", "put", "publish"])
def test_a_slow_disk_is_not_a_dead_rank(ranks_pool: RanksPool, tmp_path: Path, in_time: Any, slow: str) -> None:
    WIDE.cut(tmp_path / "passes")
    found = ranks_pool.run(2, trained, folder=str(tmp_path), slow=slow)

    for fast, late in zip(in_time[1], found, strict=True):
        assert fast["read"] == late["read"] > 0
        assert late["left"] == 0
        for one in fast.keys() - {"left", "read"}:
            np.testing.assert_array_equal(fast[one], late[one])
    assert_same_rows(stored(in_time[0]), stored(tmp_path))


def test_an_error_of_a_slow_disk_reaches_all(ranks_pool: RanksPool) -> None:
    assert ranks_pool.errors(2, fails_late) == [
        (RankError.__name__, "rank 1 failed while reading rows: OSError: the disk is gone"),
        ("OSError", "the disk is gone"),
    ]
