"""Commands on the rows of a store, such as ``tiercache lookup`` and ``compact``; and ``tiercache repartition``."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiercache.cli.output import Json, Output, Quiet, StorePath, new_table, open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console


_Dataset = Annotated[Path, typer.Argument(help="The directory of the dataset.")]


def compact(path: StorePath, as_json: Json = False, quiet: Quiet = False) -> None:
    """Rewrite each table as one range in hash order, for serving. The next training run reorganizes the store."""
    from tiercache.reporting.progress import rewrite_bars

    output = Output(as_json, quiet)
    with open_store(path, mode="a") as store:
        rows = 0 if store.commit is None else sum(store.live_rows(table.name) for table in store.tables)
        with rewrite_bars(rows, shown=output.is_text) as advance:
            commit = store.compact(progress=advance)
    output.result({"commit": commit.id, "rows": rows}, f"commit {commit.id} has {rows:,} rows in hash order")


def rollback(
    path: StorePath,
    to: Annotated[str, typer.Option(help="The id of a commit that the store keeps, or the name of a pin.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a new commit with the rows, the dense state and the position of an older one."""
    with open_store(path, mode="a") as store:
        commit = store.rollback(int(to) if to.isdecimal() else to)
    done = {"commit": commit.id, "pass": commit.cursor.pass_index, "sample": commit.cursor.sample}
    Output(as_json, quiet).result(done, f"commit {commit.id} has the rows and the position of commit {to}")


def pin(
    path: StorePath,
    name: Annotated[str, typer.Argument(help="A name for the commit, such as best.")],
    commit: Annotated[
        int | None, typer.Argument(help="A commit that the store keeps; the newest if not given.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Keep a commit by name, in addition to the newest ones."""
    with open_store(path, mode="a") as store:
        made = store.pin(name, commit)
    done = {"commit": made.id, "name": name, "pinned": made.pins[name]}
    Output(as_json, quiet).result(done, f"commit {made.pins[name]} is pinned as {name!r}")


def unpin(
    path: StorePath,
    name: Annotated[str, typer.Argument(help="The name of a pinned commit.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Unpin a commit: blobs that only it needs are deleted, unless a reader has it open."""
    with open_store(path, mode="a") as store:
        made = store.unpin(name)
    Output(as_json, quiet).result({"commit": made.id, "name": name}, f"no commit is pinned as {name!r} anymore")


def reorganize(
    path: StorePath,
    dataset: _Dataset,
    order: Annotated[str | None, typer.Option(help="overlap, if training uses that order.")] = None,
    order_seed: Annotated[int | None, typer.Option(help="The seed of the order of passes in training.")] = None,
    store_budget: Annotated[
        str | None, typer.Option(help="Limit of the store during the command, such as 200GiB.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Put the rows of a store in the order in which a dataset uses them. Training does it automatically."""
    from tiercache.data.dataset import PassDataset
    from tiercache.dist.reorganize import reorganize as run

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
    device_budget: Annotated[
        str | None, typer.Option(help="Device memory for the rows of a pass, such as 8GiB.")
    ] = None,
    devices: Annotated[int, typer.Option(help="Devices with that budget that train a pass together.")] = 1,
    rows: Annotated[int | None, typer.Option(help="Maximum keys per pass, instead of a budget.")] = None,
    batch_multiple: Annotated[
        int | None, typer.Option(help="Passes end at multiples of this many samples; as extracted if not given.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Cut the passes of a dataset into smaller ones, for fewer devices or devices with less memory."""
    from tiercache.data.repartition import repartition as run

    parts = run(
        dataset, out, device_budget=device_budget, devices=devices, rows=rows, batch_multiple=batch_multiple
    )  # fmt: skip
    done = {"path": str(out), "passes": len(parts), "samples": parts.samples}
    Output(as_json, quiet).result(done, f"{out} has {len(parts):,} passes with {parts.samples:,} samples")


def lookup(
    path: StorePath,
    table: Annotated[str, typer.Argument(help="The name of the table.")],
    keys: Annotated[
        list[str] | None, typer.Argument(help="Integer keys; put -- before them if one is negative.")
    ] = None,
    string: Annotated[bool, typer.Option("--string", help="KEYS are strings, not integers.")] = False,
    cross: Annotated[
        bool,
        typer.Option(
            "--cross",
            help="KEYS are the values of one cross, in the order of the schema's columns. Whole numbers are values of "
            'integer columns; put "..." around a string of digits.',
        ),
    ] = False,
    num_buckets: Annotated[int | None, typer.Option(min=1, help="num_buckets of the feature in the schema.")] = None,
    keys_file: Annotated[
        Path | None, typer.Option("--keys", help="A .npy file of keys, or a text file with one key per line.")
    ] = None,
    missing: Annotated[str, typer.Option(help="Rows of missing keys: error, initial or zeros.")] = "error",
    commit: Annotated[int | None, typer.Option(help="The commit to read; the newest if not given.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the rows of keys: the vector and every optimizer state."""
    import numpy as np

    from tiercache.data.encode import key_of
    from tiercache.io.key_file import read_keys
    from tiercache.store import KeyMissingError

    if string and cross:
        raise ValueError("pass either --string or --cross: the values of a cross can be strings")
    if keys_file is not None and (string or cross):
        raise ValueError(
            f"{keys_file} has integer keys: omit {'--string' if string else '--cross'} and write those of tc.key_of to "
            "the file, or pass the values as arguments"
        )
    texts, lookup_keys = _keys(keys or [], num_buckets, string=string, cross=cross)
    if keys_file is not None:
        stored = read_keys(keys_file)
        texts += map(str, stored.tolist())
        if num_buckets:
            stored = np.array([key_of(key, num_buckets=num_buckets) for key in stored.tolist()], np.int64)
        lookup_keys = np.concatenate([lookup_keys, stored])
    if not lookup_keys.size:
        raise ValueError("no key to look up: pass keys, or a file of them with --keys")
    output = Output(as_json, quiet)
    with open_store(path, commit) as store, output.working() as progress:
        try:
            fields = store.lookup(table, lookup_keys, missing=missing, progress=progress)
        except KeyMissingError as error:
            missing_texts = [text for text, key in zip(texts, lookup_keys.tolist(), strict=True) if key in error.keys]
            shown = ", ".join(missing_texts[:3]) + (", ..." if len(missing_texts) > 3 else "")
            seen = str(error).rpartition(" (")[0]  # the keys follow, hashes of the texts
            raise ValueError(f"{seen} ({shown}): leave them out, or pass --missing initial or zeros") from error
    found = [
        {"key": key, **({"text": text} if string or cross else {})}
        | {name: values[i].tolist() for name, values in fields.items()}
        for i, (key, text) in enumerate(zip(lookup_keys.tolist(), texts, strict=True))
    ]

    def show(console: Console) -> None:
        shown = new_table(f"table {table}", "key", *fields)
        for i, text in enumerate(texts):
            shown.add_row(text, *(_numbers(values[i]) for values in fields.values()))
        console.print(shown)

    output.result(found, show)


def changes(
    path: StorePath,
    since: Annotated[int, typer.Option(help="A commit; -1 for all rows.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Count the rows of each table that changed after a commit; export --since writes them."""
    output = Output(as_json, quiet)
    with open_store(path) as store, output.working():
        newest = -1 if store.commit is None else store.commit.id
        counts = {table.name: store.changed_rows(table.name, since=since) for table in store.tables}
        for name in counts:
            store.warn_of_forgotten(name, since=since)
    lines = (
        f"{name}: {rows:,} rows changed between commit {since} and commit {newest}" for name, rows in counts.items()
    )
    output.result({"since": since, "commit": newest, "rows": counts}, "\n".join(lines))


def diff(
    path: StorePath,
    other: Annotated[Path | None, typer.Argument(help="Another store; default: the same one.")] = None,
    commit: Annotated[int | None, typer.Option("--from", help="A commit of the first store.")] = None,
    other_commit: Annotated[int | None, typer.Option("--to", help="A commit of the second store.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare two stores, or two commits of one, row by row and bit by bit; exit code 1 if they differ."""
    from tiercache.store import differences

    output = Output(as_json, quiet)
    with ExitStack() as stack:
        first = open_store(path)
        stack.callback(first.close)
        second = first if other is None else open_store(other)
        stack.callback(second.close)
        first = first if commit is None else first.at(commit)
        second = second if other_commit is None else second.at(other_commit)
        progress = stack.enter_context(output.working())
        found = differences(first, second, progress=partial(progress, "diff"))
    same = not any(one.only_first or one.only_second or one.different for one in found)

    def show(console: Console) -> None:
        names = "only first", "only second", "different", "same"
        shown = new_table("differences", "table", *names, "for example keys")
        for one in found:
            counts = (one.only_first, one.only_second, one.different, one.same)
            shown.add_row(one.table, *(f"{count:,}" for count in counts), ", ".join(map(str, one.examples)))
        console.print(shown)

    output.result({"same": same, "tables": [asdict(one) for one in found]}, show)
    if not same:
        raise typer.Exit(1)


def _keys(
    texts: Sequence[str], num_buckets: int | None, *, string: bool, cross: bool
) -> tuple[list[str], NDArray[np.int64]]:
    """Return the labels of rows, and their keys."""
    import numpy as np

    from tiercache.data.encode import key_of
    from tiercache.io.key_file import integer_of

    if cross:
        keys = [key_of(*map(_cross_value, texts), num_buckets=num_buckets)]
        return [" x ".join(texts)], np.array(keys, dtype=np.int64)
    if string:
        return list(texts), np.array([key_of(text, num_buckets=num_buckets) for text in texts], dtype=np.int64)
    keys = []
    for text in texts:
        key = integer_of(text)
        if key is None:
            raise ValueError(f"{text!r} is not an integer key: pass --string to look up a string")
        if not -(1 << 63) <= key < 1 << 63:
            unsigned = f"; the key of {key} in a uint64 column is {key - (1 << 64)}" if 0 < key < 1 << 64 else ""
            raise ValueError(f"key {key} does not fit in int64: pass keys from -2**63 to 2**63 - 1{unsigned}")
        keys.append(key_of(key, num_buckets=num_buckets) if num_buckets else key)
    return list(texts), np.array(keys, dtype=np.int64)


def _cross_value(text: str) -> str | int:
    from tiercache.io.key_file import integer_of

    if len(text) > 1 and text[0] == text[-1] == '"':
        return text[1:-1]
    number = integer_of(text)
    return text if number is None else number


def _numbers(values: NDArray[np.float32]) -> str:
    shown = " ".join(f"{value:.6g}" for value in values[:6].tolist())
    return f"{shown} ... ({values.size})" if values.size > 6 else shown
