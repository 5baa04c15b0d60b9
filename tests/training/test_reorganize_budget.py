"""The bytes that a reorganization takes are predicted: what is said is enough, and less is refused before it begins."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import tiercache as tc
from tests.training.cases import tiered, train
from tests.training.test_store_budget import CASE, held
from tiercache.errors import BudgetError
from tiercache.planning.first_use import count_keys
from tiercache.planning.positions import Positions
from tiercache.store import MemoryEngine, compaction_plan, rewrite
from tiercache.store.scratch_file import ScratchFile
from tiercache.training.reorganize import reorganize_plan

if TYPE_CHECKING:
    from collections.abc import Callable

DAYS: dict[str, dict[str, Any]] = {
    "a small day": {"num_samples": 256, "pass_rows": 64, "num_keys": 60, "data_seed": 1},
    "new keys beside the old": {"num_samples": 2048, "pass_rows": 256, "num_keys": 12000, "data_seed": 2},
    "the same keys in another cut": {"pass_rows": 1024},
}


def unnamed_bytes(folder: Path, *, temporary: bool = False) -> int:
    """Return what the disk keeps for files of this process in ``folder`` that have no name.

    Next uses of a schedule that is over lose theirs while they are mapped: they were there before, and are none that
    a reorganization made as ``temporary`` ones.
    """
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            name = str(link.readlink())
        except FileNotFoundError:
            continue
        if name.startswith(f"{folder}/") and not Path(name).exists() and not (temporary and ".gaps" in name):
            found += link.stat().st_blocks * 512
    return found


class Watched:
    """The bytes of a store's folder after each write to it or to a temporary file, and before each end of one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, store: tc.Store) -> None:
        self.path, self.store, self.sizes, self.temporary = path, store, [0], [0]
        engine = type(store._opened.engine)
        for owner, name in ((ScratchFile, "write"), (ScratchFile, "map"), (engine, "write"), (engine, "commit")):
            monkeypatch.setattr(owner, name, self._then_measured(getattr(owner, name)))
        close = ScratchFile.close

        def measured_then_closed(file: ScratchFile) -> None:
            self._measure()
            close(file)

        monkeypatch.setattr(ScratchFile, "close", measured_then_closed)

    def _then_measured(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            done = call(*arguments, **options)
            self._measure()
            return done

        return called

    def _measure(self) -> None:
        self.temporary.append(unnamed_bytes(self.path, temporary=True))
        self.sizes.append(unnamed_bytes(self.path) + held(self.path, self.store))


LITTLE = 1 << 16
"""So little memory for sorting that all is sorted in files: a minute or two for the larger days."""


@pytest.mark.parametrize(("engine", "retention"), [("lmdb", 1), ("zarr", 2)])
@pytest.mark.parametrize(
    ("day", "memory"),
    [
        *((day, None) for day in DAYS),
        ("a small day", LITTLE),
        *(pytest.param(day, LITTLE, marks=pytest.mark.long) for day in DAYS if day != "a small day"),
    ],
)
def test_a_reorganization_takes_no_more_than_was_said(
    day: str, engine: str, retention: int, memory: int | None, tmp_path: Path, passes: tc.PassDataset, monkeypatch: Any
) -> None:
    """Files of the store and temporary ones, at their most; what is said is at most three times what it takes."""
    if memory is not None:
        monkeypatch.setattr(compaction_plan, "MEMORY_BYTES", memory)
        monkeypatch.setattr(rewrite, "MEMORY_BYTES", memory)
    cut, path = dataclasses.replace(CASE, **DAYS[day]).cut(tmp_path / "day"), tmp_path / "s"
    with tc.Store.open(path, tables=CASE.tables, engine=engine, retention=retention) as store:
        with tiered(store, passes) as cache:
            train(cache, CASE, epochs=1)
        before = held(path, store)
        plan = reorganize_plan(store, cut)
        assert plan.present == before
        watched = Watched(monkeypatch, path, store)
        tc.reorganize(store, cut, store_budget=plan.needed, progress=False)
        peak = max(watched.sizes)
        assert before < peak <= plan.needed
        assert plan.needed < 3 * peak + (2 << 20)
        assert 0 < max(watched.temporary) <= plan.ordered + plan.sorting
        assert not unnamed_bytes(path, temporary=True)


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_too_small_a_budget_is_refused_before_anything_is_written(
    engine: str, tmp_path: Path, passes: tc.PassDataset
) -> None:
    """With the numbers, of which one is the budget that is enough; no file is touched."""
    day, path = dataclasses.replace(CASE, **DAYS["a small day"]).cut(tmp_path / "day"), tmp_path / "s"
    with tc.Store.open(path, tables=CASE.tables, engine=engine) as store:
        with tiered(store, passes) as cache:
            train(cache, CASE, epochs=1)
        held(path, store)
        commit = store.commit
        files = {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in path.rglob("*")}
        plan = reorganize_plan(store, day)
        words = (
            r"that it takes now, .* of temporary files .* to write them to the store, .*: raise store_budget to (\d+)"
        )
        with pytest.raises(BudgetError, match=words) as caught:
            tc.reorganize(store, day, store_budget=plan.needed - 1, progress=False)
        assert store.commit is commit
        assert {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in path.rglob("*")} == files
        enough = int(re.search(words, str(caught.value))[1])  # type: ignore[index]
        assert enough == plan.needed
        assert tc.reorganize(store, day, store_budget=enough, progress=False) is not commit
        assert tc.reorganize(store, day, store_budget=1, progress=False) is store.commit  # nothing is to be done


@pytest.mark.parametrize("keys_per_slice", [1 << 20, 50])
def test_different_keys_are_counted_over_all_passes(passes: tc.PassDataset, keys_per_slice: int) -> None:
    """As a set of them all has them, whatever is in memory at once."""
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as store:
        positions = Positions.of(passes, store.groups)
    names = [table.name for table in positions.tables]
    found = count_keys(positions, lambda p, t: passes.passes[p].keys(names[t]), keys_per_slice=keys_per_slice)
    for name in names:
        assert found[name] == np.unique(np.concatenate([p.keys(name) for p in passes.passes])).size
