"""Setup for all tests: waiting threads, Ctrl-C, memory file systems, and Hypothesis without deadlines.

OpenMP's threads spin while they wait for each other. Where other processes want the cores, each of the many tiny
kernels of a test then waits for the scheduler, which makes tests ten times slower. It must be set before the first
import of torch.

Gloo's threads spin if the notifier is preempted while it holds the lock; as a batch job (SCHED_BATCH) a process does
not preempt others when it wakes, if the system allows it.

A session has one fork server; it imports the modules of all killed processes, so that a process costs milliseconds.

Processes started by tests import from this checkout, with the same path as these tests, wherever they run.

The ranks of a session are four processes that stay alive between tests; they start at their first use.

Test files are in memory if the system supports it: kills lose none of it, and nothing waits for a disk. Files of tests
that are marked "disk" are on the disk.
"""

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.dist.pool import RanksPool
from tests.sampled import leave_to_long

_MEMORY = Path("/dev/shm")
_MEMORY_BYTES = 1 << 30  # more than concurrent tests have in files

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
_FOLDERS = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, _FOLDERS)))
if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(OSError):  # a sandbox may refuse it; tests then only take longer
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
signal.signal(signal.SIGINT, signal.default_int_handler)
multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.io.killed", "tests.data.killed"])
if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _MEMORY_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)  # before the long ones are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_to_long(items)


def pytest_collection_finish() -> None:
    """Let the collector of garbage leave out modules and tests, which stay to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.node.get_closest_marker("disk") is None:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="tiercache-") as folder:
        yield Path(folder)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system takes rights that this test does not have")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def ranks_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RanksPool]:
    with RanksPool(tmp_path_factory.mktemp("ranks")) as pool:
        yield pool
