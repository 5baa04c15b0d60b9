"""Places of the bytes of a store's blobs in its files."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tiercache.store import Store
from tiercache.store.engines.engine import Blob
from tiercache.store.engines.lmdb_map import extents_of, read_map
from tiercache.store.layout import ROWS, block_stride
from tiercache.store.snapshot import BlobNeed


class Place(NamedTuple):
    """Bytes of one blob that some commit needs."""

    file: Path
    at: int
    size: int


def places(path: Path) -> dict[str, list[Place]]:
    """Return the places of the bytes that the commits of a store need, by the name of each blob.

    Rows in Zarr have a place for each field. Only chunks of several blocks are supported.
    """
    with Store.open(path, mode="r") as store:
        needed = store.history.needed
        blobs = {blob.name: blob for one in needed.segments.values() for blob in one.segment.blobs()}
        needs = [need for need in needed.blobs() if need.size > need.first_byte]
    if (path / "blocks.bin").exists():
        entries, found = read_map(path, "the store")[2], {}
        for need in needs:
            runs = extents_of(entries[need.name]).pieces(need.first_byte, need.size - need.first_byte)
            found[need.name] = [Place(path / "blocks.bin", at, size) for at, size in runs]
        return found
    return {need.name: list(_chunks(path, blobs.get(need.name, Blob(need.name, need.size)), need)) for need in needs}


def byte_of(path: Path, name: str, share: float = 0.0) -> tuple[Path, int]:
    """Return the file and offset of a needed byte of a blob, after a share of its first place; blocks have padding."""
    file, at, size = places(path)[name][0]
    return file, at + min(size - 1, int(size * share))


def _chunks(path: Path, blob: Blob, need: BlobNeed) -> Iterator[Place]:
    """Yield the places of one blob on Zarr."""
    if blob.of is None:
        yield Place(path / blob.name, need.first_byte, need.size - need.first_byte)
        return
    (group, layout), (folder, kind) = blob.of, blob.name.rsplit("/", 1)
    first = need.first_byte // block_stride(layout.block_rows, layout.item_bytes(kind)) * layout.block_rows
    arrays = (
        [(field.name, field.words * 4) for field in group.fields] if kind == ROWS else [(kind, layout.item_bytes(kind))]
    )
    for name, item_bytes in arrays:
        (file,) = (path / folder / name).glob("c.*")
        yield Place(file, first * item_bytes, (layout.rows - first) * item_bytes)
