"""What a dataset holds, as the one small file that makes it finished."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tiercache.atomic_io import write_whole
from tiercache.errors import DatasetError
from tiercache.schema import Schema

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MANIFEST", "RARE_KEYS", "UNFINISHED", "Manifest", "SubDatasetRecord", "keys_name", "samples_name"]

MANIFEST = "passes.json"
UNFINISHED = "unfinished"
"""The folder that an extraction works in; it is gone when the dataset is finished."""
RARE_KEYS = "rare.keys.arrow"
"""Keys that were too rare for a row of their own, with counts; only where a least count was asked for."""
_VERSION = 1


def samples_name(index: int) -> str:
    """Return the name of the file with the samples of a sub-dataset."""
    return f"pass-{index:05d}.samples.arrow"


def keys_name(index: int) -> str:
    """Return the name of the key set of a pass."""
    return f"pass-{index:05d}.keys.arrow"


@dataclass(frozen=True, kw_only=True, slots=True)
class SubDatasetRecord:
    """One closed pass."""

    samples: int
    """How many samples it has."""
    rows: dict[str, int]
    """Unique keys, by table."""
    digest: str
    """Over samples and key set."""
    sizes: dict[str, int]
    """Bytes of its files, by name."""
    samples_digest: str | None = None
    """Over its samples, so that the key set can be checked alone; None in sets that were made without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A finished dataset."""

    schema: Schema
    passes: tuple[SubDatasetRecord, ...]
    options: dict[str, Any]
    """What the extraction was asked for, as far as it decides the content; empty for hand-made sets."""
    inputs: tuple[dict[str, Any], ...]
    """Name, size and time of change of each file it was made from; empty for hand-made sets."""
    rare_bytes: int | None = None
    """Bytes of the file of rare keys; None: there is none."""

    @property
    def digest(self) -> str:
        """Hexadecimal digest of the content: what samples mean and what the passes hold."""
        digest = hashlib.sha256(self.schema.digest.encode())
        for record in self.passes:
            digest.update(record.digest.encode())
        return digest.hexdigest()

    def write(self, directory: Path) -> None:
        """Make the dataset in ``directory`` a finished one, in one step."""
        record = {
            "format": "tiercache passes",
            "version": _VERSION,
            "digest": self.digest,
            "schema": self.schema.to_record(),
            "passes": [asdict(p) for p in self.passes],
            "rare_bytes": self.rare_bytes,
            "options": self.options,
            "inputs": list(self.inputs),
        }
        write_whole(directory / MANIFEST, json.dumps(record, indent=1).encode())

    def with_tables_of(self, schema: Schema) -> Manifest:
        """Return the same set with the dims, optimizers, initializers and seeds of ``schema``."""
        return replace(self, schema=schema)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of a finished dataset. Raises DatasetError where there is none, or one damaged."""
        path = directory / MANIFEST
        if not path.exists():
            if (directory / UNFINISHED).exists():
                raise DatasetError(f"the dataset {directory} is unfinished: run the same extraction again, it goes on")
            raise DatasetError(f"there is no dataset in {directory}: extract it first")
        try:
            record = json.loads(path.read_bytes())
            if record["format"] != "tiercache passes":
                raise ValueError("it is no dataset")
            if record["version"] != _VERSION:
                raise ValueError(f"it has version {record['version']}, this tiercache reads {_VERSION}")
            schema = Schema.from_record(record["schema"])
            manifest = cls(
                schema=schema,
                passes=tuple(_checked(SubDatasetRecord(**p), schema) for p in record["passes"]),
                options=dict(record["options"]),
                inputs=tuple(record["inputs"]),
                rare_bytes=record["rare_bytes"],
            )
            if manifest.rare_bytes is not None:
                _check_number(manifest.rare_bytes, "the bytes of rare keys")
            if manifest.digest != record["digest"]:
                raise ValueError("it does not match its own digest")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DatasetError(f"{path} cannot be read: {error}: extract the dataset again") from error
        return manifest


def _checked(record: SubDatasetRecord, schema: Schema) -> SubDatasetRecord:
    """Return a pass as a file described it. Raises ValueError or TypeError where it is none, or has files elsewhere."""
    _check_number(record.samples, "the samples of a pass")
    if not isinstance(record.digest, str) or not isinstance(record.samples_digest, str | None):
        raise TypeError(f"the digests of a pass are {record.samples_digest!r} and {record.digest!r}"[:80])
    for what, numbers in (("rows", record.rows), ("sizes", record.sizes)):
        if not isinstance(numbers, dict):
            raise TypeError(f"the {what} of a pass are {numbers!r}"[:80])
        for name, number in numbers.items():
            _check_number(number, f"{name!r} in the {what} of a pass")
    if record.rows.keys() != {table.name for table in schema.tables}:
        raise ValueError(f"the rows of a pass are of the tables {', '.join(record.rows)}"[:80])
    for name in record.sizes:
        if "/" in name or "\0" in name or name in {"", ".", ".."}:
            raise ValueError(f"it names the file {name!r}, which is none of its folder")
    return record


def _check_number(value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{what} is {str(value)[:40]!r}")
