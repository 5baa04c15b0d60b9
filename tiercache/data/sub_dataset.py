"""A sub-dataset: the samples of one pass and their key set, in one mapped file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import numpy as np

from tiercache.data.array_file import ArrayFile
from tiercache.data.block_layout import BlockLayout, BlockPlaces, IdOrder
from tiercache.data.keyset import KeySet
from tiercache.data.manifest import Recording, SubDatasetRecord, file_name
from tiercache.errors import DatasetError
from tiercache.kernels.cpu.gathering import check_ids
from tiercache.kernels.cpu.samples import gather_lists, gather_offsets, gather_samples
from tiercache.store.bits import hash_keys, mix
from tiercache.values.ids import FeatureIds

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import DTypeLike, NDArray

    from tiercache.data.sample_layout import SampleLayout

    _Lists = dict[str, NDArray[np.int64]]

_MOST_LAYOUTS = 32  # per dataset, which may have thousands of sub-datasets


class SampleBlock(NamedTuple):
    """Samples in one block of memory."""

    memory: NDArray[np.uint8]
    layout: BlockLayout
    places: BlockPlaces

    def array(self, piece: int, count: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return ``count`` numbers from the start of a piece."""
        begin = self.places.begins[piece]
        return self.memory[begin : begin + count * np.dtype(dtype).itemsize].view(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class EncodedBatch:
    """n samples. Arrays may be views of one another and of the buffers that they were read into."""

    label: NDArray[np.float32] | None
    """(n,); None if the schema has no label."""
    dense: NDArray[np.float32]
    """(n, D), D may be 0."""
    ids: Mapping[str, FeatureIds]
    """The ids of every feature that was read, by its name."""
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    """(n,) each: several labels and kept columns in their own dtype, by name."""
    block: SampleBlock | None = None

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return int(self.dense.shape[0])


class SampleMemory(Protocol):
    """Memory that blocks are read into."""

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return uninitialized memory."""


class SampleBuffers:
    """Memory for the reads of one thread, so that a batch touches no new pages: it is valid until the next read."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return uninitialized memory, which replaces the last."""
        if self._memory.size < num_bytes:
            self._memory = np.empty(num_bytes + (num_bytes >> 3) & ~7, np.uint8)
        return self._memory[:num_bytes]


class SubDataset:
    """The samples and the key set of a pass, mapped at first use until ``close``.

    A sub-dataset of ``write_key_sets`` has a key set but no samples. Each MiB of the file is checked when it is first
    read; a damaged one raises DatasetError. Any number of threads may read at once, each into its own buffers.
    """

    def __init__(self, directory: Path, index: int, record: SubDatasetRecord, layout: SampleLayout) -> None:
        self.index = index
        self.samples = record.samples
        self.digest = record.digest
        """Hexadecimal digest of all its content."""
        self.path = directory / file_name(index)
        self._record, self._layout = record, layout
        self.schema = layout.schema
        self._arrays = layout.file(record.samples, record.rows, record.values, record.recorded)
        self._opened: ArrayFile | None = None
        self.is_recorded, self.has_samples = record.recorded is not None, record.values is not None
        """True if its keys were recorded from the batches of a loader; True unless it has a key set alone."""

    @property
    def whole(self) -> SubDataset:
        """This sub-dataset itself, because it has all keys."""
        return self

    def span(self, table: str) -> slice:
        """Return the range of local ids of a table: all of them."""
        return slice(0, self.rows(table))

    def num_bytes(self) -> int:
        """Return the bytes of its file."""
        return self._arrays.num_bytes

    def check_samples(self) -> None:
        """Raise DatasetError if it has no samples, or its file cannot be opened."""
        if self.is_recorded:
            raise DatasetError(
                f"sub-dataset {self.index} of {self.path.parent} has the key set of a loader, whose samples are in "
                "your own dataset: take its batches from p.loader(dataset)"
            )
        if not self.has_samples:
            raise DatasetError(
                f"sub-dataset {self.index} of {self.path.parent} has a key set but no samples: pass the keys of each "
                "batch to Pass.batch"
            )
        _ = self._file

    def rows(self, table: str) -> int:
        """Return the number of unique keys of a table; opens nothing."""
        return self._record.rows[table]

    def keys(self, table: str) -> NDArray[np.int64]:
        """Return the unique keys of a table in hash order: mapped, read-only."""
        return self.key_set.keys(table)

    def counts(self, table: str) -> NDArray[np.int64]:
        """Return the number of occurrences of each of ``keys(table)``: mapped, read-only."""
        return self.key_set.counts(table)

    @cached_property
    def recorded(self) -> RecordedBatches:
        """The recorded batches of its key set. Raises DatasetError if its keys were not recorded."""
        if self._record.recorded is None:
            raise DatasetError(
                f"sub-dataset {self.index} of {self.path.parent} does not record which samples of your dataset it has: "
                "make the dataset with tc.record_key_sets, or train p.batches() if samples were extracted"
            )
        return RecordedBatches(lambda: self._file, self._record.recorded)

    @property
    def key_set(self) -> KeySet:
        """Its unique keys, mapped."""
        return KeySet(self._file)

    def read(
        self,
        indices: NDArray[np.int64],
        into: SampleMemory | None = None,
        *,
        features: Collection[str] | None = None,
        orders: Sequence[IdOrder] = (),
    ) -> EncodedBatch:
        """Read the samples at ``indices`` (n,), in that order, into one block; an index may repeat.

        features: the features whose ids are read; None: all. orders: groups of ids to place contiguously. The memory is
        new, or from ``into``. Raises IndexError for an index below 0 or past the last sample, and DatasetError for
        damage and for an id outside the key set of its table.
        """
        self.check_samples()
        indices = np.ascontiguousarray(indices, dtype=np.int64)
        if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= self.samples):
            raise IndexError(
                f"samples {indices.min()} .. {indices.max()} were requested, but sub-dataset {self.index} has "
                f"{self.samples}: indices start at 0"
            )
        layout, file = self._block_layout(indices.size, orders, features), self._file
        file.check_rows(layout.arrays, indices)
        begins, offsets = self._find_lists(layout, indices)
        places = layout.fixed or layout.place({name: int(ends[-1]) for name, ends in offsets.items()})
        memory = (SampleBuffers() if into is None else into).take(places.begins[-1])
        block = SampleBlock(memory, layout, places)
        wrong = gather_samples(file.words, indices, places.copies, memory.view(np.int32))
        if layout.fixed is None:
            wrong |= self._gather_lists(block, begins, offsets)
        samples = self._samples(block, indices, offsets)
        if wrong < 0:
            self._refuse_ids(samples)
        return samples

    def num_values(self, feature: str, low: int, high: int) -> int:
        """Return the number of ids of samples [low, high) for a feature with lists of any length."""
        name = f"offsets.{feature}"
        self._file.check(name, np.array([low, high]), np.array([low + 1, high + 1]))
        first, last = self._file.array(name)[[low, high]].tolist()
        return int(last - first)

    def prefetch(self) -> None:
        """Ask the kernel to read the file ahead; returns at once."""
        self._file.prefetch()

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Read every byte and raise DatasetError at the first damaged one. ``progress`` is called with bytes."""
        self._file.check_all(progress)

    def close(self) -> None:
        """Release the mapped file; the next use maps it again. Arrays that look into it keep it alive."""
        self._opened = None

    @property
    def _file(self) -> ArrayFile:
        if self._opened is None:
            self._opened = ArrayFile(self.path, self._arrays, self.digest, f"sub-dataset {self.index}: ")
        return self._opened

    def _block_layout(self, size: int, orders: Sequence[IdOrder], features: Collection[str] | None) -> BlockLayout:
        made, chosen = self._layout.blocks, None if features is None else frozenset(features)
        key = self.index, size, tuple(orders), chosen
        found = made.get(key)
        if found is None:
            if len(made) >= _MOST_LAYOUTS:
                made.clear()
            found = BlockLayout.of(
                self._layout, lambda name: self._arrays.offset(name) // 4, self.rows, size, key[2], chosen
            )
            made[key] = found
        return found

    def _find_lists(self, layout: BlockLayout, indices: NDArray[np.int64]) -> tuple[_Lists, _Lists]:
        """Return the starts (n,) of lists of any length in the file, and the offsets (n + 1,) of their ids."""
        found: tuple[_Lists, _Lists] = ({}, {})
        file = self._file
        for name in (f.name for f in self._layout.ragged if f.name in layout.ids):
            begins, offsets = np.empty(indices.size, np.int64), np.empty(indices.size + 1, np.int64)
            all_offsets, num_values = file.array(f"offsets.{name}"), file.layout.specs[f"ids.{name}"].shape[0]
            file.check(f"offsets.{name}", indices, indices + 2)
            bad = gather_offsets(all_offsets, num_values, indices, begins, offsets)
            if bad >= 0:
                sample = int(indices[bad])
                first, last = all_offsets[sample : sample + 2]
                raise DatasetError(
                    f"{file.label}feature {name!r} of sample {sample} in {file.path} has the values {first} to "
                    f"{last}, but there are {num_values}: delete the dataset and extract it again"
                )
            found[0][name], found[1][name] = begins, offsets
        return found

    def _gather_lists(self, block: SampleBlock, begins: _Lists, offsets: _Lists) -> int:
        """Copy lists of any length to their pieces, and write offsets of bags; below 0: an id is not in its table."""
        layout, file, n, wrong = block.layout, self._file, block.layout.size, 0
        for piece, array, name in layout.lists:
            out = block.array(piece, block.places.num_ids[name], np.int32)
            if array is None:
                out.view(np.float32).fill(1.0)
                continue
            file.check(array, begins[name], begins[name] + np.diff(offsets[name]))
            gather_lists(file.array(array).view(np.int32), begins[name], offsets[name], out)
            if array.startswith("ids."):
                limit = self.rows(layout.features[name].table)
                wrong -= check_ids(out, np.array([0, out.size]), np.array([limit])) >= 0
        for order, pieces, starts in zip(layout.orders, layout.order_pieces, block.places.starts, strict=True):
            if pieces.offsets is None or offsets.keys().isdisjoint(order.features):
                continue
            ends = block.array(pieces.offsets, len(order.features) * n + 1, np.int64)
            ends[0] = 0
            for f, name in enumerate(order.features):
                to, num_ids = ends[1 + f * n : 1 + (f + 1) * n], block.places.num_ids[name]
                own = offsets[name] if name in offsets else _offsets(n, num_ids)
                np.add(own[1:], starts[f], out=to)
        return wrong

    def _samples(self, block: SampleBlock, indices: NDArray[np.int64], offsets: _Lists) -> EncodedBatch:
        layout, n, schema = block.layout, indices.size, self.schema
        label, dense, columns = None, np.empty((n, 0), np.float32), {}
        if schema.label is not None:
            label = block.array(layout.columns["label"], n, np.float32)
        if schema.dense:
            width = len(schema.dense)
            dense = block.array(layout.columns["dense"], n * width, np.float32).reshape(n, width)
        for one, spec in zip(schema.kept, self._layout.kept, strict=True):
            column = columns[one.name] = block.array(layout.columns[spec.name], n, spec.dtype)
            if spec.dtype.itemsize < 4:
                np.take(self._file.array(spec.name), indices, out=column, mode="clip")  # "raise" would copy once more
        return EncodedBatch(label, dense, BlockIds(block, offsets), columns, block)

    def _refuse_ids(self, samples: EncodedBatch) -> NoReturn:
        for name, found in samples.ids.items():
            table = self.schema.feature(name).table
            limit = self.rows(table)
            bad = check_ids(found.ids, np.array([0, found.num_ids]), np.array([limit]))
            if bad >= 0:
                raise DatasetError(
                    f"sub-dataset {self.index}: feature {name!r} has the id {found.ids[bad]} in {self.path}, but "
                    f"table {table!r} has ids 0 to {limit - 1}: delete the dataset and extract it again"
                )
        raise AssertionError("an invalid id became valid")


class RecordedBatches:
    """The arrays of recorded batches, mapped and checked at their first use. Legend: B batches, N samples."""

    def __init__(self, file: Callable[[], ArrayFile], recording: Recording) -> None:
        self._file, self.recording = file, recording

    @property
    def ends(self) -> NDArray[np.int64]:
        """(B,): the end of each batch, in samples."""
        return self._file().whole("ends")

    def indices(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices, in the loader's dataset, of the samples at ``places``."""
        file = self._file()
        file.check("indices", places, places + 1)
        return file.array("indices")[places]

    def digests(self, batch: int) -> NDArray[np.uint64]:
        """Return the digests of the distinct lookups of a batch, ascending."""
        first, last = self._file().whole("lookups")[batch : batch + 2].tolist()
        return self._file().whole("digests")[first:last]


def lookup_digest(keys: NDArray[np.int64], table_id: int) -> int:
    """Return the digest of the keys of a lookup, in any order: ``mix`` of the sum of their hashes and their number."""
    total = np.add.reduce(hash_keys(keys, table_id), dtype=np.uint64, keepdims=True)
    return int(mix(total + np.uint64(keys.size))[0])  # arrays wrap around without a warning


class BlockIds(Mapping[str, FeatureIds]):
    """The ids in a block, by feature. Arrays are made at their first use, because few batches need any of them."""

    def __init__(self, block: SampleBlock, offsets: _Lists) -> None:
        self._block, self._offsets, self._made = block, offsets, dict[str, FeatureIds]()
        self.weighted: Collection[str] = block.layout.weights

    def __getitem__(self, name: str) -> FeatureIds:
        made = self._made.get(name)
        if made is None:
            layout, size = self._block.layout, self._block.places.num_ids[name]
            weights = None
            if name in layout.weights:
                weights = self._block.array(layout.weights[name], size, np.float32)
            offsets = self._offsets.get(name)
            if offsets is None and layout.features[name].length is not None:
                offsets = _offsets(layout.size, size)
            ids = self._block.array(layout.ids[name], size, np.int32)
            made = self._made.setdefault(name, FeatureIds(ids, offsets, weights))
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._block.layout.features)

    def __len__(self) -> int:
        return len(self._block.layout.features)

    def __contains__(self, name: object) -> bool:
        return name in self._block.layout.features


def _offsets(num_lists: int, num_ids: int) -> NDArray[np.int64]:
    """Return the offsets of lists of equal length."""
    return np.arange(num_lists + 1, dtype=np.int64) * (num_ids // max(1, num_lists))
