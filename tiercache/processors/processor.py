"""Processor: all verbs that touch arrays on the device of a training; `CpuProcessor` and `CudaProcessor` have them.

Arrays on the device are NumPy arrays on a CPU and torch tensors on a GPU; nobody but a processor computes with them.
Lookups and steps come in the order of the calls, on torch's current stream, and wait for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    import torch
    from numpy.typing import DTypeLike, NDArray

    from tiercache.kernels.key_index import KeySet
    from tiercache.processors.delivery import Delivery
    from tiercache.processors.entries import Array, Entries, Found, GroupStep, Pending, Wanted
    from tiercache.processors.runs import Run
    from tiercache.store.table import Table
    from tiercache.tiers.rows import GroupRows


class Layout(NamedTuple):
    """What a group needs on the device."""

    rows: int
    widths: tuple[int, ...]
    """Words of each field of a row."""
    positions: int
    """The most local ids that are mapped to slots at once."""
    rounded: bool
    """Whether steps round its vectors, which have 16 bits then."""


class RowArrays(NamedTuple):
    """The memory of one group's rows on the device."""

    fields: tuple[Array, ...]
    """(rows, words) float32 each."""
    slots: Array
    """(positions,) int32 for the slots of a visit; empty where they are used from host memory."""
    load_slots: Array
    """(positions,) int32 for the slots of rows that are loaded; empty likewise."""
    keys: Array
    """(positions,) int64 for keys on their way; empty likewise."""
    dump_order: Array
    """(positions,) int32 for the order of rows that are dumped, in the memory of ``keys``; empty likewise."""
    streams: Array
    """(rows,) uint64 of the row in each slot, where vectors are rounded; else empty."""


class Mark(Protocol):
    """A moment of the moving of rows, or of the training."""

    def wait(self) -> None:
        """Wait, on any thread, until all that was begun before is done."""
        ...


class Pieces(Protocol):
    """Pieces in host memory, between which and slots rows are moved by few launches."""

    def add(self, first: int, rows: NDArray[np.int64], offset: NDArray[np.int64], data: NDArray[np.float32]) -> None:
        """Add pieces in ``data``, as `kernels.pieces.PieceTable` does."""
        ...

    def add_each(
        self,
        first: NDArray[np.int64],
        rows: NDArray[np.int64],
        offset: NDArray[np.int64],
        data: Sequence[NDArray[np.float32]],
        cuts: NDArray[np.int64],
    ) -> None:
        """Add pieces in several arrays, likewise."""
        ...


class Mover(Protocol):
    """Moves rows between the device and host memory, and makes new ones."""

    def reserve(self, layouts: Sequence[Layout], what: str) -> list[RowArrays]:
        """Allocate the memory of all groups, of undefined content on a GPU and zero on a CPU.

        Raises BudgetError, naming ``what`` needs it, where the device has too little.
        """
        ...

    def bytes_of(self, layouts: Sequence[Layout]) -> int:
        """Return the bytes that `reserve` allocates."""
        ...

    def lock(self, address: int, num_bytes: int) -> None:
        """Make pages of host memory ones that the device may read and write. Any thread."""
        ...

    def unlock(self, address: int) -> None:
        """Undo a ``lock``; the pages may be given back then. Any thread."""
        ...

    def scratch(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return host memory that pieces may lie in."""
        ...

    def dumping(self) -> AbstractContextManager[None]:
        """Begin what moves rows to host memory: after all steps so far. The next steps must come behind a `loading`,
        or behind a wait for `dumped`.
        """
        ...

    def dumped(self) -> Mark:
        """Return the present end of the dumping."""
        ...

    def loading(self) -> AbstractContextManager[None]:
        """Begin what moves rows to slots, or makes them there: after all steps so far, but beside what is dumped.

        All that comes behind the ``with`` comes behind it and behind the dumping.
        """
        ...

    def behind(self, dumped: Mark) -> None:
        """Have what is loaded from here on in a `loading` come behind a mark of the dumping."""
        ...

    def loaded(self) -> Mark:
        """Return the present end of the loading."""
        ...

    def trained(self) -> Mark:
        """Return the present end of the training: until it has passed, the device has steps to do."""
        ...

    def indices(self, count: int) -> NDArray[np.int32]:
        """Return host memory for indices, from which `place` is quick. Any thread."""
        ...

    def place(self, indices: NDArray[np.int32], into: Array) -> Array:
        """Return indices on the device, in the first elements of ``into`` where the device has memory of its own.

        They must stay as they are until a mark taken behind this call has passed.
        """
        ...

    def pieces(self, row_floats: int) -> Pieces:
        """Return a collection without pieces."""
        ...

    def pack(self, fields: tuple[Array, ...], slots: Array, order: Array, pieces: Pieces) -> None:
        """Write rows to pieces: row ``order[i]`` of ``slots`` at place i, none at two."""
        ...

    def unpack(self, fields: tuple[Array, ...], slots: Array, pieces: Pieces) -> None:
        """Write the rows of pieces to their slots."""
        ...

    def generates(self, table: Table) -> bool:
        """Whether new rows of a table are made on the device, from 8 bytes of key each, with the defined bits."""
        ...

    def generate(self, table: Table, keys: NDArray[np.int64], vectors: Array, slots: Array | None,
                 keys_there: Array | None) -> None:  # fmt: skip
        """Write the initial vectors of keys (n,) to their slots (n,), or to rows (n, words) where these are None.

        ``keys_there``: room for the keys on the device, None: beside the budget.
        """
        ...

    def note_keys(self, table: Table, keys: NDArray[np.int64], streams: Array, slots: Array | None,
                  keys_there: Array | None) -> None:  # fmt: skip
        """Write the streams of the rows of keys (n,) to their slots (n,), or to places (n,) where these are None.

        ``keys_there`` as of `generate`.
        """
        ...

    def set_rows(self, field: Array, slots: Array | None, value: float) -> None:
        """Write ``value`` to all numbers of rows (of all rows: ``slots`` None)."""
        ...

    def write(self, rows: Array, fill: Callable[[NDArray[np.float32], slice], None]) -> None:
        """Have ``fill(words, part)`` make the words of ``rows``, in one or several parts, in order."""
        ...

    def read(self, field: Array, slots: NDArray[np.int32] | slice) -> NDArray[np.float32]:
        """Return rows of a field in host memory; a view of it on a CPU where a slice is asked for."""
        ...

    def rest(self) -> None:
        """Wait until nothing of the device's uses host memory."""
        ...

    def enter_thread(self) -> None:
        """Have the calling thread use this device, and no other of its kind: first on each thread that we start."""
        ...


class KeyIndex(Protocol):
    """Finds raw keys in the key sets of one pass, on the device; on the training thread."""

    @property
    def num_bytes(self) -> int:
        """What it takes on the device: as `Processor.index_bytes` says of so many keys and tables."""
        ...

    @property
    def capacity(self) -> int:
        """Places: an index of another pass fits where `kernels.key_index.capacity_for` its keys is no more."""
        ...

    def build(self, key_sets: Sequence[KeySet]) -> None:
        """Forget all keys and take in those of a pass, from host memory, where they may be mapped."""
        ...

    def find(self, keys: Sequence[NDArray[np.int64]], starts: NDArray[np.int64], tables: NDArray[np.int64]) -> Found:
        """Search for the keys of some features, in host memory; waits for no step of a GPU.

        Those of feature f are entries ``starts[f]`` to ``starts[f + 1]``, of table ``tables[f]``.
        """
        ...


class Processor(Protocol):
    """Looks up and steps rows on one device."""

    @property
    def name(self) -> str:
        """What a commit notes of the device; empty for a CPU."""
        ...

    @property
    def device(self) -> torch.device:
        """Where torch's tensors are."""
        ...

    @property
    def mover(self) -> Mover:
        """What moves rows to it and from it."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """What is kept on the device from batch to batch, beside the budget."""
        ...

    @property
    def ahead(self) -> int:
        """How many batches are made ahead where nobody says."""
        ...

    @property
    def queues(self) -> bool:
        """Whether calls return before their work is done: then one thread makes them all, in one order on all ranks."""
        ...

    def exchanging(self) -> AbstractContextManager[None]:
        """Work inside is done beside the training's that comes behind it, and behind what came before."""
        ...

    def exchanged(self) -> Any:
        """Return the present end of what is done so, for `receive`."""
        ...

    def receive(self, exchanged: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Have the training go on behind ``exchanged``; ``tensors``, made there, are its own from now on."""
        ...

    def bounds(self, values: Array) -> Callable[[], tuple[int, int]]:
        """Return what tells the least and the largest of int32 values, once they are known; (0, -1) of none."""
        ...

    def delivery(self) -> Delivery:
        """Return what brings one batch, on any thread, beside the training."""
        ...

    def prepare(self, tables: Sequence[Table]) -> None:
        """Compile what training these tables needs."""
        ...

    def array(self, tensor: torch.Tensor) -> Array:
        """Return a tensor of the device as an array, contiguous; it takes no part in gradients."""
        ...

    def tensor(self, array: Array) -> torch.Tensor:
        """Return an array as a tensor."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return an array of undefined content, the device's until nobody refers to it."""
        ...

    def bring(self, array: NDArray[np.generic]) -> Array:
        """Return a host array on the device: itself on a CPU, else a copy that nobody waits for."""
        ...

    def join(self, arrays: Sequence[NDArray[np.int32]]) -> tuple[list[Run], Array]:
        """Return arrays one behind the other on the device; in host memory in one or several runs."""
        ...

    def together(self, arrays: Sequence[Array]) -> Array:
        """Return arrays of the device one behind the other; the only one as it is."""
        ...

    def index_bytes(self, num_keys: int, num_tables: int) -> int:
        """Return what an index of so many raw keys takes on the device."""
        ...

    def key_index(self, num_keys: int, table_ids: NDArray[np.uint64]) -> KeyIndex | None:
        """Return an index with room for so many raw keys; None where the device has too little memory for it."""
        ...

    def weights(self, size: int, parts: Sequence[tuple[int, int, Array]]) -> Array:
        """Return (size,) float32: 1, but in [first, last) the values of each part, which may be a host array."""
        ...

    def pool(self, parts: Sequence[tuple[GroupRows, Entries]], out: Array) -> None:
        """Pool the entries of several groups into their columns of ``out`` (N, T), and write the entries' results."""
        ...

    def gather(self, parts: Sequence[tuple[GroupRows, Entries]]) -> list[Array]:
        """Return the vectors of each feature of several groups, (ids, dim), and write the entries' slots."""
        ...

    def find(self, wanted: Sequence[Wanted]) -> None:
        """Write slots and vectors of rows by their positions. On one thread at a time, which need not be always one."""
        ...

    def named(self, slots: Sequence[Array], num_slots: int) -> NDArray[np.bool_] | None:
        """Return which of the slots from 0 on are among ``slots``, (num_slots,) in host memory; None where all are."""
        ...

    def weight_gradient(self, rows: GroupRows, entries: Entries, gradient: Array) -> Array:
        """Return d loss / d weight of every entry, (E,)."""
        ...

    def places(self, pending: Pending) -> Array:
        """Return where each entry's gradient begins, (E,) int64, written out where ``pending`` has columns alone."""
        ...

    def sum(self, pending: list[Pending], scale: float, out: Array) -> None:
        """Write ``scale`` times the sum of its gradients to each row of ``out`` (slots, dim) that an entry names.

        Other rows are undefined. In batch order, as of a step; on the training thread, with its scratch.
        """
        ...

    def step(self, groups: Sequence[GroupStep], number: int) -> None:
        """Update each row of each group once; ``number`` counts the steps from 1."""
        ...

    def drop_scratch(self) -> None:
        """Let go of what is kept on the device from step to step; the next one makes it anew."""
        ...

    def random_state(self) -> torch.Tensor | None:
        """Return the state of the device's random generator, None where there is none beside the CPU's."""
        ...

    def set_random_state(self, state: torch.Tensor) -> None:
        """Put the device's random generator back."""
        ...
