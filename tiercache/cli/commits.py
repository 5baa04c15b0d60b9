"""``tiercache compact``, ``rollback`` and ``reorganize`` a store, and ``repartition`` a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiercache.cli.output import Json, Output, Quiet, StorePath
from tiercache.cli.target import open_store

_Dataset = Annotated[Path, typer.Argument(help="The directory of the dataset.")]


def compact(path: StorePath, as_json: Json = False, quiet: Quiet = False) -> None:
    """Leave one range for each table, in hash order, for serving; training goes on after a reorganization."""
    from tiercache.training.progress import rewrite_bars

    output = Output(as_json, quiet)
    with open_store(path, mode="a") as store:
        rows = 0 if store.commit is None else sum(store.live_rows(table.name) for table in store.tables)
        with rewrite_bars(rows, shown=output.is_text) as advance:
            commit = store.compact(progress=advance)
    output.result({"commit": commit.id, "rows": rows}, f"commit {commit.id} has {rows:,} rows in hash order")


def rollback(
    path: StorePath,
    to: Annotated[int, typer.Option(help="A commit that is kept.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Go back to the rows, the dense state and the position of an older commit, as a new commit."""
    with open_store(path, mode="a") as store:
        commit = store.rollback(to)
    done = {"commit": commit.id, "pass": commit.cursor.pass_index, "sample": commit.cursor.sample}
    Output(as_json, quiet).result(done, f"commit {commit.id} has the rows and the position of commit {to}")


def reorganize(
    path: StorePath,
    dataset: _Dataset,
    order: Annotated[str | None, typer.Option(help="overlap, where the training has that order.")] = None,
    order_seed: Annotated[int | None, typer.Option(help="The seed of the training's order of passes.")] = None,
    store_budget: Annotated[str | None, typer.Option(help="What the store may take meanwhile, such as 200GiB.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Put the rows of a store in the order in which a dataset will use them; training does it by itself."""
    from tiercache.data.dataset import PassDataset
    from tiercache.training.reorganize import reorganize as run

    output = Output(as_json, quiet)
    with open_store(path, mode="a") as store:
        before = store.commit
        commit = run(
            store, PassDataset.open(dataset), order=order, order_seed=order_seed, store_budget=store_budget,
            progress=None if output.is_text else False,
        )  # fmt: skip
    done = {"commit": None if commit is None else commit.id, "rewritten": commit != before}
    text = f"{path} follows {dataset} already"
    if commit is None:
        text = f"{path} has no commit, so it may follow any dataset"
    elif commit != before:
        text = f"commit {commit.id} has the rows in the order of {dataset}"
    output.result(done, text)


def repartition(
    dataset: _Dataset,
    out: Annotated[Path, typer.Argument(help="The directory of the new dataset.")],
    device_budget: Annotated[str | None, typer.Option(help="What the rows of a pass may take, such as 8GiB.")] = None,
    devices: Annotated[int, typer.Option(help="How many devices of that budget hold a pass together.")] = 1,
    rows: Annotated[int | None, typer.Option(help="Instead of a budget: the most keys of a pass.")] = None,
    batch_multiple: Annotated[
        int | None, typer.Option(help="Passes end at multiples of so many samples; as extracted where not given.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Cut the passes of a dataset into smaller ones: for fewer devices, or devices that hold less."""
    from tiercache.data.repartition import repartition as run

    made = run(
        dataset, out, device_budget=device_budget, devices=devices, rows=rows, batch_multiple=batch_multiple
    )  # fmt: skip
    done = {"path": str(out), "passes": len(made), "samples": made.samples}
    Output(as_json, quiet).result(done, f"{out} has {len(made):,} passes with {made.samples:,} samples")
