"""Kills the process that rolls a sharded store back, at every point at which it touches the disk.

    python -m tests.dist.rollback_killer --folder DIR [--kills N] [--engine lmdb] [--seed N]

The store has three shards and keeps three commits; for every other kill one shard is a commit ahead. After each kill it
must stand where it stood, or, as it must once the rollback has returned, where it was rolled back to, with the rows of
every commit that is kept; some rollbacks are made again and killed again. Then its ranks open it and train on. Ends
with status 1 otherwise.
"""

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
from tiercache.store.shards.shard_manifest import ShardManifest
from tiercache.store.verification import Verification

RANKS, COMMITS, RETENTION = 3, 6, 3
TO, NEW = COMMITS - 3, COMMITS
"""The oldest that is kept, which lacks keys that the next one has, and the one that the rollback makes."""
STOOD = {COMMITS - 1: Cursor(3, 5), NEW: Cursor(2), COMMITS + 1: Cursor(2)}
"""Where the store may stand by its newest commit; the last where the rollback was made twice."""


class Rollback:
    """A store is rolled back, opened by its ranks and trained on."""

    def __init__(self, base: Path, engine: str, *, ahead: bool) -> None:
        """Make the store of three shards in ``base``, one of them ahead where said."""
        self._base, self._kills = base, 0

        def make(_: Processes, __: Teller) -> None:
            assert train_shards(base, RANKS, COMMITS, engine=engine, retention=RETENTION) == [None] * RANKS
            if ahead:
                sharded_world.ahead(base, RANKS, 1)

        base.parent.mkdir(parents=True)
        run(1, make)

    def begin(self, folder: Path) -> None:
        """Put the store there."""
        self._kills += 1
        shutil.copytree(self._base, folder / "s")

    def run(self, folder: Path, death: Death | None) -> Ended:
        """Roll back, anew where that was done; then go on."""
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
        """Have every third rollback made and killed again, at a point that the first may have had."""
        if len(runs) > 1 or self._kills % 3 != 1:
            return None
        return At(generator.randrange(self.points // generator.choice([1, 4])))  # some early: it has fewer points

    points = 1
    """How many a rollback has."""

    def look(self, folder: Path, runs: list[Ended], *, last: bool) -> Found:
        """Look at the newest commit and read all that are kept, in a process of its own."""
        done = max((n for one in runs for n in one.of("done")), default=-1)
        ended = run(1, lambda _, teller: look(folder / "s", done, teller, last=last))
        wrong = [*runs[-1].of("wrong"), *ended.of("wrong"), *ended.of("error")]
        (stands,) = ended.of("stands") or [None]
        return Found(stands=stands, wrong=[(FAILING, sentence) for sentence in wrong])


def look(path: Path, done: int, teller: Teller, *, last: bool) -> None:
    """Tell where the store stands and what is wrong with it, as it was left or at the end."""
    manifest = ShardManifest.read(path)
    assert manifest is not None
    newest = manifest.commits[-1]
    if last and newest.cursor != Cursor(3, 5):
        teller.say("wrong", f"it went on to {newest.cursor}")
    if not last:
        teller.say("stands", newest.id)
        if STOOD.get(newest.id) != newest.cursor or newest.id < done:
            teller.say("wrong", f"it stands at commit {newest.id}, {newest.cursor}, and {done} was made")
    for problem in of_all_commits(path):
        teller.say("wrong", f"{'at the end' if last else 'as it was left'}, {problem}")


def go_on(path: Path) -> list[str]:
    """Have the ranks open what is there, roll back where that is to be done, and train on; return what is wrong."""
    manifest, found = ShardManifest.read(path), list[str]()
    assert manifest is not None
    if any(errors := train_shards(path, RANKS, 0)):
        return [f"opened, {errors}"]
    now = ShardManifest.read(path)
    if now is None or [(one.id, one.cursor) for one in now.commits] != [
        (one.id, one.cursor) for one in manifest.commits
    ]:
        found.append(f"opened, it has {now} and had {manifest}")
    found += [f"opened, {problem}" for problem in of_all_commits(path)]
    if manifest.commits[-1].id < NEW:
        roll_back(path, TO)

    def train(ranks: Any) -> list[list[int]]:
        shards, world = opened(path, ranks)
        with shards:
            for _ in range(2):
                take(shards, world)
            return [[commit.id for commit in shards.store.commits], list(shards.manifest.commits_of(ranks.rank))]

    for kept in meet(RANKS, train):
        if not isinstance(kept, list) or not set(kept[1]) < set(kept[0]) or len(kept[0]) != RETENTION + 1:
            found.append(f"a shard that went on has commits {kept}")
    return found


def of_all_commits(path: Path) -> list[str]:
    """Return what is wrong with any commit of a store, and what its verification says."""
    with Store.open(path, mode="r") as store:
        found = [f"commit {one.id}: {problem}" for one in store.commits for problem in problems(store.at(one.id))]
        folders = [shard.path for shard in store.shards]
    for rank, folder in enumerate(folders):
        # As ``verify`` does in a process for each shard, of which there would be hundreds.
        with Store.open(folder, mode="r") as whole, redirect_stdout(StringIO()):
            found += [f"shard {rank}: {problem}" for problem in Verification(whole).run()["problems"]]
    return found


def main() -> int:
    """Kill at as many points as was asked for, of all that there are."""
    options = options_of("rollback", kills=None)
    figures, wrong = Counter[str](), list[str]()
    for ahead in (False, True):
        folder = options.folder / f"ahead {ahead}"
        workload = Rollback(folder / "base" / "s", options.engine, ahead=ahead)
        killer = Killer(folder, workload, seed=options.seed)
        with suppress(EnoughError):
            points = killer.points()
            workload.points = len(points)
            wanted = len(points) if options.kills is None else min(len(points), options.kills // 2)
            for i in range(wanted):
                killer.kill(At((2 * i + 1) * len(points) // (2 * wanted)))
            figures["points"] += len(points)
        stood = killer.outcome.stood
        figures["stood before"] += stood[COMMITS - 1]
        figures["stood after"] += stood[NEW] + stood[COMMITS + 1]
        figures.update({name: killer.outcome.counts[name] for name in ("kills", "second_kills")})
        wrong += killer.outcome.problems
    print(json.dumps({**figures, "problems": wrong}, indent=1))  # noqa: T201
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
