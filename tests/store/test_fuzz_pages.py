"""A store whose files have other bytes: in LMDB's pages, and in the places of blocks that they hold."""

import struct
from pathlib import Path

import pytest

from tests.apart import ran
from tests.crash.store_steps import TABLES, problems, quiet, take
from tests.store.damage import assert_sentence, generator_of
from tiercache.store import LmdbEngine, Store, StoreError
from tiercache.store.record import decode, encode

STEPS = 5
PAGE_BYTES = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store after some steps."""
    place = tmp_path / "store.tc"
    with Store.open(place, tables=TABLES) as store:
        for number in range(STEPS):
            take(store, number, quiet)
    return place


def damaged_pages(whole: bytes, seed: int) -> bytes:
    """Return LMDB's file with bits flipped, sectors lost, words changed or pages in each other's place."""
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
    """Read the store with damage of each seed: right, or refused in a sentence."""
    whole = (path / "data.mdb").read_bytes()
    for seed in range(low, high):
        (path / "data.mdb").write_bytes(damaged_pages(whole, seed))
        print(seed, flush=True)  # noqa: T201  the last one is what a signal leaves to say
        try:
            with Store.open(path, mode="r") as store:
                assert problems(store) == [], seed
        except StoreError as error:
            assert_sentence(error)


def test_damage_of_lmdbs_pages_is_refused_or_without_effect(path: Path) -> None:
    """In a process of its own, since a signal is what must not come: neither SIGSEGV nor SIGBUS, whatever the bytes."""
    code = "import sys; from pathlib import Path; from tests.store.test_fuzz_pages import read_damaged; "
    code += "read_damaged(Path(sys.argv[1]), 0, 150)"
    done = ran(code, path)
    assert done.returncode == 0, f"with seed {done.stdout.split()[-1:]}: {done.stderr[-2000:]}"


def test_places_that_lie_are_refused_or_read_in_a_sentence(path: Path) -> None:
    """Places of blocks changed in whole records: nothing is read beyond the file, and no other block's bytes pass."""
    whole = {entry: entry.read_bytes() for entry in path.iterdir() if entry.is_file() and entry.name != "writer.lock"}
    lies = [-(1 << 63), -4096, -1, 0, 1, 4095, 4096, 8192, 1 << 20, 1 << 40, (1 << 63) - 4096, (1 << 63) - 1]
    for seed in range(40):
        generator = generator_of(seed)
        for file, data in whole.items():
            file.write_bytes(data)
        engine = LmdbEngine(path, create=False)
        records = engine.records()
        name = sorted(name for name in records if name != "tables")[int(generator.integers(0, len(records) - 1))]
        kind = name.partition("/")[0]
        values, arrays = decode(kind, records[name], "it")
        told = [array for array in arrays if array.partition("/")[0].endswith("_at") and arrays[array].size]
        for array in told[:: int(generator.integers(1, 3))]:
            arrays[array] = arrays[array].copy()
            arrays[array][int(generator.integers(0, arrays[array].size))] = int(generator.choice(lies))
        engine.commit({name: encode(kind, values, arrays)})
        engine.close()
        for mode in ("r", "a"):
            try:
                with Store.open(path, mode=mode) as store:
                    assert problems(store) == [] or told, seed
            except StoreError as error:
                assert_sentence(error)
        assert (path / "blocks.bin").stat().st_size <= len(whole[path / "blocks.bin"]) + (1 << 20)
