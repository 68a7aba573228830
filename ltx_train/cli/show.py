"""A run in a terminal: progress bars while it works, a summary when it ends."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..errors import LtxTrainError
from ..launch import Child, Outcome
from ..runs.events import (
    Event,
    LoraEvent,
    PhaseEvent,
    PlanEvent,
    ProgressEvent,
    SampleEvent,
    SnapshotEvent,
    StepEvent,
    WarningEvent,
)
from ..runs.exits import STOPPED


def console(*, stderr: bool = False) -> Console:
    """Where the verbs print: what users named (a clip "[1080p].mp4") is no markup, and in a pipe a line stays one line."""
    made = Console(stderr=stderr, markup=False, highlight=False, soft_wrap=True)
    return made if made.is_terminal else Console(stderr=stderr, markup=False, highlight=False, soft_wrap=True, width=200)


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


PLAIN_EVERY = 20
"""Without a terminal, one line every so many steps."""


class RunView:
    """Shows a child's events; in a pipe or with ``plain`` as lines, else as bars."""

    def __init__(self, screen: Console | None = None, *, plain: bool = False) -> None:
        self.console = screen or console(stderr=True)
        self.plain = plain or not self.console.is_terminal
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}", markup=False))
        self.progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console, disable=self.plain, transient=True)
        self.tasks: dict[str, TaskID] = {}

    def follow(self, child: Child) -> Outcome:
        """Show events until the child ends. Ctrl-C asks it to stop at the next safe point; a second one ends it."""
        self.console.print(f"{child.run.name}  {child.run.path}", style="bold")
        with self.progress:
            while True:
                try:
                    for event in child.follow():
                        self.event(event)
                    return child.wait()
                except KeyboardInterrupt:
                    self.console.print("Stopping at the next safe point; Ctrl-C again ends it at once.")
                    child.request_stop()
                    try:
                        for event in child.follow():
                            self.event(event)
                        return child.wait()
                    except KeyboardInterrupt:
                        return child.stop(deadline=0.0)

    def event(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self.step(event)
        elif isinstance(event, ProgressEvent):
            self.bar(event.phase, event.done, event.total, event.message)
        elif isinstance(event, PhaseEvent):
            self.phase(event)
        elif isinstance(event, SampleEvent):
            self.console.print(f"  sample of step {event.step}: {event.path}")
        elif isinstance(event, LoraEvent):
            self.console.print(f"  saved step {event.step}: {event.path} ({event.keys} modules)")
        elif isinstance(event, SnapshotEvent):
            self.console.print(f"  snapshot of step {event.step} ({event.reason})", style="dim")
        elif isinstance(event, PlanEvent):
            self.console.print(f"  plan: {event.message}")
        elif isinstance(event, WarningEvent):
            self.console.print(f"! {event.message}", style="yellow")
            if event.hint:
                self.console.print(f"  {event.hint}", style="dim")

    def step(self, event: StepEvent) -> None:
        loss = "not finite" if event.loss is None else f"{event.loss:.4f}"
        note = f"loss {loss} | mean {event.loss_average or float('nan'):.4f} | lr {event.learning_rate or 0:.2e} | {event.seconds or 0:.2f} s/step"
        if self.plain:
            if event.step % PLAIN_EVERY == 0 or event.step in (1, event.total):
                self.console.print(f"step {event.step}/{event.total} | {note}")
            return
        self.bar("train", event.step, event.total, note)

    def bar(self, name: str, done: int, total: int | None, note: str) -> None:
        if name not in self.tasks:
            self.tasks[name] = self.progress.add_task(name, total=total, note="")
        self.progress.update(self.tasks[name], completed=done, total=total, note=note)

    def phase(self, event: PhaseEvent) -> None:
        if event.state == "start" and event.phase not in self.tasks:
            self.tasks[event.phase] = self.progress.add_task(event.phase, total=None, note=event.message)
            if self.plain:
                self.console.print(event.phase)
        elif event.state == "end" and event.phase in self.tasks:
            self.progress.remove_task(self.tasks.pop(event.phase))


def show_error(error: LtxTrainError) -> int:
    """Print a user's error as one clear line and its hint; the exit code."""
    screen = console(stderr=True)
    screen.print(f"{'stopped' if error.exit_code == STOPPED else 'error'}: {error.message}", style="bold red")
    if error.hint:
        screen.print(error.hint)
    return error.exit_code
