"""Defective engines that the crash harness must detect."""

import re
from pathlib import Path

import pytest

from tests.store.test_crash import crash

NOTHING = ("--points", "0", "--torn", "0", "--instants", "0", "--replays", "0", "--full", "0")
PLANT = """
import os, sys
from tiercache.store.{module} import {owner}
whole = {owner}.{name}
{body}
{owner}.{name} = planted
from tests.crash.store import main
sys.exit(main(sys.argv[1:]))
"""
IN_TWO_STEPS = """
def planted(self, env, record, names):
    whole(self, env, record, ())
    return whole(self, env, record, names)
"""
FREED_EARLY = """
from tiercache.store.snapshot import Needed
def planted(self, after):
    needed = Needed.of([*after, *self._given_up, *self._holds])
    early = list(self._allocated.given_up(needed))
    if not self.leased_now():  # a reader would find it without a kill
        self._allocated = needed
        self._engine.drop(early)
    whole(self, after)
"""
LMDB_FREED_EARLY = FREED_EARLY.replace(
    "        self._engine.drop(early)",
    """
        gone = []
        for name, upto in early:
            place = extents_of(self._engine._entries[name])
            end = sum(count for _, count in place.runs) + place.dropped
            gone += place.pieces(place.dropped, (end if upto is None else upto) - place.dropped)
        self._engine.drop(early)
        for low, count in gone:
            os.pwrite(self._engine._file._handle, bytes(count), low)
""",
).replace("def planted", "from tiercache.store.engines.lmdb_map import extents_of\ndef planted")
ZARR_UNSYNCED = """
def planted(self, keys):
    files, folders = whole(self, keys)
    return %s
"""
ZARR_UNSYNCED_HEADS = """
from tiercache.store.engines.zarr_objects import Objects
paths = Objects.durable_paths
def durable_paths(self, keys):
    files, folders = paths(self, keys)
    return [file for file in files if '/heads/' not in file], folders
Objects.durable_paths = durable_paths
def planted(self, key, data):
    (self.root / key).parent.mkdir(exist_ok=True)
    (self.root / (key + '.partial')).write_bytes(data)
    (self.root / (key + '.partial')).replace(self.root / key)
"""
ZARR_PUBLISHED_EARLY = """
waiting = set()
def planted(self, keys):
    keys = set(keys)
    if not any(key.startswith('heads/') for key in keys):
        return waiting.update(keys)
    whole(self, keys)
    whole(self, waiting)
    waiting.clear()
"""
ZARR_DELETED_EARLY = """
def planted(self, head, before):
    self._objects.delete([f'heads/{self._own.number}'])
    check, self._check_newest = self._check_newest, lambda: None
    whole(self, head, before)
    self._check_newest = check
"""
READERS_UNSEEN = "def planted(self): return set()"
FOUND = {"--points": "a kill (before|after) ", "--replays": "Loss", "": "a run without a kill"}
"""What each part of the harness says when it finds the defect."""
PLANTED = {
    "lmdb: blobs not synced": ("engines.block_file.BlockFile.sync", "def planted(self): pass", "--replays 60"),
    "lmdb: two transactions": ("engines.lmdb_engine.LmdbEngine._transact", IN_TWO_STEPS, "--points 150"),
    "lmdb: written over before the commit": ("commit_writer.CommitWriter._publish", LMDB_FREED_EARLY, "--points 150"),
    "zarr: commits not synced": (
        "engines.zarr_objects.Objects.durable_paths",
        ZARR_UNSYNCED % "[file for file in files if '/commits/' not in file], folders",
        "--replays 60",
    ),
    "zarr: heads' folder not synced": (
        "engines.zarr_objects.Objects.durable_paths",
        ZARR_UNSYNCED % "files, [folder for folder in folders if not folder.endswith('heads')]",
        "--replays 60",
    ),
    "zarr: heads not synced": ("engines.zarr_objects.Objects.publish", ZARR_UNSYNCED_HEADS, "--replays 60"),
    "zarr: published before the syncs": ("engines.zarr_engine.Heads._sync", ZARR_PUBLISHED_EARLY, "--replays 120"),
    "zarr: the head before deleted first": ("engines.zarr_engine.Heads.publish", ZARR_DELETED_EARLY, "--points 150"),
    "zarr: freed before the commit": ("commit_writer.CommitWriter._publish", FREED_EARLY, "--points 150"),
    "zarr: written over below a reader": ("commit_writer.CommitWriter.leased_now", READERS_UNSEEN, ""),
}
"""By engine and defect: the replaced function, its replacement, and the harness's parts that run."""


QUICK = ("lmdb: blobs not synced", "zarr: the head before deleted first", "zarr: written over below a reader")
"""Each of another part of the harness; make test-long covers the others."""


@pytest.mark.parametrize(
    "defect", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in PLANTED]
)
def test_the_harness_finds_an_engine_that_is_not_crash_proof(tmp_path: Path, defect: str) -> None:
    place, body, options = PLANTED[defect]
    module, owner, name = place.rsplit(".", 2)
    arguments = ["--engine", defect.partition(":")[0], "--folder", tmp_path, "--problems", 1, *NOTHING]
    code = PLANT.format(module=module, owner=owner, name=name, body=body)
    done = crash(*arguments, *options.split(), code=code)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(FOUND[options.partition(" ")[0]], done.stdout), done.stdout
