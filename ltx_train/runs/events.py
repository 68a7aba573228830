"""What a run says while it works: typed events, one JSON line each, and the file rebuilt into a history."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

VERSION = 1


class Event(BaseModel):
    """One line of events.jsonl. ``seq`` and ``t`` (Unix seconds) are filled in by the writer.

    Fields that a newer version wrote are kept on reading (``model_extra``) and refused on writing.
    """

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    v: int = VERSION
    seq: int = 0
    t: float = 0.0
    type: str


class JobEvent(Event):
    """A child opened the run: once a start, so a second one in a file is a resume or a restart."""

    type: Literal["job"] = "job"
    kind: Literal["preprocess", "train", "sample", "tool"]
    name: str
    pid: int
    host: str = ""
    attempt: int = 0
    num_processes: int = 1
    version: str = ""
    fingerprint: str = ""


class PhaseEvent(Event):
    """A part of the job began or ended, such as ``encode video`` or ``train``."""

    type: Literal["phase"] = "phase"
    phase: str
    state: Literal["start", "end"]
    seconds: float | None = None
    message: str = ""


class PlanEvent(Event):
    """How the job will fit into memory; ``notch`` counts the steps down after running out of it."""

    type: Literal["plan"] = "plan"
    notch: int = 0
    message: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)


class ProgressEvent(Event):
    """``done`` of ``total`` units of a phase."""

    type: Literal["progress"] = "progress"
    phase: str
    done: int
    total: int | None = None
    unit: str = ""
    message: str = ""
    eta: float | None = None


class StepEvent(Event):
    """One optimizer step. ``loss`` is the total, averaged over micro-batches and ranks; None if not finite.

    seconds: of this step alone, without validation and saving. data_wait: seconds spent waiting for the batch.
    peak_memory: bytes, the true peak of the step. sigma_loss: mean loss per bin of sigma, named by its range.
    """

    type: Literal["step"] = "step"
    step: int
    total: int
    loss: float | None
    loss_average: float | None = None
    video_loss: float | None = None
    audio_loss: float | None = None
    regularisation_loss: float | None = None
    validation_loss: float | None = None
    sigma: float | None = None
    sigma_loss: dict[str, float] | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    seconds: float | None = None
    data_wait: float | None = None
    eta: float | None = None
    tokens: int | None = None
    epoch: float | None = None
    peak_memory: int | None = None


class StatisticsEvent(Event):
    """How the steps of this start went in all, without loading, snapshots and previews unless said.

    minutes: of the whole training, those included. samples, tokens: over all processes. seconds_waiting: for data, on
    rank 0. peak_memory: bytes, the greatest of any process. skipped: steps with a loss or gradient that was not finite.
    """

    type: Literal["statistics"] = "statistics"
    step: int
    steps: int = 0
    minutes: float = 0.0
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    seconds_waiting: float | None = None
    peak_memory: int | None = None
    processes: int = 1
    global_batch: int = 1
    samples: int = 0
    tokens: int = 0
    skipped: int = 0


class HeldOutEvent(Event):
    """The loss on clips that are not trained on, at fixed noise and noise levels.

    total: the sum of both streams' means. losses: means by stream (``video``) and by stream and noise level
    (``video 0.3``). base: the same of the base model.
    """

    type: Literal["held_out"] = "held_out"
    step: int
    total: float
    losses: dict[str, float] = Field(default_factory=dict)
    base: dict[str, float] = Field(default_factory=dict)
    clips: int = 0


class SampleEvent(Event):
    """A validation sample is on disk; ``path`` is relative to the run with forward slashes."""

    type: Literal["sample"] = "sample"
    step: int
    path: str
    index: int = 0
    prompt: str = ""
    seconds: float | None = None


class SnapshotEvent(Event):
    """A resumable state is on disk and its manifest verifies."""

    type: Literal["snapshot"] = "snapshot"
    step: int
    path: str
    size: int | None = None
    reason: str = ""


class LoraEvent(Event):
    """A LoRA (or full weights) file is on disk, reopened and checked."""

    type: Literal["lora"] = "lora"
    step: int
    path: str
    size: int | None = None
    keys: int | None = None
    final: bool = False


class WarningEvent(Event):
    """Something to know that does not end the run."""

    type: Literal["warning"] = "warning"
    code: str
    message: str
    hint: str = ""


class ErrorEvent(Event):
    """Why the run ended; ``traceback`` holds the last lines for a crash and is empty for a user's error."""

    type: Literal["error"] = "error"
    code: str
    message: str
    hint: str = ""
    exit_code: int = 1
    rank: int = 0
    traceback: str = ""


class StateEvent(Event):
    """The run's state changed, or (``control``) a stop, save or sample request was acknowledged."""

    type: Literal["state"] = "state"
    state: str
    reason: str = ""
    control: str | None = None


EVENTS: tuple[type[Event], ...] = (
    JobEvent,
    PhaseEvent,
    PlanEvent,
    ProgressEvent,
    StepEvent,
    StatisticsEvent,
    HeldOutEvent,
    SampleEvent,
    SnapshotEvent,
    LoraEvent,
    WarningEvent,
    ErrorEvent,
    StateEvent,
)
_known = JobEvent | PhaseEvent | PlanEvent | ProgressEvent | StepEvent | StatisticsEvent | HeldOutEvent | SampleEvent | SnapshotEvent | LoraEvent | WarningEvent | ErrorEvent | StateEvent
_ADAPTER: TypeAdapter = TypeAdapter(Annotated[_known, Field(discriminator="type")])


def event_schema() -> dict[str, Any]:
    """The JSON schema of a line of events.jsonl, for the web client and the snapshot test."""
    return _ADAPTER.json_schema()


def parse_line(line: bytes | str) -> Event | None:
    """The event of one line; None for a damaged line, an ``Event`` with extras for a type of a newer version."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    try:
        return _ADAPTER.validate_python(record)
    except ValidationError:
        pass
    try:
        return Event.model_validate(record)
    except ValidationError:
        return None


class EventLog:
    """Appends events to a file: one write and one flush a line, from any thread of one process.

    A line left half written by a killed predecessor is closed first, so that readers lose that one line at most.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._seq = last_seq(self.path)
        self._file = open(self.path, "ab", buffering=0)
        if self._file.tell() and not _ends_with_newline(self.path):
            self._file.write(b"\n")

    def write(self, event: Event) -> Event:
        """Append ``event`` and return it as written, with its number and time."""
        assert not event.model_extra, f"{type(event).__name__} has no field {sorted(event.model_extra)}"
        with self._lock:
            self._seq += 1
            event = event.model_copy(update={"v": VERSION, "seq": self._seq, "t": round(time.time(), 3)})
            record = {"v": event.v, "seq": event.seq, "t": event.t, "type": event.type}
            record.update(_finite(event.model_dump(mode="json", exclude_defaults=True)))
            record.update({name: _finite(getattr(event, name)) for name, info in type(event).model_fields.items() if info.is_required()})
            self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
            self._file.flush()
        return event

    def close(self) -> None:
        with self._lock:
            self._file.close()


def _finite(value: Any) -> Any:
    """JSON has no NaN: a number that is not finite becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def last_seq(path: Path) -> int:
    """The number of the last whole event in the file, 0 for none; looks at the end of the file first."""
    if not path.exists():
        return 0
    size = path.stat().st_size
    for window in (1 << 16, size):
        with open(path, "rb") as file:
            file.seek(max(0, size - window))
            lines = file.read().split(b"\n")
        for line in reversed(lines):
            event = parse_line(line) if line.strip() else None
            if event is not None and event.seq:
                return event.seq
    return 0


@dataclass(frozen=True)
class EventBatch:
    """Events read from ``offset`` on, and the byte offset to read from next; ``skipped`` counts damaged lines."""

    events: tuple[Event, ...]
    offset: int
    skipped: int = 0


def read_events(path: Path, offset: int = 0) -> EventBatch:
    """The whole lines after byte ``offset``; a line still being written stays for the next call.

    A file shorter than ``offset`` was made anew and is read from its start.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            offset = offset if offset <= size else 0
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return EventBatch((), 0)
    whole = data[: data.rfind(b"\n") + 1]
    lines = [line for line in whole.split(b"\n") if line.strip()]
    parsed = [parse_line(line) for line in lines]
    events = tuple(event for event in parsed if event is not None)
    return EventBatch(events, offset + len(whole), len(parsed) - len(events))


@dataclass
class History:
    """What a run has done so far, rebuilt from its events.

    A step that comes again (the run resumed from an older snapshot) replaces all that came after it.
    """

    job: JobEvent | None = None
    attempts: int = 0
    state: str = "queued"
    phase: str = ""
    plan: PlanEvent | None = None
    progress: ProgressEvent | None = None
    error: ErrorEvent | None = None
    steps: dict[int, StepEvent] = field(default_factory=dict)
    held_out: dict[int, HeldOutEvent] = field(default_factory=dict)
    samples: dict[str, SampleEvent] = field(default_factory=dict)
    snapshots: dict[int, SnapshotEvent] = field(default_factory=dict)
    loras: dict[str, LoraEvent] = field(default_factory=dict)
    warnings: list[WarningEvent] = field(default_factory=list)

    @classmethod
    def rebuild(cls, events: Iterable[Event]) -> History:
        history = cls()
        for event in events:
            history.add(event)
        return history

    def add(self, event: Event) -> None:
        """Take in one event, in the order of the file."""
        if isinstance(event, StepEvent):
            if self.steps and event.step <= next(reversed(self.steps)):
                self.steps = {step: known for step, known in self.steps.items() if step < event.step}
            self.steps[event.step] = event
        elif isinstance(event, HeldOutEvent):
            self.held_out = {step: known for step, known in self.held_out.items() if step < event.step} | {event.step: event}
        elif isinstance(event, JobEvent):
            self.job, self.error, self.attempts = event, None, self.attempts + 1
        elif isinstance(event, StateEvent):
            self.state = event.state
        elif isinstance(event, PhaseEvent):
            self.phase = event.phase if event.state == "start" else ""
        elif isinstance(event, PlanEvent):
            self.plan = event
        elif isinstance(event, ProgressEvent):
            self.progress = event
        elif isinstance(event, SampleEvent):
            self.samples[event.path] = event
        elif isinstance(event, SnapshotEvent):
            self.snapshots[event.step] = event
        elif isinstance(event, LoraEvent):
            self.loras[event.path] = event
        elif isinstance(event, WarningEvent):
            self.warnings.append(event)
        elif isinstance(event, ErrorEvent):
            self.error = event

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(step, total loss) of every step whose loss was finite, in order."""
        return [(step, event.loss) for step, event in self.steps.items() if event.loss is not None]
