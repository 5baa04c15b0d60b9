"""Errors outside the store. A message states the problem, the expected value and the remedy.

TierCacheError
 ├─ SchemaError      the description of the data is wrong: unknown key, unknown table, a name used twice
 ├─ SourceError      the data is wrong: names file, row and column
 ├─ ExtractionError  an extraction cannot start or resume: other options, changed inputs, another process
 ├─ DatasetError     a dataset is missing, damaged, or of another schema
 ├─ BudgetError      something does not fit into its budget
 ├─ PlanError        a plan file is wrong, or of another dataset
 ├─ StateError       state cannot be stored, or does not match the stored state
 ├─ ImportExportError    an export or import cannot be done, or files to import are wrong
 ├─ KeyNotInPassError  a raw key was looked up that the pass being trained does not have (.table, .key, .batch)
 └─ RankError        (a RuntimeError) ranks differ, or one failed, ended or timed out
 CudaError            (a RuntimeError) a GPU cannot be used: names the cause and what to install
 └─ NoGpuError       no driver, or no GPU that it shows

All but TierCacheError itself and RankError are ValueErrors too, and KeyNotInPassError an IndexError instead.
ImportExportWarning: files or state that an export or import leaves out. StoreError and its tree:
`tiercache.store.store_errors`.
"""

from tiercache.kernels.cuda.cuda_errors import CudaError, NoGpuError
from tiercache.store.store_errors import (
    CheckpointError,
    CorruptBlockError,
    CorruptStoreError,
    FormatVersionError,
    NotAStoreError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreInUseError,
    StoreMissingError,
    TableMismatchError,
)

__all__ = [
    "BudgetError",
    "CheckpointError",
    "CorruptBlockError",
    "CorruptStoreError",
    "CudaError",
    "DatasetError",
    "ExtractionError",
    "FormatVersionError",
    "ImportExportError",
    "ImportExportWarning",
    "KeyNotInPassError",
    "NoGpuError",
    "NotAStoreError",
    "PlanError",
    "RankError",
    "SchemaError",
    "SourceError",
    "StateError",
    "StoreClosedError",
    "StoreError",
    "StoreFullError",
    "StoreInUseError",
    "StoreMissingError",
    "TableMismatchError",
    "TierCacheError",
]


class TierCacheError(Exception):
    """Every error that tiercache raises for something a user can change, outside the store."""


class SchemaError(TierCacheError, ValueError):
    """A schema is wrong: names the key, feature or table."""


class SourceError(TierCacheError, ValueError):
    """Input data is wrong: names the file, and the row (0-based in that file) and column if there is one."""


class ExtractionError(TierCacheError, ValueError):
    """An extraction cannot start or resume."""


class DatasetError(TierCacheError, ValueError):
    """A dataset is missing, unfinished, damaged, or of another schema."""


class BudgetError(TierCacheError, ValueError):
    """Something does not fit into a budget: gives the numbers and what to raise."""

    def __init__(self, message: str, *, least: int | None = None) -> None:
        super().__init__(message)
        self.least = least
        """The bytes that would be enough, if known."""


class PlanError(TierCacheError, ValueError):
    """A plan file is wrong, or of another dataset: names the file and the key."""


class StateError(TierCacheError, ValueError):
    """State cannot be stored or restored: names the object and its place."""


class ImportExportError(TierCacheError, ValueError):
    """An export or import cannot be done: names the file or table."""


class KeyNotInPassError(TierCacheError, IndexError):
    """A batch has a key that the key set of its sub-dataset lacks: table, key, and number of the batch in its pass."""

    def __init__(self, message: str, *, table: str, key: int, batch: int) -> None:
        super().__init__(message)
        self.table, self.key, self.batch = table, key, batch


class RankError(TierCacheError, RuntimeError):
    """Ranks cannot continue together: names the rank and its operation, if known."""


class ImportExportWarning(UserWarning):
    """An export or import leaves something out: names the file or table."""
