"""After any kill of several ranks the store is at one commit of all, and training resumes to the same bits."""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.pool import Raised, RanksPool, RunFailedError
from tests.dist.resharding_killer import PHASES
from tests.dist.shards_killer import PHASES as PHASES_OF_SHARDS
from tests.dist.trainings import CASES, Rows, assert_same_rows, on_ranks, stored, train_and_stop
from tiercache.store import Cursor, Store, StoreMissingError, verify

ROOT = Path(__file__).parents[2]


def killed(killer: str, folder: Path, **options: object) -> dict[str, Any]:
    """Run a killer in a separate process, which forks and so must have no thread; return its figures."""
    given = [str(word) for name, value in options.items() if value is not None for word in (f"--{name}", value)]
    done = subprocess.run(
        [sys.executable, "-m", f"tests.dist.{killer}_killer", "--folder", str(folder), *given], cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False, timeout=15_000,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["problems"] == []
    assert found["kills"] >= int(str(options.get("kills") or 0))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("engine", "kills"), [("lmdb", 16), ("lmdb", 60), ("zarr", 12), ("lmdb", 1000), ("zarr", 500)])
def test_parts_killed_at_any_point_stand_at_one_commit(tmp_path: Path, engine: str, kills: int) -> None:
    """One rank or all, before and after calls that touch the disk and at random instants, and again while resuming."""
    found = killed("shards", tmp_path, engine=engine, kills=kills)
    if kills >= 60:
        assert found["phases"].keys() == set(PHASES_OF_SHARDS)
        assert min(found["phases"].values()) >= 5
        assert min(found["ahead"], found["instants"]) >= 3, "too few stores had a part that was ahead"
        assert found["second_kills"] >= 10
        assert len(found["stood"]) >= 5, "some commits were never the one that was found"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("engine", "kills"), [("lmdb", 12), ("lmdb", 32), ("zarr", 16), ("lmdb", None), ("zarr", 900)])
def test_a_change_of_all_ranks_killed_at_any_point_is_made_or_not(
    tmp_path: Path, engine: str, kills: int | None
) -> None:
    """Rollbacks, forgotten rows, altered tables and compactions; killed again, it resumes."""
    found = killed("changes", tmp_path, engine=engine, kills=kills)
    assert kills or found["kills"] >= 0.9 * found["points"]
    assert len(found["stood"]) >= min(6, (kills or 12) // 3)
    assert found["second_kills"] >= min(2, (kills or 16) // 8)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kills", [8, 32, 600])
def test_ranks_killed_while_they_write_new_parts_end_with_the_same_bits(tmp_path: Path, kills: int) -> None:
    """One rank or all, at calls that touch the disk and at random instants, and again as they start over."""
    found = killed("resharding", tmp_path, kills=kills)
    if kills >= 32:  # with fewer, their distribution is random
        assert found["phases"].keys() == set(PHASES)
        assert min(*found["phases"].values(), found["instants"]) >= 1
        assert min(found["kills_of_all"], found["second_kills"], found["old_ranks_between"]) >= 1
        assert min(found["stood_in_old_shards"], found["stood_in_new_shards"]) >= 4


@pytest.mark.long
@pytest.mark.parametrize(("kills", "taken_up"), [(6, False), (3, True), (60, False), (60, True)])
def test_ranks_killed_in_the_midst_of_a_training_go_on_to_the_same_bits(
    tmp_path: Path, kills: int, taken_up: bool
) -> None:
    """One rank or all, at random moments, on 2 and on 3 ranks, up to four times; survivors report why they ended.

    taken_up: each training is the rest of one of 3 or of 2 ranks, whose rows are first divided among the new ranks.
    """
    generator, trainings, told_why, behind_a_commit = random.Random(kills), 0, 0, 0
    with RanksPool(tmp_path, most=3) as pool:
        begun = {size: tmp_path / f"begun-{size}" for size in (2, 3)}
        for size, folder in begun.items():
            CASES["bags"].cut(folder / "passes")
            if taken_up:
                pool.start()
                on_ranks(pool, 5 - size, folder, "bags", train_and_stop, passes=2, batches=1, within=True)
        expected = {
            size: whole_training(pool, size, shutil.copytree(folder, tmp_path / f"whole-{size}"))
            for size, folder in begun.items()
        }
        while kills > 0:
            size, folder, at = 2 + trainings % 2, tmp_path / str(trainings), Cursor(0)
            trainings += 1
            shutil.copytree(begun[size], folder)
            dense, rows, seconds = expected[size]
            for _ in range(1 + generator.randrange(4)):
                # late, after a commit: machines vary in speed; or early, while rows are divided
                moment = seconds * (min if taken_up else max)(generator.random(), generator.random())
                victims = [*range(size)] if generator.random() < 0.3 else [generator.randrange(size)]
                errors = killed_at(pool, size, folder, moment, victims)
                if not any(errors):
                    break
                kills -= 1
                told_why += any(error is not None and error.kind == "RankError" for error in errors)
                with suppress(StoreMissingError), Store.open(folder / "model.tc", mode="r") as store:
                    found = store.commit.cursor if store.commit else Cursor(0)
                    assert found >= at, "a commit is lost"
                    at = found
                    assert verify(folder / "model.tc")["problems"] == []
                behind_a_commit += at > Cursor(0)
            ended = on_ranks(pool, size, folder, "bags")
            assert_same_rows(stored(folder), rows)
            for name, value in dense.items():
                np.testing.assert_array_equal(ended[0][name], value, err_msg=name)
            names = {entry.name for entry in (folder / "model.tc").glob("rank-*")}
            assert names == {f"rank-{rank}" for rank in range(1, size)}
    assert behind_a_commit
    assert told_why or taken_up


def whole_training(pool: RanksPool, size: int, folder: Path) -> tuple[dict[str, Any], Rows, float]:
    """Train without a kill; return the dense part, the rows and the seconds."""
    pool.start()
    begun = time.monotonic()
    found = on_ranks(pool, size, folder, "bags")
    return found[0], stored(folder), time.monotonic() - begun


def killed_at(pool: RanksPool, size: int, folder: Path, moment: float, victims: list[int]) -> list[Raised | None]:
    """Train and kill some ranks after some seconds; return the error of each rank, none if all ended before."""
    pool.start()
    timer = threading.Timer(moment, pool.kill, victims)
    timer.start()
    try:
        on_ranks(pool, size, folder, "bags")
    except RunFailedError as failed:
        for error in failed.errors:  # the dense part's errors are torch's
            assert error is None or error.kind in {"Dead", "RankError"} or "gloo" in error.text.lower(), error.text
        return failed.errors
    finally:
        timer.cancel()
        timer.join()
    pool.kill()
    return []
