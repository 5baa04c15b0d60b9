"""Every kernel relative to memory bandwidth: python -m benchmarks.kernels [--quick] [--device cpu|cuda] [--json FILE].

An operation's share of copy bandwidth is the bytes that it must move over its time, relative to the bytes per second of
a copy in the same run, counting both read and written bytes. (A CPU's copy is torch's, which also fetches the bytes it
overwrites: kernels that write past the caches can exceed 1.) On a CPU the numba kernels are measured by the wall clock;
on a GPU the CUDA kernels by events. On a GPU a step of lookup, sort and update is also compared with `nn.EmbeddingBag`
and torch's optimizers. The goals apply only to one H200 at 65,536 samples.

Bytes that must move (E lookups, D dim, U distinct rows of the skewed batch, P rows moved, state: floats of a row's
optimizer state): gather 4 E + 8 E D; pool_one, one id per feature, and pool_none, a vector per id, 12 E + 8 E D (ids,
slot map, slots); bags of two: pool_sum 24 E + 6 E D, pool_mean 28 E + 6 E D (a factor per entry), pool_max 24 E + 8 E D
(index of the maximum), pool_weighted, a sum, 32 E + 6 E D (weights, factors), weight_gradient 12 E + 6 E D (slots,
bags, gradients of weights); sort 12 E (slots in, pairs out, regardless of the number of sweeps); update_X 8 E + 4 E D +
8 U (D + state); sorted_update_X, with the sort, 4 E + 4 E D + 8 U (D + state); pack 16 P D + 8 P (rows of a vector and
a state of D floats, slots, order); unpack 16 P D + 4 P; initial_rows 8 P + 4 P D, with slots 12 P + 4 P D; index_build,
all tables by key set, 24 bytes per key and 16 per place; index_find 28 E (key, one place, position). Vectors of
OPERATION_bf16 are bfloat16, of OPERATION_fp16 float16: 2 bytes for each of their D instead of 4, with state in float32;
their updates read 8 more bytes per row, which determine the rounding.

Keys: ms_OPERATION[_DIM], bytes_OPERATION[_DIM], share_OPERATION[_DIM]; share_gather, share_pool, share_update,
share_sorted_update, share_pack and share_unpack are the minimum over dims (and pools, and optimizers), and so are
share_gather_bf16 and the others with these suffixes, which have no goal. The update has the same goal with and without
the sort. ms_torch_OPTIMIZER_DIM, ms_step_OPTIMIZER_DIM; speedup_vs_torch is the minimum over dims of Adagrad. On a GPU
link_share_rows_to_host_DIM and _from_host_DIM: packing P vectors into pinned host memory and unpacking them, as a share
of the link's own copy; link_share_rows_both_ways_DIM: both at once, as a share of both copies one after another, so
that 2 is the maximum; and host_ms_X for each ms_X: the Python time to launch it, which ms_X excludes (calls are queued
after copies), including the GPU's time if a call waits for it. The slower of both limits a step, and likewise the steps
of speedup_vs_torch.

--dry prints launches_one_id and host_us_one_id of a step of 26 tables in five groups, one id per feature, and the same
for bags: the launches, including torch's sort, and the host's microseconds without GPU work.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import kernel_cases as cases
from benchmarks.embedding_contenders import Shape, TorchBags
from benchmarks.kernel_launches import launches
from benchmarks.kernel_machines import CudaMachine, Machine, Measured, ShimMachine, open_machine
from benchmarks.machine import Goal, Run, called, console, options_of, say, table_of
from tiercache.errors import CudaError
from tiercache.kernels.arrays import View
from tiercache.kernels.cuda import cupy_device as cuda
from tiercache.kernels.step import Step, Vectors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.table import Table

GOALS = (
    Goal(key="share_gather", goal=0.85),
    Goal(key="share_pool", goal=0.85),
    Goal(key="share_pack", goal=0.85),
    Goal(key="share_unpack", goal=0.85),
    Goal(key="share_update", goal=0.75),
    Goal(key="share_sorted_update", goal=0.75),
    Goal(key="speedup_vs_torch", goal=5),
)
LEAST_OVER = {
    "share_gather": ("gather",),
    "share_pool": ("pool_one", "pool_none", "pool_sum", "pool_mean", "pool_max", "pool_weighted"),
    "share_pack": ("pack",),
    "share_unpack": ("unpack",),
    "share_update": ("update_sgd", "update_adagrad", "update_rowwise", "update_adam"),
    "share_sorted_update": (
        "sorted_update_sgd", "sorted_update_adagrad", "sorted_update_rowwise", "sorted_update_adam",
    ),
}  # fmt: skip
PEER_OPTIMIZERS = ("adagrad", "adam")


def measure(machine: Measured, case: cases.Case, tail: str, copied: float, samples: int) -> dict[str, Any]:
    """Return the keys of one operation."""
    seconds, host_seconds = machine.times(case.call, samples)
    name = case.name + tail
    return {
        f"ms_{name}": seconds * 1e3,
        **({} if host_seconds is None else {f"host_ms_{name}": host_seconds * 1e3}),
        f"bytes_{name}": case.num_bytes,
        f"share_{name}": case.num_bytes / seconds / copied,
    }


def measure_all(machine: Measured, size: cases.Size, run: Run) -> None:
    """Measure every operation, and the minimum of those with a goal; figures are written after each dim."""
    batch, record = cases.Batch(size, machine), run.record
    record["distinct_rows"] = batch.distinct
    copied = machine.copy_bytes_per_second(size.samples)
    record["copy_bytes_per_second"] = copied
    for case in cases.id_cases(machine, batch):
        record |= measure(machine, case, "", copied, size.samples)
    for dim in size.dims:
        say(f"dim {dim}")
        copied = machine.copy_bytes_per_second(size.samples)
        record[f"copy_bytes_per_second_{dim}"] = copied
        for case in cases.row_cases(machine, batch, dim):
            record |= measure(machine, case, f"_{dim}", copied, size.samples)
        if isinstance(machine, CudaMachine):
            record |= over_link(machine, batch, dim)
            record |= _against_torch(machine, batch, dim)
        run.write()
    for key, names in LEAST_OVER.items():
        for tail in cases.DTYPES.values():
            record[key + tail] = min(record[f"share_{name}{tail}_{dim}"] for name in names for dim in size.dims)
    speedups = [record.get(f"speedup_vs_torch_adagrad_{dim}") for dim in size.dims]
    record["speedup_vs_torch"] = min((s for s in speedups if s is not None), default=None)


def _against_torch(machine: CudaMachine, batch: cases.Batch, dim: int) -> dict[str, Any]:
    size, record = batch.size, dict[str, Any]()
    shape = Shape(
        name="batch", num_tables=size.num_features, rows=size.rows, num_features=size.num_features,
        num_samples=size.num_samples, dim=dim,
    )  # fmt: skip
    grads = [np.full((size.num_samples, size.num_features * dim), 1e-3, np.float32)]
    for optimizer in PEER_OPTIMIZERS:
        peer = TorchBags(shape, optimizer, batch.skewed_FN[None], grads, "cuda")
        found = {
            "step": machine.times(our_step(machine, batch, dim, optimizer), size.samples),
            "torch": machine.times(partial(peer.step, 0), size.samples),
        }
        del peer
        machine.forget()
        for name, times in found.items():
            record[f"ms_{name}_{optimizer}_{dim}"] = times.seconds * 1e3
            record[f"host_ms_{name}_{optimizer}_{dim}"] = 1e3 * (times.host_seconds or 0.0)
        slower = {name: max(times.seconds, times.host_seconds or 0.0) for name, times in found.items()}
        record[f"speedup_vs_torch_{optimizer}_{dim}"] = slower["torch"] / slower["step"]
    return record


def our_step(machine: Machine, batch: cases.Batch, dim: int, optimizer: str) -> Callable[[], None]:
    """Return a step of the skewed batch: one id for each sample and table, Adagrad or Adam."""
    size = batch.size
    cols = np.arange(size.num_features) * dim
    vectors = Vectors(machine.place(np.full((size.num_slots, dim), 0.01, np.float32)), dim)
    rule = cases.rule(optimizer, dim)
    states: list[Any] = [machine.empty((size.num_slots, width), np.float32) for width in rule.widths]
    out = machine.empty((size.num_samples, cols.size * dim), np.float32)
    slots = machine.empty((size.num_entries,), np.int32)
    described, kernels = cases.gradients_of(machine, size, dim), machine.kernels

    def step() -> None:
        kernels.pool_one(vectors, batch.slot_of_local, batch.skewed_ids, batch.bases, cols, out, slots)
        kernels.step(Step(vectors, states, kernels.sort(slots, size.num_slots), described, rule))

    return step


def over_link(machine: CudaMachine, batch: cases.Batch, dim: int) -> dict[str, Any]:
    """Pack directly into pinned host memory and unpack from it, as a switch does, with few blocks.

    Returns times of each direction and of both at once, and their shares of copies of equal size, one at a time.
    """
    samples, moved = batch.size.samples, batch.moved
    vectors = machine.place(np.full((batch.size.num_slots, dim), 0.01, np.float32))
    num_floats = moved * dim
    staging = machine.empty((num_floats,), np.float32)
    rows = cases.PIECE_BYTES // (4 * dim)
    first_row = np.append(np.arange(0, moved, rows), moved)
    memory, pieces = {}, {}
    for way in ("to_host", "from_host"):
        memory[way], pieces[way] = machine.pinned(4 * num_floats), machine.kernels.pieces(dim)
        there = View(memory[way].ptr, (num_floats,), np.dtype(np.float32))
        pieces[way].add(0, np.diff(first_row), first_row[:-1] * dim, there)

    def pack() -> None:
        machine.kernels.pack((vectors,), batch.slot_of_local, batch.order, pieces["to_host"], over_link=True)

    def unpack() -> None:
        machine.kernels.unpack((vectors,), batch.order, pieces["from_host"], over_link=True)

    record: dict[str, Any] = {}
    copies = 0.0
    for way, call in (("to_host", pack), ("from_host", unpack)):
        copied = machine.times(partial(machine.copy_over_link, memory[way], staging, way), samples).seconds
        seconds = machine.times(call, samples).seconds
        copies += copied
        record |= {
            f"ms_rows_{way}_{dim}": seconds * 1e3,
            f"link_bytes_per_second_{way}_{dim}": 4 * num_floats / copied,
            f"link_share_rows_{way}_{dim}": copied / seconds,
        }
    seconds = machine.times(partial(machine.beside, pack, unpack), samples).seconds
    return record | {
        f"ms_rows_both_ways_{dim}": seconds * 1e3,
        f"link_share_rows_both_ways_{dim}": copies / seconds,
    }


def dry(record: dict[str, Any], architectures: Sequence[str]) -> None:
    """Compile every kernel if NVRTC is installed, run each operation once on the CPU, and count launches."""
    try:
        for architecture in architectures:
            cubins = cuda.compile_all(architecture)
            record[f"compiled_{architecture}"] = len(cubins)
            console.print(f"{architecture}: {len(cubins)} sources compiled, {sum(map(len, cubins.values())):,} bytes")
    except CudaError as error:
        record["compiled"] = "no"
        console.print(f"nothing was compiled for a GPU: {error}", markup=False)
    machine = ShimMachine()
    batch, ran = cases.Batch(cases.TINY, machine), 0
    for dim in cases.TINY.dims:
        for case in (*cases.id_cases(machine, batch), *cases.row_cases(machine, batch, dim)):
            case.call()
            ran += 1
        for optimizer in PEER_OPTIMIZERS:
            our_step(machine, batch, dim, optimizer)()
            ran += 1
    for name, bags in (("one_id", False), ("bags", True)):
        record[f"launches_{name}"], record[f"host_us_{name}"] = launches(bags=bags)
    record |= {"operations_run_by_the_shim": ran, "kernels_run_by_the_shim": len(set(machine.device.launches))}
    console.print("No kernel was measured: run `python -m benchmarks.kernels` on a machine with a GPU.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = options_of("kernels", __doc__, "8,192 samples and small tables")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument("--dry", action="store_true", help="no GPU: compile, and run each operation once on the CPU")
    with called(parser, arguments) as run:
        options, record = run.options, run.record
        size = run.size(cases.FULL, cases.QUICK, cases.TINY)
        if options.dry:
            record["device"] = "none"
            dry(record, ("sm_90",) if options.tiny else cuda.ARCHITECTURES)
            run.show()
        else:
            machine = open_machine(options.device)
            record |= {"device": machine.name, "num_samples": size.num_samples, "rows_of_a_table": size.rows}
            measure_all(machine, size, run)
            console.print(_table(record, size))
    run.report(GOALS, judged=size is cases.FULL and "H200" in record["device"], title="what was promised, on one H200")


def _table(record: dict[str, Any], size: cases.Size) -> Table:
    title = f"{record['device']}, {size.num_samples:,} samples x {size.num_features} lookups: "
    title += "milliseconds (share of copy bandwidth)"
    table = table_of(title, "operation", *(f"dim {dim}" for dim in size.dims))
    for name in ("index_build", "index_find"):
        table.add_row(name, _cell(record, f"ms_{name}"))
    of_first = f"_{size.dims[0]}"
    for key in (key for key in record if key.endswith(of_first) and not key.startswith(("bytes", "share", "host"))):
        stem = key.removesuffix(of_first)
        table.add_row(stem.removeprefix("ms_"), *(_cell(record, f"{stem}_{dim}") for dim in size.dims))
    return table


def _cell(record: dict[str, Any], key: str) -> str:
    share = record.get(key.replace("ms_", "share_", 1)) if key.startswith("ms_") else None
    return f"{record[key]:.3g}" + ("" if share is None else f" ({share:.2f})")


if __name__ == "__main__":
    main()
