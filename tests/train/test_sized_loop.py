"""Loops with a length: over passes, over the batches of a pass, and flat over the batches of all passes."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.train.cases import (
    assert_same_bits,
    result_of,
    result_of_resident,
)
from tests.train.test_fetch_ahead import CASE, STEPS, Plain, Training, opened, plain_on, store_of
from tiercache.errors import BudgetError, DatasetError, StateError

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.train.training_batches import TrainingBatches

PASSES, BATCHES = 8, 4


@pytest.fixture(scope="module")
def plain(passes: tc.PassDataset) -> Plain:
    """Rows and losses of a loop over passes and their batches."""
    return plain_on(passes, "cpu")


class Flat(Training):
    """A training in a flat loop."""

    loader: TrainingBatches

    def __init__(self, cache: Any, size: int = CASE.batch, epochs: int = 2) -> None:
        super().__init__(cache)
        self.loader = cache.batches(size, epochs=epochs, shuffle=True)

    def train(self, batch: tc.Batch) -> None:
        """Train one batch."""
        assert self.loader.current_pass is not None
        self.step(self.loader.current_pass, batch.end, batch)

    def run_flat(self, steps: int | None = None, *, commits: bool = False) -> None:
        """Train at most ``steps`` batches, then leave the loop. commits: commit before."""
        for count, batch in enumerate(self.loader, 1):
            self.train(batch)
            if count == steps:
                if commits:
                    self.cache.commit()
                break


def cursor_of(store: tc.Store) -> tuple[int, int]:
    """Return pass and sample of the last commit."""
    assert store.commit is not None
    return store.commit.cursor.pass_index, store.commit.cursor.sample


# -- lengths -------------------------------------------------------------------------------------------------


def test_loops_have_the_lengths_of_what_they_yield(passes: tc.PassDataset) -> None:
    """Passes and batches of any size, before a loop begins and while it runs; the length is fixed once it has begun."""
    with store_of(passes) as store, opened(passes, store) as cache:
        training = Training(cache)
        for epochs in (0, 1, 3):
            assert len(cache.passes(epochs)) == 4 * epochs
            assert len(cache.batches(7, epochs=epochs)) == epochs * sum(-(-p.samples // 7) for p in passes)
        loop, seen = cache.passes(epochs=2), list[int]()
        for p in loop:
            batches = p.batches(CASE.batch, shuffle=True)
            for count, batch in enumerate(batches, 1):
                training.step(p, batch.end, batch)
                assert len(batches) == BATCHES
                assert len(p.batches(CASE.batch)) == BATCHES - count
                seen.append(p.index)
            assert len(loop) == PASSES
        assert [seen.count(index) for index in range(PASSES)] == [BATCHES] * PASSES
        assert len(cache.passes(2)) == len(cache.batches(16, epochs=2)) == 0
        assert len(cache.passes(3)) == 4


@pytest.mark.sampled(8)
@pytest.mark.parametrize("size", [16, 7, 64, 1000])
@pytest.mark.parametrize("stop", [0, 1, 6, 15, 31])
def test_the_length_of_a_resumed_loop_is_what_is_left(passes: tc.PassDataset, stop: int, size: int) -> None:
    """From a commit inside any pass, or at the end of one."""
    with store_of(passes) as store:
        with opened(passes, store) as cache:
            training = Flat(cache)
            if stop:
                training.run_flat(stop, commits=True)
        with opened(passes, store) as cache:
            training = Flat(cache, size)
            expected = len(training.loader)
            assert len(cache.passes(2)) == PASSES - (cursor_of(store)[0] if stop else 0)
            count = 0
            for batch in training.loader:
                count += 1
                training.train(batch)
                assert len(training.loader) == expected
            assert count == expected
            assert len(training.loader) == 0


@pytest.mark.parametrize(("size", "epochs", "message"), [(0, 1, "invalid batch size 0"), (8, -1, "epochs is -1")])
def test_a_flat_loop_of_no_size_is_refused_when_it_is_made(
    passes: tc.PassDataset, size: int, epochs: int, message: str
) -> None:
    """Not at its first batch."""
    with store_of(passes) as store, opened(passes, store) as cache, pytest.raises(ValueError, match=message):
        cache.batches(size, epochs=epochs)


def test_a_finished_run_says_that_nothing_is_left(passes: tc.PassDataset) -> None:
    """Both loops warn, and none of zero epochs."""
    with store_of(passes) as store, opened(passes, store) as cache:
        Flat(cache, epochs=1).run_flat()
        with pytest.warns(UserWarning, match=r"nothing is left to train: 4 passes are trained, 1 epochs, and epochs=1"):
            assert not [*cache.passes(epochs=1)]
        with pytest.warns(UserWarning, match="request more epochs, or pass the path of a new store"):
            assert not [*cache.batches(8, epochs=1)]
        assert not [*cache.passes(epochs=0)]


# -- the flat loop -------------------------------------------------------------------------------------------


def test_a_flat_loop_ends_with_the_bits_of_a_loop_over_passes(passes: tc.PassDataset, plain: Plain) -> None:
    """With a commit at the end of each pass; all is committed when the loop has ended."""
    with store_of(passes) as store, opened(passes, store) as cache:
        training = Flat(cache)
        for count, batch in enumerate(training.loader):
            training.train(batch)
            assert training.loader.current_pass is not None
            assert training.loader.current_pass.index == count // BATCHES
        assert training.losses == plain[1]
        assert cursor_of(store) == (PASSES, 0)
        assert len(cache.reports) == PASSES
        assert_same_bits(result_of(store, passes, training.net), plain[0])


@pytest.mark.parametrize("end", ["close", "commit", "another loop", "collected"])
def test_a_trainer_that_takes_as_many_batches_as_the_length_trains_all_passes(
    passes: tc.PassDataset, plain: Plain, end: str
) -> None:
    """It never requests one more, so a later call commits the last pass."""
    with store_of(passes) as store:
        with opened(passes, store) as cache:
            training = Flat(cache)
            batches = iter(training.loader)
            for _ in range(len(training.loader)):
                training.train(next(batches))
            cache.drain(staged=False)
            assert cursor_of(store) == (PASSES - 1, 0)
            if end == "commit":
                cache.commit()
            elif end == "another loop":
                with pytest.warns(UserWarning, match="nothing is left"):
                    assert not [*cache.batches(8, epochs=2)]
            elif end == "collected":
                del batches
            assert end in {"close", "collected"} or cursor_of(store) == (PASSES, 0)
        assert training.losses == plain[1]
        assert cursor_of(store) == (PASSES, 0)
        assert_same_bits(result_of(store, passes, training.net), plain[0])


def test_a_flat_loop_of_a_cache_in_memory_ends_with_the_same_bits(passes: tc.PassDataset, plain: Plain) -> None:
    """It commits nothing, and continues with the first pass that was not trained."""
    with tc.InMemoryCache(passes) as cache:
        training = Flat(cache)
        training.run_flat()
        assert training.losses == plain[1]
        assert_same_bits(result_of_resident(cache, training.net), plain[0])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("steps", range(1, STEPS + 1, 3))
def test_a_flat_loop_that_was_left_resumes_from_the_last_commit(
    passes: tc.PassDataset, plain: Plain, steps: int
) -> None:
    """Leaving it commits nothing more; the resumed loop ends with the same bits."""
    with store_of(passes) as store:
        with opened(passes, store) as cache:
            training = Flat(cache)
            training.run_flat(steps)
            cache.drain(staged=False)
            losses = training.losses
        assert cursor_of(store) == ((steps - 1) // BATCHES, 0)
        with opened(passes, store) as cache:
            training = Flat(cache)
            training.run_flat()
        assert losses | training.losses == plain[1]
        assert_same_bits(result_of(store, passes, training.net), plain[0])


def test_a_commit_inside_a_pass_is_where_a_flat_loop_resumes(passes: tc.PassDataset, plain: Plain) -> None:
    """The remaining batches of the pass come first."""
    with store_of(passes) as store:
        with opened(passes, store) as cache:
            training = Flat(cache)
            for batch in islice(training.loader, 6):
                training.train(batch)
            losses = training.losses
        assert cursor_of(store) == (1, 0)
        with opened(passes, store) as cache:
            training = Flat(cache)
            for count, batch in enumerate(training.loader):
                training.train(batch)
                if count == 1:
                    cache.commit()
                    break
        assert cursor_of(store) == (1, 2 * CASE.batch)
        losses |= training.losses
        with opened(passes, store) as cache:
            training = Flat(cache)
            training.run_flat()
        assert losses | training.losses == plain[1]
        assert_same_bits(result_of(store, passes, training.net), plain[0])


# -- what counts as trained ----------------------------------------------------------------------------------


def test_a_flat_loop_that_trains_nothing_is_refused(passes: tc.PassDataset) -> None:
    """At the end of its first pass, which is not committed."""
    with store_of(passes) as store, opened(passes, store) as cache:
        training = Flat(cache)
        with pytest.raises(StateError, match="pass 0 ended with 0 of its 4 batches looked up"):
            for _ in training.loader:
                pass
        assert cursor_of(store) == (0, 0)


def test_the_last_batch_has_to_be_trained_too(passes: tc.PassDataset) -> None:
    """A loop that requests one more is refused; a loop that is left there commits nothing more."""
    with store_of(passes) as store:
        with opened(passes, store) as cache:
            training = Flat(cache)
            for count, batch in enumerate(training.loader, 1):
                if count == STEPS:
                    break
                training.train(batch)
        assert cursor_of(store) == (PASSES - 1, 0)
        with opened(passes, store) as cache:
            training = Flat(cache)
            batches = iter(training.loader)
            for _ in range(BATCHES - 1):
                training.train(next(batches))
            assert next(batches).num_samples == CASE.batch
            with pytest.raises(StateError, match="pass 7 ended with 3 of its 4 batches looked up"):
                next(batches)


def test_a_pass_is_skipped_or_stopped_in_a_flat_loop(passes: tc.PassDataset) -> None:
    """A skipped pass counts as trained, also the last one; a stopped one ends the loop and is not committed."""
    with store_of(passes) as store:
        with opened(passes, store) as cache:
            training, seen = Flat(cache), list[int]()
            for batch in training.loader:
                current = training.loader.current_pass
                assert current is not None
                seen.append(current.index)
                if current.index in {1, 7}:
                    current.skip()
                else:
                    training.train(batch)
        assert [seen.count(index) for index in range(PASSES)] == [4, 1, 4, 4, 4, 4, 4, 1]
        assert cursor_of(store) == (PASSES, 0)
        with opened(passes, store) as cache:
            training = Flat(cache, epochs=3)
            for batch in training.loader:
                training.train(batch)
                current = training.loader.current_pass
                assert current is not None
                if current.index == 9 and batch.end == current.num_samples:
                    current.stop()
        assert cursor_of(store) == (9, 0)


@pytest.mark.parametrize("last", [True, False])
def test_a_pass_that_was_stopped_after_its_last_batch_is_not_committed(passes: tc.PassDataset, last: bool) -> None:
    """Nor is the last pass of a loop, whose end came before its last batch."""
    with store_of(passes) as store:
        with opened(passes, store) as cache:
            training = Flat(cache, epochs=1)
            for batch in training.loader:
                training.train(batch)
                current = training.loader.current_pass
                assert current is not None
                if batch.end == current.num_samples and current.index == (3 if last else 2):
                    current.stop()
        assert cursor_of(store) == (3 if last else 2, 0)


# -- state ---------------------------------------------------------------------------------------------------


def test_the_state_of_a_flat_loop_is_that_of_the_last_commit(passes: tc.PassDataset) -> None:
    """It loads at that commit, also in a new process, and is refused at another."""
    with store_of(passes) as store:
        with opened(passes, store) as cache:
            training = Flat(cache)
            first = training.loader.state_dict()
            for count, batch in enumerate(training.loader, 1):
                training.train(batch)
                if count == 6:
                    cache.commit()
                    state = training.loader.state_dict()
                    break
            assert (state["pass"], state["sample"]) == (1, 2 * CASE.batch)
            assert (first["pass"], first["sample"]) == (0, 0)
        with opened(passes, store) as cache:
            loader = Flat(cache).loader
            loader.load_state_dict(state)
            assert state["batches"] == 6
            assert len(loader) == STEPS  # as StatefulDataLoader's: with those before the state
            assert len([*islice(loader, 3)]) == 3
            assert len(loader) == STEPS - 6
            with pytest.raises(StateError, match="requested the number of batches before it loaded"):
                loader.load_state_dict(state)
            with pytest.raises(StateError, match=r"the checkpoint was made at commit -1 of .* but the cache is at"):
                loader.load_state_dict(first)


# -- evaluation ----------------------------------------------------------------------------------------------


def test_evaluation_batches_have_a_length_and_the_rows_of_each_iteration(
    passes: tc.PassDataset, tmp_path: Path
) -> None:
    """Their vectors equal a lookup of raw keys; a cache that was not restored is restored first."""
    others = replace(CASE, num_keys=700, data_seed=5, num_samples=90, pass_rows=48).cut(tmp_path / "others")
    with store_of(passes) as store:
        with opened(passes, store) as cache:
            training = Flat(cache)
            batches = cache.evaluation_batches(others, 20)
            assert len(batches) == 3 + 3
            for count, batch in enumerate(training.loader):
                training.train(batch)
                if count in {0, 5}:
                    with torch.no_grad():
                        flat = [training.net(one) for one in batches]
                        parts = [training.net(one) for part in cache.evaluate(others) for one in part.batches(20)]
                    assert [len(one) for one in flat] == [20, 20, 8, 20, 20, 2]
                    assert all(torch.equal(a, b) for a, b in zip(flat, parts, strict=True))
        with opened(passes, store) as cache:
            restored = Flat(cache)
            assert not cache.is_restored
            with torch.no_grad():
                again = [restored.net(one) for one in cache.evaluation_batches(others, 20)]
                trained = [training.net.top(torch.ones(1, training.net.top.in_features)) for _ in range(1)]
            assert torch.equal(restored.net.top(torch.ones(1, restored.net.top.in_features)), trained[0])
            assert len(again) == len(flat)


def test_slices_of_evaluation_batches_end_at_whole_batches(passes: tc.PassDataset, tmp_path: Path) -> None:
    """Within the budget; a batch whose rows exceed it is refused with its size."""
    others = replace(CASE, num_keys=700, data_seed=5, num_samples=90, pass_rows=90).cut(tmp_path / "others")
    with store_of(passes) as store, opened(passes, store, eval_budget="8KiB") as cache:
        training = Training(cache)
        cache.restore()
        sizes = [part.num_samples for part in cache.evaluate(others, batch_size=6)]
        assert len(sizes) > 1
        assert sum(sizes) == 90
        assert not any(size % 6 for size in sizes[:-1])
        with torch.no_grad():
            assert [len(training.net(batch)) for batch in cache.evaluation_batches(others, 6)] == [6] * 15
        with pytest.raises(BudgetError, match="the rows of a batch of 90 samples from sample 0 of evaluation sub-da"):
            list(cache.evaluation_batches(others, 90))


# -- one's own dataset ---------------------------------------------------------------------------------------


class Keyed(nn.Module):
    """A model of plain tensors of keys."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.users, self.items, self.top = nn.Embedding(60, 4), nn.Embedding(60, 4), nn.Linear(4, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.top(self.users(users) * self.items(items)).squeeze(1)  # type: ignore[no-any-return]


def samples_of(num_samples: int = 120) -> torch.utils.data.TensorDataset:
    """Return users, items and labels."""
    chance = np.random.default_rng(0)
    users, items = (torch.from_numpy(np.sort(chance.integers(0, 60, num_samples))) for _ in range(2))
    return torch.utils.data.TensorDataset(users, items, (users % 2).float())


def recorded_loop(folder: Path, name: str, *, is_flat: bool, stop: int | None = None) -> dict[str, Any]:
    """Train out of the dataset itself; return weights and rows."""
    dataset = samples_of()
    model = tc.convert(Keyed(), optimizer=tc.optim.Adagrad(learning_rate=0.1))
    loader = torch.utils.data.DataLoader(dataset, batch_size=8)
    keys = tc.record_key_sets(
        model, loader, folder / "keys", device_budget="3KiB", call=lambda net, batch: net(*batch[:2]), progress=False
    )
    assert len(keys) > 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tc.TierCache(
        folder / name, keys, model=model, optimizer=optimizer, device_budget="64KiB", host_budget="16MiB",
        progress=False,
    ) as cache:  # fmt: skip
        count = 0
        if is_flat:
            batches: Any = cache.batches(8, epochs=2, shuffle=True, dataset=dataset)
            left = len(batches)
        else:
            batches = (one for p in cache.passes(epochs=2) for one in p.loader(dataset, 8, shuffle=True))
        taken = iter(batches)
        for count, (users, items, label) in enumerate(taken, 1):
            nn.functional.binary_cross_entropy_with_logits(model(users, items), label).backward()
            cache.optimizer.step()
            cache.optimizer.zero_grad()
            if count == stop:
                cache.commit()
                return {}
            if is_flat and count == left:
                break
        assert not is_flat or count == left
    with tc.Store.open(folder / name, mode="r") as store:
        assert cursor_of(store) == (2 * len(keys), 0)
        rows = {table.name: [part.tolist() for part in next(iter(store.scan(table.name)))[1]] for table in store.tables}
    return rows | {name: value.tolist() for name, value in model.top.state_dict().items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stop", [None, 1, 7, 20])
def test_a_flat_loop_takes_its_batches_out_of_ones_own_dataset(tmp_path: Path, stop: int | None) -> None:
    """A trainer that takes ``len`` batches ends with the bits of a loop over loaders, also after a resume."""
    expected = recorded_loop(tmp_path, "passes.tc", is_flat=False)
    if stop is not None:
        recorded_loop(tmp_path, "flat.tc", is_flat=True, stop=stop)
    assert recorded_loop(tmp_path, "flat.tc", is_flat=True) == expected


def test_a_flat_loop_without_samples_is_refused(tmp_path: Path, passes: tc.PassDataset) -> None:
    """It would have no batches; so is a dataset whose samples were not recorded."""
    keys = tc.write_key_sets(tmp_path / "keys", CASE.tables, [{"a": np.arange(4), "b": np.arange(4)}])
    with tc.InMemoryCache(keys) as cache:
        with pytest.raises(
            DatasetError, match=r"has a key set but no samples: pass the keys of each batch to Pass.batch"
        ):
            cache.batches(8, epochs=1)
        with pytest.raises(DatasetError, match=r"make the dataset with tc.record_key_sets, or train"):
            cache.batches(8, epochs=1, dataset=samples_of())
    with tc.InMemoryCache(passes) as cache, pytest.raises(DatasetError, match=r"make the dataset with tc.record_key_"):
        cache.batches(8, epochs=1, dataset=samples_of())
