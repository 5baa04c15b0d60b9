"""Kills processes that write a sharded store anew for other ranks, and looks at what is left each time.

    python -m tests.ranks.resharding_killer --folder DIR [--kills N] [--seed N]

Every rank opens the store as a training does, and so reads the old parts and writes a new one. One rank, or all, are
killed just before or after a call that touches the disk, or at a random instant; some are killed again as they begin
anew, or the old ranks open the store between. After each kill it must stand where it stood, in the old parts or in the
new ones, with their bits; at the end in the new ones, with the bits of a run without a kill and nothing beside them.
Ends with status 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.crash.points import Point, unwatch, watch
from tests.ranks.parts_killer import run
from tests.ranks.reshardings import let_through, one_case, sharded, ways
from tiercache.passes.dataset import PassDataset
from tiercache.ranks.opening import open_parts
from tiercache.ranks.record import Record
from tiercache.ranks.sharded_store import ShardedStore
from tiercache.ranks.shares import Share
from tiercache.store.verification import Verification

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.crash.child import Ended, Teller
    from tests.ranks.meeting import Processes
    from tiercache.ranks.sharded_store import ShardedStore as Sharded
    from tiercache.ranks.sharding_plan import ShardingPlan

PHASES = (
    "making new parts", "writing rows", "committing a part", "between commits and record", "writing the record",
    "deleting old parts", "reading or closing",
)  # fmt: skip
INSTANTS = 3
"""Kills at random instants beside one in each phase."""
CASE = one_case()
TRAINED = 2
"""Passes of the old parts: the first one trained, one with a commit of the ranks, and one that only some committed."""


@dataclass(frozen=True)
class Way:
    """From which ranks to which."""

    before: int
    after: int
    engine: str
    disks: bool = False
    """Whether new parts are on disks of their own."""

    def parts(self, path: Path) -> list[Path] | None:
        """Return where the new parts of the store at ``path`` are."""
        return [path.parent / f"disk {rank}" for rank in range(self.after)] if self.disks else None


WAYS = (Way(2, 3, "lmdb"), Way(3, 2, "zarr", disks=True), Way(1, 2, "zarr"), Way(2, 1, "lmdb", disks=True))


def opened(path: Path, ranks: Any, sharding: ShardingPlan, parts: Sequence[Path] | None) -> Any:
    """Open the sharded store as a training on these ranks does."""
    share = Share(PassDataset.open(path.parent / "passes"), sharding, ranks.rank)
    return open_parts(path, share, ranks, engine=None, parts=parts, reorganized=False, order_seed=None)


def contents(store: Sharded) -> dict[str, Any]:
    """Return what a sharded store has: where it stands, its rows and states; and the records of each part."""
    rows = []
    for table in store.tables:
        chunks = list(store.scan(table.name))  # in hash order, whichever part they are in
        arrays = [
            [keys for keys, _ in chunks],
            *([fields[i] for _, fields in chunks] for i in range(len(table.fields))),
        ]
        rows.append(_digest(b"".join(array.tobytes() for array in some) for some in arrays))
    parts = []
    for part in store.parts:
        assert part.commit is not None
        # segments have the checksums of all their keys and rows, which verification compares
        parts.append(_digest([part.commit.to_bytes(), *(segment.to_bytes() for segment in part.segments)]))
    states = [_digest([part.state()]) for part in store.parts]
    return {"cursor": list(store.cursor), "rows": rows, "states": states, "parts": parts}


def whole(path: Path) -> tuple[int, dict[str, Any], list[str]]:
    """Return generation and contents of a sharded store, and what is wrong with any of its parts."""
    with ShardedStore.open(path) as store, contextlib.redirect_stdout(io.StringIO()):
        problems = [problem for part in store.parts for problem in Verification(part).run()["problems"]]
        return store.record.generation, contents(store), problems


def _digest(data: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for some in data:
        found.update(b"%d " % len(some) + some)
    return found.hexdigest()


class Killer:
    """One way after another, one store after another."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.count: Counter[str] = Counter()
        self.phases: Counter[str] = Counter()
        self.problems: list[str] = []

    def prepare(self, way: Way) -> None:
        """Train the old parts of a way, and write them anew without a kill: what the ends of all others must be."""
        self.way, self.template = way, self.folder / f"{way.before}-{way.after}" / "s"
        self.template.parent.mkdir()

        def first(ranks: Processes, teller: Teller) -> None:
            CASE.cut(self.template.parent / "passes")
            sharded(
                self.template, CASE, PassDataset.open(self.template.parent / "passes"), (TRAINED - 1, 0), way.engine
            )

        def second(ranks: Processes, teller: Teller) -> None:
            sharding = ways(way.before, 0)
            share = Share(PassDataset.open(self.template.parent / "passes"), sharding, ranks.rank)
            with opened(self.template, ranks, sharding, None) as parts:
                let_through(parts.store, share, TRAINED)
                parts.publish((TRAINED, 0))
                if ranks.rank == 0:
                    let_through(parts.store, share, TRAINED + 1)
                ranks.all_gather_object(None)

        def third(ranks: Processes, teller: Teller) -> None:
            seen: Counter[str] = Counter()
            watch(lambda *_: seen.update([phase()]))
            self.walk(path, ranks)
            unwatch()
            teller.say("points", [ranks.rank, seen])
            if ranks.rank == 0:
                teller.say("whole", whole(path))

        self._without(1, first)
        self._without(way.before, second)
        (self.old,) = self._without(1, lambda _, teller: teller.say("whole", whole(self.template))).of("whole")
        path = self._fresh()
        ended = self._without(way.after, third)
        (self.new,) = ended.of("whole")
        self.points = [(name, rank, n) for rank, seen in ended.of("points") for name, n in sorted(seen.items())]
        shutil.rmtree(path.parent)
        path, begun = self._fresh(), time.monotonic()  # once more, as fast as runs are whose points are not watched
        self._without(way.after, lambda ranks, _: self.walk(path, ranks))
        self.seconds = time.monotonic() - begun
        shutil.rmtree(path.parent)

    def walk(self, path: Path, ranks: Processes) -> None:
        """Be a rank that goes on with the store; returns when all have opened it."""
        self._open(path, ranks, ways(self.way.after, 1), self.way.parts(path))

    def kill_at(self, name: str, *, all_ranks: bool) -> None:
        """Kill one rank, or all when it is there, at a point of a phase."""
        _, rank, count = self.random.choice([one for one in self.points if one[0] == name])
        number = self.random.randrange(count)
        path, seen = self._fresh(), Counter[str]()

        def reached(_: int, point: Point) -> None:
            if phase() == name:
                seen[name] += 1
                if seen[name] == number + 1:
                    _kill(all_ranks=all_ranks)

        def work(ranks: Processes, teller: Teller) -> None:
            if ranks.rank == rank:
                watch(reached)
            self.walk(path, ranks)

        ended = run(self.way.after, work)
        while not ended.killed and number:  # as all ranks delete all files, another one may leave fewer for this one
            shutil.rmtree(path.parent)
            path, number = self._fresh(), number // 2
            ended = run(self.way.after, work)
        self.phases[name] += ended.killed > 0
        self._after(path, f"{'all' if all_ranks else 'one'} killed as rank {rank} was {name}, at point {number}", ended)

    def kill_after(self, share: float, victim: int | None) -> None:
        """Kill one rank or all after a share of the time of a run."""
        path = self._fresh()
        ended = run(
            self.way.after, lambda ranks, _: self.walk(path, ranks), kill_after=share * self.seconds, victim=victim
        )
        self.count["instants"] += ended.killed > 0
        self._after(path, f"a kill after {share:.0%} of a run", ended)

    def _after(self, path: Path, where: str, ended: Ended) -> None:
        """Look, have the old ranks open it between or kill some again, go on to the end and look again."""
        self._note(ended)
        where = f"from {self.way.before} to {self.way.after} ranks, {where}"
        (generation,) = self._look(path, where, ended) or [-1]
        turn = self.count["turns"] % 3
        if turn == 0 and generation == self.old[0]:
            self.count["old_ranks_between"] += 1
            where += ", opened by the old ranks"
            between = run(self.way.before, lambda ranks, _: self._open(path, ranks, ways(self.way.before, 0), None))
            self._check_names(path, where)
            self._look(path, where, between)
        elif turn == 1 and generation >= 0:
            due, victim = self.random.randrange(400), self.random.randrange(self.way.after)
            all_ranks = self.random.random() < 0.5
            where += f", and again at point {due} of rank {victim}"

            def work(ranks: Processes, teller: Teller) -> None:
                if ranks.rank == victim:
                    watch(lambda number, _: _kill(all_ranks=all_ranks) if number == due else None)
                self.walk(path, ranks)

            again = run(self.way.after, work)
            self._note(again)
            self.count["second_kills"] += again.killed > 0
            self._look(path, where, again)
        known = len(self.problems)
        self._look(path, f"{where}, at the end", run(self.way.after, lambda ranks, _: self.walk(path, ranks)), end=True)
        self._check_names(path, f"{where}, at the end")
        if len(self.problems) == known:
            shutil.rmtree(path.parent)

    def _look(self, path: Path, where: str, ended: Ended, *, end: bool = False) -> list[int]:
        """Compare what is there with the old parts or the new ones; returns the generation."""
        known = len(self.problems)
        looked = run(1, lambda _, teller: teller.say("whole", whole(path)))
        self.problems += [f"{where}: {error}" for error in ended.of("error") + looked.of("error")]
        for generation, found, problems in looked.of("whole"):
            self.problems += [f"{where}: {problem}" for problem in problems]
            stands = "old" if generation == self.old[0] else "new"
            self.count[f"stood_in_{stands}_parts"] += not end
            wanted = self.old[1] if stands == "old" else self.new[1]
            for name, value in wanted.items():
                if found[name] != value and not (stands == "old" and name == "parts"):  # they may have stepped back
                    self.problems.append(f"{where}: it stands in {stands} parts with other {name}: {found[name]}")
            if end and stands == "old":
                self.problems.append(f"{where}: it stands in the old parts")
        return [] if len(self.problems) > known else [generation for generation, *_ in looked.of("whole")]

    def _open(self, path: Path, ranks: Processes, sharding: ShardingPlan, parts: Sequence[Path] | None) -> None:
        opened(path, ranks, sharding, parts).close()
        ranks.all_gather_object(None)

    def _check_names(self, path: Path, where: str) -> None:
        """Note what is beside the parts of the record, in the store's folder and on the disks."""
        record = Record.read(path)
        assert record is not None
        places = {path / "record.json", path / "ranks.lock"}
        for rank in range(record.num_ranks):
            folder = record.folder(path, rank)
            places |= {folder, folder.with_name(folder.name + ".json")}
        there = {*path.iterdir(), *path.parent.glob("disk */*")} - {path / "record.json.tmp"}
        if there != places:
            names = sorted(str(place.relative_to(path.parent)) for place in there ^ places)
            self.problems.append(f"{where}: {names} are too many or too few")

    def _note(self, ended: Ended) -> None:
        self.count["kills"] += ended.killed > 0
        self.count["kills_of_all"] += ended.killed == self.way.after
        self.count["processes"] += ended.killed

    def _without(self, num_ranks: int, work: Callable[[Processes, Teller], None]) -> Ended:
        """Run without a kill."""
        ended = run(num_ranks, work)
        if ended.of("error"):
            raise RuntimeError(ended.of("error")[0])
        return ended

    def _fresh(self) -> Path:
        folder = self.folder / f"store-{self.count['stores']}"
        self.count["stores"] += 1
        shutil.copytree(self.template.parent, folder)
        return folder / "s"


def phase() -> str:
    """Return what the thread is doing, from the functions that it is in."""
    names, frame = set(), sys._getframe(1)
    while frame is not None:
        names.add(frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    if "Parts._delete" in names:
        return PHASES[5]
    if "Parts.publish" in names:
        return PHASES[4] if "Parts._write" in names else PHASES[3]
    if "copy_share" in names:
        return PHASES[2] if "Store.publish" in names else PHASES[1]
    return PHASES[0] if "Parts.begin_generation" in names else PHASES[6]


def _kill(*, all_ranks: bool) -> None:
    if all_ranks:
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Kill as often as was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.ranks.resharding_killer")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for module in (
        "tests.crash.warm",
        "tests.ranks.warm",
        "tiercache.store.lmdb_engine",
        "tiercache.store.zarr_engine",
    ):
        importlib.import_module(module)  # once, and not in every child
    killer, some = Killer(options.folder, options.seed), WAYS if options.kills >= 100 else WAYS[:2]
    for i, way in enumerate(some):
        killer.prepare(way)
        share = options.kills * (i + 1) / len(some)
        names = [name for name in PHASES if any(one[0] == name for one in killer.points)]
        while killer.count["kills"] < share:
            turn = killer.count["turns"] % (len(names) + INSTANTS)  # no multiple of the turns of what follows
            killer.count["turns"] += 1
            if turn < len(names):
                killer.kill_at(names[turn], all_ranks=killer.random.random() < 0.4)
            else:
                victim = killer.random.randrange(-1, way.after)
                killer.kill_after(killer.random.random(), None if victim < 0 else victim)
    figures = {**killer.count, "phases": killer.phases, "problems": killer.problems}
    print(json.dumps(figures, indent=1))  # noqa: T201
    return bool(killer.problems)


if __name__ == "__main__":
    sys.exit(main())
