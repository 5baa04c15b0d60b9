"""A store on Zarr whose objects have other bytes: the manifest, and what describes the arrays to other readers."""

import json
from pathlib import Path

import pytest

from tests.crash.store_steps import TABLES, problems, quiet, take
from tests.store.damage import (
    DEEP,
    LIES,
    assert_sentence,
    damaged,
    generator_of,
    lying,
    resealed,
)
from tests.store.test_fuzz import bounded_memory  # noqa: F401 - a fixture
from tiercache.store import CorruptStoreError, Store, StoreError
from tiercache.store.record_chain import Manifest

STEPS = 5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store after some steps, in a folder that holds nothing else."""
    place = tmp_path / "inside" / "store.tc"
    with Store.open(place, tables=TABLES, engine="zarr") as store:
        for number in range(STEPS):
            take(store, number, quiet)
    return place


def manifest(path: Path) -> Path:
    """Return the file of the manifest."""
    (file,) = (path / "manifests").iterdir()
    return file


def read(path: Path, mode: str) -> bool:
    """Read all of the store: whether it is right; False where it is refused in a sentence."""
    try:
        with Store.open(path, mode=mode) as store:
            assert problems(store) == []
    except StoreError as error:
        assert_sentence(error)
        return False
    return True


@pytest.mark.usefixtures("bounded_memory")
def test_manifests_of_any_bytes_are_refused_in_a_sentence(path: Path) -> None:
    """Random bytes, real ones with damage, damage and lies under a right checksum."""
    whole, refused = manifest(path).read_bytes(), 0
    for seed in range(1500):
        generator = generator_of(seed)
        match seed % 4:
            case 0:
                data = generator.bytes(int(generator.integers(0, 300)))
            case 1:
                data = damaged(whole, generator)
            case 2:
                data = resealed(whole, generator)
            case _:
                data = lying(whole, generator)
        try:
            Manifest.from_bytes(data, "it")
        except CorruptStoreError as error:
            assert_sentence(error)
            refused += 1
    assert refused > 700


@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("seed", range(3))
def test_a_manifest_that_lies_is_refused_or_read_right(path: Path, seed: int) -> None:
    """Any value replaced under a right checksum: no other block's bytes pass, and nothing beside the store changes."""
    file = manifest(path)
    whole = file.read_bytes()
    for case in range(40):
        file.write_bytes(lying(whole, generator_of(1000 * seed + case)))
        read(path, "r")
    assert [entry.name for entry in path.parent.parent.iterdir()] == ["inside"]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    file.write_bytes(whole)
    assert read(path, "r")


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_manifest_loses_nothing(path: Path, seed: int) -> None:
    """Opened for writing it is refused, or read right: with its bytes back the store is as it was."""
    file = manifest(path)
    whole = file.read_bytes()
    for case in range(20):
        file.write_bytes(damaged(whole, generator_of(1000 * seed + case)))
        if read(path, "a"):
            file = manifest(path)
            whole = file.read_bytes()
        file.write_bytes(whole)
    assert read(path, "a")


def test_what_describes_arrays_is_for_others(path: Path) -> None:
    """Whatever stands there, rows are read right: places are computed from the store's own records."""
    nodes = sorted(path.glob("**/zarr.json"))
    assert len(nodes) > 10
    for number, node in enumerate(nodes):
        whole, generator = node.read_bytes(), generator_of(number)
        lies = {key: LIES[int(generator.integers(0, len(LIES)))] for key in json.loads(whole)}
        bytes_ = [b"", DEEP, damaged(whole, generator), json.dumps(lies).encode()]
        node.write_bytes(bytes_[number % len(bytes_)])
    assert read(path, "r")
    assert read(path, "a")
    for node in path.glob("**/zarr.json"):
        node.unlink()
    assert read(path, "r")
    assert read(path, "a")
