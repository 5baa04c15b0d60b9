"""However a training ends, the store is at a commit, and the resumed run ends with the same bits."""

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tiercache as tc
from tests.crash.told import finish, start
from tests.files import flip
from tests.store.failing import FailingEngine
from tests.store.places import places
from tests.store.reader import digest, read_on
from tests.train.cases import (
    SPECS,
    Case,
    Result,
    Spec,
    assert_bits_of_memory,
    assert_same_bits,
    resident_result,
    result_of,
    smallest_host_budget,
    table,
)
from tests.train.loops import train_store
from tests.train.test_bad_input import one_sentence
from tiercache.store import MemoryEngine, Store, verify
from tiercache.store.store_errors import CorruptBlockError, StoreFullError

CASE = Case(
    tables=(table("a", 128), table("b", 5, tc.optim.Adam(learning_rate=0.01))),
    specs=(Spec(name="f", table="a", hotness="ragged"), Spec(name="g", table="b")),
    num_samples=4000, pass_rows=1000, num_keys=100_000, batch=200, epochs=3,
)  # fmt: skip
NUM_PASSES = 12


@pytest.fixture(scope="module")
def expected(passes: tc.PassDataset) -> Result:
    return resident_result(CASE, passes)


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.long)])
def test_trainings_killed_at_random_moments_end_with_the_bits_of_one_never_killed(tmp_path: Path, kills: int) -> None:
    options = ["--quick"] if kills == 20 else ["--kills", str(kills)]
    options += ["--json", str(tmp_path / "figures.json"), "--folder", str(tmp_path), "--seed", str(kills)]
    command = [sys.executable, "-W", "ignore", "-m", "tests.crash", "training", *options]  # its fork server is its own
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["problems"] == found["commits_lost"] == found["stores_failing_verification"] == 0
    assert found["bits_equal"] is True
    assert found["kills"] == kills
    assert found["trainings"] >= 1
    phases = {name: n for name, n in found.items() if name.startswith("kills_in_")}
    assert sum(phases.values()) == kills
    assert sum(n > 0 for n in phases.values()) > 3, f"the kills hit few moments: {phases}"
    assert {"command", "date", "cpu", "cores", "version_torch", "seconds_per_kill"} <= found.keys()


def place(store: tc.Store) -> tuple[int, int, int]:
    return store.commit.id, store.commit.cursor.pass_index, store.commit.cursor.sample


def test_a_full_store_stops_training(tmp_path: Path, passes: tc.PassDataset, expected: Result) -> None:
    path, seen = tmp_path / "model.tc", list[int]()
    with tc.Store.open(path, tables=CASE.tables, store_budget=6_000_000) as store:
        with one_sentence(StoreFullError, ": ", "blocks.bin may hold 6,000,000", "raise store_budget") as caught:
            train_store(store, passes, CASE, each_batch=lambda pass_index, _: seen.append(pass_index))
        stands = place(store)
    assert caught.value.needed_bytes > 0
    assert 0 < stands[1] < NUM_PASSES, "it was full too early or too late to show anything"
    assert seen[-1] <= stands[1] + 1, "training continued although nothing could be written"
    assert verify(path)["problems"] == []
    with tc.Store.open(path, tables=CASE.tables) as store:
        assert place(store) == stands
        model = train_store(store, passes, CASE, seed=4)
        assert_same_bits(result_of(store, passes, model), expected)


SMALL = replace(CASE, num_samples=320, pass_rows=80, batch=20, num_keys=300, epochs=2)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[tc.PassDataset, Result]:
    passes = SMALL.cut(tmp_path_factory.mktemp("small") / "passes")
    return passes, resident_result(SMALL, passes)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("call", [1, 2, 3, 5, 9, 14, 20, 27, 35])
def test_an_error_of_any_call_to_the_engine_leaves_a_commit(small: tuple[tc.PassDataset, Result], call: int) -> None:
    (passes, ended), memory = small, MemoryEngine()
    engine = FailingEngine(memory, lasting=True)
    with tc.Store.open(None, tables=SMALL.tables, engine=engine) as store:
        options = {"device_budget": "1MiB"}
        options["host_budget"] = smallest_host_budget(store, passes, **options)
        engine.fail_in(call)
        with pytest.raises(StoreFullError, match="the disk of a test"):
            train_store(store, passes, SMALL, **options)
        before = None if store.commit is None else place(store)
    with tc.Store.open(None, tables=SMALL.tables, engine=memory) as store:
        assert (None if store.commit is None else place(store)) == before
        model = train_store(store, passes, SMALL, seed=1 if before is None else 5, **options)
        assert_same_bits(result_of(store, passes, model), ended)


def flip_in_rows(path: Path) -> int:
    """Flip one bit of the last rows of table a in the newest segment; returns the pass that they wait for."""
    with tc.Store.open(path, mode="r") as store:
        group = next(g.index for g in store.groups if g.tables[0].name == "a")
        segment = store.segments[-1]
        layout = segment.layouts[group]
    file, at, size = places(path)[f"{segment.name}/{group}/rows"][-1]
    flip(file, at + size - 1, 0x10)
    return int(layout.next_use_R[layout.range_of_page(layout.num_pages - 1)])


@pytest.fixture
def trained(tmp_path: Path, passes: tc.PassDataset) -> Path:
    path = tmp_path / "model.tc"
    train_store(path, passes, CASE, epochs=1)
    assert verify(path)["problems"] == []
    return path


def test_a_flipped_byte_in_a_block_is_refused_on_load_and_never_trained(trained: Path, passes: tc.PassDataset) -> None:
    waiting = flip_in_rows(trained)
    seen: list[int] = []
    with tc.Store.open(trained, tables=CASE.tables) as store:
        with one_sentence(CorruptBlockError, ": ") as caught:
            train_store(store, passes, CASE, each_batch=lambda pass_index, _: seen.append(pass_index))
        stands = place(store)
    assert caught.value.tables == ("a",)
    assert all(pass_index < waiting for pass_index in seen)
    assert 4 <= stands[1] <= waiting
    with tc.Store.open(trained, mode="r") as store:
        assert place(store) == stands


USED = Case(tables=(table("a", 3), table("b", 5)), specs=SPECS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("damage", ["a number", "two swapped", "all zeros", "a checksum", "cut short", "none"])
def test_a_damaged_file_of_next_uses_is_found_anew(tmp_path: Path, damage: str) -> None:
    passes, path = USED.cut(tmp_path / "passes"), tmp_path / "s"

    def stop(pass_index: int, _: int) -> None:
        if pass_index == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train_store(path, passes, USED, each_batch=stop)
    (file,) = (path / "schedule").glob("*.gaps")
    written = file.read_bytes()
    numbers = np.frombuffer(bytearray(written), np.int32).copy()
    i = int(np.nonzero(np.diff(numbers[: numbers.size // 2]))[0][50])
    match damage:
        case "a number":
            numbers[i] += 1
        case "two swapped":
            numbers[[i, i + 1]] = numbers[[i + 1, i]]
        case "all zeros":
            numbers[:] = 0
        case "a checksum":
            numbers[-1] ^= 1
    file.write_bytes(numbers.tobytes()[: -4 if damage == "cut short" else None])
    before = file.stat().st_mtime_ns
    with Store.open(path, tables=USED.tables) as store:
        model = train_store(store, passes, USED)
        assert_bits_of_memory(store, passes, model, USED)
    assert verify(path)["problems"] == []
    assert file.read_bytes() == written
    assert (file.stat().st_mtime_ns == before) == (damage == "none")


READ = replace(CASE, tables=(table("a", 16), CASE.tables[1]), num_samples=600, pass_rows=100, num_keys=5000, batch=50)
READ_PASSES = 18
READERS = 2


def train_into(store: Store, passes: tc.PassDataset, each_pass: Callable[[], object] = lambda: None) -> None:
    options = {"host_budget": "2MiB", "eval_budget": "128KiB"}
    train_store(store, passes, READ, each_batch=lambda p, batch: 0 < p < 7 and not batch and each_pass(), **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
def test_readers_in_other_processes_see_whole_commits_while_a_training_goes_on(tmp_path: Path, engine: str) -> None:
    passes = READ.cut(tmp_path / "passes")
    with Store.open(tmp_path / "kept.tc", tables=READ.tables, engine=engine, retention=READ_PASSES + 1) as store:
        train_into(store, passes)
        expected = {commit.id: digest(store.at(commit.id)) for commit in store.commits}
    assert len(set(expected.values())) == READ_PASSES + 1, "one before the first pass and one after each"

    path, ends, seen = tmp_path / "read.tc", [], list[tuple[int, str, str]]()
    with Store.open(path, tables=READ.tables, engine=engine) as store:
        for _ in range(READERS):
            mine, other = multiprocessing.Pipe()
            ends.append((start(read_on, path, other), mine))
        for process, mine in ends:
            assert mine.recv() == "ready", process
        train_into(store, passes, lambda: seen.extend(mine.recv() for _, mine in ends))
        for process, mine in ends:
            mine.send("stop")
            seen += iter(mine.recv, None)
            assert finish(process) == 0
    assert all(first == again == expected[commit] for commit, first, again in seen)
    assert len({commit for commit, *_ in seen}) > 3, "the readers saw hardly any of the training"
