"""Who works on a run: processes told apart by pid and create time, and a lock file that a dead owner loses."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ..errors import RunError

# The create time of a process is computed from the boot time, which drifts with clock corrections.
CREATE_TIME_SLACK = 3.0


@dataclass(frozen=True)
class ProcessId:
    """A process for certain: a pid alone is reused after its process has ended.

    created: Unix seconds of its start. ticks: the same in seconds since the machine's start, where the system tells (Linux):
    a clock that is set, or a machine that slept, moves the first and not the second.
    """

    pid: int
    created: float
    host: str
    ticks: float | None = None

    @classmethod
    def of(cls, pid: int | None = None) -> ProcessId | None:
        """The process with this pid (our own if None), or None if there is none."""
        pid = os.getpid() if pid is None else pid
        try:
            return cls(pid, psutil.Process(pid).create_time(), socket.gethostname(), _started(pid))
        except psutil.Error:
            return None

    @property
    def here(self) -> bool:
        """Whether it ran on this machine, so that its life can be looked at."""
        return self.host == socket.gethostname()

    def process(self) -> psutil.Process | None:
        """The live process itself; None if it has ended (a zombie too) or ran on another machine."""
        if not self.here:
            return None
        try:
            process = psutil.Process(self.pid)
            return process if self._is(process) and process.status() != psutil.STATUS_ZOMBIE else None
        except (psutil.NoSuchProcess, ValueError):  # a damaged file may name what is no process number
            return None
        except psutil.AccessDenied:
            return process

    def _is(self, process: psutil.Process) -> bool:
        ticks = _started(self.pid) if self.ticks is not None else None
        if ticks is not None:
            return ticks == self.ticks
        return abs(process.create_time() - self.created) <= CREATE_TIME_SLACK

    def alive(self) -> bool:
        return self.process() is not None


def _started(pid: int) -> float | None:
    """Clock ticks from the machine's start to the process's, on Linux; None elsewhere or when it has gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return float(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def write_atomic(path: Path, text: str) -> None:
    """The file holds either the old or the new text, never a part; retries while Windows has it open elsewhere."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # see errors.utf8
        for attempt in range(20):
            try:
                os.replace(temporary, path)
                return
            except PermissionError:
                if attempt == 19:
                    raise
                time.sleep(0.02)
    except OSError as error:
        error.filename = error.filename or str(path)  # a write that fails does not say where
        raise
    finally:
        temporary.unlink(missing_ok=True)  # a full disk leaves a part of it, every second anew


@contextmanager
def _guard(path: Path) -> Iterator[None]:
    """A short operating system lock around reading and replacing the lock file, so that two takers cannot both win.

    Where a file system has no such locks (some network shares) the taking goes on without.
    """
    with open(path, "a+b") as file:
        unlock = None
        try:
            if os.name == "nt":
                import msvcrt

                file.seek(0)
                msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
                unlock = lambda: (file.seek(0), msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1))  # noqa: E731
            else:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
                unlock = lambda: fcntl.flock(file, fcntl.LOCK_UN)  # noqa: E731
        except OSError:
            unlock = None
        try:
            yield
        finally:
            if unlock is not None:
                unlock()


class RunLock:
    """The lock file of a run directory: owner's pid, create time, host, and a token for handing it over.

    The parent takes it before it starts a child, names the child as owner, and the child adopts it with the token;
    at every moment the owner is a live process, or the lock is stale and anyone may take it.
    """

    def __init__(self, directory: Path, *, foreign_timeout: float = 120.0) -> None:
        self.path = Path(directory) / "run.lock"
        self.foreign_timeout = foreign_timeout

    def owner(self) -> ProcessId | None:
        """Who holds it, dead or alive; None if nobody does."""
        record = self._read()
        return None if record is None else ProcessId(record["pid"], record["created"], record["host"], record.get("ticks"))

    def held(self) -> bool:
        """Whether a live process holds it. On another machine: whether it was refreshed lately."""
        owner = self.owner()
        if owner is None:
            return False
        if owner.here:
            return owner.alive()
        try:
            return time.time() - self.path.stat().st_mtime < self.foreign_timeout
        except FileNotFoundError:
            return False

    def take(self, owner: ProcessId, token: str | None = None) -> str:
        """Make ``owner`` the holder and return the token; with the token of the present holder it is handed over.

        Raises RunError ``run.locked`` while another live process holds it.
        """
        with _guard(self.path.with_name("run.lock.guard")):
            record = self._read()
            handed_over = record is not None and token is not None and record.get("token") == token
            if not handed_over and self.held():
                raise RunError(
                    "run.locked",
                    f"The run {self.path.parent.name} is in use by process {record['pid']} on {record['host']}.",
                    "Wait for it, stop it, or attach to it; give the new run another name to have both.",
                )
            token = token or secrets.token_hex(8)
            write_atomic(self.path, json.dumps(asdict(owner) | {"token": token}))
            return token

    def refresh(self) -> None:
        """Tell other machines that the holder lives."""
        try:
            os.utime(self.path)
        except FileNotFoundError:
            pass

    def release(self, token: str) -> None:
        """Give it up; does nothing if it has passed to somebody else."""
        with _guard(self.path.with_name("run.lock.guard")):
            record = self._read()
            if record is not None and record.get("token") == token:
                self.path.unlink(missing_ok=True)

    def _read(self) -> dict | None:
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
            sound = isinstance(record["pid"], int) and isinstance(record["created"], int | float) and isinstance(record["host"], str)
            return record if sound else None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
