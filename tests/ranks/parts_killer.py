"""Kills processes that each write a part of one sharded store, and looks at what is left each time.

    python -m tests.ranks.parts_killer --folder DIR [--kills N] [--engine lmdb] [--seed N] --json FILE

A run makes the store, trains a few commits, closes and opens it, divides it anew and trains on. One rank, or all, are
killed just before or after a call that touches the disk, or at a random instant; some are killed again as they go on.
Then the store must stand at one cursor on all parts, the newest recorded or the one being made, with its rows, and go
on to the end, with nothing left beside its parts. Ends with status 1 otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.crash import child
from tests.crash.points import Point, unwatch, watch
from tests.crash.schedule import spread
from tests.ranks.meeting import Processes, meet
from tests.ranks.sharded_world import divide_anew, opened, placement_on, problems, take
from tiercache.errors import RankError
from tiercache.ranks.record import Record
from tiercache.ranks.sharded_store import ShardedStore
from tiercache.store import Cursor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.crash.child import Ended, Teller
    from tiercache.ranks.meeting import Meeting

FIRST, LAST = Cursor(2), Cursor(4)
"""Where it is divided anew, and where it ends."""
PHASES = ("open", "append and commit", "record", "divide anew", "switch and delete")


def note(teller: Teller, *, begun: Cursor | None = None, done: Cursor | None = None, switching: bool = False) -> None:
    """Note a commit that may be found from now on, or that must be, or that new parts take the old ones' place."""
    teller.note(begun=begun, done=done)
    if switching:
        teller.phase = PHASES[4]
    if begun is not None:
        teller.phase = PHASES[2]
    if done is not None:
        teller.phase = PHASES[1]


def walk(path: Path, ranks: Meeting, teller: Teller, engine: str) -> None:
    """Make the store or take it up, and go on to the end; divided anew in the middle."""
    teller.phase = PHASES[0]
    record = Record.read(path)
    ranks.agree("reading the record")
    turn = 0 if record is None else turn_of(record)
    while True:
        teller.phase = PHASES[0]
        parts, world = opened(path, ranks, turn, engine=engine)
        with parts:
            teller.phase = PHASES[1]
            until = LAST if turn else FIRST
            while parts.cursor is None or parts.cursor < until:
                take(parts, world, partial(note, teller))
        if turn:
            return
        teller.phase = PHASES[3]
        divide_anew(path, ranks, placement_on(ranks.size, 1), partial(note, teller), engine=engine)
        turn = 1


def turn_of(record: Record) -> int:
    """Return which placement a record has."""
    return int(record.placement == placement_on(record.num_ranks, 1).to_record())


def run(
    num_ranks: int,
    work: Callable[[Processes, Teller], None],
    *,
    kill_after: float | None = None,
    victim: int | None = None,
) -> Ended:
    """Fork a process for each rank, which meet by sockets; returns when all have ended, as ``child.run`` says."""
    pairs = [socket.socketpair() for _ in range(num_ranks - 1)]

    def one(rank: int, teller: Teller) -> None:
        mine = [pair[0] for pair in pairs] if rank == 0 else [pairs[rank - 1][1]]
        for end in (end for pair in pairs for end in pair if end not in mine):
            end.close()
        with suppress(RankError):  # another one was killed
            work(Processes(rank, num_ranks, mine), teller)
        unwatch()

    ends = [end for pair in pairs for end in pair]
    return child.run(one, processes=num_ranks, sockets=ends, kill_after=kill_after, victim=victim)


class Killer:
    """One store after another."""

    def __init__(self, folder: Path, engine: str, seed: int) -> None:
        self.folder, self.engine, self.random = folder, engine, random.Random(seed)
        self.count: Counter[str] = Counter()
        self.problems: list[str] = []
        self.stood: set[tuple[int, int]] = set()
        self.seconds = 0.0

    def points(self, num_ranks: int) -> list[list[tuple[str, Point]]]:
        """Run without a kill; returns the points of each rank with their phases."""
        path, begun = self._fresh(), time.monotonic()

        def work(ranks: Processes, teller: Teller) -> None:
            seen: list[tuple[str, Point]] = []
            watch(lambda _, point: seen.append((teller.phase, point)))
            walk(path, ranks, teller, self.engine)
            unwatch()
            teller.say("points", [len(seen)])
            (path.parent / f"points-{ranks.rank}.json").write_text(json.dumps(seen))

        ended = run(num_ranks, work)
        self.seconds = time.monotonic() - begun
        if ended.of("error"):
            raise RuntimeError(ended.of("error")[0])
        found = []
        for rank in range(num_ranks):
            seen = json.loads((path.parent / f"points-{rank}.json").read_text())
            found.append([(phase, Point(*point)) for phase, point in seen])
        self._examine(path, num_ranks, "a run without a kill", [ended])
        return found

    def kill_at(self, num_ranks: int, rank: int, number: int, what: str, *, all_ranks: bool) -> None:
        """Kill one rank, or all when it is there, at its point."""
        path = self._fresh()
        where = f"{'all' if all_ranks else 'rank'} of {num_ranks} killed as rank {rank} was at point {number}: {what}"

        def reached(seen: int, _: Point) -> None:
            if seen == number:
                if all_ranks:
                    os.killpg(0, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)

        self._kill(path, num_ranks, rank, where, reached)

    def kill_after(self, num_ranks: int, share: float, victim: int | None) -> None:
        """Kill one rank or all after a share of the time of a run."""
        self.count["instants"] += 1
        path = self._fresh()
        ended = run(
            num_ranks,
            lambda ranks, teller: walk(path, ranks, teller, self.engine),
            kill_after=share * self.seconds,
            victim=victim,
        )
        self._again(path, num_ranks, f"a kill after {share:.0%} of a run", ended)

    def _kill(self, path: Path, num_ranks: int, rank: int, where: str, reached: Callable[[int, Point], None]) -> None:
        def work(ranks: Processes, teller: Teller) -> None:
            if ranks.rank == rank:
                watch(reached)
            walk(path, ranks, teller, self.engine)

        self._again(path, num_ranks, where, run(num_ranks, work))

    def _again(self, path: Path, num_ranks: int, where: str, ended: Ended) -> None:
        """Kill some that go on after a kill once more, early, while they open the store; then look."""
        self.count["kills"] += ended.killed > 0
        self.count["processes"] += ended.killed
        runs = [ended]
        if ended.killed and self.random.random() < 0.5:
            due, victim = self.random.randrange(120), self.random.randrange(num_ranks)
            all_ranks, later = self.random.random() < 0.5, self.random.random() < 0.5
            first: list[int] = []

            def work(ranks: Processes, teller: Teller) -> None:
                def reached(seen: int, _: Point) -> None:
                    if later and teller.phase != PHASES[2]:
                        return  # the first commit that it makes is the one to be interrupted
                    first.append(seen)
                    if seen == first[0] + due:
                        if all_ranks:
                            os.killpg(0, signal.SIGKILL)
                        os.kill(os.getpid(), signal.SIGKILL)

                if ranks.rank == victim:
                    watch(reached)
                walk(path, ranks, teller, self.engine)

            runs.append(run(num_ranks, work))
            where += f", and again at point {due}{' of a commit' if later else ''}"
            self.count["second_kills"] += runs[1].killed > 0
            self.count["kills"] += runs[1].killed > 0
            self.count["processes"] += runs[1].killed
        self._examine(path, num_ranks, where, runs)

    def _examine(self, path: Path, num_ranks: int, where: str, runs: list[Ended]) -> None:
        known = len(self.problems)
        cursors = {kind: [tuple(c) for one in runs for c in one.of(kind)] for kind in ("begun", "done")}
        begun, done = max(cursors["begun"], default=None), max(cursors["done"], default=None)

        def work(_: Processes, teller: Teller) -> None:
            for sentence in examine(path, num_ranks, self.engine, begun, done, teller):
                teller.say("wrong", sentence)

        ended = run(1, work)
        for sentence in [e for one in [*runs, ended] for e in one.of("error")] + ended.of("wrong"):
            self.problems.append(f"{where}: {sentence}")
        if ended.killed:
            self.problems.append(f"{where}: the examination was killed")
        self.stood |= {tuple(cursor) for cursor in ended.of("stands")}
        self.count["behind"] += len(ended.of("ahead"))
        if len(self.problems) == known:
            shutil.rmtree(path.parent)

    def _fresh(self) -> Path:
        folder = self.folder / str(self.count["stores"])
        folder.mkdir()
        self.count["stores"] += 1
        return folder / "s"


def examine(path: Path, num_ranks: int, engine: str, begun: Any, done: Any, teller: Teller) -> list[str]:
    """Return what is wrong with what kills left: before and after it is opened for writing, and at its end."""
    found: list[str] = []
    record = Record.read(path)
    cursor = None if record is None else record.cursor
    teller.say("stands", cursor or (-1, -1))
    if done is not None and (cursor is None or cursor < done):
        found.append(f"it stands at {cursor} and {done} was published")
    if cursor is not None and (begun is None or cursor > begun):
        found.append(f"it stands at {cursor} and only {begun} was begun")
    if cursor is not None:
        with ShardedStore.open(path) as store:
            found += [f"as it was left, {problem}" for problem in problems(store)]
    turn = 0 if record is None else turn_of(record)

    def open_all(ranks: Meeting) -> list[int]:
        parts, _ = opened(path, ranks, turn, engine=engine)
        with parts:
            commit = parts.store.commit
            return [-1, -1] if commit is None else list(commit.cursor)

    stand = meet(num_ranks, open_all)
    if any(at != list(cursor or (-1, -1)) for at in stand):
        found.append(f"the parts stand at {stand} and the record at {cursor}")
    now = Record.read(path)
    if now is None:
        return [*found, "there is no record once it was opened"]
    if record is not None and record.commits != now.commits:
        teller.say("ahead", 1)
    wanted = {"record.json", "ranks.lock", *now.parts, *(f"{part}.json" for part in now.parts)}
    if (names := {entry.name for entry in path.iterdir()} - {"record.json.tmp"}) != wanted:
        found.append(f"opened, it has {sorted(names ^ wanted)} too many or too few")
    if cursor is not None:
        with ShardedStore.open(path) as store:
            found += [f"opened, {problem}" for problem in problems(store)]
    found += [
        f"going on, {error!r}" for error in meet(num_ranks, lambda ranks: walk(path, ranks, teller, engine)) if error
    ]
    with ShardedStore.open(path) as store:
        found += [f"at the end, {problem}" for problem in problems(store)]
        if store.cursor != LAST:
            found.append(f"it ended at {store.cursor}")
    return found


def by_turns(points: list[tuple[int, int, str, Point]], generator: random.Random) -> Iterator[int]:
    """Yield the places of points (rank, number, phase, point), one of each phase by turns, of many kinds of calls."""
    orders = []
    for phase in PHASES:
        mine = [i for i, point in enumerate(points) if point[2] == phase]
        kinds = [Point(f"{points[i][0] > 0} {points[i][3].call}", points[i][3].after) for i in mine]
        orders.append([mine[place] for place in spread(kinds, len(kinds), generator)])
    for turn in zip_longest(*orders):
        yield from (i for i in turn if i is not None)


def main() -> int:
    """Kill as often as was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.ranks.parts_killer")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--engine", default="lmdb")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for module in (f"tiercache.store.{options.engine}_engine", "numpy.ma"):  # once, and not in every child
        importlib.import_module(module)
    killer = Killer(options.folder, options.engine, options.seed)
    phases: Counter[str] = Counter()
    for num_ranks in (2, 3):
        points = killer.points(num_ranks)
        flat = [(rank, number, *seen) for rank, mine in enumerate(points) for number, seen in enumerate(mine)]
        share = options.kills * (0.4 if num_ranks == 2 else 0.85)
        for i in by_turns(flat, killer.random):
            if killer.count["kills"] >= share:
                break
            rank, number, phase, point = flat[i]
            phases[phase] += 1
            what = f"{phase}, {'after' if point.after else 'before'} {point.call}"
            killer.kill_at(num_ranks, rank, number, what, all_ranks=killer.random.random() < 0.4)
    while killer.count["kills"] < options.kills and killer.count["instants"] < options.kills:
        killer.kill_after(3, killer.random.random(), killer.random.choice([None, 0, 1, 2]))
    figures = {**killer.count, "phases": phases, "stood": sorted(killer.stood), "problems": killer.problems}
    options.json.write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures, indent=1))  # noqa: T201
    return bool(killer.problems)


if __name__ == "__main__":
    sys.exit(main())
