"""What the crash harness must find: engines with a defect planted in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.store.test_crash import ENGINES, crash

if TYPE_CHECKING:
    from pathlib import Path

NOTHING = ("--points", "0", "--torn", "0", "--instants", "0", "--replays", "0", "--full", "0")
PLANT = """
import sys
from tiercache.store.{module} import {owner}
{body}
{owner}.{name} = planted
from tests.crash.store import main
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
        "from tiercache.store.reader_mark import commits_read\n"
        "whole = ZarrEngine.commit\n"
        "def planted(self, records, dead, **options):\n"
        "    dead, blocks, root = list(dead), self._manifest.blocks, self._objects.root\n"
        "    for name in () if commits_read(self._sweep._readers) else dead:\n"
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
    tmp_path: Path, engine: str, plant: dict[str, str], options: list[object], words: str
) -> None:
    """Syncs left out or made too late, a commit in two steps, room that is given up before the commit that frees it."""
    arguments = ["--engine", engine, "--folder", tmp_path, "--problems", 1, *NOTHING, *options]
    done = crash(*arguments, code=PLANT.format(**plant))
    assert done.returncode == 1, done.stdout + done.stderr
    assert words in done.stdout


DEALT = """
import sys
import time
from pathlib import Path
from tests.crash.killer import Killer
from tests.crash.outcome import EnoughError
from tests.crash.schedule import deal
from tests.crash.store import StoreWorkload
folder, limit = Path(sys.argv[1]), time.monotonic() + 60

def enough(killer): raise EnoughError
def wait(killer):
    while not (folder / "enough").exists() and time.monotonic() < limit: time.sleep(0.01)
def count(killer): killer.outcome.counts["kills"] += 1

killer = Killer(folder, StoreWorkload("lmdb"))
deal([enough, wait, count, count], killer, 2, lambda found: None)
print(killer.outcome.counts["kills"], [path.name for path in folder.iterdir() if path.is_file()])
killer.folder = folder / "again"
killer.folder.mkdir()
deal([count, count, count], killer, 2, lambda found: None)
print(killer.outcome.counts["kills"])
"""


def test_all_workers_stop_where_one_has_found_enough(tmp_path: Path) -> None:
    """Each ends its case and takes no other, and those that are dealt cases afterwards know nothing of it."""
    done = crash(tmp_path, code=DEALT)
    assert done.stdout.splitlines() == ["0 []", "3"], done.stdout + done.stderr
