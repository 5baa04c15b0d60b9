"""Long lives of a store compared with plain dicts: all kinds of commits, in any order, with pins, older commits and
changes.
"""

import copy

import numpy as np
import pytest

from tests.store.conftest import Home, needed_bytes, small_tables, stored_bytes
from tests.store.world import World
from tiercache.store import verify


class Life:
    """A store, and the expected world of each of its commits."""

    def __init__(self, home: Home, seed: int) -> None:
        self.home, self.draw = home, np.random.default_rng(seed)
        self.world = World(small_tables()[:4], keys_per_pass=6, universe=14, seed=seed)
        self.store = home.open(self.world.tables, retention=2)
        self.scheduled = True
        self.kept: dict[int, tuple[World, bool]] = {}
        """By id of each commit: the world, and True if a schedule continues from it."""

    def step(self) -> None:
        """Run one operation, and compare everything visible."""
        ways = [self.follow, self.compact, self.lay_over, self.pin, self.unpin, self.roll_back, self.reopen]
        if self.scheduled:
            ways += [self.train] * 5
        (self.train if self.store.commit is None else ways[int(self.draw.integers(0, len(ways)))])()
        assert self.store.commit is not None
        self.kept[self.store.commit.id] = copy.deepcopy(self.world), self.scheduled
        self.check()

    def train(self) -> None:
        self.world.run(self.store, 1)

    def follow(self) -> None:
        """Enter another schedule: some segments are retained."""
        self.world.keys_per_pass = int(self.draw.integers(2, 7))
        self.world.follow(self.store, self.world.draw(int(self.draw.integers(0, 1000))))
        self.scheduled = True

    def compact(self) -> None:
        """Put all rows in hash order."""
        self.world.compact(self.store)
        self.scheduled = False

    def lay_over(self) -> None:
        """Import rows of existing and new keys."""
        keys = self.draw.choice(30, 5, replace=False) - 15
        self.world.lay_over(self.store, {table.name: keys.tolist() for table in self.world.tables[:2]})
        self.scheduled = False

    def pin(self) -> None:
        ids = [commit.id for commit in self.store.commits]
        name = str(self.draw.choice(["best", "first"]))
        chosen = ids[int(self.draw.integers(0, len(ids)))]
        assert self.store.pin(name, chosen).pins[name] == chosen

    def unpin(self) -> None:
        for name in [*self.store.commit.pins][:1]:
            assert name not in self.store.unpin(name).pins

    def roll_back(self) -> None:
        """Roll back to a kept commit."""
        ids = [commit.id for commit in self.store.commits]
        chosen = ids[int(self.draw.integers(0, len(ids)))]
        self.world, self.scheduled = copy.deepcopy(self.kept[chosen])
        self.store.rollback(chosen)

    def reopen(self) -> None:
        self.store = self.home.open()

    def check(self) -> None:
        """Compare rows, changes, and each kept commit."""
        store, world = self.store, self.world
        world.check(store, after=world.pass_index - 1)
        assert store.state() == world.state
        assert {*store.commit.pins.values()} <= {commit.id for commit in store.commits}
        for commit in store.commits:
            with store.at(commit.id) as older:
                then, _ = self.kept[commit.id]
                then.check(older, after=then.pass_index - 1)
            world.check_changes(store, commit.id)
        if self.home.kind != "zarr":  # its chunks have several blocks
            assert stored_bytes(store) == needed_bytes(store)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("steps", [25, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_commits_shows_what_plain_dicts_show(home: Home, steps: int, seed: int) -> None:
    """Passes, schedules, imports, compactions, pins, rollbacks and reopenings; no free data is left over."""
    life = Life(home, seed)
    for _ in range(steps):
        life.step()
    home.close()
    if home.kind != "memory":
        assert verify(home.path)["problems"] == []
