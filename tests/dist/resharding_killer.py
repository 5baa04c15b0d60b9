"""Kills processes that divide a store among other ranks, and checks the store each time.

    python -m tests.dist.resharding_killer --folder DIR [--kills N] [--seed N]

Every rank opens the store as a training does, and so reads the old rows and writes new ones. One rank, or all, are
killed just before or after a call that touches the disk, or at a random instant; some are killed again as they start
over, or the old ranks open the store in between. After each kill it must be at the old or the new commit, with their
bits; at the end at the new one, with the bits of a run without a kill, and without other blobs or ranks' folders.
Ends with status 1 otherwise.
"""

import contextlib
import hashlib
import io
import itertools
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.crash.child import Ended, Teller
from tests.crash.killer import Killer
from tests.crash.outcome import FAILING, EnoughError, Found, Outcome
from tests.crash.points import unwatch, watch
from tests.crash.schedule import After, At, Death, die
from tests.dist.changes_killer import digest_of, leftovers
from tests.dist.meeting import Processes
from tests.dist.reshardings import let_through, one_case, sharded, ways
from tests.dist.shards_killer import options_of, run
from tiercache.data.dataset import PassDataset
from tiercache.dist.shard_view import ShardView
from tiercache.dist.training_store import open_own_shard
from tiercache.planning.budgets import Budgets
from tiercache.store import Store
from tiercache.store.opening import newest_record
from tiercache.store.sharding import ShardingPlan
from tiercache.store.verification import verify_store

PHASES = (
    "opening", "writing rows", "preparing the commit", "between prepare and publish", "publishing the commit",
    "freeing old rows", "deleting old ranks", "reading or closing",
)  # fmt: skip
INSTANTS = 3
"""Kills at random instants per phase, in addition to one at a call."""
CASE = one_case()
TRAINED = 2
"""Passes of the old ranks: one trained, one with a commit of all ranks; the last rank has prepared a third one."""


@dataclass(frozen=True)
class Way:
    """The numbers of ranks before and after."""

    before: int
    after: int
    engine: str
    disks: str = ""
    """The ranks above 0 on other disks: the "old" ones, the "new" ones."""

    def folders(self, path: Path, which: str) -> list[Path] | None:
        """Return the folders of the old or the new ranks of the store at ``path``."""
        size = self.before if which == "old" else self.after
        disks = path.parents[1] / "disks"
        return [path, *(disks / f"{which} {rank}" for rank in range(1, size))] if which in self.disks else None


WAYS = (
    Way(3, 2, "lmdb"), Way(1, 2, "lmdb", "new"), Way(2, 1, "zarr", "old"),
    Way(2, 3, "zarr"), Way(2, 2, "lmdb"), Way(1, 3, "zarr", "new"), Way(3, 1, "lmdb"), Way(2, 2, "zarr", "old new"),
    Way(2, 3, "lmdb", "old"), Way(3, 2, "zarr", "new"),
)  # fmt: skip


def opened(path: Path, ranks: Any, num_ranks: int, turn: int, folders: Sequence[Path] | None = None) -> Any:
    """Open the store as a training on these ranks does."""
    passes = PassDataset.open(path.parent / "passes")
    plan = ways(num_ranks, turn) if num_ranks > 1 else ShardingPlan.of_one(passes.tables)
    if num_ranks == 1 and ((record := newest_record(path)) is None or len(record.ranks) == 1):
        return Store.open(path, tables=passes.tables)
    return open_own_shard(
        path, ShardView(passes, plan, ranks.rank), ranks, engine=None, shard_dirs=folders, reorganized=False,
        order=None, budgets=Budgets(device_budget=1 << 30, host_budget=1 << 30),
    )  # fmt: skip


def whole(path: Path) -> tuple[int, list[str], list[str]]:
    """Return the newest commit of a store, the digests of its contents and of its ranks' states, and its problems."""
    with Store.open(path, mode="r") as store, contextlib.redirect_stdout(io.StringIO()):
        states = hashlib.sha256(b"".join(b"%d " % len(rank.state()) + rank.state() for rank in store.parts))
        report, _ = verify_store(store)
        return store.commit.id, [digest_of(store), states.hexdigest()], report["problems"]


@dataclass(frozen=True, slots=True)
class InPhase:
    """A kill at a point of a phase: of one rank, or of all."""

    phase: str
    rank: int
    number: int
    everyone: bool

    def __str__(self) -> str:
        return f"{'all' if self.everyone else 'one'} killed as rank {self.rank} was {self.phase}, at {self.number}"

    @contextlib.contextmanager
    def armed(self, folder: Path, rank: int, teller: Teller) -> Iterator[None]:
        seen: list[None] = []

        def reached(*_: object) -> None:
            if phase() == self.phase:
                seen.append(None)
                if len(seen) == self.number + 1:
                    die(everyone=self.everyone)

        if rank == self.rank:
            watch(reached)
        yield

    def count(self, ended: Ended, counts: Counter[str]) -> None:
        counts[self.phase] += ended.killed > 0


class Resharding:
    """New ranks open a store that other ranks trained, and rewrite its rows."""

    def __init__(self, way: Way, folder: Path) -> None:
        """Train the old ranks of a way, and divide their store without a kill, as the expected result.

        Commits name folders on other disks by their paths, so these stay where they are in every run.
        """
        self.way, self.template, self._turns = way, folder / "old" / "s", 0
        self._disks, self._old_disks = folder / "disks", folder / "old disks"
        self.template.parent.mkdir(parents=True)
        passes = self.template.parent / "passes"

        def first(ranks: Processes, teller: Teller) -> None:
            sharded(self.template, CASE, CASE.cut(passes), (TRAINED - 1, 0), way.engine)

        def second(ranks: Processes, teller: Teller) -> None:
            whole = PassDataset.open(passes)
            if way.before == 1:
                with Store.open(self.template) as store:
                    let_through(store, whole, TRAINED)
                return
            with opened(self.template, ranks, way.before, 0, way.folders(self.template, "old")) as shards:
                share = ShardView(whole, ways(way.before, 0), ranks.rank)
                let_through(shards.store, share, TRAINED, shards=shards)
                if ranks.rank == way.before - 1:
                    let_through(shards.store, share, TRAINED + 1)
                    assert shards.ahead
                ranks.all_gather_object(None)

        def third(ranks: Processes, teller: Teller) -> None:
            seen: Counter[str] = Counter()
            watch(lambda *_: seen.update([phase()]))
            self._walk(path, ranks)
            unwatch()
            teller.say("points", [ranks.rank, seen])
            if ranks.rank == 0:
                teller.say("whole", whole(path))

        _without_a_kill(1, first)
        _without_a_kill(way.before, second)
        (self.old,) = _without_a_kill(1, lambda _, teller: teller.say("whole", whole(self.template))).of("whole")
        if self._disks.exists():
            self._disks.rename(self._old_disks)
        self.begin(folder / "new")
        path = folder / "new" / "s"
        begun = time.monotonic()
        ended = _without_a_kill(way.after, third)
        self.seconds = time.monotonic() - begun
        (self.new,) = ended.of("whole")
        assert self.new[2] == []
        self.points = [(name, rank, n) for rank, seen in ended.of("points") for name, n in sorted(seen.items())]
        shutil.rmtree(folder / "new")

    def begin(self, folder: Path) -> None:
        self._turns += 1
        shutil.copytree(self.template.parent, folder, dirs_exist_ok=True)
        shutil.rmtree(self._disks, ignore_errors=True)
        if self._old_disks.exists():
            shutil.copytree(self._old_disks, self._disks)
            for home in self._disks.glob("*/*/home.json"):  # the template's
                home.unlink()

    def run(self, folder: Path, death: Death | None) -> Ended:
        """Open the store on all ranks, with the old ones first if it is their turn."""
        path, when = folder / "s", {}
        if isinstance(death, After):
            when = {"kill_after": death.seconds, "victim": death.victim}

        def work(ranks: Processes, teller: Teller) -> None:
            with contextlib.nullcontext() if death is None else death.armed(folder, ranks.rank, teller):
                self._walk(path, ranks)

        between: list[list[Any]] = []
        if death is None and self._turns % 3 == 0 and _stands(path) == self.old[0]:
            before = self.way.before
            opening = run(before, lambda ranks, _: _open(path, ranks, before, 0))
            between = [["old_ranks_between", 1], *opening.said, *([["wrong", one] for one in self._names(path)])]
            between += [["wrong", f"opened by the old ranks, {one}"] for one in self._compare(path)[1]]
        ended = run(self.way.after, work, **when)  # type: ignore[arg-type]
        while isinstance(death, InPhase) and not ended.killed and death.number:
            # all ranks delete all files, so another one may leave fewer for this one
            shutil.rmtree(folder)
            self.begin(folder)
            death = replace(death, number=death.number // 2)
            ended = run(self.way.after, work)
        ended.said = between + ended.said
        return ended

    def again(self, generator: random.Random, runs: list[Ended]) -> At | None:
        """Kill every third run that starts over once more."""
        if len(runs) > 1 or self._turns % 3 != 1:
            return None
        victim = generator.randrange(self.way.after)
        return At(generator.randrange(400), rank=victim, everyone=self.way.after > 1 and generator.random() < 0.5)

    def look(self, folder: Path, runs: list[Ended], *, last: bool) -> Found:
        """Compare the store with the expected ranks, old or new, and the folders and blobs at the end."""
        path, counts = folder / "s", Counter[str]()
        stands, wrong = self._compare(path, last=last)
        wrong += [sentence for kind, sentence in runs[-1].said if kind == "wrong"]
        if last:
            counts["old_ranks_between"] += len(runs[-1].of("old_ranks_between"))
            wrong += self._names(path)
            if stands == "old":
                wrong.append("it ended with the old ranks")
        else:
            counts[f"stood_in_{stands}_shards"] += 1
            counts["kills_of_all"] += runs[-1].killed == self.way.after
        return Found(wrong=[(FAILING, sentence) for sentence in wrong], counts=counts)

    def _compare(self, path: Path, *, last: bool = False) -> tuple[str, list[str]]:
        """Return which ranks the store has, and its differences from the expected one."""
        looked = run(1, lambda _, teller: teller.say("whole", whole(path)))
        if looked.of("error"):
            return "no", looked.of("error")
        ((id_, found, wrong),) = looked.of("whole")
        stands = "old" if id_ == self.old[0] else "new"
        if found != list((self.old if stands == "old" else self.new)[1]):
            wrong.append(f"it stands with {stands} ranks with other rows or states")
        if last:
            wrong += run(1, lambda _, teller: teller.say("left", leftovers(path))).of("left")[0]
        return stands, wrong

    def _walk(self, path: Path, ranks: Processes) -> None:
        """Be a rank that continues with the store; returns when all have opened it."""
        _open(path, ranks, self.way.after, 1, self.way.folders(path, "new"))

    def _names(self, path: Path) -> list[str]:
        """Return unexpected and missing folders of ranks, and notes of folders."""
        record = newest_record(path)
        assert record is not None
        there = {*path.glob("rank-*"), *path.glob("other-ranks.json*"), *self._disks.glob("*/*")}
        names = sorted(str(place) for place in there ^ {path / folder for folder in record.folders if folder != "."})
        return [f"{names} are too many or too few"] if names else []


def _open(path: Path, ranks: Processes, num_ranks: int, turn: int, folders: Sequence[Path] | None = None) -> None:
    opened(path, ranks, num_ranks, turn, folders).close()
    ranks.all_gather_object(None)


def _stands(path: Path) -> int:
    record = newest_record(path)
    assert record is not None
    return int(record.id)


def _without_a_kill(num_ranks: int, work: Callable[[Processes, Teller], None]) -> Ended:
    ended = run(num_ranks, work)
    if ended.of("error"):
        raise RuntimeError(ended.of("error")[0])
    return ended


def phase() -> str:
    """Return the thread's phase, from the functions on its stack."""
    names, frame = set(), sys._getframe(1)
    while frame is not None:
        names.add(frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    if "ShardWriter.publish" in names:
        if "RankFolder.delete" in names:
            return PHASES[6]
        return PHASES[5] if "RankWriter._finish" in names else PHASES[4]
    if "copy_shard" in names:
        return PHASES[2] if "Store.publish" in names else PHASES[1]
    if "ShardWriter.open" in names:
        return PHASES[0]
    return PHASES[3] if "reshard" in names and "Store.close" in names else PHASES[7]


def main() -> int:
    """Kill ``--kills`` times."""
    modules = ("tests.crash.warm", "tests.dist.warm", "tiercache.store.engines.zarr_engine")
    options = options_of("resharding", kills=20, modules=modules)
    outcome, some = Outcome(), WAYS if options.kills >= 100 else WAYS[:3]
    for i, way in enumerate(some):
        folder = options.folder / f"{way.before}-{way.after} {way.engine}"
        workload = Resharding(way, folder)
        killer = Killer(folder, workload, seed=options.seed)
        # the last ones first: if kills are not a multiple of the phases, more of them find new ranks
        names = [name for name in reversed(PHASES) if any(one[0] == name for one in workload.points)]
        share, turns = options.kills * (i + 1) / len(some), itertools.cycle(range(len(names) + INSTANTS))
        with contextlib.suppress(EnoughError):
            while outcome.counts["kills"] + killer.outcome.counts["kills"] < share:
                turn = next(turns)
                if turn < len(names):
                    points = [one for one in workload.points if one[0] == names[turn]]
                    name, rank, count = killer.random.choice(points)
                    number, everyone = killer.random.randrange(count), way.after > 1 and killer.random.random() < 0.4
                    killer.kill(InPhase(name, rank, number, everyone))
                else:
                    at, victim = killer.random.random(), killer.random.randrange(-1, way.after)
                    killer.kill(After(at, at * workload.seconds, None if victim < 0 else victim))
        outcome.add(killer.outcome)
    phases = {name: outcome.counts.pop(name) for name in PHASES if name in outcome.counts}
    print(json.dumps({**outcome.counts, "phases": phases, "problems": outcome.problems}, indent=1))  # noqa: T201
    return bool(outcome.problems)


if __name__ == "__main__":
    sys.exit(main())
