"""Backends train rows on one kind of device: `CpuBackend` and `CudaBackend` implement `Backend`.

Arrays on the device are NumPy arrays on a CPU and torch tensors on a GPU. Only a backend computes with them. Lookups
and steps run in the order of the calls, on torch's current stream, and wait for nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    import torch
    from numpy.typing import DTypeLike, NDArray

    from tiercache.kernels.cpu.key_index import KeySet
    from tiercache.kernels.cuda.sorting import SortPlan
    from tiercache.kernels.pieces import Pieces
    from tiercache.rows.backends.optimizer_step import OptimizerStep
    from tiercache.store.table import Table
    from tiercache.values.ids import Array, Found
    from tiercache.values.lookups import GroupRows, LookedUp, LookupIds, LookupParts, RowRequest, SavedGradient


class Layout(NamedTuple):
    """The memory that a group needs on the device."""

    rows: int
    widths: tuple[int, ...]
    """Words of each field of a row."""
    positions: int
    """Maximum number of local ids mapped to slots at once."""
    rounded: bool
    """True if steps round its vectors, which have 16 bits then."""


class RowArrays(NamedTuple):
    """The memory of one group's rows on the device."""

    fields: tuple[Array, ...]
    """(rows, words) float32 each."""
    slots: Array
    """(positions,) int32 for the slots of a pass; empty if the device uses them in host memory."""
    load_slots: Array
    """(positions,) int32 for the slots of loaded rows; empty likewise."""
    keys: Array
    """(positions,) int64 for keys that are copied to the device; empty likewise."""
    dump_order: Array
    """(positions,) int32 for the order of dumped rows, in the memory of ``keys``; empty likewise."""
    streams: Array
    """(rows,) uint64 of the row in each slot; empty unless vectors are rounded."""


class Event(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """Wait, on any thread, until the stream has reached it."""


class CompleteEvent:
    """An event that is already complete."""

    def wait(self) -> None:
        """Return at once."""


class Streams:
    """The order of work on the device: rows are dumped, loaded and exchanged during training.

    Training is the work on torch's current stream of the training thread. This class is for a CPU, which has no
    streams: work is done when a call returns. `CudaRuntime` has the streams of a GPU.
    """

    def dumping(self) -> AbstractContextManager[None]:
        """Run copies of rows to host memory, after all steps so far.

        Later steps must follow a `loading`, or a wait for `dumped`.
        """
        return nullcontext()

    def dumped(self) -> Event:
        """Record an event after all dumps queued so far."""
        return CompleteEvent()

    def loading(self, *, ahead: bool = False) -> AbstractContextManager[None]:
        """Run writes of rows to slots: after all steps so far, concurrent with the dumps.

        Work after the ``with`` waits for it and for the dumps. ``ahead``: concurrent with the steps, which do not wait.
        """
        return nullcontext()

    def wait_event(self, dumped: Event) -> None:
        """Make later loads wait for an event of the dumps."""

    def loaded(self) -> Event:
        """Record an event after all loads queued so far."""
        return CompleteEvent()

    def trained(self) -> Event:
        """Record an event after the training so far: until it has passed, the device has steps to do."""
        return CompleteEvent()

    def exchanging(self) -> AbstractContextManager[None]:
        """Run an exchange: after the training so far, concurrent with what comes next.

        Tensors made inside belong to exchanges, except those given to `receive`.
        """
        return nullcontext()

    def exchanged(self) -> Any:
        """Record an event after all exchanges queued so far, for `receive`."""
        return None

    def receive(self, exchanged: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Make the training wait for ``exchanged`` and take over ``tensors``, which were made there."""

    def synchronize(self) -> None:
        """Wait until the device no longer uses host memory."""

    def enter_thread(self) -> None:
        """Make the device current on the calling thread. Every thread that we start calls it first."""


class BatchUpload(Protocol):
    """Uploads one batch. One thread reads it and sends it, then the training thread receives it."""

    @property
    def device_bytes(self) -> int:
        """Bytes on the device; 0 on a CPU, where scratch includes them."""

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return memory to read samples into, once."""

    def send(self, column_bytes: int, num_bytes: int, sort: SortPlan | None) -> Sequence[Any] | None:
        """Copy the first bytes to the device, and return the runs of ``sort``; None if sorting now is not faster.

        Columns get separate memory, because users keep labels.
        """

    def array(self, begin: int, count: int, dtype: DTypeLike) -> Array:
        """Return numbers from byte ``begin`` of what was sent, on the device."""

    def receive(self) -> None:
        """Let later work on torch's current stream use the arrays. On the training thread; does not wait."""


class KeyIndex(Protocol):
    """Finds raw keys in the key sets of one pass, on the device. For the training thread."""

    @property
    def num_bytes(self) -> int:
        """Bytes on the device, see `Backend.index_bytes`."""

    @property
    def capacity(self) -> int:
        """Number of places: another pass fits if `kernels.cpu.key_index.capacity_for` of its keys is not larger."""

    def build(self, key_sets: Sequence[KeySet]) -> None:
        """Replace all keys by the keys of a pass, in host memory or mapped files."""

    def find(self, keys: Sequence[NDArray[np.int64]], starts: NDArray[np.int64], tables: NDArray[np.int64]) -> Found:
        """Search for the keys of some features, in host memory; does not wait for steps of a GPU.

        Feature f has entries ``starts[f]`` to ``starts[f + 1]``, of table ``tables[f]``.
        """


class Backend(Protocol):
    """Stores, moves, looks up and steps rows on one device."""

    name: str
    """The device's name in commits; empty for a CPU."""
    device: torch.device
    """The device of torch's tensors."""
    ahead: int
    """The default number of batches made ahead."""
    queues: bool
    """True if calls return before their work is done. Then one thread makes them all, in one order on all ranks."""

    @property
    def streams(self) -> Streams:
        """The order of its work."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes that it keeps on the device between batches, outside of budgets."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory of batches, outside of budgets; 0 on a CPU."""

    def prepare(self, tables: Sequence[Table]) -> None:
        """Compile the kernels for training these tables."""

    def drop_scratch(self) -> None:
        """Free the memory that is kept between steps; the next step allocates it again."""

    def random_state(self) -> torch.Tensor | None:
        """Return the state of the device's random generator; None for a CPU, whose generators are in every commit."""

    def set_random_state(self, state: torch.Tensor) -> None:
        """Restore the device's random generator."""

    # -- arrays --------------------------------------------------------------------------------------------

    def array(self, tensor: torch.Tensor) -> Array:
        """Return a tensor of the device as an array, contiguous and detached."""

    def gradient(self, tensor: torch.Tensor) -> Array:
        """Return the gradient of an output as an array, detached; on a CPU contiguous, on a GPU as it is in memory."""

    def tensor(self, array: Array) -> torch.Tensor:
        """Return an array as a tensor."""

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return an uninitialized array."""

    def to_device(self, array: NDArray[np.generic]) -> Array:
        """Return a host array on the device: itself on a CPU, else a copy, without waiting."""

    def join(self, arrays: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int32], Array]:
        """Concatenate host arrays, and return the result in host memory and on the device."""

    def concat(self, arrays: Sequence[Array]) -> Array:
        """Concatenate arrays of the device; a single one is returned as it is."""

    def weights(self, size: int, parts: Sequence[tuple[int, int, Array]]) -> Array:
        """Return (size,) float32: 1, except in [first, last) the values of each part, which may be a host array."""

    def upload(self) -> BatchUpload:
        """Return the upload of one batch, for any thread."""

    # -- lookups and steps ---------------------------------------------------------------------------------

    def pool(self, parts: LookupParts, out: Array) -> list[LookedUp]:
        """Pool the ids of several groups into their columns of ``out`` (N, T)."""

    def gather(self, parts: LookupParts, *, apart: bool = False) -> tuple[list[Array], list[LookedUp]]:
        """Return each feature's vectors (ids, dim), in separate memory if ``apart``, and each group's result."""

    def find(self, requests: Sequence[RowRequest]) -> None:
        """Write slots and vectors of rows by their positions. On one thread at a time, but it may change."""

    def slot_mask(self, slots: Sequence[Array], num_slots: int) -> NDArray[np.bool_] | None:
        """Return a mask (num_slots,) of the slots that are among ``slots``, in host memory; None if all are."""

    def weight_gradient(self, rows: GroupRows, ids: LookupIds, found: LookedUp, gradient: Array) -> Array:
        """Return d loss / d weight of every id, (E,)."""

    def sum(self, saved: Sequence[SavedGradient], scale: float, out: Array) -> None:
        """Write ``scale`` times the sum of its gradients to each row of ``out`` (slots, dim) that an id names.

        Other rows are undefined. In batch order, as in a step; on the training thread, with its scratch.
        """

    def step(self, groups: Sequence[OptimizerStep]) -> None:
        """Update each row of each step once; no row is in two of them."""

    def take_overflow(self) -> bool | None:
        """Return True if a step since the last call left a row that is not finite; None: unknown without reading."""

    def index_bytes(self, num_keys: int, num_tables: int) -> int:
        """Return the device bytes of an index of ``num_keys`` raw keys."""

    def key_index(self, num_keys: int, table_ids: NDArray[np.uint64]) -> KeyIndex | None:
        """Return an index for ``num_keys`` raw keys; None if the device has too little memory."""

    # -- moving rows ---------------------------------------------------------------------------------------

    def reserve(self, layouts: Sequence[Layout], what: str) -> list[RowArrays]:
        """Allocate the memory of all groups, uninitialized on a GPU and zero on a CPU.

        Raises BudgetError, naming ``what`` needs it, if the device has too little.
        """

    def bytes_of(self, layouts: Sequence[Layout]) -> int:
        """Return the bytes that `reserve` allocates."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Give the device access to pages of host memory. Any thread."""

    def unpin(self, address: int) -> None:
        """Undo a ``pin``; the pages may be freed then. Any thread."""

    def scratch(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return host memory for pieces, or for indices, from which `place` is fast. Any thread."""

    def place(self, indices: NDArray[np.int32], into: Array) -> Array:
        """Return indices on the device, in the first elements of ``into`` if the device has separate memory.

        They must not change until an event after this call has passed.
        """

    def pieces(self, row_floats: int) -> Pieces:
        """Return a collection without pieces."""

    def pack(self, fields: tuple[Array, ...], slots: Array, order: Array, pieces: Pieces) -> None:
        """Write rows to pieces: row ``order[i]`` of ``slots`` at place i, none at two."""

    def unpack(self, fields: tuple[Array, ...], slots: Array, pieces: Pieces) -> None:
        """Write the rows of pieces to their slots."""

    def generates(self, table: Table) -> bool:
        """Return True if the device generates new rows of a table, from their keys and with the defined bits."""

    def generate(self, table: Table, keys: NDArray[np.int64], vectors: Array, slots: Array | None,
                 key_buffer: Array | None) -> None:  # fmt: skip
        """Write the initial vectors of keys (n,) to their slots (n,); None: to rows (n, words).

        ``key_buffer``: device memory for the keys, which must not change until an event after this call has passed;
        None: memory outside of the budget.
        """

    def write_streams(self, table: Table, keys: NDArray[np.int64], streams: Array, slots: Array | None,
                  key_buffer: Array | None) -> None:  # fmt: skip
        """Write the streams of the rows of keys (n,) to their slots (n,), see `generate`."""

    def set_rows(self, field: Array, slots: Array | None, value: float) -> None:
        """Set all numbers of rows to ``value``; ``slots`` None: of all rows."""

    def write(self, rows: Array, fill: Callable[[NDArray[np.float32], slice], None]) -> None:
        """Call ``fill(words, part)`` to write the words of ``rows``, in one or several parts, in order."""

    def read(self, field: Array, slots: NDArray[np.int32] | slice) -> NDArray[np.float32]:
        """Return rows of a field in host memory; on a CPU a slice is a view."""
