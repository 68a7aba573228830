"""A run at work, seen from inside: emit events, keep the status, obey stop, save and sample requests."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import StopRequested
from .event_log import EventLog
from .events import Event, PhaseEvent, ProgressEvent, StateEvent, StepEvent, WarningEvent
from .run_dir import RunDir, State, Status

POLL = 0.2
HEARTBEAT = 1.0


class StopFlag:
    """Whether somebody asked the run to stop. Long work calls ``check`` at every safe point (block, tile, step).

    With several ranks each has its own flag: agree with ``Parallel.any(run.stop.requested)`` before leaving.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def request(self, reason: str = "") -> None:
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def check(self) -> None:
        """Raise StopRequested if a stop was asked for."""
        if self._event.is_set():
            raise StopRequested(f"The run was asked to stop{f' ({self.reason})' if self.reason else ''}.")


class LiveRun:
    """What a job's function gets beside the job. On ranks other than 0 nothing is written.

    ``with LiveRun(dir) as run:`` keeps the heartbeat and watches the control files in a thread.
    """

    def __init__(self, directory: RunDir, *, rank: int = 0, world: int = 1, token: str | None = None) -> None:
        self.dir = directory
        self.rank = rank
        self.world = world
        self.stop = StopFlag()
        self._token = token
        self._log = EventLog(directory.events_path) if rank == 0 else None
        self._status = directory.read_status() if rank == 0 else Status()
        self._guard = threading.RLock()
        self._written = -HEARTBEAT
        self._acknowledged: set[str] = set()
        self._progress: tuple[str, float] = ("", 0.0)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._trouble = ""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def status(self) -> Status:
        return self._status

    def __enter__(self) -> LiveRun:
        if self.is_main:
            self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None
        if self._log is not None:
            self._log.close()
            self._log = None

    # -- saying --

    def emit(self, event: Event) -> None:
        """Append an event; a step event also moves the status on."""
        if self._log is None:
            return
        self._log.write(event)
        if isinstance(event, StepEvent):
            finite = event.loss is not None and math.isfinite(event.loss)
            self.set(step=event.step, total=event.total, loss=event.loss if finite else None)
        elif isinstance(event, PhaseEvent):
            self.set(phase=event.phase if event.state == "start" else "")

    def set(self, *, now: bool = False, **fields: object) -> None:
        """Change fields of the status; the heartbeat writes them, or this call if ``now``."""
        if not self.is_main:
            return
        with self._guard:
            self._status = Status.model_validate(self._status.model_dump() | fields)
            if now or time.monotonic() - self._written > HEARTBEAT:  # not the wall clock, which may be set back
                self._write_status()

    def set_state(self, state: State, reason: str = "", **fields: object) -> None:
        """Go to a state, said in the status at once and in an event."""
        self.set(now=True, state=state, **fields)
        self.emit(StateEvent(state=state, reason=reason))

    @contextmanager
    def phase(self, name: str, message: str = "") -> Iterator[None]:
        """A named part of the job, with its seconds. A lone process checks the stop flag on the way in; ranks agree first."""
        if self.world == 1:
            self.stop.check()
        started = time.monotonic()
        self.emit(PhaseEvent(phase=name, state="start", message=message))
        try:
            yield
        finally:
            self.emit(PhaseEvent(phase=name, state="end", seconds=round(time.monotonic() - started, 3)))

    def progress(self, phase: str, done: int, total: int | None = None, *, unit: str = "", message: str = "", eta: float | None = None) -> None:
        """Say how far a phase is; at most five times a second, but always its end."""
        last_phase, last_time = self._progress
        if phase == last_phase and done != total and time.monotonic() - last_time < 0.2:
            return
        self._progress = (phase, time.monotonic())
        self.emit(ProgressEvent(phase=phase, done=done, total=total, unit=unit, message=message, eta=eta))

    def warn(self, code: str, message: str, hint: str = "") -> None:
        """Something to know: an event; of a rank other than 0 a line in its own log (train.rank1.log)."""
        if not self.is_main:
            logging.getLogger(__name__).warning("%s: %s %s", code, message, hint)
        self.emit(WarningEvent(code=code, message=message, hint=hint))

    # -- obeying --

    def take(self, control: str) -> dict | None:
        """Consume a ``save`` or ``sample`` request at a step's end: its details, or None. Rank 0 decides for all."""
        if not self.is_main:
            return None
        request = self.dir.take_request(control)
        if request is not None:
            if control not in self._acknowledged:
                self.emit(StateEvent(state=self._status.state, control=control))
            self._acknowledged.discard(control)
        return request

    def request_stop(self, reason: str) -> None:
        """Set the flag and say so: what a signal or a stop file does."""
        first = not self.stop.requested
        self.stop.request(reason)
        if first and self._status.live:
            self.set(now=True, state="stopping")
            self.emit(StateEvent(state="stopping", reason=reason, control="stop"))

    def _watch(self) -> None:
        while not self._ended.wait(POLL):
            try:
                self._hear()
                if time.monotonic() - self._written > HEARTBEAT:
                    self._beat()
                self._trouble = ""
            except OSError as error:
                # a full disk or a share that is away must not end the training; said once in the log
                if not self._trouble:
                    self._trouble = str(error)
                    logging.getLogger(__name__).warning("The run directory cannot be written: %s", error)

    def _hear(self) -> None:
        """Take up the requests that lie in the control folder."""
        if self.dir.requested("stop"):
            if self.stop.requested:
                self._acknowledge("stop")
            else:
                self._acknowledged.add("stop")
                self.request_stop("asked by the control file")
        for control in ("save", "sample"):
            if self.dir.requested(control):
                self._acknowledge(control)
            else:
                self._acknowledged.discard(control)

    def _beat(self) -> None:
        """Say that the process lives."""
        with self._guard:
            if self._status.live and not self._ended.is_set():
                self._write_status()
        self.dir.lock.refresh()

    def _acknowledge(self, control: str) -> None:
        if control not in self._acknowledged:
            self._acknowledged.add(control)
            self.emit(StateEvent(state=self._status.state, control=control))

    def _write_status(self) -> None:
        self._written = time.monotonic()
        self._status = self._status.model_copy(update={"heartbeat": round(time.time(), 3)})
        self.dir.write_status(self._status)
