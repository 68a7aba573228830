"""What a run says while it works: typed events, one JSON line each."""

from __future__ import annotations

import json
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
