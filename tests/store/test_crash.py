"""For any end of a writing process, the store opens at a commit, verifies, and resumes to the same bits."""

import json
import os
import random
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.apart import command, ran
from tests.crash.image import Camera
from tests.crash.store import QUICK
from tests.crash.store_steps import STEPS, TABLES, go_on, opened, problems, quiet, stands, take
from tests.files import files_of
from tests.store.big import BIG, dump, load, publish
from tiercache.store import Store, StoreFullError, verify

ENGINES = ("lmdb", "zarr")
A_FEW = ["--points", "12", "--torn", "3", "--instants", "3", "--replays", "8", "--full", "3"]
"""Of each kind: what `make test` has the time for."""


def crash(*options: object, code: str = "") -> subprocess.CompletedProcess[str]:
    """Run the harness, or ``code``, in a separate process, because it forks and must have no thread."""
    return ran(code or "import sys; from tests.crash.store import main; sys.exit(main())", *options)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options", [A_FEW, pytest.param(["--quick"], marks=pytest.mark.long), pytest.param([], marks=pytest.mark.long)]
)
def test_a_store_killed_at_any_point_or_without_power_or_room_stands_at_a_commit(
    tmp_path: Path, engine: str, options: list[str]
) -> None:
    """Kills before and after calls, in the middle of writes and at random instants, losses of power, full disks."""
    figures = tmp_path / "figures.json"
    done = crash("--folder", tmp_path, "--engine", engine, "--json", figures, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(figures.read_text())
    assert found["lost"] == found["failing"] == found["silent"] == 0
    assert found["kills"] >= found["points_tried"]
    assert min(found[kind] for kind in ("points_tried", "torn", "instants", "replays", "full_disks")) > 0
    if options == A_FEW:
        return
    assert min(QUICK["points"], found["points"]) <= found["points_tried"] <= found["points"]
    assert min(found["torn"], found["instants"], found["second_kills"], found["replays"], found["full_disks"]) >= 10
    least = len(STEPS) * 3 // 4 if "--quick" in options else len(STEPS)
    assert found["commits_found"] >= least, "some commit was never the one that was found"


def test_an_image_is_what_stands_there_however_fast_it_changes(tmp_path: Path) -> None:
    """Files are read again only if their times changed; writes within one clock step are detected too."""
    generator, camera = random.Random(5), Camera(tmp_path)
    (tmp_path / "b").mkdir()
    for _ in range(150):
        place = tmp_path / generator.choice(["1", "2", "b/1", "b/2"])
        match generator.randrange(5):
            case 0:
                place.unlink(missing_ok=True)
            case 1 if place.exists():
                place.replace(tmp_path / generator.choice(["3", "b/3"]))
            case 2 if place.exists():
                os.truncate(place, generator.randrange(9000))
            case _:
                with place.open("r+b" if place.exists() else "w+b") as file:
                    file.seek(generator.randrange(9000))
                    file.write(generator.randbytes(10))
        image = camera.take()
        inside = image.directories[image.directories[0]["b"]]
        names = {**image.directories[0], **{f"b/{name}": number for name, number in inside.items()}}
        files = {name: image.files[number] for name, number in names.items() if name != "b"}
        assert {name: b"".join(file.pages)[: file.size] for name, file in files.items()} == files_of(tmp_path)
        time.sleep(generator.choice([0, 0, 0, 0.06]))


def test_a_creation_killed_while_it_described_arrays_is_made_again(tmp_path: Path) -> None:
    """Incomplete arrays of Zarr are not blocks: nothing is lost by creating the store again."""
    (tmp_path / "store.tc" / "segments").mkdir(parents=True)
    (tmp_path / "store.tc" / "writer.lock").touch()
    (tmp_path / "store.tc" / "segments" / "zarr.json.0af3.partial").touch()
    go_on(tmp_path / "store.tc", "zarr", quiet)
    finish(tmp_path / "store.tc")
    assert not list(tmp_path.rglob("*.partial"))


def test_lmdb_syncs_its_pages_before_its_root_and_its_root_at_once(tmp_path: Path) -> None:
    """The replayed losses of power assume it; checked in the system calls, if strace is available."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    code = "import sys; from pathlib import Path; from tests.crash.store_steps import go_on, quiet; "
    code += "go_on(Path(sys.argv[1]), 'lmdb', quiet)"
    calls = "trace=openat,open,pwrite64,pwritev,pwritev2,writev,write,fdatasync,fsync,msync,sync_file_range"
    traced = ["strace", "-f", "-y", "-e", calls, "-o", str(tmp_path / "calls"), *command(code, tmp_path / "store.tc")]
    done = subprocess.run(traced, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"strace cannot trace here: {done.stderr}")
    unsynced, roots, opened = False, 0, ""
    for line in (tmp_path / "calls").read_text().splitlines():
        if "data.mdb" not in line or " = -1" in line:
            continue
        if "open(" in line or "openat(" in line:
            opened = line if "O_DSYNC" in line else opened
        elif "sync(" in line:
            unsynced = False
        elif ", 120, " in line:  # the 120 bytes of a root
            assert not unsynced, f"a root was written before pages were synced: {line}"
            handle = line.partition("(")[2].partition("<")[0]
            assert opened.rpartition("= ")[2].startswith(f"{handle}<"), f"a root was written without O_DSYNC: {line}"
            roots += 1
        else:
            unsynced = True
    assert roots >= len(STEPS)


def take_all(store: Store) -> None:
    for number in range(stands(store) + 1, len(STEPS)):
        take(store, number, quiet)


def finish(path: Path, **options: Any) -> None:
    """Run to the last commit, with space, and check everything."""
    with opened(path, **options) as store:
        assert problems(store) == []
        take_all(store)
        assert problems(store) == []
    assert verify(path)["problems"] == []


@pytest.mark.sampled(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("most", [4096, 400_000, 620_000, 1_000_000, 3_000_000])
def test_a_store_at_its_budget_says_what_it_needs_and_goes_on_with_more(tmp_path: Path, engine: str, most: int) -> None:
    """At any write that reaches the limit: the previous commit remains, in this process and after a reopen."""
    path = tmp_path / "store.tc"
    with Store.open(path, tables=TABLES, engine=engine, store_budget=most) as store:
        with pytest.raises(StoreFullError, match=rf"needs [\d,]+ more bytes but .* may hold {most:,}: raise") as full:
            take_all(store)
        assert full.value.needed_bytes > 0
        stood = stands(store)
        store.discard_uncommitted()
        assert stands(store) == stood < len(STEPS) - 1
        assert problems(store) == []
    files = [path / "blocks.bin", *path.glob("blocks/*"), *path.glob("segments/*/*/*/c.*")]
    assert sum(file.stat().st_size for file in files if file.exists()) <= most
    with Store.open(path, store_budget=most) as store:
        assert stands(store) == stood
    finish(path)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("number", [0, 1, 3, 6, 7])  # later steps fit into freed space
def test_a_disk_that_is_really_full_leaves_a_store_that_opens_and_goes_on(disk: Path, engine: str, number: int) -> None:
    path, ballast = disk / "store.tc", disk / "ballast"
    with Store.open(path, tables=TABLES, engine=engine) as store:
        for earlier in range(number):
            take(store, earlier, quiet)
        store._opened.engine.drop((), shrink=True)  # deletions in between would free space
        fill(ballast)
        with pytest.raises(StoreFullError, match=r"needs ([\d,]+) more bytes.* but .* has [\d,]+ free") as full:
            take_all(store)
        free = re.search(r"has ([\d,]+) free(?! by now)", str(full.value))
        assert full.value.needed_bytes > (int(free[1].replace(",", "")) if free else 0)
        stood = stands(store)
        store.discard_uncommitted()
        assert problems(store) == []
    for mode in ("r", "a"):
        with Store.open(path, mode=mode) as store:
            assert stands(store) == stood
            assert problems(store) == []
    ballast.unlink()
    finish(path)


def test_what_is_free_in_a_store_is_room_for_its_records(disk: Path) -> None:
    """A writer that opens it on a full disk can still commit, because the block file gives up its free space."""
    path = disk / "store.tc"
    with Store.open(path, tables=[BIG]) as store:
        dump(store, 0, {1: 500, 2: 500})
        stored = dump(store, 1, {9: 100})
        publish(store, 2)
        publish(store, 3)  # the first dump is dead, and is located before the second
    Store.open(path).close()  # free space at the end leaves the file
    fill(disk / "ballast")
    for _ in range(2):
        with Store.open(path) as store:
            publish(store, 3)
            publish(store, 3)
            assert load(store, 9) == {1: stored[9]}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_store_cannot_be_made_where_there_is_no_room_for_its_records(disk: Path, engine: str) -> None:
    fill(disk / "ballast")
    with pytest.raises(StoreFullError, match=r"the store at .* needs [\d,]+ more bytes but the file system of .* free"):
        Store.open(disk / "store.tc", tables=TABLES, engine=engine)
    (disk / "ballast").unlink()
    go_on(disk / "store.tc", engine, quiet)
    finish(disk / "store.tc")


def fill(path: Path) -> None:
    """Write a file until the file system is full."""
    with path.open("wb", buffering=0) as file:
        for part in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(part))
            except OSError:
                continue
