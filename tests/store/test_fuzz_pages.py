"""A store whose files have other bytes: in LMDB's pages, and in the places of blocks that they hold."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from tests.apart import ran
from tests.crash.store_steps import TABLES, problems, quiet, take
from tests.store.big import values
from tests.store.damage import assert_sentence, generator_of
from tiercache.store import Store, StoreError

if TYPE_CHECKING:
    from pathlib import Path

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


@pytest.mark.parametrize("told", [(1 << 20, 4096), (1 << 40, 4096), (1 << 62, 4096), (0, 1 << 40), (4096, 1 << 62)])
def test_freed_places_that_lie_make_no_file_longer(path: Path, told: tuple[int, int]) -> None:
    """However far beyond the end of the file: they are refused in a sentence, or the store is right without them."""
    freed = [value for value in values(path) if value.key[:1] == b"f"]
    assert freed
    size = (path / "blocks.bin").stat().st_size
    whole = (path / "data.mdb").read_bytes()
    for value in freed:
        for at in range(value.offset, value.offset + value.size, 16):
            (path / "data.mdb").write_bytes(whole[:at] + struct.pack("<QQ", *told) + whole[at + 16 :])
            for mode in ("r", "a"):
                try:
                    with Store.open(path, mode=mode) as store:
                        assert problems(store) == []
                except StoreError as error:
                    assert_sentence(error)
                assert (path / "blocks.bin").stat().st_size <= size


def test_places_that_lie_are_refused_or_read_in_a_sentence(path: Path) -> None:
    """Offset or bytes of a block's place changed: nothing is read beyond the file, and no other block's bytes pass."""
    whole = {entry: entry.read_bytes() for entry in path.iterdir() if entry.name not in {"lock.mdb", "writer.lock"}}
    found = [value for value in values(path) if value.key[:1] == b"b"]
    lies = [0, 1, 4095, 4096, 8192, 1 << 20, (1 << 63) - 4096, 1 << 63, (1 << 64) - 4096, (1 << 64) - 1]
    for seed in range(40):
        generator = generator_of(seed)
        value = found[int(generator.integers(0, len(found)))]
        for file, data in whole.items():
            file.write_bytes(data)
        with (path / "data.mdb").open("r+b") as file:
            file.seek(value.offset + 8 * int(generator.integers(0, 2)))
            file.write(struct.pack("<Q", lies[int(generator.integers(0, len(lies)))]))
        for mode in ("r", "a"):
            try:
                with Store.open(path, mode=mode) as store:
                    assert problems(store) == [], seed
            except StoreError as error:
                assert_sentence(error)
        assert (path / "data.mdb").stat().st_size == len(whole[path / "data.mdb"])
        assert (path / "blocks.bin").stat().st_size <= len(whole[path / "blocks.bin"]) + (1 << 20)
