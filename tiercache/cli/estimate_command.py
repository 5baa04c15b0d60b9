"""``tiercache estimate``: bytes and hours of training before there is any data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiercache.cli.output import Json, Output, Quiet, new_table
from tiercache.sizes import printable

if TYPE_CHECKING:
    from rich.console import Console

    from tiercache.store import Table

_PARTS = "NAME:ROWS:DIM or NAME:ROWS:DIM:KEYS, such as user:2e9:64 or tag:1e6:16:4.5"


def estimate(
    samples: Annotated[str, typer.Option(help="Samples of an epoch, such as 4e9.")],
    rows: Annotated[str | None, typer.Option(help="Distinct keys, if there is one table.")] = None,
    dim: Annotated[int | None, typer.Option(help="Numbers per vector, with --rows; default: 16.")] = None,
    keys_per_sample: Annotated[
        float | None, typer.Option(help="Keys that a sample looks up, with --rows; default: 1.")
    ] = None,
    table: Annotated[list[str] | None, typer.Option(help=f"Instead of --rows, for each table: {_PARTS}.")] = None,
    optimizer: Annotated[str, typer.Option(help="Row optimizer, as in a schema.")] = "adagrad",
    dtype: Annotated[str, typer.Option(help="dtype of vectors: float32, bfloat16 or float16.")] = "float32",
    dense: Annotated[int, typer.Option(help="Dense features per sample.")] = 0,
    epochs: Annotated[int, typer.Option(help="Number of times the samples are trained.")] = 1,
    zipf: Annotated[float | None, typer.Option(help="The exponent of the keys' frequencies; default: 1.")] = None,
    unique_per_pass: Annotated[
        str | None, typer.Option(help="Distinct keys per pass: decides where passes end or, with --passes, --zipf.")
    ] = None,
    passes: Annotated[int | None, typer.Option(help="Passes per epoch.")] = None,
    device_budget: Annotated[
        str | None, typer.Option(help="Device memory for the rows of a pass; default: 8GiB.")
    ] = None,
    host_budget: Annotated[str | None, typer.Option(help="Host memory; default: at most 70 % of free memory.")] = None,
    eval_budget: Annotated[
        str | None, typer.Option(help="Host memory for evaluation, 0 for none; default: 1/16.")
    ] = None,
    commit_every: Annotated[int, typer.Option(help="Passes between commits.")] = 1,
    retention: Annotated[int, typer.Option(help="Newest commits that the store keeps.")] = 1,
    samples_per_second: Annotated[float | None, typer.Option(help="The speed of your model.")] = None,
    disk_gbps: Annotated[float | None, typer.Option(help="GB/s of the disk, instead of measuring it.")] = None,
    link_gbps: Annotated[float | None, typer.Option(help="GB/s from host to device, instead of measuring it.")] = None,
    store: Annotated[Path, typer.Option(help="The directory of the store: its disk is measured.")] = Path(),
    device: Annotated[str, typer.Option(help="The device: cpu, cuda or cuda:1.")] = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Estimate disk, host, device and hours from sizes alone, each with its formula, before there is any data.

    Once data is extracted, `tiercache info` and `tiercache plan` are exact.
    """
    from tiercache.rows.sizing import estimate as run

    tables, rows_of, keys_of = _tables(table or [], rows, dim, keys_per_sample, optimizer, dtype)
    found = run(
        tables, rows_of, samples=_number("--samples", samples), keys_per_sample=keys_of, dense=dense, epochs=epochs,
        zipf=zipf, unique_per_pass=None if unique_per_pass is None else _number("--unique-per-pass", unique_per_pass),
        passes=passes, device_budget=device_budget, host_budget=host_budget, eval_budget=eval_budget,
        commit_every=commit_every, retention=retention, samples_per_second=samples_per_second, disk_gbps=disk_gbps,
        link_gbps=link_gbps, store=store, device=device,
    )  # fmt: skip

    def show(console: Console) -> None:
        shown = new_table(f"{optimizer}, {dtype}, {', '.join(one.name for one in tables)}", "", "estimate")
        shown.add_column("formula")
        for one in found.figures:
            shown.add_row(one.name, one.text, one.formula)
        console.print(shown)
        for text in found.assumptions:
            console.print(f"assumed: {text}")

    output = Output(as_json, quiet)
    output.result(found.to_record(), show)
    for warning in () if quiet else found.warnings:
        typer.echo(printable(f"warning: {warning}"), err=True)


def _tables(
    texts: list[str], rows: str | None, dim: int | None, keys: float | None, optimizer: str, dtype: str
) -> tuple[list[Table], dict[str, float], dict[str, float]]:
    """Return the tables and, by name, their rows and keys per sample. Raises ValueError."""
    from tiercache.store import Table
    from tiercache.store.optimizer import optimizer_from_record

    if (rows is None) == (not texts):
        raise ValueError(f"pass --rows, for one table, or --table for each: {_PARTS}")
    if texts and (dim is not None or keys is not None):
        raise ValueError(f"--dim and --keys-per-sample are for the table of --rows: write them in --table: {_PARTS}")
    dim, keys = 16 if dim is None else dim, 1.0 if keys is None else keys
    parts = [("table", rows, dim, keys)] if rows is not None else [_split(text) for text in texts]
    step = optimizer_from_record({"kind": optimizer})
    tables = [Table(name=name, dim=width, optimizer=step, dtype=dtype) for name, _, width, _ in parts]
    return tables, {name: _number("rows", n) for name, n, *_ in parts}, {name: n for name, *_, n in parts}


def _split(text: str) -> tuple[str, str, int, float]:
    """Return the name, rows, dim and keys per sample of a table. Raises ValueError."""
    parts = text.rsplit(":", text.count(":") if text.count(":") < 4 else 3)
    if len(parts) not in {3, 4} or not parts[2].isdecimal():
        raise ValueError(f"--table is {text!r}: expected {_PARTS}")
    return parts[0], parts[1], int(parts[2]), _number("the keys of a sample", parts[3]) if parts[3:] else 1.0


def _number(name: str, text: str) -> float:
    """Return a number such as 2e9 or 2_000_000. Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}: expected a number, such as 2e9") from None
