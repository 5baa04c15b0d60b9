"""The vectors of docs/format/bits.md, against the kernels and against the store's NumPy."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

import tiercache as tc
from tests.kernels.machines import Cpu
from tests.kernels.shuffling import sample_at
from tests.kernels.stochastic import philox, random_bits, rounded
from tests.kernels.test_bits import xxh64
from tiercache.data.keyset import write_key_set
from tiercache.kernels.cpu.hashing import hash_keys, mix, xxh64_words
from tiercache.kernels.cpu.initial import NORMAL, UNIFORM, initial_rows
from tiercache.kernels.cpu.rounding import set_streams
from tiercache.kernels.step import SGD, Rule, Step, Vectors, make_rounding
from tiercache.planning.schedule import Schedule
from tiercache.store import hashing
from tiercache.store.vectors import to_bits
from tiercache.training.batch import sample_order

PAGE = (Path(__file__).parents[2] / "docs" / "format" / "bits.md").read_text(encoding="utf-8")
ITEM, SEED = xxh64(b"item"), 7


def rows_below(header: str) -> list[list[str]]:
    """Return the cells of a table of the page, without their backquotes' marks."""
    assert PAGE.count(f"{header}\n") == 1
    lines = PAGE.partition(f"{header}\n")[2].splitlines()[1:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    assert table
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]


def test_texts_have_the_hashes_of_the_page() -> None:
    """XXH64 of UTF-8, by the kernel and by the store."""
    for text, wanted in rows_below("| bytes | XXH64 |"):
        data = text.strip('"').encode()
        assert xxh64(data) == hashing.xxh64(data) == int(wanted, 16)


def test_crosses_have_the_hashes_of_the_page() -> None:
    """XXH64 of 8-byte words: integers as they are, strings by their hash."""
    for words, wanted in rows_below("| words | XXH64 |"):
        row = [
            xxh64(word.strip('"').encode()) if word.startswith('"') else int(word) % 2**64
            for word in words.strip("[]").split(", ")
        ]
        assert int(xxh64_words(np.array([row], np.uint64))[0]) == int(wanted, 16)


def test_mix_has_the_values_of_the_page() -> None:
    """The finalizer, by the kernel and by the store."""
    for x, wanted in rows_below("| x | mix(x) |"):
        assert mix(int(x, 16)) == int(wanted, 16)
        assert int(hashing.mix(np.array([int(x, 16)], np.uint64))[0]) == int(wanted, 16)


def test_keys_have_the_hashes_and_the_order_of_the_page() -> None:
    """Order is unsigned by hash, by the kernel and by the store."""
    cells = rows_below("| key | hash |")
    keys, hashes = np.array([int(key) for key, _ in cells]), [int(wanted, 16) for _, wanted in cells]
    assert hash_keys(keys, ITEM).tolist() == hashing.hash_keys(keys, ITEM).tolist() == hashes == sorted(hashes)


def test_blocks_have_the_words_of_the_page() -> None:
    """Philox with the page's counter and key words."""
    stream = mix(SEED ^ ITEM)
    for block, words in rows_below("| block | words |"):
        made = philox((0, 0, int(block), 0), (stream & 0xFFFFFFFF, stream >> 32))
        assert list(made) == [int(word, 16) for word in re.findall(r"0x\w+", words)]


@pytest.mark.parametrize(("name", "kind", "a", "b"), [("uniform", UNIFORM, -0.05, 0.05), ("normal", NORMAL, 0.0, 1.0)])
def test_initial_rows_have_the_bits_of_the_page(name: str, kind: int, a: float, b: float) -> None:
    """Six elements: one block and a half."""
    cells = [row for row in rows_below("| key | initializer | bits |") if row[1].startswith(name)]
    out = np.empty((len(cells), 6), np.float32)
    initial_rows(np.array([int(row[0]) for row in cells]), ITEM, SEED, kind, a, b, out)
    assert out.view(np.uint32).tolist() == [[int(x, 16) for x in re.findall(r"0x\w+", row[2])] for row in cells]


def test_random_bits_of_steps_are_those_of_the_page() -> None:
    """By what a kernel does to a row of zeros, against the slow definition."""
    for key, step, bits in rows_below("| key | step | random bits of elements 0 to 7 |"):
        wanted = [int(x, 16) for x in re.findall(r"0x\w+", bits)]
        assert random_bits(ITEM, SEED, int(key), int(step), 8).tolist() == wanted
        held = Vectors.of(np.zeros((1, 4), np.float32), 8, "bfloat16")
        streams = np.zeros(1, np.uint64)
        set_streams(streams, np.zeros(1, np.int32), np.array([int(key)]), ITEM, SEED)
        gradient = -np.full((1, 8), 0x3F807FFF, np.uint32).view(np.float32)
        pairs, rounding = Cpu().sort(np.zeros(1, np.int32), 1), make_rounding(streams, int(step))
        Cpu().step(Step(held, (), pairs, Cpu().one_id(gradient), Rule(SGD, 1.0), rounding))
        assert held.values[0].tolist() == [0x3F80 + (0x7FFF + r >> 16) for r in wanted]


def test_numbers_are_rounded_as_on_the_page() -> None:
    """To the nearest by the store, stochastically by the slow definition that the kernels are held to."""
    header = "| float32 | nearest bfloat16 | nearest float16 | random bits | bfloat16 | float16 |"
    for cells in rows_below(header):
        bits, *nearest, noise, brain, half = (int(cell, 16) for cell in cells)
        number = np.array([bits], np.uint32).view(np.float32)
        assert [int(to_bits(number, dtype)[0]) for dtype in ("bfloat16", "float16")] == nearest
        assert [rounded(number[0], noise, dtype) for dtype in ("bfloat16", "float16")] == [brain, half]


def test_passes_and_samples_have_the_orders_of_the_page() -> None:
    """The schedule's orders and the shuffle of a pass, against the page and its own words run as they stand."""
    for seed, epoch, order in rows_below("| order seed | epoch | order of 6 passes |"):
        schedule = Schedule(num_passes=6, dataset_digest="", order=int(seed))
        salt = mix(mix(int(seed)) ^ int(epoch))
        assert schedule.order_of(int(epoch)).tolist() == sorted(range(6), key=lambda p: mix(mix(p) ^ salt))
        assert schedule.order_of(int(epoch)).tolist() == [int(x) for x in order.split()]
    for *numbers, samples in rows_below("| seed | epoch | pass | N | first place | samples from there on |"):
        (seed, epoch, sub_dataset, count, first), wanted = map(int, numbers), [int(x) for x in samples.split()]
        order = sample_order(count, seed=seed, epoch=epoch, sub_dataset=sub_dataset, shuffle=True)
        state, places = mix(mix(mix(seed) ^ epoch) ^ sub_dataset), range(first, first + len(wanted))
        assert order(places.start, places.stop).tolist() == [sample_at(i, count, state) for i in places] == wanted


def test_digests_are_those_of_the_page(tmp_path: Path) -> None:
    """A key set that is written and opened, and a schedule."""
    wanted = dict(rows_below("| what | digest |"))
    tables = (tc.Table(name="item", dim=1, optimizer=tc.optim.SGD(learning_rate=0.1), initializer=tc.init.Zeros()),)
    columns = [(np.array([0, 2, 1]), np.array([5, 1, 2]))]
    digest = write_key_set(tmp_path / "keys", tables, {"item": 3}, columns)
    keys = "key set of the table `item` with the keys 0, 2, 1 and the counts 5, 1, 2"
    data = (tmp_path / "keys").read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    assert data[size : size + 48] == np.array([0, 2, 1, 5, 1, 2], "<i8").tobytes()
    assert data[size + 48 :] == np.array([xxh64(data[size : size + 48])], "<u8").tobytes()
    assert digest == hashlib.sha256(data[:size] + data[size + 48 :]).hexdigest() == wanted[keys]
    schedule = Schedule(num_passes=6, dataset_digest="00").digest
    plain = b'{"dataset": "00", "order_seed": null, "version": 1}'
    assert schedule == hashlib.sha256(plain).hexdigest() == wanted["schedule of the dataset `00` without an order seed"]
