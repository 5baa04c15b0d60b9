"""The manifest of a dataset: the small file that marks it as finished."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tiercache.errors import DatasetError
from tiercache.schema import Schema
from tiercache.store.files import FULL, local_path, read_whole, replace_file

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MANIFEST = "dataset.json"
UNFINISHED = "unfinished"
"""The working folder of an extraction, deleted when the dataset is finished."""
RARE_KEYS = "rare.safetensors"
"""Keys that were too rare for their own row, with counts; only with ``min_count``."""
_OLD_MANIFEST = "passes.json"
VERSION = 3
"""The format version. Version 2 has the same files, but different rules for keys of strings and floats."""
_READ = (2, VERSION)
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def file_name(index: int) -> str:
    """Return the name of the file of a sub-dataset."""
    return f"pass-{index:05d}.safetensors"


def dataset_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a dataset. Raises DatasetError for an invalid one."""
    try:
        return local_path(path, "a dataset that is read", "copy the dataset to this machine and pass its path")
    except (TypeError, ValueError) as error:
        raise DatasetError(str(error)) from error


def is_finished(directory: Path) -> bool:
    """Return True if the directory has a finished dataset; False also for an invalid path."""
    try:
        return (directory / MANIFEST).exists()
    except OSError:
        return False


def new_folder(out: str | os.PathLike[str]) -> Path:
    """Return the directory for a new dataset, and create it if needed. Raises DatasetError if that fails."""
    try:
        directory = local_path(out, "a dataset that is written")
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, TypeError, ValueError) as error:
        raise DatasetError(f"the dataset cannot be written to {out!r} ({error}): choose another directory") from error
    return directory


@contextmanager
def file_errors(directory: Path) -> Iterator[None]:
    """Convert an OSError to a DatasetError that names the path."""
    try:
        yield
    except OSError as error:
        advice = (
            "free some space there, or raise ulimit -f" if error.errno in FULL else "check its permissions and disk"
        )
        raise DatasetError(
            f"{error.filename or directory} cannot be written ({error.strerror or error}): {advice}, and run "
            "the same again"
        ) from error


def checksum_of(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all values of a manifest, including those that its digest leaves out."""
    values = {name: value for name, value in record.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class Recording(BaseModel):
    """The batches of a loader whose keys a recorded sub-dataset has."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    batches: _Count
    lookups: _Count
    """Digests of lookups, of all batches; 0: keys were recorded without the model's forward."""
    batch_size: _Count | None
    """Samples of a batch; None: batches vary in size."""
    first_batch: _Count
    """Batches of the loader before the first one of this sub-dataset."""
    dataset_length: _Count | None
    """Samples of the loader's dataset; None: the loader was an iterable, and samples have no indices."""
    seed: int
    same_draws: bool
    """True if samples draw the random numbers of the recording in every epoch."""
    unbatched: bool | None = None
    """True if the loader yielded samples as they are (``batch_size=None``); None: it had a batch size, or the dataset
    is of a version that did not keep this."""


class SubDatasetRecord(BaseModel):
    """One closed sub-dataset, or the rare keys of a dataset."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    samples: _Count
    rows: dict[str, _Count]
    """Unique keys, by table."""
    values: dict[str, _Count] | None
    """Ids of all lists, by feature with lists of any length; None: it has a key set but no samples."""
    digest: _Digest
    """Digest of its file, and therefore of its content."""
    recorded: Recording | None = None
    """The recorded batches of its keys; None: its keys were extracted or written."""

    def to_record(self) -> dict[str, Any]:
        """Return the values for a JSON file."""
        values = self.model_dump()
        if self.recorded is None:
            del values["recorded"]
        elif self.recorded.unbatched is None:
            del values["recorded"]["unbatched"]
        return values


class _Record(BaseModel):
    """The file as it is written."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal["tiercache dataset"]
    version: int
    digest: _Digest
    schema_: dict[str, Any] = Field(alias="schema")
    passes: list[SubDatasetRecord]
    rare: SubDatasetRecord | None
    options: dict[str, Any]
    inputs: list[dict[str, Any]]
    checksum: _Digest


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A finished dataset."""

    schema: Schema
    passes: tuple[SubDatasetRecord, ...]
    options: dict[str, Any]
    """The options of the extraction that decide the content; empty for datasets from arrays."""
    inputs: tuple[dict[str, Any], ...]
    """Name, size and time of change of each input file; empty for datasets from arrays."""
    rare: SubDatasetRecord | None = None
    version: int = VERSION
    """Version of the rules by which keys were made from its data."""

    @property
    def digest(self) -> str:
        """Hexadecimal digest of the content: the meaning of samples, and the sub-datasets."""
        digest = hashlib.sha256(self.schema.digest.encode())
        for record in self.passes:
            digest.update(record.digest.encode())
        return digest.hexdigest()

    def write(self, directory: Path) -> None:
        """Finish the dataset in ``directory``, in one step."""
        record = {
            "format": "tiercache dataset",
            "version": self.version,
            "digest": self.digest,
            "schema": self.schema.to_record(),
            "passes": [p.to_record() for p in self.passes],
            "rare": None if self.rare is None else self.rare.to_record(),
            "options": self.options,
            "inputs": list(self.inputs),
        }
        record["checksum"] = checksum_of(record)
        replace_file(directory / MANIFEST, json.dumps(record, indent=1).encode())

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of a finished dataset. Raises DatasetError for a missing or damaged one."""
        path = directory / MANIFEST
        if not path.exists():
            if (directory / UNFINISHED).exists():
                raise DatasetError(f"the dataset {directory} is unfinished: run the same extraction again to resume it")
            if (directory / _OLD_MANIFEST).exists():
                raise DatasetError(
                    f"the dataset {directory} has the format of an older tiercache: delete it and extract it again"
                )
            raise DatasetError(f"no dataset found in {directory}: extract it first")
        try:
            text = read_whole(str(path))
            record = _Record.model_validate_json(text)
            if record.version not in _READ:
                known = " and ".join(map(str, _READ))
                raise ValueError(f"it has version {record.version}, this tiercache reads {known}")
            schema = Schema.from_record(record.schema_)
            manifest = cls(
                schema=schema,
                passes=tuple(record.passes),
                options=record.options,
                inputs=tuple(record.inputs),
                rare=record.rare,
                version=record.version,
            )
            names = {table.name for table in schema.tables}
            for one in (*record.passes, *([] if record.rare is None else [record.rare])):
                if one.rows.keys() != names:
                    raise ValueError(f"the rows of a pass are of the tables {', '.join(one.rows)}"[:80])
            if manifest.digest != record.digest:
                raise ValueError("it does not match its own digest")
            if checksum_of(json.loads(text)) != record.checksum:
                raise ValueError("it does not match its own checksum")
        except ValidationError as error:
            first = error.errors()[0]
            seen = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
            raise DatasetError(f"{path} cannot be read: {seen}: delete the dataset and extract it again") from error
        except OSError as error:
            raise DatasetError(f"{path} cannot be read ({error.strerror}): check its permissions and disk") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DatasetError(f"{path} cannot be read: {error}: delete the dataset and extract it again") from error
        return manifest
