"""tc.estimate: the cost of training on this machine, before any data is read."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psutil import virtual_memory

from tiercache.data.pass_builder import device_bytes
from tiercache.planning.estimate import Estimate, Figure, Model, Workload, cut_passes
from tiercache.planning.plan_file import Rates
from tiercache.rows.transfer_rates import copy_rate, existing_folder, measured_rates
from tiercache.sizes import counted, format_bytes, parse_bytes
from tiercache.store.table import group_tables

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from tiercache.planning.estimate import Traffic
    from tiercache.planning.store_plan import StorePlan
    from tiercache.store.table import Table

MEMORY_SHARE = 0.7
"""The largest share of free memory that a plan takes."""
DEVICE_BUDGET = 8 << 30
"""The device budget of an estimate without arguments that cut passes."""


def estimate(
    tables: Iterable[Table],
    rows: Mapping[str, float] | float,
    *,
    samples: float,
    keys_per_sample: Mapping[str, float] | float = 1,
    dense: int = 0,
    epochs: int = 1,
    zipf: float | None = None,
    unique_per_pass: float | None = None,
    passes: int | None = None,
    device_budget: int | str | None = None,
    host_budget: int | str | None = None,
    eval_budget: int | str | None = None,
    commit_every: int = 1,
    retention: int = 1,
    samples_per_second: float | None = None,
    disk_gbps: float | None = None,
    link_gbps: float | None = None,
    store: str | os.PathLike[str] = ".",
    device: str = "cpu",
) -> Estimate:
    """Estimate the bytes on device, host and disk, and the hours, of training on data that does not exist yet.

    The formulas are those of `tiercache plan`, which is exact once the data is extracted. Keys are assumed to follow
    Zipf's law, independently of each other, and all passes to be alike. Measures the disk of ``store`` and the memory
    at the first call on a machine, for a second or two, with a temporary file of 128 MiB there.

    Args:
        tables: their dims, dtypes and optimizers determine the bytes of a row.
        rows: distinct keys in all samples, by table or the same for all.
        samples: samples of an epoch.
        keys_per_sample: keys that a sample looks up, by table or the same for all; lists count with their mean length.
        dense: dense features of a sample, for the bytes of the dataset.
        epochs: the number of times the samples are trained.
        zipf: the exponent of the keys' frequencies; 0: all are equally frequent. Default: 1.
        unique_per_pass: distinct keys of a pass, of all tables. It determines where passes are cut; with ``passes``, it
            determines the exponent of the frequencies.
        passes: passes of an epoch.
        device_budget: bytes, or text such as "8GiB", that the rows of a pass may take on the device. Without
            ``unique_per_pass`` and ``passes`` it determines where passes are cut. Default then: 8 GiB.
        host_budget: default: enough to cache all waiting rows, but at most 70 % of the free memory.
        eval_budget: as in `TierCache`.
        commit_every: as in `TierCache`.
        retention: as in `TierCache`.
        samples_per_second: how fast the model trains from memory; None: only the seconds of moving rows are predicted.
        disk_gbps: GB/s (10^9 bytes) of reading and of writing, instead of measuring the disk.
        link_gbps: GB/s from host to device, instead of measuring it.
        store: where the store will be: its disk is measured.
        device: "cpu", or such as "cuda", whose link is measured.

    Raises ValueError for invalid numbers, BudgetError for a device budget that does not hold a pass or a host budget
    that does not train it, and OSError for a disk that cannot be written to.
    """
    work = _workload(tables, rows, samples, keys_per_sample, dense)
    epochs, commit_every = _whole("epochs", epochs), _whole("commit_every", commit_every)
    retention, passes = _whole("retention", retention), None if passes is None else _whole("passes", passes)
    unique = None if unique_per_pass is None else _whole("unique_per_pass", unique_per_pass)
    if zipf is not None and not (_is_number(zipf) and 0 <= zipf <= 4):
        raise ValueError(f"zipf is {zipf!r}: expected an exponent from 0 (all keys equally frequent) to 4")
    if zipf is not None and unique is not None and passes is not None:
        raise ValueError("unique_per_pass and passes determine the exponent: omit zipf, or one of them")
    rates_given = {"samples_per_second": samples_per_second, "disk_gbps": disk_gbps, "link_gbps": link_gbps}
    for name, rate in rates_given.items():
        if rate is not None and not (_is_number(rate) and 0 < rate < math.inf):
            raise ValueError(f"invalid {name} {rate!r}: expected a positive number")
    samples_per_second, disk_gbps, link_gbps = (None if rate is None else float(rate) for rate in rates_given.values())
    assumptions = []
    budget = None if device_budget is None else parse_bytes(device_budget)
    if budget is None and unique is None and passes is None:
        budget = DEVICE_BUDGET
        assumptions.append(f"a device budget of {format_bytes(budget)}: pass device_budget, unique_per_pass or passes")
    cut = cut_passes(work, device_budget=budget, unique_per_pass=unique, passes=passes, zipf=zipf)
    evaluation = None if eval_budget is None else parse_bytes(eval_budget, least=0)
    model = Model(work, cut, commit_every=commit_every, eval_budget=evaluation, pinned=device != "cpu")
    if zipf is None:
        fitted = "that gives that many keys in a pass" if unique and passes else "(or pass zipf)"
        assumptions.append(f"keys by Zipf's law with the exponent {cut.exponent:.3g} {fitted}")
    memory = virtual_memory()
    host = _host_budget(model, host_budget, int(MEMORY_SHARE * memory.available))
    traffic, plan = model.traffic(host), model.store_plan(host, retention)
    place = existing_folder(Path(store))
    rates = _rates(place, device, disk_gbps, link_gbps, samples_per_second)
    seconds, later = traffic.seconds(rates, cut.samples, epochs)
    free = shutil.disk_usage(place).free
    if samples_per_second is None:
        assumptions.append("hours of moving rows alone: pass samples_per_second to include the model")
    assumptions.append("the store does not include dense state, and the dataset has no weights of keys")
    found = Estimate(
        passes=cut.passes, samples_per_pass=cut.samples, zipf=cut.exponent, rows_per_pass=model.pass_rows,
        stored_rows=model.stored_rows, device_bytes=model.device_bytes, host_bytes=host,
        least_host_bytes=model.least_host, store_bytes=plan.needed, dataset_bytes=model.dataset_bytes,
        bytes_read=round(cut.passes * traffic.read), bytes_written=round(cut.passes * traffic.written),
        seconds=seconds, seconds_per_epoch=cut.passes * later.total, bound=later.bound, rates=rates,
        figures=(), assumptions=tuple(assumptions),
    )  # fmt: skip
    host = found.host_bytes if host_budget is not None else found.least_host_bytes
    warned = _warnings(found, host, memory, free, place, on_host=device == "cpu")
    limit = f"{MEMORY_SHARE:.0%} of free memory"
    chosen = "the minimum" if found.host_bytes == found.least_host_bytes else f"enough for all rows, at most {limit}"
    chosen = chosen if host_budget is None else "host_budget"
    figures = _figures(found, model, traffic, plan, chosen, epochs)
    return replace(found, figures=figures, warnings=warned)


def _workload(
    tables: Iterable[Table],
    rows: Mapping[str, float] | float,
    samples: float,
    keys: Mapping[str, float] | float,
    dense: int,
) -> Workload:
    """Check the numbers of the data. Raises ValueError."""
    chosen = tuple(tables)
    group_tables(chosen)  # for its errors
    names = [table.name for table in chosen]
    by_name: dict[str, dict[str, Any]] = {}
    for what, given in (("rows", rows), ("keys_per_sample", keys)):
        values = dict(given) if isinstance(given, Mapping) else dict.fromkeys(names, given)
        if unknown := sorted(values.keys() - {*names}):
            raise ValueError(f"{what} names the unknown table {unknown[0]!r}: expected {', '.join(map(repr, names))}")
        if missing := [name for name in names if name not in values]:
            raise ValueError(f"{what} has no number for table {missing[0]!r}: pass one")
        by_name[what] = values
    for name, value in by_name["keys_per_sample"].items():
        if not (_is_number(value) and 0 < value < math.inf):
            raise ValueError(f"keys_per_sample of table {name!r} is {value!r}: expected a positive number")
    return Workload(
        chosen,
        {name: _whole(f"rows of table {name!r}", value) for name, value in by_name["rows"].items()},
        {name: float(value) for name, value in by_name["keys_per_sample"].items()},
        _whole("samples", samples),
        _whole("dense", dense, least=0),
    )


def _is_number(value: object) -> bool:
    """Return True for a number of Python or NumPy, also if it is not finite."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _whole(name: str, value: float, *, least: int = 1) -> int:
    """Return a whole number, also of a float such as 2e9. Raises ValueError."""
    if not _is_number(value) or not math.isfinite(value) or value != int(value) or not least <= value < 1 << 62:
        raise ValueError(f"{name} is {value!r}: expected a whole number of at least {least}")
    return int(value)


def _host_budget(model: Model, requested: int | str | None, free: int) -> int:
    """Return the requested budget, or one that caches all waiting rows, as far as memory is free."""
    if requested is not None:
        budget = parse_bytes(requested)
        model.planner(budget)  # for its errors
        return budget
    budget = model.least_host
    while budget < free and model.traffic(budget).read >= 1:
        budget = min(free, budget * 3 // 2)
    return budget


def _rates(place: Path, device: str, disk_gbps: float | None, link_gbps: float | None, samples: float | None) -> Rates:
    """Return the speed of the machine, with given numbers instead of measured ones."""
    changes: dict[str, Any] = {"samples": samples}
    if link_gbps is not None:
        changes["link"] = link_gbps * 1e9
    measured = device if link_gbps is None else "cpu"
    if disk_gbps is not None and measured == "cpu":
        disk, copy = disk_gbps * 1e9, copy_rate()
        rates = Rates(device=device, read=disk, write=disk, copy=copy, link=copy, commit_seconds=0.0)
    else:
        try:
            rates = measured_rates(place, device=measured)
        except (RuntimeError, AssertionError) as error:  # torch raises these if there is no such device
            raise ValueError(
                f"device {device!r} cannot be measured ({str(error).splitlines()[0]}): pass link_gbps, or device='cpu'"
            ) from error
    if disk_gbps is not None:
        changes |= {"read": disk_gbps * 1e9, "write": disk_gbps * 1e9}
    return rates.model_copy(update=changes)


def _warnings(found: Estimate, host: int, memory: Any, free: int, place: Path, *, on_host: bool) -> tuple[str, ...]:
    """Return warnings if this machine does not suffice. ``host``: bytes of host memory that are needed."""
    warned = []
    need = host + (found.device_bytes if on_host else 0)
    what = f"host memory of {format_bytes(host)}" + (
        f" and rows on the device, which is this CPU, of {format_bytes(found.device_bytes)}" if on_host else ""
    )
    if need > memory.total:
        warned.append(
            f"{what} exceed the {format_bytes(memory.total)} of this machine: use a smaller device_budget, for more "
            "passes, or a machine with more memory"
        )
    elif need > memory.available:
        warned.append(f"{what} exceed the {format_bytes(memory.available)} that are free now: close other programs")
    if found.disk_bytes > free:
        warned.append(
            f"store and dataset of {format_bytes(found.disk_bytes)} exceed the {format_bytes(free)} that are free at "
            f"{place}: use another disk, a smaller dim, a 16-bit dtype, or an optimizer with less state"
        )
    return tuple(warned)


def _figures(
    found: Estimate, model: Model, traffic: Traffic, plan: StorePlan, budget: str, epochs: int
) -> tuple[Figure, ...]:
    """Return the numbers with their formulas. ``budget``: the name of the host budget."""
    cut, rates = model.cut, found.rates
    work, cut, rates, least = model.work, model.cut, found.rates, model.divided(found.least_host_bytes)
    group_of = {table.name: group for group in model.groups for table in group.tables}
    rows = " + ".join(
        f"{n:,} of {table.name} x ({table.row_bytes} + {device_bytes(group_of[table.name]) - table.row_bytes})"
        for n, table in zip(model.rows_TN.sum(axis=1).tolist(), model.positions.tables, strict=True)
    )
    compute = "no compute" if rates.samples is None else f"{cut.samples:,.0f} samples / {rates.samples:,.0f} per s"
    numbers = 1 + work.dense + sum(work.keys_per_sample.values())
    read, written, moved = map(format_bytes, (traffic.read, traffic.written, traffic.moved))
    parts = {
        "for the dump of a pass and the rows of the next": least.rows, "of planning": least.planning,
        "of transactions": least.transaction, "of evaluation": least.evaluation, "of overhead": least.overhead,
    }  # fmt: skip
    return (
        _figure("passes", found.passes, "passes", f"{work.samples:,} samples / {cut.samples:,.0f} of a pass"),
        _figure(
            "rows of a pass", found.rows_per_pass, "rows",
            f"distinct keys of {cut.samples:,.0f} samples, by Zipf's law with the exponent {found.zipf:.3g}",
        ),
        _figure("rows of the store", found.stored_rows, "rows", f"distinct keys of {work.samples:,} samples"),
        _figure("device", found.device_bytes, "bytes", f"rows of a pass x (row + slot maps): {rows} bytes"),
        _figure(
            "host, at least", found.least_host_bytes, "bytes",
            " + ".join(f"{format_bytes(size)} {what}" for what, size in parts.items()),
        ),
        _figure(
            "host", found.host_bytes, "bytes", f"{budget}: it caches {format_bytes(traffic.cached)} of rows"
        ),
        _figure(
            "store", found.store_bytes, "bytes",
            f"1.15 x ({format_bytes(plan.live)} live + {plan.num_passes} passes x {format_bytes(plan.largest_pass)}) + "
            f"{format_bytes(plan.schedule)} of next uses + {format_bytes(plan.metadata)} of metadata",
        ),
        _figure(
            "dataset", found.dataset_bytes, "bytes",
            f"16 x {found.passes:,} x {found.rows_per_pass:,} keys + 4 x {numbers:g} x {work.samples:,} samples",
        ),
        _figure("disk", found.disk_bytes, "bytes", "store + dataset"),
        _figure(
            "read in an epoch", found.bytes_read, "bytes",
            "rows that neither device nor host held; in the first epoch only those that were used before",
        ),
        _figure("written in an epoch", found.bytes_written, "bytes", f"{found.passes:,} passes x rows x (row + 8)"),
        _figure(
            "an epoch", found.seconds_per_epoch, "seconds",
            f"{found.passes:,} x (max({compute}, {read} / {_rate(rates.read)}, {written} / {_rate(rates.write)} + "
            f"{rates.commit_seconds:.2g} s) + {moved} / {_rate(rates.link)})",
        ),
        _figure(
            "moving rows" if rates.samples is None else "training", found.seconds, "seconds",
            f"{counted(epochs, 'epoch')}, the first of which reads less",
        ),
    )  # fmt: skip


def _figure(name: str, value: float, unit: str, formula: str) -> Figure:
    return Figure(name=name, value=value, unit=unit, formula=formula)


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:,.3g} GB/s"
