"""Kills processes that write a sharded store anew for other ranks, and looks at what is left each time.

    python -m tests.dist.resharding_killer --folder DIR [--kills N] [--seed N]

Every rank opens the store as a training does, and so reads the old shards and writes a new one. One rank, or all, are
killed just before or after a call that touches the disk, or at a random instant; some are killed again as they begin
anew, or the old ranks open the store between. After each kill it must stand where it stood, in the old shards or in the
new ones, with their bits; at the end in the new ones, with the bits of a run without a kill and nothing beside them.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.crash.child import Ended, Teller
from tests.crash.killer import Killer
from tests.crash.outcome import FAILING, EnoughError, Found, Outcome
from tests.crash.points import unwatch, watch
from tests.crash.schedule import After, At, Death, die
from tests.dist.meeting import Processes
from tests.dist.reshardings import let_through, one_case, sharded, train_to_cursor, ways
from tests.dist.shards_killer import options_of, run
from tiercache.data.dataset import PassDataset
from tiercache.dist.shard_view import ShardView
from tiercache.dist.training_store import open_own_shard
from tiercache.store import Store
from tiercache.store.shards.shard_manifest import ShardManifest
from tiercache.store.shards.sharded_store import ShardedStore
from tiercache.store.shards.sharding import ShardingPlan
from tiercache.store.verification import Verification

PHASES = (
    "making new shards", "writing rows", "committing a shard", "between commits and manifest", "writing the manifest",
    "deleting old shards", "reading or closing",
)  # fmt: skip
INSTANTS = 3
"""Kills at random instants beside one in each phase."""
CASE = one_case()
TRAINED = 2
"""Passes of the old shards: the first one trained, one with a commit of the ranks, and one that only some committed."""


@dataclass(frozen=True)
class Way:
    """From which ranks to which."""

    before: int
    """0: one, of a plain store; so for ``after``."""
    after: int
    engine: str
    disks: bool = False
    """Whether new shards are on disks of their own."""

    def shards(self, path: Path) -> list[Path] | None:
        """Return where the new shards of the store at ``path`` are."""
        return [path.parent / f"disk {rank}" for rank in range(self.after)] if self.disks else None


WAYS = (
    Way(2, 3, "lmdb"), Way(0, 2, "lmdb"), Way(2, 0, "zarr"), Way(3, 2, "zarr", disks=True),
    Way(1, 2, "zarr"), Way(2, 1, "lmdb", disks=True), Way(0, 3, "zarr", disks=True), Way(3, 0, "lmdb"),
)  # fmt: skip


def opened(path: Path, ranks: Any, num_ranks: int, turn: int, shards: Sequence[Path] | None = None) -> Any:
    """Open the store as a training on these ranks does."""
    passes = PassDataset.open(path.parent / "passes")
    share = ShardView(passes, ways(num_ranks, turn) if num_ranks else ShardingPlan.of_one(passes.tables), ranks.rank)
    manifest = ShardManifest.read(path)
    if not num_ranks and (manifest is None or manifest.is_plain):
        return Store.open(path, tables=passes.tables)
    return open_own_shard(
        path, share, ranks, engine=None, shard_dirs=shards, reorganized=False, order=None, plain=not num_ranks
    )


def contents(store: Store) -> dict[str, Any]:
    """Return what a store has: where it stands, its rows and states; and the records of each shard."""
    rows = []
    for table in store.tables:
        chunks = list(store.scan(table.name))  # in hash order, whichever shard they are in
        arrays = [
            [keys for keys, _ in chunks],
            *([fields[i] for _, fields in chunks] for i in range(len(table.fields))),
        ]
        rows.append(_digest(b"".join(array.tobytes() for array in some) for some in arrays))
    shards = []
    for shard in shards_of(store):
        assert shard.commit is not None
        # segments have the checksums of all their keys and rows, which verification compares
        shards.append(_digest([shard.commit.to_bytes(), *(segment.to_bytes() for segment in shard.segments)]))
    states = [_digest([shard.state()]) for shard in shards_of(store)]
    return {"cursor": list(store.commit.cursor), "rows": rows, "states": states, "shards": shards}


def whole(path: Path) -> tuple[int, dict[str, Any], list[str]]:
    """Return generation and contents of a store, -1 of a plain one, and what is wrong with any of its shards."""
    with Store.open(path, mode="r") as store, contextlib.redirect_stdout(io.StringIO()):
        problems = [problem for shard in shards_of(store) for problem in Verification(shard).run()["problems"]]
        return store.manifest.generation if isinstance(store, ShardedStore) else -1, contents(store), problems


def shards_of(store: Store) -> Sequence[Store]:
    """Return the shards of a store; a plain one is one."""
    return store.shards if isinstance(store, ShardedStore) else [store]


def _digest(data: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for some in data:
        found.update(b"%d " % len(some) + some)
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class InPhase:
    """A kill at a point of a phase: of the rank that is there, or of all."""

    phase: str
    rank: int
    number: int
    everyone: bool

    def __str__(self) -> str:
        return f"{'all' if self.everyone else 'one'} killed as rank {self.rank} was {self.phase}, at {self.number}"

    @contextlib.contextmanager
    def armed(self, folder: Path, rank: int, teller: Teller) -> Iterator[None]:
        """Watch, and die there."""
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
        """Count where it was killed."""
        counts[self.phase] += ended.killed > 0


class Resharding:
    """Ranks take a store up that other ranks trained, and write its shards anew for themselves."""

    def __init__(self, way: Way, folder: Path) -> None:
        """Train the old shards of a way, and write them anew without a kill: what the ends of all others must be."""
        self.way, self.template, self._turns = way, folder / "old" / "s", 0
        self.template.parent.mkdir(parents=True)
        passes = self.template.parent / "passes"

        def first(ranks: Processes, teller: Teller) -> None:
            whole, cursor = CASE.cut(passes), (TRAINED - 1, 0)
            if way.before:
                sharded(self.template, CASE, whole, cursor, way.engine)
                return
            with Store.open(self.template, tables=CASE.tables, engine=way.engine) as plain:
                train_to_cursor(plain, whole, CASE, cursor, seed=1)

        def second(ranks: Processes, teller: Teller) -> None:
            whole = PassDataset.open(passes)
            with opened(self.template, ranks, way.before, 0) as shards:
                if not way.before:
                    let_through(shards, whole, TRAINED)
                    return
                share = ShardView(whole, ways(way.before, 0), ranks.rank)
                let_through(shards.store, share, TRAINED)
                shards.publish((TRAINED, 0))
                if ranks.rank == 0:
                    let_through(shards.store, share, TRAINED + 1)
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
        _without_a_kill(way.before or 1, second)
        (self.old,) = _without_a_kill(1, lambda _, teller: teller.say("whole", whole(self.template))).of("whole")
        self.begin(folder / "new")
        path = folder / "new" / "s"
        ended = _without_a_kill(way.after or 1, third)
        (self.new,) = ended.of("whole")
        self.points = [(name, rank, n) for rank, seen in ended.of("points") for name, n in sorted(seen.items())]
        shutil.rmtree(folder / "new")
        self.begin(folder / "new")  # once more, as fast as runs are whose points are not watched
        begun = time.monotonic()
        _without_a_kill(way.after or 1, lambda ranks, _: self._walk(path, ranks))
        self.seconds = time.monotonic() - begun
        shutil.rmtree(folder / "new")

    def begin(self, folder: Path) -> None:
        """Put the old shards there."""
        self._turns += 1
        shutil.copytree(self.template.parent, folder, dirs_exist_ok=True)

    def run(self, folder: Path, death: Death | None) -> Ended:
        """Open the store on all ranks, by the old ones before where it is a turn of theirs."""
        path, when = folder / "s", {}
        if isinstance(death, After):
            when = {"kill_after": death.seconds, "victim": death.victim}

        def work(ranks: Processes, teller: Teller) -> None:
            with contextlib.nullcontext() if death is None else death.armed(folder, ranks.rank, teller):
                self._walk(path, ranks)

        between: list[list[Any]] = []
        if death is None and self._turns % 3 == 0 and self._stands(path) == self.old[0]:
            before = self.way.before
            opening = run(before or 1, lambda ranks, _: _open(path, ranks, before, 0))
            between = [["old_ranks_between", 1], *opening.said, *([["wrong", one] for one in _names(path)])]
            between += [["wrong", f"opened by the old ranks, {one}"] for one in self._compare(path)[1]]
        ended = run(self.way.after or 1, work, **when)  # type: ignore[arg-type]
        while isinstance(death, InPhase) and not ended.killed and death.number:
            # as all ranks delete all files, another one may leave fewer for this one
            shutil.rmtree(folder)
            self.begin(folder)
            death = replace(death, number=death.number // 2)
            ended = run(self.way.after or 1, work)
        ended.said = between + ended.said
        return ended

    def again(self, generator: random.Random, runs: list[Ended]) -> At | None:
        """Kill every third that begins anew once more."""
        if len(runs) > 1 or self._turns % 3 != 1:
            return None
        victim = generator.randrange(self.way.after or 1)
        return At(generator.randrange(400), rank=victim, everyone=self.way.after > 1 and generator.random() < 0.5)

    def look(self, folder: Path, runs: list[Ended], *, last: bool) -> Found:
        """Compare what is there with the old shards or the new ones, and the names of files at the end."""
        path, counts = folder / "s", Counter[str]()
        stands, wrong = self._compare(path)
        wrong += [sentence for kind, sentence in runs[-1].said if kind == "wrong"]
        if last:
            counts["old_ranks_between"] += len(runs[-1].of("old_ranks_between"))
            wrong += _names(path)
            if stands == "old":
                wrong.append("it ended in the old shards")
        else:
            counts[f"stood_in_{stands}_shards"] += 1
            counts["kills_of_all"] += runs[-1].killed == (self.way.after or 1)
        return Found(wrong=[(FAILING, sentence) for sentence in wrong], counts=counts)

    def _compare(self, path: Path) -> tuple[str, list[str]]:
        """Return in which shards the store stands, and what of it is not as in those."""
        looked = run(1, lambda _, teller: teller.say("whole", whole(path)))
        if looked.of("error"):
            return "no", looked.of("error")
        ((generation, found, wrong),) = looked.of("whole")
        stands = "old" if generation == self.old[0] else "new"
        for name, value in (self.old if stands == "old" else self.new)[1].items():
            if found[name] != value and not (stands == "old" and name == "shards"):  # they may have stepped back
                wrong.append(f"it stands in {stands} shards with other {name}: {found[name]}")
        return stands, wrong

    def _walk(self, path: Path, ranks: Processes) -> None:
        """Be a rank that goes on with the store; returns when all have opened it."""
        _open(path, ranks, self.way.after, 1, self.way.shards(path))

    @staticmethod
    def _stands(path: Path) -> int:
        """Return the generation that the store stands in."""
        manifest = ShardManifest.read(path)
        return -1 if manifest is None or manifest.is_plain else manifest.generation


def _open(path: Path, ranks: Processes, num_ranks: int, turn: int, shards: Sequence[Path] | None = None) -> None:
    opened(path, ranks, num_ranks, turn, shards).close()
    ranks.all_gather_object(None)


def _names(path: Path) -> list[str]:
    """Return what is beside the shards of the manifest, in the store's folder and on the disks, or lacks."""
    manifest = ShardManifest.read(path)
    there = {*path.iterdir(), *path.parent.glob("disk */*")} - {path / "shards.json.tmp"}
    if manifest is None:
        places = {place for place in there if place.parent == path and not place.name.startswith("shard")}
        return [f"{names} are too many" for names in [there ^ places] if names]
    places = {path / "shards.json", path / "ranks.lock", path / "writer.lock"}
    for rank in range(manifest.num_ranks):
        folder = manifest.folder(path, rank)
        places |= {folder, folder.with_name(folder.name + ".json")}
    names = sorted(str(place.relative_to(path.parent)) for place in there ^ places)
    return [f"{names} are too many or too few"] if names else []


def _without_a_kill(num_ranks: int, work: Callable[[Processes, Teller], None]) -> Ended:
    ended = run(num_ranks, work)
    if ended.of("error"):
        raise RuntimeError(ended.of("error")[0])
    return ended


def phase() -> str:
    """Return what the thread is doing, from the functions that it is in."""
    names, frame = set(), sys._getframe(1)
    while frame is not None:
        names.add(frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    if "ShardWriter._delete" in names:
        return PHASES[5]
    if "ShardWriter.publish" in names:
        return PHASES[4] if "ShardWriter._write" in names else PHASES[3]
    if "copy_shard" in names:
        return PHASES[2] if "Store.publish" in names else PHASES[1]
    return PHASES[0] if "ShardWriter.begin_generation" in names else PHASES[6]


def main() -> int:
    """Kill as often as was asked for."""
    modules = ("tests.crash.warm", "tests.dist.warm", "tiercache.store.engines.zarr_engine")
    options = options_of("resharding", kills=20, modules=modules)
    outcome, some = Outcome(), WAYS if options.kills >= 100 else WAYS[:3]
    for i, way in enumerate(some):
        folder = options.folder / f"{way.before}-{way.after} {way.engine}"
        workload = Resharding(way, folder)
        killer = Killer(folder, workload, seed=options.seed)
        # the last ones first: where kills are no whole turns, more of them find new shards
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
                    at, victim = killer.random.random(), killer.random.randrange(-1, way.after or 1)
                    killer.kill(After(at, at * workload.seconds, None if victim < 0 else victim))
        outcome.add(killer.outcome)
    phases = {name: outcome.counts.pop(name) for name in PHASES if name in outcome.counts}
    print(json.dumps({**outcome.counts, "phases": phases, "problems": outcome.problems}, indent=1))  # noqa: T201
    return bool(outcome.problems)


if __name__ == "__main__":
    sys.exit(main())
