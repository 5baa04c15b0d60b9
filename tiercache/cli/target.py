"""What a path is, and how commands open it: a store or a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.store import Store


def kind_of(path: Path) -> Literal["store", "dataset"]:
    """Return what a directory holds. Raises DatasetError for an unfinished dataset and NotAStoreError for neither."""
    from tiercache.data import manifest as dataset
    from tiercache.data.dataset import PassDataset
    from tiercache.store import NotAStoreError, StoreMissingError
    from tiercache.store.directory import MANIFEST, MARKER

    if (path / MARKER).exists() or (path / MANIFEST).is_file():
        return "store"
    if (path / dataset.MANIFEST).exists():
        return "dataset"
    if (path / dataset.UNFINISHED).exists():
        PassDataset.open(path)  # says what is unfinished
    if not path.exists():
        raise StoreMissingError(f"there is nothing at {path}: give the directory of a store or a dataset")
    raise NotAStoreError(f"{path} is neither a store nor a dataset: give the directory of one")


def open_store(path: Path, commit: int | None = None, *, mode: str = "r") -> Store:
    """Open a store, for reading at ``commit`` where one is given. Raises ValueError for a dataset."""
    from tiercache.store import Store

    if kind_of(path) == "dataset":
        raise ValueError(f"{path} is a dataset: give the directory of a store")
    return Store.open(path, mode=mode, commit=commit)
