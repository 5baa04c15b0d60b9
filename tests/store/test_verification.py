"""Every kept commit is verified, each block once, in bounded memory; damage is reported for the commits it affects."""

import re
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from tests.files import flipped
from tests.memory import Peak, run_alone
from tests.store.big import append, publish
from tests.store.conftest import held_blocks, small_tables
from tests.store.places import byte_of, places
from tests.store.world import World
from tiercache.cli import app
from tiercache.store import SGD, CorruptStoreError, Range, Store, Table, Zeros, hash_keys, info, verify
from tiercache.store.key_invariants import SORT_BYTES, VERIFY_BYTES
from tiercache.store.segment import base_layout
from tiercache.store.verification import Verification

KEPT = [3, 4, 5]


@pytest.fixture(params=["lmdb", "zarr"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A closed store with six commits, the newest three of them kept."""
    world = World(small_tables(), num_passes=4, block_rows=20)
    with Store.open(tmp_path / "s.tc", tables=world.tables, engine=request.param, retention=3) as store:
        world.run(store, 6)
    return tmp_path / "s.tc"


def touched(path: Path) -> list[int]:
    """Return the commits that are damaged when each is opened and read alone."""
    found = []
    for id_ in KEPT:
        try:
            with Store.open(path, mode="r", commit=id_) as store:
                if Verification(store).run()["problems"]:
                    found.append(id_)
        except CorruptStoreError:
            found.append(id_)
    return found


def said(problem: str) -> list[int]:
    """Return the commits that a message names."""
    words = re.match(r"in commits? ([\d, and]+), (block|part|commits/|ranks/|the description)", problem)
    assert words is not None, problem
    return [int(id_) for id_ in re.findall(r"\d+", words[1])]


def test_an_interruption_ends_the_reading_process(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a word: Ctrl-C in a terminal reaches the process that asked alone."""
    with pytest.raises(KeyboardInterrupt):
        verify(path, progress=Mock(side_effect=KeyboardInterrupt))
    assert capfd.readouterr().err == ""
    assert not [one for one in psutil.Process().children() if "tiercache.store.verification" in one.cmdline()]
    assert verify(path)["problems"] == []


def test_every_block_of_every_commit_is_read_once(path: Path) -> None:
    """Whichever commits need it; progress ends at all bytes."""
    seen: list[tuple[int, int]] = []
    found = verify(path, progress=lambda done, total: seen.append((done, total)))
    assert (found["problems"], found["commit"], found["commits"]) == ([], 5, KEPT)
    with Store.open(path, mode="r") as store:
        assert found["blocks"] == sum(name.endswith("/rows") for name, _ in held_blocks(store))
    assert found["rows"] == info(path)["rows"] < found["stored_rows"]
    assert seen[-1] == (found["bytes"], found["bytes"])
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    told = CliRunner().invoke(app, ["verify", str(path)]).stdout
    assert f"is intact: {found['rows']:,} rows in 3 commits; the checksums of all {found['pages']:,} pages" in told


@pytest.mark.sampled(1)
def test_damage_is_said_of_the_commits_that_it_touches(path: Path) -> None:
    """As reading each commit alone finds it; blobs that only older commits need count."""
    hit: set[tuple[int, ...]] = set()
    blobs = {name: found for name, found in places(path).items() if not name.startswith(("commits/", "ranks/"))}
    for number, (file, at, size) in enumerate(place for found in blobs.values() for place in found):
        if number % 4:
            continue
        with flipped(file, at + min(1, size - 1)):
            (problem,) = verify(path)["problems"]
            assert said(problem) == touched(path) != []
            hit.add(tuple(said(problem)))
    assert len(hit) > 2
    assert any(max(commits) < max(KEPT) for commits in hit)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("passes", range(1, 5))
def test_commits_that_a_training_gives_up_meanwhile_are_no_damage(path: Path, passes: int) -> None:
    """Before verification leases them, it reads the remaining ones. After that, they stay until it has read them."""
    world = World(small_tables(), num_passes=4, block_rows=20, pass_index=6)
    with Store.open(path, mode="r") as before, Store.open(path) as store:
        world.run(store, passes)
        with Store.open(path, mode="r") as newest:
            late, leased = Verification(before), Verification(newest)
            world.run(store, 4)
            assert late.run()["problems"] == leased.run()["problems"] == []
            assert late.run()["commits"] == [*range(3 + passes, 6)] or [5]
            assert leased.run()["commits"] == [3 + passes, 4 + passes, 5 + passes]
            for one in (*late._stores, *leased._stores):
                one.close()


def test_the_command_line_names_the_commits_too(path: Path) -> None:
    with flipped(*byte_of(path, "states/0.3")):
        result = CliRunner().invoke(app, ["verify", str(path)])
    assert result.exit_code == 1
    assert "error: in commit 3, part 0 of the dense state of commit 3 of the store" in result.stderr


@pytest.mark.parametrize("name", ["commits/4", "ranks/0.4"])
def test_commits_that_do_not_open_are_named_and_the_others_are_read(path: Path, name: str) -> None:
    commit, state = byte_of(path, name), byte_of(path, "states/0.5")
    with flipped(*commit), flipped(*state):
        of_commit, of_state = verify(path)["problems"]
    assert of_commit.startswith(f"in commit 4, {name} of the store")
    assert said(of_state) == [5]


# -- memory --------------------------------------------------------------------------------------------------

ONE = Table(name="one", dim=1, optimizer=SGD(learning_rate=0.1), initializer=Zeros())
PASSES, PASS_ROWS = 3, 6_000_000


def make(path: Path) -> None:
    """Dump passes, each with other keys."""
    with Store.open(path, tables=[ONE]) as store:
        layout = base_layout(store.groups[0], [Range(next_use=9, table_rows=(PASS_ROWS,))])
        rows = np.zeros(layout.rows * ONE.row_bytes, np.uint8)
        for index in range(PASSES):
            keys = np.arange(index * PASS_ROWS, (index + 1) * PASS_ROWS)
            keys = keys[np.argsort(hash_keys(keys, ONE.table_id))]
            append(store, index, layout, rows, keys)
            publish(store, index + 1)


def measure(path: Path) -> None:
    """Verify, and compare its memory with the bound."""
    peak = Peak()
    with Store.open(path, mode="r") as store:
        peak.begin()
        assert not Verification(store).run()["problems"]
        assert peak.taken < VERIFY_BYTES
        assert store.counters.spill_bytes_written == 8 * PASSES * PASS_ROWS


@pytest.mark.disk
def test_keys_that_exceed_the_memory_of_verification_are_sorted_in_a_file(tmp_path: Path) -> None:
    """18 million of them, 144 MB of hashes, of rows of 4 bytes: hashes take more memory than rows."""
    assert 8 * PASSES * PASS_ROWS > SORT_BYTES
    make(tmp_path / "s")
    run_alone(measure, tmp_path / "s")


@pytest.mark.sampled(1)
def test_a_look_at_what_describes_rows_reads_none_of_them(path: Path) -> None:
    assert verify(path, deep=False)["problems"] == []
    newest = max(int(name.split("/")[1][2:]) for name in places(path) if name.startswith("segments/"))
    meta = f"segments/0.{newest}/meta"
    for name, share, deep in [(meta, 0.5, False), (meta, 0.999, False), (f"segments/0.{newest}/0/rows", 0.0, True)]:
        file, at = byte_of(path, name, share)
        with flipped(file, at):
            assert bool(verify(path, deep=False)["problems"]) is not deep, (name, share)
            assert verify(path)["problems"], (name, share)
    result = CliRunner().invoke(app, ["verify", "--no-deep", str(path)])
    assert result.exit_code == 0
    assert "the metadata of the" in result.output
