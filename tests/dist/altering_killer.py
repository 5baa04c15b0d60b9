"""Kills the process that changes a store of several ranks, at points at which it touches the disk.

    python -m tests.dist.altering_killer --folder DIR [--kills N] [--engine lmdb] [--seed N]

The store has three ranks and tables of every sharding. A process forgets rows, alters the tables, compacts, and does so
again. After each kill the store must be at one of these commits, not before one that was made, with the same rows,
tables, state and position as without a kill. Then another process takes the remaining steps. Ends with
status 1 otherwise.
"""

import hashlib
import json
import random
import shutil
import sys
from collections import Counter
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from tests.crash.child import Ended, Teller
from tests.crash.killer import Killer
from tests.crash.outcome import FAILING, EnoughError, Found
from tests.crash.points import unwatch
from tests.crash.schedule import At, Death
from tests.dist.meeting import Processes
from tests.dist.rollback_killer import leftovers
from tests.dist.sharded_world import TABLES, train_shards
from tests.dist.shards_killer import options_of, run
from tiercache.store import Adam, Store, Table, alter, forget
from tiercache.store.verification import verify_store

RANKS, COMMITS, RETENTION = 3, 4, 2
TABLES_AFTER = [
    *(replace(table, dim=table.dim + 2) for table in TABLES[:2]), replace(TABLES[3], optimizer=Adam()),
    Table(name="new", dim=2),
]  # fmt: skip
STEPS = (
    lambda store: forget(store, "word", np.arange(0, 60, 3)),
    lambda store: alter(store, TABLES[:2] + TABLES[3:]),
    lambda store: alter(store, TABLES_AFTER),
    lambda store: store.compact(),
    lambda store: forget(store, "item", np.arange(0, 60, 4)),
    lambda store: store.compact(),
)
"""Each makes one commit, beginning after ``COMMITS``."""


def take_steps(path: Path, teller: Teller) -> None:
    """Take the remaining steps in order."""
    with Store.open(path) as store:
        for number in range(store.commit.id + 1 - COMMITS, len(STEPS)):
            teller.note(begun=COMMITS + number)
            STEPS[number](store)
            teller.note(done=COMMITS + number)


def digest_of(store: Store) -> str:
    """Return the SHA-256 of all reads of a store at its commit."""
    found = hashlib.sha256(json.dumps([table.to_record() for table in store.tables]).encode())
    for table in store.tables:
        for keys, fields in store.scan(table.name):
            for array in (keys, *fields):
                found.update(np.ascontiguousarray(array).tobytes())
    assert store.commit is not None
    return hashlib.sha256(found.digest() + store.state() + str(store.commit.cursor).encode()).hexdigest()


class Altering:
    """One process changes a store, and another one continues."""

    points = 1

    def __init__(self, base: Path, engine: str) -> None:
        """Make the store in ``base``, and note its content at each commit without a kill."""
        self._base, self._kills = base, 0
        base.parent.mkdir(parents=True)
        shutil.rmtree(base, ignore_errors=True)

        def make(_: Processes, teller: Teller) -> None:
            assert train_shards(base, RANKS, COMMITS, engine=engine, retention=RETENTION) == [None] * RANKS
            shutil.copytree(base, base.with_name("whole"))
            with Store.open(base.with_name("whole")) as store:
                for commit in store.commits:
                    with store.at(commit.id) as at:
                        teller.say("expected", [commit.id, digest_of(at)])
                for step in STEPS:
                    step(store)
                    teller.say("expected", [store.commit.id, digest_of(store)])

        self.expected = dict(run(1, make).of("expected"))
        assert list(self.expected) == list(range(COMMITS - RETENTION, COMMITS + len(STEPS)))

    def begin(self, folder: Path) -> None:
        """Put the store there."""
        self._kills += 1
        shutil.copytree(self._base, folder / "s")

    def run(self, folder: Path, death: Death | None) -> Ended:
        """Take the remaining steps."""
        path = folder / "s"

        def work(_: Processes, teller: Teller) -> None:
            if death is None:
                take_steps(path, teller)
                for sentence in leftovers(path):
                    teller.say("wrong", sentence)
                return
            with death.armed(folder, 0, teller):
                take_steps(path, teller)
            unwatch()

        return run(1, work)

    def again(self, generator: random.Random, runs: list[Ended]) -> At | None:
        """Kill every other process that continues, too."""
        if len(runs) > 1 or self._kills % 2 == 0:
            return None
        return At(generator.randrange(max(1, self.points // generator.choice([2, 8]))))

    def look(self, folder: Path, runs: list[Ended], *, last: bool) -> Found:
        """Check the newest commit and read all kept ones, in a separate process."""
        done = max((number for one in runs for number in one.of("done")), default=COMMITS - 1)
        ended = run(1, lambda _, teller: self._look(folder / "s", done, teller, last=last))
        wrong = [*runs[-1].of("wrong"), *ended.of("wrong"), *ended.of("error")]
        (stands,) = ended.of("stands") or [None]
        return Found(stands=stands, wrong=[(FAILING, sentence) for sentence in wrong])

    def _look(self, path: Path, done: int, teller: Teller, *, last: bool) -> None:
        with Store.open(path, mode="r") as store:
            stands = store.commit.id
            teller.say("stands", stands)
            if not done <= stands <= done + 1 or (last and stands != COMMITS + len(STEPS) - 1):
                teller.say("wrong", f"it is at commit {stands}, and {done} was made")
            for commit in store.commits:
                with store.at(commit.id) as at:
                    if digest_of(at) != self.expected.get(commit.id):
                        teller.say("wrong", f"commit {commit.id} has other rows, tables or state")
            with redirect_stdout(StringIO()):
                problems = verify_store(store)[0]["problems"]
            for problem in problems:
                teller.say("wrong", problem)


def main() -> int:
    """Kill at some of all possible points."""
    options = options_of("altering", kills=None)
    workload = Altering(options.folder / "base" / "s", options.engine)
    killer, figures = Killer(options.folder, workload, seed=options.seed), Counter[str]()
    with suppress(EnoughError):
        points: list[Any] = killer.points()
        workload.points = figures["points"] = len(points)
        wanted = len(points) if options.kills is None else min(len(points), options.kills)
        for i in range(wanted):
            killer.kill(At((2 * i + 1) * len(points) // (2 * wanted)))
    outcome = killer.outcome
    stood = {str(id_): count for id_, count in sorted(outcome.stood.items())}
    figures.update({name: outcome.counts[name] for name in ("kills", "second_kills")})
    print(json.dumps({**figures, "stood": stood, "problems": outcome.problems}, indent=1))  # noqa: T201
    return bool(outcome.problems)


if __name__ == "__main__":
    sys.exit(main())
