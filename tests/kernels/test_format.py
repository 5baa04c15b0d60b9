"""The vectors of docs/format.md, against the kernels and against the store's NumPy."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tiercache.kernels.bits import hash_keys, mix, xxh64, xxh64_words
from tiercache.kernels.initial import NORMAL, UNIFORM, initial_rows, philox4x32
from tiercache.store import hashing

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
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
    """The finaliser, by the kernel and by the store."""
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
        made = philox4x32((0, 0, int(block), 0), (stream & 0xFFFFFFFF, stream >> 32))
        assert list(made) == [int(word, 16) for word in re.findall(r"0x\w+", words)]


@pytest.mark.parametrize(("name", "kind", "a", "b"), [("uniform", UNIFORM, -0.05, 0.05), ("normal", NORMAL, 0.0, 1.0)])
def test_initial_rows_have_the_bits_of_the_page(name: str, kind: int, a: float, b: float) -> None:
    """Six elements: one block and a half."""
    cells = [row for row in rows_below("| key | initializer | bits |") if row[1].startswith(name)]
    out = np.empty((len(cells), 6), np.float32)
    initial_rows(np.array([int(row[0]) for row in cells]), ITEM, SEED, kind, a, b, out)
    assert out.view(np.uint32).tolist() == [[int(x, 16) for x in re.findall(r"0x\w+", row[2])] for row in cells]
