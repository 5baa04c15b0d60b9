"""The disk usage of a training or a reorganization is predicted: enough bytes, and less is refused in advance."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiercache as tc
from tests.train.cases import Case, Spec, table, tiered, train
from tiercache.dist.reorganize import reorganize_plan
from tiercache.errors import BudgetError
from tiercache.planning.next_use import count_keys
from tiercache.planning.row_offsets import RowOffsets
from tiercache.rows.backends.cpu import CpuBackend
from tiercache.store import MemoryEngine, compaction_plan, info, load_rows, rewrite
from tiercache.store.files import ScratchFile
from tiercache.store.inspect import file_bytes_of
from tiercache.train.dense_state import DenseState

CASE = Case(
    tables=(table("user", 24), table("item", 24), table("word", 40, tc.optim.Adam())),
    specs=(
        Spec(name="u", table="user"), Spec(name="i", table="item", hotness="multi_hot"), Spec(name="w", table="word"),
    ),
    num_samples=4096, pass_rows=512, num_keys=6000, batch=128, epochs=3,
)  # fmt: skip
STATE_BYTES = 32 << 10
"""More than the dense state of this case."""


def needed(store: tc.Store, passes: tc.PassDataset, **options: Any) -> int:
    """Return the store budget that the error of too small a budget requests."""
    with pytest.raises(BudgetError, match="store_budget is 1 bytes, but the store needs") as caught:
        tiered(store, passes, store_budget=1, **options)
    found = re.search(r"raise store_budget to (\d+) bytes, keep fewer commits", str(caught.value))
    assert found is not None
    return int(found[1])


def held(path: Path, store: tc.Store) -> int:
    """Return the disk usage of a store, whose writer may be running on another thread."""
    if not store.closed:
        with store.commit_writer._lock:
            store._opened.engine.drop((), shrink=True)
    return file_bytes_of(path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("engine", "retention", "commit_every", "order_seed", "compression"),
    [
        ("lmdb", 1, 1, None, None),
        ("lmdb", 3, 1, 5, None),
        ("lmdb", 1, 3, None, None),
        ("zarr", 1, 1, None, None),
        ("zarr", 2, 2, 5, None),
        ("zarr", 1, 1, None, "zstd"),
    ],
)
def test_a_training_stays_within_the_predicted_bytes(
    tmp_path: Path, passes: tc.PassDataset, engine: str, retention: int, commit_every: int, order_seed: int | None,
    compression: str | None,
) -> None:  # fmt: skip
    """With the planned bytes as budget and as limit of the engine: nothing is ever refused."""
    tables = [replace(t, compression=compression) for t in CASE.tables]
    options: dict[str, Any] = {"commit_every": commit_every, "order_seed": order_seed}
    how: dict[str, Any] = {"tables": tables, "engine": engine, "retention": retention}
    with tc.Store.open(tmp_path / "first", **how) as store, tiered(store, passes, **options) as cache:
        budget = cache.store_plan(STATE_BYTES).needed
    path, sizes = tmp_path / "s", list[int]()
    with tc.Store.open(path, **how, store_budget=budget) as store:
        with tiered(store, passes, store_budget=budget, **options) as cache:
            train(cache, CASE, each_batch=lambda *_: sizes.append(held(path, store)))
        sizes.append(held(path, store))
    assert max(sizes) <= budget
    assert budget < 6 * info(path)["row_bytes"]


def test_too_small_a_budget_is_refused_with_the_numbers(passes: tc.PassDataset) -> None:
    """Before any thread or file: one byte less than requested is too little, and the requested bytes suffice."""
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as store:
        budget = needed(store, passes)
        words = r"of live rows, 2 times the largest pass of .* 15 % .* raise store_budget"
        with pytest.raises(BudgetError, match=words):
            tiered(store, passes, store_budget=budget - 1)
        tiered(store, passes, store_budget=budget).close()
        assert needed(store, passes, commit_every=2) > budget
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine(), retention=4) as store:
        assert needed(store, passes) > budget


def test_dense_state_counts_before_the_first_batch(passes: tc.PassDataset) -> None:
    """Tracked state is known when training starts, and future optimizer state is counted in advance."""
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as store:
        budget = needed(store, passes)
        with tiered(store, passes, store_budget=budget) as cache:
            dense = torch.nn.Linear(512, 512)
            cache.register(model=dense, optimizer=torch.optim.Adam(dense.parameters()))
            with pytest.raises(BudgetError, match=r"MiB of dense state"):
                next(cache.passes(epochs=1))
        assert store.commit is None or store.commit.id == 0


def test_the_state_of_an_optimizer_is_prior_counts_it_is_there() -> None:
    """No optimizer of torch keeps more than two tensors for each parameter."""
    model = torch.nn.Sequential(torch.nn.Linear(100, 90), torch.nn.Linear(90, 3))
    for make in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
        optimizer = make(model.parameters(), lr=0.1)
        state = DenseState(CpuBackend())
        state.register({"model": model, "optimizer": optimizer})
        most = state.most_bytes()
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        assert len(state.capture()()) <= most
        if optimizer.state:  # plain SGD has none, ever
            assert state.most_bytes() == len(state.capture()())


def test_rows_that_no_pass_uses_are_counted(passes: tc.PassDataset) -> None:
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as store:
        before = needed(store, passes)
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as store:
        keys = np.arange(1_000_000, 1_030_000)
        fields = tuple(np.zeros((keys.size, f.width), np.float32) for f in CASE.tables[0].fields)
        load_rows(store, [("user", (keys, fields))])
        tc.reorganize(store, passes, progress=False)
        row_bytes = CASE.tables[0].row_bytes + 8
        assert 1.15 * keys.size * row_bytes < needed(store, passes) - before < 2 * keys.size * row_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
@pytest.mark.parametrize("retention", [1, 3])
def test_what_reorganizing_leaves_counts(tmp_path: Path, passes: tc.PassDataset, engine: str, retention: int) -> None:
    """Segments stay, and so do the commits of the previous day: the budget of a small day includes them."""
    day = replace(CASE, num_samples=256, pass_rows=64, num_keys=60, data_seed=1, epochs=2)
    small, path = day.cut(tmp_path / "day"), tmp_path / "s"
    with tc.Store.open(path, tables=CASE.tables, engine=engine, retention=retention) as store:
        with tiered(store, passes) as cache:
            train(cache, CASE, epochs=1)
        tc.reorganize(store, small, progress=False)
        assert store.commit.retained_ids
        with tiered(store, small) as cache:
            budget = cache.store_plan(STATE_BYTES).needed
        assert needed(store, small) <= budget
        sizes = [held(path, store)]
    with tc.Store.open(path, retention=retention, store_budget=budget) as store:
        with tiered(store, small, store_budget=budget) as cache:
            train(cache, day, each_batch=lambda *_: sizes.append(held(path, store)))
            left = cache.store_plan(STATE_BYTES).needed
        sizes.append(held(path, store))
    assert max(sizes) <= budget
    if retention > 1:
        assert left < budget  # the commits of the day before are gone
        assert held(path, store) <= left


def test_the_live_rows_of_a_plan_are_those_of_the_store(tmp_path: Path, passes: tc.PassDataset) -> None:
    live = []
    with tc.Store.open(tmp_path / "s", tables=CASE.tables) as store, tiered(store, passes) as cache:
        plan = cache.store_plan()
        for p in cache.passes(epochs=3):
            for batch in p.batches(512):
                del batch
            p.skip()
            cache.drain()
            needed = store.history.needed
            total = 0
            for need in needed.segments.values():
                for group, layout in zip(store.groups, need.segment.layouts, strict=True):
                    rows = min(layout.block_rows, layout.rows)
                    size = sum(-(-width * rows // 4096) * 4096 for width in (*(4 * f.width for f in group.fields), 8))
                    total += (layout.num_blocks - int(need.first_blocks_G[group.index])) * size
            live.append(total)
    assert max(live) == plan.live


DAYS: dict[str, dict[str, Any]] = {
    "a small day": {"num_samples": 256, "pass_rows": 64, "num_keys": 60, "data_seed": 1},
    "new keys and old keys": {"num_samples": 2048, "pass_rows": 256, "num_keys": 12000, "data_seed": 2},
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
    """The bytes of a store's folder after each written part and each commit, and of temporary files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, store: tc.Store) -> None:
        self.path, self.store, self.sizes, self.temporary = path, store, [0], [0]
        engine = type(store._opened.engine)
        self._puts = False
        for owner, name in ((ScratchFile, "write"), (engine, "publish")):
            monkeypatch.setattr(owner, name, self._then_measured(getattr(owner, name)))
        close, put = ScratchFile.close, engine.put

        def measured_put(engine: Any, blobs: Any, parts: Any, **how: Any) -> None:
            self._puts = True
            put(engine, blobs, self._measured_after_each(parts), **how)
            self._puts = False
            self._measure()

        def measured_then_closed(file: ScratchFile) -> None:
            self._measure()
            close(file)

        monkeypatch.setattr(engine, "put", measured_put)
        monkeypatch.setattr(ScratchFile, "close", measured_then_closed)

    def _then_measured(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            done = call(*arguments, **options)
            self._measure()
            return done

        return called

    def _measured_after_each(self, parts: Iterable[Any]) -> Iterator[Any]:
        for part in parts:
            yield part
            self._measure()

    def _measure(self) -> None:
        stored = file_bytes_of(self.path) if self._puts else held(self.path, self.store)
        self.temporary.append(unnamed_bytes(self.path, temporary=True))
        self.sizes.append(unnamed_bytes(self.path) + stored)


LITTLE = 1 << 16
"""So little memory for sorting that everything is sorted in files: a minute or two for the larger days."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("engine", "retention"), [("lmdb", 1), ("zarr", 2)])
@pytest.mark.parametrize("memory", [None, LITTLE])
@pytest.mark.parametrize("day", sorted(DAYS, key="a small day".__ne__))
def test_a_reorganization_takes_no_more_than_was_said(
    day: str, engine: str, retention: int, memory: int | None, tmp_path: Path, passes: tc.PassDataset, monkeypatch: Any
) -> None:
    """Files of the store and temporary ones, at their most; the prediction is at most three times the real usage."""
    if memory is not None:
        monkeypatch.setattr(compaction_plan, "COMPACTION_BYTES", memory)
        monkeypatch.setattr(rewrite, "REWRITE_BYTES", memory)
    cut, path = replace(CASE, **DAYS[day]).cut(tmp_path / "day"), tmp_path / "s"
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
        assert 0 < max(watched.temporary) <= max(plan.ordered, plan.sorting)
        assert not unnamed_bytes(path, temporary=True)


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_too_small_a_budget_is_refused_before_a_write(engine: str, tmp_path: Path, passes: tc.PassDataset) -> None:
    day, path = replace(CASE, **DAYS["a small day"]).cut(tmp_path / "day"), tmp_path / "s"
    with tc.Store.open(path, tables=CASE.tables, engine=engine) as store:
        with tiered(store, passes) as cache:
            train(cache, CASE, epochs=1)
        held(path, store)
        commit = store.commit
        files = {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in path.rglob("*")}
        plan = reorganize_plan(store, day)
        words = r"that it takes now, .* of temporary files and .* of new segments, .*: raise store_budget to (\d+)"
        with pytest.raises(BudgetError, match=words) as caught:
            tc.reorganize(store, day, store_budget=plan.needed - 1, progress=False)
        assert store.commit is commit
        assert {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in path.rglob("*")} == files
        enough = int(re.search(words, str(caught.value))[1])  # type: ignore[index]
        assert enough == plan.needed
        assert tc.reorganize(store, day, store_budget=enough, progress=False) is not commit
        assert tc.reorganize(store, day, store_budget=1, progress=False) is store.commit  # nothing is to be done


@pytest.mark.parametrize("keys_per_range", [1 << 20, 50])
def test_different_keys_are_counted_over_all_passes(passes: tc.PassDataset, keys_per_range: int) -> None:
    """Like a set of all of them, however many are in memory at once."""
    with tc.Store.open(None, tables=CASE.tables, engine=MemoryEngine()) as store:
        positions = RowOffsets.of(passes, store.groups)
    names = [table.name for table in positions.tables]
    found = count_keys(positions, lambda p, t: passes.passes[p].keys(names[t]), keys_per_range=keys_per_range)
    for name in names:
        assert found[name] == np.unique(np.concatenate([p.keys(name) for p in passes.passes])).size
