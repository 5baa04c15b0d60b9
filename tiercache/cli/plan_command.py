"""``tiercache plan``: budgets for this machine, and the predicted cost of each pass."""

from __future__ import annotations

from collections import Counter
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from tiercache.cli.output import Json, Output, Quiet

if TYPE_CHECKING:
    from rich.console import Console

    from tiercache.data.dataset import PassDataset
    from tiercache.planning.capacity import Capacity
    from tiercache.planning.pass_plan import PassPlan


def plan(
    dataset: Annotated[Path, typer.Argument(help="The dataset to train.")],
    store: Annotated[Path | None, typer.Option(help="The directory of the store: its disk is measured.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The plan: a TOML file for TierCache(plan=).")] = None,
    optimize: Annotated[str, typer.Option(help="speed, or memory: the minimum host memory that trains.")] = "speed",
    order: Annotated[
        str | None, typer.Option(help="overlap: train sub-datasets that share rows one after another.")
    ] = None,
    device: Annotated[str, typer.Option(help="The device: cpu, cuda or cuda:1.")] = "cpu",
    device_budget: Annotated[
        str | None, typer.Option(help="Device memory; default: the need of the largest pass.")
    ] = None,
    plain_keys: Annotated[bool, typer.Option("--plain-keys", help="Include the index for plain and raw keys.")] = False,
    host_budget: Annotated[str | None, typer.Option(help="Host memory limit; default: 70 % of free memory.")] = None,
    eval_budget: Annotated[
        str | None, typer.Option(help="Host memory for evaluation, 0 for none; default: 1/16.")
    ] = None,
    store_budget: Annotated[str | None, typer.Option(help="Maximum bytes of the store; default: no limit.")] = None,
    commit_every: Annotated[
        int | None, typer.Option(min=1, help="Passes between commits; default: chosen by the plan.")
    ] = None,
    samples_per_second: Annotated[
        float | None, typer.Option(min=1e-3, max=1e18, help="The speed of your model.")
    ] = None,
    trial: Annotated[bool, typer.Option("--trial", help="Train a small model on one pass to measure this.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the machine again.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the machine, read the key sets, and write a plan: budgets, and predicted rows, bytes and seconds.

    Rows and bytes are exact, because the schedule is known. Without --samples-per-second or --trial the predicted
    seconds cover only moving rows.
    """
    from psutil import virtual_memory

    from tiercache.cli.dataset_info import curve_record, curve_table, reuse_of
    from tiercache.data.dataset import PassDataset
    from tiercache.dist.training_store import at_stored_paths
    from tiercache.planning.capacity import Capacity
    from tiercache.planning.schedule import order_rule
    from tiercache.rows.sizing import MEMORY_SHARE
    from tiercache.rows.transfer_rates import existing_folder, measured_rates
    from tiercache.sizes import format_bytes, parse_bytes
    from tiercache.store.checkpoint import tensor_sizes
    from tiercache.store.files import local_path
    from tiercache.store.locks import MARKER
    from tiercache.store.opening import newest_record

    if trial and samples_per_second is not None:
        raise ValueError("pass either --samples-per-second or --trial, which measures it")
    if trial:
        from tiercache.train.trial import samples_per_second as tried

    if optimize not in ("speed", "memory"):
        raise ValueError(f"--optimize is {optimize!r}: it must be speed or memory")
    data = PassDataset.open(dataset)
    if store is not None and (store / MARKER).exists() and (found := newest_record(store)) is not None:
        data = at_stored_paths(data, found.tables)
    reuse = reuse_of(data, order_rule(data, order))
    budget = None if device_budget is None else parse_bytes(device_budget)
    need = _device_budget(data, device, budget, plain_keys=plain_keys)
    rates = measured_rates(store or dataset, device=device, again=measure)
    eval_bytes = None if eval_budget is None else parse_bytes(eval_budget, least=0)
    samples_P = [p.samples for p in data]
    tensors = tensor_sizes(data.tables)
    capacity = Capacity(reuse, samples_P, rates, eval_budget=eval_bytes, tensors=tensors)
    if trial:
        folder, least = existing_folder(store or dataset), capacity.least()
        samples_per_second = tried(data, folder, device=device, device_budget=need, host_budget=2 * least)
    rates = rates.model_copy(update={"samples": samples_per_second})
    capacity = Capacity(reuse, samples_P, rates, eval_budget=eval_bytes, tensors=tensors)
    free = int(MEMORY_SHARE * virtual_memory().available)
    points = capacity.curve(free if host_budget is None else parse_bytes(host_budget))
    goal = cast("Literal['speed', 'memory']", optimize)
    store_bytes = None if store_budget is None else parse_bytes(store_budget)
    point = capacity.choose(goal, points, commit_every, store_bytes)
    made = capacity.plan(point, optimize=goal, device_budget=need, store_budget=store_bytes)
    if out is not None:
        local_path(out, "a plan").write_text(made.to_toml(), encoding="utf-8")
    own = reuse if order is None else reuse_of(data, None)
    kept = {"kept_bytes": reuse.kept_bytes, "kept_bytes_own_order": own.kept_bytes}
    first = [_checkpoint_record(capacity, plan) for plan in point.passes if capacity.checkpoints.rows(plan)]
    record = {
        "checkpoint": first,
        "plan": made.model_dump(mode="json", by_alias=True),
        "curve": list(map(curve_record, points)),
        **kept,
    }

    def show(console: Console) -> None:
        console.print(curve_table(points, seconds=True))
        if order is not None:
            saved = format_bytes(reuse.kept_bytes - own.kept_bytes)
            console.print(f"order {order}: each epoch loads {saved} less than in the sub-datasets' own order")
        bounds = Counter(one.bound for one in made.passes[len(data) :])
        console.print(
            f"device {format_bytes(made.budgets.device)}, host {format_bytes(point.host_budget)}, a commit every "
            f"{'pass' if point.commit_every == 1 else f'{point.commit_every} passes'}: {point.epoch_seconds:,.3g} s "
            "predicted for an epoch; passes are bound "
            + ", ".join(f"{count} by {name}" for name, count in bounds.most_common())
            + ("" if rates.samples else "; compute is unknown: pass --samples-per-second or --trial")
        )
        for how in dict.fromkeys(one["how"] for one in first):
            of_how = [one for one in first if one["how"] == how]
            rows, size = (sum(one[name] for one in of_how) for name in ("rows", "bytes"))
            console.print(
                f"{rows:,} rows start from checkpoints in {len(of_how)} passes that read {how}: at most "
                f"{format_bytes(size)} in {size / rates.read:,.3g} s, while the passes before them train"
            )
        if out is not None:
            console.print(f"{out} is the plan: TierCache(..., plan={str(out)!r})")

    Output(as_json, quiet).result(record, show)


def _checkpoint_record(capacity: Capacity, plan: PassPlan) -> dict[str, Any]:
    """Return what a pass reads from checkpoints."""
    reads = capacity.checkpoints.of(plan)
    return {
        "pass": plan.pass_index, "rows": capacity.checkpoints.rows(plan), "bytes": reads.num_bytes,
        "requests": reads.requests, "how": capacity.checkpoints.how(reads),
    }  # fmt: skip


def _device_budget(data: PassDataset, device: str, budget: int | None, *, plain_keys: bool) -> int:
    """Return the budget, or the need of the largest pass, with its index if keys are plain.

    Raises BudgetError if the need exceeds the budget.
    """
    from tiercache.errors import BudgetError
    from tiercache.planning.row_offsets import RowOffsets
    from tiercache.rows.backends.open_backend import open_backend
    from tiercache.rows.device import DeviceMemoryPlan
    from tiercache.sizes import format_bytes, option_bytes
    from tiercache.store.table import group_tables
    from tiercache.train.raw_keys import IndexPlan

    backend = open_backend(device, data.tables)
    need = DeviceMemoryPlan.of(RowOffsets.of(data, group_tables(data.tables)), backend)
    index = IndexPlan.of(data, backend).num_bytes if plain_keys else 0
    if budget is None:
        need.check(need.num_bytes)
        return need.num_bytes + index
    need.check(budget)
    if index > budget - need.num_bytes:
        raise BudgetError(
            f"the index of keys takes {format_bytes(index)}, and the rows of a pass leave "
            f"{format_bytes(budget - need.num_bytes)} of a device_budget of {format_bytes(budget)}: raise it to "
            f"{option_bytes(need.num_bytes + index)}, or omit --plain-keys to search keys on the CPU"
        )
    return budget
