"""The key index, on every machine, against a dict."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import every_machine, machine, machines
from tests.kernels.shim.device import ORDERS, ShimDevice, device_for
from tiercache.kernels.cpu.hashing import hash_keys
from tiercache.kernels.cpu.key_index import KeyIndex, KeySet, Missing, bytes_for
from tiercache.kernels.cuda import key_index as cuda_key_index

MIN = -(2**63)
TABLE_IDS = np.array([7, 2**63 + 11, 7 ^ 5], np.uint64)
"""The last is chosen so that key k of table 0 and key k ^ 5 of table 2 have one hash."""
MASK = 2**64 - 1


def unmix(value: int) -> int:
    value ^= value >> 31 ^ value >> 62
    value = value * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    value ^= value >> 27 ^ value >> 54
    value = value * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    return value ^ value >> 30 ^ value >> 60


def keys_of_hashes(hashes: list[int], table_id: int) -> np.ndarray:
    keys = np.array([unmix(h) ^ table_id for h in hashes], np.uint64).view(np.int64)
    assert hash_keys(keys, table_id).tolist() == hashes
    return keys


SMALL = st.sampled_from([MIN, MIN + 1, MIN + 2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 2**63 - 1])
SAME_HOME = st.sampled_from(keys_of_hashes([(i << 40) + 3 for i in range(8)], 7).tolist())
KEYS = st.one_of(SMALL, SAME_HOME)
SETS = st.lists(st.tuples(st.integers(0, 2), st.lists(KEYS, max_size=20, unique=True)), max_size=6)


class Index:
    """An index on a machine, and the dict that its answers are compared with."""

    def __init__(self, m: Any, room: int) -> None:
        self.m, self.held = m, m.index(room, TABLE_IDS)
        self.known: dict[tuple[int, int], int] = {}

    def clear(self) -> None:
        self.held.clear()
        self.known.clear()

    def extend(self, *key_sets: KeySet) -> None:
        self.held.extend([KeySet(table, self.m.place(keys), first) for table, keys, first in key_sets])
        for table, keys, first in key_sets:
            self.known |= {(table, key): i for i, key in enumerate(keys.tolist(), first)}
        assert self.held.count == len(self.known)

    def find(self, keys: np.ndarray, starts: np.ndarray, tables: np.ndarray) -> tuple[list[int], Missing]:
        if self.m.kind == "cpu":
            positions = np.full(keys.size, 99, np.int32)
            missing = self.held.find(keys, starts, tables, positions)
            return positions.tolist(), missing
        counted, out = cuda_key_index.MissingKeys(self.m.device), self.m.array((keys.size,), np.int32)
        self.held.find(self.m.place(keys), starts, tables, out, counted)
        return self.m.read(out).tolist(), counted.read()

    def check(self, *asked: tuple[int, list[int]]) -> None:
        keys = np.array([key for _, batch in asked for key in batch], np.int64)
        starts = np.cumsum([0, *(len(batch) for _, batch in asked)])
        wanted = [self.known.get((table, key), -1) for table, batch in asked for key in batch]
        lost = [i for i, position in enumerate(wanted) if position < 0]
        told = Missing(len(lost), lost[0] if lost else -1)
        assert self.find(keys, starts, np.array([table for table, _ in asked], np.int64)) == (wanted, told)


def indexes(kind: str, room: int) -> Iterator[Index]:
    for m in machines(kind):
        yield Index(m, room)


@every_machine
@settings(max_examples=60)
@given(sets=SETS, asked=SETS, turn=st.integers(0, 2), seed=st.integers(0, 99))
def test_an_index_answers_as_a_dict(
    kind: str, sets: list[tuple[int, list[int]]], asked: list[tuple[int, list[int]]], turn: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    with machine(kind, turn) as m:
        index = Index(m, 120)
        for table, batch in sets:
            new = [key for key in batch if (table, key) not in index.known]
            index.extend(KeySet(table, np.array(new, np.int64), int(rng.integers(0, 2**31 - 20))))
        index.check(*asked, *sets)


@every_machine
@pytest.mark.parametrize("size", [0, 1, 12, 13, 819, 3276])
def test_key_sets_fill_an_index_to_four_fifths(kind: str, size: int) -> None:
    """Two tables with the same keys fill it to its last allowed place; one more key is refused, and nothing is lost."""
    rng = np.random.default_rng(size)
    keys = np.concatenate([[MIN, MIN + 1], rng.integers(-(2**62), 2**62, max(0, size // 2 - 2))])[: size // 2]
    others = np.concatenate([keys, [77]])[: size - keys.size]
    for index in indexes(kind, size):
        index.extend(KeySet(0, keys, 0), KeySet(1, others, size))
        more = np.arange(index.held.capacity * 4 // 5 - size) * 3 + 2**62
        index.extend(KeySet(2, more, 2 * size))
        one = np.array([5])
        with pytest.raises(ValueError, match=r"room for .* create one with more room. Nothing was changed"):
            index.extend(KeySet(2, one, 5))
        index.check((0, keys.tolist()), (1, others.tolist()), (2, [*more.tolist(), 5, 1]), (0, [9, MIN, 2**62]))
        index.clear()
        index.extend(KeySet(1, one, 3))
        index.check((0, [5, *keys[:9].tolist()]), (1, [5, MIN]))


@every_machine
def test_keys_of_one_home_are_found_round_the_end_of_the_index(kind: str) -> None:
    size = 1000
    hashes = [(i << 30) + 0xFFFF for i in range(2 * size)]
    first, second = (keys_of_hashes(hashes, int(table_id)) for table_id in TABLE_IDS[:2])
    for index in indexes(kind, 2 * size):
        index.extend(KeySet(0, first[:size], 0), KeySet(1, second[size:], size))
        index.check((0, first.tolist()[::50]), (1, second.tolist()[::50]))


@every_machine
@pytest.mark.parametrize("step", [1, 7, 300, 2000])
def test_an_index_is_extended_by_stretches(kind: str, step: int) -> None:
    """With two tables that have the same keys, INT64_MIN among them; it has the promised number of bytes."""
    keys = np.concatenate([[MIN], np.random.default_rng(0).integers(-(2**62), 2**62, 300 if step > 1 else 20)])
    for index in indexes(kind, 2 * keys.size):
        for t in (0, 1):
            for first in range(0, keys.size, step):
                index.extend(KeySet(t, keys[first : first + step], t * keys.size + first))
        promised = bytes_for if kind == "cpu" else cuda_key_index.bytes_for
        assert index.held.nbytes == promised(2 * keys.size, TABLE_IDS.size)
        index.check((0, keys.tolist()), (1, [*keys.tolist(), 5]), (2, [0, MIN]))


PAUSE = """
#line 1 "pause"
inline bool await_others() {
    shim::shim_switch(&shim::current->stack_pointer, shim::scheduler);
    return true;
}
"""


@pytest.mark.parametrize("planted", [False, True])
def test_threads_that_overtake_each_other_lose_no_key_on_cuda(planted: bool) -> None:
    """All pause between seeing an empty place and taking it; without the compare-and-swap keys would be lost."""

    def changed(_: str, text: str) -> str:
        text = text.replace("__ldcg(at) == EMPTY &&", "__ldcg(at) == EMPTY && await_others() &&")
        if planted:
            swap, exchange = (
                "atomicCAS(at, EMPTY, static_cast<uint64>(key))",
                "atomicExch(at, static_cast<uint64>(key))",
            )
            text = text.replace(swap, exchange)
            text = text.replace("== EMPTY) {\n            at[1]", "!= 1) {\n            at[1]")
        return PAUSE + text

    keys = np.concatenate([keys_of_hashes([(i << 40) + 64 for i in range(30)], 7), np.arange(600)])
    for order in ORDERS:
        device, found = ShimDevice(order, changed=changed), np.zeros(keys.size, np.int32)
        there = cuda_key_index.KeyIndex(device, keys.size, TABLE_IDS)
        there.extend([KeySet(0, device.place(keys), 0)])
        there.find(device.place(keys), np.array([0, keys.size]), np.zeros(1, np.int64), found)
        assert np.array_equal(found, np.arange(keys.size)) != planted
        device.close()


def test_missing_keys_add_up_until_they_are_forgotten_on_cuda() -> None:
    device = device_for("forward")
    there, missing = cuda_key_index.KeyIndex(device, 4, TABLE_IDS), cuda_key_index.MissingKeys(device)
    there.extend([KeySet(0, device.place(np.array([8])), 0)])
    one = np.zeros(1, np.int64)
    for keys in ([8, 8, 1], [8, 2]):
        found = device.empty(len(keys), np.int32)
        there.find(device.place(np.array(keys)), np.array([0, len(keys)]), one, found, missing)
    assert missing.read() == Missing(2, 1)
    missing.forget()
    assert missing.read() == Missing(0, -1)


def test_an_index_is_no_larger_than_promised() -> None:
    for room in (13, 100, 1638, 1639, 50_000, 52_428, 52_429):
        index = KeyIndex(room, TABLE_IDS)
        assert index.capacity.bit_count() == 1
        assert room <= 0.8 * index.capacity
        assert 20 * room <= index.nbytes <= 40 * room + 16 * 13


def test_what_an_index_cannot_hold_is_refused() -> None:
    device, keys, where = ShimDevice(), np.arange(3), np.zeros(3, np.int32)
    with pytest.raises(ValueError, match="at most 2,147,483,647 fit"):
        KeyIndex(2**31, TABLE_IDS)
    for some in (KeyIndex(10, TABLE_IDS), cuda_key_index.KeyIndex(device, 10, TABLE_IDS)):
        for key_set, said in (
            (KeySet(0, keys, 2**31 - 2), r"positions 2,147,483,646 to 2,147,483,648 must be"),
            (KeySet(0, keys, -1), "positions -1 to 1"),
            (KeySet(3, keys, 0), "unknown table 3: the index has 3"),
            (KeySet(0, np.arange(13), 0), "13 more were given"),
        ):
            with pytest.raises(ValueError, match=said):
                some.extend([key_set])
        for starts, tables, said in (
            (np.array([0, 2]), np.zeros(1, np.int64), "do not fit entry starts"),
            (np.array([0, 3]), np.array([-1]), "unknown table -1"),
        ):
            with pytest.raises(ValueError, match=said):
                some.find(keys, starts, tables, where)
        assert some.count == 0
    assert device.launches == ["key_index.clear"]
