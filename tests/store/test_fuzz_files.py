"""A store with damaged files: LMDB's pages, Zarr's heads and metadata, and wrong places."""

import json
import struct
from pathlib import Path

import google_crc32c
import lmdb
import pytest
from numpy.random import Generator

from tests.apart import ran
from tests.crash.store_steps import TABLES, problems, quiet, take
from tests.store.damage import DEEP, LIES, assert_sentence, damaged, generator_of, lying
from tests.store.test_fuzz import bounded_memory  # noqa: F401 - a fixture
from tiercache.store import Store, StoreError
from tiercache.store.engines.engine import HeadRecord
from tiercache.store.engines.lmdb_map import checksum_of

STEPS = 5
PAGE_BYTES = 4096


@pytest.fixture
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A closed store after some steps, in an otherwise empty folder."""
    place, engine = tmp_path / "inside" / "store.tc", request.param
    with Store.open(place, tables=TABLES, engine=engine) as store:
        for number in range(STEPS):
            take(store, number, quiet)
    return place


ON_LMDB = pytest.mark.parametrize("path", ["lmdb"], indirect=True)
ON_ZARR = pytest.mark.parametrize("path", ["zarr"], indirect=True)


def read(path: Path, mode: str, told: object = None) -> bool:
    """Read the whole store; return True if it is correct, False if it is refused with an error."""
    try:
        with Store.open(path, mode=mode) as store:
            assert problems(store) == [], told
    except StoreError as error:
        assert_sentence(error)
        return False
    return True


# -- LMDB ----------------------------------------------------------------------------------------------------


def damaged_pages(whole: bytes, seed: int) -> bytes:
    """Return LMDB's file with bits flipped, sectors lost, words changed or pages swapped."""
    generator, out = generator_of(seed), bytearray(whole)
    for _ in range(int(generator.integers(1, 6))):
        page, other = (int(n) * PAGE_BYTES for n in generator.integers(0, len(whole) // PAGE_BYTES, 2))
        at = page + 2 * int(generator.integers(0, PAGE_BYTES // 2))
        match int(generator.integers(0, 5)):
            case 0:
                out[page + int(generator.integers(0, 64))] ^= 1 << int(generator.integers(0, 8))
            case 1:
                out[at] ^= int(generator.integers(1, 256))
            case 2:
                out[at - at % 512 : at - at % 512 + 512] = bytes(512)
            case 3:
                out[page : page + PAGE_BYTES] = whole[other : other + PAGE_BYTES]
            case _:
                struct.pack_into("<H", out, at, int(generator.choice([0, 1, 0xFF0, 0x1000, 0xFFFF])))
    return bytes(out)


def read_damaged(path: Path, low: int, high: int) -> None:
    """Read the store with damage of each seed: correct, or refused with an error."""
    whole = (path / "data.mdb").read_bytes()
    for seed in range(low, high):
        (path / "data.mdb").write_bytes(damaged_pages(whole, seed))
        print(seed, flush=True)  # noqa: T201  the last one is what a signal leaves to say
        read(path, "r", seed)


@ON_LMDB
@pytest.mark.sampled(1)
@pytest.mark.parametrize("seeds", [(0, 60), (60, 150)])
def test_damage_of_lmdbs_pages_is_refused_or_without_effect(path: Path, seeds: tuple[int, int]) -> None:
    """In a separate process, because signals must not occur: neither SIGSEGV nor SIGBUS, for any bytes."""
    code = "import sys; from pathlib import Path; from tests.store.test_fuzz_files import read_damaged; "
    code += f"read_damaged(Path(sys.argv[1]), *{seeds})"
    done = ran(code, path)
    assert done.returncode == 0, f"with seed {done.stdout.split()[-1:]}: {done.stderr[-2000:]}"


@ON_LMDB
def test_places_that_lie_are_refused_or_read_in_a_sentence(path: Path) -> None:
    """Under correct checksums: nothing is read beyond the file, and another blob's bytes are not accepted."""
    whole = {entry: entry.read_bytes() for entry in path.iterdir() if entry.is_file() and entry.name != "writer.lock"}
    lies = [-(1 << 63), -4096, -1, 0, 1, 4095, 4096, 8192, 1 << 20, 1 << 40, (1 << 63) - 4096, (1 << 63) - 1]
    refused = 0
    for seed in range(40):
        generator = generator_of(seed)
        for file, data in whole.items():
            file.write_bytes(data)
        rewrite_map(path, lies, generator)
        results = [read(path, mode, seed) for mode in ("r", "a")]
        refused += results.count(False)
        assert (path / "blocks.bin").stat().st_size <= len(whole[path / "blocks.bin"]) + (1 << 20)
    assert refused > 40


def rewrite_map(path: Path, lies: list[int], generator: Generator) -> None:
    """Put wrong values into one entry of the map of blobs, and update its checksum and the head's sum."""
    where = str(path / "data.mdb")
    with lmdb.open(where, subdir=False, lock=False, map_size=1 << 28) as env, env.begin(write=True) as txn:
        entries = {bytes(key): bytes(value) for key, value in txn.cursor()}
        names = sorted(entries.keys() - {b"head"})
        name = names[int(generator.integers(0, len(names)))]
        numbers = [*struct.unpack(f"<{len(entries[name]) // 8}q", entries[name][:-4])]
        for _ in range(int(generator.integers(1, 3))):
            numbers[int(generator.integers(0, len(numbers)))] = lies[int(generator.integers(0, len(lies)))]
        value = struct.pack(f"<{len(numbers)}q", *numbers)
        value += struct.pack("<I", google_crc32c.extend(google_crc32c.value(name), value))
        head = HeadRecord.from_bytes(entries[b"head"], "it")
        sums = head.checksums + checksum_of(value) - checksum_of(entries[name])
        txn.put(name, value)
        txn.put(b"head", head._replace(checksums=sums).to_bytes())


# -- Zarr ----------------------------------------------------------------------------------------------------


def head(path: Path) -> Path:
    """Return the file of the newest head."""
    return max((path / "heads").iterdir(), key=lambda file: int(file.name))


@ON_ZARR
@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_head_loses_nothing(path: Path, seed: int) -> None:
    """It is refused, or read right, also with any value replaced under a correct checksum: with its bytes restored the
    store is as before.
    """
    file = head(path)
    whole = file.read_bytes()
    for case in range(60):
        how, mode = [(lying, "r"), (damaged, "a"), (lying, "r")][case % 3]
        file.write_bytes(how(whole, generator_of(1000 * seed + case)))
        if read(path, mode) and mode == "a":
            file = head(path)
            whole = file.read_bytes()
        file.write_bytes(whole)
    assert read(path, "a")
    assert [entry.name for entry in path.parent.parent.iterdir()] == ["inside"]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@ON_ZARR
def test_what_describes_arrays_is_for_others_and_for_writers(path: Path) -> None:
    """With any metadata, rows are read correctly, because places are computed from the store's records. A writer, who
    lists blobs by the metadata, also reads correctly, or is refused and then drops nothing.
    """
    nodes, refused = sorted(path.glob("**/zarr.json")), 0
    assert len(nodes) > 10
    others = {file: file.read_bytes() for file in path.glob("segments/**/c.*")}
    for number, node in enumerate(nodes):
        whole, generator = node.read_bytes(), generator_of(number)
        lies = {key: LIES[int(generator.integers(0, len(LIES)))] for key in json.loads(whole)}
        bytes_ = [b"", DEEP, damaged(whole, generator), json.dumps(lies).encode()]
        for data in (bytes_[number % len(bytes_)], whole.replace(b'"block_rows":', b'"block_rows":1')):
            node.write_bytes(data)
            assert read(path, "r")
            refused += not read(path, "a")
            node.write_bytes(whole)
    assert refused > 5
    assert others == {file: file.read_bytes() for file in path.glob("segments/**/c.*")}
    for node in nodes:
        node.unlink()
    assert read(path, "r")
    assert not read(path, "a")
