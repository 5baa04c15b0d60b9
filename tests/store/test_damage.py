"""Flipped bytes and files cut short: a sentence each."""

import os

import numpy as np
import pytest

from tests.files import flip
from tests.store.big import blocks_of, dump, file_of, publish, values
from tiercache.store import (
    CorruptBlockError,
    CorruptStoreError,
    Store,
    verify,
)
from tiercache.store.blocks import KEYS, ROWS, STATE


@pytest.mark.parametrize("kind", [ROWS, KEYS, STATE])
def test_a_flipped_byte_is_refused_on_load_and_found_by_verify(big: Store, kind: bytes) -> None:
    """In rows, in keys and in the dense state; the sentence names block, segment and table."""
    dump(big, 0, {1: 500})
    publish(big, 1, bytes(10_000))
    big.close()
    assert big.path is not None
    _, at, size = file_of(big.path, min(name for name in blocks_of(big.path) if name[0] == kind))
    flip(big.path / "blocks.bin", at + 1234 % size, 0x10)
    with Store.open(big.path) as store:
        segment = store.segments[0]
        layout = segment.layouts[0]
        if kind == ROWS:
            out = np.empty(layout.byte_of_page(layout.num_pages), np.uint8)
            words = r"block 0 of segment 0 \(pass 0; tables 'big'\) of the store at .* has checksum"
            with pytest.raises(CorruptBlockError, match=words) as caught:
                store.read(segment, 0, 0, layout.num_pages, out)
            assert (caught.value.segment, caught.value.block, caught.value.tables) == (0, 0, ("big",))
        elif kind == KEYS:
            with pytest.raises(CorruptBlockError, match="over its keys where"):
                store.locate("big", np.arange(500), after=0)
        else:
            with pytest.raises(CorruptStoreError, match=r"block 0 of the dense state of commit 0 .* has checksum"):
                store.state()
    problems = verify(big.path)["problems"]
    assert len(problems) == 1
    assert "has checksum" in problems[0]


@pytest.mark.parametrize("name", ["data.mdb", "blocks.bin"])
@pytest.mark.parametrize("share", [0.0, 4096, 5000, 8192, 0.5, 0.9, 1.0])
def test_a_truncated_file_is_a_sentence_before_anything_is_read(big: Store, name: str, share: float) -> None:
    """At any length: an error in words when it is opened, by any mode and by verify; never a signal."""
    for pass_index in range(3):
        dump(big, pass_index, {pass_index + 3: 300})
        publish(big, pass_index + 1, bytes(10_000))
    big.close()
    assert big.path is not None
    ends = [value.offset + value.size for value in values(big.path)]
    if name == "blocks.bin":
        ends = [block.place + block.size for block in blocks_of(big.path).values()]
    end = max(ends)
    os.truncate(big.path / name, int((end - 1) * share) if share <= 1 else int(share))
    for mode in ("a", "r"):
        with pytest.raises(CorruptStoreError, match=rf"{name} .*: restore the store from a copy"):
            Store.open(big.path, mode=mode)
    problems = verify(big.path)["problems"]
    assert len(problems) == 1
    assert "restore the store from a copy" in problems[0]


def test_verify_names_the_damage_where_no_block_of_keys_is_whole(big: Store) -> None:
    """With nothing left to compare, what was found stands."""
    dump(big, 0, {1: 400})
    publish(big, 1)
    big.close()
    assert big.path is not None
    keys = [block for block in blocks_of(big.path).values() if block.kind == KEYS]
    with (big.path / "blocks.bin").open("r+b") as file:
        for block in keys:
            file.seek(block.place)
            file.write(bytes([255]) * block.size)
    assert any("has checksum" in problem for problem in verify(big.path)["problems"])
