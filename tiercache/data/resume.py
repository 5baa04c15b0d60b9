"""The state of an unfinished extraction, from which it resumes after any stop."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from tiercache.data.dataset import PassDataset
from tiercache.data.manifest import MANIFEST, UNFINISHED, VERSION, Manifest, SubDatasetRecord
from tiercache.errors import ExtractionError
from tiercache.store.files import FULL, read_whole, replace_file
from tiercache.store.locks import IN_USE

if TYPE_CHECKING:
    from pathlib import Path

    from tiercache.schema import Schema

_STATE = "state.json"
_LOCK = "lock"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractionState:
    """Progress of an extraction: everything before the cursor is in closed passes, or in counted runs."""

    options: dict[str, Any]
    """The options that determine the content, besides the inputs."""
    inputs: tuple[dict[str, Any], ...]
    """The records of the input files, to detect changes."""
    passes: tuple[SubDatasetRecord, ...] = ()
    file_index: int = 0
    """The file of the cursor."""
    row: int = 0
    """The first row of that file that is not done."""
    runs: tuple[SubDatasetRecord, ...] = ()
    """Runs of counted keys on disk."""
    is_counted: bool = False
    version: int = 2
    """Version of the rules that make keys of data (``Manifest.version``); a state without it has version 2."""
    names: tuple[str, ...] | None = None
    """The names in the schema of columns without names; None: the data has names, or a version did not keep them."""
    formats: tuple[str, ...] | None = None
    """The format of each file; None: a version did not keep them."""

    def write(self, folder: Path) -> None:
        """Replace the state in ``folder`` in one step."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("passes", "runs"):
            record[name] = [one.to_record() for one in record[name]]
        replace_file(folder / _STATE, json.dumps(record).encode())

    @classmethod
    def read(cls, folder: Path) -> ExtractionState | None:
        """Return the state in ``folder``; None if there is none yet."""
        path = folder / _STATE
        if not path.exists():
            return None
        try:
            record = json.loads(read_whole(str(path)))
            for name in ("passes", "runs"):
                record[name] = tuple(SubDatasetRecord(**one) for one in record[name])
            record["inputs"] = tuple(record["inputs"])
            for name in ("names", "formats"):
                record[name] = None if record.get(name) is None else tuple(record[name])
            return cls(**record)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ExtractionError(f"{path} cannot be read: {error}: delete {folder.parent} and start over") from error

    def closed(self, record: SubDatasetRecord, file_index: int, row: int) -> ExtractionState:
        """Return the state after one more pass, with the cursor at its end."""
        return replace(self, passes=(*self.passes, record), file_index=file_index, row=row)

    def check_same(self, begin: ExtractionState, where: Path) -> None:
        """Raise ExtractionError if options, inputs, names, formats or rules differ from the work in ``where``."""
        check_rules(self.version, where)
        check_same(self.options, self.inputs, begin.options, begin.inputs, where)
        check_names(self.names, begin.names, where)
        check_formats(self.formats, begin.formats, where)


def check_rules(version: int, where: Path) -> None:
    """Raise ExtractionError if keys in ``where`` follow other rules: a string must have one key in a dataset."""
    if version != VERSION:
        raise ExtractionError(
            f"{where} was extracted by the rules of dataset version {version}, but strings and floats become keys "
            f"by the rules of version {VERSION} now: extract the new files into another directory, or all files again"
        )


def check_names(before: tuple[str, ...] | None, now: tuple[str, ...] | None, where: Path) -> None:
    """Raise ExtractionError if the data was read with other names of columns; None: the data has names."""
    if None not in (before, now) and before != now:
        seen = f"[source] columns was {_short(before)} and is now {_short(now)}"
        raise ExtractionError(
            f"{where} holds an extraction of the same data with different names ({seen}): choose another directory, or "
            "delete this one to start over"
        )


def check_formats(before: tuple[str, ...] | None, now: tuple[str, ...] | None, where: Path) -> None:
    """Raise ExtractionError if the same files were read in other formats; None: unknown."""
    for old, new in zip(before or (), now or (), strict=False):
        if old != new:
            seen = f"a file was read as {old} and is {new} now"
            raise ExtractionError(
                f"{where} holds an extraction from another format ({seen}): choose another directory, or delete this "
                "one to start over"
            )


def check_same(
    old_options: dict[str, Any],
    old_inputs: tuple[dict[str, Any], ...],
    options: dict[str, Any],
    inputs: tuple[dict[str, Any], ...],
    where: Path,
) -> None:
    """Raise ExtractionError if options or inputs differ from the old ones, naming the first that does."""
    advice = "choose another directory, or delete this one to start over"
    append = "add files to a finished dataset with append=True (--append)"
    for name in sorted({*old_options, *options}, key=lambda name: (name != "schema", name)):
        if old_options.get(name) != options.get(name):
            seen = _difference(name, old_options.get(name), options.get(name))
            raise ExtractionError(f"{where} holds an extraction with different options ({seen}): {advice}")
    if len(old_inputs) != len(inputs):
        seen = f"it had {len(old_inputs)} files and now has {len(inputs)}"
        raise ExtractionError(f"{where} holds an extraction of other data ({seen}): {append}, {advice}")
    for before, now in zip(old_inputs, inputs, strict=True):
        if before != now:
            changed = next(name for name in before if before[name] != now.get(name))
            seen = f"{before['name']}: its {changed} was {before[changed]} and is now {now[changed]}"
            raise ExtractionError(f"{where} holds an extraction of other data ({seen}): {append}, {advice}")


class WorkFolder:
    """The folder ``unfinished`` of a dataset in progress, locked by one process at a time."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.path = out / UNFINISHED
        if "\0" in str(out):
            raise ExtractionError(
                f"the path {str(out)!r} has a NUL character: choose another directory for the dataset"
            )
        try:
            if out.exists() and not out.is_dir():
                raise ExtractionError(f"{out} is not a directory: choose another path for the dataset")
            if out.exists() and not self.path.exists() and not (out / MANIFEST).exists() and any(out.iterdir()):
                raise ExtractionError(f"{out} holds other files but no dataset: choose an empty or new directory")
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / _LOCK).open("a+b")
        except OSError as error:
            if error.errno in FULL:
                raise
            raise ExtractionError(
                f"{out} is not writable ({error.strerror}): choose another directory, or change its permissions"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            if error.errno not in IN_USE:
                raise ExtractionError(
                    f"the file system of {out} does not lock files ({error.strerror}), so nothing would stop a second "
                    "extraction: choose a directory on one that has flock"
                ) from error
            raise ExtractionError(
                f"another process is extracting into {out}: wait for it, or choose another directory"
            ) from error

    def clear(self, keep: set[str]) -> None:
        """Delete the open pass of an interrupted run, and files of passes that are not in ``keep``."""
        for path in [*self.path.glob("pass-*"), *self.out.glob("pass-*.safetensors")]:
            if path.parent == self.path or path.name not in keep:
                path.unlink()

    def remove(self) -> None:
        """Delete the folder: the dataset is finished. A leftover stage on a cluster may still write in it."""
        while self.path.exists():
            try:
                shutil.rmtree(self.path)
            except OSError as error:
                if error.errno not in {errno.ENOENT, errno.ENOTEMPTY}:
                    raise
        self._lock.close()

    def close(self) -> None:
        """Release the lock; the files stay."""
        self._lock.close()


def reopened(
    out: Path, manifest: Manifest, schema: Schema, options: dict[str, Any], inputs: tuple[dict[str, Any], ...]
) -> PassDataset:
    """Return the finished dataset in ``out``. Raises ExtractionError if it has other options or inputs."""
    check_same(manifest.options, manifest.inputs, options, inputs, out)
    WorkFolder(out).remove()  # left if the extraction was killed at its end
    if manifest.schema != schema:
        replace(manifest, schema=schema).write(out)  # with other dims, optimizers, initializers or seeds
    return PassDataset.open(out)


def _difference(name: str, before: Any, now: Any) -> str:
    """Return the difference between two values of an option, in terms of the schema."""
    if name == "schema":
        return "the schema now has different columns, features or tables"
    if name == "groups":
        bytes_of = [{table: row for tables, row in groups for table in tables} for groups in (before, now)]
        for table in sorted(set(bytes_of[0]).intersection(bytes_of[1])):
            old, new = (rows[table] for rows in bytes_of)
            if old != new:
                return (
                    f"a row of table {table!r} took {old} bytes on the device but now takes {new}, because of its dim, "
                    "dtype or optimizer"
                )
        return "tables are now grouped differently, because of their dims, dtypes or optimizers"
    return f"{name} was {_short(before)} and is now {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:18] + "..." + text[-18:]
