"""The file of a run's events: appended a line at a time, read from a byte on, damaged lines left out."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import utf8
from .events import VERSION, Event, parse_line


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
            record.update(finite(event.model_dump(mode="json", exclude_defaults=True)))
            record.update({name: finite(getattr(event, name)) for name, info in type(event).model_fields.items() if info.is_required()})
            self._reopen_if_removed()
            self._file.write(utf8(json.dumps(record, ensure_ascii=False, allow_nan=False)) + b"\n")
            self._file.flush()
        return event

    def _reopen_if_removed(self) -> None:
        """Where the file or its folder was removed meanwhile, what follows goes into a new one: written to the old, nobody would read it."""
        try:
            os.stat(self.path)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file.close()
            self._file = open(self.path, "ab", buffering=0)
        except OSError:  # a share that is away for a moment: the write tells
            pass

    def close(self) -> None:
        with self._lock:
            self._file.close()


def finite(value: Any) -> Any:
    """JSON has no NaN: a number that is not finite becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
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
