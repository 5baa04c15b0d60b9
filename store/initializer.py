"""What the vectors of rows start from, as values; the numbers themselves come from kernels (docs/format/bits.md)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from tiercache.store.optimizer import build, check_finite


@dataclass(frozen=True, kw_only=True, slots=True)
class Zeros:
    """Every number starts at 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """Every number starts at one value."""

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


Initializer = Zeros | Constant | Uniform | Normal

INITIALIZER_KINDS: dict[str, type[Initializer]] = {
    "zeros": Zeros,
    "constant": Constant,
    "uniform": Uniform,
    "normal": Normal,
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


def initializer_to_record(initializer: Initializer) -> dict[str, Any]:
    """Return the initializer as plain JSON values."""
    kind = next(kind for kind, cls in INITIALIZER_KINDS.items() if type(initializer) is cls)
    return {"kind": kind, **dataclasses.asdict(initializer)}


def initializer_from_record(record: dict[str, Any]) -> Initializer:
    """Build the initializer that ``initializer_to_record`` wrote. Raises ValueError for anything else."""
    return build(record, INITIALIZER_KINDS, "initializer")  # type: ignore[no-any-return]
