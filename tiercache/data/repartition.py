"""Smaller passes from an existing dataset: for fewer devices, or devices with less memory."""

from __future__ import annotations

import fcntl
import os
import shutil
from bisect import bisect_left
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.data.array_file import ArrayFileWriter
from tiercache.data.dataset import PassDataset
from tiercache.data.manifest import MANIFEST, RARE_KEYS, Manifest, SubDatasetRecord, file_errors, file_name, new_folder
from tiercache.data.pass_builder import RowBudget
from tiercache.data.sub_dataset import EncodedBatch, SampleBuffers, SubDataset
from tiercache.errors import BudgetError, DatasetError
from tiercache.sizes import parse_bytes
from tiercache.store.files import publish, sync
from tiercache.store.records import integer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.schema import Schema

_CHUNK_SAMPLES = 1 << 15
_ALIGN = 8192
_PARTS = "parts"
"""The name of the option with the samples of each part, for each pass of the source."""


def repartition(
    passes: PassDataset | str | Path,
    out: str | Path,
    *,
    device_budget: int | str | None = None,
    devices: int = 1,
    rows: int | None = None,
    batch_multiple: int | None = None,
) -> PassDataset:
    """Cut every pass into parts that fit, and return the new dataset in the directory ``out``.

    The samples keep their order. Batches whose size divides ``batch_multiple`` stay the same if samples are not
    shuffled. A part begins at a multiple of ``batch_multiple`` samples of its pass (None: as extracted, else 8,192) and
    is as long as fits: its rows on ``devices`` devices of ``device_budget`` each, as an extraction counts them, or its
    keys, of all tables, in ``rows``. Passes that fit stay whole: their files are linked, or copied to another file
    system. Key sets, counts and digests equal those that an extraction of these parts would write.

    Memory: a few MiB, about 30,000 samples (or ``batch_multiple``) and at most 13 bytes for each key of a pass. Passes
    that are cut are read twice. After a kill, call again; a finished dataset of the same arguments is returned
    unchanged. Raises BudgetError if ``batch_multiple`` samples do not fit, DatasetError for passes without samples, for
    a full disk, and for a directory with another dataset or in use by another process, and ValueError unless exactly
    one of ``device_budget`` and ``rows`` is given.
    """
    old = passes if isinstance(passes, PassDataset) else PassDataset.open(passes)
    if (device_budget is None) == (rows is None):
        raise ValueError(
            "pass either device_budget or rows (--device-budget or --rows), the limit of each part of a pass"
        )
    if batch_multiple is None:
        batch_multiple = int(old.manifest.options.get("batch_multiple", _ALIGN))
    batch_multiple, devices = integer(batch_multiple, "batch_multiple"), integer(devices, "devices")
    rows = None if rows is None else integer(rows, "rows")
    if batch_multiple < 1 or (rows is not None and rows < 1):
        raise ValueError(f"invalid batch_multiple {batch_multiple} or rows {rows}: expected whole numbers, at least 1")
    if devices < 1 or (rows is not None and devices > 1):
        raise ValueError(f"invalid devices {devices}: expected a whole number, at least 1, and only with device_budget")
    num_bytes = None if device_budget is None else parse_bytes(device_budget)
    limit: RowBudget | _Keys = _Keys(rows or 0) if num_bytes is None else RowBudget(old.tables, num_bytes, devices)
    options: dict[str, Any] = {
        "split_of": old.digest, "device_budget": num_bytes, "rows": rows, "batch_multiple": batch_multiple,
    }  # fmt: skip
    if devices > 1:  # key sets made for one device do not record devices
        options["devices"] = devices
    directory = new_folder(out)
    with file_errors(directory), _exclusive(directory):
        if (directory / MANIFEST).exists():
            return _finished(directory, options)
        return _split(old, directory, limit, options)


def _split(old: PassDataset, directory: Path, limit: RowBudget | _Keys, options: dict[str, Any]) -> PassDataset:
    batch_multiple = options["batch_multiple"]
    records: list[SubDatasetRecord] = []
    parts: list[list[int]] = []
    for source in old.passes:
        if source.is_recorded:
            raise DatasetError(
                f"{old.path} has key sets of a loader but no samples, so it cannot be cut: record key sets again, with "
                "tc.record_key_sets and the smaller device_budget"
            )
        source.check_samples()
        sizes = []
        for low, high, seen in _parts(source, old.schema, limit, batch_multiple):
            if high - low == source.samples:
                _link_or_copy(source.path, directory / file_name(len(records)))
                records.append(old.manifest.passes[source.index])
            else:
                records.append(_write(old, source, directory, len(records), low, high, seen))
            sizes.append(high - low)
        parts.append(sizes)
        source.close()
    if old.manifest.rare is not None:
        _link_or_copy(old.path / RARE_KEYS, directory / RARE_KEYS)
    Manifest(
        schema=old.schema,
        passes=tuple(records),
        options=options | {_PARTS: parts},
        inputs=old.manifest.inputs,
        rare=old.manifest.rare,
        version=old.manifest.version,
    ).write(directory)
    return PassDataset.open(directory)


@contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Lock the folder itself, so that a killed call leaves no lock. Raises DatasetError if another process has it."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DatasetError(
                f"another process is writing a dataset to {directory}: wait for it, or choose another directory"
            ) from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class SplitSource:
    """The source of a split dataset."""

    digest: str
    parts: tuple[tuple[int, ...], ...]
    """For each pass of the source, the samples of each part."""


def split_source(passes: PassDataset) -> SplitSource | None:
    """Return the source of a dataset of ``repartition``; None for other datasets."""
    options = passes.manifest.options
    if "split_of" not in options:
        return None
    try:
        return SplitSource(str(options["split_of"]), tuple(tuple(map(int, sizes)) for sizes in options[_PARTS]))
    except (KeyError, TypeError, ValueError) as error:
        raise DatasetError(f"{passes.path} does not record its source ({error}): split it again") from error


def split_cursor(
    passes: PassDataset,
    cursor: tuple[int, int],
    *,
    order: Mapping[str, object] | None = None,
    order_seed: int | None = None,
) -> tuple[int, int]:
    """Return the cursor in ``passes`` that matches ``cursor`` in the dataset they were split from.

    ``cursor``: the next pass, and its samples that are already trained. ``order``: the sample order of that pass, from
    a commit inside it. Raises DatasetError for a dataset that was not split, and if no cursor of the new schedule has
    the same samples before it: inside a pass that is shuffled or took raw keys, and inside an epoch of a seeded order.
    """
    source = split_source(passes)
    if source is None:
        raise DatasetError(f"the dataset {passes.path} was not split from another: pass one made by repartition")
    parts, (pass_index, sample) = source.parts, cursor
    epoch, place = divmod(pass_index, len(parts))
    if order_seed is not None and (place or sample):
        raise DatasetError(
            f"training is at pass {pass_index}, inside epoch {epoch} of a seeded order, which smaller sub-datasets "
            "would not follow: train to the end of the epoch, or keep the sub-datasets as they are"
        )
    if sample and (order is None or order.get("shuffle", True)):
        raise DatasetError(
            f"training is {sample:,} samples inside pass {pass_index}, whose samples are shuffled or were looked "
            "up by raw keys, so they do not end at a part of its sub-dataset: train to the end of the pass, then "
            "split"
        )
    part, sizes = 0, parts[place]
    while part + 1 < len(sizes) and sample >= sizes[part]:
        sample -= sizes[part]
        part += 1
    return epoch * len(passes) + sum(map(len, parts[:place])) + part, sample


class _Keys:
    """A limit of the number of keys of all tables, with the methods of `RowBudget`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def fits(self, rows: Sequence[int]) -> bool:
        return sum(rows) <= self._limit

    def close(self, rows: Sequence[int]) -> None:
        pass

    def excess(self, rows: Sequence[int]) -> str:
        return f"has {sum(rows):,} keys, but a part may have {self._limit:,}"


def _finished(directory: Path, options: dict[str, Any]) -> PassDataset:
    dataset = PassDataset.open(directory)
    expected = {"devices": None} | options
    if {name: dataset.manifest.options.get(name) for name in expected} != expected:
        raise DatasetError(f"{directory} already holds another dataset: choose another directory")
    return dataset


def _parts(
    source: SubDataset, schema: Schema, limit: RowBudget | _Keys, batch_multiple: int
) -> Iterator[tuple[int, int, dict[str, NDArray[np.bool_]]]]:
    """Yield first sample and end of each part of a pass, and masks of its keys that the part has, by table."""
    names = [table.name for table in schema.ordered_tables]
    rows = [source.rows(name) for name in names]
    if limit.fits(rows):
        limit.close(rows)
        yield 0, source.samples, {}
        return
    chunk = max(1, _CHUNK_SAMPLES // batch_multiple) * batch_multiple
    buffers, first, low = SampleBuffers(), 0, 0
    seen = {name: np.zeros(count, dtype=np.bool_) for name, count in zip(names, rows, strict=True)}
    rows = [0] * len(names)
    while low < source.samples:
        high = min(source.samples, low + chunk)
        samples = source.read(np.arange(low, high), buffers)
        new = [_new_ids(schema, samples, name, seen[name], batch_multiple) for name in names]
        units = -(-(high - low) // batch_multiple)
        counts = [np.bincount(unit, minlength=units) for _, unit in new]
        grown_UT = np.cumsum(counts, axis=1).T + np.array(rows)
        fitting = bisect_left(range(units), True, key=lambda unit: not limit.fits(grown_UT[unit].tolist()))
        for name, (ids, unit) in zip(names, new, strict=True):
            seen[name][ids[unit < fitting]] = True
        if fitting:
            rows = grown_UT[fitting - 1].tolist()
        low = min(high, low + fitting * batch_multiple)
        if fitting < units:
            if low == first:
                raise BudgetError(
                    f"a part of sub-dataset {source.index} of {min(batch_multiple, high - low):,} samples from sample "
                    f"{low:,} on {limit.excess(grown_UT[0].tolist())}: raise it, or lower batch_multiple (now "
                    f"{batch_multiple:,})"
                )
            limit.close(rows)
            yield first, low, seen
            first, rows = low, [0] * len(names)
            for marks in seen.values():
                marks[:] = False
    limit.close(rows)
    yield first, source.samples, seen


def _new_ids(
    schema: Schema, samples: EncodedBatch, table: str, seen: NDArray[np.bool_], batch_multiple: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the ids of a table that are not ``seen`` yet, each once, and the first unit with it."""
    ids, units = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
    unit_N = np.arange(samples.num_samples, dtype=np.int64) // batch_multiple
    for feature in schema.features:
        if feature.table == table:
            entry = samples.ids[feature.name]
            unit_E = unit_N if entry.offsets is None else np.repeat(unit_N, np.diff(entry.offsets))
            new = ~seen[entry.ids]
            ids.append(entry.ids[new])
            units.append(unit_E[new])
    all_ids, all_units = np.concatenate(ids), np.concatenate(units)
    order = np.lexsort((all_units, all_ids))
    all_ids, all_units = all_ids[order], all_units[order]
    first = np.append(True, all_ids[1:] != all_ids[:-1])[: all_ids.size]
    return all_ids[first], all_units[first]


def _write(
    old: PassDataset,
    source: SubDataset,
    directory: Path,
    index: int,
    low: int,
    high: int,
    seen: dict[str, NDArray[np.bool_]],
) -> SubDatasetRecord:
    """Write samples [low, high) of a pass as pass ``index`` of the new set, on disk on return."""
    place = {name: np.cumsum(marks, dtype=np.int32) - np.int32(1) for name, marks in seen.items()}
    rows = {name: int(np.count_nonzero(marks)) for name, marks in seen.items()}
    counts = {name: np.zeros(size, np.int64) for name, size in rows.items()}
    values = {f.name: source.num_values(f.name, low, high) for f in old.layout.ragged}
    path, buffers, done = directory / file_name(index), SampleBuffers(), dict.fromkeys(values, 0)
    temporary = path.with_name(path.name + ".tmp")
    writer = ArrayFileWriter(temporary, old.layout.file(high - low, rows, values))
    for name in values:
        writer.write(f"offsets.{name}", 0, np.zeros(1, np.int64))
    for begin, end in pairwise([*range(low, high, _CHUNK_SAMPLES), high]):
        samples, row, ids = source.read(np.arange(begin, end), buffers), begin - low, {}
        for feature in old.schema.features:
            ids[feature.name] = place[feature.table][samples.ids[feature.name].ids]
            np.add.at(counts[feature.table], ids[feature.name], 1)
        for name, at, array in old.layout.parts(samples, samples.ids, ids, row, done):
            writer.write(name, at, array)
        if old.schema.singles:
            writer.write("ids", row, np.stack([ids[f.name] for f in old.schema.singles], axis=1))
    for name, marks in seen.items():
        writer.write(f"keys.{name}", 0, np.asarray(source.keys(name))[marks])
        writer.write(f"counts.{name}", 0, counts[name])
    digest = writer.finish()
    sync(temporary)
    publish(temporary, path)
    return SubDatasetRecord(samples=high - low, rows=rows, values=values, digest=digest)


def _link_or_copy(source: Path, target: Path) -> None:
    """Link a file that never changes, or copy it; on disk on return."""
    temporary = target.with_name(target.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, temporary)
        sync(temporary)
    publish(temporary, target)
