"""Kills the process that rolls a sharded store back, at every point at which it touches the disk.

    python -m tests.ranks.rollback_killer --folder DIR [--kills N] [--engine lmdb] [--seed N]

The store has three parts and keeps three commits; for every other kill one part is a commit ahead. After each kill it
must stand where it stood, or, as it must once the rollback has returned, where it was rolled back to, with the rows of
every commit that is kept; some rollbacks are made again and killed again. Then its ranks open it and train on. Ends
with status 1 otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.crash.points import Point, unwatch, watch
from tests.ranks import sharded_world
from tests.ranks.meeting import meet
from tests.ranks.parts_killer import run
from tests.ranks.sharded_world import opened, problems, take, train_parts
from tiercache.ranks.record import Record
from tiercache.ranks.rollback import rollback_sharded
from tiercache.ranks.sharded_store import ShardedStore
from tiercache.store import Cursor, Store
from tiercache.store.verification import Verification

if TYPE_CHECKING:
    from tests.crash.child import Teller
    from tests.ranks.meeting import Processes

RANKS, COMMITS, RETENTION = 3, 6, 3
TO, NEW = COMMITS - 3, COMMITS
"""The oldest that is kept, which lacks keys that the next one has, and the one that the rollback makes."""
STOOD = {COMMITS - 1: Cursor(3, 5), NEW: Cursor(2), COMMITS + 1: Cursor(2)}
"""Where the store may stand by its newest commit; the last where the rollback was made twice."""


def make(path: Path, engine: str, *, ahead: bool) -> None:
    """Make the store of three parts, one of them ahead where said."""
    assert train_parts(path, RANKS, COMMITS, engine=engine, retention=RETENTION) == [None] * RANKS
    if ahead:
        sharded_world.ahead(path, RANKS, 1)


def killed_at(number: int | None, path: Path) -> tuple[bool, bool, int]:
    """Roll back in a process that is killed at a point; whether it was, whether it had returned, and its points."""

    def work(_: Processes, teller: Teller) -> None:
        seen = 0

        def reached(at: int, _: Point) -> None:
            nonlocal seen
            seen = at + 1
            if at == number:
                os.kill(os.getpid(), signal.SIGKILL)

        watch(reached)
        rollback_sharded(path, TO)
        unwatch()
        teller.say("done", seen)

    ended = run(1, work)
    if ended.of("error"):
        raise RuntimeError(ended.of("error")[0])
    return ended.killed > 0, bool(ended.of("done")), sum(ended.of("done"))


def examine(path: Path, *, done: bool) -> list[str]:
    """Return what is wrong with what a kill left: before its ranks open it, then, and when they have trained on."""
    record = Record.read(path)
    assert record is not None
    newest = record.commits[-1]
    if STOOD.get(newest.id) != newest.cursor or (done and newest.id < NEW):
        return [f"it stands at commit {newest.id}, {newest.cursor}, after a rollback that had{' ' * done} returned"]
    found = [f"as it was left, {problem}" for problem in of_all_commits(path)]
    if any(errors := train_parts(path, RANKS, 0)):
        return [*found, f"opened, {errors}"]
    now = Record.read(path)
    if now is None or [(one.id, one.cursor) for one in now.commits] != [(one.id, one.cursor) for one in record.commits]:
        found.append(f"opened, it has {now} and had {record}")
    found += [f"opened, {problem}" for problem in of_all_commits(path)]
    if newest.id < NEW:
        rollback_sharded(path, TO)

    def go_on(ranks: Any) -> list[list[int]]:
        parts, world = opened(path, ranks)
        with parts:
            for _ in range(2):
                take(parts, world)
            return [[commit.id for commit in parts.store.commits], list(parts.record.of_part(ranks.rank))]

    for kept in meet(RANKS, go_on):
        if not isinstance(kept, list) or not set(kept[1]) < set(kept[0]) or len(kept[0]) != RETENTION + 1:
            found.append(f"a part that went on has commits {kept}")
    with ShardedStore.open(path) as store:
        if store.cursor != Cursor(3, 5):
            found.append(f"it went on to {store.cursor}")
    return found + [f"gone on, {problem}" for problem in of_all_commits(path)]


def of_all_commits(path: Path) -> list[str]:
    """Return what is wrong with any commit of a store, and what its verification says."""
    with ShardedStore.open(path) as store:
        found = [f"commit {one.id}: {problem}" for one in store.commits for problem in problems(store.at(one.id))]
        folders = [part.path for part in store.parts]
    for rank, folder in enumerate(folders):
        # As ``verify`` does in a process for each part, of which there would be hundreds.
        with Store.open(folder, mode="r") as whole, redirect_stdout(StringIO()):
            found += [f"part {rank}: {problem}" for problem in Verification(whole).run()["problems"]]
    return found


def main() -> int:
    """Kill at as many points as was asked for, of all that there are."""
    parser = argparse.ArgumentParser(prog="python -m tests.ranks.rollback_killer")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=None, help="Not given: one at each point.")
    parser.add_argument("--engine", default="lmdb")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for module in (f"tiercache.store.{options.engine}_engine", "numpy.ma"):  # once, and not in every child
        importlib.import_module(module)
    generator, wrong = random.Random(options.seed), list[str]()
    count: Counter[str] = Counter()
    for ahead in (False, True):
        base, path = options.folder / f"base {ahead}" / "s", options.folder / f"copy {ahead}" / "s"
        base.parent.mkdir()
        run(1, lambda _, __, base=base, ahead=ahead: make(base, options.engine, ahead=ahead))  # type: ignore[misc]
        shutil.copytree(base, path)
        points = killed_at(None, path)[2]
        count["points"] += points
        wanted = points if options.kills is None else min(points, options.kills // 2)
        for i in range(wanted):
            shutil.rmtree(path)
            shutil.copytree(base, path)
            number = (2 * i + 1) * points // (2 * wanted)
            killed, done, _ = killed_at(number, path)
            again = generator.randrange(points) if i % 3 == 1 else None
            if again is not None:
                second, returned, _ = killed_at(again, path)
                killed, done = killed or second, done or returned
                count["second kills"] += second
            count["kills"] += killed
            stood = Record.read(path)
            assert stood is not None
            count["stood before" if stood.commits[-1].id < NEW else "stood after"] += 1

            def work(_: Processes, teller: Teller, done: bool = done, path: Path = path) -> None:
                for sentence in examine(path, done=done):
                    teller.say("wrong", sentence)

            ended = run(1, work)
            where = f"killed at point {number} of {points}" + (f" and again at {again}" if again is not None else "")
            wrong += [f"{where}: {sentence}" for sentence in ended.of("wrong") + ended.of("error")]
    figures = {**count, "problems": wrong}
    print(json.dumps(figures, indent=1))  # noqa: T201
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
