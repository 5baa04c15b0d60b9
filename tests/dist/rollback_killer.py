"""Kills the process that rolls a store of several ranks back, at every point at which it touches the disk.

    python -m tests.dist.rollback_killer --folder DIR [--kills N] [--engine lmdb] [--seed N]

The store has three ranks and keeps three commits; for two kills of three one rank, or all, have prepared a commit that
was never published. After each kill the store must be unchanged or, once the rollback has returned, at the target, with
the rows of every kept commit; some rollbacks are repeated and killed again. Then its ranks open it, which drops all
uncommitted blobs, and train on. Ends with status 1 otherwise.
"""

import gc
import json
import random
import shutil
import sys
from collections import Counter
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from tests.crash.child import Ended, Teller
from tests.crash.killer import Killer
from tests.crash.outcome import FAILING, EnoughError, Found
from tests.crash.points import unwatch
from tests.crash.schedule import At, Death
from tests.dist import sharded_world
from tests.dist.meeting import Processes, meet
from tests.dist.sharded_world import opened, problems, roll_back, take, train_shards
from tests.dist.shards_killer import options_of, run
from tiercache.store import Cursor, Store
from tiercache.store.opening import newest_record
from tiercache.store.snapshot import Needed
from tiercache.store.verification import verify_store

RANKS, COMMITS, RETENTION = 3, 6, 3
TO, NEW = COMMITS - 3, COMMITS
"""The oldest kept commit, which lacks keys that the next one has, and the commit that the rollback makes."""
AHEAD: tuple[tuple[int, ...], ...] = ((), (1,), (0, 1, 2))
"""The ranks that have prepared a commit before the rollback."""
STOOD = {COMMITS - 1: Cursor(3, 5), NEW: Cursor(2), COMMITS + 1: Cursor(2)}
"""Allowed positions by newest commit; the last if the rollback was made twice."""


class Rollback:
    """A store is rolled back, opened by its ranks and trained on."""

    def __init__(self, base: Path, engine: str, *, ahead: tuple[int, ...]) -> None:
        """Make the store of three ranks in ``base``, with a commit that the ranks ``ahead`` have prepared."""
        self._base, self._kills = base, 0

        def make(_: Processes, __: Teller) -> None:
            assert train_shards(base, RANKS, COMMITS, engine=engine, retention=RETENTION) == [None] * RANKS
            if ahead:
                sharded_world.ahead(base, RANKS, *ahead)

        base.parent.mkdir(parents=True)
        run(1, make)

    def begin(self, folder: Path) -> None:
        """Copy the store."""
        self._kills += 1
        shutil.copytree(self._base, folder / "s")

    def run(self, folder: Path, death: Death | None) -> Ended:
        """Roll back, or repeat that; then continue."""
        path = folder / "s"

        def work(_: Processes, teller: Teller) -> None:
            if death is not None:
                with death.armed(folder, 0, teller):
                    roll_back(path, TO)
                unwatch()
                teller.note(begun=NEW, done=NEW)
            for sentence in go_on(path):
                teller.say("wrong", sentence)

        return run(1, work)

    def again(self, generator: random.Random, runs: list[Ended]) -> At | None:
        """Repeat and kill every other rollback, at a point that the first may have had."""
        if len(runs) > 1 or self._kills % 2 == 0:
            return None
        return At(generator.randrange(self.points // generator.choice([1, 4])))  # some early: it has fewer points

    points = 1
    """Number of points of a rollback."""

    def look(self, folder: Path, runs: list[Ended], *, last: bool) -> Found:
        """Check the newest commit and read all kept ones, in a separate process."""
        done = max((n for one in runs for n in one.of("done")), default=-1)
        ended = run(1, lambda _, teller: look(folder / "s", done, teller, last=last))
        wrong = [*runs[-1].of("wrong"), *ended.of("wrong"), *ended.of("error")]
        (stands,) = ended.of("stands") or [None]
        return Found(stands=stands, wrong=[(FAILING, sentence) for sentence in wrong])


def look(path: Path, done: int, teller: Teller, *, last: bool) -> None:
    """Report the store's position and problems, after a kill or at the end."""
    id_, cursor = newest(path)
    if last and cursor != Cursor(3, 5):
        teller.say("wrong", f"it continued to {cursor}")
    if not last:
        teller.say("stands", id_)
        if STOOD.get(id_) != cursor or id_ < done:
            teller.say("wrong", f"it is at commit {id_}, {cursor}, and {done} was made")
    for problem in of_all_commits(path):
        teller.say("wrong", f"{'at the end' if last else 'as it was left'}, {problem}")


def go_on(path: Path) -> list[str]:
    """Open the store on its ranks, roll back if needed, and train on; return the problems."""
    record, found = newest_record(path), list[str]()
    assert record is not None
    if any(errors := train_shards(path, RANKS, 0)):
        return [f"opened, {errors}"]
    now = newest_record(path)
    if now is None or now.to_bytes() != record.to_bytes():
        found.append(f"opened, it has {now} and had {record}")
    found += [f"opened, {problem}" for problem in [*of_all_commits(path), *leftovers(path)]]
    if record.id < NEW:
        roll_back(path, TO)

    def train(ranks: Any) -> list[int]:
        shards, world = opened(path, ranks)
        with shards:
            for _ in range(2):
                take(shards, world)
            return [commit.id for commit in shards.store.commits]

    kept = meet(RANKS, train)
    if any(ids != kept[0] for ids in kept) or not isinstance(kept[0], list) or len(kept[0]) != RETENTION:
        found.append(f"the ranks that continued have commits {kept}")
    return found + [f"at the end, {problem}" for problem in leftovers(path)]


def newest(path: Path) -> tuple[int, Cursor]:
    """Return the id and the cursor of the newest commit."""
    record = newest_record(path)
    assert record is not None
    return record.id, record.cursor


def of_all_commits(path: Path) -> list[str]:
    """Return the problems of all commits of a store, and of its verification."""
    found = []
    with Store.open(path, mode="r") as store:
        for one in store.commits:
            with store.at(one.id) as at:
                found += [f"commit {one.id}: {problem}" for problem in problems(at)]
    with Store.open(path, mode="r") as store, redirect_stdout(StringIO()):
        found += verify_store(store)[0]["problems"]  # ``verify`` starts a process each time: too slow for hundreds
    return found


def leftovers(path: Path) -> list[str]:
    """Return blobs of ranks, opened for writing, that no kept commit needs."""
    gc.collect()  # a verification has leases until then
    found = []
    with Store.open(path) as store:
        for i, rank in enumerate(store.ranks):
            needed = {need.name for need in Needed.of(rank.history.snapshots).blobs()}
            left = sorted(rank.reader.stored().keys() - needed)
            found += [f"rank {i} still has {left}"] if left else []
    return found


def main() -> int:
    """Kill at some of all possible points."""
    options = options_of("rollback", kills=None)
    figures, wrong = Counter[str](), list[str]()
    for ahead in AHEAD:
        folder = options.folder / f"ahead {len(ahead)}"
        workload = Rollback(folder / "base" / "s", options.engine, ahead=ahead)
        killer = Killer(folder, workload, seed=options.seed)
        with suppress(EnoughError):
            points = killer.points()
            workload.points = len(points)
            wanted = len(points) if options.kills is None else min(len(points), -(-options.kills // len(AHEAD)))
            for i in range(wanted):
                killer.kill(At((2 * i + 1) * len(points) // (2 * wanted)))
            figures["points"] += len(points)
        stood = killer.outcome.stood
        figures["found before"] += stood[COMMITS - 1]
        figures["found after"] += stood[NEW] + stood[COMMITS + 1]
        figures.update({name: killer.outcome.counts[name] for name in ("kills", "second_kills")})
        wrong += killer.outcome.problems
    print(json.dumps({**figures, "problems": wrong}, indent=1))  # noqa: T201
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
