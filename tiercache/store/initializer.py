"""Initializers of vectors as values, and the kinds of values that a record can name."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Zeros:
    """Every number starts at 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """All numbers start at the same value."""

    value: float
    """The value, rounded to float32."""

    def __post_init__(self) -> None:
        check_finite(self.value, "value", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Uniform:
    """Numbers start uniform in [low, high): the same bits on every device."""

    low: float = -0.05
    """The least value."""
    high: float = 0.05
    """Above every value."""

    def __post_init__(self) -> None:
        check_finite(self.low, "low", self)
        check_finite(self.high, "high", self)
        if self.low > self.high:
            raise ValueError(f"Uniform runs from {self.low} to {self.high}: low must not exceed high")


@dataclass(frozen=True, kw_only=True, slots=True)
class Normal:
    """Numbers start normally distributed; not promised to be the same bits on different devices."""

    mean: float = 0.0
    """The mean."""
    std: float = 1.0
    """The standard deviation."""

    def __post_init__(self) -> None:
        check_finite(self.mean, "mean", self)
        check_finite(self.std, "std", self)
        if self.std < 0:
            raise ValueError(f"std of Normal is {self.std}: it must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The row of key k starts as row k of a tensor in safetensors files, read when the key is first used.

    Rows that are never used are never read or stored. Numbers are rounded to the nearest of the table's dtype, ties to
    even; 8-bit floats are multiplied by their scales first. The files must stay where they are, unchanged.
    """

    path: str = dataclasses.field(compare=False)
    """A .safetensors file, an index of several (.safetensors.index.json), or a folder with one of these.

    Initializers with different paths are equal: files may move, and the store knows them by their content."""
    tensor: str
    """The name of the tensor (rows, dim), of F32, BF16, F16, F8_E4M3 or F8_E5M2. ``*`` in it matches the number of
    each part of a tensor that is cut by rows, as in ``ngram_embedding.shard_*.weight``."""
    scale: str | None = None
    """The name of the tensor with the scales of an 8-bit one: a number for each block, row, or for all. None:
    ``<tensor>_scale_inv``."""
    scale_block: tuple[int, int] | None = None
    """The rows and columns that share a scale; None: as the shapes say, which must leave one choice. A vector has a
    scale of each row."""

    def __post_init__(self) -> None:
        for name, value in (("path", self.path), ("tensor", self.tensor), ("scale", self.scale)):
            text = os.fspath(value) if name == "path" and isinstance(value, os.PathLike) else value
            if not isinstance(text, str) or not text or "\0" in text:
                if name == "scale" and value is None:
                    continue
                raise ValueError(f"invalid {name} {value!r} of Checkpoint: expected a non-empty string")
            if name == "path":
                object.__setattr__(self, "path", str(Path(text).expanduser().absolute()))
        if self.scale_block is not None:
            block = tuple(self.scale_block) if isinstance(self.scale_block, list | tuple) else ()
            if len(block) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in block):
                raise ValueError(f"invalid scale_block {self.scale_block!r} of Checkpoint: expected [rows, columns]")
            object.__setattr__(self, "scale_block", block)


Initializer = Zeros | Constant | Uniform | Normal | Checkpoint

INITIALIZER_KINDS: dict[str, type[Initializer]] = {
    cls.__name__.lower(): cls for cls in (Zeros, Constant, Uniform, Normal, Checkpoint)
}


def initializer_code(initializer: Initializer) -> tuple[int, float, float]:
    """Return (kind, a, b) as kernels take it: 0 zeros, 1 constant a, 2 uniform [a, b), 3 normal (mean a, std b)."""
    match initializer:
        case Zeros():
            return 0, 0.0, 0.0
        case Constant():
            return 1, float(initializer.value), 0.0
        case Uniform():
            return 2, float(initializer.low), float(initializer.high)
        case Normal():
            return 3, float(initializer.mean), float(initializer.std)
        case Checkpoint():
            raise ValueError("rows of a checkpoint are read, not generated")


def initializer_to_record(initializer: Initializer) -> dict[str, Any]:
    """Return the initializer as plain JSON values."""
    kind = next(kind for kind, cls in INITIALIZER_KINDS.items() if type(initializer) is cls)
    return {"kind": kind, **dataclasses.asdict(initializer)}


def initializer_from_record(record: dict[str, Any]) -> Initializer:
    """Build the initializer that ``initializer_to_record`` wrote. Raises ValueError for anything else."""
    return build(record, INITIALIZER_KINDS, "initializer")  # type: ignore[no-any-return]


def build(record: Any, kinds: dict[str, Any], what: str) -> Any:
    """Build the dataclass that a record's ``kind`` names, from exactly its fields."""
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind not in kinds:
        wrong = (
            f"invalid {what} {record!r}: expected a record of kind"
            if kind is None
            else f"{what} {kind!r} is unknown: expected one of"
        )
        raise ValueError(f"{wrong} {', '.join(kinds)}")
    cls, values = kinds[kind], {name: value for name, value in record.items() if name != "kind"}
    fields = dataclasses.fields(cls)
    allowed = [field.name for field in fields]
    if unknown := [name for name in values if name not in allowed]:
        raise ValueError(f"{what} {kind!r} has no {unknown[0]!r}: it takes {', '.join(allowed) or 'nothing'}")
    needed = [field.name for field in fields if field.default is dataclasses.MISSING]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{what} {kind!r} lacks {missing[0]!r}: set it to a number")
    return cls(**values)


def check_finite(value: Any, name: str, owner: object) -> None:
    """Raise ValueError unless ``value`` is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise ValueError(f"{name} of {type(owner).__name__} is {value!r}: it must be a finite number")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False
