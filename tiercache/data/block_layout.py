"""The layout of n samples of one sub-dataset in one block of memory: one kernel fills it, one copy moves it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.data.sample_layout import SampleLayout, column_array
from tiercache.kernels.cpu.samples import NO_LIMIT, ONES, STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.schema import Feature

_ALIGNED_BYTES = 128  # of an array that a kernel reads


class IdOrder(NamedTuple):
    """Features whose ids are contiguous, feature after feature, as one lookup takes them."""

    features: tuple[str, ...]
    bags: bool = False
    """True if the block has the offsets of bags, of all features one after another, and the weights of all ids if the
    data has any weights for them."""


class _Piece(NamedTuple):
    """A part of the block."""

    num_bytes: int
    """Per id of feature ``ragged``, if given; else in all."""
    ragged: str | None = None
    is_aligned: bool = True


class OrderPieces(NamedTuple):
    """The pieces of one order."""

    ids: int
    """The first of F pieces."""
    weights: int | None
    """The first of F pieces."""
    offsets: int | None


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class BlockLayout:
    """The pieces of a block and the copies that fill them. Lists of any length are placed separately for each block."""

    size: int
    orders: Sequence[IdOrder]
    features: Mapping[str, Feature]
    """The features that are read, by name in the schema's order."""
    arrays: frozenset[str]
    """The arrays of the file that ``copies`` read at the samples' rows."""
    copies: NDArray[np.int64]
    """In the form of `gather_samples`, but with pieces instead of offsets."""
    lists: Sequence[tuple[int, str | None, str]]
    """For lists of any length: piece, array of the file (None: ones) and feature."""
    pieces: Sequence[_Piece]
    columns: Mapping[str, int]
    """The pieces of arrays with one row per sample, such as labels, that belong to no feature."""
    order_pieces: Sequence[OrderPieces]
    ids: Mapping[str, int]
    """By feature, the piece of its ids."""
    weights: Mapping[str, int]
    """By feature with weights, the piece of these."""
    num_columns: int
    """The number of leading pieces that have the columns."""
    num_device_pieces: int
    """The number of leading pieces that a device needs; the others are ids that are in no order."""
    fixed: BlockPlaces | None
    """The offsets if no feature has lists of any length."""

    @classmethod
    def of(
        cls,
        layout: SampleLayout,
        word_of: Callable[[str], int],
        rows: Callable[[str], int],
        size: int,
        orders: Sequence[IdOrder] = (),
        features: Collection[str] | None = None,
    ) -> BlockLayout:
        """Lay out ``size`` samples of some features; None: of all.

        word_of: the first word of an array in the file; rows: the number of keys of a table.
        """
        return _Builder(layout, word_of, rows, size, features).build(orders)

    def place(self, num_ids: Mapping[str, int]) -> BlockPlaces:
        """Return the offsets for these numbers of ids of each feature with lists of any length."""
        begins, end = [], 0
        for piece in self.pieces:
            if piece.is_aligned:
                end = -(-end // _ALIGNED_BYTES) * _ALIGNED_BYTES
            begins.append(end)
            end += piece.num_bytes * (1 if piece.ragged is None else num_ids[piece.ragged])
        begins.append(-(-end // 8) * 8)
        copies = self.copies.copy()
        copies[:, 3] = np.array(begins, dtype=np.int64)[copies[:, 3]] // 4
        sizes = {
            f.name: num_ids[f.name] if f.name in num_ids else self.size * (f.length or 1)
            for f in self.features.values()
        }
        starts = [
            np.array([*accumulate((sizes[name] for name in order.features), initial=0)], np.int64)
            for order in self.orders
        ]
        return BlockPlaces(begins, copies, sizes, starts, begins[self.num_columns], begins[self.num_device_pieces])


class BlockPlaces(NamedTuple):
    """Offsets of the pieces of one block."""

    begins: Sequence[int]
    """The first byte of each piece, and the end of the last one."""
    copies: NDArray[np.int64]
    num_ids: Mapping[str, int]
    starts: Sequence[NDArray[np.int64]]
    """(F + 1,) by order: the first id of each feature within the order."""
    column_bytes: int
    """Bytes of the block's front, with the columns."""
    device_bytes: int
    """Bytes of the block's front that a device needs."""


class _Builder:
    def __init__(
        self, layout: SampleLayout, word_of: Callable[[str], int], rows: Callable[[str], int], size: int,
        features: Collection[str] | None,
    ) -> None:  # fmt: skip
        self._layout, self._word_of, self._rows, self._size = layout, word_of, rows, size
        schema = layout.schema
        self._features = {f.name: f for f in schema.features if features is None or f.name in features}
        self._singles = {f.name: i for i, f in enumerate(schema.singles)}
        self._pieces: list[_Piece] = []
        self._copies: list[tuple[int, int, int, int, int]] = []
        self._lists: list[tuple[int, str | None, str]] = []
        self._arrays: set[str] = set()

    def build(self, orders: Sequence[IdOrder]) -> BlockLayout:
        """Lay out columns, then each order, then all other ids."""
        schema = self._layout.schema
        kept = {column_array(one.name): np.dtype(one.dtype).itemsize for one in schema.kept}
        widths = {c.name: 4 * (c.width or 1) for c in self._layout.columns if c.feature is None and c.name != "ids"}
        columns = {}
        for name, num_bytes in (kept | widths).items():
            columns[name] = self._piece(num_bytes * self._size)
            self._arrays.add(name)
            if num_bytes % 4 == 0:  # NumPy copies the others
                self._copy(name, num_bytes // 4, columns[name])
        num_columns, ids, weights, pieces = len(self._pieces), dict[str, int](), dict[str, int](), []
        self._piece(0)  # the end of the columns
        for order in orders:
            specs = [self._features[name] for name in order.features]
            is_weighted = order.bags and any(f.weights is not None for f in specs)
            first = self._ids(specs, ids)
            first_weight = self._weights(specs, weights) if is_weighted else None
            pieces.append(OrderPieces(first, first_weight, self._offsets(specs) if order.bags else None))
        num_device_pieces = len(self._pieces)
        self._piece(0)  # starts the next on a new line
        self._ids([f for name, f in self._features.items() if name not in ids], ids)
        for name, f in self._features.items():
            if f.weights is not None and name not in weights:
                self._weights([f], weights)
        made = BlockLayout(
            size=self._size, orders=orders, features=self._features, arrays=frozenset(self._arrays),
            copies=np.array(self._copies, np.int64).reshape(-1, 5), lists=self._lists, pieces=self._pieces,
            columns=columns, order_pieces=pieces, ids=ids, weights=weights, num_columns=num_columns,
            num_device_pieces=num_device_pieces, fixed=None,
        )  # fmt: skip
        if not any(piece.ragged for piece in self._pieces):
            object.__setattr__(made, "fixed", made.place({}))
        return made

    def _piece(self, num_bytes: int, ragged: str | None = None, *, is_aligned: bool = True) -> int:
        self._pieces.append(_Piece(num_bytes, ragged, is_aligned))
        return len(self._pieces) - 1

    def _copy(self, array: str, words: int, piece: int, *, limit: int = NO_LIMIT) -> None:
        self._arrays.add(array)
        self._copies.append((self._word_of(array), words, words, piece, limit))

    def _of_ids(self, f: Feature, *, is_aligned: bool) -> int:
        """Add a piece with one number for each id of a feature."""
        if self._is_ragged(f):
            return self._piece(4, f.name, is_aligned=is_aligned)
        return self._piece(4 * self._size * (f.length or 1), is_aligned=is_aligned)

    def _is_ragged(self, f: Feature) -> bool:
        return f.name not in self._singles and f.length is None

    def _ids(self, specs: Sequence[Feature], found: dict[str, int]) -> int:
        """Add the pieces of ids, and return the first."""
        first = len(self._pieces)
        for i, f in enumerate(specs):
            piece, limit = self._of_ids(f, is_aligned=i == 0), self._rows(f.table)
            found.setdefault(f.name, piece)
            if f.name in self._singles:
                word, width = self._word_of("ids") + self._singles[f.name], len(self._singles)
                self._arrays.add("ids")
                self._copies.append((word, width, 1, piece, limit))
            elif f.length is not None:
                self._copy(f"ids.{f.name}", f.length, piece, limit=limit)
            else:
                self._lists.append((piece, f"ids.{f.name}", f.name))
        return first

    def _weights(self, specs: Sequence[Feature], found: dict[str, int]) -> int:
        """Add the pieces of weights, 1 for each id of a feature without any, and return the first."""
        first = len(self._pieces)
        for i, f in enumerate(specs):
            piece = self._of_ids(f, is_aligned=i == 0)
            if f.weights is not None:
                found.setdefault(f.name, piece)
            array = None if f.weights is None else f"weights.{f.name}"
            if self._is_ragged(f):
                self._lists.append((piece, array, f.name))
            elif array is not None:
                self._copy(array, f.length or 1, piece)
            else:
                self._copies.append((ONES, 0, f.length or 1, piece, NO_LIMIT))
        return first

    def _offsets(self, specs: Sequence[Feature]) -> int:
        """Add the pieces of the offsets of bags, and return the first."""
        if any(map(self._is_ragged, specs)):
            return self._piece(8 * (len(specs) * self._size + 1))
        first, start = len(self._pieces), 0
        for f in specs:  # a piece each, including the next one's first offset
            at = self._piece(8 * self._size, is_aligned=f is specs[0])
            self._copies.append((STEPS, start, f.length or 1, at, NO_LIMIT))
            start += self._size * (f.length or 1)
        self._piece(8, is_aligned=False)
        return first
