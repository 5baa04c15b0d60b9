"""Row optimizers as values: their settings, their state in a row, and the numbers that kernels take.

The arithmetic of each is in `kernels/cpu/rules.py` and `kernels/cuda/rules.cuh`, under the same kind.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tiercache.store.bits import vector_words
from tiercache.store.initializer import build, check_finite

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SGD", "Adagrad", "Adam", "RowWiseAdagrad", "RowWiseAdam", "RowWiseRMSprop"]

_LARGEST = (2 - 2**-23) * 2.0**127
_OMITTED = {"omitted": True}
"""Marks a field that records omit at its default."""
_SETTINGS = {
    "learning_rate": "lr", "decay": "weight_decay", "decoupled": "decoupled_weight_decay", "beta1": "betas",
    "beta2": "betas",
}  # fmt: skip
"""Names in ``param_groups`` of fields that torch names differently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One part of a row: the vector or an optimizer state."""

    name: str
    width: int
    """Numbers in a row."""
    initial: float
    """Initial value of an optimizer state; vectors use the table's initializer."""
    dtype: str = "float32"
    """Stored dtype of the numbers: the table's for vectors, float32 for optimizer state."""
    words: int = dataclasses.field(init=False, repr=False, compare=False)
    """Words of 4 bytes in a row: 16-bit fields are padded to whole words."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", vector_words(self.width, self.dtype))


class Optimizer:
    """A row optimizer. Rows that a step does not touch keep their vector and their state."""

    __slots__ = ()

    counts_steps: ClassVar[bool] = False
    """True if a step depends on how many steps the table has had."""
    row_wise: ClassVar[bool] = False
    """True if a state is one number per row, which depends on the gradient of the whole row."""
    learning_rate: float
    decay: float

    @classmethod
    def kind(cls) -> str:
        """Return the name in schemas and records, and of the kernels."""
        return cls.__name__.replace("RowWise", "rowwise_").lower()

    def state_fields(self, dim: int) -> tuple[Field, ...]:
        """Return the state fields of a row whose vector has ``dim`` numbers: those of ``dim`` numbers come first."""
        raise NotImplementedError

    def rule(self, learning_rate: float, step: int) -> dict[str, Any]:
        """Return the numbers of `kernels.step.Rule` in a step of the table, counted from 1."""
        eps: float = getattr(self, "eps", 0.0)
        return {"kind": self.kind(), "rate": learning_rate, "eps": eps, "decay": self.decay}

    def settings(self) -> dict[str, Any]:
        """Return the settings that may change between two steps, by the names of ``param_groups``."""
        every = dataclasses.fields(self)  # type: ignore[arg-type]
        fields = [one for one in every if not one.name.startswith(("initial_", "corrected_"))]
        found = {_SETTINGS.get(one.name, one.name): getattr(self, one.name) for one in fields}
        return found | ({"betas": (self.beta1, self.beta2)} if hasattr(self, "beta2") else {})  # type: ignore[attr-defined]

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """Return the optimizer with the values of ``param_groups`` for all but the learning rate, which is a step's."""
        changed = {}
        for one in dataclasses.fields(self):  # type: ignore[arg-type]
            if one.name == "learning_rate" or (name := _SETTINGS.get(one.name, one.name)) not in settings:
                continue
            value = settings[name][one.name == "beta2"] if name == "betas" else settings[name]
            changed[one.name] = bool(value) if isinstance(one.default, bool) else float(value)
        return dataclasses.replace(self, **changed)  # type: ignore[type-var]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            _check_setting(self, field.name, is_switch=isinstance(field.default, bool))


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD(Optimizer):
    """Stochastic gradient descent: ``row -= learning_rate * gradient``.

    With momentum, as ``torch.optim.SGD``: ``momentum_buffer = momentum * momentum_buffer + gradient`` takes the
    gradient's place, and is the state of a row; with ``nesterov``, ``gradient + momentum * momentum_buffer`` does.
    """

    learning_rate: float = 1e-2
    """Initial rate; it can be changed between steps."""
    momentum: float = dataclasses.field(default=0.0, metadata=_OMITTED)
    """Share of the buffer that stays, at least 0 and less than 1; with 0, rows have no buffer."""
    nesterov: bool = dataclasses.field(default=False, metadata=_OMITTED)
    """Nesterov's momentum; needs a momentum."""
    decay: float = 0.0
    """L2 decay of rows that a batch touches: ``gradient += decay * row``."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov of SGD is True and its momentum 0: set a momentum above 0")

    def state_fields(self, dim: int) -> tuple[Field, ...]:
        """Return the buffer of momentum."""
        return (Field(name="momentum_buffer", width=dim, initial=0.0),) if self.momentum else ()

    def rule(self, learning_rate: float, step: int) -> dict[str, Any]:
        """Return the numbers of a step."""
        numbers = Optimizer.rule(self, learning_rate, step)
        if not self.momentum:
            return numbers
        return numbers | {"kind": "momentum", "a": self.momentum, "b": self.momentum if self.nesterov else 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi, Hazan, Singer, 2011) with one accumulator for each number, as ``torch.optim.Adagrad``."""

    learning_rate: float = 1e-2
    """Initial rate; it can be changed between steps."""
    eps: float = 1e-10
    """Added to the root of the accumulator."""
    initial_accumulator: float = 0.0
    """Initial value of the accumulator."""
    decay: float = 0.0
    """L2 decay of rows that a batch touches: ``gradient += decay * row``."""

    def state_fields(self, dim: int) -> tuple[Field, ...]:
        """Return the accumulator."""
        return (Field(name="sum", width=dim, initial=self.initial_accumulator),)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdagrad(Optimizer):
    """Adagrad with one accumulator a row: the mean of squares of the row's summed gradient."""

    row_wise: ClassVar[bool] = True
    learning_rate: float = 1e-2
    """Initial rate; it can be changed between steps."""
    eps: float = 1e-8
    """Added to the root of the accumulator."""
    decay: float = 0.0
    """L2 decay of rows that a batch touches: ``gradient += decay * row``."""

    def state_fields(self, dim: int) -> tuple[Field, ...]:
        """Return the accumulator."""
        return (Field(name="sum", width=1, initial=0.0),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam(Optimizer):
    """Adam (Kingma, Ba, 2015); only rows in the batch change, as ``torch.optim.SparseAdam``.

    With ``corrected_eps``, ``torch.optim.Adam`` of the rows in the batch; with ``decoupled`` too, AdamW (Loshchilov,
    Hutter, 2019).
    """

    counts_steps: ClassVar[bool] = True
    learning_rate: float = 1e-3
    """Initial rate; it can be changed between steps."""
    beta1: float = 0.9
    """Share of the mean of gradients that stays."""
    beta2: float = 0.999
    """Share of the mean of squares that stays."""
    eps: float = 1e-8
    """Added to the root of the mean of squares."""
    decay: float = 0.0
    """L2 decay of rows that a batch touches: ``gradient += decay * row``; if ``decoupled``, they are multiplied by
    ``1 - learning_rate * decay`` before the step."""
    decoupled: bool = dataclasses.field(default=False, metadata=_OMITTED)
    """Decays the rows and not the gradients, as AdamW."""
    corrected_eps: bool = dataclasses.field(default=False, metadata=_OMITTED)
    """Adds ``eps`` to the root after its correction for the first steps, as ``torch.optim.Adam``."""

    def state_fields(self, dim: int) -> tuple[Field, ...]:
        """Return the means of gradients and of their squares."""
        return tuple(Field(name=name, width=dim, initial=0.0) for name in ("exp_avg", "exp_avg_sq"))

    def rule(self, learning_rate: float, step: int) -> dict[str, Any]:
        """Return the numbers of a step. Raises ValueError for a step before the first."""
        numbers = _adam_rule(self, learning_rate, step)
        return numbers | ({"eps": self.eps * math.sqrt(1.0 - self.beta2**step)} if self.corrected_eps else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdam(Optimizer):
    """Adam with one mean of squares a row, of the mean of squares of its gradient; FBGEMM's ``PARTIAL_ROWWISE_ADAM``.

    As in `Adam`, ``eps`` is added to the root before its correction for the first steps.
    """

    counts_steps: ClassVar[bool] = True
    row_wise: ClassVar[bool] = True
    learning_rate: float = 1e-3
    """Initial rate; it can be changed between steps."""
    beta1: float = 0.9
    """Share of the mean of gradients that stays."""
    beta2: float = 0.999
    """Share of the mean of squares that stays."""
    eps: float = 1e-8
    """Added to the root of the mean of squares."""
    decay: float = 0.0
    """See `Adam`."""
    decoupled: bool = dataclasses.field(default=False, metadata=_OMITTED)
    """Decays the rows and not the gradients, as AdamW."""

    def state_fields(self, dim: int) -> tuple[Field, ...]:
        """Return the mean of gradients and the mean of squares."""
        return (Field(name="exp_avg", width=dim, initial=0.0), Field(name="exp_avg_sq", width=1, initial=0.0))

    def rule(self, learning_rate: float, step: int) -> dict[str, Any]:
        """Return the numbers of a step. Raises ValueError for a step before the first."""
        return _adam_rule(self, learning_rate, step)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseRMSprop(Optimizer):
    """RMSprop (Hinton, 2012) with one mean of squares a row, of the mean of squares of its gradient.

    For rows of one number, ``torch.optim.RMSprop``.
    """

    row_wise: ClassVar[bool] = True
    learning_rate: float = 1e-2
    """Initial rate; it can be changed between steps."""
    alpha: float = 0.99
    """Share of the mean of squares that stays."""
    eps: float = 1e-8
    """Added to the root of the mean of squares."""
    decay: float = 0.0
    """L2 decay of rows that a batch touches: ``gradient += decay * row``."""

    def state_fields(self, dim: int) -> tuple[Field, ...]:
        """Return the mean of squares."""
        return (Field(name="square_avg", width=1, initial=0.0),)

    def rule(self, learning_rate: float, step: int) -> dict[str, Any]:
        """Return the numbers of a step."""
        return Optimizer.rule(self, learning_rate, step) | {"b": 1.0 - self.alpha}


def _adam_rule(adam: Adam | RowWiseAdam, learning_rate: float, step: int) -> dict[str, Any]:
    if step < 1:
        raise ValueError(f"step is {step}: the first applied step is 1.")
    numbers = Optimizer.rule(adam, learning_rate, step) | {"a": 1.0 - adam.beta1, "b": 1.0 - adam.beta2}
    numbers["rate"] = learning_rate * math.sqrt(1.0 - adam.beta2**step) / (1.0 - adam.beta1**step)
    return numbers | ({"decay": 0.0, "keep": 1.0 - learning_rate * adam.decay} if adam.decoupled else {})


KINDS: dict[str, type[Optimizer]] = {
    cls.kind(): cls for cls in (SGD, Adagrad, RowWiseAdagrad, Adam, RowWiseAdam, RowWiseRMSprop)
}


def optimizer_to_record(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer as plain JSON values."""
    record = {"kind": optimizer.kind()}
    for field in dataclasses.fields(optimizer):  # type: ignore[arg-type]
        value = getattr(optimizer, field.name)
        if not field.metadata or value != field.default:
            record[field.name] = value
    return record


def optimizer_from_record(record: dict[str, Any]) -> Optimizer:
    """Build an optimizer from the record of ``optimizer_to_record``. Raises ValueError for anything else."""
    return build(record, KINDS, "optimizer")  # type: ignore[no-any-return]


def _check_setting(optimizer: Optimizer, name: str, *, is_switch: bool) -> None:
    value, owner = getattr(optimizer, name), type(optimizer).__name__
    if is_switch:
        if not isinstance(value, bool):
            raise ValueError(f"{name} of {owner} is {value!r}: it must be True or False")
        return
    check_finite(value, name, optimizer)
    if abs(value) > _LARGEST:
        raise ValueError(f"{name} of {owner} is {value}: float32 holds at most {_LARGEST:g}")
    if value < 0 and not name.startswith("beta"):
        raise ValueError(f"{name} of {owner} is {value}: it must not be negative")
    if name in {"beta1", "beta2", "momentum", "alpha"} and not 0.0 <= value < 1.0:
        raise ValueError(f"{name} of {owner} is {value}: it must be at least 0 and less than 1")
