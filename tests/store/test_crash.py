"""Whatever ends a writing process: the store opens at a commit, verifies, and goes on to the same bits."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.store_image import Camera
from benchmarks.store_workload import STEPS, TABLES, go_on, problems, quiet, stands, take
from tiercache.store import Store, StoreFullError, verify

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
ENGINES = ("lmdb", "zarr")
NOTHING = ("--points", "0", "--torn", "0", "--instants", "0", "--replays", "0", "--full", "0")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where the system has one: kills lose nothing of it, and nothing waits for a disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < 1 << 30:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as place:
        yield Path(place)


def crash(*options: object, code: str = "") -> subprocess.CompletedProcess[str]:
    """Run the benchmark, or ``code``, in a process of its own, which forks and so must have no thread."""
    main = ["-c", code] if code else ["-m", "benchmarks.store_crash"]
    command = [sys.executable, *main, *map(str, options)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [["--quick"], pytest.param([], marks=pytest.mark.long)])
def test_a_store_killed_at_any_point_or_without_power_or_room_stands_at_a_commit(
    folder: Path, engine: str, options: list[str]
) -> None:
    """Kills before and after calls, in the middle of writes and at random instants, losses of power, full disks."""
    figures = folder / "figures.json"
    done = crash("--folder", folder, "--engine", engine, "--json", figures, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(figures.read_text())
    assert found["lost"] == found["failing"] == found["silent"] == 0
    assert min(300, found["points"]) <= found["points_tried"] <= found["points"]
    assert found["kills"] >= found["points_tried"]
    assert min(found["torn"], found["instants"], found["second_kills"], found["replays"], found["full_disks"]) >= 10
    assert found["commits_found"] == len(STEPS), "some commit was never the one that was found"


PLANT = """
import sys
from tiercache.store.{module} import {owner}
{body}
{owner}.{name} = planted
from benchmarks.store_crash import main
sys.exit(main(sys.argv[1:]))
"""
LMDB_UNSYNCED = {
    "module": "block_file",
    "owner": "BlockFile",
    "name": "sync",
    "body": "def planted(self): pass",
}
LMDB_IN_TWO_STEPS, ZARR_IN_TWO_STEPS = (
    {
        "module": f"{kind}_engine",
        "owner": f"{kind.capitalize()}Engine",
        "name": "commit",
        "body": (
            f"whole = {kind.capitalize()}Engine.commit\n"
            "def planted(self, records, dead):\n"
            "    whole(self, {}, dead)\n"
            "    whole(self, records, ())\n"
        ),
    }
    for kind in ENGINES
)
LMDB_FREED_EARLY = {
    "module": "history",
    "owner": "History",
    "name": "_advance",
    "body": (
        "whole = History._advance\n"
        "from tiercache.store.manifest import Manifest\n"
        "def planted(self, before, commit, *rest):\n"
        "    segments = {**self._manifest.segments, **{segment.id: segment for segment in self.segments}}\n"
        "    after = Manifest.of([*before, commit][-self._retention :], segments)\n"
        "    places = self._engine._places\n"
        "    dead = self._manifest.dead_before(after, self.segments)\n"
        "    self._engine._file.give([places.pop(name) for name in dead if name in places])\n"
        "    whole(self, before, commit, *rest)\n"
    ),
}


ZARR_FREED_EARLY = {
    "module": "zarr_engine",
    "owner": "ZarrEngine",
    "name": "commit",
    "body": (
        "whole = ZarrEngine.commit\n"
        "def planted(self, records, dead):\n"
        "    dead = list(dead)\n"
        "    blocks = self._manifest.blocks\n"
        "    self._objects.delete([key for name in dead if name in blocks for key, _ in blocks[name].chunks(name)])\n"
        "    whole(self, records, dead)\n"
    ),
}
ZARR_SPARE_EARLY = {
    "module": "zarr_engine",
    "owner": "ZarrEngine",
    "name": "commit",
    "body": (
        "whole = ZarrEngine.commit\n"
        "def planted(self, records, dead, **options):\n"
        "    dead, blocks, root = list(dead), self._manifest.blocks, self._objects.root\n"
        "    for name in dead:\n"
        "        for key, _ in blocks[name].chunks(name) if name in blocks else ():\n"
        "            self._objects.spares.keep(f'{root}/{key}', 0)\n"
        "    whole(self, records, dead, **options)\n"
    ),
}
ZARR_SPARE_AT_ONCE = {
    "module": "zarr_engine",
    "owner": "ZarrEngine",
    "name": "commit",
    "body": (
        "import os\n"
        "whole = ZarrEngine.commit\n"
        "def planted(self, records, dead, **options):\n"
        "    dead, blocks, root = list(dead), self._manifest.blocks, self._objects.root\n"
        "    for name in dead:\n"
        "        for key, size in blocks[name].chunks(name) if name in blocks else ():\n"
        "            handle = os.open(f'{root}/{key}', os.O_WRONLY)\n"
        "            os.pwrite(handle, bytes(size), 0)\n"
        "            os.close(handle)\n"
        "    whole(self, records, dead, **options)\n"
    ),
}
ZARR_SPARE_OF_READERS = {
    "module": "zarr_sweep",
    "owner": "Sweep",
    "name": "run",
    "body": "sys.modules['tiercache.store.zarr_sweep'].commits_read = lambda folder: set()\nplanted = Sweep.run",
}
ZARR_UNSYNCED_FILES, ZARR_UNSYNCED_FOLDERS = (
    {
        "module": "zarr_objects",
        "owner": "Objects",
        "name": "durable_paths",
        "body": (
            "whole = Objects.durable_paths\n"
            "def planted(self, keys):\n"
            "    files, folders = whole(self, keys)\n"
            f"    return {kept}\n"
        ),
    }
    for kept in (
        "[file for file in files if '/records/' not in file], folders",
        "files, [folder for folder in folders if not folder.endswith('manifests')]",
    )
)
ZARR_UNSYNCED_MANIFESTS = {
    "module": "zarr_objects",
    "owner": "DiskStore",
    "name": "publish",
    "body": (
        "from tiercache.store.zarr_objects import Objects\n"
        "whole = Objects.durable_paths\n"
        "def durable_paths(self, keys):\n"
        "    files, folders = whole(self, keys)\n"
        "    return [file for file in files if '/manifests/' not in file], folders\n"
        "Objects.durable_paths = durable_paths\n"
        "def planted(self, key, data):\n"
        "    (self.root / key).parent.mkdir(exist_ok=True)\n"
        "    (self.root / (key + '.partial')).write_bytes(data)\n"
        "    (self.root / (key + '.partial')).replace(self.root / key)\n"
    ),
}
ZARR_PUBLISHED_EARLY = {
    "module": "zarr_engine",
    "owner": "ZarrEngine",
    "name": "_sync",
    "body": (
        "whole, waiting = ZarrEngine._sync, set()\n"
        "def planted(self, keys):\n"
        "    keys = set(keys)\n"
        "    if not any(key.startswith('manifests/') for key in keys):\n"
        "        return waiting.update(keys)\n"
        "    whole(self, keys)\n"
        "    whole(self, waiting)\n"
        "    waiting.clear()\n"
    ),
}


@pytest.mark.parametrize(
    ("engine", "plant", "options", "words"),
    [
        ("lmdb", LMDB_UNSYNCED, ["--replays", 60], "Loss"),
        ("lmdb", LMDB_IN_TWO_STEPS, ["--points", 30], "a kill"),
        ("lmdb", LMDB_FREED_EARLY, ["--points", 150], "a kill"),
        ("zarr", ZARR_UNSYNCED_FILES, ["--replays", 60], "Loss"),
        ("zarr", ZARR_UNSYNCED_FOLDERS, ["--replays", 60], "Loss"),
        ("zarr", ZARR_UNSYNCED_MANIFESTS, ["--replays", 60], "Loss"),
        ("zarr", ZARR_PUBLISHED_EARLY, ["--replays", 120], "Loss"),
        ("zarr", ZARR_IN_TWO_STEPS, ["--points", 80], "a kill"),
        ("zarr", ZARR_FREED_EARLY, ["--points", 100], "a kill"),
        ("zarr", ZARR_SPARE_EARLY, ["--points", 100], "a kill"),
        ("zarr", ZARR_SPARE_AT_ONCE, ["--replays", 120], "Loss"),
        ("zarr", ZARR_SPARE_OF_READERS, [], "a run without a kill"),
    ],
    ids=[
        "lmdb: blocks not synced",
        "lmdb: two transactions",
        "lmdb: freed before the commit",
        "zarr: records not synced",
        "zarr: manifests' folder not synced",
        "zarr: manifests not synced",
        "zarr: published before the syncs",
        "zarr: two manifests",
        "zarr: freed before the commit",
        "zarr: spare before the commit",
        "zarr: written over before the commit",
        "zarr: written over below a reader",
    ],
)
def test_the_harness_finds_an_engine_that_is_not_crash_proof(
    folder: Path, engine: str, plant: dict[str, str], options: list[object], words: str
) -> None:
    """Syncs left out or made too late, a commit in two steps, room that is given up before the commit that frees it."""
    arguments = ["--engine", engine, "--folder", folder, "--problems", 1, *NOTHING, *options]
    done = crash(*arguments, code=PLANT.format(**plant))
    assert done.returncode == 1, done.stdout + done.stderr
    assert words in done.stdout


def test_an_image_is_what_stands_there_however_fast_it_changes(tmp_path: Path) -> None:
    """Files that are read again only where their times say so: writes in the same step of the clock are seen too."""
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
        image, paths = camera.take(), [path for path in tmp_path.rglob("*") if path.is_file()]
        found = {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in paths}
        inside = image.directories[image.directories[0]["b"]]
        names = {**image.directories[0], **{f"b/{name}": number for name, number in inside.items()}}
        files = {name: image.files[number] for name, number in names.items() if name != "b"}
        assert {name: b"".join(file.pages)[: file.size] for name, file in files.items()} == found
        time.sleep(generator.choice([0, 0, 0, 0.06]))


def test_a_creation_killed_while_it_described_arrays_is_made_again(tmp_path: Path) -> None:
    """What Zarr had not written to the end is no block: nothing is lost by making the store."""
    (tmp_path / "store.tc" / "segments").mkdir(parents=True)
    (tmp_path / "store.tc" / "writer.lock").touch()
    (tmp_path / "store.tc" / "segments" / "zarr.json.0af3.partial").touch()
    go_on(tmp_path / "store.tc", "zarr", quiet)
    finish(tmp_path / "store.tc")
    assert not list(tmp_path.rglob("*.partial"))


def test_lmdb_syncs_its_pages_before_its_root_and_its_root_at_once(tmp_path: Path) -> None:
    """What the replayed losses of power take for granted, seen in the calls of the system; where strace is there."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    code = (
        "import sys; from pathlib import Path; from benchmarks.store_workload import go_on, quiet; "
        "go_on(Path(sys.argv[1]), 'lmdb', quiet)"
    )
    calls = "trace=openat,open,pwrite64,pwritev,pwritev2,writev,write,fdatasync,fsync,msync,sync_file_range"
    command = ["strace", "-f", "-y", "-e", calls, "-o", str(tmp_path / "calls"), sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(tmp_path / "store.tc")], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"strace cannot trace here: {done.stderr}")
    unsynced, roots, opened = False, 0, ""
    for line in (tmp_path / "calls").read_text().splitlines():
        if "data.mdb" not in line or " = -1" in line:
            continue
        if "open" in line:
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


# -- full disks ----------------------------------------------------------------------------------------------


def take_all(store: Store) -> None:
    """Go on to the last commit."""
    for number in range(stands(store) + 1, len(STEPS)):
        take(store, number, quiet)


def finish(path: Path, **options: Any) -> None:
    """Go on to the last commit, where there is room, and check all."""
    with Store.open(path, tables=TABLES, **options) as store:
        assert problems(store) == []
        take_all(store)
        assert problems(store) == []
    assert verify(path)["problems"] == []


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("most", [4096, 70_000, 400_000, 500_000, 620_000, 800_000, 1_000_000, 1_500_000, 3_000_000])
def test_a_store_at_its_max_bytes_says_what_it_needs_and_goes_on_with_more(
    tmp_path: Path, engine: str, most: int
) -> None:
    """At whatever write the bound is met: the commit before stands, in this process and after a reopen."""
    path = tmp_path / "store.tc"
    with Store.open(path, tables=TABLES, engine=engine, max_bytes=most) as store:
        with pytest.raises(StoreFullError, match=rf"needs [\d,]+ more bytes but .* may hold {most:,}: raise") as full:
            take_all(store)
        assert full.value.needed_bytes > 0
        stood = stands(store)
        store.forget()
        assert stands(store) == stood < len(STEPS) - 1
        assert problems(store) == []
    assert block_bytes(path) <= most
    with Store.open(path, max_bytes=most) as store:
        assert stands(store) == stood
    finish(path)


def block_bytes(path: Path) -> int:
    """Return the bytes of the files that hold blocks."""
    files = [path / "blocks.bin", *path.glob("blocks/*"), *path.glob("segments/*/*/*/c.*")]
    return sum(file.stat().st_size for file in files if file.exists())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system takes rights that this test does not have")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("number", range(8))  # what follows fits into what was freed by then
def test_a_disk_that_is_really_full_leaves_a_store_that_opens_and_goes_on(disk: Path, engine: str, number: int) -> None:
    """Filled to the last byte before a step: a sentence; it reads and opens, and goes on once there is room."""
    path, ballast = disk / "store.tc", disk / "ballast"
    with Store.open(path, tables=TABLES, engine=engine) as store:
        for earlier in range(number):
            take(store, earlier, quiet)
        if engine == "zarr":
            store._engine._sweep.wait()  # what is deleted meanwhile makes room
        fill(ballast)
        with pytest.raises(StoreFullError, match=r"needs [\d,]+ more bytes but") as full:
            take_all(store)
        assert full.value.needed_bytes > 0
        stood = stands(store)
        store.forget()
        assert problems(store) == []
    for mode in ("r", "a"):
        with Store.open(path, mode=mode) as store:
            assert stands(store) == stood
            assert problems(store) == []
    ballast.unlink()
    finish(path)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_store_cannot_be_made_where_there_is_no_room_for_its_records(disk: Path, engine: str) -> None:
    """A sentence in place of a store, and the store once there is room."""
    fill(disk / "ballast")
    with pytest.raises(StoreFullError, match=r"the store at .* needs [\d,]+ more bytes but the file system of .* free"):
        Store.open(disk / "store.tc", tables=TABLES, engine=engine)
    (disk / "ballast").unlink()
    go_on(disk / "store.tc", engine, quiet)
    finish(disk / "store.tc")


def fill(path: Path) -> None:
    """Write a file until the file system takes no byte more."""
    with path.open("wb", buffering=0) as file:
        for part in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(part))
            except OSError:
                continue
