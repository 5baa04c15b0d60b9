"""The plan of a training run: budgets, order and predictions for each pass; a TOML file that users can edit."""

from __future__ import annotations

import json
import tomllib
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from tiercache.errors import PlanError
from tiercache.planning.budgets import Budgets
from tiercache.sizes import option_bytes, parse_bytes
from tiercache.store.files import local_path, read_whole
from tiercache.store.layout import KEY_BYTES

if TYPE_CHECKING:
    import os

    from tiercache.data.dataset import PassDataset
    from tiercache.planning.pass_plan import PassPlan


Budget = Annotated[int, BeforeValidator(parse_bytes), PlainSerializer(option_bytes, when_used="json")]
Reserve = Annotated[
    int, BeforeValidator(partial(parse_bytes, least=0)), PlainSerializer(option_bytes, when_used="json")
]
"""A part of a budget, which may be 0."""
_SIGNIFICANT_DIGITS = 6


class Seconds(NamedTuple):
    """The seconds of one pass: the first three run at the same time, the copies at its switch do not."""

    compute: float
    read: float
    write: float
    copy: float

    @property
    def total(self) -> float:
        """Seconds of the pass, from the load of its rows to their dump."""
        return max(self.compute, self.read, self.write) + self.copy

    @property
    def bound(self) -> str:
        """The longest part."""
        return max(self._fields, key=lambda name: float(getattr(self, name)))


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class Rates(_Part):
    """The speed of a machine, in bytes per second except for the last two."""

    device: str = "cpu"
    read: float = Field(gt=0)
    write: float = Field(gt=0)
    copy_: float = Field(gt=0, alias="copy")
    """Host memory to host memory."""
    link: float = Field(gt=0)
    """Host to device; on a CPU, the rate of the copy."""
    commit_seconds: float = Field(ge=0)
    """Until a small write is durable."""
    samples: float | None = Field(default=None, gt=0)
    """Samples trained per second; None: not measured, and compute is predicted to take no time."""

    def seconds(
        self, samples: int, plan: PassPlan, before: PassPlan | None, after: PassPlan | None, checkpoint_bytes: int = 0
    ) -> Seconds:
        """Predict a pass: meanwhile, rows of ``after`` are read, also from checkpoints, and of ``before`` written."""
        return self.seconds_of(
            samples,
            read=(after.bytes_read if after else 0) + checkpoint_bytes,
            written=before.bytes_written + KEY_BYTES * before.rows_written if before else 0,
            moved=plan.bytes_loaded + plan.bytes_written,
        )

    def seconds_of(self, samples: float, *, read: float, written: float, moved: float) -> Seconds:
        """Predict a pass from bytes: read from the store and written to it meanwhile, and moved at its switch."""
        return Seconds(
            compute=0.0 if self.samples is None else samples / self.samples,
            read=read / self.read,
            write=written / self.write + self.commit_seconds if written else 0.0,
            copy=moved / self.link,
        )


class PassPrediction(_Part):
    """One pass: exact rows and bytes, and predicted seconds."""

    index: int
    sub_dataset: int
    samples: int
    rows: int
    rows_read: int
    bytes_read: int
    rows_written: int
    bytes_written: int
    seconds: float
    bound: str


class _Budgets(_Part):
    device: Budget
    host: Budget
    evaluation: Reserve | None = None
    store: Budget | None = None
    commit_every: int = Field(default=1, ge=1)

    def to_budgets(self) -> Budgets:
        return Budgets(
            device_budget=self.device, host_budget=self.host, eval_budget=self.evaluation, store_budget=self.store,
            commit_every=self.commit_every,
        )  # fmt: skip


class TrainingPlan(_Part):
    """The file that `tiercache plan` writes and ``TierCache(plan=)`` reads."""

    version: Literal[1] = 1
    dataset: str
    optimize: Literal["speed", "memory"]
    order: tuple[int, ...] | None = Field(default=None, strict=False)
    """None: the sub-datasets' own order."""
    budgets: _Budgets
    machine: Rates
    passes: tuple[PassPrediction, ...] = Field(strict=False)
    """The passes of the first epoch of a new store and of the second, which later epochs repeat."""

    @classmethod
    def read(cls, path: str | os.PathLike[str], data: PassDataset) -> Self:
        """Read the plan of a dataset. Raises PlanError."""
        try:
            text = read_whole(str(local_path(path, "a plan"))).decode("utf-8")
        except (OSError, ValueError) as error:
            raise PlanError(f"the plan {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
        plan = cls.from_toml(text, str(path))
        plan.check(data.digest, len(data), str(path))
        return plan

    @classmethod
    def from_toml(cls, text: str, name: str) -> Self:
        """Read a plan. Raises PlanError, which begins with ``name`` and names the key that is wrong."""
        try:
            return cls.model_validate(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise PlanError(f"the plan {name} is not TOML: {error}") from error
        except RecursionError as error:
            raise PlanError(f"the plan {name} is nested too deeply: write it with tiercache plan") from error
        except ValidationError as error:
            raise PlanError(f"the plan {name}: " + "; ".join(map(_sentence, error.errors()))) from error

    def to_toml(self) -> str:
        """Return the text of the file: tables of numbers, and a line for each pass."""
        record = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        passes, tables = record.pop("passes"), [(k, record.pop(k)) for k in ("budgets", "machine")]
        # TOML forbids bare values after a table, so the passes come first
        lines = ["# Written by `tiercache plan`. The budgets can be edited; training checks them."]
        lines += [f"{key} = {_value(value)}" for key, value in record.items()]
        lines += ["passes = [", *(f"    {{{_pairs(one, ', ')}}}," for one in passes), "]"]
        for name, table in tables:
            lines += ["", f"[{name}]", _pairs(table, "\n")]
        return "\n".join(lines) + "\n"

    def check(self, dataset_digest: str, num_passes: int, name: str) -> None:
        """Raise PlanError for the plan of another dataset, or an order that is not a permutation of its passes."""
        if self.dataset != dataset_digest:
            raise PlanError(
                f"the plan {name} is for the dataset {self.dataset[:12]}, but training was given "
                f"{dataset_digest[:12]}: run `tiercache plan` on this dataset, or open the dataset that was planned"
            )
        if self.order is not None and sorted(self.order) != list(range(num_passes)):
            raise PlanError(
                f"the plan {name}: order is {list(self.order)}: it must list each of the {num_passes} sub-datasets once"
            )


def _pairs(table: dict[str, Any], between: str) -> str:
    return between.join(f"{key} = {_value(value)}" for key, value in table.items())


def _value(value: Any) -> str:
    return f"{value:.{_SIGNIFICANT_DIGITS}g}" if isinstance(value, float) else json.dumps(value)


def _sentence(error: Any) -> str:
    """Describe the problem of one key, in the file's words."""
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"{key} is not a key of a plan: delete it, or correct its name"
    if error["type"] == "missing":
        return f"{key} is missing: run `tiercache plan` again"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ").rstrip(".")
    return f"{key} is {error['input']!r}, but {message[:1].lower()}{message[1:]}"
