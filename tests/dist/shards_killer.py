"""Kills processes that each write a shard of one sharded store, and checks the store each time.

    python -m tests.dist.shards_killer --folder DIR [--kills N] [--engine lmdb] [--seed N]

A run makes the store, trains a few commits, closes and opens it, and trains on. One rank, or all, are killed just
before or after a call that touches the disk, or at a random instant; some are killed again as they resume.
Then the store must be at one cursor on all shards, the newest recorded or the one being made, with its rows, and
continue to the end, with no leftovers. Ends with status 1 otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import json
import socket
import sys
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.crash import child
from tests.crash.killer import Killer
from tests.crash.outcome import FAILING, EnoughError, Found
from tests.crash.points import Point, unwatch
from tests.crash.schedule import After, At, spread
from tests.dist.meeting import Processes, meet
from tests.dist.sharded_world import cursor_of, opened, problems, take
from tiercache.errors import RankError
from tiercache.store import Cursor, Store
from tiercache.store.opening import StoreDirectory, newest_record, open_folder

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

    from tests.crash.child import Ended, Teller
    from tests.crash.schedule import Death
    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.store.commit import CommitRecord

HALF, LAST = Cursor(2), Cursor(4)
"""The cursor at which the ranks close the store and open it again, and the last one."""
NONE = (-1, -1)
"""The position of a store without a commit."""
PHASES = ("open", "append", "prepare and publish")


def note(teller: Teller, *, begun: Cursor | None = None, done: Cursor | None = None) -> None:
    """Note a commit that may be found from now on, or must be."""
    teller.note(begun=begun, done=done)
    teller.phase = PHASES[1] if done is not None else PHASES[2]


def walk(path: Path, ranks: AnyCommunicator, teller: Teller, engine: str) -> None:
    """Make or open the store, and continue to the end, closing and opening it in the middle."""
    for until in (HALF, LAST):
        teller.phase = PHASES[0]
        shards, world = opened(path, ranks, engine=engine)
        with shards:
            teller.phase = PHASES[1]
            while (cursor := cursor_of(shards)) is None or cursor < until:
                take(shards, world, partial(note, teller))


def run(
    num_ranks: int,
    work: Callable[[Processes, Teller], None],
    *,
    kill_after: float | None = None,
    victim: int | None = None,
) -> Ended:
    """Fork a process for each rank, which meet by sockets; returns when all have ended, as ``child.run``."""
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


class Shards:
    """The walk of ``num_ranks`` ranks on one engine."""

    def __init__(self, num_ranks: int, engine: str) -> None:
        self.num_ranks, self.engine = num_ranks, engine

    def begin(self, folder: Path) -> None:
        """Leave the folder empty."""

    def run(self, folder: Path, death: Death | None) -> Ended:
        """Continue to the end on all ranks; without a kill, check the store as it is opened."""
        path = folder / "s"
        if death is None:
            return run(1, lambda _, teller: finish(path, self.num_ranks, self.engine, teller))

        def work(ranks: Processes, teller: Teller) -> None:
            teller.phase = PHASES[0]
            with death.armed(folder, ranks.rank, teller):
                walk(path, ranks, teller, self.engine)

        when = {"kill_after": death.seconds, "victim": death.victim} if isinstance(death, After) else {}
        return run(self.num_ranks, work, **when)

    def again(self, generator: random.Random, runs: list[Ended]) -> At | None:
        """Kill some resumed runs again, early, while they open the store or make their first commit."""
        if len(runs) > 1 or generator.random() < 0.5:
            return None
        at, victim = generator.randrange(generator.choice([120, 400])), generator.randrange(self.num_ranks)
        return At(at, rank=victim, everyone=generator.random() < 0.5)

    def look(self, folder: Path, runs: list[Ended], *, last: bool) -> Found:
        """Check the newest commit and read all rows, in a separate process."""
        begun, done = (
            max((tuple(c) for one in runs for c in one.of(what)), default=NONE) for what in ("begun", "done")
        )
        ended = run(1, lambda _, teller: look(folder / "s", begun, done, teller, last=last))
        wrong = [(FAILING, sentence) for one in (runs[-1], ended) for sentence in one.of("wrong")]
        if ended.killed or ended.failure:
            wrong.append((FAILING, ended.failure or "the look at it was killed"))
        (stands,) = ended.of("stands") or [NONE]
        return Found(stands=tuple(stands), wrong=wrong, counts=Counter(ahead=len(runs[-1].of("ahead"))))


def look(path: Path, begun: Any, done: Any, teller: Teller, *, last: bool) -> None:
    """Report the store's position and problems after a kill."""
    cursor = stands(newest_record(path))
    teller.say("stands", cursor)
    if cursor < done:
        teller.say("wrong", f"it is at {cursor} and {done} was published")
    if cursor > begun:
        teller.say("wrong", f"it is at {cursor} and only {begun} was begun")
    if last and cursor != LAST:
        teller.say("wrong", f"it ended at {cursor}")
    if cursor != NONE:
        with Store.open(path, mode="r") as store:
            for problem in problems(store):
                teller.say("wrong", f"{'at the end' if last else 'as it was left'}, {problem}")


def stands(record: CommitRecord | None) -> tuple[int, ...]:
    return NONE if record is None else tuple(record.cursor)


def finish(path: Path, num_ranks: int, engine: str, teller: Teller) -> None:
    """Open it for writing on all ranks, report problems, and continue to the end."""
    record = newest_record(path)
    cursor = stands(record)
    if (path / "rank-1").is_dir() and record is not None and _is_ahead(path, record):
        teller.say("ahead", 1)

    def open_all(ranks: AnyCommunicator) -> tuple[int, ...]:
        shards, _ = opened(path, ranks, engine=engine)
        with shards:
            commit = shards.store.commit
            return NONE if commit is None else tuple(commit.cursor)

    stand = meet(num_ranks, open_all)
    if any(at != cursor for at in stand):
        teller.say("wrong", f"the shards are at {stand} and the newest commit at {cursor}")
    if record is not None and vars(newest_record(path)) != vars(record):
        teller.say("wrong", "opening it has made another commit")
    wanted = {f"rank-{rank}" for rank in range(1, num_ranks)}
    if (names := {entry.name for entry in path.glob("rank-*")}) != wanted:
        teller.say("wrong", f"opened, it has {sorted(names ^ wanted)} too many or too few")
    if cursor != NONE:
        with Store.open(path, mode="r") as store:
            for problem in problems(store):
                teller.say("wrong", f"opened, {problem}")
    for error in meet(num_ranks, lambda ranks: walk(path, ranks, teller, engine)):
        if error:
            teller.say("wrong", f"while continuing, {error!r}")


def _is_ahead(path: Path, record: CommitRecord) -> bool:
    """Return True if rank 1 has prepared a commit that the newest one does not name."""
    opened = open_folder(path / "rank-1", record.tables, engine_of(path), "r", None, create=False)
    try:
        head = opened.engine.newest()
        return head is not None and head != record.ranks[1]
    finally:
        opened.close()


def engine_of(path: Path) -> str:
    return str(StoreDirectory(path).marker()["engine"])


def by_turns(points: list[list[Any]], generator: random.Random) -> Iterator[int]:
    """Yield the places of points [rank, phase, call, after], cycling through phases and kinds of calls."""
    orders = []
    for phase in PHASES:
        mine = [i for i, point in enumerate(points) if point[1] == phase]
        kinds = [(points[i][0] > 0, *points[i][2:]) for i in mine]
        orders.append([mine[place] for place in spread(kinds, len(kinds), generator)])
    for turn in zip_longest(*orders):
        yield from (i for i in turn if i is not None)


def kill_all(killer: Killer, kills: int, engine: str, phases: Counter[str]) -> None:
    counts, generator = killer.outcome.counts, killer.random
    for num_ranks in (2, 3):
        killer.workload = Shards(num_ranks, engine)
        points = killer.points()
        share = kills * (0.4 if num_ranks == 2 else 0.85)
        for i in by_turns(points, generator):
            if counts["kills"] >= share:
                break
            rank, phase, call, after = points[i]
            phases[phase] += 1
            number = sum(point[0] == rank for point in points[:i])
            killer.kill(At(number, Point(call, after), rank=rank, everyone=generator.random() < 0.4))
    while counts["kills"] < kills and counts["instants"] < kills:
        share = generator.random()
        killer.kill(After(share, share * killer.run_seconds, generator.choice([None, 0, 1, 2])))


def options_of(killer: str, *, kills: int | None, modules: Sequence[str] = ()) -> argparse.Namespace:
    """Return the options of a killer, and import its needs once instead of in every child."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.dist.{killer}_killer")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--engine", default="lmdb")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for module in (f"tiercache.store.engines.{options.engine}_engine", "numpy.ma", *modules):
        importlib.import_module(module)
    return options


def main() -> int:
    """Kill ``--kills`` times."""
    options = options_of("shards", kills=60)
    killer, phases = Killer(options.folder, Shards(2, options.engine), seed=options.seed), Counter[str]()
    with suppress(EnoughError):
        kill_all(killer, options.kills, options.engine, phases)
    outcome = killer.outcome
    stood = sorted(outcome.stood)
    figures = {**outcome.counts, "phases": phases, "stood": stood, "problems": outcome.problems}
    print(json.dumps(figures, indent=1))  # noqa: T201
    return bool(outcome.problems)


if __name__ == "__main__":
    sys.exit(main())
