"""The blocks that a writer holds, the objects and pages that nobody needs, and when they may go."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tiercache.store.engines.zarr_layout import NODE, state_key
from tiercache.store.files import PAGE_BYTES, paged
from tiercache.store.layout import STATE
from tiercache.store.records import decode, encode
from tiercache.store.store_errors import CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from tiercache.store.engines.engine import Block
    from tiercache.store.engines.zarr_layout import Array, Arrays

    Marks = NDArray[np.uint8]
    Holes = dict[str, list[tuple[int, int]]]
    """By name of an object: where the runs of its bytes begin that nobody needs, and where they end."""


FREE = "free"
"""The folder of the objects that say since when others are free."""


class Garbage:
    """Names of objects, and of folders, which end in a slash, each with the time since which it is free.

    Times are seconds since 1970 by the clock of the machine that freed them.
    """

    def __init__(self, keep_for: float = 0.0) -> None:
        """What is free is due after ``keep_for`` seconds."""
        self._keep_for = keep_for
        self._since: dict[str, float] = {}
        self.changed = False
        """Whether it is not what was written last."""

    def add(self, names: Iterable[str], before: Garbage | None = None) -> None:
        """Note what is free since now, or for as long as an earlier writer knew of it."""
        now = time.time()
        for name in names:
            self._since[name] = now if before is None else min(now, before.since(name, now))
            self.changed = True

    def since(self, name: str, default: float) -> float:
        """Return since when an object is free, alone or with a folder that it is in."""
        parts = name.split("/")
        folders = ("/".join(parts[:n]) + "/" for n in range(1, len(parts)))
        return min((self._since[one] for one in (name, *folders) if one in self._since), default=default)

    def take_expired(self) -> list[str]:
        """Remove what is due, and return it."""
        now = time.time()
        expired = [name for name, since in self._since.items() if since + self._keep_for <= now]
        for name in expired:
            del self._since[name]
        self.changed = self.changed or bool(expired)
        return expired

    def join(self, other: Garbage) -> None:
        """Note what another writer knew, too."""
        self._since |= {name: min(since, self._since.get(name, since)) for name, since in other._since.items()}

    def __bool__(self) -> bool:
        return bool(self._since)

    def to_bytes(self) -> bytes:
        """Return its record."""
        by_time = defaultdict[float, list[str]](list)
        for name, since in self._since.items():
            by_time[since].append(name)
        return encode(FREE, {"since": sorted([since, sorted(names)] for since, names in by_time.items())}, {})

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Self:
        """Read what ``to_bytes`` wrote. Raises CorruptStoreError that calls it ``name``."""
        values: Any = decode(FREE, data, name)[0]
        found = cls()
        try:
            found._since = {str(one): float(since) for since, names in values["since"] for one in names}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CorruptStoreError(f"{name} cannot be read ({error})") from error
        return found


def free_key(epoch: int) -> str:
    """Return the name of the object in which the writer of an epoch says what is free."""
    return f"{FREE}/{epoch}"


_ABSENT, _USED, _FREED = 0, 1, 2
"""What a block is to the writer."""


class _HeldBlocks:
    """The blocks of a group of a segment, a byte for each."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.marks: dict[bytes, Marks] = {
            kind: np.zeros(arrays.layout.segment_layout.num_blocks, np.uint8) for kind in arrays.by_kind
        }
        self.used = 0


class Holdings:
    """What a writer holds. For one thread at a time."""

    def __init__(self) -> None:
        self.bytes = 0
        """Of all blocks."""
        self.nodes: set[str] = set()
        """The objects that describe groups and arrays, of what is held."""
        self._state: set[str] = set()
        self._by_group: dict[tuple[int, int], _HeldBlocks] = {}
        self._segments: Counter[int] = Counter()

    def arrays(self, name: tuple[int, int]) -> Arrays | None:
        """Return the arrays of a group, by segment and group; None where nothing of it is held."""
        used = self._by_group.get(name)
        return None if used is None else used.arrays

    def undescribed(self, arrays: Arrays, kind: bytes) -> dict[str, bytes]:
        """Return the objects that must describe the arrays of a kind and are not there."""
        if f"{arrays.by_kind[kind][-1].folder}/{NODE}" in self.nodes:
            return {}
        return {key: data for key, data in arrays.nodes(kind).items() if key not in self.nodes}

    def hold(self, block: Block, arrays: Arrays | None) -> None:
        """Note a block; of all but dense state with its arrays."""
        if block.kind == STATE or arrays is None:
            key = state_key(block)
            self.bytes += 0 if key in self._state else block.size
            self._state.add(key)
            return
        used = self._by_group.get((block.owner, block.group))
        if used is None:
            used = self._by_group[block.owner, block.group] = _HeldBlocks(arrays)
            self._segments[block.owner] += 1
        marks = used.marks[block.kind]
        if marks[block.index] != _USED:
            marks[block.index] = _USED
            used.used += 1
            self.bytes += block.size

    def everything(self) -> tuple[set[str], Holes]:
        """Return all objects that have something of what is held, and what else is in them: all the rest is free."""
        needed = set(self._state)
        holes: Holes = {}
        for used in self._by_group.values():
            self.nodes |= _nodes(used.arrays)
            for kind, marks in used.marks.items():
                marks[marks != _USED] = _FREED
                for array in used.arrays.by_kind[kind]:
                    for chunk in range(-(-marks.size // array.chunk_blocks)):
                        low = chunk * array.chunk_blocks
                        marks_of_chunk = marks[low : low + array.chunk_blocks]
                        if np.any(marks_of_chunk == _USED):
                            needed.add(array.key(chunk))
                            if runs := list(_runs(array, low, marks_of_chunk, marks_of_chunk == _FREED)):
                                holes[array.key(chunk)] = runs
        return needed, holes

    def free(self, blocks: Iterable[Block]) -> tuple[set[str], Holes, list[str]]:
        """Let blocks go: return the objects and the folders that nobody needs, and what nobody needs in others."""
        keys: set[str] = set()
        freed: dict[tuple[int, int], dict[bytes, list[int]]] = defaultdict(lambda: defaultdict(list))
        for block in blocks:
            if block.kind == STATE:
                if (key := state_key(block)) in self._state:
                    self._state.remove(key)
                    self.bytes -= block.size
                    keys.add(key)
                continue
            name = block.owner, block.group
            used = self._by_group.get(name)
            if used is not None and used.marks[block.kind][block.index] == _USED:
                used.marks[block.kind][block.index] = _FREED
                used.used -= 1
                self.bytes -= block.size
                freed[name][block.kind].append(block.index)
        holes: Holes = {}
        folders: list[str] = []
        for name, by_kind in freed.items():
            used = self._by_group[name]
            for kind, indices in by_kind.items():
                for array in used.arrays.by_kind[kind]:
                    _free_in(array, used.marks[kind], indices, keys, holes)
            if not used.used:
                folders.append(self._forget(name))
        return keys, holes, folders

    def _forget(self, name: tuple[int, int]) -> str:
        """Forget a group of which nothing is held, and return the folder that is to be deleted."""
        arrays = self._by_group.pop(name).arrays
        self._segments[name[0]] -= 1
        self.nodes -= _nodes(arrays) - {f"{arrays.segment_folder}/{NODE}"}
        if self._segments[name[0]]:
            return arrays.folder
        del self._segments[name[0]]
        self.nodes.discard(f"{arrays.segment_folder}/{NODE}")
        return arrays.segment_folder


def _free_in(array: Array, marks: Marks, indices: list[int], keys: set[str], holes: Holes) -> None:
    """Note which chunks of an array nobody needs, now that blocks were freed, and what in others."""
    new = np.zeros(marks.size, bool)
    new[indices] = True
    for chunk in sorted({index // array.chunk_blocks for index in indices}):
        low = chunk * array.chunk_blocks
        marks_of_chunk = marks[low : low + array.chunk_blocks]
        if not np.any(marks_of_chunk == _USED):
            keys.add(array.key(chunk))
        elif runs := list(_runs(array, low, marks_of_chunk, new[low : low + array.chunk_blocks])):
            holes[array.key(chunk)] = runs


def _runs(array: Array, low: int, marks: Marks, new: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield beginning and end of the pages of a chunk that only freed blocks have, of runs with some of the new ones.

    ``low`` is the first block of the chunk.
    """
    edges = np.flatnonzero(np.diff(marks == _FREED, prepend=False, append=False)).tolist()
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        if np.any(new[first:last]):
            end = array.place(low + last - 1)
            begin, stop = paged(array.place(low + first).begin), end.begin + end.size
            stop = paged(stop) if stop == end.used_bytes else stop // PAGE_BYTES * PAGE_BYTES
            if begin < stop:
                yield begin, stop


def _nodes(arrays: Arrays) -> set[str]:
    folders = {array.folder for parts in arrays.by_kind.values() for array in parts}
    return {f"{folder}/{NODE}" for folder in (arrays.segment_folder, arrays.folder, *folders)}
