"""The newest manifest of a Zarr store and the records that it names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiercache.store.errors import CorruptStoreError
from tiercache.store.record_chain import Link, Manifest
from tiercache.store.zarr_layout import NODE
from tiercache.store.zarr_objects import LEFTOVER

if TYPE_CHECKING:
    from tiercache.store.zarr_objects import Objects

_LOOKS = 100
"""How often the newest manifest is looked for, where a writer replaces it meanwhile."""


class Records:
    """Finds manifests and reads records. All raise CorruptStoreError."""

    def __init__(self, objects: Objects, label: str) -> None:
        self._objects, self._label = objects, label

    def newest(self, *, create: bool) -> Manifest:
        """Return the newest manifest; that of an empty store where one is made."""
        for _ in range(_LOOKS):
            number = max(self._numbers("manifests"), default=None)
            if number is None:
                made = (key for key in self.sizes("segments", "state") if not key.endswith(LEFTOVER))
                if create and all(key.split("/")[-1] == NODE for key in made):
                    return Manifest(number=0)
                continue
            data = self._get(f"manifests/{number}")
            if data is not None:
                manifest = Manifest.from_bytes(data, f"manifest {number} of {self._label}")
                if manifest.number != number:
                    raise CorruptStoreError(
                        f"manifest {number} of {self._label} says that it is {manifest.number}: "
                        "restore the store from a copy"
                    )
                return manifest
        raise CorruptStoreError(f"the manifest of {self._label} is missing: restore the store from a copy")

    def of(self, manifest: Manifest) -> dict[str, bytes]:
        """Return the records that a manifest names."""
        return manifest.read(lambda name, link: self._get(record_key(name, link)), self._label)

    def follow(self, known: Manifest) -> tuple[Manifest, dict[str, bytes]]:
        """Return the newest manifest and its records, whatever a writer does meanwhile; never one before ``known``."""
        for _ in range(_LOOKS):
            newest = self.newest(create=False)
            if newest.number < known.number:
                raise CorruptStoreError(
                    f"{self._label} is at manifest {newest.number} and was at {known.number} before: "
                    "restore the store from a copy"
                )
            try:
                return newest, self.of(newest)
            except CorruptStoreError:
                if self.newest_number() == newest.number:
                    raise
        raise CorruptStoreError(f"{self._label} changes faster than it can be read: open it again")

    def sizes(self, *folders: str) -> dict[str, int | None]:
        """Return every object below names, with its bytes where the store says them at once."""
        try:
            return self._objects.sizes(*folders)
        except OSError as error:
            raise CorruptStoreError(
                f"{self._label} cannot be listed ({error}): mend that, or restore the store from a copy"
            ) from error

    def newest_number(self) -> int:
        """Return the greatest number of a manifest; 0 where there is none."""
        return max(self._numbers("manifests"), default=0)

    def next_number(self, newest: Manifest) -> int:
        """Return a number that no manifest and no record has or had."""
        return max([newest.number, *self._numbers("manifests"), *self._numbers("records")]) + 1

    def _numbers(self, folder: str) -> list[int]:
        """Return the numbers of manifests, or those of the manifests that wrote records."""
        try:
            names = self._objects.names(folder)
        except OSError as error:
            raise CorruptStoreError(
                f"{folder} of {self._label} cannot be listed ({error}): mend that, or restore the store from a copy"
            ) from error
        if folder == "records":
            names = [name.partition("-")[0] for name in names]
        return [int(name) for name in names if name.isdecimal()]

    def _get(self, key: str) -> bytes | None:
        try:
            return self._objects.get(key)
        except (OSError, ValueError) as error:  # a damaged manifest may name what is no name
            raise CorruptStoreError(
                f"object {key} of {self._label} cannot be read ({error}): mend that, or restore the store from a copy"
            ) from error


def record_key(name: str, link: Link) -> str:
    """Return the name of a record's object."""
    return f"records/{link.number}-{name.replace('/', '.')}"


def manifest_key(manifest: Manifest) -> str:
    """Return the name of a manifest's object."""
    return f"manifests/{manifest.number}"
