"""Kills the process that changes a store of several ranks, at points at which it touches the disk.

    python -m tests.dist.changes_killer --folder DIR [--kills N] [--engine lmdb] [--seed N]

The store has three ranks and tables of every sharding. A process rolls it back, forgets rows, alters the tables,
compacts, and does so again; two other stores, in which one rank or all have prepared a commit that was never published,
are rolled back. After each kill the store must be at one of these commits, not before one that was made, with the same
rows, tables, state and position as without a kill. Then its ranks open it, which changes nothing and leaves no blob
that no commit needs, and another process takes the remaining steps. Ends with status 1 otherwise.
"""

import gc
import hashlib
import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
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
from tests.dist import sharded_world
from tests.dist.meeting import Processes, meet
from tests.dist.sharded_world import TABLES, train_on
from tests.dist.shards_killer import options_of, run
from tiercache.dist.shard_writer import ShardWriter
from tiercache.store import Adam, Store, Table, alter, forget
from tiercache.store.opening import newest_record
from tiercache.store.snapshot import Needed
from tiercache.store.verification import verify_store

RANKS, COMMITS, RETENTION = 3, 6, 3
TABLES_AFTER = [
    *(replace(table, dim=table.dim + 2) for table in TABLES[:2]), replace(TABLES[3], optimizer=Adam()),
    Table(name="new", dim=2),
]  # fmt: skip
STEPS: Sequence[Callable[[Store], Any]] = (
    lambda store: store.rollback(COMMITS - RETENTION),  # lacks keys that the next one has
    lambda store: forget(store, "word", np.arange(0, 60, 3)),
    lambda store: alter(store, TABLES[:2] + TABLES[3:]),
    lambda store: alter(store, TABLES_AFTER),
    lambda store: store.compact(),
    lambda store: forget(store, "item", np.arange(0, 60, 4)),
    lambda store: store.compact(),
)
"""Each makes one commit, beginning after ``COMMITS``."""
STORES: tuple[tuple[tuple[int, ...], int], ...] = (((), len(STEPS)), ((1,), 1), ((0, 1, 2), 1))
"""The ranks that have prepared a commit, and the number of steps."""


def take_steps(path: Path, teller: Teller, steps: int) -> None:
    """Take the remaining steps in order."""
    with Store.open(path) as store:
        for number in range(store.commit.id + 1 - COMMITS, steps):
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


def opened_by_ranks(path: Path) -> list[Any]:
    """Open the store on its ranks; return the problems. An alteration waits for one that may rewrite the rows."""
    record = newest_record(path)
    assert record is not None
    if record.stored:
        return []
    found = meet(RANKS, lambda ranks: ShardWriter.open(path, record.tables, record.sharding, ranks).close())
    now = newest_record(path)
    return [*filter(None, found), *([] if now and now.to_bytes() == record.to_bytes() else [f"it had {record}"])]


def leftovers(path: Path) -> list[str]:
    """Return blobs of ranks, opened for writing, that no kept commit needs."""
    gc.collect()  # a verification has leases until then
    found = []
    with Store.open(path) as store:
        for i, rank in enumerate(store.parts):
            needed = {need.name for need in Needed.of(rank.history.snapshots).blobs()}
            left = sorted(rank.reader.stored().keys() - needed)
            found += [f"rank {i} still has {left}"] if left else []
    return found


class Changes:
    """One process changes a store, and another one continues."""

    points = 1

    def __init__(self, base: Path, engine: str, *, ahead: tuple[int, ...], steps: int) -> None:
        """Make the store in ``base``, and note its content at each commit without a kill."""
        self._base, self._steps, self._kills = base, steps, 0
        base.parent.mkdir(parents=True)

        def make(_: Processes, teller: Teller) -> None:
            train_on(base, RANKS, COMMITS, engine=engine, retention=RETENTION)
            shutil.copytree(base, base.with_name("whole"))
            if ahead:
                sharded_world.ahead(base, RANKS, *ahead)
            with Store.open(base.with_name("whole")) as store:
                for commit in store.commits:
                    with store.at(commit.id) as at:
                        teller.say("expected", [commit.id, digest_of(at)])
                for step in STEPS[:steps]:
                    step(store)
                    teller.say("expected", [store.commit.id, digest_of(store)])

        self.expected = dict(run(1, make).of("expected"))
        assert list(self.expected) == list(range(COMMITS - RETENTION, COMMITS + steps))

    def begin(self, folder: Path) -> None:
        """Put the store there."""
        self._kills += 1
        shutil.copytree(self._base, folder / "s")

    def run(self, folder: Path, death: Death | None) -> Ended:
        """Take the remaining steps; without a kill, after the ranks have opened what was left."""
        path = folder / "s"

        def work(_: Processes, teller: Teller) -> None:
            if death is not None:
                with death.armed(folder, 0, teller):
                    take_steps(path, teller, self._steps)
                unwatch()
                return
            for problem in [*opened_by_ranks(path), *leftovers(path)]:
                teller.say("wrong", f"opened, {problem}")
            take_steps(path, teller, self._steps)
            for problem in leftovers(path):
                teller.say("wrong", f"at the end, {problem}")

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
            if not done <= stands <= done + 1 or (last and stands != COMMITS + self._steps - 1):
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
    options = options_of("changes", kills=None)
    figures, stood, wrong = Counter[str](), Counter[str](), list[str]()
    for ahead, steps in STORES:
        folder = options.folder / f"ahead {len(ahead)}"
        workload = Changes(folder / "base" / "s", options.engine, ahead=ahead, steps=steps)
        killer = Killer(folder, workload, seed=options.seed)
        with suppress(EnoughError):
            workload.points = points = len(killer.points())
            figures["points"] += points
            share = points if options.kills is None else -(-options.kills * (1 if ahead else 2) // 4)
            for i in range(wanted := min(points, share)):
                killer.kill(At((2 * i + 1) * points // (2 * wanted)))
        stood.update({str(id_): count for id_, count in killer.outcome.stood.items()})
        figures.update({name: killer.outcome.counts[name] for name in ("kills", "second_kills")})
        wrong += killer.outcome.problems
    print(json.dumps({**figures, "stood": stood, "problems": wrong}, indent=1))  # noqa: T201
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
