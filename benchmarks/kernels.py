"""Every kernel relative to memory bandwidth: python -m benchmarks.kernels [--quick] [--device cpu|cuda] [--json FILE].

An operation's share of copy bandwidth is the bytes that it must move over its time, relative to the bytes per second of
a copy in the same run, counting both read and written bytes. (A CPU's copy is torch's, which also fetches the bytes it
overwrites: kernels that write past the caches can exceed 1.) On a CPU the numba kernels are measured by the wall clock;
on a GPU the CUDA kernels by events. The goals apply only to one H200 at 65,536 samples. `benchmarks.gpu` compares whole
steps with torch and FBGEMM, and measures rows over the link.

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
share_gather_bf16 and the others with these suffixes, which have no goal. On a GPU also host_ms_X for each ms_X: the
Python time to launch it, which ms_X excludes (calls are queued after copies), including the GPU's time if a call waits
for it. The slower of both limits a step.

--dry compiles every kernel if NVRTC is installed, and runs each operation once by the tests' shim.
"""

from __future__ import annotations

from typing import Any

from benchmarks import kernel_cases as cases
from benchmarks.kernel_machines import Measured, ShimMachine, open_machine
from benchmarks.machine import ON_DEVICE, Goal, Run, benchmark, console, say
from tiercache.errors import CudaError
from tiercache.kernels.cuda import cupy_device as cuda

GOALS = (
    Goal(key="share_gather", goal=0.85),
    Goal(key="share_pool", goal=0.85),
    Goal(key="share_pack", goal=0.85),
    Goal(key="share_unpack", goal=0.85),
    Goal(key="share_update", goal=0.75),
    Goal(key="share_sorted_update", goal=0.75),
)
RULES = ("sgd", "adagrad", "rowwise", "adam")
LEAST_OVER = {
    "share_gather": ("gather",),
    "share_pool": ("pool_one", "pool_none", "pool_sum", "pool_mean", "pool_max", "pool_weighted"),
    "share_pack": ("pack",),
    "share_unpack": ("unpack",),
    "share_update": [f"update_{rule}" for rule in RULES],
    "share_sorted_update": [f"sorted_update_{rule}" for rule in RULES],
}


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
    record |= {"device": machine.name, "num_samples": size.num_samples, "rows_of_a_table": size.rows}
    copied = machine.copy_bytes_per_second(size.samples)
    record |= {"distinct_rows": batch.distinct, "copy_bytes_per_second": copied}
    for case in cases.id_cases(machine, batch):
        record |= measure(machine, case, "", copied, size.samples)
    for dim in size.dims:
        say(f"dim {dim}")
        copied = record[f"copy_bytes_per_second_{dim}"] = machine.copy_bytes_per_second(size.samples)
        for case in cases.row_cases(machine, batch, dim):
            record |= measure(machine, case, f"_{dim}", copied, size.samples)
        run.write()
    for key, names in LEAST_OVER.items():
        for tail in cases.DTYPES.values():
            record[key + tail] = min(record[f"share_{name}{tail}_{dim}"] for name in names for dim in size.dims)


def dry(record: dict[str, Any], *architectures: str) -> None:
    """Compile every kernel if NVRTC is installed, and run each operation once on the CPU."""
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
    record |= {"device": "none", "operations_run_by_the_shim": ran}
    record["kernels_run_by_the_shim"] = len(set(machine.device.launches))
    console.print("No kernel was measured: run `python -m benchmarks.kernels` on a machine with a GPU.")


if __name__ == "__main__":
    with benchmark("kernels", __doc__, "8,192 samples and small tables", GOALS, **ON_DEVICE) as run:
        if run.options.dry:
            dry(run.record, *(("sm_90",) if run.options.tiny else cuda.ARCHITECTURES))
        else:
            amount = run.size(cases.FULL, cases.QUICK, cases.TINY)
            measure_all(open_machine(run.options.device), amount, run)
            run.is_judged = amount is cases.FULL and "H200" in run.record["device"]
