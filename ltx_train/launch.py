"""The parent's side: start a child for a run, follow it, stop it, start it again when memory ran out, attach to it."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from .errors import OutOfMemory, RunError, StopRequested
from .runs.event_log import EventLog
from .runs.events import ErrorEvent, Event, PlanEvent, StateEvent
from .runs.exits import CRASH, OK, OUT_OF_MEMORY, STOPPED, USER_ERROR, explain_exit
from .runs.lock import ProcessId
from .runs.run_dir import RunDir, Status
from .spawn import Launch, kill_tree, spawn

MAX_RESTARTS = 3
GO_ON = 30.0
"""Seconds that a parked child gets to take up its next part; it looks several times a second."""


@dataclass(frozen=True)
class Outcome:
    """How a child ended, or that it is parked. ``log`` holds the last lines of its output; ``error`` its own last words, if it had any."""

    state: str
    exit_code: int | None
    message: str
    hint: str = ""
    code: str = ""
    error: ErrorEvent | None = None
    log: tuple[str, ...] = ()
    part_done: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == OK and self.state == "finished"

    @property
    def parked(self) -> bool:
        """Whether the child waits for the next part."""
        return self.state == "parked"

    def raise_for_error(self) -> None:
        """Raise what the child ended with; nothing if it finished, or its part is done."""
        if self.ok or self.part_done:
            return
        if self.exit_code == STOPPED:
            raise StopRequested(self.message)
        kind = OutOfMemory if self.exit_code == OUT_OF_MEMORY else RunError
        told = "\n".join(filter(None, (self.hint, self.error.traceback if self.error else "\n".join(self.log))))
        error = kind(self.code or "run.died", self.message, told)
        if self.exit_code not in (USER_ERROR, OUT_OF_MEMORY):
            error.exit_code = CRASH  # a fault of ours or a native death is none of the user's
        raise error


class Child:
    """A child at work on a run, started by us or attached to."""

    def __init__(self, run: RunDir, launch: Launch, *, popen: subprocess.Popen | None = None, token: str | None = None, offset: int = 0) -> None:
        self.run = run
        self.launch = launch
        self.offset = offset
        self.restarts = 0
        self._popen = popen
        self._token = token
        self._stopping = self._killed = False
        self._settled: Outcome | None = None

    @property
    def attached(self) -> bool:
        """Whether somebody else started it."""
        return self._popen is None

    @property
    def pid(self) -> int | None:
        """The process that does the work, or its launcher's while it starts."""
        owner = self.run.lock.owner()
        return owner.pid if owner is not None and owner.alive() else self._popen.pid if self._popen else None

    def alive(self) -> bool:
        if self._popen is not None:
            return self._popen.poll() is None
        return self.run.live()

    def status(self) -> Status:
        return self.run.status()

    @property
    def parked(self) -> bool:
        """Whether it lives and waits for its next part."""
        return self.run.read_status().state == "parked" and self.alive()

    def go_on(self) -> bool:
        """Have a parked child train the part that ``launch`` names; False where it ends or has ended instead."""
        end = self.run.events_path.stat().st_size
        self.launch.ask(self.run)
        deadline = time.monotonic() + GO_ON
        while self.parked and time.monotonic() < deadline:
            time.sleep(0.02)
        self.offset = end
        return self.alive() and self.run.read_status().state == "running"

    def follow(self, poll: float = 0.2) -> Iterator[Event]:
        """Every event from ``offset`` on until the child has ended or parked, across restarts after running out of memory."""
        while True:
            parked, alive = self.parked, self.alive()  # looked at before reading, so that nothing written before the end is missed
            batch = self.run.events(self.offset)
            self.offset = batch.offset
            yield from batch.events
            if parked:
                return
            if alive:
                time.sleep(poll)
            elif not self._start_lower():
                self._settle()
                batch = self.run.events(self.offset)  # what settling added
                self.offset = batch.offset
                yield from batch.events
                return

    def wait(self, timeout: float | None = None, poll: float = 0.1) -> Outcome:
        """Wait for the end, restarts included, or until the child is parked. Raises TimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.alive() or self._start_lower():
            if self.parked:
                return self._waiting()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"The run {self.run.name} goes on after {timeout:g} s.")
            time.sleep(poll)
        return self._settle()

    def request_stop(self) -> None:
        """Ask for a stop and return at once; the child acknowledges within a second."""
        self._stopping = True
        self.run.request("stop")

    def stop(self, deadline: float = 60.0, *, force: bool = True) -> Outcome:
        """Stop gracefully (a snapshot is left) and, after ``deadline`` seconds, by force unless told otherwise."""
        self.request_stop()
        end = time.monotonic() + deadline
        while self.alive() and time.monotonic() < end:
            time.sleep(0.05)
        if self.alive():
            if not force:
                raise TimeoutError(f"The run {self.run.name} has not stopped within {deadline:g} s.")
            self.kill()
        return self._settle()

    def kill(self) -> None:
        """End every process of the child now; what it had saved stays."""
        self._stopping = self._killed = True
        roots = [psutil.Process(self._popen.pid)] if self._popen is not None and self._popen.poll() is None else []
        working = self.run.lock.owner()
        process = working.process() if working is not None else None
        roots += [process] if process is not None and process.pid != os.getpid() else []
        own = self._popen.pid if self._popen is not None else None
        kill_tree(roots, unwaited=own)  # whoever waits for it first gets its exit code: that is Popen's
        if self._popen is not None:
            self._popen.wait(timeout=30)

    def outcome(self) -> Outcome | None:
        """How it ended, or that it is parked; None while it works."""
        return self._waiting() if self.parked else None if self.alive() else self._settle()

    def _waiting(self) -> Outcome:
        status = self.run.read_status()
        return Outcome("parked", None, f"Step {status.step} of {status.total} is reached; the trainer waits for the next part.", part_done=True)

    # -- the end --

    def _start_lower(self) -> bool:
        """Start again one notch down the memory plan if that is what the end asks for."""
        if self._settled is not None or self._stopping or self.launch.lower_plan is None or self.restarts >= MAX_RESTARTS:
            return False
        if self.run.read_status().exit_code != OUT_OF_MEMORY or self.run.requested("stop"):
            return False
        status = self.run.read_status()
        notch = status.notch + 1
        message = self.launch.lower_plan(self.run, notch)
        if message is None:
            return False
        self.restarts += 1
        log = EventLog(self.run.events_path)
        log.write(PlanEvent(notch=notch, message=f"Out of memory; starting again with less: {message}"))
        log.close()
        launch = replace(self.launch, until=status.part) if status.part is not None else self.launch
        fresh = start(self.run.path, launch=launch, if_live="refuse", attempt=status.attempt + 1, notch=notch)
        self._popen, self._token = fresh._popen, fresh._token
        return True

    def _settle(self) -> Outcome:
        """Work out how the child ended, once; write it down where the child could not."""
        if self._settled is None:
            status = self.run.read_status()
            code = status.exit_code if not status.live and status.exit_code is not None else self._raw_exit_code()
            rank = 0
            if self.launch.num_processes > 1 and code in (CRASH, STOPPED) and not self.run.requested("stop") and not self.attached:
                # another rank died without a word; rank 0 saw a lost connection or the launcher's SIGTERM
                rank, first = self._first_failed_rank() or (0, code)
                code = code if 0 <= first <= OUT_OF_MEMORY else first
            if self._killed and status.live:
                code, status = STOPPED, self._ended_by_hand()
            elif status.live or code != status.exit_code:
                status = self._bury(code, rank)
            self._settled = self._describe(status, code)
            if self._token is not None:
                self.run.lock.release(self._token)
        return self._settled

    def _raw_exit_code(self) -> int | None:
        return None if self._popen is None else self._popen.poll()

    def _first_failed_rank(self) -> tuple[int, int] | None:
        """(rank, exit code) of the process whose death made the launcher end the others, from its report in the log."""
        report = "\n".join(self.run.tail(80)).rpartition("Root Cause")[2]
        found = re.search(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", report, re.DOTALL)
        return (int(found.group(1)), int(found.group(2))) if found else None

    def _bury(self, code: int | None, rank: int) -> Status:
        """Write the end of a child that died without a word: ``lost`` after a native death, else ``failed``."""
        text = explain_exit(code)
        text = replace(text, message=f"Rank {rank}: {text.message}") if rank else text
        state = "failed" if code in (CRASH, 2, OUT_OF_MEMORY) else "lost"
        event = ErrorEvent(code="run.died", message=text.message, hint=text.hint, exit_code=CRASH if code is None else code, rank=rank)
        log = EventLog(self.run.events_path)
        log.write(event)
        log.write(StateEvent(state=state, reason="run.died"))
        log.close()
        return self.run.update_status(state=state, exit_code=code, ended=time.time(), error=text.message, error_code="run.died", hint=text.hint)

    def _ended_by_hand(self) -> Status:
        """Write the end of a child that was killed because somebody asked for it: stopped, not lost."""
        log = EventLog(self.run.events_path)
        log.write(StateEvent(state="stopped", reason="ended at once"))
        log.close()
        return self.run.update_status(state="stopped", exit_code=STOPPED, ended=time.time(), hint="What is newer than the last snapshot is lost.")

    def _describe(self, status: Status, code: int | None) -> Outcome:
        text = explain_exit(code)
        if self._killed and code == STOPPED:
            text = replace(text, message="The run was ended at once; starting it again goes on from its last snapshot, if it has one.")
        error = self.run.history().error if code not in (OK, STOPPED) else None
        told = error is not None and error.code != "run.died"
        return Outcome(
            state=status.state,
            exit_code=code,
            message=error.message if error is not None else text.message,
            hint=(error.hint or text.hint) if error is not None else text.hint,
            code=error.code if error is not None else "",
            error=error if told else None,
            log=() if code in (OK, STOPPED) else tuple(self.run.tail(30)),
            part_done=status.part_done,
        )


def start(
    target: Path | str,
    *,
    launch: Launch | None = None,
    if_live: Literal["attach", "refuse"] = "attach",
    attempt: int = 0,
    notch: int | None = None,
    **options: object,
) -> Child:
    """Start a child for a run directory or the job file in one; ``options`` are fields of ``Launch``.

    A run that a live process works on is attached to, or refused with RunError ``run.locked``; a parked one goes on.
    ``notch`` keeps its old value if None: a run that needed less memory starts with less.
    """
    launch = replace(launch or Launch(), **options)  # type: ignore[arg-type]
    run, launch = _locate(Path(target).expanduser().absolute(), launch)
    run.control.mkdir(parents=True, exist_ok=True)
    own = ProcessId.of()
    assert own is not None
    try:
        token = run.lock.take(own)
    except RunError:
        if if_live == "refuse":
            raise
        child = attach(run.path, launch=launch)
        if child is not None and not child.parked:
            return child
        if child is not None:
            child.launch = launch  # whoever has it go on starts it again if memory runs out
            if child.go_on():
                return child
            child.stop()  # it was about to end by itself
        return start(run.path, launch=launch, if_live="refuse", attempt=attempt, notch=notch)
    try:
        run.clear_requests()
        for log in run.path.glob("train.rank*.log"):
            log.unlink(missing_ok=True)
        old = run.read_status() if run.status_path.exists() else Status()
        offset = run.events_path.stat().st_size if run.events_path.exists() else 0
        run.write_status(
            Status(state="queued", kind=launch.kind, step=old.step, total=old.total, attempt=attempt, notch=old.notch if notch is None else notch, started=time.time())
        )
        if launch.steps_this_run or launch.until is not None:
            launch.ask(run)
        popen = spawn(run, launch, token)
        child = ProcessId.of(popen.pid)
        owner = run.lock.owner()
        if child is not None and owner is not None and owner.pid == own.pid:  # it may have adopted the lock already
            run.lock.take(child, token)
    except BaseException:  # an interrupt too: the run must not stay locked by a child that never started
        run.lock.release(token)
        raise
    return Child(run, launch, popen=popen, token=token, offset=offset)


def attach(target: Path | str, *, offset: int = 0, launch: Launch | None = None) -> Child | None:
    """The live child of a run, whoever started it; None if no process works on it. Events come from ``offset`` on."""
    run = RunDir(target)
    if not run.live():
        return None
    status = run.read_status()
    launch = launch or Launch(kind=status.kind)
    return Child(run, replace(launch, lower_plan=None), offset=offset)


def _locate(target: Path, launch: Launch) -> tuple[RunDir, Launch]:
    """The run directory of a target and its job file, which must be there."""
    if target.suffix in (".yaml", ".yml"):
        run, job = RunDir(target.parent), target
        launch = replace(launch, job=None if target == run.job_path(launch.kind) else target)
    else:
        run = RunDir(target)
        job = launch.job or run.job_path(launch.kind)
    if not job.is_file():
        raise RunError("run.no_job", f"There is no job to start at {job}.", f"A run of kind {launch.kind} needs {run.job_path(launch.kind).name} in its directory.")
    return run, launch
