"""Reports: rows, bytes and waits of each pass, planned and measured."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tiercache.planning.pass_plan import PassPlan


@dataclass(slots=True, kw_only=True)
class PassReport:
    """The report of one pass.

    ``wait_seconds`` and ``work_seconds`` are seconds of the training thread, except waits for pending steps of a GPU,
    which count as training.
    """

    pass_index: int
    epoch: int
    sub_dataset: int
    rows: int
    rows_kept: int
    rows_generated: int
    rows_from_host: int
    rows_read: int
    """Rows read from the store, as counted by the reader."""
    rows_read_planned: int
    bytes_loaded: int
    bytes_read: int
    bytes_read_planned: int
    rows_written: int = 0
    """Rows written, as counted by the store block by block."""
    rows_written_planned: int = 0
    bytes_written: int = 0
    """Bytes of rows written, as counted by the store; -1 until the pass is durable."""
    bytes_written_planned: int = 0
    host_bytes_planned: int = 0
    checkpoint_rows: int = 0
    """New rows that started as rows of a checkpoint."""
    checkpoint_bytes: int = 0
    """Bytes read for them from the checkpoint: whole chunks."""
    rows_ahead: int = 0
    """Rows that a GPU loaded into free slots while the previous pass trained."""
    wait_seconds: dict[str, float] = field(default_factory=dict)
    """By cause: ``store`` (rows are not staged yet), ``durable`` (the last dump), ``room`` (memory of the next)."""
    work_seconds: dict[str, float] = field(default_factory=dict)
    """By work: ``pack``, ``unpack`` (on a GPU, launching it), ``commit`` (cloning the dense state)."""
    load_seconds: float = 0.0
    """From the last step of the previous pass, or the beginning of the load, until all rows are on the device."""
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By activity (``train``, ``read``, ``write``): begin and end in seconds, on one clock."""
    losses: list[float] = field(default_factory=list)
    """Losses of ``Pass.log_loss``."""
    seconds_predicted: float | None = None
    """The plan's prediction of ``seconds``, once the next pass is known; None without a plan."""
    bound_predicted: str | None = None
    """The activity that takes most of these seconds: ``compute``, ``read``, ``write`` or ``copy``."""
    durable: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, plan: PassPlan, *, rows_read: int, bytes_read: int, read: tuple[float, float]) -> PassReport:
        """Begin the report of a pass whose rows were staged; ``read``: the span in which they were read."""
        return cls(
            pass_index=plan.pass_index, epoch=plan.epoch, sub_dataset=plan.sub_dataset,
            rows=sum(plan.rows_G), rows_kept=sum(plan.kept_G), rows_generated=sum(plan.generated_G),
            rows_from_host=plan.rows_from_host, rows_read=rows_read, rows_read_planned=plan.rows_read,
            bytes_loaded=plan.bytes_loaded, bytes_read=bytes_read, bytes_read_planned=plan.bytes_read,
            rows_written_planned=plan.rows_written, bytes_written=-1, bytes_written_planned=plan.bytes_written,
            host_bytes_planned=plan.host_bytes,
            spans={"read": read},
        )  # fmt: skip

    def begin_training(self) -> None:
        """Note the time before the first batch."""
        now = time.perf_counter()
        self.spans["train"] = now, now

    def end_training(self) -> None:
        """Note the time at which the loop requests the next pass."""
        self.spans["train"] = self.spans["train"][0], time.perf_counter()

    def add_wait(self, cause: str, seconds: float) -> None:
        """Add seconds of waiting to a cause."""
        self.wait_seconds[cause] = self.wait_seconds.get(cause, 0.0) + seconds

    @contextmanager
    def timing(self, work: str) -> Iterator[None]:
        """Add the time spent inside to a kind of work at the switch."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.work_seconds[work] = self.work_seconds.get(work, 0.0) + time.perf_counter() - begun

    def wrote(self, begun: float, ended: float, *, rows: int, num_bytes: int) -> None:
        """Note, on the writer thread, that the pass is durable."""
        self.spans["write"] = begun, ended
        self.rows_written, self.bytes_written = rows, num_bytes
        self.durable.set()

    @property
    def planned_equals_measured(self) -> bool:
        """True if rows and bytes read and written are exactly the planned ones."""
        names = ("rows_read", "bytes_read", "rows_written", "bytes_written")
        return all(getattr(self, name) == getattr(self, f"{name}_planned") for name in names)

    @property
    def waited(self) -> float:
        """Seconds the training thread waited."""
        return sum(self.wait_seconds.values())

    @property
    def switched(self) -> float:
        """Seconds the training thread packed, unpacked and cloned."""
        return sum(self.work_seconds.values())

    @property
    def seconds(self) -> float:
        """Seconds of the pass on the training thread: training, the switches at both ends, and waits."""
        begun, ended = self.spans.get("train", (0.0, 0.0))
        return ended - begun + self.waited + self.switched

    def record(self) -> dict[str, object]:
        """Return it as plain values: one JSON line."""
        names = [name for name in self.__dataclass_fields__ if name != "durable"]
        record: dict[str, object] = {name: getattr(self, name) for name in names}
        record["seconds"] = self.seconds
        record["planned_equals_measured"] = self.planned_equals_measured
        return record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> PassReport:
        """Return the report of a ``record``. Raises TypeError and ValueError for anything else."""
        if not isinstance(record, dict):
            raise TypeError(f"it is of type {type(record).__name__}: expected an object")
        for one in fields(cls):
            if one.name not in record and one.default is MISSING and one.default_factory is MISSING:
                raise TypeError(f"it has no {one.name!r}")
        names = cls.__dataclass_fields__.keys() - {"durable"}
        known = {name: value for name, value in record.items() if name in names}
        for name, value in known.items():
            kind = str(cls.__dataclass_fields__[name].type)
            if not _is_of(kind, value):
                raise TypeError(f"{name} is {value!r:.80}: expected {kind}")
        spans = {name: (float(begin), float(end)) for name, (begin, end) in known.pop("spans", {}).items()}
        return cls(**known, spans=spans)


def _is_of(kind: str, value: Any) -> bool:
    """Return True if a plain value is of the type that a field of a report is annotated with."""
    if value is None:
        return kind.endswith("| None")
    if kind.startswith("dict"):
        return isinstance(value, dict) and all(map(_is_pair if "tuple" in kind else _is_number, value.values()))
    if kind.startswith("list"):
        return isinstance(value, list) and all(map(_is_number, value))
    if kind.startswith("str"):
        return isinstance(value, str)
    return _is_number(value) and (kind != "int" or (isinstance(value, int) and abs(value) < 1 << 63))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def write_json_lines(reports: Sequence[PassReport], path: Path) -> None:
    """Write one JSON object a line for each pass."""
    path.write_text("".join(json.dumps(report.record()) + "\n" for report in reports))


def write_scalars(reports: Sequence[PassReport], writer: Any) -> None:
    """Write the numbers of each pass to a `SummaryWriter` of TensorBoard, at the step of its index."""
    for report in reports:
        for name, value in report.record().items():
            if isinstance(value, list):
                value = {"": sum(value) / len(value)} if value else {}  # noqa: PLW2901 - the mean of losses
            parts = value if isinstance(value, dict) else {"": value}
            for part, number in parts.items():
                if isinstance(number, int | float):  # spans are times, and a bound is a word
                    writer.add_scalar(f"tiercache/{name}{part and '/'}{part}", number, report.pass_index)
