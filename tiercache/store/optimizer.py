"""Row optimizers and initializers as values: their names, their state in a row, and where it starts."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from tiercache.store.bits import vector_words


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


_LARGEST = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One part of a row: the vector or an optimizer state."""

    name: str
    width: int
    """Numbers in a row."""
    initial: float
    """What an optimizer state starts from; vectors start from the table's initializer."""
    dtype: str = "float32"
    """Of the numbers as they are kept: a vector's is its table's, that of optimizer state float32."""
    words: int = dataclasses.field(init=False, repr=False, compare=False)
    """Words of 4 bytes in a row: what has 2 bytes a number is padded to whole ones."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", vector_words(self.width, self.dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD:
    """Stochastic gradient descent: ``row -= learning_rate * gradient``; no state."""

    learning_rate: float = 1e-2
    """Until it is changed between two steps."""
    decay: float = 0.0
    """L2 decay of rows that a batch touches: ``gradient += decay * row``."""

    def __post_init__(self) -> None:
        _check_rates(self)

    def state_fields(self, dim: int) -> tuple[Field, ...]:
        """Return the state fields of a row whose vector has ``dim`` numbers."""
        return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad:
    """Adagrad (Duchi, Hazan, Singer, 2011) with one accumulator for each number, as ``torch.optim.Adagrad``."""

    learning_rate: float = 1e-2
    """Until it is changed between two steps."""
    eps: float = 1e-10
    """Added to the root of the accumulator."""
    initial_accumulator: float = 0.0
    """What the accumulator starts from."""
    decay: float = 0.0
    """L2 decay of rows that a batch touches: ``gradient += decay * row``."""

    def __post_init__(self) -> None:
        _check_rates(self)
        _check_at_least_zero(self, "initial_accumulator")

    def state_fields(self, dim: int) -> tuple[Field, ...]:
        """Return the state fields of a row whose vector has ``dim`` numbers."""
        return (Field(name="sum", width=dim, initial=self.initial_accumulator),)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdagrad:
    """Adagrad with one accumulator a row: the mean of squares of the row's summed gradient."""

    learning_rate: float = 1e-2
    """Until it is changed between two steps."""
    eps: float = 1e-8
    """Added to the root of the accumulator."""
    decay: float = 0.0
    """L2 decay of rows that a batch touches: ``gradient += decay * row``."""

    def __post_init__(self) -> None:
        _check_rates(self)

    def state_fields(self, dim: int) -> tuple[Field, ...]:
        """Return the state fields of a row whose vector has ``dim`` numbers."""
        return (Field(name="sum", width=1, initial=0.0),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """Adam (Kingma, Ba, 2015); only rows in the batch change, as ``torch.optim.SparseAdam``."""

    learning_rate: float = 1e-3
    """Until it is changed between two steps."""
    beta1: float = 0.9
    """Share of the mean of gradients that stays."""
    beta2: float = 0.999
    """Share of the mean of squares that stays."""
    eps: float = 1e-8
    """Added to the root of the mean of squares."""
    decay: float = 0.0
    """L2 decay of rows that a batch touches: ``gradient += decay * row``."""

    def __post_init__(self) -> None:
        _check_rates(self)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} of Adam is {value}: it must be at least 0 and less than 1")

    def state_fields(self, dim: int) -> tuple[Field, ...]:
        """Return the state fields of a row whose vector has ``dim`` numbers."""
        return tuple(Field(name=name, width=dim, initial=0.0) for name in ("exp_avg", "exp_avg_sq"))


Optimizer = SGD | Adagrad | RowWiseAdagrad | Adam

KINDS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": Adam,
}


def optimizer_to_record(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer as plain JSON values."""
    kind = next(kind for kind, cls in KINDS.items() if type(optimizer) is cls)
    return {"kind": kind, **dataclasses.asdict(optimizer)}


def optimizer_from_record(record: dict[str, Any]) -> Optimizer:
    """Build the optimizer that ``optimizer_to_record`` wrote. Raises ValueError for anything else."""
    return build(record, KINDS, "optimizer")  # type: ignore[no-any-return]


def build(record: Any, kinds: dict[str, Any], what: str) -> Any:
    """Build the dataclass that a record's ``kind`` names, from exactly its fields."""
    if not isinstance(record, dict) or record.get("kind") not in kinds:
        kind = record.get("kind") if isinstance(record, dict) else record
        raise ValueError(f"{what} {kind!r} is unknown: it must be one of {', '.join(kinds)}")
    values = {name: value for name, value in record.items() if name != "kind"}
    cls = kinds[record["kind"]]
    allowed = [field.name for field in dataclasses.fields(cls)]
    unknown = [name for name in values if name not in allowed]
    if unknown:
        choices = ", ".join(allowed) or "nothing"
        raise ValueError(f"{what} {record['kind']!r} has no {unknown[0]!r}: it takes {choices}")
    missing = [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        raise ValueError(f"{what} {record['kind']!r} lacks {missing[0]!r}: give it a number")
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


def _check_rates(optimizer: object) -> None:
    for field in dataclasses.fields(optimizer):  # type: ignore[arg-type]
        value = getattr(optimizer, field.name)
        check_finite(value, field.name, optimizer)
        if abs(value) > _LARGEST:
            raise ValueError(
                f"{field.name} of {type(optimizer).__name__} is {value}: float32 holds at most {_LARGEST:g}"
            )
    for name in ("learning_rate", "decay", "eps"):
        if hasattr(optimizer, name):
            _check_at_least_zero(optimizer, name)


def _check_at_least_zero(optimizer: object, name: str) -> None:
    if getattr(optimizer, name) < 0:
        raise ValueError(f"{name} of {type(optimizer).__name__} is {getattr(optimizer, name)}: it must not be negative")
