"""The store whose bits are flipped, its rows in memory, and the places of its bytes by what they are for."""

from __future__ import annotations

import struct
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store import Adagrad, Cursor, Range, SegmentLayout, Store, Table, Uniform, Zeros, hash_keys
from tiercache.store.lmdb_file import LmdbFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.segment_writer import Block

Places = dict[str, list[tuple[str, int]]]
"""By kind of bytes: files, and bytes in them."""

TABLES = (
    Table(name="items", dim=6, optimizer=Adagrad(learning_rate=0.1), initializer=Zeros()),
    Table(name="users", dim=3, optimizer=Adagrad(learning_rate=0.1), initializer=Uniform(low=-1, high=1)),
)
PASSES, TRAINED, KEYS, DRAWN = 3, 5, 300, 130
PAGE_ROWS, BLOCK_ROWS = 16, 48
LMDB_PAGE, META_BYTES, SLOT_BYTES = 4096, 152, 52


class Training:
    """Made-up passes in a cycle: rows of random bits, each of which is what its key's last pass left."""

    def __init__(self) -> None:
        draw = np.random.default_rng(7)
        self.keys = [
            {t.name: draw.choice(KEYS, DRAWN, replace=False) - KEYS // 2 for t in TABLES} for _ in range(PASSES)
        ]
        self._rows: dict[str, dict[int, NDArray[np.float32]]] = {t.name: {} for t in TABLES}
        self.known: dict[int, dict[str, tuple[NDArray[np.int64], NDArray[np.float32]]]] = {}
        """By passes trained and table: keys (n,) and rows (n, words)."""
        for pass_index in range(TRAINED + 2):
            for table in TABLES:
                keys, rows = self.trained(pass_index, table)
                self._rows[table.name].update(zip(keys.tolist(), rows, strict=True))
            self.known[pass_index + 1] = {
                name: (np.array(sorted(rows)), np.stack([rows[key] for key in sorted(rows)]))
                for name, rows in self._rows.items()
            }

    def trained(self, pass_index: int, table: Table) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the keys of a pass, and the rows that it leaves."""
        keys = self.keys[pass_index % PASSES][table.name]
        draw = np.random.default_rng([pass_index, TABLES.index(table)])
        return keys, draw.random((keys.size, table.row_bytes // 4), np.float32)

    def run(self, store: Store, pass_index: int) -> None:
        """Dump a pass and commit it."""
        layouts: list[SegmentLayout] = []
        blocks: list[Block] = []
        for group in store.groups:
            (table,) = group.tables
            keys, rows = self.trained(pass_index, table)
            uses = np.full(keys.size, pass_index + PASSES)
            for later in range(pass_index + PASSES - 1, pass_index, -1):
                uses[np.isin(keys, self.keys[later % PASSES][table.name])] = later
            order = np.lexsort((hash_keys(keys, table.table_id), uses))
            keys, rows = keys[order], rows[order]
            ranges = [Range(int(use), (int(n),)) for use, n in zip(*np.unique(uses, return_counts=True), strict=True)]
            layout = SegmentLayout.of(
                ranges, row_bytes=table.row_bytes, page_rows=PAGE_ROWS, block_bytes=BLOCK_ROWS * table.row_bytes
            )
            layouts.append(layout)
            for block in range(layout.num_blocks):
                pages = range(*layout.pages_of_block(block))
                packed = [rows[layout.row_of_page(p) : layout.row_of_page(p + 1)] for p in pages]
                data = b"".join(part[:, cut].tobytes() for part in packed for cut in _cuts(table))
                mine = keys[slice(*layout.rows_of_block(block))]
                blocks.append((group.index, block, np.frombuffer(data, np.uint8), mine))
        store.append(pass_index, layouts, blocks)
        store.publish(
            Cursor(pass_index + 1), state=state(pass_index + 1), schedule_digest="cyclic", settings={}, environment={}
        )

    def make(self, path: Path, engine: str) -> None:
        """Make the store that is flipped."""
        with Store.open(path, tables=TABLES, engine=engine, retention=2) as store:
            for pass_index in range(TRAINED):
                self.run(store, pass_index)

    def is_right(self, store: Store, passes: int) -> bool:
        """Whether a store shows so many passes: its cursor, its dense state and every row, no other."""
        if store.commit is None or store.commit.cursor != Cursor(passes) or store.state() != state(passes):
            return False
        for table in TABLES:
            keys, rows = self.known[passes][table.name]
            found = store.lookup(table.name, keys)
            scanned = np.sort(np.concatenate([some for some, _ in store.scan(table.name)]))
            if not np.array_equal(scanned, keys) or not np.array_equal(np.concatenate([*found.values()], 1), rows):
                return False
        return True


def state(passes: int) -> bytes:
    """Return the dense state of a commit."""
    return np.random.default_rng(passes).bytes(3000)


def _cuts(table: Table) -> Iterator[slice]:
    at = 0
    for field in table.fields:
        yield slice(at, at + field.words)
        at += field.words


def places(path: Path, engine: str) -> Places:
    """Return the places of a store's used bytes."""
    found: Places = defaultdict(list)
    if engine == "lmdb":
        for page in (0, 1):
            found["meta"] += [("data.mdb", page * LMDB_PAGE + byte) for byte in range(META_BYTES)]
            found["head"] += [("HEAD", page * LMDB_PAGE + byte) for byte in range(SLOT_BYTES)]
        _tree_places(path, found)
        with Store.open(path, mode="r") as store:
            for block in store.history.needed.blocks(store.groups):
                found["blocks"] += [("blocks.bin", block.place + byte) for byte in range(block.size)]
    else:
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path).as_posix()
            if file.is_file() and name != "writer.lock":
                folder = name.partition("/")[0]
                kind = {"segments": "chunks", "state": "chunks"}.get(folder, folder)
                kind = "metadata" if file.name == "zarr.json" else kind if "/" in name else "description"
                found[kind] += [(name, byte) for byte in range(file.stat().st_size)]
    found["description"] = [("store.json", byte) for byte in range((path / "store.json").stat().st_size)]
    return found


def _tree_places(path: Path, found: Places) -> None:
    """Add the bytes of LMDB's trees that its newest root names, and those of their values."""
    file = LmdbFile(str(path / "data.mdb"))
    newest, data = file.metas()[0], (path / "data.mdb").read_bytes()
    records = {v.offset + byte for v in file.values(newest) for byte in range(v.size)}
    file.close()
    meta = newest.transaction % 2 * LMDB_PAGE
    for kind, root_at in (("free_list", meta + 80), ("tree", meta + 128)):
        waiting = [struct.unpack_from("<Q", data, root_at)[0]]
        while waiting:
            page = waiting.pop()
            if page == (1 << 64) - 1:
                continue
            at = page * LMDB_PAGE
            _, _, flags, lower, upper = struct.unpack_from("<QHHHH", data, at)
            used = [*range(at, at + lower), *range(at + upper, at + LMDB_PAGE)]
            found[kind] += [("data.mdb", byte) for byte in used if byte not in records]
            for node in struct.unpack_from(f"<{(lower - 16) // 2}H", data, at + 16):
                low, high, node_flags, key_bytes = struct.unpack_from("<HHHH", data, at + node)
                if flags & 1:
                    waiting.append(low | high << 16 | node_flags << 32)
                elif node_flags & 1:
                    (large,) = struct.unpack_from("<Q", data, at + node + 8 + key_bytes)
                    found[kind] += [("data.mdb", large * LMDB_PAGE + byte) for byte in range(16)]
    found["records"] = [("data.mdb", byte) for byte in sorted(records)]
