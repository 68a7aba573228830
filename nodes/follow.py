"""Follows a child from inside a node: progress, text, previews and events out; interrupts in; its real error at the end."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..ltx_train.errors import RunError
from ..ltx_train.launch import Child, Outcome
from ..ltx_train.runs.events import (
    ErrorEvent,
    Event,
    PhaseEvent,
    PlanEvent,
    ProgressEvent,
    SampleEvent,
    SnapshotEvent,
    StateEvent,
    StepEvent,
    WarningEvent,
)
from .media import picture_of

log = logging.getLogger(__name__)
EVENT = "ltx_train.events"
"""Sent to the browser when a run has something new: {node, run}. The browser reads the events over HTTP."""
STOP_DEADLINE = 120.0
"""Seconds a child gets to reach a safe point and save; then it is ended by force, and the last snapshot counts."""


class Screen:
    """What a node shows and hears; this base shows nothing, for use without ComfyUI."""

    node_id = ""

    @staticmethod
    def of(node_id: str | None) -> Screen:
        """ComfyUI's screen for a node."""
        return ComfyScreen(str(node_id))

    def progress(self, value: float, total: float | None, preview: Any = None) -> None: ...

    def text(self, text: str) -> None: ...

    def push(self, data: dict[str, Any]) -> None: ...

    def take_interrupt(self) -> bool:
        """Whether the user pressed interrupt since the last look."""
        return False

    def interrupted(self) -> BaseException:
        """The exception that tells the host that the node was interrupted."""
        return KeyboardInterrupt()


class ComfyScreen(Screen):
    """A node in ComfyUI's graph."""

    def __init__(self, node_id: str) -> None:
        from comfy_api.latest import ComfyAPISync

        self.node_id = node_id
        self._api = ComfyAPISync()

    def progress(self, value: float, total: float | None, preview: Any = None) -> None:
        self._api.execution.set_progress(value=value, max_value=total or max(value, 1), node_id=self.node_id, preview_image=preview)

    def text(self, text: str) -> None:
        from server import PromptServer

        PromptServer.instance.send_progress_text(text, self.node_id)

    def push(self, data: dict[str, Any]) -> None:
        from server import PromptServer

        PromptServer.instance.send_sync(EVENT, {"node": self.node_id, **data})

    def take_interrupt(self) -> bool:
        from comfy import model_management

        try:
            model_management.throw_exception_if_processing_interrupted()
        except model_management.InterruptProcessingException:
            return True
        return False

    def interrupted(self) -> BaseException:
        from comfy import model_management

        return model_management.InterruptProcessingException()


def free_memory() -> None:
    """Take ComfyUI's models off the devices: the child needs the room."""
    import gc

    from comfy import model_management

    model_management.unload_all_models()
    gc.collect()
    model_management.soft_empty_cache()


def follow(child: Child, screen: Screen, *, deadline: float = STOP_DEADLINE) -> Outcome:
    """Show a child's events until it ends; the outcome of a child that finished, or whose part is done.

    Raises what the child ended with, or the host's interruption after the child has stopped (a second interrupt
    ends it by force).
    """
    view = View(child, screen)
    asked: float | None = None
    with _events(child) as events:
        for event in events:
            if event is not None:
                view.add(event)
            view.show()
            if screen.take_interrupt():
                if asked is None:
                    asked = time.monotonic()
                    child.request_stop()
                    view.say("Stopping: the run saves a snapshot at the next safe point. Interrupt again to end it at once.")
                else:
                    child.kill()
            if asked is not None and time.monotonic() - asked > deadline and child.alive():
                log.warning("LTX Train: the run %s did not stop within %.0f s and is ended by force.", child.run.name, deadline)
                child.kill()
    view.show(now=True)
    outcome = child.outcome()
    if asked is not None:
        view.say(f"Interrupted at step {child.run.read_status().step}. Queue it again to go on.")
        raise screen.interrupted()
    if outcome is None:
        raise RunError("run.unknown", f"How the run {child.run.name} ended is not known.", f"See {child.run.log_path}.")
    if outcome.part_done:
        return outcome
    if outcome.state == "stopped":
        raise RunError("run.stopped", f"The run {child.run.name} was stopped at step "
            f"{child.run.read_status().step}.", "Queue it again to go on from there.")
    outcome.raise_for_error()
    return outcome


@contextmanager
def _events(child: Child) -> Iterator[Iterator[Event | None]]:
    """The child's events as they come, and None several times a second in between, so that interrupts are seen."""
    waiting: queue.Queue = queue.Queue()
    ended = object()

    def read() -> None:
        try:
            for event in child.follow(poll=0.1):
                waiting.put(event)
        except BaseException as error:  # of whatever kind, it is raised again in the node's own thread
            waiting.put(error)
        finally:
            waiting.put(ended)

    def give() -> Iterator[Event | None]:
        while True:
            try:
                item = waiting.get(timeout=0.1)
            except queue.Empty:
                yield None
                continue
            if item is ended:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    thread = threading.Thread(target=read, name=f"follow {child.run.name}", daemon=True)
    thread.start()
    yield give()


class View:
    """A run's events on a screen: one progress bar, one text, the newest sample; the web client is told that there is news."""

    INTERVAL = 0.3
    """Seconds between two updates of text and bar."""

    def __init__(self, child: Child, screen: Screen) -> None:
        self.child, self.screen = child, screen
        self.started = time.time()
        self._shown = 0.0
        self._bar: tuple[float, float | None] | None = None
        self._line = "Starting"
        self._pinned = ""
        self._fresh = False
        self._sample: Path | None = None
        self.screen.push({"run": child.run.name})

    def add(self, event: Event) -> None:
        """Take in one event; nothing is sent yet."""
        self._fresh = True
        line = describe(event)
        if line:
            self._line = line
        if isinstance(event, StepEvent):
            self._bar = (event.step, event.total)
        elif isinstance(event, ProgressEvent):
            self._bar = (event.done, event.total)
        elif isinstance(event, SampleEvent):
            self._sample = self.child.run.path / event.path
        elif isinstance(event, WarningEvent):
            log.warning("LTX Train, %s: %s %s", self.child.run.name, event.message, event.hint)

    def say(self, text: str) -> None:
        """A text that stays, whatever the child says after it."""
        self._pinned = text
        self.screen.text(text)

    def show(self, now: bool = False) -> None:
        """Send what is new, at most a few times a second."""
        if not now and time.monotonic() - self._shown < self.INTERVAL:
            return
        self._shown = time.monotonic()
        if not self._fresh:
            return
        preview, self._sample = (picture_of(self._sample) if self._sample else None), None
        if self._bar:
            self.screen.progress(*self._bar, preview)
        self.screen.text(self._pinned or self._line)
        self._fresh = False
        self.screen.push({"run": self.child.run.name})


def plain(event: Event) -> dict[str, Any]:
    """An event for the web client; a traceback stays in the file."""
    told = event.model_dump(mode="json", exclude_defaults=True, exclude={"traceback"})
    return told | {"type": event.type, "seq": event.seq, "t": event.t}


def describe(event: Event) -> str:
    """One line for the node, or nothing for events that say nothing to a person."""
    if isinstance(event, StepEvent):
        parts = [f"step {event.step} of {event.total}", f"loss {event.loss:.4f}" if event.loss is not None else "loss not finite"]
        parts += [f"mean {event.loss_average:.4f}"] if event.loss_average is not None else []
        parts += [f"{event.seconds:.2f} s a step"] if event.seconds is not None else []
        parts += [f"{duration(event.eta)} left"] if event.eta is not None else []
        return " · ".join(parts)
    if isinstance(event, ProgressEvent):
        return f"{event.phase}: {event.done}{f' of {event.total}' if event.total is not None else ''} {event.unit}".strip()
    if isinstance(event, PhaseEvent) and event.state == "start":
        return f"{event.phase}{f': {event.message}' if event.message else ''}"
    if isinstance(event, PlanEvent):
        return event.message
    if isinstance(event, SnapshotEvent):
        return f"snapshot of step {event.step} saved"
    if isinstance(event, SampleEvent):
        return f"sample of step {event.step}: {event.prompt[:60]}"
    if isinstance(event, ErrorEvent):
        return event.message
    if isinstance(event, StateEvent) and event.state == "parked":
        return f"the part is done: {event.reason}"
    if isinstance(event, StateEvent) and event.state in ("preparing", "stopping", "finished"):
        return event.state
    return ""


def duration(seconds: float) -> str:
    """Seconds as people say them: 45 s, 12 min, 3 h 5 min."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
