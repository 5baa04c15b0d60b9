"""An export or import that kills itself, run by test_kill in separate processes."""

import warnings
from pathlib import Path

import pyarrow.parquet

import tiercache as tc
from tests.crash.told import Told
from tiercache.io import exporting, importing, numpy_format
from tiercache.store.engines import lmdb_engine

PRELOADED = (exporting, importing, numpy_format, lmdb_engine, pyarrow.parquet)


def run(folder: Path, call: str, format_: str, fatal: int) -> None:
    """Export ``a.tc``, or import to ``b.tc``, and die after ``fatal`` calls of progress (-1: never)."""
    warnings.simplefilter("ignore")
    if call == "export":
        tc.export_store(folder / "a.tc", folder / format_, format=format_, progress=Told(fatal))
    else:
        tc.import_store(folder / format_, folder / "b.tc", progress=Told(fatal))
