"""What a run has done so far, rebuilt from its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .events import (
    ErrorEvent,
    Event,
    HeldOutEvent,
    JobEvent,
    LoraEvent,
    PhaseEvent,
    PlanEvent,
    ProgressEvent,
    SampleEvent,
    SnapshotEvent,
    StateEvent,
    StepEvent,
    WarningEvent,
)


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
