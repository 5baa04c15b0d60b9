"""Marks of readers: what they hold, whoever made them and whatever stands in them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from tiercache.store.reader_mark import ReaderMark, commits_read

from tests.apart import ran
from tests.store.engine_contract import bytes_of
from tiercache.store import ZarrEngine


def test_a_reader_that_is_just_opening_keeps_everything(tmp_path: Path) -> None:
    """Until it has said which commit it reads, no commit's objects go."""
    engine = ZarrEngine(tmp_path, create=True)
    engine.write([(b"a", np.zeros(10, np.uint8), None)])
    engine.commit({}, [])
    mark = ReaderMark(tmp_path / "readers")
    assert commits_read(tmp_path / "readers") is None
    engine.commit({}, [b"a"])
    assert any((tmp_path / "blocks").iterdir())
    mark.set(7)
    assert commits_read(tmp_path / "readers") == {7}
    mark.release()
    assert commits_read(tmp_path / "readers") == set()
    engine.commit({}, [])
    engine.close()
    assert not any((tmp_path / "blocks").iterdir())


@pytest.mark.parametrize("said", [b"x\n", b"-3\n", b"7", b""])
def test_a_mark_that_names_no_commit_keeps_everything(tmp_path: Path, said: bytes) -> None:
    """Whatever stands in it, commits and openings go on; when its reader is gone it is deleted."""
    engine = ZarrEngine(tmp_path, create=True)
    engine.write([(b"a", np.zeros(10, np.uint8), None)])
    engine.commit({}, [])
    reader = ZarrEngine(tmp_path, create=False, readonly=True)
    (mark,) = (tmp_path / "readers").iterdir()
    mark.write_bytes(said)
    engine.commit({"r": b"1"}, [b"a"])
    engine.close()
    engine = ZarrEngine(tmp_path, create=False)
    assert bytes_of(reader, b"a") == bytes(10)
    reader.close()
    assert commits_read(tmp_path / "readers") == set()
    engine.commit({"r": b"2"}, [])
    engine.close()
    assert not any((tmp_path / "blocks").iterdir())
    assert not any((tmp_path / "readers").iterdir())


def test_a_reader_of_another_user_is_kept_and_stops_nobody(tmp_path: Path) -> None:
    """The writer may read its mark and not write it: what the reader has open stays, and commits and openings go on."""
    if os.geteuid() != 0:
        pytest.skip("only root can be two users")
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        done = ran(TWO_USERS, place)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.split() == ["committed", "kept", "reopened", "kept", "refused", "gone"]
    finally:
        shutil.rmtree(place)


TWO_USERS = """
import os, sys
from pathlib import Path
import numpy as np
from tiercache.store import ZarrEngine
from tiercache.store.reader_mark import ReaderMark
place = Path(sys.argv[1])
engine = ZarrEngine(place, create=True)
engine.write([(b"a", np.zeros(10, np.uint8), None)])
engine.commit({}, [])
umask = os.umask(0o077)
mark = ReaderMark(place / "readers")
mark.set(engine._manifest.number)
os.umask(umask)
(file,) = (place / "readers").iterdir()
for name in (place, *place.rglob("*")):
    os.chown(name, 65534, 65534)
os.chown(file, 0, 0)
os.chmod(place / "readers", 0o1777)
os.chown(place / "readers", 0, 0)
os.seteuid(65534)
engine.commit({"r": b"1"}, [b"a"])
print("committed")
print("kept" if any((place / "blocks").iterdir()) else "lost")
engine.close()
engine = ZarrEngine(place, create=False)
print("reopened")
os.seteuid(0)
os.chmod(file, 0)
os.seteuid(65534)
engine.commit({"r": b"2"}, [])
print("kept" if any((place / "blocks").iterdir()) else "lost")
os.seteuid(0)
os.chmod(file, 0o644)
mark.drop()
os.seteuid(65534)
engine.commit({"r": b"3"}, [])
engine.close()
print("refused" if file.exists() else "deleted")
print("left" if any((place / "blocks").iterdir()) else "gone")
"""
