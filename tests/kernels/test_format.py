"""Hashes and random words whose bits must not drift: values of docs/format/bits.md, and published ones."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.kernels.machines import Cpu
from tests.kernels.stochastic import philox, random_bits, rounded, sample_at
from tiercache.data.keyset import write_key_set
from tiercache.kernels.cpu.hashing import hash_keys, mix, xxh64_strings, xxh64_words
from tiercache.kernels.cpu.initial import NORMAL, UNIFORM, initial_rows
from tiercache.kernels.cpu.rounding import set_streams
from tiercache.kernels.step import Rule, Step, Vectors, make_rounding
from tiercache.planning.schedule import Schedule
from tiercache.store import bits as hashing
from tiercache.store.bits import to_bits
from tiercache.train.batches import sample_order

PAGE = (Path(__file__).parents[2] / "docs" / "format" / "bits.md").read_text(encoding="utf-8")


def xxh64(data: bytes, seed: int = 0) -> int:
    return int(xxh64_strings(np.frombuffer(data, np.uint8), np.array([0, len(data)]), seed)[0])


ITEM, SEED = xxh64(b"item"), 7


def rows_below(header: str) -> list[list[str]]:
    """Return the cells of a table of the page, without backquotes."""
    assert PAGE.count(f"{header}\n") == 1
    lines = PAGE.partition(f"{header}\n")[2].splitlines()[1:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    assert table
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]


def test_texts_have_the_hashes_of_the_page() -> None:
    for text, wanted in rows_below("| bytes | XXH64 |"):
        data = text.strip('"').encode()
        assert xxh64(data) == hashing.xxh64(data) == int(wanted, 16)


def test_crosses_have_the_hashes_of_the_page() -> None:
    for words, wanted in rows_below("| words | XXH64 |"):
        row = [
            xxh64(word.strip('"').encode()) if word.startswith('"') else int(word) % 2**64
            for word in words.strip("[]").split(", ")
        ]
        assert int(xxh64_words(np.array([row], np.uint64))[0]) == int(wanted, 16)


def test_mix_has_the_values_of_the_page() -> None:
    for x, wanted in rows_below("| x | mix(x) |"):
        assert mix(int(x, 16)) == int(wanted, 16)
        assert int(hashing.mix(np.array([int(x, 16)], np.uint64))[0]) == int(wanted, 16)


def test_keys_have_the_hashes_and_the_order_of_the_page() -> None:
    cells = rows_below("| key | hash |")
    keys, hashes = np.array([int(key) for key, _ in cells]), [int(wanted, 16) for _, wanted in cells]
    assert hash_keys(keys, ITEM).tolist() == hashing.hash_keys(keys, ITEM).tolist() == hashes == sorted(hashes)


def test_blocks_have_the_words_of_the_page() -> None:
    stream = mix(SEED ^ ITEM)
    for block, words in rows_below("| block | words |"):
        made = philox((0, 0, int(block), 0), (stream & 0xFFFFFFFF, stream >> 32))
        assert list(made) == [int(word, 16) for word in re.findall(r"0x\w+", words)]


@pytest.mark.parametrize(("name", "kind", "a", "b"), [("uniform", UNIFORM, -0.05, 0.05), ("normal", NORMAL, 0.0, 1.0)])
def test_initial_rows_have_the_bits_of_the_page(name: str, kind: int, a: float, b: float) -> None:
    cells = [row for row in rows_below("| key | initializer | bits |") if row[1].startswith(name)]
    out = np.empty((len(cells), 6), np.float32)
    initial_rows(np.array([int(row[0]) for row in cells]), ITEM, SEED, kind, a, b, out)
    assert out.view(np.uint32).tolist() == [[int(x, 16) for x in re.findall(r"0x\w+", row[2])] for row in cells]


def test_random_bits_of_steps_are_those_of_the_page() -> None:
    for key, step, bits in rows_below("| key | step | random bits of elements 0 to 7 |"):
        wanted = [int(x, 16) for x in re.findall(r"0x\w+", bits)]
        assert random_bits(ITEM, SEED, int(key), int(step), 8).tolist() == wanted
        held = Vectors.of(np.zeros((1, 4), np.float32), 8, "bfloat16")
        streams = np.zeros(1, np.uint64)
        set_streams(streams, np.zeros(1, np.int32), np.array([int(key)]), ITEM, SEED)
        gradient = -np.full((1, 8), 0x3F807FFF, np.uint32).view(np.float32)
        pairs, rounding = Cpu().sort(np.zeros(1, np.int32), 1), make_rounding(streams, int(step))
        Cpu().step(Step(held, (), pairs, Cpu().one_id(gradient), Rule("sgd", 1.0), rounding))
        assert held.values[0].tolist() == [0x3F80 + (0x7FFF + r >> 16) for r in wanted]


def test_numbers_are_rounded_as_on_the_page() -> None:
    """To the nearest by the store, stochastically by the slow definition that the kernels are compared with."""
    header = "| float32 | nearest bfloat16 | nearest float16 | random bits | bfloat16 | float16 |"
    for cells in rows_below(header):
        bits, *nearest, noise, brain, half = (int(cell, 16) for cell in cells)
        number = np.array([bits], np.uint32).view(np.float32)
        assert [int(to_bits(number, dtype)[0]) for dtype in ("bfloat16", "float16")] == nearest
        assert [rounded(number[0], noise, dtype) for dtype in ("bfloat16", "float16")] == [brain, half]


def test_passes_and_samples_have_the_orders_of_the_page() -> None:
    """The schedule's orders and the shuffle of a pass, against the page and its own code, run verbatim."""
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
    wanted = dict(rows_below("| what | digest |"))
    tables = (tc.Table(name="item", dim=1, optimizer=tc.optim.SGD(learning_rate=0.1), initializer=tc.init.Zeros()),)
    columns = [(np.array([0, 2, 1]), np.array([5, 1, 2]))]
    digest = write_key_set(tmp_path / "keys", tables, {"item": 3}, columns).digest
    keys = "key set of the table `item` with the keys 0, 2, 1 and the counts 5, 1, 2"
    data = (tmp_path / "keys").read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    assert data[size : size + 48] == np.array([0, 2, 1, 5, 1, 2], "<i8").tobytes()
    assert data[size + 48 :] == np.array([xxh64(data[size : size + 48])], "<u8").tobytes()
    assert digest == hashlib.sha256(data[:size] + data[size + 48 :]).hexdigest() == wanted[keys]
    schedule = Schedule(num_passes=6, dataset_digest="00").digest
    plain = b'{"dataset": "00", "order_seed": null, "version": 1}'
    assert schedule == hashlib.sha256(plain).hexdigest() == wanted["schedule of the dataset `00` without an order seed"]


BITS = 2**64 - 1

# The sanity table of the reference implementation: XXH64 of the first `length` bytes of its test buffer.
REFERENCE = [
    (0, 0, 0xEF46DB3751D8E999),
    (0, 0x9E3779B1, 0xAC75FDA2929B17EF),
    (1, 0, 0xE934A84ADB052768),
    (1, 0x9E3779B1, 0x5014607643A9B4C3),
    (4, 0, 0x9136A0DCA57457EE),
    (14, 0, 0x8282DCC4994E35C8),
    (14, 0x9E3779B1, 0xC3BD6BF63DEB6DF0),
    (222, 0, 0xB641AE8CB691C174),
    (222, 0x9E3779B1, 0x20CB8AB7AE10C14A),
]


def reference_buffer(size: int) -> bytes:
    state, out = 2654435761, bytearray()
    for _ in range(size):
        out.append(state >> 56)
        state = state * 11400714785074694797 & BITS
    return bytes(out)


@pytest.mark.parametrize(("length", "seed", "wanted"), REFERENCE)
def test_xxh64_gives_the_published_values(length: int, seed: int, wanted: int) -> None:
    data = reference_buffer(length)
    assert xxh64(data, seed) == hashing.xxh64(data, seed) == wanted


@given(st.lists(st.binary(max_size=100), max_size=8), st.integers(0, BITS))
def test_xxh64_of_many_strings_is_that_of_each(texts: list[bytes], seed: int) -> None:
    offsets = np.concatenate([[0], np.cumsum([len(t) for t in texts])]).astype(np.int64)
    data = np.frombuffer(b"".join(texts), np.uint8)
    assert xxh64_strings(data, offsets, seed).tolist() == [hashing.xxh64(t, seed) for t in texts]


@settings(max_examples=50)
@given(st.integers(0, 6), st.integers(0, 5), st.integers(0, 2**32))
def test_xxh64_of_words_is_that_of_their_little_endian_bytes(rows: int, width: int, seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, BITS, (rows, width), np.uint64, endpoint=True)
    wanted = [hashing.xxh64(b"".join(int(w).to_bytes(8, "little") for w in row), 0) for row in words]
    assert xxh64_words(words).tolist() == wanted


def test_offsets_that_leave_the_data_are_refused() -> None:
    data = np.zeros(5, np.uint8)
    for offsets in ([0, 6], [3, 2], [-1, 2], []):
        with pytest.raises(ValueError, match="offsets"):
            xxh64_strings(data, np.array(offsets, np.int64))


def test_mix_gives_splitmix64s_published_stream() -> None:
    """The outputs of splitmix64 from state 1234567 are mix of the state after each step."""
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [mix(1234567 + (i + 1) * 0x9E3779B97F4A7C15 & BITS) for i in range(5)] == wanted


@settings(max_examples=50)
@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(0, BITS))
def test_a_keys_hash_is_mix_of_key_and_table(keys: list[int], table_id: int) -> None:
    """Keys are treated as unsigned; read-only arrays are fine."""
    array = np.array(keys, np.int64)
    array.flags.writeable = False
    assert hash_keys(array, table_id).tolist() == [mix((key & BITS) ^ table_id) for key in keys]
